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

MODEL_SIZES = {"dim": 64, "intermediate_size": 128}
LATE_S = 1.5
"""Seconds by which a late rank starts its backward pass after the others."""


def join_process_group(rank_info: RankInfo, config: Config) -> Any:
    """Join the process group as `groups` does, but import torch only here, in the rank."""
    from pipeline.comm import groups

    return groups.join_process_group(rank_info, config)


def run_second_step(
    rank_info: RankInfo, config: Config, world: Any, enter_phase: Callable[[str], None], context: Any
) -> Any:
    """Train two steps, the second one inside the context manager `context`.

    Return the communication metrics and the duration in seconds of the second step. `enter_phase` is called with the
    name of each phase of the second step.
    """
    from pipeline.model.task import DecoderTask
    from pipeline.train.engine import Engine
    from pipeline.train.metrics import ExposedCommMeter

    layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
    engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
    meter = ExposedCommMeter(engine.model, world)

    def run_step(step: int, batch: Any, enter_phase: Callable[[str], None]) -> None:
        engine.backward({"tokens": batch.chunk(layout.dp)[layout.coordinates(rank_info.rank).dp]}, step, enter_phase)
        meter.record_backward_end()
        engine.update_weights(engine.clip_gradients(1.0).item())

    first_batch, second_batch = make_batches(config)[:2]
    run_step(1, first_batch, lambda _: None)
    with context:
        start = time.perf_counter()
        run_step(2, second_batch, enter_phase)
        return meter.read_metrics(), time.perf_counter() - start


# -- sent bytes -----------------------------------------------------------------------------------------------


def count_sent_bytes(rank_info: RankInfo, configs: list[Config]) -> list[dict[str, int]]:
    """Return the bytes that this rank sends in the second step of each config, by group."""
    from tests.support.communication_counter import CommunicationCounter

    world = join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        counter = CommunicationCounter()
        run_second_step(rank_info, config, world, lambda _: None, counter)
        results.append(dict(counter.bytes))
    return results


def check_sent_bytes(sent_by_rank: list[dict[str, int]], config: Config) -> None:
    """Check that the plan predicts, for each group, the bytes of the rank that sends most in this group.

    `sent_by_rank` has the sent bytes of each rank by group.
    """
    names = {"data": "replicate", "shard": "shard", "replicate": "replicate"}
    names |= {"context": "cp", "tensor": "tp", "pipeline": "pp"}
    ranks = len(sent_by_rank)
    predicted_traffic = list(count_traffic(config, resolve_layout(config, ranks, ranks, VOCAB), VOCAB))
    group_names = set(sent_by_rank[0])
    for group, predicted_bytes, _ in predicted_traffic:
        name = f"mesh_{names[group]}"
        name = name if name in group_names else "default_pg"  # torch's default group contains all ranks
        sent_bytes = max(sent[name] for sent in sent_by_rank)
        assert sent_bytes == pytest.approx(predicted_bytes, rel=0.02), (group, sent_by_rank)
    assert len(predicted_traffic) >= len(group_names - {"default_pg"}), "the plan has no entry for a group"


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"hook": {"kind": "bf16"}},
    {"hook": {"kind": "topk", "ratio": 0.05}},
    {"local_sgd": {"every": 1}},
    {"zero": 1},
    {"zero": 3},
    {"zero": 1, "data": {"replicate": 2, "shard": 2}},
    {"pipeline": 2},
    {"context": 2},
    {"context": 2, "zero": 3, "activation_checkpointing": "full"},
    {"tensor": 2},
    {"zero": 2},
    {"zero": 2, "reduce": "step"},
    {"zero": 3, "reduce": "step"},
]


@pytest.mark.story
def test_ranks_send_as_many_bytes_as_planned() -> None:
    configs = [tiny_config(4, parallel=parallel, model=MODEL_SIZES) for parallel in LAYOUTS]
    results = run_ranks(4, count_sent_bytes, configs)
    for number, config in enumerate(configs):
        check_sent_bytes([rank[number] for rank in results], config)
    ((_, gradient_bytes, _),) = count_traffic(configs[0], resolve_layout(configs[0], 4, 4, VOCAB), VOCAB)
    loss_bytes = 8 * 2 * 3 // 4  # a rank of four sends 2 · 3/4 of an all-reduced tensor, here an fp64 value
    assert results[0][0] == {"default_pg": gradient_bytes + loss_bytes}
    bytes_per_micro_batch = results[0][LAYOUTS.index({"zero": 2})]["default_pg"]
    bytes_per_step = results[0][LAYOUTS.index({"zero": 2, "reduce": "step"})]["default_pg"]
    # A step has two micro-batches. If gradients are reduced after each of them, the ranks send the gradients once more.
    # FSDP also gathers the output layer and its norm once more.
    output_layer_bytes = (VOCAB + 1) * MODEL_SIZES["dim"] * 4 * 3 // 4
    assert bytes_per_micro_batch - bytes_per_step == gradient_bytes // 2 + output_layer_bytes


# -- exposed time ----------------------------------------------------------------------------------------


def join_and_run_step_with_late_rank(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    """Join the process group and return the result of `run_step_with_late_rank`."""
    return run_step_with_late_rank(rank_info, config, join_process_group(rank_info, config))


def run_step_with_late_rank(rank_info: RankInfo, config: Config, world: Any) -> tuple[dict[str, float], float]:
    """Run a step in which the last rank starts its backward pass late.

    Return the communication metrics of this rank and the duration of the step in seconds.
    """
    from contextlib import nullcontext

    delays = [LATE_S] if rank_info.rank == world.size - 1 else []

    def enter_phase(phase: str) -> None:
        if phase in ("backward", "pipeline") and delays:
            time.sleep(delays.pop())

    return run_second_step(rank_info, config, world, enter_phase, nullcontext())


def check_exposed_time(metrics: dict[str, float], step_s: float, was_late: bool) -> None:
    """Check the exposed communication time of a rank.

    The time for which a rank waits for a late rank is exposed. For the late rank itself, its delay is not exposed.
    """
    assert 0 < metrics["exposed_comm_s"] <= step_s
    if was_late:
        assert step_s - metrics["exposed_comm_s"] > LATE_S, "the delay of this rank counts as communication"
    else:
        assert metrics["exposed_comm_s"] > LATE_S - 0.5, (metrics, step_s)


def test_waiting_for_a_late_rank_is_exposed() -> None:
    config = tiny_config(2, model=MODEL_SIZES, train={"micro_batch": 8})
    for rank, (metrics, step_s) in enumerate(run_ranks(2, join_and_run_step_with_late_rank, config)):
        check_exposed_time(metrics, step_s, was_late=rank == 1)


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=["zero", "tp", "pp"])
def test_layouts_whose_communication_cannot_be_observed_have_no_exposed_time(parallel: dict[str, Any]) -> None:
    config = tiny_config(2, parallel=parallel, model=MODEL_SIZES, train={"micro_batch": 8})
    assert [metrics for metrics, _ in run_ranks(2, join_and_run_step_with_late_rank, config)] == [{}, {}]


def run_step_with_overlap(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    """Run a step with several gradient buckets. Rank 1 is late for the first bucket while rank 0 computes.

    Return the communication metrics of the step, and the seconds for which this rank computed.
    """
    import torch
    import torch.distributed as dist

    from pipeline.comm.groups import World
    from pipeline.model.spec import EMBEDDING
    from pipeline.train.metrics import ExposedCommMeter

    engine = create_engine(rank_info, config)
    meter = ExposedCommMeter(engine.model, World(rank_info.rank, 2, torch.device("cpu"), "gloo"))
    compute_s = 0.0

    def compute(_: Any) -> None:
        """Sleep in place of a computation. The communication continues in another thread."""
        nonlocal compute_s
        start = time.perf_counter()
        time.sleep(2 * LATE_S)
        compute_s += time.perf_counter() - start

    def enter_phase(phase: str) -> None:
        if phase == "backward" and rank_info.rank == 1:
            time.sleep(LATE_S)

    if rank_info.rank == 0:  # the embedding's gradient is the last one of a backward pass
        engine.parts[0].get_parameter(EMBEDDING).register_hook(compute)
    dist.barrier()
    engine.backward({"tokens": next(iter(make_batches(config))).chunk(2)[rank_info.rank]}, 1, enter_phase)
    meter.record_backward_end()
    return meter.read_metrics(), compute_s


def test_communication_that_overlaps_with_computation_is_not_exposed() -> None:
    config = tiny_config(2, model=MODEL_SIZES, train={"micro_batch": 8})
    (metrics_0, compute_s), (metrics_1, _) = run_ranks(2, run_step_with_overlap, config)
    assert compute_s > LATE_S and 0 < metrics_0["exposed_comm_s"] < LATE_S - 0.5, metrics_0
    assert metrics_1["exposed_comm_s"] > LATE_S - 0.5, "rank 1 must wait, because rank 0 computes for longer"


@pytest.mark.story
def test_waiting_for_a_late_rank_is_exposed_over_mpi() -> None:
    result = run_mpirun(2, "tests.train.test_metrics", timeout=240)
    assert result.returncode == 0 and result.stdout.count("all checks passed") == 2, result.stdout


def check_rank_over_mpi() -> None:
    """Check the exposed time of this rank under mpirun, with one replica per rank, and print "all checks passed"."""
    import os

    from pipeline.base.dist_env import read_rank_info
    from pipeline.comm import groups

    rank_info = read_rank_info(os.environ)
    configs = [
        tiny_config(2, parallel={**parallel, "backend": "mpi"}, model=MODEL_SIZES)
        for parallel in ({}, {"hook": {"kind": "bf16"}})
    ]
    world = groups.join_process_group(rank_info, configs[0])
    for config in configs:
        check_exposed_time(*run_step_with_late_rank(rank_info, config, world), was_late=rank_info.rank == 1)
    groups.leave_process_group()
    print("all checks passed", flush=True)


if __name__ == "__main__":
    check_rank_over_mpi()
