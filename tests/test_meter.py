"""The account of a step's communication: bytes against arithmetic and `plan`, waiting against a rank that is late."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.place import Place
from pipeline.comm.meter import covered, sent
from pipeline.config.layout import layout_of
from pipeline.config.sections import Config
from pipeline.parallel.plan import memory, traffic
from tests.layouts import VOCAB, batches, tiny_config
from tests.mpi import mpirun
from tests.ranks import run_ranks
from tests.test_communication import engine_of

SIZES = {"dim": 64, "intermediate_size": 128}


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=8))
def test_covered_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    moments = {moment for start, length in spans for moment in range(start, start + length)}
    assert covered([[start, start + length] for start, length in spans]) == len(moments)


@given(st.integers(0, 10**6), st.integers(2, 64))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(part: int, ranks: int) -> None:
    whole = part * ranks
    assert sent("all_reduce", whole, ranks) == sent("reduce_scatter", part, ranks) + sent("all_gather", whole, ranks)
    assert sent("send", part, ranks) == part


def metered_rank(place: Place, configs: list[Config], late_s: float = 0.0) -> list[dict[str, Any]]:
    """The account of the second step of each config; the last rank's backward of it is late."""
    from pipeline.comm import groups

    world = groups.join(place, configs[0])
    return [account(config, place, world, late_s) for config in configs]


def account(config: Config, place: Place, world: Any, late_s: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pipeline.comm.meter import Meter
    from pipeline.model.task import Task
    from pipeline.train.engine import Engine

    layout = layout_of(config, world.size, place.local_world_size, VOCAB)
    engine = Engine(config, layout, world, Task(config, VOCAB))
    meter = Meter(engine.groups, world.device, isinstance(engine.model, DistributedDataParallel))
    for step, batch in list(enumerate(batches(config), 1))[:2]:

        def enter(phase: str, step: int = step) -> None:
            meter.phase(phase)
            if late_s and step == 2 and place.rank == world.size - 1 and phase in ("backward", "pipeline"):
                time.sleep(late_s)

        meter.begin()
        started = time.perf_counter()
        engine.backward(batch.chunk(layout.data)[layout.coordinates(place.rank).data], step, enter)
        engine.update(engine.clip(1.0).item())
        seconds = time.perf_counter() - started
        line = meter.take()
    assert dist.all_reduce(torch.zeros(1), async_op=True).wait(timeout=timedelta(seconds=60))
    assert meter.take() == line, "nothing is counted between steps"
    parameters = sum(p.numel() for part in engine.parts for p in part.parameters())
    stage = layout.coordinates(place.rank).pipeline
    return line | {"seconds": seconds, "parameters": parameters, "stage": stage}


def check(line: dict[str, Any], config: Config, ranks: int) -> None:
    """Bytes of each group are what `plan` says, and times fit into the step."""
    comm = line["comm"]
    assert 0 < line["exposed_comm_s"] <= line["seconds"] and line["overlapped_comm_s"] >= 0
    assert line["exposed_comm_s"] + line["overlapped_comm_s"] <= line["seconds"]
    counts = [entry for kinds in comm.values() for entry in kinds.values()]
    for entry in counts:
        assert entry.get("seconds", 0) <= line["exposed_comm_s"] + line["overlapped_comm_s"] + 1e-5
    names = {"data": "dp", "shard": "dp_shard", "replicate": "dp_replicate", "tensor": "tp", "pipeline": "pp"}
    layout = layout_of(config, ranks, ranks, VOCAB)
    for group, size, _ in traffic(config, layout, memory(config, layout, line["stage"], VOCAB, []).parameters):
        label = names[group] if names[group] in comm else "dp_replicate" if group == "data" else names[group]
        total = sum(entry["bytes"] for entry in comm[label].values())
        slack = 0.25 if label == "tp" else 0.02  # plan leaves out what tensor parallelism does outside the blocks
        if label == "pp":
            size //= 2  # plan speaks of a stage in the middle; of two each sends one way
        assert total == pytest.approx(size, rel=slack), (group, comm)


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


def test_bytes_are_those_of_the_plan() -> None:
    configs = [tiny_config(4, parallel=parallel, model=SIZES) for parallel in LAYOUTS]
    found = run_ranks(4, metered_rank, configs)
    for rank in range(4):
        for number, config in enumerate(configs):
            check(found[rank][number], config, 4)
    plain = found[0][0]
    reduced = plain["comm"]["dp"]["all_reduce"]
    assert reduced["bytes"] == 4 * plain["parameters"] * 2 * 3 // 4 + 8 * 2 * 3 // 4, "gradients, and the loss"
    assert reduced["calls"] == 2 and "seconds" in reduced
    often, once = (found[0][n]["comm"]["dp_shard"]["reduce_scatter"]["bytes"] for n in (9, 10))
    assert often == 2 * once, "after each of two micro-batches, or once per step"
    assert "seconds" not in found[0][7]["comm"]["pp"].get("send", {}), "the end of a message over Gloo is not known"


@pytest.mark.parametrize("parallel", [{}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=["dp", "zero", "tp", "pp"])
def test_waiting_for_a_late_rank_is_exposed(parallel: dict[str, Any]) -> None:
    config = tiny_config(2, parallel=parallel, model=SIZES, train={"micro_batch": 8})
    found = run_ranks(2, metered_rank, [config], 1.5)
    assert found[0][0]["exposed_comm_s"] > 1.0, found[0][0]
    assert found[1][0]["seconds"] - found[1][0]["exposed_comm_s"] > 1.4, "sleeping is no waiting"


def hidden_rank(place: Place, config: Config) -> tuple[dict[str, Any], float, float]:
    """The account of a step of several buckets: rank 1 comes late to the first one, rank 0 computes meanwhile.

    With it when rank 0 began and ended to compute, its first buckets under way, or when rank 1 came.
    """
    import torch
    import torch.distributed as dist

    from pipeline.comm.meter import Meter
    from pipeline.model.decoder import EMBEDDING

    engine = engine_of(place, config)
    meter = Meter(engine.groups, torch.device("cpu"), ddp=True)
    moments = [0.0, 0.0]

    def compute(_: Any) -> None:
        moments[0] = time.perf_counter()
        time.sleep(2.0)
        moments[1] = time.perf_counter()

    def enter(phase: str) -> None:
        meter.phase(phase)
        if phase == "backward" and place.rank == 1:
            time.sleep(1.0)
            moments[1] = time.perf_counter()

    if place.rank == 0:  # the last gradient of a backward
        engine.parts[0].get_parameter(EMBEDDING).register_hook(compute)
    dist.barrier()
    meter.begin()
    engine.backward(next(iter(batches(config))).chunk(2)[place.rank], 1, enter)
    return meter.take(), moments[0], moments[1]


def test_what_computing_hides_is_overlapped() -> None:
    config = tiny_config(2, model=SIZES, train={"micro_batch": 8})
    (line, began, ended), (_, _, came) = run_ranks(2, hidden_rank, config)
    hidden = min(ended, came) - began  # of the first bucket, whatever else the machine does
    assert line["comm"]["dp"]["all_reduce"]["calls"] > 2 and hidden > 0.3
    assert line["overlapped_comm_s"] >= hidden - 1e-3, line


def direct_rank(place: Place, config: Config) -> tuple[dict[str, Any], float]:
    """The account of an operation in the tensor group that DTensor knows nothing of, and how long it took."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import _resolve_process_group

    from pipeline.comm import groups
    from pipeline.comm.meter import Meter
    from pipeline.model.task import Task
    from pipeline.train.engine import Engine

    world = groups.join(place, config)
    engine = Engine(config, layout_of(config, 2, 2, VOCAB), world, Task(config, VOCAB))
    meter = Meter(engine.groups, torch.device("cpu"), ddp=False)
    meter.begin()
    started = time.perf_counter()
    dist.all_reduce(torch.zeros(1000), group=_resolve_process_group(meter.short))  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    time.sleep(0.5)
    return meter.take(), seconds


def test_others_may_use_the_tensor_group() -> None:
    line, seconds = run_ranks(2, direct_rank, tiny_config(2, parallel={"tensor": 2}, model=SIZES))[0]
    counted = line["comm"]["tp"]["all_reduce"]
    assert (counted["calls"], counted["bytes"]) == (1, 4000) and line["overlapped_comm_s"] < 0.1
    assert 0 < counted["seconds"] <= seconds and 0 < line["exposed_comm_s"] <= seconds


def test_over_mpi() -> None:
    done = mpirun(2, "tests.test_meter")
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stdout


def over_mpi() -> None:
    """One rank under mpirun."""
    import os

    from pipeline.base.place import identify
    from pipeline.comm import groups

    place = identify(os.environ)
    configs = [
        tiny_config(2, parallel={**parallel, "backend": "mpi"}, model=SIZES)
        for parallel in ({}, {"hook": {"kind": "topk"}}, {"zero": 3}, {"tensor": 2}, {"pipeline": 2})
    ]
    for config, line in zip(configs, metered_rank(place, configs), strict=True):
        check(line, config, 2)
        assert all("seconds" in entry for kinds in line["comm"].values() for entry in kinds.values()), line
    late = metered_late(place, configs[0])
    assert late["exposed_comm_s"] > 1.0 if place.rank == 0 else late["seconds"] - late["exposed_comm_s"] > 1.4, late
    groups.leave()
    print("good", flush=True)


def metered_late(place: Place, config: Config) -> dict[str, Any]:
    import torch

    from pipeline.comm import groups

    return account(config, place, groups.World(place.rank, place.world_size, torch.device("cpu"), "mpi"), 1.5)


if __name__ == "__main__":
    over_mpi()
