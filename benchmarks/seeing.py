"""Measure the cost of monitoring: overhead of followers for the ranks, CPU share of followers, and a profiled step.

    python -m benchmarks.seeing [--seconds 60] [--turn 5] [--pairs 24]

A follower is a process that reads the metrics of a run and exports them (tracking/follower.py).

- Overhead: while two ranks train, the followers (TensorBoard, telemetry) are suspended and resumed in turns. After they
  are resumed, they also process the lines that they missed, so this work counts. Step times of adjacent intervals with
  and without followers are compared. Target: the difference is within the noise.
- CPU share: a fake run writes 10 steps per second. The CPU seconds of each follower and its children are measured after
  its start. Target: less than 1 % of a core for TensorBoard and telemetry together. MLflow's server is not counted.
- Profiled step: every 20th step of a run is profiled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.table import write_table
from benchmarks.trainer import make_run
from pipeline.base.dist_env import make_local_rank_env
from pipeline.run.directory import Run
from tests.support.fake_run import FakeRun
from tests.support.servers import find_free_port, mlflow_server

ROOT = Path(__file__).resolve().parent.parent
STEP_50_MS = (
    "train.global_batch=2", "train.micro_batch=1", "data.sequence_length=128", "checkpoint.every_steps=100000",
    "model.dim=128", "model.layers=2",
)  # fmt: skip
"""Overrides of a model whose step takes about 50 ms."""
WARM_UP_S = 20.0


@contextmanager
def run_training(run_dir: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run two ranks of the train stage without a supervisor during the `with` block, and yield their processes."""
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(2):
            fd = listener.fileno() if rank == 0 else None
            environment = {**os.environ, **make_local_rank_env(rank, 2, listener.getsockname()[1], fd)}
            command = [sys.executable, "-m", "pipeline", "train", str(run_dir)]
            fds = [fd] if fd is not None else []
            ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, pass_fds=fds, stdout=subprocess.DEVNULL))
    try:
        yield ranks
    finally:
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        for process in ranks:
            process.wait(timeout=120)


@contextmanager
def run_followers(run_dir: Path, names: Sequence[str]) -> Iterator[dict[str, psutil.Process]]:
    """Run followers of a run during the `with` block, as the supervisor starts them. Yield their processes by name."""
    command = [sys.executable, "-m", "tracking.follower"]
    (run_dir / "track").mkdir(exist_ok=True)
    processes = {}
    for name in names:
        with open(run_dir / "track" / f"{name}.log", "wb") as log:
            processes[name] = subprocess.Popen([*command, name, str(run_dir)], cwd=ROOT, stdout=log, stderr=log)
    try:
        yield {name: psutil.Process(process.pid) for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in processes.values():
            process.wait(timeout=60)


def wait_for_steps(run_dir: Path, steps: int) -> None:
    """Wait until metrics.jsonl of a run has `steps` lines. Raises TimeoutError after 240 s."""
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_dir} does not train")
        time.sleep(0.2)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def measure_overhead(folder: Path, data: Path, turn_s: float, pairs: int) -> list[list[str]]:
    """Return the table rows with the overhead of followers for the ranks.

    Args:
        folder: where the run is created.
        data: directory of a run whose shards are used.
        turn_s: duration of an interval with or without followers.
        pairs: number of pairs of intervals.
    """
    overrides = (*STEP_50_MS, "track.tensorboard=true", "track.telemetry_s=10")
    run_dir = make_run(folder, "overhead", 1_000_000, data, overrides)
    intervals: list[tuple[bool, float, float, float]] = []
    """Whether followers ran, start and end time, and CPU seconds of the ranks."""
    with run_training(run_dir) as ranks, run_followers(run_dir, ("tensorboard", "telemetry")) as followers:
        rank_processes = [psutil.Process(process.pid) for process in ranks]
        wait_for_steps(run_dir, 20)
        time.sleep(WARM_UP_S)
        for number in range(2 * pairs):
            # The order is with, without, without, with followers, so that a linear drift of the step time cancels out.
            has_followers = number % 4 in (0, 3)
            for process in followers.values():
                process.resume() if has_followers else process.suspend()
            start = time.time()
            cpu_start = sum(map(read_cpu_seconds, rank_processes))
            time.sleep(turn_s)
            intervals.append(
                (has_followers, start, time.time(), sum(map(read_cpu_seconds, rank_processes)) - cpu_start)
            )
    lines = read_metrics(run_dir)
    results = []
    for has_followers, start, end, cpu_s in intervals:
        steps = [line["step_time_s"] for line in lines if start < line["time"] <= end]
        results.append((has_followers, statistics.median(steps), cpu_s / len(steps)))
    step_ms = 1000 * statistics.median(line["step_time_s"] for line in lines[20:])
    return [
        _compare_intervals(f"step of {step_ms:.0f} ms with followers (TensorBoard, telemetry) vs. without", 1, results),
        _compare_intervals("… CPU seconds of the ranks", 2, results),
    ]


def _compare_intervals(name: str, index: int, results: Sequence[tuple[bool, float, float]]) -> list[str]:
    """Return the table row that compares each interval with followers with the adjacent interval without followers.

    Args:
        name: name of the row.
        index: index of the compared value in a result: 1 or 2.
        results: for each interval, whether followers ran, the median step time, and the CPU seconds per step.
    """
    increases = []
    for first, second in zip(results[::2], results[1::2], strict=True):
        with_followers, without = (first, second) if first[0] else (second, first)
        increases.append(100 * (with_followers[index] / without[index] - 1))
    error = 1.25 * statistics.stdev(increases) / len(increases) ** 0.5  # standard error of a median
    spread = f"{min(increases):+.1f}% to {max(increases):+.1f}%"
    return [name, f"{statistics.median(increases):+.2f}% ± {error:.2f}", spread, "not distinguishable from 0"]


def read_cpu_seconds(process: psutil.Process) -> float:
    """Return the user and system seconds of a process and its children so far."""
    total = 0.0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += sum(member.cpu_times()[:2])
    return total


def measure_cpu_shares(folder: Path, seconds: float) -> list[list[str]]:
    """Return one table row per follower with the CPU time that it used, in per cent of a core.

    The first row has the sum of TensorBoard and telemetry.

    Args:
        folder: where the fake run is created.
        seconds: duration of the measurement, after a warm-up.
    """
    (folder / "server").mkdir()
    names = ("tensorboard", "telemetry", "jsonl", "prometheus", "wandb", "mlflow")
    with mlflow_server(folder / "server") as uri:
        track = f"{{tensorboard: true, telemetry_s: 10, jsonl: {folder}/lines.jsonl, wandb: {{project: p}}, "
        track += f"prometheus: {{port: {find_free_port()}}}, mlflow: {{uri: '{uri}'}}}}"
        fake_run = FakeRun(folder, f"track={track}")
        run_dir = fake_run.run.path
        with run_followers(run_dir, names) as followers:
            next_step = time.monotonic()
            warm_up_end = next_step + WARM_UP_S
            measure_start = warm_up_end
            cpu_start: dict[str, float] = {}
            while (now := time.monotonic()) < warm_up_end + seconds:
                if not cpu_start and now > warm_up_end:
                    cpu_start = {name: read_cpu_seconds(process) for name, process in followers.items()}
                    measure_start = now
                fake_run.write_steps(1)
                next_step += 0.1
                time.sleep(max(0.0, next_step - time.monotonic()))
            cpu_s = {name: read_cpu_seconds(process) - cpu_start[name] for name, process in followers.items()}
            percent = {name: 100 * spent / (time.monotonic() - measure_start) for name, spent in cpu_s.items()}
    for name in set(names) - {"telemetry"}:  # Telemetry does not read steps.
        last_step = json.loads((run_dir / "track" / f"{name}.json").read_text())["step"]
        if last_step != fake_run.step:
            raise AssertionError(f"{name} has {last_step} of {fake_run.step} steps")
    total = percent["tensorboard"] + percent["telemetry"]
    rows = [["followers at 10 steps/s: TensorBoard and telemetry", f"{total:.2f}% of a core", "", "< 1 %"]]
    return rows + [[f"… {name}", f"{percent[name]:.2f}% of a core", "", ""] for name in names]


def measure_profiled_steps(folder: Path, data: Path) -> list[list[str]]:
    """Return the table rows about profiled steps.

    Args:
        folder: where the run is created.
        data: directory of a run whose shards are used.
    """
    run_dir = make_run(folder, "profiled", 121, data, (*STEP_50_MS, "train.profile_every=20"))
    with run_training(run_dir) as ranks:
        for process in ranks:
            process.wait(timeout=300)
    lines = read_metrics(run_dir)[20:]
    plain_s = statistics.median(line["step_time_s"] for line in lines if "profile" not in line)
    profiled_lines = [line for line in lines if "profile" in line]
    slowdowns = [100 * ((line["step_time_s"] - line["profile_s"]) / plain_s - 1) for line in profiled_lines]
    sizes = [path.stat().st_size / 1e3 for path in Run(run_dir).profiles_dir.glob("*/rank-*")]
    write_s = [line["profile_s"] for line in profiled_lines]
    return [
        ["profiled step vs. other steps", f"{statistics.median(slowdowns):+.0f}%", _format_spread(slowdowns, "%"), ""],
        ["… writing the profile", f"{statistics.median(write_s):.2f} s", _format_spread(write_s, " s"), ""],
        ["… size of a rank's file", f"{statistics.median(sizes):.0f} kB", "", ""],
    ]


def _format_spread(values: Sequence[float], unit: str) -> str:
    """Return the smallest and the largest value with their unit."""
    return f"{min(values):.2g}{unit} to {max(values):.2g}{unit}"


def main() -> None:
    """Measure CPU shares, overhead and profiled steps, and write benchmarks/results/seeing.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="duration of the measurement of the CPU shares")
    parser.add_argument("--turn", type=float, default=5, help="seconds of an interval with or without followers")
    parser.add_argument("--pairs", type=int, default=24, help="number of pairs of intervals")
    parser.add_argument("--note", default="", help="a remark for the table, such as other load of the machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        share_rows = measure_cpu_shares(folder, arguments.seconds)
        data = make_run(folder, "data", 100, None, STEP_50_MS)
        overhead_rows = measure_overhead(folder, data, arguments.turn, arguments.pairs)
        rows = [*overhead_rows, *share_rows, *measure_profiled_steps(folder, data)]
    note = (
        f"Two ranks on Gloo. {arguments.pairs} pairs of measurements of {arguments.turn:.0f} s: one with followers, "
        f"and one while the followers are suspended. {arguments.note}"
    )
    write_table("seeing", "Cost of monitoring a run", note.strip(), ["figure", "result", "spread", "target"], rows)


if __name__ == "__main__":
    main()
