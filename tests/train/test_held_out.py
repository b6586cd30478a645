"""Tests of `train.evaluate_every`: held-out evaluations in the train stage, their values, and resumes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import append_line, read_jsonl
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.run.directory import Run
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import make_run, run_stage_on_rank
from tests.tracking.test_followers import read_tensorboard_curve, round_to_float32
from tests.train.test_exact import check_same_result, create_run, interrupt_training, read_steps
from tracking.follower import Follower

EVALUATE_EVERY_4_STEPS = ("train.evaluate_every=4", "train.evaluate_sequences=12")
EIGHT_STEPS = (
    "train.steps=8",
    "train.ema={decay: 0.5}",
    "checkpoint.every_steps=4",
    "evaluate.max_sequences=12",
    "evaluate.batch=5",
)
LAYOUTS = {
    "one": (1, ()),
    "ddp": (2, ()),
    "local_sgd": (2, ("parallel.local_sgd={every: 3}",)),
    "zero1": (2, ("parallel.zero=1",)),
    "zero3": (3, ("parallel.zero=3", "train.global_batch=6")),
    "tensor_pipeline": (4, ("parallel.tensor=2", "parallel.pipeline=2", "model.tie_word_embeddings=true")),
    "zbv_zero2": (4, ("parallel.pipeline=2", "parallel.schedule=zbv", "parallel.virtual_stages=2", "parallel.zero=2",
                      "model.layers=4", "model.tie_word_embeddings=true")),
}  # fmt: skip
"""Layouts by name: the number of ranks, and overrides."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def read_held_out_losses(run: Run, key: str = "held_out_loss") -> dict[int, float]:
    """Return the held-out losses in metrics.jsonl by step."""
    return {line["step"]: line[key] for line in read_jsonl(run.metrics_file) if key in line}


@pytest.mark.parametrize(
    "layout",
    ["ddp", *(pytest.param(name, marks=pytest.mark.story) for name in LAYOUTS if name != "ddp")],
)
def test_held_out_losses_equal_those_of_the_checkpoints_and_training_is_unchanged(
    tmp_path: Path, data: Path, layout: str
) -> None:
    """Each held-out loss is bit-identical to the loss of the evaluate stage on one rank for the same checkpoint.

    The same applies to the loss of the moving average of the weights.
    """
    world_size, layout_overrides = LAYOUTS[layout]
    overrides = (*EIGHT_STEPS, *layout_overrides, f"stages.train.tasks_per_node={world_size}")
    plain_run = create_run(tmp_path, "plain", data, *overrides)
    evaluated_run = create_run(tmp_path, "evaluated", data, *overrides, *EVALUATE_EVERY_4_STEPS)
    for run in (plain_run, evaluated_run):
        assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    check_same_result(evaluated_run, plain_run)
    losses = read_held_out_losses(evaluated_run)
    ema_losses = read_held_out_losses(evaluated_run, "held_out_ema_loss")
    assert not read_held_out_losses(plain_run)
    assert set(losses) == set(list_checkpoint_steps(evaluated_run.checkpoints_dir)) == {4, 8}
    assert run_ranks(1, run_stage_on_rank, evaluated_run.path, "evaluate", {"step": "every"}) == [ExitCode.DONE]
    results = [json.loads(path.read_text()) for path in evaluated_run.evaluation_dir.iterdir()]
    assert losses == {result["step"]: result["loss"] for result in results}
    assert ema_losses == {result["step"]: result["ema_loss"] for result in results}
    assert all(0.001 < abs(ema_losses[step] - loss) < 1 for step, loss in losses.items())
    for line in read_jsonl(evaluated_run.metrics_file):
        assert ("evaluate_s" in line) == (line["step"] % 4 == 0)
        assert line.get("evaluate_s", 0) < line["step_time_s"]


def run_stage_and_stop_during_evaluation(rank_info: RankInfo, path: Path, stage: str, stop_step: int) -> int:
    """Run the stage; rank 1 receives SIGTERM during the held-out evaluation after `stop_step`."""
    from pipeline.evaluate.evaluator import Evaluator

    original_measure = Evaluator.measure

    def signal_and_measure(self: Any, step: int, **options: Any) -> Any:
        if step == stop_step and rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return original_measure(self, step, **options)

    setattr(Evaluator, "measure", signal_and_measure)  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def run_stage_and_record_evaluations(rank_info: RankInfo, path: Path, stage: str) -> int:
    """Run the stage with a callback of the user, which writes held-out evaluations to a file per rank."""
    from pipeline.train import trainer
    from pipeline.train.callback import Callback, TrainerContext

    class Recorder(Callback):
        """Append each held-out evaluation to a file."""

        def on_evaluation(self, trainer: TrainerContext, step: int, metrics: Mapping[str, float]) -> None:
            append_line(path / f"evaluations-{trainer.rank}.jsonl", json.dumps({"step": step, **metrics}))

    setattr(trainer, "make_user_callbacks", lambda module, config: [Recorder()])  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def test_callbacks_receive_held_out_evaluations_on_all_ranks(tmp_path: Path, data: Path) -> None:
    run = create_run(tmp_path, "recorded", data, *EIGHT_STEPS, *EVALUATE_EVERY_4_STEPS, "stages.train.tasks_per_node=2")
    assert set(run_ranks(2, run_stage_and_record_evaluations, run.path, "train")) == {ExitCode.DONE}
    for rank in (0, 1):
        recorded_lines = read_jsonl(run.path / f"evaluations-{rank}.jsonl")
        assert {line["step"]: line["held_out_loss"] for line in recorded_lines} == read_held_out_losses(run)
    assert set(read_held_out_losses(run)) == {4, 8}


@pytest.mark.story
def test_stops_do_not_change_held_out_losses(tmp_path: Path, data: Path) -> None:
    """The run is stopped twice in the evaluation of step 8, and twice between evaluations.

    The last stop is requested in the evaluation of the last step, so the run ends normally.
    """
    overrides = ("train.steps=24", "checkpoint.every_steps=5", *EVALUATE_EVERY_4_STEPS)
    undisturbed_run = create_run(tmp_path, "undisturbed", data, *overrides)
    run = create_run(tmp_path, "stopped", data, *overrides, "track={tensorboard: true}")
    assert set(run_ranks(2, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    for _ in range(2):
        assert run_ranks(2, run_stage_and_stop_during_evaluation, run.path, "train", 8) == [ExitCode.STOPPED] * 2
        assert set(read_held_out_losses(run)) == {4}, "the evaluation of step 8 must not have finished"
        assert len(read_steps(run)) == 8
        Follower(run, "tensorboard").catch_up()  # TensorBoard receives step 8 without a held-out loss
    interrupt_training(run, 2, signal.SIGTERM, 10, [1])
    interrupt_training(run, 2, signal.SIGKILL, 15, [0])
    assert run_ranks(2, run_stage_and_stop_during_evaluation, run.path, "train", 24) == [ExitCode.DONE] * 2
    check_same_result(run, undisturbed_run)
    losses = read_held_out_losses(run)
    assert losses == read_held_out_losses(undisturbed_run) and set(losses) == {4, 8, 12, 16, 20, 24}
    # step 8 was evaluated by the next attempt, when it already had a line in the metrics
    assert [event["step"] for event in read_event_lines(run, "train", "held_out")] == [8]
    Follower(run, "tensorboard").catch_up()
    assert read_tensorboard_curve(run.path, "train/held_out_loss") == round_to_float32(losses.items())
