"""Checkpoints that went away: a purge, a link, a mount that is not there. A training never begins anew by itself."""

from __future__ import annotations

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
from slurm.query.stop_causes import read_progress_marker
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, stage_rank, write_config

STEPS = ("train.steps=4", "checkpoint.every_steps=2")


@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/*"])
def test_no_training_begins_anew_by_itself(tmp_path: Path, what: str) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    kept = run.metrics_file.read_bytes()
    for folder in list(run.path.glob(what)):
        shutil.rmtree(folder)
    words = f"step 4 was saved, and {run.checkpoints_dir} has no checkpoint"
    assert words in str(load_stage_module("train").missing_outputs(run)), "status says so"
    with pytest.raises(AssertionError, match=rf"(?s)CheckpointError: {words}.*to train from zero .* remove "):
        run_ranks(2, stage_rank, run.path, "train")
    assert run.metrics_file.read_bytes() == kept and not run.read_events("train", "began_anew")
    run.metrics_file.unlink()  # the way out that is told
    assert describe_missing_checkpoints(run) is None
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert find_newest_step(run.checkpoints_dir) == 4 and len(list(read_jsonl(run.metrics_file))) == 4
    assert [event["event"] for event in run.read_events("train")].count("began_anew") == 1


def test_before_the_first_save_a_training_begins_where_it_stands(tmp_path: Path) -> None:
    """Also one that began anew: its metrics are there, and what was saved was another one's."""
    run = make_run(tmp_path, overrides=STEPS)
    run.event("saved", "train", step=2, seconds=1.0)
    run.event("began_anew", "train")
    run.metrics_file.write_text("{}\n")
    assert describe_missing_checkpoints(run) is None
    run.event("restored", "train", step=2, seconds=1.0, lost_steps=0)  # a copy was put back
    assert "step 2 was saved" in str(describe_missing_checkpoints(run))
    (run.checkpoints_dir / "damaged-step-00000002").mkdir(parents=True)
    assert describe_missing_checkpoints(run) is None, "the restore has words of its own"


def test_what_began_anew_gets_ahead_with_each_save(tmp_path: Path) -> None:
    """Else its first crash would end the chain: nothing new before the step that the other one had reached."""
    run = make_run(tmp_path, overrides=STEPS)
    run.event("saved", "train", step=50_000, seconds=1.0)
    run.event("began_anew", "train")
    stood = []
    for step in (100, 200, 300):
        stood.append(read_progress_marker(run, "train"))
        run.event("saved", "train", step=step, seconds=1.0)
    assert len({*stood, read_progress_marker(run, "train")}) == 4


def test_a_corrected_config_is_no_leave_to_begin_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    run.event("saved", "train", step=2, seconds=1.0)
    run.metrics_file.write_text("{}\n")
    for key in ("stages.train.time=00:30:00", "optimizer.lr=0.5"):
        corrected = Run.create(load_config(write_config(tmp_path), (*STEPS, key)))
        assert corrected.path == run.path and describe_missing_checkpoints(corrected) is not None


def test_damaged_checkpoints_alone_begin_nothing(tmp_path: Path) -> None:
    """Nor is it said that something began; who removes what is told begins anew."""
    run = make_run(tmp_path, overrides=STEPS)
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    for step in list_checkpoint_steps(run.checkpoints_dir):
        set_checkpoint_aside(run.checkpoints_dir, step)
    with pytest.raises(AssertionError, match=r"(?s)no checkpoint is intact.* remove .*damaged-\* and .*metrics.jsonl"):
        run_ranks(2, stage_rank, run.path, "train")
    assert not run.read_events("train", "began_anew")
    for folder in run.checkpoints_dir.glob("damaged-*"):
        shutil.rmtree(folder)
    run.metrics_file.unlink()
    assert run_ranks(2, stage_rank, run.path, "train") == [ExitCode.DONE] * 2
    assert len(run.read_events("train", "began_anew")) == 1
