"""Measure the cost of coordinated stopping, and the time from a requeue to the first new step.

    python -m benchmarks.recovery [--steps 1600] [--requeues 6]      (the second part needs root and Debian's Slurm)

Coordination (results/agreement.md): two ranks run steps of about 50 ms (matrix products, all-reduces of gradients and
loss). In half of the steps, chosen at random, the ranks check for stop requests (pipeline/resilience/stop.py). The
table compares the median times of steps with and without the check, over all steps and over each quarter of the run. It
also has the CPU time of the check, and the time of a step with a request. Target: the check takes less than 0.5 % of a
step.

Requeue (results/restart.md): a tiny training run on the test cluster (4 nodes × 1 rank) is preempted repeatedly. The
times come from events.jsonl (event `ready`, field `startup_s`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import write_table
from pipeline.base.dist_env import RankInfo
from pipeline.base.files import read_jsonl
from pipeline.run.directory import Run
from pipeline.run.events import Ready, Requeued, Restored, Started
from tests.chaos import faults
from tests.chaos.driver import ChaosRun, mount_small_disk
from tests.cluster import Cluster, Options
from tests.cluster.cluster import find_cluster_problem
from tests.cluster.config import CRED_EXPIRE_S
from tests.support.ranks import run_ranks

STEP_S = 0.050
"""Approximate duration of a step."""
WARM_UP_STEPS = 40
PARTS = 4
"""Number of parts of the run for which the medians are also compared."""


def measure_steps_rank(rank_info: RankInfo, steps: int) -> tuple[list[float], list[float], list[float], float]:
    """Time the steps on this rank.

    Returns:
        Seconds of each step without a check for requests, of each step with a check, and of each step with a request;
        CPU seconds of one check without a request.
    """
    import math

    import torch
    import torch.distributed as dist

    from pipeline.base.signals import StopFlag
    from pipeline.comm import groups
    from pipeline.resilience.stop import SAVE_REQUEST, StopCoordinator

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", rank_info.master_port, rank_info.world_size, rank_info.rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank_info.rank, world_size=rank_info.world_size)
    coordinator = StopCoordinator(StopFlag(), groups.new_control_group())
    matrix_MM = torch.randn(256, 256)
    gradients_P = torch.zeros(100_000)

    def reduce_loss(loss: float) -> float:
        """Return the sum of the loss over all ranks."""
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    start = time.perf_counter()
    for _ in range(400):
        matrix_MM @ matrix_MM
    product_s = (time.perf_counter() - start) / 400
    # Kinds of steps: without a check for requests, with a check, and with a request.
    plain, checked, requested = range(3)
    step_times: tuple[list[float], list[float], list[float]] = ([], [], [])
    generator = random.Random(1)
    kind = plain
    coordinator.add_request(SAVE_REQUEST, lambda: kind == requested)
    for step in range(steps + WARM_UP_STEPS):
        kind = generator.choices((plain, checked, requested), (48, 48, 4))[0]
        start = time.perf_counter()
        for _ in range(max(1, round(STEP_S / product_s))):
            matrix_MM @ matrix_MM
        dist.all_reduce(gradients_P)
        # A NaN in the reduced loss means that a rank has a request (pipeline/resilience/stop.py).
        if math.isnan(reduce_loss(math.nan if kind != plain and coordinator.wants_attention() else 1.0)):
            coordinator.exchange()
            reduce_loss(1.0)
        if step >= WARM_UP_STEPS:
            step_times[kind].append(time.perf_counter() - start)
    kind = plain  # There is no request while the CPU time of the check is measured.
    cpu_start = time.process_time()
    for _ in range(20_000):
        math.isnan(math.nan if coordinator.wants_attention() else 1.0)
    return *step_times, (time.process_time() - cpu_start) / 20_000


def write_agreement_table(steps: int) -> None:
    """Measure the check for stop requests and write its table."""
    plain_s, checked_s, requested_s, check_cpu_s = run_ranks(2, measure_steps_rank, steps, timeout=600)[0]

    def median_of_part(step_times: list[float], number: int) -> float:
        """Return the median step time of part `number` of the run."""
        size = len(step_times) // PARTS
        return statistics.median(step_times[number * size : (number + 1) * size])

    overheads = [median_of_part(checked_s, i) / median_of_part(plain_s, i) - 1 for i in range(PARTS)]
    check_overhead = statistics.median(checked_s) / statistics.median(plain_s) - 1
    request_overhead = statistics.median(requested_s) / statistics.median(plain_s) - 1
    step_ms = statistics.median(plain_s) * 1000
    rows = [
        ["step with the check, against a step without", f"{check_overhead:+.2%}",
         f"{min(overheads):+.2%} to {max(overheads):+.2%}", "< 0.5 %"],
        ["CPU time of the check, per step", f"{check_cpu_s * 1e5 / step_ms:.4f}%", f"{check_cpu_s * 1e6:.1f} µs", ""],
        ["step with a request (a stop or a save on demand)", f"{request_overhead:+.2%}", "", ""],
    ]  # fmt: skip
    note = (
        f"2 ranks, {steps} steps of {step_ms:.1f} ms. The check: each rank checks in each step whether a stop or a "
        f"save was requested. About half of the steps include the check. Spread: the range over {PARTS} parts of the "
        "run."
    )
    write_table("agreement", "Cost of coordinated stopping", note, ["figure", "median", "spread", "target"], rows)


def read_restarts(run: Run) -> list[dict[str, float]]:
    """Return the seconds of each part of a start, by the name of the part, for each start after a requeue.

    Such a start has four events in a row: requeued, started, restored, ready.
    """
    events = run.read_events("train", Requeued, Started, Restored, Ready)
    lines = {line["step"]: line for line in read_jsonl(run.metrics_file)}
    restarts = []
    for requeued, started, restored, ready in zip(events, events[1:], events[2:], events[3:], strict=False):
        is_restart = isinstance(requeued, Requeued) and isinstance(started, Started)
        if not (is_restart and isinstance(restored, Restored) and isinstance(ready, Ready)):
            continue
        startup_s = dict(ready.startup_s or {})
        load_s = restored.seconds or 0.0
        restarts.append({
            "Slurm: requeue delay and queue": started.timestamp - requeued.timestamp,
            "srun and start of Python": ready.timestamp - started.timestamp - sum(startup_s.values()),
            "imports": startup_s["imports"],
            "rendezvous": startup_s["rendezvous"],
            "node check": startup_s.get("preflight", 0.0),
            "model, data, groups": startup_s["build_and_load"] - load_s,
            "loading the checkpoint": load_s,
            "first step": lines[ready.step + 1]["step_time_s"],
        })  # fmt: skip
    return restarts


def write_restart_table(requeues: int) -> None:
    """Preempt a training run `requeues` times, and write the table with the time of each part of a restart."""
    if reason := find_cluster_problem(Options()):
        sys.exit(reason)
    cluster_dir = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    options = Options(grace=1, user_signal=False, slurmd_timeout=5)
    with mount_small_disk() as folder, Cluster(cluster_dir).up(options) as cluster:
        chaos_run = ChaosRun(cluster, folder, seed=1, count=requeues)
        chaos_run.run_faults([faults.preempt] * requeues)
        restarts = read_restarts(chaos_run.run)
    names = list(restarts[0])
    times_s = {name: [restart[name] for restart in restarts] for name in names}
    median_s = {name: statistics.median(times) for name, times in times_s.items()}
    unavoidable_s = sum(median_s[name] for name in ("imports", "rendezvous", "loading the checkpoint"))
    without_slurm_s = sum(median_s[name] for name in names[1:])  # The first part is the wait for Slurm.
    total_s = sum(median_s.values())
    rows = [[name, f"{median_s[name]:.3f}", f"{min(times_s[name]):.3f}-{max(times_s[name]):.3f}"] for name in names]
    factor = "× (imports + rendezvous + load)"
    rows += [
        ["requeue → first new step", f"{total_s:.3f}", f"{total_s / unavoidable_s:.2f} {factor}"],
        ["the same without Slurm", f"{without_slurm_s:.3f}", f"{without_slurm_s / unavoidable_s:.2f} {factor}"],
    ]
    note = (
        f"{len(restarts)} preemptions of a tiny training run, on 4 nodes × 1 rank of the test cluster on one machine. "
        f"Its slurm.conf sets `AuthInfo=cred_expire={CRED_EXPIRE_S}`. Slurm holds a requeued job for cred_expire + "
        f"1 s, here {CRED_EXPIRE_S + 1} s. With the default of Slurm (120 s), the first row and the total are about "
        "two minutes longer."
    )
    write_table("restart", "Time from a requeue to the first new step", note, ["part", "median s", "spread"], rows)


def main() -> None:
    """Write benchmarks/results/agreement.md and benchmarks/results/restart.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--requeues", type=int, default=6)
    arguments = parser.parse_args()
    write_agreement_table(arguments.steps)
    write_restart_table(arguments.requeues)


if __name__ == "__main__":
    main()
