"""Timing what all ranks do at the same moment, on their devices: matrix products, attention, copies, messages, steps.

All ranks at once, as a training does it, so that what they share is shared. A figure is the median of repeats on the
slowest rank; what is short is repeated between two looks at the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pipeline.comm.groups import World
from pipeline.config.sections import Config
from pipeline.model.task import DTYPES, Task
from pipeline.parallel.mesh import Layout
from pipeline.train.engine import Engine
from planning.machine import Exchange, Step, Timings
from planning.measure import shapes
from planning.workload import Workload

REPEATS = 7
_WARM_UP = 2
_SHORT_S = 2e-3
_COPIED = 1 << 26
"""Bytes of a copy: more than caches hold."""
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of collectives."""
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch before 2.13
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(device: torch.device, call: Callable[[], object], times: int = 1) -> float:
    """Seconds of one call of so many in a row; all ranks call it."""
    found = []
    for _ in range(_WARM_UP + REPEATS):
        dist.all_reduce(torch.zeros(1, device=device))
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            call()
        _wait(device)
        found.append((time.perf_counter() - began) / times)
    slowest = torch.tensor([median(found[_WARM_UP:])], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds = float(slowest.item())
    return median_s(device, call, int(_SHORT_S / seconds) + 1) if times == 1 and seconds < _SHORT_S else seconds


def operators(config: Config, layout: Layout, world: World, work: Workload) -> Timings:
    """All of it, of the work's shapes."""
    device, dtype = world.device, DTYPES.get(work.precision, torch.float32)
    drawn = partial(torch.randn, dtype=dtype, device=device)
    q, k, v = drawn(3, work.micro_batch, work.heads // work.tensor, work.sequence, work.head)
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    return Timings(
        products=[
            (m, n, k, median_s(device, partial(torch.matmul, drawn(m, k), drawn(n, k).T))) for m, n, k in shapes(work)
        ],
        attention=median_s(device, partial(scaled_dot_product_attention, q, k, v, is_causal=True)),
        copied=(_COPIED, median_s(device, partial(torch.empty_like(source).copy_, source))),
        exchanges=list(exchanges(world, layout.ranks_per_node)),
        steps=[step(config, layout, world, work)],
    )


def exchanges(world: World, per_node: int) -> Iterator[Exchange]:
    """Collectives and messages of several sizes: inside nodes, then between ranks of the same place on theirs."""
    node, place = divmod(world.rank, per_node)
    inside = [range(first, first + per_node) for first in range(0, world.size, per_node)]
    between = [range(first, world.size, per_node) for first in range(per_node)]
    for all_members, number in ((inside, node), (between, place)):
        group = [dist.new_group(list(members)) for members in all_members][number]  # every rank makes every group
        members, ranks = all_members[number], len(all_members[number])
        for size in _SIZES if ranks > 1 else ():
            part, whole = (torch.ones(max(1, size // 4 // ranks) * n, device=world.device) for n in (1, ranks))
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(dist.all_reduce, whole, group=group),
                "all_gather": partial(_ALL_GATHER, whole, part, group=group),
                "reduce_scatter": partial(_REDUCE_SCATTER, part, whole, group=group),
                "send": partial(_there_and_back, members, world.rank, whole),
            }
            for kind, call in calls.items():
                seconds = median_s(world.device, call) / (2 if kind == "send" else 1)
                told = {"kind": kind, "ranks": ranks, "between": all_members is between, "seconds": seconds}
                yield Exchange.model_validate({**told, "size": whole.nbytes})


def _there_and_back(members: range, rank: int, tensor: Tensor) -> None:
    """A message to the neighbour, and its answer; ranks in pairs, a last one alone."""
    place = members.index(rank)
    if (other := place ^ 1) < len(members):
        for sender in (0, 1):
            (dist.send if place % 2 == sender else dist.recv)(tensor, members[other])


def step(config: Config, layout: Layout, world: World, work: Workload) -> Step:
    """Real steps of the engine that trains, on drawn tokens."""
    engine, numbers = Engine(config, layout, world, Task(config, work.vocab)), count(1)
    rows = config.train.global_batch // layout.dp
    drawn = torch.randint(0, work.vocab, (rows, work.sequence + 1), device=world.device)

    def call() -> None:
        engine.backward({"tokens": drawn}, next(numbers))
        engine.update(float(engine.clip(config.optimizer.clip_norm)))

    return Step(work=work, ranks_per_node=layout.ranks_per_node, seconds=median_s(world.device, call))
