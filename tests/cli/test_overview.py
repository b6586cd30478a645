"""`status` without a RUN: the runs of a folder, with one question to Slurm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli import status as status_command
from cli.main import app
from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.config.stages import STAGES
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.query.job_states import JobState
from slurm.query.run_jobs import SubmittedJob
from tests.support.events import write_event
from tests.support.tiny import write_config


def test_all_runs_with_one_question_to_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    names = ("local", "done", "waits", "also")
    _, done, waits, also = (Run.create(load_config(write_config(tmp_path, name))) for name in names)
    for run in (done, waits, also):
        write_event(run, "submitted", "prepare", job_id=run.path.name, executor="slurm")
    for work in map(load_stage_module, STAGES):
        for name in {"missing_outputs", "quick_missing_outputs"} & set(dir(work)):
            monkeypatch.setattr(work, name, lambda run: None if run.path == done.path else "nothing there")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/config.yaml").write_text("run: {nam: x}")
    asked: list[set[Path]] = []

    def jobs_of(runs: Sequence[Run]) -> list[SubmittedJob]:
        asked.append({run.path for run in runs})
        return [SubmittedJob(run.path, "prepare", run.path.name, JobState("7", "PENDING", "Priority")) for run in runs]

    monkeypatch.setattr(status_command, "find_run_jobs", jobs_of)
    monkeypatch.chdir(tmp_path)
    console = PlainConsole(width=120, record=True)
    status_command.print_runs(Path("runs"), console)
    shown = console.export_text()
    assert asked == [{waits.path, also.path}], "once, and not for what is done or never was Slurm's"
    for line in (
        "runs/local +prepare +waiting",
        "runs/done +evaluate +done",
        "runs/waits +prepare +pending",
        "runs/also +prepare +pending",
        "runs/broken cannot be read: .*run.name is missing",
    ):
        assert re.search(f"^{line}", shown, re.M), (line, shown)


def test_a_live_table_needs_a_run() -> None:
    with pytest.raises(UserError) as error:
        app(["status", "--watch"])
    assert error.value.code == "cli.missing_run"
