"""The run in which faults are caused: its ranks, its job, its events.

All commands are those that a user may run: `srun --overlap` on the nodes of the own job, `scancel` and `scontrol`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from pipeline.base.errors import UserError
from pipeline.run.directory import Run
from pipeline.run.events import AttemptEvent, RanksStarted, Started, Submitted

COMMAND_TIMEOUT_S = 120.0
"""How long a command on a node of the job may take."""
POLL_S = 0.2
"""The pause between two checks of a condition."""
_KILL_PARENTS = 'kill -9 $(ps -o ppid= "$@" | sort -u)'
"""Shell script that kills the parents of the processes whose IDs are its arguments."""


class FaultTarget(Protocol):
    """What the functions of faults.py need."""

    run: Run
    random: random.Random
    damaged_steps: list[int]
    """The steps of the checkpoints that were damaged."""

    @property
    def job_id(self) -> str:
        """The ID of the train job."""

    def list_ranks(self) -> list[int]:
        """Return the running ranks."""

    def signal_ranks(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to some ranks."""

    def kill_agents(self) -> None:
        """Kill all node agents (SIGKILL). Their ranks die with them, and the snapshots in memory are lost."""

    def run_slurm_command(self, *command: str) -> str:
        """Run a Slurm command and return its output."""

    def wait_until(self, description: str, condition: Callable[[], object], timeout: float = 300) -> None:
        """Wait until a condition is true."""


class RunTarget:
    """A run that trains in a Slurm job or on this machine.

    Args:
        run: the run.
        on_slurm: whether the train stage runs in a Slurm job.
        seed: seed of all random choices.
    """

    def __init__(self, run: Run, *, on_slurm: bool, seed: int) -> None:
        self.run = run
        self.on_slurm = on_slurm
        self.random = random.Random(seed)
        self.damaged_steps: list[int] = []

    @property
    def job_id(self) -> str:
        """The ID of the train job that started last; before its start, that of the job that was submitted last."""
        started = self.run.read_events("train", Started)
        if started and started[-1].slurm_job:
            return started[-1].slurm_job
        return self.run.read_events("train", Submitted)[-1].job_id

    def _find_processes(self) -> dict[int, tuple[str, int]]:
        """Return host and process ID of each rank of the running attempt; {} if they are not known yet."""
        events = self.run.read_events("train", AttemptEvent)
        last_event = next((event for event in reversed(events) if isinstance(event, RanksStarted | Started)), None)
        if not isinstance(last_event, RanksStarted):
            return {}
        return {
            int(rank): (host.partition(".")[0], pid)
            for host, pids in (last_event.processes or {}).items()
            for rank, pid in pids.items()
        }

    def list_ranks(self) -> list[int]:
        """Return the running ranks."""
        return sorted(self._find_processes())

    def signal_ranks(self, ranks: Iterable[int], number: signal.Signals) -> None:
        """Send a signal to some ranks."""
        self.run_on_ranks(ranks, "kill", f"-{number.value}")

    def kill_agents(self) -> None:
        """Kill all node agents (SIGKILL). Their ranks die with them, and the snapshots in memory are lost."""
        self.run_on_ranks(self.list_ranks(), "sh", "-c", _KILL_PARENTS, "sh")

    def run_on_ranks(self, ranks: Iterable[int], *command: str) -> None:
        """Run a command on each node of some ranks, with the process IDs of its ranks as last arguments.

        When a rank of one node has ended, the ranks of the other nodes soon end as well. Therefore, the command may
        fail on some nodes.

        Raises:
            UserError: if the command fails on all nodes.
        """
        processes = self._find_processes()
        pids_by_host: dict[str, list[str]] = {}
        for rank in ranks:
            host, pid = processes[rank]
            pids_by_host.setdefault(host, []).append(str(pid))
        errors = []
        for host, pids in pids_by_host.items():
            launcher = []
            if self.on_slurm:
                options = [f"--jobid={self.job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]
                launcher = ["srun", *options, "--cpu-bind=none", "--mem=0"]
            try:
                run_command([*launcher, *command, *pids])
            except UserError as error:
                errors.append(error)
        if len(errors) == len(pids_by_host):
            raise errors[0]

    def run_slurm_command(self, *command: str) -> str:
        """Run a Slurm command and return its output."""
        return run_command(command)

    def read_events(self, *classes: type[Any]) -> list[Any]:
        """Return the events of the train stage of some classes, oldest first."""
        return self.run.read_events("train", *classes)

    def wait_until(self, description: str, condition: Callable[[], object], timeout: float = 300) -> None:
        """Wait until a condition is true.

        Raises:
            UserError: if this takes longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise UserError("drill.timeout", f"{self.run.path}: waited {timeout:.0f} s until {description}")
            time.sleep(POLL_S)


def run_command(command: Sequence[str]) -> str:
    """Run a command and return its output. Raise UserError with the command and its error output if it fails."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_"))}
    if "SLURM_CONF" in os.environ:
        variables["SLURM_CONF"] = os.environ["SLURM_CONF"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, env=variables)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError("drill.command_failed", f"{' '.join(command)}: {error}") from error
    if result.returncode:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        raise UserError("drill.command_failed", f"{' '.join(command)}: {reason}")
    return result.stdout
