"""Start the followers of a job: a process for each enabled tracker, and telemetry on each node.

They run beside the ranks and cost them only the little CPU time that they use. They have a lower priority, and no
process waits for them while ranks run. Their errors are logged in `track/NAME.log`. When the stage's job ends, they
have `DRAIN_S` seconds to hand over the rest. The next follower, or `submit.py track RUN`, hands over what remains.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.config.stages import STAGES
from pipeline.config.track import TRACKERS
from pipeline.run.code import start_process
from pipeline.run.directory import Run
from slurm.submit.site_environment import job_python

DRAIN_S = 10.0


@contextmanager
def run_followers(run: Run, stage: str, nodes: Sequence[str], on_slurm: bool) -> Iterator[None]:
    """Run a follower for each enabled tracker while the block runs.

    Stages that take only seconds, and have no steps, start no tracker whose package takes seconds to import.

    Args:
        run: The run.
        stage: The job's stage.
        nodes: The job's nodes.
        on_slurm: Whether this is a Slurm job, in which `srun` starts processes on other nodes.
    """
    track = run.config.track
    names = [name for name in track.enabled if STAGES[stage].is_distributed or TRACKERS[name].package is None]
    processes = [_start_follower(run, name, [sys.executable]) for name in names]
    if track.telemetry_s is not None:
        # --overlap lets the step share the CPUs of the ranks' step (srun(1)); a job on one node needs no step
        step = ["srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        step += ["--cpus-per-task=1", "--mem=0", f"--chdir={run.code_dir}", job_python(run.config.site)]
        processes.append(_start_follower(run, "telemetry", step if on_slurm and len(nodes) > 1 else [sys.executable]))
    try:
        yield
    finally:
        _stop_followers(processes)


def _start_follower(run: Run, name: str, program: Sequence[str]) -> subprocess.Popen[bytes]:
    folder: Path = run.path / "track"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.log", "ab") as log:
        return start_process(run.code_dir, [*program, "-m", "tracking.follower", name, str(run.path)], log, {})


def _stop_followers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, wait for `DRAIN_S` in total, and kill those that still run."""
    deadline = time.monotonic() + DRAIN_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
