"""Tests of `train.early_stopping`: where runs end, also after interruptions, on 1 and 2 ranks, and with other keys."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.console import PlainConsole
from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import checkpoint_name, find_newest_step
from pipeline.config.sections import EarlyStoppingConfig
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from slurm.query.status import print_status
from tests.model.test_transformers_backend import save_model_with_tokenizer
from tests.publish.test_open_weights import make_run_from_model
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.train.test_exact import check_same_result, create_run, interrupt_training
from tests.train.test_fork import create_run as create_original
from tests.train.test_fork import make_fork
from tests.train.test_held_out import read_held_out_losses, run_stage_and_stop_during_evaluation

OVERRIDES = (
    "train.evaluate_every=2", "train.evaluate_sequences=16", "optimizer.lr=3e-2", "optimizer.schedule=constant",
    "checkpoint.every_steps=5",
)  # fmt: skip
"""With this learning rate, the held-out loss falls and then rises and falls by small amounts."""
PATIENCE, MIN_DELTA = 3, 0.01
EARLY_STOPPING = f"train.early_stopping={{patience: {PATIENCE}, min_delta: {MIN_DELTA}}}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def find_last_evaluation(values: Sequence[float], patience: int, min_delta: float, sign: int = 1) -> int | None:
    """Return the index of the evaluation at which a run must end; None if it must not end.

    This is the first index whose last `patience` values are no improvements. A value is an improvement if it is better
    than all improvements before it by more than `min_delta`.
    """
    improvements: list[int] = []
    for index, value in enumerate(values):
        bests = [sign * values[earlier] for earlier in improvements]
        if math.isfinite(value) and all(sign * value < best - min_delta for best in bests):
            improvements.append(index)
        if index - max(improvements, default=-1) >= patience:
            return index
    return None


class RecordingTrainer:
    """Records the requests of a callback."""

    start_step = 0

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def request_stop(self, reason: str) -> None:
        self.reasons.append(reason)


@given(
    st.lists(st.one_of(st.integers(0, 9), st.just(math.nan), st.just(math.inf)), max_size=30),
    st.integers(1, 5),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
    st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_a_stop_is_requested_at_the_evaluation_of_a_plain_computation(
    values: list[float], patience: int, min_delta: int, mode: Any, restart: int
) -> None:
    """After `restart` evaluations, a new callback gets the state of the old one, as after an interruption."""
    from pipeline.train.early_stopping import EarlyStopping

    config = EarlyStoppingConfig(metric="m", patience=patience, min_delta=min_delta, mode=mode)
    trainer: Any = RecordingTrainer()
    callback = EarlyStopping(config)
    callback.on_start(trainer)
    requested = None
    for index, value in enumerate(values):
        if index == restart:
            state = json.loads(json.dumps(callback.state_dict(), allow_nan=False))
            callback = EarlyStopping(config)
            callback.load_state_dict(state)
            callback.on_start(trainer)
        callback.on_evaluation(trainer, index, {"held_out_m": float(value)})
        if trainer.reasons:
            requested = index
            break
    assert requested == find_last_evaluation(values, patience, min_delta, 1 if mode == "min" else -1)


def train(run: Run, ranks: int = 2) -> int:
    """Run the train stage to its end, and return the step of its last checkpoint."""
    assert set(run_ranks(ranks, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert load_stage_module(run, "train").describe_missing_outputs(run) is None
    return find_newest_step(run.checkpoints_dir)


def check_end(run: Run, patience: int = PATIENCE) -> None:
    """Check that the run ended one step after the evaluation at which it must end."""
    losses = read_held_out_losses(run)
    index = find_last_evaluation(list(losses.values()), patience, MIN_DELTA)
    assert index is not None and index > patience, "the test needs a run whose loss improves first, and then does not"
    last_step = list(losses)[index] + 1
    assert find_newest_step(run.checkpoints_dir) == last_step < run.config.train.steps  # type: ignore[operator]
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, last_step + 1))
    assert read_event_lines(run, "train", "stopped_early")[-1]["step"] == last_step


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Run:
    """Return a run on 2 ranks that ended early."""
    run = create_run(tmp_path_factory.mktemp("undisturbed"), "undisturbed", data, *OVERRIDES, EARLY_STOPPING)
    train(run)
    return run


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.story), 2])
def test_a_run_ends_where_a_plain_computation_ends_it(
    tmp_path: Path, data: Path, undisturbed_run: Run, ranks: int
) -> None:
    """The steps before the end are those of a run without early stopping."""
    run = undisturbed_run
    if ranks == 1:
        run = create_run(tmp_path, "alone", data, *OVERRIDES, EARLY_STOPPING)
        train(run, 1)
    check_end(run)
    losses = read_held_out_losses(run)
    step = find_newest_step(run.checkpoints_dir)
    plain_run = create_run(tmp_path, "plain", data, *OVERRIDES, f"train.steps={step}")
    train(plain_run, ranks)
    check_same_result(run, plain_run)
    assert read_held_out_losses(plain_run) == losses


def test_an_interrupted_run_ends_at_the_same_step(tmp_path: Path, data: Path, undisturbed_run: Run) -> None:
    """The run is stopped before and during evaluations, killed, and killed between the request and the last step."""
    run = create_run(tmp_path, "stopped", data, *OVERRIDES, EARLY_STOPPING)
    last_step = find_newest_step(undisturbed_run.checkpoints_dir)
    assert set(interrupt_training(run, 2, signal.SIGTERM, 3, [1])) == {ExitCode.STOPPED}
    interrupt_training(run, 2, signal.SIGKILL, last_step // 2, [0])
    # The stop is requested in the evaluation of the step before the last one, so the next attempt evaluates this step.
    # A stop at this step comes before the request of the callback.
    arguments = (run_stage_and_stop_during_evaluation, run.path, "train", last_step - 1)
    assert run_ranks(2, *arguments) == [ExitCode.STOPPED] * 2
    assert find_newest_step(run.checkpoints_dir) == last_step - 1
    assert len(read_held_out_losses(run)) == len(read_held_out_losses(undisturbed_run)) - 1
    # This attempt evaluates the step, and is then killed before the next checkpoint.
    assert None in run_ranks_and_kill_in_step(run, last_step)
    assert find_newest_step(run.checkpoints_dir) == last_step - 1
    assert read_held_out_losses(run) == read_held_out_losses(undisturbed_run)
    assert train(run) == last_step
    check_same_result(run, undisturbed_run)
    assert read_held_out_losses(run) == read_held_out_losses(undisturbed_run)


@pytest.mark.story
def test_a_crash_after_the_request_does_not_change_the_end(tmp_path: Path, data: Path) -> None:
    """The checkpoint of the last evaluation is saved, and that of the last step is not."""
    run = create_run(
        tmp_path, "each", data, *OVERRIDES, EARLY_STOPPING, "checkpoint.every_steps=1", "checkpoint.keep=2"
    )
    last_step = train(run, 1)
    check_end(run)
    digest = compute_run_digest(run)
    shutil.rmtree(run.checkpoints_dir / checkpoint_name(last_step))
    assert train(run, 1) == last_step
    assert compute_run_digest(run) == digest
    # After the crash, the user raises the patience, so the request of the first attempt no longer counts.
    shutil.rmtree(run.checkpoints_dir / checkpoint_name(last_step))
    run.apply_overrides(["train.early_stopping.patience=6"])
    assert train(run, 1) > last_step
    check_end(run, 6)


def run_stage_and_die(rank_info: RankInfo, path: Path, stage: str, step: int) -> int:
    """Run the stage; all ranks die at the beginning of a step."""
    from pipeline.train.metrics import PeakMemory

    original_hook = PeakMemory.on_step_begin

    def die(self: Any, trainer: Any, current_step: int) -> None:
        if current_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        original_hook(self, trainer, current_step)

    setattr(PeakMemory, "on_step_begin", die)  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def run_ranks_and_kill_in_step(run: Run, step: int) -> list[Any]:
    """Train on 2 ranks, which die at the beginning of a step. Return their results."""
    return Ranks(2, run_stage_and_die, run.path, "train", step).wait_for_results(failures_expected=True)


def test_a_larger_patience_continues_as_if_it_had_been_so_from_the_start(
    tmp_path: Path, data: Path, undisturbed_run: Run
) -> None:
    expected_run = create_run(
        tmp_path, "patient", data, *OVERRIDES, f"train.early_stopping={{patience: 6, min_delta: {MIN_DELTA}}}"
    )
    last_step = train(expected_run)
    check_end(expected_run, 6)
    run = create_run(tmp_path, "continued", data, *OVERRIDES, EARLY_STOPPING)
    first_end = train(run)
    assert train(run) == first_end, "without a change, nothing continues"
    run.apply_overrides(["train.early_stopping.patience=2"])
    assert train(run) == first_end, "with a smaller patience, the run would have ended before"
    run.apply_overrides(["train.early_stopping.patience=6"])
    assert load_stage_module(run, "train").describe_missing_outputs(run) is not None
    assert train(run) == last_step > first_end
    check_same_result(run, expected_run)
    assert read_held_out_losses(run) == read_held_out_losses(expected_run)


@pytest.mark.story
def test_more_steps_start_to_count_anew(tmp_path: Path, data: Path) -> None:
    """The schedule is constant, so more steps change nothing else."""
    run = create_run(tmp_path, "longer", data, *OVERRIDES, EARLY_STOPPING)
    first_end = train(run)
    run.apply_overrides(["train.steps=70"])
    last_step = train(run)
    losses = read_held_out_losses(run)
    best = min(loss for step, loss in losses.items() if step <= first_end)
    later_losses = [loss for step, loss in losses.items() if step > first_end]
    index = find_last_evaluation([best, *later_losses], PATIENCE, MIN_DELTA)
    assert index is None or last_step == list(losses)[-1] + 1
    assert last_step >= first_end + 2 * PATIENCE - 1
    run.apply_overrides(["train.early_stopping=null"])
    assert train(run) == 70


def test_an_unknown_metric_is_an_error_that_names_the_metrics(tmp_path: Path, data: Path) -> None:
    """With `train.callbacks`, the metrics are only known in the first evaluation."""
    (tmp_path / "nothing.py").write_text("def callbacks(config):\n    return []\n")
    overrides = ("train.early_stopping={metric: my_accuracy}", "train.ema={decay: 0.5}", *OVERRIDES)
    with raises_error("config.conflict", "train.early_stopping.metric", "my_accuracy", "loss, ema_loss"):
        create_run(tmp_path, "unknown", data, *overrides)
    with pytest.MonkeyPatch.context() as context:
        context.chdir(tmp_path)
        run = create_run(tmp_path, "unknown", data, *overrides, "train.callbacks=[nothing]")
    with pytest.raises(
        AssertionError, match=r"UserError: train\.early_stopping\.metric: .*my_accuracy.* loss, ema_loss"
    ):
        train(run)


@pytest.mark.story
def test_a_fork_of_a_run_that_ended_early_starts_to_count_anew(tmp_path: Path, data: Path) -> None:
    """The fork continues, although the checkpoint of its origin completed the stage. Its own end completes it."""
    run = create_original(tmp_path, "original", data, *OVERRIDES, EARLY_STOPPING, "train.steps=60")
    first_end = train(run)
    fork = make_fork(run, "fork", first_end)
    assert load_stage_module(fork, "train").describe_missing_outputs(fork) is not None
    last_step = train(fork)
    losses = read_held_out_losses(fork)
    index = find_last_evaluation(list(losses.values()), PATIENCE, MIN_DELTA)
    assert min(losses) > first_end
    assert last_step == (60 if index is None else list(losses)[index] + 1)
    assert train(fork) == last_step


@pytest.mark.story
def test_a_model_of_transformers_ends_early(tmp_path: Path) -> None:
    """No later evaluation is better than the first one by 1, so the run ends one step after the third evaluation.

    The callback with the norms of gradients also works with this model.
    """
    save_model_with_tokenizer(tmp_path / "model", "gemma3_text")
    stopping = "train.early_stopping={patience: 2, min_delta: 1}"
    overrides = (
        "train.evaluate_every=2",
        "optimizer.lr=1e-7",
        stopping,
        "train.callbacks=[examples.gradient_statistics]",
    )
    run = make_run_from_model(tmp_path, "run", tmp_path / "model", 12, *overrides)
    assert train(run) == 7
    for line in read_jsonl(run.metrics_file):
        norms = [value for name, value in line.items() if name.startswith("gradient.")]
        assert math.hypot(*norms) == pytest.approx(line["grad_norm"], rel=1e-4)


def test_status_and_report_say_why_a_run_ended_early(undisturbed_run: Run) -> None:
    step = find_newest_step(undisturbed_run.checkpoints_dir)
    progress = load_stage_module(undisturbed_run, "train").progress(undisturbed_run)
    output = io.StringIO()
    print_status(undisturbed_run, PlainConsole(file=output, width=200))
    for text in (progress.description, output.getvalue()):
        assert "completed early" in text and f"{PATIENCE} evaluations" in text
    assert f"at step {step}:" in output.getvalue()
