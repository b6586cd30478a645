"""Profile a step on two ranks whose parts have known bounds.

Each rank sleeps and computes, and measures the time of each section itself. `check_profile` compares the profile only
with bounds that hold at any load of the machine.
"""

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
from pipeline.train.step_trace import STEP_PARTS
from tests.support.cluster_runs import wait_for
from tests.support.tiny_training import VOCAB, tiny_config

COMPUTE_S = 0.6
"""Seconds that rank 0 computes after it started the all-reduce."""
LATE_S = 0.5
"""Seconds that rank 1 sleeps after rank 0 has computed, before it calls the all-reduce."""
REST_S = 0.3
"""Seconds that both ranks sleep at the end of the step."""
CLOCK_S = 0.005
"""Tolerance for the resolution and the drift of the two clocks that are compared."""


def compute_for(seconds: float) -> float:
    """Multiply matrices for at least `seconds`; return the time that passed, in seconds."""
    start = time.perf_counter()
    matrix = torch.rand(500, 500)
    while time.perf_counter() < start + seconds:
        matrix = (matrix @ matrix).clamp(0, 1)
    return time.perf_counter() - start


def run_profiled_step(folder: Path, rank: int, control_group: dist.ProcessGroup) -> tuple[dict[str, Any], Any]:
    """Profile a step in which rank 0 computes during an all-reduce that rank 1 calls late.

    Args:
        folder: run directory for the profile, the same for both ranks.
        rank: this rank, 0 or 1.
        control_group: Gloo group for the stop coordinator.

    Returns:
        The seconds of each part of the step as the profile reports them, and the seconds that this rank measured: of
        `compute`, of `all_reduce` (from the call to the end of the wait) and of the `step`.
    """
    config = tiny_config(2, train={"profile_every": 1})
    coordinator = StopCoordinator(StopFlag(), control_group)
    world = World(rank, 2, torch.device("cpu"), "")
    profiler = Profiler(Run(folder, config), resolve_layout(config, 2, 2, VOCAB), world, coordinator)
    compute_for(0.1)
    values = torch.ones(1000)
    computed_file = folder / "rank-0-has-computed"
    start = time.perf_counter()
    profiler.begin_step(1)
    if rank == 1:
        wait_for("rank 0 has computed", computed_file.exists, timeout=60)
        time.sleep(LATE_S)
    call_time = time.perf_counter()
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    compute_s = 0.0
    if rank == 0:
        compute_s = compute_for(COMPUTE_S)
        computed_file.touch()
    work.wait()
    all_reduce_s = time.perf_counter() - call_time
    time.sleep(REST_S)
    profiler.end_step(1, save=True)
    measured = {"compute": compute_s, "all_reduce": all_reduce_s, "step": time.perf_counter() - start}
    (profiled,) = read_profiled_parts(folder, rank)
    return profiled, measured


def read_profiled_parts(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the parts of each profiled step of a rank, computed from the spans in its profile."""
    import gzip
    import json

    from pipeline.train.step_trace import Span, divide_step

    paths = folder.glob(f"profiles/*/rank-{rank}.json.gz")
    profiles = [json.loads(gzip.decompress(path.read_bytes())) for path in paths]
    return [divide_step([Span(*span) for span in profile["spans"]], profile["step_us"]) for profile in profiles]


def check_profile(rank: int, profiled: dict[str, Any], measured: dict[str, float], group: str = "world") -> None:
    """Raise AssertionError if a part of the profile of `run_profiled_step` is outside its bounds.

    Args:
        rank: the rank of the profile, 0 or 1.
        profiled: first result of `run_profiled_step`.
        measured: second result of `run_profiled_step`.
        group: name of the process group of the all-reduce.
    """
    exposed_s, facts = profiled["communication_exposed"], (profiled, measured)
    assert profiled["exposed_by_group"] == {group: exposed_s}, facts
    assert profiled["copy"] == profiled["bubble"] == 0, facts
    assert sum(profiled[part] for part in STEP_PARTS) < measured["step"] + CLOCK_S, facts
    assert profiled["compute"] < measured["compute"] + CLOCK_S, facts
    assert profiled["compute"] + exposed_s < measured["all_reduce"] + CLOCK_S, facts
    if rank == 0:
        assert profiled["compute"] > COMPUTE_S / 2, facts
        assert exposed_s > LATE_S - CLOCK_S and profiled["idle"] > REST_S - CLOCK_S, facts
    else:
        assert profiled["idle"] > LATE_S + REST_S - CLOCK_S, facts
