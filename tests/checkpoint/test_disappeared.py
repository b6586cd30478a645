"""Checkpoints that disappeared (purged, a link, a missing mount): a training never restarts from scratch by itself."""

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
from tests.support.tiny import make_run, stage_rank, write_config

STEPS = ("train.steps=4", "checkpoint.every_steps=2")


@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/*"])
def test_a_training_does_not_restart_from_scratch_if_its_checkpoints_disappear(tmp_path: Path, what: str) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    metrics = run.metrics_file.read_bytes()
    for folder in list(run.path.glob(what)):
        shutil.rmtree(folder)
    message = str(load_stage_module("train").missing_outputs(run))
    assert "step 4" in message and str(run.checkpoints_dir) in message and str(run.metrics_file) in message
    with pytest.raises(AssertionError, match=f"CheckpointError: {re.escape(message)}"):
        run_ranks(2, stage_rank, run.path, "train")
    assert run.metrics_file.read_bytes() == metrics and not read_event_lines(run, "train", "began_anew")
    run.metrics_file.unlink()  # as the message suggests
    assert describe_missing_checkpoints(run) is None
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert find_newest_step(run.checkpoints_dir) == 4 and len(list(read_jsonl(run.metrics_file))) == 4
    assert [event["event"] for event in read_event_lines(run, "train")].count("began_anew") == 1


def test_before_the_first_save_a_training_begins_where_it_stands(tmp_path: Path) -> None:
    """Also one that began anew: its metrics are there, and what was saved was another one's."""
    run = make_run(tmp_path, overrides=STEPS)
    write_event(run, "saved", "train", step=2, seconds=1.0)
    write_event(run, "began_anew", "train")
    run.metrics_file.write_text("{}\n")
    assert describe_missing_checkpoints(run) is None
    write_event(run, "restored", "train", step=2, seconds=1.0, lost_steps=0)  # a copy was put back
    assert "step 2 was saved" in str(describe_missing_checkpoints(run))
    (run.checkpoints_dir / "damaged-step-00000002").mkdir(parents=True)
    assert describe_missing_checkpoints(run) is None, "the restore has words of its own"


def test_what_began_anew_gets_ahead_with_each_save(tmp_path: Path) -> None:
    """Else its first crash would end the chain: nothing new before the step that the other one had reached."""
    run = make_run(tmp_path, overrides=STEPS)
    write_event(run, "saved", "train", step=50_000, seconds=1.0)
    write_event(run, "began_anew", "train")
    stood = []
    for step in (100, 200, 300):
        stood.append(read_progress_marker(run, "train"))
        write_event(run, "saved", "train", step=step, seconds=1.0)
    assert len({*stood, read_progress_marker(run, "train")}) == 4


def test_a_corrected_config_is_no_leave_to_begin_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    write_event(run, "saved", "train", step=2, seconds=1.0)
    run.metrics_file.write_text("{}\n")
    for key in ("stages.train.time=00:30:00", "optimizer.lr=0.5"):
        corrected = Run.create(load_config(write_config(tmp_path), (*STEPS, key)))
        assert corrected.path == run.path and describe_missing_checkpoints(corrected) is not None


def test_a_training_does_not_start_from_scratch_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    """No event says that it started; after the user removed what the message names, it starts from scratch."""
    run = make_run(tmp_path, overrides=STEPS)
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    for step in list_checkpoint_steps(run.checkpoints_dir):
        set_checkpoint_aside(run.checkpoints_dir, step)
    with pytest.raises(AssertionError, match=r"(?s)CheckpointError: .*remove .*damaged-\* and .*metrics.jsonl"):
        run_ranks(2, stage_rank, run.path, "train")
    assert not read_event_lines(run, "train", "began_anew")
    for folder in run.checkpoints_dir.glob("damaged-*"):
        shutil.rmtree(folder)
    run.metrics_file.unlink()
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert len(read_event_lines(run, "train", "began_anew")) == 1
