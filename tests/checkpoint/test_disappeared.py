"""Tests that a run does not silently restart from scratch if its checkpoints have disappeared."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import (
    describe_missing_checkpoints,
    find_newest_step,
    list_checkpoint_steps,
    set_checkpoint_aside,
)
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.supervise.attempt_end import read_progress_marker
from tests.support.events import read_event_lines, write_event
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank, write_config

FOUR_STEPS = ("train.steps=4", "checkpoint.every_steps=2")


@pytest.mark.story
@pytest.mark.parametrize("pattern", ["checkpoints", "checkpoints/*"])
def test_run_does_not_restart_from_scratch_if_its_checkpoints_disappear(tmp_path: Path, pattern: str) -> None:
    """The train stage fails because the run has metrics. After metrics.jsonl is removed, it restarts from scratch."""
    run = make_run(tmp_path, overrides=FOUR_STEPS)
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    metrics = run.metrics_file.read_bytes()
    for folder in list(run.path.glob(pattern)):
        shutil.rmtree(folder)
    message = str(load_stage_module(run, "train").describe_missing_outputs(run))
    assert "step 4" in message and str(run.checkpoints_dir) in message and str(run.metrics_file) in message
    with pytest.raises(AssertionError, match=f"CheckpointError: {re.escape(message)}"):
        run_ranks(2, run_stage_on_rank, run.path, "train")
    assert run.metrics_file.read_bytes() == metrics and not read_event_lines(run, "train", "began_anew")
    run.metrics_file.unlink()  # as the message says
    assert describe_missing_checkpoints(run) is None
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert find_newest_step(run.checkpoints_dir) == 4 and len(list(read_jsonl(run.metrics_file))) == 4
    assert [event["event"] for event in read_event_lines(run, "train")].count("began_anew") == 1


def test_checkpoints_are_missing_only_if_one_was_saved_or_restored_since_the_last_restart_from_scratch(
    tmp_path: Path,
) -> None:
    """The event `began_anew` is written at a restart from scratch."""
    run = make_run(tmp_path, overrides=FOUR_STEPS)
    write_event(run, "saved", "train", step=2, seconds=1.0)
    write_event(run, "began_anew", "train")
    run.metrics_file.write_text("{}\n")
    assert describe_missing_checkpoints(run) is None
    write_event(run, "restored", "train", step=2, seconds=1.0, lost_steps=0)  # a user has copied a checkpoint back
    assert "step 2" in str(describe_missing_checkpoints(run))
    (run.checkpoints_dir / "damaged-step-00000002").mkdir(parents=True)
    assert describe_missing_checkpoints(run) is None, "damaged checkpoints must be reported only by the restore"


def test_each_save_after_a_restart_from_scratch_is_progress(tmp_path: Path) -> None:
    """Otherwise, each attempt would count as one without progress until step 50,000 is reached again."""
    run = make_run(tmp_path, overrides=FOUR_STEPS)
    write_event(run, "saved", "train", step=50_000, seconds=1.0)
    write_event(run, "began_anew", "train")
    markers = [read_progress_marker(run, "train")]
    for step in (100, 200, 300):
        write_event(run, "saved", "train", step=step, seconds=1.0)
        markers.append(read_progress_marker(run, "train"))
    assert len(set(markers)) == 4


def test_missing_checkpoints_are_reported_after_a_change_of_the_config(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=FOUR_STEPS)
    write_event(run, "saved", "train", step=2, seconds=1.0)
    run.metrics_file.write_text("{}\n")
    for override in ("stages.train.time=00:30:00", "optimizer.lr=0.5"):
        changed_run = Run.create(load_config(write_config(tmp_path), (*FOUR_STEPS, override)))
        assert changed_run.path == run.path and describe_missing_checkpoints(changed_run) is not None


def test_run_does_not_restart_from_scratch_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    """The run restarts from scratch only after the user has removed the files that the error message names."""
    run = make_run(tmp_path, overrides=FOUR_STEPS)
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    for step in list_checkpoint_steps(run.checkpoints_dir):
        set_checkpoint_aside(run.checkpoints_dir, step)
    with pytest.raises(AssertionError, match=r"(?s)CheckpointError: .*remove .*damaged-\* and .*metrics.jsonl"):
        run_ranks(2, run_stage_on_rank, run.path, "train")
    assert not read_event_lines(run, "train", "began_anew")
    for folder in run.checkpoints_dir.glob("damaged-*"):
        shutil.rmtree(folder)
    run.metrics_file.unlink()
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert len(read_event_lines(run, "train", "began_anew")) == 1
