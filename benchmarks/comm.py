"""Compare MPI with Gloo (all-reduce, DDP steps by bucket size), and gradient hooks with each other.

    python -m benchmarks.comm [ranks …]         # 2 and 4 by default; writes comm.md and hooks.md
    python -m benchmarks.comm hooks [ranks …]   # only one of the two tables: hooks or backends

The same processes use both backends in turn, so that other load of the machine affects both backends. The table has
the medians over all rounds. The DDP step trains the quickstart's model (20 MB of gradients) on one short sequence per
rank, so that little computation hides communication. Set `parallel.bucket_mb` to the fastest bucket size on your
machine.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.table import write_table

ROOT = Path(__file__).resolve().parent.parent
ALL_REDUCE_SIZES = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "25 MiB": 25 << 18}
"""Numbers of fp32 values (4 bytes each) of the measured all-reduces, by the name in the table."""
BUCKETS_MB = (1, 5, 25, 100)
"""Bucket sizes of DDP with which the backends are compared."""
HOOKS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "fp16": {"kind": "fp16"},
    "bf16": {"kind": "bf16"},
    "PowerSGD, rank 4": {"kind": "powersgd", "rank": 4},
    "Top-K, 1 %": {"kind": "topk", "ratio": 0.01},
}
"""Options of the gradient hooks, by the name in the table."""
HOOK_BUCKETS_MB = (1, 25)
"""Bucket sizes of DDP with which the hooks are compared."""
ROUNDS = 11
"""Number of measured rounds. A round measures each backend once."""


def main() -> None:
    """Write the tables that the command line names; both tables if it names none."""
    arguments = sys.argv[1:]
    rank_counts = [int(argument) for argument in arguments if argument.isdigit()] or [2, 4]
    tables = {"hooks": write_hooks_table, "backends": write_backends_table}
    for name, write in tables.items():
        if name in arguments or all(argument.isdigit() for argument in arguments):
            write(rank_counts)


def write_hooks_table(rank_counts: list[int]) -> None:
    """Measure the gradient hooks and write their table."""
    rows = []
    best = []
    load = os.getloadavg()[0]
    for ranks in rank_counts:
        median_ms: dict[str, float] = {}
        for name, bucket, sent, pairs in run_benchmark(ranks, "--hooks"):
            times_ms = [statistics.median(pair[i] for pair in pairs) * 1e3 for i in (0, 1)]
            times = [f"{ms:.1f}" for ms in times_ms]
            rows.append([f"{ranks} ranks, {name}, {bucket} MiB", f"{sent / 1e6:.2f}", *times])
            for backend, ms in zip(("mpi", "gloo"), times_ms, strict=True):
                median_ms[f"{name}, {bucket} MiB, {backend}"] = ms
        best.append(f"on {ranks} ranks: {min(median_ms, key=median_ms.__getitem__)}")
    note = (
        f"Times of one DDP step, medians of {ROUNDS} interleaved rounds. MB sent: by one rank, with ring algorithms. "
        f"Load average {load:.1f} before the run. All ranks share the memory of this machine, so sending takes little "
        f"time, compared with the computation of the compression. Fastest: {'; '.join(best)}."
    )
    write_table("hooks", "Gradient hooks", note, ["hook, buckets", "MB sent", "MPI, ms", "Gloo, ms"], rows)


def write_backends_table(rank_counts: list[int]) -> None:
    """Measure MPI and Gloo and write their table."""
    rows = []
    best = []
    load = os.getloadavg()[0]
    for ranks in rank_counts:
        result = run_benchmark(ranks, "--backends")
        for name, pairs in result["raw"].items():
            rows.append([f"{ranks} ranks, all-reduce of {name}", *format_pairs(pairs)])
        for bucket, pairs in result["ddp"].items():
            rows.append([f"{ranks} ranks, DDP step, buckets of {bucket} MiB", *format_pairs(pairs)])
        for bucket, pairs in result["cpu"].items():
            rows.append([f"{ranks} ranks, CPU time of the DDP step, {bucket} MiB", *format_pairs(pairs)])
        for bucket, thread_s in result["parts"].items():
            for part, seconds in thread_s.items():
                rows.append([f"{ranks} ranks, {bucket} MiB, {part}", f"{seconds * 1e3:.3f}", *"---"])
        for index, backend in enumerate(("mpi", "gloo")):
            median_s = {
                bucket: statistics.median(pair[index] for pair in pairs) for bucket, pairs in result["ddp"].items()
            }
            best.append(f"{backend} on {ranks} ranks: {min(median_s, key=median_s.__getitem__)} MiB")
    note = (
        f"Medians of {ROUNDS} interleaved pairs on {os.cpu_count()} cores. Each rank has one thread for computation, "
        f"and its communication threads. Load average {load:.1f} before the run. Waiting for ranks: the time in which "
        "rank 0 was ready and another rank was not. Most of this time overlaps with backward. Fastest "
        "`parallel.bucket_mb`: "
        f"{'; '.join(best)}."
    )
    write_table("comm", "MPI compared with Gloo", note, ["figure", "MPI, ms", "Gloo, ms", "ratio", "spread"], rows)


def format_pairs(pairs: list[tuple[float, float]]) -> list[str]:
    """Return the cells of a row: the median ms of MPI and Gloo, the median of the ratio MPI / Gloo, and its quartiles.

    Args:
        pairs: seconds with MPI and with Gloo, for each round.
    """
    ratios = sorted(mpi_s / gloo_s for mpi_s, gloo_s in pairs)
    quartiles = statistics.quantiles(ratios, n=4)
    medians = [statistics.median(pair[i] for pair in pairs) * 1e3 for i in (0, 1)]
    return [*(f"{ms:.3f}" for ms in medians), f"{quartiles[1]:.2f}", f"{quartiles[0]:.2f}-{quartiles[2]:.2f}"]


def run_benchmark(ranks: int, option: str) -> Any:
    """Run `measure_rank` in `ranks` MPI ranks. Return the JSON value that rank 0 prints as the last line.

    Args:
        ranks: number of ranks.
        option: `--hooks` or `--backends`.
    """
    from slurm.supervise.launch import build_mpirun_command

    command, environment = build_mpirun_command(ranks)
    done = subprocess.run(
        [*command, sys.executable, "-W", "ignore", "-m", "benchmarks.comm", option],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_rank(measures_hooks: bool) -> None:
    """Measure the hooks (True) or the backends (False) on this rank. Rank 0 prints the result as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pipeline.base.dist_env import read_rank_info
    from pipeline.config.sections import HookConfig, ModelConfig
    from pipeline.model.decoder import Decoder
    from pipeline.mpi import backend as mpi
    from pipeline.mpi.worker_thread import CollectiveThread
    from pipeline.parallel.replica_sync import GradientHook
    from tests.support.communication_counter import CommunicationCounter

    torch.set_num_threads(1)
    mpi.start_mpi(read_rank_info(os.environ), timedelta(minutes=5))
    gloo = dist.new_group(backend="gloo")
    groups: dict[str, Any] = {"mpi": dist.group.WORLD, "gloo": gloo}

    def measure(repetitions: int, calls: Mapping[str, Callable[[], object]]) -> list[tuple[float, ...]]:
        """Return a tuple for each round: for each backend, first the seconds and then the CPU seconds per call.

        One more round, before the others, warms up and is not returned.

        Args:
            repetitions: number of calls of each backend in a round.
            calls: the measured function of each backend.
        """
        rounds = []
        for _ in range(ROUNDS + 1):
            times: list[float] = []
            for call in calls.values():
                dist.barrier(group=gloo)
                start = time.perf_counter()
                cpu_start = time.process_time()
                for _ in range(repetitions):
                    call()
                times.append((time.perf_counter() - start) / repetitions)
                times.append((time.process_time() - cpu_start) / repetitions)
            rounds.append(tuple(times))
        return rounds[1:]

    # Seconds of the MPI group's communication thread, by activity. They are summed over all calls, also those of the
    # warm-up round.
    thread_s = {"waiting for ranks": 0.0, "transfer": 0.0}
    wait_for_all_ranks = CollectiveThread._wait_for_all_ranks

    def wait_and_record(thread: CollectiveThread, item: Any) -> None:
        """Wait for all ranks, as the original method does, and record the wait and the transfer in `thread_s`."""
        finish = item.work.finish
        start = time.perf_counter()
        wait_for_all_ranks(thread, item)
        transfer_start = time.perf_counter()

        def finish_and_record(error: BaseException | None = None) -> None:
            """Finish the collective, and record the time of its transfer."""
            thread_s["transfer"] += time.perf_counter() - transfer_start
            finish(error)

        item.work.finish = finish_and_record
        thread_s["waiting for ranks"] += transfer_start - start

    CollectiveThread._wait_for_all_ranks = wait_and_record  # type: ignore[assignment,method-assign]
    result: dict[str, Any] = {"raw": {}, "ddp": {}, "cpu": {}, "parts": {}}
    for name, count in {} if measures_hooks else ALL_REDUCE_SIZES.items():
        calls = {
            backend: functools.partial(dist.all_reduce, torch.ones(count), group=group)
            for backend, group in groups.items()
        }
        measured = measure(2 if count > 1 << 20 else 20, calls)
        result["raw"][name] = [(times[0], times[2]) for times in measured]  # seconds with MPI and with Gloo

    tokens = torch.randint(0, 4096, (1, 65))

    def make_step(group: Any, bucket: int, hook: str = "none") -> Callable[[], None]:
        """Return a function that runs one DDP step of a new model.

        Args:
            group: the process group, which determines the backend.
            bucket: size of DDP's buckets in MiB.
            hook: name of the gradient hook in HOOKS.
        """
        model = Decoder(ModelConfig(dim=256, layers=4, heads=8, kv_heads=4), 4096, 256)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
        compression = GradientHook(HookConfig(**HOOKS[hook]), dict(model.named_parameters()), 1)
        if hook != "none":
            compression.register(ddp)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            """Run one DDP step: forward, backward with all-reduces, update."""
            logits = ddp(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            compression.end_step(is_applied=True)

        return step

    hook_results = []
    for hook in HOOKS if measures_hooks else ():
        for bucket in HOOK_BUCKETS_MB:
            steps = {backend: make_step(group, bucket, hook) for backend, group in groups.items()}
            measured = measure(2, steps)
            with CommunicationCounter() as sent:
                steps["gloo"]()
            pairs = [(times[0], times[2]) for times in measured]
            hook_results.append((hook, bucket, sum(sent.bytes.values()), pairs))
    for bucket in () if measures_hooks else BUCKETS_MB:
        thread_s.update(dict.fromkeys(thread_s, 0.0))
        measured = measure(4, {backend: make_step(group, bucket) for backend, group in groups.items()})
        # Divide by the number of steps: four in each round, and the first round warms up.
        result["parts"][bucket] = {name: seconds / (4 * (ROUNDS + 1)) for name, seconds in thread_s.items()}
        result["ddp"][bucket] = [(times[0], times[2]) for times in measured]
        result["cpu"][bucket] = [(times[1], times[3]) for times in measured]  # CPU seconds with MPI and with Gloo
    if dist.get_rank() == 0:
        print(json.dumps(hook_results if measures_hooks else result), flush=True)
    dist.destroy_process_group()
    mpi.finalize_mpi()


if __name__ == "__main__":
    if sys.argv[1:] in (["--backends"], ["--hooks"]):
        measure_rank(sys.argv[1] == "--hooks")
    else:
        main()
