"""`resume --dry-run`: it says what `resume` would change and submit, refuses what that refuses, and does nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cli.main import app
from cli.resume import preview_resume
from cli.submit import start_run
from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run.directory import Run, create_points
from tests.slurm.submit.test_resume import SWEEP, Queue, queue, run, submitted
from tests.support.events import write_event
from tests.support.tiny import make_run, write_config

__all__ = ["queue", "run"]


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """What is in a folder, with times and sizes."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in [folder, *folder.rglob("*")]}


def preview(run: Run, *overrides: str, slurm: bool = True, update_code: bool = False, scripts: bool = False) -> str:
    """What is printed, while nothing is written."""
    console, before = PlainConsole(width=200, record=True), files(run.path)
    preview_resume(
        run, overrides, update_code, "slurm" if slurm else "local", bool(overrides), console, scripts=scripts
    )
    assert files(run.path) == before, "a dry run writes nothing"
    return console.export_text()


def test_changes_and_jobs_are_named_and_nothing_is_done(run: Run, queue: Queue) -> None:
    submitted(run, "train", "1")
    submitted(run, "evaluate", "2", "afterok", "1")
    queue.set("1", "PENDING", "Priority")
    queue.set("2", "PENDING", "Dependency")
    shown = preview(run, "stages.train.nodes=2", "site.partition=low", scripts=True)
    assert "stages.train.nodes: 1 → 2\n" in shown and "site.partition: None → low\n" in shown
    for stage, job in (("train", "1"), ("evaluate", "2")):
        assert f"{stage:9} job {job} would be cancelled\n" in shown
    assert "train     job new-1\n" in shown and "evaluate  job new-2, after new-1\n" in shown
    assert "shard     done: " in shown
    assert "train     2 × 2 = 4 processes, 01:00:00" in shown and "requests partition low" in shown
    assert "#!/bin/bash" not in preview(run, "stages.train.nodes=2"), "scripts come with --scripts"
    scripts = shown.split("# ---- on Slurm: ")[1:]
    assert [script.split("\n")[0] for script in scripts] == ["train", "evaluate"]
    assert "#SBATCH --nodes=2\n" in scripts[0] and "#SBATCH --partition=low\n" in scripts[0]
    assert not queue.after and {state.state for state in queue.states.values()} == {"PENDING"}
    assert Run.open(run.path).config.stages.train.max_nodes == 1
    shown = preview(run)
    assert "would change\nnothing\n" in shown and "train     job 1 pending\n" in shown and "new-" not in shown


def test_a_failed_chain_is_submitted_again(run: Run, queue: Queue) -> None:
    submitted(run, "train", "1")
    submitted(run, "evaluate", "2", "afterok", "1")
    write_event(run, "started", "train", job_id="1")
    write_event(run, "failed", "train", job_id="1", cause="hang", exit_code=25)
    run.write_request(run.cancelled_file)
    queue.set("1", "FAILED")
    queue.set("2", "PENDING", "DependencyNeverSatisfied")
    shown = preview(run)
    assert "cancelled: the request would be removed\n" in shown and "evaluate  job 2 would be cancelled\n" in shown
    assert "train     job new-1\n" in shown and "evaluate  job new-2, after new-1\n" in shown
    assert run.cancelled_file.exists() and queue.states["2"].state == "PENDING"


def test_points_of_a_sweep_that_are_not_made_yet(tmp_path: Path, run: Run, queue: Queue) -> None:
    swept = make_run(tmp_path, "swept", (SWEEP,), run.data_dir)
    assert "train     job new-1: array over 2 points\n" in preview(swept, "stages.train.nodes=2")
    assert not (swept.path / "points").exists()
    create_points(swept)
    shown = preview(swept, "stages.train.nodes=2", scripts=True)
    assert "evaluate  job new-2: array over 2 points, after new-1, task by task\n" in shown
    assert "train, 2 tasks\n" in shown and "#SBATCH --nodes=2\n" in shown


def test_it_warns_as_a_dry_run_of_the_config_does(run: Run, queue: Queue, capsys: pytest.CaptureFixture[str]) -> None:
    short = "stages.train.time: 00:02:00 is short: Slurm signals 90 s before the end (site.signal_s)"
    assert short in preview(run, "stages.train.time=00:02:00") and short not in preview(run)
    assert "hunter2" not in preview(run, "site.setup=[export TOKEN=hunter2]")
    run.apply_overrides(["stages.train.time=00:02:00"])
    start_run(run, "slurm", is_resumed=True)
    assert short in capsys.readouterr().out, "resume itself says so, too"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["site.pass=[NOT_THERE]"], "site.pass: NOT_THERE not set"),
        (["site.mem_gb=4", "stages.train.sbatch={mem-per-cpu: 1G}"], "mem_gb and sbatch.mem-per-cpu exclude"),
        (["optimizer.lr=0.5"], "resume cannot change it"),
        (["train.stepps=3"], "there is no such key"),
    ],
)
def test_what_resume_refuses_is_refused_before_anything_is_recorded(
    run: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch, overrides: list[str], words: str
) -> None:
    (run.checkpoints_dir / "step-00000007").mkdir()
    before = files(run.path)
    for more in ([], ["--dry-run"]):
        monkeypatch.setattr("cli.resume.choose_executor", lambda executor, run: "slurm")
        with pytest.raises(UserError) as refused:
            app(["resume", str(run.path), *overrides, *more], standalone_mode=False)
        assert words in str(refused.value)
    changed = {path.name for path, seen in files(run.path).items() if before.get(path) != seen}
    assert not changed - {".creating", run.path.name}


def test_on_this_machine_stages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    shown = preview(run, "train.steps=40", slurm=False)
    assert "train.steps: 30 → 40\n" in shown and "shard     done: " in shown and "train     would run: 0/40" in shown
    assert "2 processes of train with train.threads=" in shown and "#!/bin/bash" not in shown
    assert f"{run.code_dir} would be replaced" in preview(run, slurm=False, update_code=True)


def test_the_command_line_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["submit.py", "resume"])
    before = files(run.path)
    words = ["resume", "runs/tiny", "train.steps=40", "--dry-run", "--update-code", "--executor", "local"]
    app(words, standalone_mode=False)
    assert "train.steps: 30 → 40\n" in capsys.readouterr().out and files(run.path) == before
