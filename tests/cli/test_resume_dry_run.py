"""Test `resume --dry-run`. It prints what `resume` would change and submit, and writes nothing.

It reports the same errors as `resume`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Literal

import pytest

from cli.main import app
from cli.resume import preview_resume
from cli.submit import start_run
from pipeline.base.console import PlainConsole
from pipeline.config.read import load_config
from pipeline.run.directory import Run, create_points
from tests.slurm.submit.test_resume import SWEEP, FakeQueue, queue, run, write_submitted
from tests.support.errors import raises_error
from tests.support.events import write_event
from tests.support.tiny import make_run, write_config

__all__ = ["queue", "run"]  # fixtures


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return, by path, the modification time (ns) and the size (bytes) of a folder and of all files in it."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def run_preview(run: Run, *overrides: str, slurm: bool = True, update_code: bool = False, scripts: bool = False) -> str:
    """Return the output of a dry run of `resume`, and check that it writes nothing.

    If not `slurm`, the executor is `local`. The other arguments are options of the command.
    """
    console = PlainConsole(width=200, record=True)
    files_before = list_files(run.path)
    executor: Literal["slurm", "local"] = "slurm" if slurm else "local"
    replaces_pending = bool(overrides)
    preview_resume(run, overrides, update_code, executor, replaces_pending, console, scripts=scripts)
    assert list_files(run.path) == files_before
    return console.export_text()


def test_a_dry_run_lists_changes_and_jobs(run: Run, queue: FakeQueue) -> None:
    """Jobs 1 and 2 are pending. With changes of keys, they would be replaced; without changes, they would stay."""
    write_submitted(run, "train", "1")
    write_submitted(run, "evaluate", "2", "afterok", "1")
    queue.set_state("1", "PENDING", "Priority")
    queue.set_state("2", "PENDING", "Dependency")
    output = run_preview(run, "stages.train.nodes=2", "site.partition=low", scripts=True)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert any(line.endswith("stages.train.nodes: 1 → 2") for line in lines)
    assert any(line.endswith("site.partition: None → low") for line in lines)
    assert {"train job 1 would be cancelled", "evaluate job 2 would be cancelled"} <= {*lines}
    assert {"train job new-1", "evaluate job new-2, after new-1"} <= {*lines}
    assert any(line.startswith("shard done: ") for line in lines)
    [resources] = [line for line in lines if line.startswith("train 2 × 2 = 4 processes, 01:00:00")]
    assert "partition low" in resources
    assert "#!/bin/bash" not in run_preview(run, "stages.train.nodes=2"), "scripts must be printed only with --scripts"
    scripts = output.split("# ---- on Slurm: ")[1:]
    assert [script.split("\n")[0] for script in scripts] == ["train", "evaluate"]
    assert "#SBATCH --nodes=2\n" in scripts[0] and "#SBATCH --partition=low\n" in scripts[0]
    assert not queue.dependencies and {state.state for state in queue.states.values()} == {"PENDING"}
    assert Run.open(run.path).config.stages.train.max_nodes == 1
    output = run_preview(run)
    assert "would change\nnothing\n" in output and "train     job 1 pending\n" in output and "new-" not in output


def test_a_dry_run_lists_the_new_jobs_of_a_failed_chain(run: Run, queue: FakeQueue) -> None:
    """Train job 1 has failed, and a user has cancelled the run.

    The dry run must neither cancel the waiting job 2 nor remove the cancellation of the run.
    """
    write_submitted(run, "train", "1")
    write_submitted(run, "evaluate", "2", "afterok", "1")
    write_event(run, "started", "train", job_id="1")
    write_event(run, "failed", "train", job_id="1", cause="hang", exit_code=25)
    run.write_request(run.cancelled_file)
    queue.set_state("1", "FAILED")
    queue.set_state("2", "PENDING", "DependencyNeverSatisfied")
    output = run_preview(run)
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert any(line.startswith("cancelled: ") for line in lines), "the removal of the cancellation must be listed"
    assert {"evaluate job 2 would be cancelled", "train job new-1", "evaluate job new-2, after new-1"} <= {*lines}
    assert run.cancelled_file.exists() and queue.states["2"].state == "PENDING"


def test_a_dry_run_lists_the_arrays_of_a_sweep_without_points(tmp_path: Path, run: Run, queue: FakeQueue) -> None:
    sweep = make_run(tmp_path, "sweep", (SWEEP,), run.data_dir)
    assert "job new-1: array over 2 points\n" in run_preview(sweep, "stages.train.nodes=2")
    assert not (sweep.path / "points").exists()
    create_points(sweep)
    output = run_preview(sweep, "stages.train.nodes=2", scripts=True)
    assert "job new-2: array over 2 points, after new-1" in output
    assert "train, 2 tasks\n" in output and "#SBATCH --nodes=2\n" in output


def test_a_dry_run_reports_a_time_limit_that_is_too_short(
    run: Run, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = re.compile(r"stages\.train\.time: 00:02:00 .* 90 s ")
    assert warning.search(run_preview(run, "stages.train.time=00:02:00")) and not warning.search(run_preview(run))
    assert "hunter2" not in run_preview(run, "site.setup=[export TOKEN=hunter2]"), "a secret must not be printed"
    run.apply_overrides(["stages.train.time=00:02:00"])
    start_run(run, "slurm", is_resumed=True)
    assert warning.search(capsys.readouterr().out), "`resume` must also report the short time limit"


@pytest.mark.parametrize(
    ("overrides", "code", "expected_texts"),
    [
        (["site.pass=[UNSET_VARIABLE]"], "site.variable_not_set", ["site.pass", "UNSET_VARIABLE"]),
        (
            ["site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}"],
            "slurm.conflicting_options",
            ["mem_gb", "sbatch.mem-per-cpu"],
        ),
        (["optimizer.lr=0.5"], "resume.unchangeable_key", ["optimizer.lr", "0.5"]),
        (["train.stepps=3"], "config.unknown_key", ["train.stepps"]),
    ],
)
def test_resume_and_its_dry_run_fail_before_anything_is_recorded(
    run: Run,
    queue: FakeQueue,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    code: str,
    expected_texts: list[str],
) -> None:
    """The run has a checkpoint, so `resume` cannot change optimizer.lr."""
    monkeypatch.setattr("cli.resume.choose_executor", lambda executor, run: "slurm")
    (run.checkpoints_dir / "step-00000007").mkdir()
    files_before = list_files(run.path)
    for options in ([], ["--dry-run"]):
        with raises_error(code, *expected_texts):
            app(["resume", str(run.path), *overrides, *options], standalone_mode=False)
    changed_names = {path.name for path, stat in list_files(run.path).items() if files_before.get(path) != stat}
    assert not changed_names - {".creating", run.path.name}  # `resume` creates only the lock file


def test_a_local_dry_run_lists_stages(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    output = run_preview(run, "train.steps=40", slurm=False)
    assert "train.steps: 30 → 40\n" in output
    assert re.search(r"^shard +done: ", output, re.MULTILINE)
    assert re.search(r"^train +would run: 0/40", output, re.MULTILINE)
    assert "train.threads=" in output, "a note about two ranks on one core is missing"
    assert "#!/bin/bash" not in output
    assert f"{run.code_dir} would be replaced" in run_preview(run, slurm=False, update_code=True)


def test_resume_has_the_option_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["submit.py", "resume"])
    files_before = list_files(run.path)
    arguments = ["resume", "runs/tiny", "train.steps=40", "--dry-run", "--update-code", "--executor", "local"]
    app(arguments, standalone_mode=False)
    assert "train.steps: 30 → 40\n" in capsys.readouterr().out and list_files(run.path) == files_before
