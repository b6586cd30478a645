"""Measure how long a restart in place takes, and what the start of ranks through a node agent costs.

    python -m benchmarks.restart [--kills 10]          (the first table needs root and Debian's Slurm)

Restart (results/restart_in_place.md): a tiny training run on two nodes of the test cluster. A rank is killed with
SIGKILL, and the time until the end of the next optimizer step is measured. The table compares it with two other times,
all measured in one execution:

- the same kill with `recovery.in_place: false`, without the time between the requeue and the start of the job;
- the start of as many processes that run a bare DDP loop with a decoder of the same size, from the start of the
  processes to the end of the first step, including the load of a checkpoint. `torchrun --max-restarts` costs at least
  this.

Target: at most 0.15 of each.

Start (results/start.md): the train stage on one machine with four ranks, from the start of its supervisor to the end of
the first step, compared with four separate processes of the bare loop. Targets: at most 0.35 of the CPU time, and 0.55
of the wall time. The second part counts the files that a start opens or queries (strace), with one and with eight
ranks. Target: at most 1.3 times as many with eight ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.table import write_table
from pipeline.base.dist_env import make_local_rank_env
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT, make_code_env
from pipeline.run.directory import Run
from pipeline.run.events import Ready, Requeued, Saved, Started
from tests.cluster import Cluster, Options
from tests.cluster.cluster import find_cluster_problem
from tests.cluster.config import CRED_EXPIRE_S
from tests.support.cluster_runs import get_job_id, run_submit
from tests.support.ranks import find_rank_processes
from tests.support.tiny import make_run, write_config

OVERRIDES = ("train.steps=1000000", "checkpoint.every_steps=40", "train.log_every=1000", "recovery.budgets.crash=1000")
WAIT_S = 240.0
"""How long to wait for a step, before the benchmark fails."""


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until `condition` returns a true value."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not continue")
        time.sleep(0.02)


# ---- kill → next step


def find_ranks(run: Run) -> list[psutil.Process]:
    """Return the processes of the running ranks, whether node agents or srun started them."""
    ranks = list(find_rank_processes(run.path).values())
    command = ["-m", "pipeline", "train", str(run.path)]
    for process in psutil.process_iter(["cmdline"]):
        if (process.info["cmdline"] or [])[-4:] == command and "srun" not in process.info["cmdline"][0]:
            ranks.append(process)
    return ranks


def measure_kills(cluster: Cluster, folder: Path, name: str, overrides: tuple[str, ...], kills: int) -> list[float]:
    """Train a run and kill random ranks. Return the seconds from each kill to the end of the next optimizer step.

    The time between a requeue and the start of the job is left out.
    """
    config = write_config(folder, name)
    run = Run.create(load_config(config, [*OVERRIDES, *overrides]))
    result = run_submit(cluster, folder, str(config), *OVERRIDES, *overrides)
    assert result.returncode == 0, result.stderr
    generator = random.Random(1)
    seconds = []
    for _ in range(kills):
        start_count = len(run.read_events("train", Started))

        def has_saved(start_count: int = start_count) -> bool:
            """Return True if the newest attempt has saved a checkpoint."""
            events = run.read_events("train", Started, Saved)
            return isinstance(events[-1], Saved) if events and len(events) > start_count else False

        wait_for(has_saved)
        time.sleep(generator.random())
        ready_count = len(run.read_events("train", Ready))
        kill_time = time.time()
        generator.choice(find_ranks(run)).kill()

        def is_ready(ready_count: int = ready_count) -> bool:
            """Return True if the next attempt is about to run its first step."""
            return len(run.read_events("train", Ready)) > ready_count

        wait_for(is_ready)
        ready = run.read_events("train", Ready)[-1]

        def find_step(step: int = ready.step + 1) -> dict[str, float] | None:
            """Return the line of the first new step; None if it has not ended yet."""
            return next((line for line in read_jsonl(run.metrics_file) if line["step"] == step), None)

        wait_for(find_step)
        line = find_step()
        assert line is not None
        total_s = ready.timestamp + line["step_time_s"] - kill_time
        requeued = [event for event in run.read_events("train", Requeued) if event.timestamp > kill_time]
        if requeued:
            total_s -= run.read_events("train", Started)[-1].timestamp - requeued[-1].timestamp
        seconds.append(total_s)
        print(f"{name}: {total_s:.2f} s", flush=True)
    cluster.run(["scancel", get_job_id(run.path, "train")])
    cluster.clear()
    return seconds


def write_restart_table(kills: int) -> None:
    """Measure the restarts with four and eight ranks on two nodes, and write their table."""
    if reason := find_cluster_problem(Options()):
        sys.exit(reason)
    cluster_dir = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    rows = []
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary, Cluster(cluster_dir).up(Options()) as cluster:
        folder = Path(temporary)
        for ranks_per_node in (2, 4):
            ranks = 2 * ranks_per_node
            layout = ("stages.train.nodes=2", f"stages.train.tasks_per_node={ranks_per_node}", "train.global_batch=8")
            in_place = measure_kills(cluster, folder, f"in-place-{ranks}", layout, kills)
            requeue = measure_kills(
                cluster, folder, f"requeue-{ranks}", (*layout, "recovery.in_place=false"), max(3, kills // 2)
            )
            bare = [measure_bare_start(folder, ranks)[0] for _ in range(kills)]
            own = statistics.median(in_place)
            for label, times in (
                ("restart in place: kill → next step", in_place),
                ("requeue: kill → next step, without Slurm's share", requeue),
                ("bare DDP loop: start → first step", bare),
            ):
                median = statistics.median(times)
                ratio = f"{own / median:.3f}" if times is not in_place else ""
                target = "≤ 0.15" if times is not in_place else ""
                rows.append([str(ranks), label, f"{median:.2f}", f"{min(times):.2f}-{max(times):.2f}", ratio, target])
    note = (
        f"A tiny model on two nodes of the test cluster (Slurm, on one machine). {kills} kills of random ranks with "
        "SIGKILL, half as many for the requeue. All times include the load of a checkpoint. Without Slurm's share: the "
        "time between the requeue and the start of the job is left out. It is at least cred_expire + 1 s: "
        f"{CRED_EXPIRE_S + 1} s here, 121 s with Slurm's default. Ratio: restart in place divided by this row."
    )
    header = ["ranks", "figure", "median s", "spread", "ratio", "target"]
    write_table("restart_in_place", "Time from a killed rank to the next step", note, header, rows)


# ---- start of the bare loop


def run_bare_rank(checkpoint: Path) -> None:
    """Run one rank of the bare loop up to the end of the first step. Print the time and the CPU seconds as JSON."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.plain_decoder import PlainDecoder

    torch.set_num_threads(1)
    rank = int(os.environ["SLUICE_RANK"])
    size = int(os.environ["SLUICE_WORLD_SIZE"])
    listen_fd = int(os.environ["SLUICE_LISTEN_FD"]) if rank == 0 else None
    port = int(os.environ["SLUICE_MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0, master_listen_fd=listen_fd)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(1)
    # The sizes of the model are those of tests/support/tiny.py.
    model = PlainDecoder(300, 32, dim=32, layers=2, heads=4, kv_heads=2, ffn=96, theta=1e4)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    tokens = torch.randint(0, 300, (2, 33))
    logits = ddp(tokens[:, :-1])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(json.dumps([time.time(), time.process_time()]), flush=True)
    if rank == 0 and not checkpoint.exists():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    dist.barrier()
    os._exit(0)


def measure_bare_start(folder: Path, ranks: int) -> tuple[float, float]:
    """Return wall and CPU seconds of `ranks` processes of the bare loop, from their start to the end of a step."""
    checkpoint = folder / "bare.pt"
    if not checkpoint.exists():
        start_bare_ranks(checkpoint, ranks)
    start = time.time()
    results = start_bare_ranks(checkpoint, ranks)
    return max(end for end, _ in results) - start, sum(cpu for _, cpu in results)


def start_bare_ranks(checkpoint: Path, ranks: int) -> list[tuple[float, float]]:
    """Run the bare loop and return what each rank printed."""
    command = [sys.executable, "-m", "benchmarks.restart", "--bare", str(checkpoint)]
    with socket.create_server(("127.0.0.1", 0), backlog=ranks + 8) as listener:
        children = []
        for rank in range(ranks):
            sockets = [listener.fileno()] if rank == 0 else []
            environment = make_local_rank_env(rank, ranks, listener.getsockname()[1], *sockets)
            children.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    cwd=CODE_ROOT,
                    pass_fds=sockets,
                    text=True,
                    stdout=subprocess.PIPE,
                )
            )
        outputs = [child.communicate(timeout=WAIT_S)[0] for child in children]
    return [(line[0], line[1]) for line in (json.loads(output.splitlines()[-1]) for output in outputs)]


# ---- start of the train stage


def measure_sluice_start(data: Run, folder: Path, ranks: int) -> tuple[float, float]:
    """Return wall and CPU seconds from the start of the supervisor to the end of the first step.

    The CPU time is that of the supervisor, the agent and the ranks when the step has ended.
    """
    name = f"start-{time.monotonic_ns()}"
    overrides = ("train.steps=1000000", f"stages.train.tasks_per_node={ranks}", "train.log_every=1000")
    run = make_run(folder, name, overrides, data.data_dir)
    environment = make_code_env(os.environ, run.code_dir)
    start = time.time()
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "slurm", "train", str(run.path)], cwd=run.code_dir, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_for(lambda: any(True for _ in read_jsonl(run.metrics_file)))
        processes = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(recursive=True)]
        cpu_s = sum(sum(process.cpu_times()[:2]) for process in processes)
        ready = run.read_events("train", Ready)[-1]
        first_line = next(iter(read_jsonl(run.metrics_file)))
        return ready.timestamp + first_line["step_time_s"] - start, cpu_s
    finally:
        (run.path / "stop").touch()
        supervisor.wait(WAIT_S)


def count_file_calls(data: Run, folder: Path, ranks: int) -> int:
    """Return how many files the processes of a short train stage open or query, counted with strace."""
    overrides = ("train.steps=2", f"stages.train.tasks_per_node={ranks}")
    run = make_run(folder, f"opens-{ranks}", overrides, data.data_dir)
    output = folder / f"opens-{ranks}.txt"
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat,stat,lstat,newfstatat,statx,access", "-o", str(output)]
    environment = make_code_env(os.environ, run.code_dir)
    subprocess.run(
        [*command, sys.executable, "-m", "slurm", "train", str(run.path)], cwd=run.code_dir, env=environment,
        check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    # Only files of the shared file system count: the interpreter, the packages, the code and the run.
    shared = re.compile(rf'"({re.escape(sys.prefix)}|{re.escape(sys.base_prefix)}|{re.escape(str(folder))})')
    return sum(bool(shared.search(line)) for line in output.read_text().splitlines())


def write_start_table(pairs: int) -> None:
    """Measure the starts in pairs, and write their table."""
    with tempfile.TemporaryDirectory(prefix="sluice-") as temporary:
        folder = Path(temporary)
        data = make_run(folder, "data")
        measured = [(measure_sluice_start(data, folder, 4), measure_bare_start(folder, 4)) for _ in range(pairs + 1)][
            1:
        ]
        rows = []
        for index, (label, target) in enumerate((("wall s", "≤ 0.55"), ("CPU s", "≤ 0.35"))):
            own = [pair[0][index] for pair in measured]
            bare = [pair[1][index] for pair in measured]
            ratios = [a / b for a, b in zip(own, bare, strict=True)]
            medians = [f"{statistics.median(values):.2f}" for values in (own, bare)]
            spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
            rows.append([f"start → first step, 4 ranks: {label}", *medians, f"{statistics.median(ratios):.3f}",
                         spread, target])  # fmt: skip
        if shutil.which("strace"):
            eight, one = (count_file_calls(data, folder, ranks) for ranks in (8, 1))
            rows.append(["files opened or queried, 8 ranks against 1", str(eight), str(one), f"{eight / one:.3f}", "",
                         "≤ 1.3"])  # fmt: skip
    note = (
        f"A tiny model on one machine, {pairs} pairs. The first column of seconds is the train stage: the supervisor, "
        "the agent and four ranks. The second is four processes of a bare DDP loop, which also load a checkpoint. The "
        "last row compares two train stages of two steps."
    )
    header = ["figure", "Sluice", "compared with", "ratio", "spread", "target"]
    write_table("start", "Cost of a start through the node agent", note, header, rows)


def main() -> None:
    """Write benchmarks/results/start.md and benchmarks/results/restart_in_place.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        run_bare_rank(arguments.bare)
        return
    write_start_table(arguments.pairs)
    write_restart_table(arguments.kills)


if __name__ == "__main__":
    main()
