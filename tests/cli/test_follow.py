"""Test which events of a stage submit.py prints while it follows the stage."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.base.console import PlainConsole
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from slurm.submit import local_runner
from tests.support.events import write_event
from tests.support.tiny import write_config


@pytest.mark.parametrize("is_terminal", [False, True])
def test_restores_and_retries_are_printed_once_when_they_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Only events of this stage that are new are printed, including those just before the end of the stage."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    monkeypatch.setattr(local_runner, "LIVE_INTERVAL_S", 0.0)
    run = Run.create(load_config(write_config(tmp_path)))
    write_event(run, "restored", "train", step=7, lost_steps=3)
    file = io.StringIO()
    console = PlainConsole(file=file, width=80, force_terminal=is_terminal, _environ={"TERM": "xterm"})

    def write_events() -> Iterator[bool]:
        """Write events between the polls of `follow_stage`. Yield whether the stage is running."""
        write_event(run, "damaged", "train", step=28, reason="step-00000028/NOTES.txt is not listed")
        yield True
        assert "is not listed" in file.getvalue(), "the message must be printed while the stage is running"
        write_event(run, "restored", "train", step=21, seconds=0.1, lost_steps=5)
        write_event(run, "restored", "evaluate", step=14, seconds=0.1, lost_steps=5)
        yield True
        write_event(run, "saved", "train", step=28)
        write_event(run, "retried", "train", job_id="1", cause="crashed")
        write_event(run, "restored", "train", step=28, seconds=0.1, lost_steps=0)
        yield False

    is_running = write_events()
    local_runner.follow_stage(run, "train", lambda: next(is_running), console)
    output = file.getvalue()
    lines = [line[line.index("train  ") :] for line in output.splitlines() if "step " in line or "after" in line]
    assert [" ".join(line.split()) for line in lines] == [
        "train step 28 is damaged and was set aside: step-00000028/NOTES.txt is not listed",
        "train restored step 21; repeated steps: 5",
        "train restarts automatically after: crashed",
        "train restored step 28",
    ], output
