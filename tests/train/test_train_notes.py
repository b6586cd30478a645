"""Tests of the progress description of the train stage, and of notes on `resume` about an unexpected learning rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.data.manifest import load_manifest
from pipeline.run.directory import Run
from pipeline.run.stages import list_resume_notes, load_stage_module
from pipeline.train.lr_schedule import compute_learning_rate
from tests.support.tiny import make_run


def write_metrics(run: Run, step: int, steps: int) -> None:
    """Write a metrics.jsonl whose last line is step `step` of a run of `steps` steps."""
    lr = compute_learning_rate(run.config.optimizer, step, steps)
    line = {"step": step, "loss": 2.5, "lr": lr, "step_time_s": 1.0, "tokens_per_s": 100.0}
    run.metrics_file.write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_resume_notes_an_increase_of_the_learning_rate(tmp_path: Path, schedule: str) -> None:
    run = make_run(tmp_path, overrides=(f"optimizer.schedule={schedule}", "stages.shard.tasks=1"))
    assert list_resume_notes(run) == []
    for step in (1, 2, 3, 29, 30):  # the increase in the warm-up is not noted
        write_metrics(run, step, 30)
        assert list_resume_notes(run) == []
    run.apply_overrides(["train.steps=60"])
    if schedule == "constant":
        assert list_resume_notes(run) == []
        return
    (note,) = list_resume_notes(run)
    lr = compute_learning_rate(run.config.optimizer, 31, 60)
    # in step 30, the learning rate was 0.1 (`min_lr_ratio`) times 0.01
    assert all(text in note for text in ("0.001", "step 30", f"{lr:.3g}", "60")), note
    assert lr > 0.005


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_a_last_step_with_learning_rate_0_is_noted_before_the_first_step(tmp_path: Path, schedule: str) -> None:
    overrides = (f"optimizer.schedule={schedule}", "stages.shard.tasks=1", "optimizer.min_lr_ratio=0.0")
    run = make_run(tmp_path, "at_0", overrides)
    (note,) = list_resume_notes(run)
    assert "step 30" in note and "schedule_counts_from=0" in note
    write_metrics(run, 3, 30)
    assert list_resume_notes(run) == []
    # transformers counts steps from 0, so its last step has a learning rate above 0
    as_transformers = make_run(tmp_path, "above_0", (*overrides, "optimizer.schedule_counts_from=0"))
    assert list_resume_notes(as_transformers) == []
    warmup = as_transformers.config.optimizer.warmup_steps
    for step in (warmup, warmup + 1):  # the peak is one step later, so this increase is expected
        write_metrics(as_transformers, step, 30)
        assert warmup and list_resume_notes(as_transformers) == []


def test_the_description_of_a_completed_train_stage_has_tokens_and_epochs(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_metrics(run, 29, 30)
    assert load_stage_module(run, "train").progress(run).description == "29/30 steps, loss 2.5000"
    write_metrics(run, 30, 30)
    samples = load_manifest(run.data_dir).count_training_samples(32)
    # 30 steps of 8 samples of 32 tokens
    expected = f"30/30 steps, loss 2.5000, 7,680 tokens, {30 * 8 / samples:.3g} epochs"
    assert load_stage_module(run, "train").progress(run).description == expected
    (run.data_dir / "manifest.json").unlink()
    assert load_stage_module(run, "train").progress(run).description == "30/30 steps, loss 2.5000"
