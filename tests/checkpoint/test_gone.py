"""Checkpoints that went away: a purge, a link, a mount that is not there. A training never begins anew by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.base.errors import Exit
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.saved import gone, newest_step
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.stages import load
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, stage_rank, write_config

STEPS = ("train.steps=4", "checkpoint.every_steps=2")


@pytest.mark.parametrize("what", ["checkpoints", "checkpoints/*"])
def test_no_training_begins_anew_by_itself(tmp_path: Path, what: str) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    assert run_ranks(2, stage_rank, run.path, "train") == [Exit.DONE] * 2
    kept = run.metrics.read_bytes()
    for folder in list(run.path.glob(what)):
        shutil.rmtree(folder)
    words = f"step 4 was saved, and {run.checkpoints} has no checkpoint"
    assert words in str(load("train").missing(run)), "status says so"
    with pytest.raises(AssertionError, match=rf"(?s)CheckpointError: {words}.*to train from zero .* remove "):
        run_ranks(2, stage_rank, run.path, "train")
    assert run.metrics.read_bytes() == kept and not run.read_events("train", "began_anew")
    run.metrics.unlink()  # the way out that is told
    assert gone(run) is None
    assert run_ranks(2, stage_rank, run.path, "train") == [Exit.DONE] * 2
    assert newest_step(run.checkpoints) == 4 and len(list(read_jsonl(run.metrics))) == 4
    assert [event["event"] for event in run.read_events("train")].count("began_anew") == 1


def test_before_the_first_save_a_training_begins_where_it_stands(tmp_path: Path) -> None:
    """Also one that began anew: its metrics are there, and what was saved was another one's."""
    run = make_run(tmp_path, overrides=STEPS)
    run.event("saved", "train", step=2, seconds=1.0)
    run.event("began_anew", "train")
    run.metrics.write_text("{}\n")
    assert gone(run) is None
    run.event("saved", "train", step=2, seconds=1.0)
    assert gone(run) is not None
    (run.checkpoints / "damaged-step-00000002").mkdir(parents=True)
    assert gone(run) is None, "the restore has words of its own"


def test_a_corrected_config_means_to_begin_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=STEPS)
    run.event("saved", "train", step=2, seconds=1.0)
    run.metrics.write_text("{}\n")
    run.change(["stages.train.time=00:30:00"])
    assert gone(run) is not None, "not resume, which may change what shapes no result"
    corrected = Run.create(load_config(write_config(tmp_path), (*STEPS, "optimizer.lr=0.5")))
    assert corrected.path == run.path and gone(corrected) is None
