"""What survival costs: the votes of each step, and the way from a requeue back to the first new step.

    python -m benchmarks.recovery [--steps 1600] [--requeues 6]      (the second part: root, Debian's Slurm)

Agreement: two ranks take steps of about 50 ms (matrix products, all-reduces of gradients and loss); in half of them,
drawn at random, ranks ask themselves whether to raise a hand and look whether anybody did
(pipeline/resilience/stop.py). Medians of all steps, and of quarters of the run; the CPU time of that alone; and the
time of a step in which a hand is up. Target: below 0.5 % of a step.

Requeue: a tiny training on the test cluster (4 nodes × 1 rank) is preempted again and again; the parts are read from
events.jsonl, where every user finds them too (`ready` has `startup_s`).
"""

from __future__ import annotations

import argparse
import datetime
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.table import write_table
from pipeline.base.dist_env import RankInfo
from pipeline.base.files import read_jsonl
from pipeline.run.directory import Run
from tests.chaos import faults
from tests.chaos.driver import Story, small_disk
from tests.cluster import Cluster, Options
from tests.cluster.cluster import missing
from tests.cluster.config import CRED_EXPIRE_S
from tests.support.ranks import run_ranks

STEP_S = 0.050
WARM_UP, PARTS = 40, 4


def agree(where: RankInfo, steps: int) -> tuple[list[float], list[float], list[float], float]:
    """In a rank: seconds of each step without agreement, with it, with a hand up; CPU seconds of it with no hand."""
    import math

    import torch
    import torch.distributed as dist

    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.resilience.stop import SAVE_REQUEST, StopCoordinator

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", where.master_port, where.world_size, where.rank == 0)
    dist.init_process_group("gloo", store=store, rank=where.rank, world_size=where.world_size)
    coordinator = StopCoordinator(StopFlag(), groups.new_control_group())
    a_MM, gradients_P = torch.randn(256, 256), torch.zeros(100_000)

    def reduced(number: float) -> float:
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    product_s, started = 1.0, time.perf_counter()
    for _ in range(400):
        a_MM @ a_MM
    product_s = (time.perf_counter() - started) / 400
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    draw = random.Random(1)
    kind = 0
    coordinator.add_request(SAVE_REQUEST, lambda: kind == 2)
    for step in range(steps + WARM_UP):
        kind = draw.choices((0, 1, 2), (48, 48, 4))[0]
        started = time.perf_counter()
        for _ in range(max(1, round(STEP_S / product_s))):
            a_MM @ a_MM
        dist.all_reduce(gradients_P)
        if math.isnan(reduced(math.nan if kind and coordinator.wants_attention() else 1.0)):
            coordinator.exchange()
            reduced(1.0)
        if step >= WARM_UP:
            found[kind].append(time.perf_counter() - started)
    kind = 0
    cpu = time.process_time()
    for _ in range(20_000):
        math.isnan(math.nan if coordinator.wants_attention() else 1.0)
    return *found, (time.process_time() - cpu) / 20_000


def part(seconds: list[float], number: int) -> list[float]:
    """One of PARTS parts of a run's steps."""
    size = len(seconds) // PARTS
    return seconds[number * size : (number + 1) * size]


def agreement_table(steps: int) -> None:
    """Measure the agreement and write the table."""
    without, asking, raised, cpu = run_ranks(2, agree, steps, timeout=600)[0]
    parts = [statistics.median(part(asking, i)) / statistics.median(part(without, i)) - 1 for i in range(PARTS)]
    over, with_hand = (statistics.median(kind) / statistics.median(without) - 1 for kind in (asking, raised))
    step_ms = statistics.median(without) * 1000
    rows = [
        ["a step with the agreement against one without", f"{over:+.2%}",
         f"{min(parts):+.2%} to {max(parts):+.2%}", "< 0.5 %"],
        ["CPU of it, by the step", f"{cpu * 1e5 / step_ms:.4f}%", f"{cpu * 1e6:.1f} µs", ""],
        ["a step in which a hand is up (a stop, a save on demand)", f"{with_hand:+.2%}", "", ""],
    ]  # fmt: skip
    note = f"2 ranks, {steps} steps of {step_ms:.1f} ms, half of them with the agreement; spread over {PARTS} parts."
    write_table("agreement", "What agreeing on a stop costs", note, ["figure", "median", "spread", "target"], rows)


def moments(run: Run) -> list[dict[str, float]]:
    """For each start after a requeue: seconds of its parts, in order."""

    def at(event: dict[str, Any]) -> float:
        return datetime.datetime.fromisoformat(event["time"]).timestamp()

    events = [e for e in run.read_events("train") if e["event"] in ("requeued", "started", "restored", "ready")]
    lines = {line["step"]: line for line in read_jsonl(run.metrics_file)}
    found = []
    for requeued, started, restored, ready in zip(events, events[1:], events[2:], events[3:], strict=False):
        if [e["event"] for e in (requeued, started, restored, ready)] != ["requeued", "started", "restored", "ready"]:
            continue
        parts = dict(ready["startup_s"])
        load = restored["seconds"]
        known = sum(parts.values())
        found.append({
            "Slurm: requeue delay and waiting": at(started) - at(requeued),
            "srun, Python's start": at(ready) - at(started) - known,
            "imports": parts["imports"],
            "rendezvous": parts["rendezvous"],
            "check of nodes": parts.get("preflight", 0.0),
            "model, data, groups": parts["build_and_load"] - load,
            "loading the checkpoint": load,
            "first step": lines[ready["step"] + 1]["step_time_s"],
        })  # fmt: skip
    return found


def restart_table(requeues: int) -> None:
    """Preempt a training `requeues` times and write where the time went."""
    if reason := missing(Options()):
        sys.exit(reason)
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    options = Options(grace=1, user_signal=False, slurmd_timeout=5)
    with small_disk() as folder, Cluster(directory).up(options) as cluster:
        story = Story(cluster, folder, 1, requeues)
        story.go([faults.preempt] * requeues)
        found = moments(story.run)
    names = list(found[0])
    medians = {name: statistics.median(f[name] for f in found) for name in names}
    needed = sum(medians[name] for name in ("imports", "rendezvous", "loading the checkpoint"))
    ours = sum(medians[name] for name in names[1:])
    total = sum(medians.values())
    rows = [
        [name, f"{medians[name]:.3f}", f"{min(f[name] for f in found):.3f}-{max(f[name] for f in found):.3f}"]
        for name in names
    ]
    rows += [
        ["requeue → first new step", f"{total:.3f}", f"{total / needed:.2f} × (imports + rendezvous + load)"],
        ["of it without Slurm", f"{ours:.3f}", f"{ours / needed:.2f} × (imports + rendezvous + load)"],
    ]
    note = (
        f"{len(found)} preemptions of a tiny training, 4 nodes × 1 rank of the test cluster on one machine. Its "
        f"slurm.conf sets `AuthInfo=cred_expire={CRED_EXPIRE_S}`: Slurm holds a requeued job for cred_expire + 1 s, "
        f"here {CRED_EXPIRE_S + 1} s. With Slurm's default (120 s) the first row and the total are about two minutes "
        "longer."
    )
    write_table("restart", "From a requeue to the first new step", note, ["part", "seconds (median)", "spread"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--requeues", type=int, default=6)
    arguments = parser.parse_args()
    agreement_table(arguments.steps)
    restart_table(arguments.requeues)


if __name__ == "__main__":
    main()
