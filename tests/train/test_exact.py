"""Tests that runs that are stopped, killed or moved to other layouts have the results of an undisturbed run.

Real signals are sent to forked ranks, and each result is compared with an undisturbed run of the same config. Dropout
is on in most tests, so that they also cover randomness inside a step.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import append_line, read_jsonl
from pipeline.checkpoint.catalog import find_newest_step
from pipeline.data.manifest import load_manifest
from pipeline.data.sample_order import compute_index_range
from pipeline.run.directory import Run
from tests.support.events import read_event_lines
from tests.support.ranks import Ranks, run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank

STEPS = 60
"""Steps of a run of `create_run`. Readers of the metrics can send a signal long before the last step."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def create_run(folder: Path, name: str, data: Path, *overrides: str) -> Run:
    """Create a run on the existing data in `data`. The run has `STEPS` steps if `overrides` do not set train.steps."""
    return make_run(folder, name, (f"train.steps={STEPS}", *overrides), data)


def read_steps(run: Run) -> list[tuple[int, float, float, float, int]]:
    """Return step number, loss, gradient norm, learning rate and consumed samples of each line of metrics.jsonl."""
    keys = ("step", "loss", "grad_norm", "lr", "samples_consumed")
    return [tuple(line[key] for key in keys) for line in read_jsonl(run.metrics_file)]


def check_same_result(run: Run, expected_run: Run) -> None:
    """Check that the newest checkpoints of two runs have the same digest, and their steps the same metrics."""
    assert compute_run_digest(run) == compute_run_digest(expected_run)
    assert read_steps(run) == read_steps(expected_run)


@pytest.fixture(scope="module")
def undisturbed_results(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[int, tuple[str, list[Any]]]:
    """Train undisturbed runs on 1, 2 and 4 ranks. Return their digests and metrics by number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = {}
    for world_size in (1, 2, 4):
        run = create_run(folder, f"ranks{world_size}", data)
        assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
        results[world_size] = (compute_run_digest(run), read_steps(run))
    return results


def wait_for_step(run: Run, step: int, ranks: Ranks) -> None:
    """Wait until the run has written `step` lines of metrics, or all its ranks have exited."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if len(read_steps(run)) >= step or not any(process.is_alive() for process in ranks.processes):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def interrupt_training(
    run: Run,
    world_size: int,
    signal_number: signal.Signals,
    step: int,
    signaled_ranks: list[int],
    run_stage: Any = run_stage_on_rank,
) -> list[Any]:
    """Train until a step, send a signal to some ranks, and return the results of all ranks.

    Args:
        run: the run to train.
        world_size: number of ranks.
        signal_number: after SIGKILL, the ranks that did not receive it are also killed.
        step: number of steps in metrics.jsonl before the signal is sent. Steps of earlier attempts count.
        signaled_ranks: ranks that receive the signal.
        run_stage: the function that each rank runs, with the arguments of `run_stage_on_rank`.
    """
    ranks = Ranks(world_size, run_stage, run.path, "train")
    wait_for_step(run, step, ranks)
    for rank in signaled_ranks:
        with suppress(ProcessLookupError):  # the rank may already have exited because another rank was killed
            os.kill(ranks.pids[rank], signal_number)
    if signal_number == signal.SIGKILL:  # in production, the supervisor kills the other ranks after a few seconds
        time.sleep(0.5)
        for process in ranks.processes:
            process.kill()
    return ranks.wait_for_results(failures_expected=signal_number == signal.SIGKILL)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.story)])
def test_three_sigterms_do_not_change_the_result(
    tmp_path: Path, data: Path, undisturbed_results: Any, world_size: int
) -> None:
    run = create_run(tmp_path, "stopped", data)
    generator = random.Random(world_size)
    for _ in range(3):
        signaled_ranks = generator.sample(range(world_size), generator.randint(1, world_size))
        step = len(read_steps(run)) + generator.randint(2, 12)
        exit_codes = interrupt_training(run, world_size, signal.SIGTERM, step, signaled_ranks)
        assert set(exit_codes) == {ExitCode.STOPPED}
    assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    digest, steps = undisturbed_results[world_size]
    assert compute_run_digest(run) == digest
    assert read_steps(run) == steps
    assert [step for step, *_ in read_steps(run)] == list(range(1, STEPS + 1))
    assert not read_event_lines(run, "train", "lost_work"), "each stop must save a checkpoint"


@pytest.mark.parametrize(
    ("world_size", "signaled"),
    [
        (2, "all ranks"),
        pytest.param(4, "one rank", marks=pytest.mark.story),
        pytest.param(4, "all ranks", marks=pytest.mark.story),
        pytest.param(2, "one rank", marks=pytest.mark.story),
    ],
)
def test_three_sigkills_lose_only_steps_after_the_newest_checkpoint(
    tmp_path: Path, data: Path, undisturbed_results: Any, world_size: int, signaled: str
) -> None:
    run = create_run(tmp_path, "killed", data)
    generator = random.Random(world_size)
    saved_and_last_steps = []  # after each kill: the step of the newest checkpoint, and the last step in the metrics
    for _ in range(3):
        signaled_ranks = list(range(world_size)) if signaled == "all ranks" else [generator.randrange(world_size)]
        step = len(read_steps(run)) + generator.randint(8, 16)
        interrupt_training(run, world_size, signal.SIGKILL, step, signaled_ranks)
        saved_and_last_steps.append((find_newest_step(run.checkpoints_dir), read_steps(run)[-1][0]))
    assert set(run_ranks(world_size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    digest, steps = undisturbed_results[world_size]
    assert compute_run_digest(run) == digest
    assert read_steps(run) == steps
    restored = [(event["step"], event["lost_steps"]) for event in read_event_lines(run, "train", "restored")]
    assert restored, "no attempt continued from a checkpoint"
    assert restored == [
        (saved_step, last_step - saved_step) for saved_step, last_step in saved_and_last_steps if saved_step
    ]
    # the run saves every 7 steps, and the kill may have interrupted one save
    assert all(last_step - saved_step <= 2 * 7 for saved_step, last_step in saved_and_last_steps)


def run_stage_and_record_samples(rank_info: Any, path: Path, stage: str) -> int:
    """Run the stage, and record in `samples.jsonl` which samples this rank trains on in each step."""
    from pipeline.train.trainer import Trainer

    original_step = Trainer.step

    def run_and_record_step(self: Any, number: int, batch: Any) -> dict[str, Any]:
        metrics = original_step(self, number, batch)
        samples = {"step": number, "rank": rank_info.rank, "samples": batch["tokens"].tolist()}
        append_line(path / "samples.jsonl", json.dumps(samples))
        return metrics

    setattr(Trainer, "step", run_and_record_step)  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def compute_expected_global_batch(run: Run, step: int) -> list[list[int]]:
    """Return the samples (lists of tokens) of a step's global batch, computed from the definition of their order."""
    config = run.config
    length = config.data.sequence_length
    global_batch = config.train.global_batch
    samples: list[list[int]] = []
    for shard in load_manifest(run.data_dir).train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
        samples += [tokens[i : i + length + 1].tolist() for i in range(0, len(tokens) - length, length)]
    indices = compute_index_range(config.run.seed, (step - 1) * global_batch, global_batch, len(samples))
    return [samples[i] for i in indices]


@pytest.mark.story
def test_other_numbers_of_ranks_read_the_same_samples_and_have_the_same_losses(tmp_path: Path, data: Path) -> None:
    """Train on 2 ranks, then on 1 and then on 4.

    The losses of the 10 steps after each change agree to 1e-5 with a run on 2 ranks. Dropout is off, because its masks
    depend on the layout.
    """
    undisturbed_run = create_run(tmp_path, "undisturbed", data, "model.dropout=0.0")
    run = create_run(tmp_path, "elastic", data, "model.dropout=0.0")
    assert set(run_ranks(2, run_stage_on_rank, undisturbed_run.path, "train")) == {ExitCode.DONE}
    interrupt_training(run, 2, signal.SIGTERM, 15, [1], run_stage_and_record_samples)
    first_change = len(read_steps(run))
    interrupt_training(run, 1, signal.SIGTERM, first_change + 15, [0], run_stage_and_record_samples)
    second_change = len(read_steps(run))
    assert 15 <= first_change < second_change < STEPS - 10
    assert set(run_ranks(4, run_stage_and_record_samples, run.path, "train")) == {ExitCode.DONE}
    steps = read_steps(run)
    expected_steps = read_steps(undisturbed_run)
    assert steps[:first_change] == expected_steps[:first_change] and len(steps) == STEPS
    for change in (first_change, second_change):
        ten_steps = slice(change, change + 10)
        for (_, loss, gradient_norm, *_), (_, expected_loss, expected_norm, *_) in zip(
            steps[ten_steps], expected_steps[ten_steps], strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert gradient_norm == pytest.approx(expected_norm, rel=1e-4)
    recorded_lines = sorted(read_jsonl(run.path / "samples.jsonl"), key=lambda line: (line["step"], line["rank"]))
    for number in range(1, STEPS + 1):
        batch = [sample for line in recorded_lines if line["step"] == number for sample in line["samples"]]
        assert batch == compute_expected_global_batch(run, number), f"step {number}"


def test_an_incomplete_last_line_of_metrics_is_removed_on_resume(
    tmp_path: Path, data: Path, undisturbed_results: Any
) -> None:
    run = create_run(tmp_path, "incomplete", data)
    interrupt_training(run, 2, signal.SIGTERM, 10, [0, 1])
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 999, "lo')
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    _, steps = undisturbed_results[2]
    assert read_steps(run) == steps
    for line in run.metrics_file.read_text().splitlines():
        json.loads(line)
