"""How much a dry run prints, and what it says of the inputs and of this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import submit
from tests.support.tiny import write_config


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints, typed beside a tiny config."""
    write_config(tmp_path)
    monkeypatch.chdir(tmp_path)

    def type_(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["submit.py", *words])
        with pytest.raises(SystemExit) as end:
            submit.app(list(words))
        assert end.value.code == 0
        return capsys.readouterr().out

    return type_


def test_the_plan_stands_last_where_it_is_on_the_screen(typed: Callable[..., str]) -> None:
    whole = typed("tiny.yaml", "--dry-run")
    above, plan = whole.split("# ---- the plan\n")
    assert len(plan.splitlines()) <= 20 and plan.startswith("run       runs/tiny\n") and "python -m slurm train" in plan
    assert above.count("#!/bin/bash") == 5 and "sequence_length:" in above
    assert "#!/bin/bash" not in typed("tiny.yaml", "--dry-run", "--executor", "local")
    assert not Path("runs").exists()


def test_it_says_how_much_there_is_to_read(typed: Callable[..., str]) -> None:
    size = Path("corpus.jsonl").stat().st_size
    assert f"\ninputs    1 file, {size:,} bytes\n" in typed("tiny.yaml", "--dry-run")
    Path("more.jsonl").write_text('{"text": "a"}\n')
    assert f"\ninputs    2 files, {size + 14:,} bytes\n" in typed("tiny.yaml", "--dry-run", "data.source='*.jsonl'")
    assert "\ninputs" not in typed("tiny.yaml", "--dry-run", "data.source=python-stdlib"), "nobody's own"


def test_more_processes_than_cores_are_told(typed: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3})
    assert "note " not in typed("tiny.yaml", "--dry-run", "--executor", "local"), "two on two"
    for words, told in (
        (["stages.train.tasks_per_node=4"], "train's 4 processes, each of train.threads=1, share 2 CPU cores"),
        (["train.threads=2"], "train's 2 processes, each of train.threads=2, share 2 CPU cores"),
    ):
        assert told in typed("tiny.yaml", "--dry-run", "--executor", "local", *words)
