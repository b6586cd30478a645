"""Test `status` without RUN. It prints one line for each run of a folder, and queries Slurm only once."""

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
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.query.job_states import JobState
from slurm.query.run_jobs import SubmittedJob
from tests.support.events import write_event
from tests.support.tiny import write_config


def test_all_unfinished_slurm_runs_are_queried_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is not queried about runs that are done or were never submitted to Slurm. A broken config is reported."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    names = ("local", "done", "pending-1", "pending-2")  # the run `local` has no Slurm job
    _, done_run, first_pending_run, second_pending_run = (
        Run.create(load_config(write_config(tmp_path, name))) for name in names
    )
    for run in (done_run, first_pending_run, second_pending_run):
        write_event(run, "submitted", "prepare", job_id=run.path.name, executor="slurm")
    for module in (load_stage_module(done_run, stage) for stage in done_run.config.active_stages):
        for name in {"describe_missing_outputs", "describe_missing_outputs_quickly"} & set(dir(module)):
            monkeypatch.setattr(module, name, lambda run: None if run.path == done_run.path else "no outputs")
    (tmp_path / "runs/broken").mkdir()
    (tmp_path / "runs/broken/config.yaml").write_text("run: {nam: x}")
    queries: list[set[Path]] = []

    def find_jobs(runs: Sequence[Run]) -> list[SubmittedJob]:
        queries.append({run.path for run in runs})
        return [SubmittedJob(run.path, "prepare", run.path.name, JobState("7", "PENDING", "Priority")) for run in runs]

    monkeypatch.setattr(status_command, "find_run_jobs", find_jobs)
    monkeypatch.chdir(tmp_path)
    console = PlainConsole(width=120, record=True)
    status_command.print_runs(Path("runs"), console)
    output = console.export_text()
    assert queries == [{first_pending_run.path, second_pending_run.path}]
    for pattern in (
        "runs/local +prepare +waiting",
        "runs/done +evaluate +done",
        "runs/pending-1 +prepare +pending",
        "runs/pending-2 +prepare +pending",
        "runs/broken cannot be read: .*run.name is missing",
    ):
        assert re.search(f"^{pattern}", output, re.M), (pattern, output)


def test_watch_requires_a_run() -> None:
    with pytest.raises(UserError) as error:
        app(["status", "--watch"])
    assert error.value.code == "cli.missing_run"
