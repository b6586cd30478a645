"""Contract 3: stopped, killed, resumed or moved to another number of ranks, a training ends as it should.

Ranks are forked and signalled for real; each case is compared with an undisturbed run of the same config. Dropout is
on, so that randomness inside a step is tested too.
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
from tests.support.tiny import compute_run_digest, make_run, stage_rank

STEPS = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def new_run(folder: Path, name: str, data: Path, *more: str) -> Run:
    return make_run(folder, name, (f"train.steps={STEPS}", *more), data)


def lines(run: Run) -> list[tuple[int, float, float, float, int]]:
    keys = ("step", "loss", "grad_norm", "lr", "samples_consumed")
    return [tuple(line[k] for k in keys) for line in read_jsonl(run.metrics_file)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> dict[int, tuple[str, list[Any]]]:
    """Digest and metrics of runs that nothing disturbed, by number of ranks."""
    folder, results = tmp_path_factory.mktemp("undisturbed"), {}
    for size in (1, 2, 4):
        run = new_run(folder, f"calm{size}", data)
        assert set(run_ranks(size, stage_rank, run.path, "train")) == {ExitCode.DONE}
        results[size] = compute_run_digest(run), lines(run)
    return results


def wait_for_step(run: Run, step: int, ranks: Ranks) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if len(lines(run)) >= step or not any(p.is_alive() for p in ranks.processes):
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} was not reached")


def interrupted(
    run: Run, size: int, number: signal.Signals, step: int, victims: list[int], rank: Any = stage_rank
) -> list[Any]:
    ranks = Ranks(size, rank, run.path, "train")
    wait_for_step(run, step, ranks)
    for victim in victims:
        with suppress(ProcessLookupError):  # it may have followed the one killed before it already
            os.kill(ranks.pids[victim], number)
    if number == signal.SIGKILL:  # the supervisor would end the peers after a few seconds
        time.sleep(0.5)
        for process in ranks.processes:
            process.kill()
    return ranks.results(failures_expected=number == signal.SIGKILL)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.story)])
def test_three_sigterms_change_nothing(tmp_path: Path, data: Path, undisturbed: Any, size: int) -> None:
    run = new_run(tmp_path, "stopped", data)
    draw = random.Random(size)
    stops = 0
    for _ in range(3):
        victims = draw.sample(range(size), draw.randint(1, size))
        codes = interrupted(run, size, signal.SIGTERM, len(lines(run)) + draw.randint(2, 12), victims)
        assert len(set(codes)) == 1, "all ranks leave with the same code"
        stops += codes[0] == ExitCode.STOPPED
    assert stops == 3
    assert set(run_ranks(size, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(run) == undisturbed[size][0]
    assert lines(run) == undisturbed[size][1]
    assert [step for step, *_ in lines(run)] == list(range(1, STEPS + 1))
    assert not read_event_lines(run, "train", "lost_work"), "a stop that saves loses nothing"


@pytest.mark.parametrize(
    ("size", "who"),
    [(2, "all"), (4, "one"), *(pytest.param(*more, marks=pytest.mark.story) for more in [(4, "all"), (2, "one")])],
)
def test_three_sigkills_lose_only_what_was_not_saved(
    tmp_path: Path, data: Path, undisturbed: Any, size: int, who: str
) -> None:
    run = new_run(tmp_path, "killed", data)
    draw = random.Random(size)
    left = []
    for _ in range(3):
        victims = list(range(size)) if who == "all" else [draw.randrange(size)]
        interrupted(run, size, signal.SIGKILL, len(lines(run)) + draw.randint(8, 16), victims)
        left.append((find_newest_step(run.checkpoints_dir), lines(run)[-1][0]))
    assert set(run_ranks(size, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert compute_run_digest(run) == undisturbed[size][0]
    assert lines(run) == undisturbed[size][1]
    restored = [(e["step"], e["lost_steps"]) for e in read_event_lines(run, "train") if e["event"] == "restored"]
    assert restored, "at least one attempt went on from a checkpoint"
    assert restored == [(saved, reached - saved) for saved, reached in left if saved]
    # saves every 7 steps; one may still have been under way when the kill came
    assert all(reached - saved <= 2 * 7 for saved, reached in left)


def recording_rank(rank_info: Any, path: Path, stage: str) -> int:
    """A rank that notes which samples it trains on."""
    from pipeline.train.trainer import Trainer

    real = Trainer.step

    def step(self: Any, number: int, batch: Any) -> dict[str, Any]:
        line = real(self, number, batch)
        samples = {"step": number, "rank": rank_info.rank, "samples": batch["tokens"].tolist()}
        append_line(path / "samples.jsonl", json.dumps(samples))
        return line

    setattr(Trainer, "step", step)  # noqa: B010
    return stage_rank(rank_info, path, stage)


def samples_of(run: Run, step: int) -> list[list[int]]:
    """The tokens of the global batch of a step, by the definition of the order."""
    config, manifest, samples = run.config, load_manifest(run.data_dir), []
    length, size = config.data.sequence_length, config.train.global_batch
    for shard in manifest.train:
        tokens = np.fromfile(run.data_dir / shard.file, shard.dtype, shard.tokens, offset=shard.offset)
        samples += [tokens[i : i + length + 1].tolist() for i in range(0, len(tokens) - length, length)]
    return [samples[i] for i in compute_index_range(config.run.seed, (step - 1) * size, size, len(samples))]


def test_other_numbers_of_ranks_see_the_same_samples_and_losses(tmp_path: Path, data: Path) -> None:
    """Dropout draws differ by layout; without it 10 steps after a change agree to 1e-5 (contract 3)."""
    calm, run = (new_run(tmp_path, name, data, "model.dropout=0.0") for name in ("calm", "elastic"))
    assert set(run_ranks(2, stage_rank, calm.path, "train")) == {ExitCode.DONE}
    interrupted(run, 2, signal.SIGTERM, 15, [1], recording_rank)
    first = len(lines(run))
    interrupted(run, 1, signal.SIGTERM, first + 15, [0], recording_rank)
    second = len(lines(run))
    assert 15 <= first < second < STEPS - 10
    assert set(run_ranks(4, recording_rank, run.path, "train")) == {ExitCode.DONE}
    ours, reference = lines(run), lines(calm)
    assert ours[:first] == reference[:first] and len(ours) == STEPS
    for changed in (first, second):
        for mine, calm_line in zip(ours[changed : changed + 10], reference[changed : changed + 10], strict=True):
            assert mine[1] == pytest.approx(calm_line[1], rel=1e-5)
            assert mine[2] == pytest.approx(calm_line[2], rel=1e-4)
    seen = sorted(read_jsonl(run.path / "samples.jsonl"), key=lambda line: (line["step"], line["rank"]))
    for step in range(1, STEPS + 1):
        batch = [sample for line in seen if line["step"] == step for sample in line["samples"]]
        assert batch == samples_of(run, step), f"step {step}"


def test_a_torn_metrics_line_is_mended(tmp_path: Path, data: Path, undisturbed: Any) -> None:
    run = new_run(tmp_path, "torn", data)
    interrupted(run, 2, signal.SIGTERM, 10, [0, 1])
    with open(run.metrics_file, "a") as file:
        file.write('{"step": 999, "lo')
    assert set(run_ranks(2, stage_rank, run.path, "train")) == {ExitCode.DONE}
    assert lines(run) == undisturbed[2][1]
    for line in run.metrics_file.read_text().splitlines():
        json.loads(line)
