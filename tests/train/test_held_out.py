"""Tests of `train.evaluate_every`: held-out evaluations during the training, their values, and resumes."""

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
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.tracking.test_followers import read_tensorboard_curve, round_to_float32
from tests.train.test_exact import interrupt_training, new_run, read_steps
from tracking.follower import Follower

EVALUATE = ("train.evaluate_every=4", "train.evaluate_sequences=12")
SHORT = ("train.steps=8", "checkpoint.every_steps=4", "evaluate.max_sequences=12", "evaluate.batch=5")
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def read_held_out_losses(run: Run) -> dict[int, float]:
    """Return the held-out losses in metrics.jsonl by step."""
    return {line["step"]: line["held_out_loss"] for line in read_jsonl(run.metrics_file) if "held_out_loss" in line}


@pytest.mark.parametrize(
    "layout",
    ["ddp", *(pytest.param(name, marks=pytest.mark.story) for name in LAYOUTS if name != "ddp")],
)
def test_held_out_losses_equal_those_of_the_checkpoints_and_training_is_unchanged(
    tmp_path: Path, data: Path, layout: str
) -> None:
    """Each value is bit-identical to the result of the stage evaluate on one rank for the checkpoint of that step."""
    size, more = LAYOUTS[layout]
    ranks = f"stages.train.tasks_per_node={size}"
    plain = new_run(tmp_path, "plain", data, *SHORT, *more, ranks)
    evaluated = new_run(tmp_path, "evaluated", data, *SHORT, *more, ranks, *EVALUATE)
    for run in (plain, evaluated):
        assert set(run_ranks(size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(evaluated) == compute_run_digest(plain)
    assert read_steps(evaluated) == read_steps(plain)
    losses = read_held_out_losses(evaluated)
    assert not read_held_out_losses(plain)
    assert set(losses) == set(list_checkpoint_steps(evaluated.checkpoints_dir)) == {4, 8}
    assert run_ranks(1, run_stage_on_rank, evaluated.path, "evaluate", {"step": "every"}) == [ExitCode.DONE]
    results = [json.loads(path.read_text()) for path in evaluated.evaluation_dir.iterdir()]
    assert losses == {result["step"]: result["loss"] for result in results}
    for line in read_jsonl(evaluated.metrics_file):
        assert ("evaluate_s" in line) == (line["step"] % 4 == 0)
        assert line.get("evaluate_s", 0) < line["step_time_s"]


def stop_during_evaluation_rank(rank_info: RankInfo, path: Path, stage: str, stop_step: int) -> int:
    """Run the stage; rank 1 receives SIGTERM during the held-out evaluation after `stop_step`."""
    from pipeline.evaluate.evaluator import Evaluator

    measure = Evaluator.measure

    def signal_and_measure(self: Any, step: int, **more: Any) -> Any:
        if step == stop_step and rank_info.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, step, **more)

    setattr(Evaluator, "measure", signal_and_measure)  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def evaluation_recording_rank(rank_info: RankInfo, path: Path, stage: str) -> int:
    """Run the stage with a callback of the user that records held-out evaluations in a file per rank."""
    from pipeline.train import trainer
    from pipeline.train.callback import Callback, TrainerContext

    class Recorder(Callback):
        def on_evaluation(self, trainer: TrainerContext, step: int, metrics: Mapping[str, float]) -> None:
            append_line(path / f"evaluations-{trainer.rank}.jsonl", json.dumps({"step": step, **metrics}))

    setattr(trainer, "make_user_callbacks", lambda module, config: [Recorder()])  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def test_callbacks_receive_held_out_evaluations_on_all_ranks(tmp_path: Path, data: Path) -> None:
    run = new_run(tmp_path, "recorded", data, *SHORT, *EVALUATE, "stages.train.tasks_per_node=2")
    assert set(run_ranks(2, evaluation_recording_rank, run.path, "train")) == {ExitCode.DONE}
    for rank in (0, 1):
        recorded = read_jsonl(run.path / f"evaluations-{rank}.jsonl")
        assert {line["step"]: line["held_out_loss"] for line in recorded} == read_held_out_losses(run)
    assert set(read_held_out_losses(run)) == {4, 8}


def test_stops_do_not_change_held_out_losses(tmp_path: Path, data: Path) -> None:
    """The run is stopped in an evaluation, when it is repeated, in steps, and in the last one, after which it ends."""
    more = ("train.steps=24", "checkpoint.every_steps=5", *EVALUATE)
    undisturbed = new_run(tmp_path, "undisturbed", data, *more)
    run = new_run(tmp_path, "stopped", data, *more, "track={tensorboard: true}")
    assert set(run_ranks(2, run_stage_on_rank, undisturbed.path, "train")) == {ExitCode.DONE}
    for _ in range(2):
        assert run_ranks(2, stop_during_evaluation_rank, run.path, "train", 8) == [ExitCode.STOPPED] * 2
        assert set(read_held_out_losses(run)) == {4}, "the evaluation of step 8 did not finish"
        assert len(read_steps(run)) == 8
        Follower(run, "tensorboard").catch_up()  # TensorBoard receives step 8 without a held-out loss
    interrupt_training(run, 2, signal.SIGTERM, 10, [1])
    interrupt_training(run, 2, signal.SIGKILL, 15, [0])
    assert run_ranks(2, stop_during_evaluation_rank, run.path, "train", 24) == [ExitCode.DONE] * 2
    assert compute_run_digest(run) == compute_run_digest(undisturbed) and read_steps(run) == read_steps(undisturbed)
    losses = read_held_out_losses(run)
    assert losses == read_held_out_losses(undisturbed) and set(losses) == {4, 8, 12, 16, 20, 24}
    assert [event["step"] for event in read_event_lines(run, "train", "held_out")] == [8]
    Follower(run, "tensorboard").catch_up()
    assert read_tensorboard_curve(run.path, "train/held_out_loss") == round_to_float32(losses.items())
