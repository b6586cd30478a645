"""What `plan` says that a rank sends, against what it really sends; exposed time against a rank that is late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from pipeline.parallel.traffic import count_traffic
from tests.parallel.test_replicas import engine_of
from tests.support.mpirun import run_mpirun
from tests.support.ranks import run_ranks
from tests.support.tiny_training import VOCAB, make_batches, tiny_config

SIZES = {"dim": 64, "intermediate_size": 128}
LATE_S = 1.5


def join(rank_info: RankInfo, config: Config) -> Any:
    from pipeline.comm import groups

    return groups.join_process_group(rank_info, config)


def second_step(rank_info: RankInfo, config: Config, world: Any, enter: Callable[[str], None], around: Any) -> Any:
    """Train two steps, the second one inside `around`, with a meter on: its line, and how long it took."""
    from pipeline.model.task import DecoderTask
    from pipeline.train.engine import Engine
    from pipeline.train.metrics import ExposedCommMeter

    layout = resolve_layout(config, world.size, rank_info.local_world_size, VOCAB)
    engine = Engine(config, layout, world, DecoderTask(config, VOCAB))
    meter = ExposedCommMeter(engine.model, world)

    def train(step: int, batch: Any, enter: Callable[[str], None]) -> None:
        engine.backward({"tokens": batch.chunk(layout.dp)[layout.coordinates(rank_info.rank).dp]}, step, enter)
        meter.record_backward_end()
        engine.update_weights(engine.clip_gradients(1.0).item())

    first, second = make_batches(config)[:2]
    train(1, first, lambda _: None)
    with around:
        started = time.perf_counter()
        train(2, second, enter)
        return meter.read_metrics(), time.perf_counter() - started


# -- bytes -----------------------------------------------------------------------------------------------


def sent_rank(rank_info: RankInfo, configs: list[Config]) -> list[dict[str, int]]:
    """What this rank sends in the second step of each config, by group."""
    from tests.support.communication_counter import CommunicationCounter

    world, found = join(rank_info, configs[0]), []
    for config in configs:
        with_it = CommunicationCounter()
        second_step(rank_info, config, world, lambda _: None, with_it)
        found.append(dict(with_it.bytes))
    return found


def check(sent: list[dict[str, int]], config: Config) -> None:
    """The most that any rank sends in each group is what `plan` says; `sent`: by rank."""
    names = {"data": "dp_replicate", "shard": "dp_shard", "replicate": "dp_replicate", "tensor": "tp", "pipeline": "pp"}
    said = list(count_traffic(config, resolve_layout(config, len(sent), len(sent), VOCAB), VOCAB))
    for group, size, _ in said:
        name = f"mesh_{names[group]}"
        name = name if name in sent[0] else "default_pg"  # a group of all ranks is torch's own
        assert max(of_rank[name] for of_rank in sent) == pytest.approx(size, rel=0.02), (group, sent)
    assert len(said) >= len(set(sent[0]) - {"default_pg"}), "a group of which plan says nothing"


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
def test_bytes_are_those_of_the_plan() -> None:
    configs = [tiny_config(4, parallel=parallel, model=SIZES) for parallel in LAYOUTS]
    found = run_ranks(4, sent_rank, configs)
    for number, config in enumerate(configs):
        check([of_rank[number] for of_rank in found], config)
    ((_, size, _),) = count_traffic(configs[0], resolve_layout(configs[0], 4, 4, VOCAB), VOCAB)
    assert found[0][0] == {"default_pg": size + 8 * 2 * 3 // 4}, "gradients, and the loss"
    often, once = found[0][9]["default_pg"], found[0][10]["default_pg"]
    end = (VOCAB + 1) * SIZES["dim"] * 4 * 3 // 4  # the output layer and its norm: FSDP asks for them once too often
    assert often - once == size // 2 + end, "reduced after each of two micro-batches, or once per step"


# -- exposed time ----------------------------------------------------------------------------------------


def late_rank(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    return late(rank_info, config, join(rank_info, config))


def late(rank_info: RankInfo, config: Config, world: Any) -> tuple[dict[str, float], float]:
    """The line of a step in which the last rank comes late to its backward, and how long the step took."""
    from contextlib import nullcontext

    sleeping = [LATE_S] if rank_info.rank == world.size - 1 else []

    def enter(phase: str) -> None:
        if phase in ("backward", "pipeline") and sleeping:
            time.sleep(sleeping.pop())

    return second_step(rank_info, config, world, enter, nullcontext())


def check_late(line: dict[str, float], seconds: float, was_late: bool) -> None:
    """`seconds`: of the whole step."""
    assert 0 < line["exposed_comm_s"] <= seconds
    if was_late:
        assert seconds - line["exposed_comm_s"] > LATE_S, "sleeping is no waiting"
    else:
        assert line["exposed_comm_s"] > LATE_S - 0.5, (line, seconds)


def test_waiting_for_a_late_rank_is_exposed() -> None:
    config = tiny_config(2, model=SIZES, train={"micro_batch": 8})
    for rank, (line, seconds) in enumerate(run_ranks(2, late_rank, config)):
        check_late(line, seconds, rank == 1)


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}], ids=["zero", "tp", "pp"])
def test_what_cannot_be_seen_is_not_told(parallel: dict[str, Any]) -> None:
    config = tiny_config(2, parallel=parallel, model=SIZES, train={"micro_batch": 8})
    assert [line for line, _ in run_ranks(2, late_rank, config)] == [{}, {}]


def hidden_rank(rank_info: RankInfo, config: Config) -> tuple[dict[str, float], float]:
    """A step of several buckets: rank 1 comes late to the first one, and rank 0 computes meanwhile, for this long."""
    import torch
    import torch.distributed as dist

    from pipeline.comm.groups import World
    from pipeline.model.spec import EMBEDDING
    from pipeline.train.metrics import ExposedCommMeter

    engine = engine_of(rank_info, config)
    meter = ExposedCommMeter(engine.model, World(rank_info.rank, 2, torch.device("cpu"), "gloo"))
    computed = 0.0

    def compute(_: Any) -> None:
        nonlocal computed
        started = time.perf_counter()
        time.sleep(2 * LATE_S)
        computed += time.perf_counter() - started

    def enter(phase: str) -> None:
        if phase == "backward" and rank_info.rank == 1:
            time.sleep(LATE_S)

    if rank_info.rank == 0:  # the last gradient of a backward
        engine.parts[0].get_parameter(EMBEDDING).register_hook(compute)
    dist.barrier()
    engine.backward({"tokens": next(iter(make_batches(config))).chunk(2)[rank_info.rank]}, 1, enter)
    meter.record_backward_end()
    return meter.read_metrics(), computed


def test_what_computing_hides_is_not_exposed() -> None:
    (line, computed), (waited, _) = run_ranks(2, hidden_rank, tiny_config(2, model=SIZES, train={"micro_batch": 8}))
    assert computed > LATE_S and 0 < line["exposed_comm_s"] < LATE_S - 0.5, line
    assert waited["exposed_comm_s"] > LATE_S - 0.5, "the other one had computed less"


@pytest.mark.story
def test_over_mpi() -> None:
    done = run_mpirun(2, "tests.train.test_metrics", timeout=240)
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stdout


def over_mpi() -> None:
    """One rank under mpirun: of whole replicas, waiting for a late rank is exposed."""
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
        check_late(*late(rank_info, config, world), rank_info.rank == 1)
    groups.leave_process_group()
    print("good", flush=True)


if __name__ == "__main__":
    over_mpi()
