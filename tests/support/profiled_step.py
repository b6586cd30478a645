"""A step whose parts are known: ranks that compute, communicate and rest for times that they measure themselves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.base.signals import StopFlag
from pipeline.comm.groups import World
from pipeline.parallel.mesh import resolve_layout
from pipeline.resilience.stop import StopCoordinator
from pipeline.run.directory import Run
from pipeline.train.profiler import Profiler
from tests.support.tiny_training import tiny_config

COMPUTE_S, LATE_S, REST_S = 0.6, 1.0, 0.3


def compute_for(seconds: float) -> float:
    """Multiply matrices for so long; how long it was."""
    began, one = time.perf_counter(), torch.rand(500, 500)
    while time.perf_counter() < began + seconds:
        one = (one @ one).clamp(0, 1)
    return time.perf_counter() - began


def run_profiled_step(folder: Path, rank: int, side: dist.ProcessGroup, computes: bool = True) -> tuple[Any, Any]:
    """Of a step in which rank 1 calls an all-reduce late, and rank 0 `computes` for a part of the time in which it is
    under way: seconds by part as the profile says, and as this rank measured."""
    config = tiny_config(2, train={"profile_every": 1})
    coordinator = StopCoordinator(StopFlag(), side)
    world = World(rank, 2, torch.device("cpu"), "")
    profiler = Profiler(Run(folder, config), resolve_layout(config, 2, 2, 64), world, coordinator)
    compute_for(0.1)
    profiler.begin_step(1)
    began, computed = time.perf_counter(), 0.0
    if rank == 1:
        time.sleep(LATE_S)
    called = time.perf_counter()
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    assert work is not None
    if rank == 0 and computes:
        computed = compute_for(COMPUTE_S)
    work.wait()
    waited = time.perf_counter() - called - computed
    time.sleep(REST_S)
    whole = time.perf_counter() - began
    known = {"compute": computed, "communication_exposed": waited, "copy": 0.0, "bubble": 0.0}
    profiler.end_step(1, save=True)
    (found,) = read_profiled_parts(folder, rank)
    return found, known | {"idle": whole - computed - waited}


def read_profiled_parts(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank of a profiled step says of it, read back from its spans."""
    import gzip
    import json

    from pipeline.train.step_trace import Span, divide_step

    told = [json.loads(gzip.decompress(path.read_bytes())) for path in folder.glob(f"profiles/*/rank-{rank}.json.gz")]
    return [divide_step([Span(*span) for span in one["spans"]], one["step_us"]) for one in told]


def check_profile(found: dict[str, Any], known: dict[str, float], group: str = "world") -> None:
    """Raise AssertionError where a part is not what it was, within 5 points of the step: on busy cores 3 were seen."""
    whole = sum(known.values())
    for part, seconds in known.items():
        assert abs(found[part] - seconds) < 0.05 * whole, (part, found, known)
    assert abs(found["exposed_by_group"][group] - known["communication_exposed"]) < 0.05 * whole, found
