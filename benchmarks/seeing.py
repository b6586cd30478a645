"""What it costs to look at a run: followers beside the ranks, their share of a core, and a profiled step.

    python -m benchmarks.seeing [--seconds 60] [--turn 5] [--pairs 24]

- overhead: one training of two ranks; the followers (TensorBoard, telemetry) are stopped and let go on by signals, in
  turns of so many seconds. What they missed they catch up in their own turn, so it counts. Step times of neighbouring
  turns are compared. Target: 0 within the noise.
- share: an invented run writes 10 steps a second; CPU seconds of each follower, with its children, after its start.
  Target: under 1 % of a core for TensorBoard and telemetry together; MLflow's server is not counted.
- profiled step: every 20th step of a training is profiled.
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
WARM_S = 20.0


@contextmanager
def training(run: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks that train, without a supervisor."""
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(2):
            fd = listener.fileno() if rank == 0 else None
            environment = {**os.environ, **make_local_rank_env(rank, 2, listener.getsockname()[1], fd)}
            command = [sys.executable, "-m", "pipeline", "train", str(run)]
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
def followers(run: Path, names: Sequence[str]) -> Iterator[dict[str, psutil.Process]]:
    """The followers of a run's config, as the supervisor starts them."""
    command = [sys.executable, "-m", "tracking.follower"]
    (run / "track").mkdir(exist_ok=True)
    started = {}
    for name in names:
        with open(run / "track" / f"{name}.log", "wb") as log:
            started[name] = subprocess.Popen([*command, name, str(run)], cwd=ROOT, stdout=log, stderr=log)
    try:
        yield {name: psutil.Process(process.pid) for name, process in started.items()}
    finally:
        for process in started.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in started.values():
            process.wait(timeout=60)


def wait_for_steps(run: Path, steps: int) -> None:
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} does not train")
        time.sleep(0.2)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def overhead(folder: Path, data: Path, seconds: float, pairs: int) -> list[list[str]]:
    more = (*STEP_50_MS, "track.tensorboard=true", "track.telemetry_s=10")
    run = make_run(folder, "overhead", 1_000_000, data, more)
    turns: list[tuple[bool, float, float, float]] = []
    with training(run) as ranks, followers(run, ("tensorboard", "telemetry")) as processes:
        own = [psutil.Process(process.pid) for process in ranks]
        wait_for_steps(run, 20)
        time.sleep(WARM_S)
        for turn in range(2 * pairs):
            on = turn % 4 in (0, 3)  # on off off on: what drifts does not count
            for process in processes.values():
                process.resume() if on else process.suspend()
            began, before = time.time(), sum(map(cpu_seconds, own))
            time.sleep(seconds)
            turns.append((on, began, time.time(), sum(map(cpu_seconds, own)) - before))
    lines = lines_of(run)
    figures = []
    for on, began, ended, cpu in turns:
        steps = [line["step_time_s"] for line in lines if began < line["time"] <= ended]
        figures.append((on, statistics.median(steps), cpu / len(steps)))
    step_ms = 1000 * statistics.median(line["step_time_s"] for line in lines[20:])
    return [
        _compared(f"a step of {step_ms:.0f} ms with followers (TensorBoard, telemetry) against without", 1, figures),
        _compared("… CPU seconds of the ranks in it", 2, figures),
    ]


def _compared(what: str, which: int, figures: Sequence[tuple[bool, float, float]]) -> list[str]:
    """The row of a figure: turns with followers against their neighbours without."""
    ratios = []
    for first, second in zip(figures[::2], figures[1::2], strict=True):
        with_, without = (first, second) if first[0] else (second, first)
        ratios.append(100 * (with_[which] / without[which] - 1))
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
    spread = f"{min(ratios):+.1f}% to {max(ratios):+.1f}%"
    return [what, f"{statistics.median(ratios):+.2f}% ± {error:.2f}", spread, "0 within the noise"]


def cpu_seconds(process: psutil.Process) -> float:
    spent = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            spent += sum(one.cpu_times()[:2])
    return spent


def shares(folder: Path, seconds: float) -> list[list[str]]:
    (folder / "server").mkdir()
    names = ("tensorboard", "telemetry", "jsonl", "prometheus", "wandb", "mlflow")
    with mlflow_server(folder / "server") as uri:
        track = f"{{tensorboard: true, telemetry_s: 10, jsonl: {folder}/lines.jsonl, wandb: {{project: p}}, "
        track += f"prometheus: {{port: {find_free_port()}}}, mlflow: {{uri: '{uri}'}}}}"
        invented = FakeRun(folder, f"track={track}")
        run, before = invented.run.path, dict[str, float]()
        with followers(run, names) as processes:
            due, marked = time.monotonic(), 0.0
            end = due + WARM_S + seconds
            while (now := time.monotonic()) < end:
                if not marked and now > end - seconds:
                    before, marked = {name: cpu_seconds(one) for name, one in processes.items()}, now
                invented.write_steps(1)
                due += 0.1
                time.sleep(max(0.0, due - time.monotonic()))
            spent = {name: cpu_seconds(one) - before[name] for name, one in processes.items()}
            percent = {name: 100 * one / (time.monotonic() - marked) for name, one in spent.items()}
    for name in set(names) - {"telemetry"}:
        told = json.loads((run / "track" / f"{name}.json").read_text())["step"]
        if told != invented.step:
            raise AssertionError(f"{name} was told {told} of {invented.step} steps")
    both = percent["tensorboard"] + percent["telemetry"]
    rows = [["followers at 10 steps/s: TensorBoard and telemetry together", f"{both:.2f}% of a core", "", "< 1 %"]]
    return rows + [[f"… {name} alone", f"{percent[name]:.2f}% of a core", "", ""] for name in names]


def profiled(folder: Path, data: Path) -> list[list[str]]:
    run = make_run(folder, "profiled", 121, data, (*STEP_50_MS, "train.profile_every=20"))
    with training(run) as ranks:
        for process in ranks:
            process.wait(timeout=300)
    lines = lines_of(run)[20:]
    plain = statistics.median(line["step_time_s"] for line in lines if "profile" not in line)
    own = [line for line in lines if "profile" in line]
    longer = [100 * ((line["step_time_s"] - line["profile_s"]) / plain - 1) for line in own]
    sizes = [path.stat().st_size / 1e3 for path in Run(run).profiles_dir.glob("*/rank-*")]
    beside = [line["profile_s"] for line in own]
    return [
        ["a profiled step against the others", f"{statistics.median(longer):+.0f}%", _spread(longer, "%"), ""],
        ["… what it takes beside itself", f"{statistics.median(beside):.2f} s", _spread(beside, " s"), ""],
        ["… a rank's file", f"{statistics.median(sizes):.0f} kB", "", ""],
    ]


def _spread(values: Sequence[float], unit: str) -> str:
    return f"{min(values):.2g}{unit} to {max(values):.2g}{unit}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60, help="for the share of a core")
    parser.add_argument("--turn", type=float, default=5, help="seconds with, and without, followers")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--note", default="", help="such as who shared the machine")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = shares(folder, arguments.seconds)
        data = make_run(folder, "data", 100, None, STEP_50_MS)
        rows = [*overhead(folder, data, arguments.turn, arguments.pairs), *rows, *profiled(folder, data)]
    note = f"Two ranks on Gloo, {arguments.pairs} pairs of turns of {arguments.turn:.0f} s. {arguments.note}"
    write_table("seeing", "What looking at a run costs", note.strip(), ["figure", "result", "spread", "target"], rows)


if __name__ == "__main__":
    main()
