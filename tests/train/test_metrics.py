"""Tests of the bytes that a rank sends, compared with `plan`, and of the exposed communication time of late ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from pipeline.parallel.traffic import count_traffic
from tests.parallel.test_replicas import create_engine
from tests.support.mpirun import run_mpirun
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

SIZES = {"dim": 64, "intermediate_size": 128}
LATE_S = 1.5


def join_process_group(rank_info: RankInfo, config: Config) -> Any:
    from pipeline.comm import groups

    return groups.join_process_group(rank_info, config)


def run_second_step(
    rank_info: RankInfo, config: Config, world: Any, enter_phase: Callable[[str], None], context: Any
) -> Any:
    """Train two steps, the second one inside `context`. Return its metrics and its duration in seconds.

    `enter_phase` is called with the name of each phase of the second step.
    """
    from pipeline.model.task import DecoderTask
    from pipeline.train.engine import Engine
    from pipeline.train.metrics import ExposedCommMeter

    layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
    engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
    meter = ExposedCommMeter(engine.model, world)

    def train(step: int, batch: Any, enter_phase: Callable[[str], None]) -> None:
        engine.backward({"tokens": batch.chunk(layout.dp)[layout.coordinates(rank_info.rank).dp]}, step, enter_phase)
        meter.record_backward_end()
        engine.update_weights(engine.clip_gradients(1.0).item())

    first, second = make_batches(config)[:2]
    train(1, first, lambda _: None)
    with context:
        started = time.perf_counter()
        train(2, second, enter_phase)
        return meter.read_metrics(), time.perf_counter() - started


# -- sent bytes -----------------------------------------------------------------------------------------------


def sent_bytes_rank(rank_info: RankInfo, configs: list[Config]) -> list[dict[str, int]]:
    """Return the bytes that this rank sends in the second step of each config, by group."""
    from tests.support.communication_counter import CommunicationCounter

    world = join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        counter = CommunicationCounter()
        run_second_step(rank_info, config, world, lambda _: None, counter)
        results.append(dict(counter.bytes))
    return results


def check_sent_bytes(sent: list[dict[str, int]], config: Config) -> None:
    """Check that `plan` predicts, for each group, the bytes of the rank that sends most. `sent` has them by rank."""
    names = {"data": "dp_replicate", "shard": "dp_shard", "replicate": "dp_replicate", "tensor": "tp", "pipeline": "pp"}
    predicted = list(count_traffic(config, resolve_layout(config, len(sent), len(sent), VOCAB), VOCAB))
    for group, size, _ in predicted:
        name = f"mesh_{names[group]}"
        name = name if name in sent[0] else "default_pg"  # torch's default group contains all ranks
        assert max(sent_by_rank[name] for sent_by_rank in sent) == pytest.approx(size, rel=0.02), (group, sent)
    assert len(predicted) >= len(set(sent[0]) - {"default_pg"}), "the plan has no entry for a group"


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"hook": {"kind": "bf16"}},
    {"hook": {"kind": "topk", "ratio": 0.05}},
    {"local_sgd": {"every": 1}},
    {"zero": 1},
    {"zero": 3},
    {"zero": 1, "data": {"replicate": 2, "shard": 2}},
    {"pipeline": 2},
    {"tensor": 2},
    {"zero": 2},
    {"zero": 2, "reduce": "step"},
    {"zero": 3, "reduce": "step"},
]


@pytest.mark.story
def test_ranks_send_as_many_bytes_as_planned() -> None:
    configs = [tiny_config(4, parallel=parallel, model=SIZES) for parallel in LAYOUTS]
    results = run_ranks(4, sent_bytes_rank, configs)
    for number, config in enumerate(configs):
        check_sent_bytes([rank[number] for rank in results], config)
    ((_, size, _),) = count_traffic(configs[0], resolve_layout(configs[0], 4, 4, VOCAB), VOCAB)
    assert results[0][0] == {"default_pg": size + 8 * 2 * 3 // 4}, "gradients, and the loss"
    reduced_per_micro_batch = results[0][9]["default_pg"]
    reduced_per_step = results[0][10]["default_pg"]
    # a step has two micro-batches; FSDP gathers the output layer and its norm once more than necessary
    output_layer = (VOCAB + 1) * SIZES["dim"] * 4 * 3 // 4
    assert reduced_per_micro_batch - reduced_per_step == size // 2 + output_layer


# -- exposed time ----------------------------------------------------------------------------------------


def late_rank(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    """Return the result of `run_step_with_late_rank`."""
    return run_step_with_late_rank(rank_info, config, join_process_group(rank_info, config))


def run_step_with_late_rank(rank_info: RankInfo, config: Config, world: Any) -> tuple[dict[str, float], float]:
    """Run a step in which the last rank starts its backward late. Return its metrics and its duration in seconds."""
    from contextlib import nullcontext

    delays = [LATE_S] if rank_info.rank == world.size - 1 else []

    def enter_phase(phase: str) -> None:
        if phase in ("backward", "pipeline") and delays:
            time.sleep(delays.pop())

    return run_second_step(rank_info, config, world, enter_phase, nullcontext())


def check_exposed_time(line: dict[str, float], step_s: float, was_late: bool) -> None:
    """Check that a late rank's own delay is not exposed communication, but that waiting for a late rank is."""
    assert 0 < line["exposed_comm_s"] <= step_s
    if was_late:
        assert step_s - line["exposed_comm_s"] > LATE_S, "the delay of this rank is not communication"
    else:
        assert line["exposed_comm_s"] > LATE_S - 0.5, (line, step_s)


def test_waiting_for_a_late_rank_is_exposed() -> None:
    config = tiny_config(2, model=SIZES, train={"micro_batch": 8})
    for rank, (line, step_s) in enumerate(run_ranks(2, late_rank, config)):
        check_exposed_time(line, step_s, rank == 1)


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=["zero", "tp", "pp"])
def test_layouts_whose_communication_cannot_be_observed_have_no_exposed_time(parallel: dict[str, Any]) -> None:
    config = tiny_config(2, parallel=parallel, model=SIZES, train={"micro_batch": 8})
    assert [line for line, _ in run_ranks(2, late_rank, config)] == [{}, {}]


def overlapping_rank(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    """Run a step of several buckets, in which rank 1 is late for the first one while rank 0 computes.

    Return the metrics of the step, and the seconds for which this rank computed.
    """
    import torch
    import torch.distributed as dist

    from pipeline.comm.groups import World
    from pipeline.model.spec import EMBEDDING
    from pipeline.train.metrics import ExposedCommMeter

    engine = create_engine(rank_info, config)
    meter = ExposedCommMeter(engine.model, World(rank_info.rank, 2, torch.device("cpu"), "gloo"))
    computed = 0.0

    def compute(_: Any) -> None:
        nonlocal computed
        started = time.perf_counter()
        time.sleep(2 * LATE_S)
        computed += time.perf_counter() - started

    def enter_phase(phase: str) -> None:
        if phase == "backward" and rank_info.rank == 1:
            time.sleep(LATE_S)

    if rank_info.rank == 0:  # the embedding's gradient is the last one of a backward
        engine.parts[0].get_parameter(EMBEDDING).register_hook(compute)
    dist.barrier()
    engine.backward({"tokens": next(iter(make_batches(config))).chunk(2)[rank_info.rank]}, 1, enter_phase)
    meter.record_backward_end()
    return meter.read_metrics(), computed


def test_communication_that_overlaps_with_computation_is_not_exposed() -> None:
    (line, computed), (waited, _) = run_ranks(
        2, overlapping_rank, tiny_config(2, model=SIZES, train={"micro_batch": 8})
    )
    assert computed > LATE_S and 0 < line["exposed_comm_s"] < LATE_S - 0.5, line
    assert waited["exposed_comm_s"] > LATE_S - 0.5, "rank 1 waits, because rank 0 computes for longer"


@pytest.mark.story
def test_waiting_for_a_late_rank_is_exposed_over_mpi() -> None:
    done = run_mpirun(2, "tests.train.test_metrics", timeout=240)
    assert done.returncode == 0 and done.stdout.count("all checks passed") == 2, done.stdout


def check_rank_over_mpi() -> None:
    """Check the exposed time of this rank under mpirun, with whole replicas, and print "all checks passed"."""
    import os

    from pipeline.base.dist_env import read_rank_info
    from pipeline.comm import groups

    rank_info = read_rank_info(os.environ)
    configs = [
        tiny_config(2, parallel={**parallel, "backend": "mpi"}, model=SIZES)
        for parallel in ({}, {"hook": {"kind": "bf16"}})
    ]
    world = groups.join_process_group(rank_info, configs[0])
    for config in configs:
        check_exposed_time(*run_step_with_late_rank(rank_info, config, world), rank_info.rank == 1)
    groups.leave_process_group()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    check_rank_over_mpi()
