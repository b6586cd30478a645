"""What is said of a training from outside: how much it read, and that a later end takes up the learning rate again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.data.manifest import load_manifest
from pipeline.run.directory import Run
from pipeline.run.stages import list_resume_notes, load_stage_module
from pipeline.train.lr_schedule import compute_learning_rate
from tests.support.tiny import make_run


def trained(run: Run, step: int, steps: int) -> None:
    """Its metrics as a training of `steps` leaves them after `step`."""
    lr = compute_learning_rate(run.config.optimizer, step, steps)
    line = {"step": step, "loss": 2.5, "lr": lr, "step_time_s": 1.0, "tokens_per_s": 100.0}
    run.metrics_file.write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_rise_of_the_learning_rate_is_told_and_no_other_course(tmp_path: Path, schedule: str) -> None:
    run = make_run(tmp_path, overrides=(f"optimizer.schedule={schedule}", "stages.shard.tasks=1"))
    assert list_resume_notes(run) == []
    for step in (1, 2, 3, 29, 30):  # in the warm-up it rises by itself
        trained(run, step, 30)
        assert list_resume_notes(run) == []
    run.apply_overrides(["train.steps=60"])
    if schedule == "constant":
        assert list_resume_notes(run) == []
        return
    (told,) = list_resume_notes(run)
    lr = compute_learning_rate(run.config.optimizer, 31, 60)
    assert told == f"note: the learning rate goes from 0.001 (step 30) to {lr:.3g}: its schedule now ends at 60"
    assert lr > 0.005


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_last_step_without_effect_is_noted_before_the_training(tmp_path: Path, schedule: str) -> None:
    keys = (f"optimizer.schedule={schedule}", "stages.shard.tasks=1", "optimizer.min_lr_ratio=0.0")
    run = make_run(tmp_path, "at_0", keys)
    (told,) = list_resume_notes(run)
    assert "step 30" in told and "schedule_counts_from=0" in told
    trained(run, 3, 30)
    assert list_resume_notes(run) == []
    as_transformers = make_run(tmp_path, "above_0", (*keys, "optimizer.schedule_counts_from=0"))
    assert list_resume_notes(as_transformers) == []
    warmup = as_transformers.config.optimizer.warmup_steps
    for step in (warmup, warmup + 1):  # the peak is one step later, which is no rise to be noted
        trained(as_transformers, step, 30)
        assert warmup and list_resume_notes(as_transformers) == []


def test_a_finished_training_says_how_much_it_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    trained(run, 29, 30)
    assert load_stage_module("train").progress(run).description == "29/30 steps, loss 2.5000"
    trained(run, 30, 30)
    samples = load_manifest(run.data_dir).count_training_samples(32)
    wanted = f"30/30 steps, loss 2.5000, 7,680 tokens, {30 * 8 / samples:.3g} epochs"
    assert load_stage_module("train").progress(run).description == wanted
    (run.data_dir / "manifest.json").unlink()
    assert load_stage_module("train").progress(run).description == "30/30 steps, loss 2.5000"
