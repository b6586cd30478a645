"""Communication over MPI against Gloo, in one run: raw all-reduce, a DDP step, and the bucket size that is best here.
Then the same step for each gradient hook, with what it sends, and the best of all for this machine.

    python -m benchmarks.comm [ranks …]         # 2 and 4 by default; writes comm.md and hooks.md
    python -m benchmarks.comm hooks [ranks …]   # one of the two only: hooks or backends

Both backends serve the same processes in turn, so that what else the machine does falls on both; figures are medians
of pairs. The DDP step is that of the quickstart's model (20 MB of gradients) on one short sequence per rank: little
arithmetic to hide behind. The fastest bucket size is what `parallel.bucket_mb` should be on this machine.
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
RAW = {"4 B": 1, "64 KiB": 1 << 14, "1 MiB": 1 << 18, "25 MiB": 25 << 18}
BUCKETS_MB = (1, 5, 25, 100)
HOOKS: dict[str, dict[str, Any]] = {
    "none": {"kind": "none"},
    "fp16": {"kind": "fp16"},
    "bf16": {"kind": "bf16"},
    "PowerSGD, rank 4": {"kind": "powersgd", "rank": 4},
    "Top-K, 1 %": {"kind": "topk", "ratio": 0.01},
}
HOOK_BUCKETS_MB = (1, 25)
ROUNDS = 11


def main() -> None:
    words = sys.argv[1:]
    sizes = [int(word) for word in words if word.isdigit()] or [2, 4]
    for part in (hooks, backends):
        if part.__name__ in words or all(word.isdigit() for word in words):
            part(sizes)


def hooks(sizes: list[int]) -> None:
    """The table of hooks."""
    rows, best, load = [], [], os.getloadavg()[0]
    for ranks in sizes:
        found = run(ranks, "--hooks")
        medians: dict[str, float] = {}
        for name, bucket, sent, pairs in found:
            ms = [statistics.median(pair[i] for pair in pairs) * 1e3 for i in (0, 1)]
            rows.append([f"{ranks} ranks, {name}, {bucket} MiB", f"{sent / 1e6:.2f}", *(f"{m:.1f}" for m in ms)])
            medians |= {f"{name}, {bucket} MiB, {b}": m for b, m in zip(("mpi", "gloo"), ms, strict=True)}
        best.append(f"on {ranks} ranks: {min(medians, key=medians.__getitem__)}")
    note = (
        f"One DDP step, medians of {ROUNDS} rounds in which all take turns; what one rank sends in it, by ring "
        f"algorithms; load average {load:.1f} before the run. All ranks share this machine's memory, so bytes cost "
        f"nearly nothing here and compression's arithmetic does. Fastest: {'; '.join(best)}."
    )
    write_table("hooks", "Gradient hooks", note, ["hook, buckets", "MB sent", "MPI, ms", "Gloo, ms"], rows)


def backends(sizes: list[int]) -> None:
    """The table of MPI against Gloo."""
    rows, best, load = [], [], os.getloadavg()[0]
    for ranks in sizes:
        result = run(ranks, "--rank")
        for name, pairs in result["raw"].items():
            rows.append([f"{ranks} ranks, all-reduce of {name}", *figures(pairs, 1e3)])
        for bucket, pairs in result["ddp"].items():
            rows.append([f"{ranks} ranks, DDP step, buckets of {bucket} MiB", *figures(pairs, 1e3)])
        for bucket, pairs in result["cpu"].items():
            rows.append([f"{ranks} ranks, CPU time of that step, {bucket} MiB", *figures(pairs, 1e3)])
        for bucket, parts in result["parts"].items():
            for part, seconds in parts.items():
                rows.append([f"{ranks} ranks, {bucket} MiB, of it {part}", f"{seconds * 1e3:.3f}", *"---"])
        for index, backend in enumerate(("mpi", "gloo")):
            medians = {b: statistics.median(pair[index] for pair in pairs) for b, pairs in result["ddp"].items()}
            best.append(f"{backend} on {ranks} ranks: {min(medians, key=medians.__getitem__)} MiB")
    note = (
        f"Medians of {ROUNDS} interleaved pairs, {os.cpu_count()} cores, one thread per rank and its communication "
        f"threads; load average {load:.1f} before the run. Meeting: the time in which rank 0 was ready and another was "
        f"not; most of it passes while gradients are still computed. Fastest `parallel.bucket_mb`: {'; '.join(best)}."
    )
    write_table("comm", "MPI against Gloo", note, ["figure", "MPI, ms", "Gloo, ms", "ratio", "spread"], rows)


def figures(pairs: list[tuple[float, float]], scale: float) -> list[str]:
    """Medians of both backends, and of their ratio, with its quartiles."""
    ratios = sorted(a / b for a, b in pairs)
    quartiles = statistics.quantiles(ratios, n=4)
    medians = [statistics.median(pair[i] for pair in pairs) * scale for i in (0, 1)]
    return [*(f"{m:.3f}" for m in medians), f"{quartiles[1]:.2f}", f"{quartiles[0]:.2f}-{quartiles[2]:.2f}"]


def run(ranks: int, what: str) -> Any:
    """Start the ranks; rank 0's findings."""
    from slurm.supervise.launch import build_mpirun_command

    command, environment = build_mpirun_command(ranks)
    done = subprocess.run(
        [*command, sys.executable, "-W", "ignore", "-m", "benchmarks.comm", what],
        env={**os.environ, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def rank_main(only_hooks: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from pipeline.base.dist_env import read_rank_info
    from pipeline.config.parallel import HookConfig
    from pipeline.config.sections import ModelConfig
    from pipeline.model.decoder import Decoder
    from pipeline.mpi import backend as mpi
    from pipeline.mpi.worker_thread import CollectiveThread
    from pipeline.parallel.replica_sync import GradientHook
    from tests.support.communication_counter import CommunicationCounter

    torch.set_num_threads(1)
    mpi.start_mpi(read_rank_info(os.environ), timedelta(minutes=5))
    gloo = dist.new_group(backend="gloo")
    groups: dict[str, Any] = {"mpi": dist.group.WORLD, "gloo": gloo}

    def pairs(times: int, calls: Mapping[str, Callable[[], object]]) -> list[tuple[float, ...]]:
        """Seconds and CPU seconds per call, for each backend in turn; the first round warms up."""
        measured = []
        for _ in range(ROUNDS + 1):
            row: list[float] = []
            for call in calls.values():
                dist.barrier(group=gloo)
                wall, cpu = time.perf_counter(), time.process_time()
                for _ in range(times):
                    call()
                row += [(time.perf_counter() - wall) / times, (time.process_time() - cpu) / times]
            measured.append(tuple(row))
        return measured[1:]

    parts = {"meeting": 0.0, "moving data": 0.0}  # seconds of the group's own thread, summed over a step's buckets
    meet = CollectiveThread._wait_for_all_ranks

    def timed_meet(thread: CollectiveThread, item: Any) -> None:
        finish, started = item.work.finish, time.perf_counter()
        meet(thread, item)
        met = time.perf_counter()

        def timed_finish(error: BaseException | None = None) -> None:
            parts["moving data"] += time.perf_counter() - met
            finish(error)

        item.work.finish = timed_finish
        parts["meeting"] += met - started

    CollectiveThread._wait_for_all_ranks = timed_meet  # type: ignore[assignment,method-assign]
    result: dict[str, Any] = {"raw": {}, "ddp": {}, "cpu": {}, "parts": {}}
    for name, count in {} if only_hooks else RAW.items():
        reduce = {b: functools.partial(dist.all_reduce, torch.ones(count), group=group) for b, group in groups.items()}
        measured = pairs(2 if count > 1 << 20 else 20, reduce)
        result["raw"][name] = [(row[0], row[2]) for row in measured]

    tokens = torch.randint(0, 4096, (1, 65))

    def step_of(group: Any, bucket: int, hook: str = "none") -> Callable[[], None]:
        model = Decoder(ModelConfig(dim=256, layers=4, heads=8, kv_heads=4), 4096, 256)
        ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket, gradient_as_bucket_view=True)
        compression = GradientHook(HookConfig(**HOOKS[hook]), dict(model.named_parameters()), 1)
        if hook != "none":
            compression.register(ddp)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step() -> None:
            logits = ddp(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            compression.end_step(is_applied=True)

        return step

    found = []
    for hook in HOOKS if only_hooks else ():
        for bucket in HOOK_BUCKETS_MB:
            steps = {b: step_of(group, bucket, hook) for b, group in groups.items()}
            measured = pairs(2, steps)
            with CommunicationCounter() as sent:
                steps["gloo"]()
            found.append((hook, bucket, sum(sent.bytes.values()), [(row[0], row[2]) for row in measured]))
    for bucket in () if only_hooks else BUCKETS_MB:
        parts.update(dict.fromkeys(parts, 0.0))
        measured = pairs(4, {b: step_of(group, bucket) for b, group in groups.items()})
        result["parts"][bucket] = {name: seconds / (4 * (ROUNDS + 1)) for name, seconds in parts.items()}
        result["ddp"][bucket] = [(row[0], row[2]) for row in measured]
        result["cpu"][bucket] = [(row[1], row[3]) for row in measured]
    if dist.get_rank() == 0:
        print(json.dumps(found if only_hooks else result), flush=True)
    dist.destroy_process_group()
    mpi.finalize_mpi()


if __name__ == "__main__":
    if sys.argv[1:] in (["--rank"], ["--hooks"]):
        rank_main(sys.argv[1] == "--hooks")
    else:
        main()
