"""Tests that a training that was stopped, killed or moved to other layouts gives the results of an undisturbed run.

Real signals are sent to forked ranks, and each result is compared with an undisturbed run of the same config. Dropout
is on, so that the tests also cover randomness inside a step.
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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def new_run(folder: Path, name: str, data: Path, *more: str) -> Run:
    """Create a run of `STEPS` steps on existing data; `more` are further overrides."""
    return make_run(folder, name, (f"train.steps={STEPS}", *more), data)


def read_steps(run: Run) -> list[tuple[int, float, float, float, int]]:
    """Return number, loss, gradient norm, learning rate and consumed samples of each step in metrics.jsonl."""
    keys = ("step", "loss", "grad_norm", "lr", "samples_consumed")
    return [tuple(line[k] for k in keys) for line in read_jsonl(run.metrics_file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[int, tuple[str, list[Any]]]:
    """Return the digest and the metrics of undisturbed runs by number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = {}
    for size in (1, 2, 4):
        run = new_run(folder, f"ranks{size}", data)
        assert set(run_ranks(size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
        results[size] = compute_run_digest(run), read_steps(run)
    return results


def wait_for_step(run: Run, step: int, ranks: Ranks) -> None:
    """Wait until the training has written `step` lines of metrics, or all its ranks have exited."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if len(read_steps(run)) >= step or not any(p.is_alive() for p in ranks.processes):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def interrupt_training(
    run: Run, size: int, number: signal.Signals, step: int, victims: list[int], rank: Any = run_stage_on_rank
) -> list[Any]:
    """Train until a step, send a signal to some ranks, and return the results of all ranks.

    Args:
        run: The run.
        size: Number of ranks.
        number: The signal. After SIGKILL, the other ranks are also killed.
        step: Number of steps before the signal is sent.
        victims: Ranks that receive the signal.
        rank: The function that each rank runs.
    """
    ranks = Ranks(size, rank, run.path, "train")
    wait_for_step(run, step, ranks)
    for victim in victims:
        with suppress(ProcessLookupError):  # it may already have exited because a peer was killed
            os.kill(ranks.pids[victim], number)
    if number == signal.SIGKILL:  # in production, the supervisor ends the peers after a few seconds
        time.sleep(0.5)
        for process in ranks.processes:
            process.kill()
    return ranks.wait_for_results(failures_expected=number == signal.SIGKILL)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.story)])
def test_three_sigterms_do_not_change_the_result(tmp_path: Path, data: Path, undisturbed: Any, size: int) -> None:
    run = new_run(tmp_path, "stopped", data)
    draw = random.Random(size)
    stops = 0
    for _ in range(3):
        victims = draw.sample(range(size), draw.randint(1, size))
        codes = interrupt_training(run, size, signal.SIGTERM, len(read_steps(run)) + draw.randint(2, 12), victims)
        assert len(set(codes)) == 1, "all ranks exit with the same code"
        stops += codes[0] == ExitCode.STOPPED
    assert stops == 3
    assert set(run_ranks(size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(run) == undisturbed[size][0]
    assert read_steps(run) == undisturbed[size][1]
    assert [step for step, *_ in read_steps(run)] == list(range(1, STEPS + 1))
    assert not read_event_lines(run, "train", "lost_work"), "each stop saved a checkpoint"


@pytest.mark.parametrize(
    ("size", "killed_ranks"),
    [(2, "all"), (4, "one"), *(pytest.param(*more, marks=pytest.mark.story) for more in [(4, "all"), (2, "one")])],
)
def test_three_sigkills_lose_only_steps_after_the_newest_checkpoint(
    tmp_path: Path, data: Path, undisturbed: Any, size: int, killed_ranks: str
) -> None:
    run = new_run(tmp_path, "killed", data)
    draw = random.Random(size)
    saved_and_reached = []  # after each kill: the newest checkpoint and the last step
    for _ in range(3):
        victims = list(range(size)) if killed_ranks == "all" else [draw.randrange(size)]
        interrupt_training(run, size, signal.SIGKILL, len(read_steps(run)) + draw.randint(8, 16), victims)
        saved_and_reached.append((find_newest_step(run.checkpoints_dir), read_steps(run)[-1][0]))
    assert set(run_ranks(size, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(run) == undisturbed[size][0]
    assert read_steps(run) == undisturbed[size][1]
    restored = [(e["step"], e["lost_steps"]) for e in read_event_lines(run, "train") if e["event"] == "restored"]
    assert restored, "at least one attempt continued from a checkpoint"
    assert restored == [(saved, reached - saved) for saved, reached in saved_and_reached if saved]
    # the training saves every 7 steps, and the kill may have interrupted one save
    assert all(reached - saved <= 2 * 7 for saved, reached in saved_and_reached)


def recording_rank(rank_info: Any, path: Path, stage: str) -> int:
    """Run the stage, and record in `samples.jsonl` which samples this rank trains on in each step."""
    from pipeline.train.trainer import Trainer

    original_step = Trainer.step

    def step(self: Any, number: int, batch: Any) -> dict[str, Any]:
        line = original_step(self, number, batch)
        samples = {"step": number, "rank": rank_info.rank, "samples": batch["tokens"].tolist()}
        append_line(path / "samples.jsonl", json.dumps(samples))
        return line

    setattr(Trainer, "step", step)  # noqa: B010
    return run_stage_on_rank(rank_info, path, stage)


def expected_global_batch(run: Run, step: int) -> list[list[int]]:
    """Return the samples (lists of tokens) of a step's global batch, by the definition of the sample order."""
    config = run.config
    length = config.data.sequence_length
    size = config.train.global_batch
    samples: list[list[int]] = []
    for shard in load_manifest(run.data_dir).train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
        samples += [tokens[i : i + length + 1].tolist() for i in range(0, len(tokens) - length, length)]
    return [samples[i] for i in compute_index_range(config.run.seed, (step - 1) * size, size, len(samples))]


def test_other_numbers_of_ranks_read_the_same_samples_and_have_the_same_losses(tmp_path: Path, data: Path) -> None:
    """Without dropout, the losses of the 10 steps after a change agree to 1e-5. Dropout masks differ by layout."""
    undisturbed = new_run(tmp_path, "undisturbed", data, "model.dropout=0.0")
    run = new_run(tmp_path, "elastic", data, "model.dropout=0.0")
    assert set(run_ranks(2, run_stage_on_rank, undisturbed.path, "train")) == {ExitCode.DONE}
    interrupt_training(run, 2, signal.SIGTERM, 15, [1], recording_rank)
    first = len(read_steps(run))
    interrupt_training(run, 1, signal.SIGTERM, first + 15, [0], recording_rank)
    second = len(read_steps(run))
    assert 15 <= first < second < STEPS - 10
    assert set(run_ranks(4, recording_rank, run.path, "train")) == {ExitCode.DONE}
    steps = read_steps(run)
    expected_steps = read_steps(undisturbed)
    assert steps[:first] == expected_steps[:first] and len(steps) == STEPS
    for change in (first, second):
        ten_steps = slice(change, change + 10)
        for step, expected in zip(steps[ten_steps], expected_steps[ten_steps], strict=True):
            assert step[1] == pytest.approx(expected[1], rel=1e-5)
            assert step[2] == pytest.approx(expected[2], rel=1e-4)
    recorded = sorted(read_jsonl(run.path / "samples.jsonl"), key=lambda line: (line["step"], line["rank"]))
    for number in range(1, STEPS + 1):
        batch = [sample for line in recorded if line["step"] == number for sample in line["samples"]]
        assert batch == expected_global_batch(run, number), f"step {number}"


def test_an_incomplete_last_line_of_metrics_is_removed_on_resume(tmp_path: Path, data: Path, undisturbed: Any) -> None:
    run = new_run(tmp_path, "incomplete", data)
    interrupt_training(run, 2, signal.SIGTERM, 10, [0, 1])
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 999, "lo')
    assert set(run_ranks(2, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert read_steps(run) == undisturbed[2][1]
    for line in run.metrics_file.read_text().splitlines():
        json.loads(line)
