"""Starting ranks, watching them, and ending them: as processes of this machine, or as a Slurm step.

A rank's output goes to `jobs/STAGE/rank-N.log`, appended across attempts. On one machine the rendezvous socket is
bound here and handed to rank 0 already listening, so that no other process can take its port in between; in a Slurm
step every rank derives the port from the job (pipeline/base/dist_env.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

from pipeline.base.dist_env import make_local_rank_env, read_cpus_per_task
from pipeline.base.errors import ExitCode
from pipeline.config.site import SiteConfig
from pipeline.config.stages import STAGES
from pipeline.run.code import start_process
from pipeline.run.directory import Run, utc_timestamp
from slurm.query import slurm_messages
from slurm.submit.site_environment import SETUP_NOT_RUN, check_job_environment, secrets_script_lines, site_environment
from slurm.supervise.inside import get_rank_command

SRUN_WAIT_S = 60
"""How long srun lets the other tasks of a step go on after the first one left; a save takes less."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankExit:
    """A rank that is gone: its exit code (negative: the signal that killed it)."""

    rank: int
    code: int
    host: str = ""
    description: str = ""
    """What the launcher said, where it named no rank: it may have started none."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"left with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"


def apply_site_environment(site: SiteConfig, job_id: str | None) -> None:
    """Set the variables of the site profile here where no script has: in salloc, and in jobs that a person wrote.

    Raises UserError where those that it wants are not there, or not ours alone.
    """
    os.environ.pop("SLURM_EXPORT_ENV", None)  # of a job with --export=NONE: its steps would get nothing of ours either
    check_job_environment(site, os.environ)
    if os.environ.get("SLUICE_JOB_ID") == job_id:  # submit.py's own job: its script did, and ran site.setup after them
        return
    os.environ.update(site_environment(site))
    if lines := secrets_script_lines(site):
        shell = ["bash", "-c", "\n".join([*lines, "env -0"])]
        told = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout
        for line in told.split("\0"):
            name, _, value = line.partition("=")
            os.environ[name or "_"] = value
    if site.setup:
        print(SETUP_NOT_RUN, flush=True)


def _spawn(
    run: Run, stage: str, program: Sequence[str], log: IO[bytes], more: Mapping[str, str], *inherited: int
) -> subprocess.Popen[bytes]:
    """Start `PROGRAM -m pipeline STAGE RUN`, with the run's code, `more` variables and descriptors."""
    words, told = [*program, "-m", "pipeline", stage, str(run.path)], {"SLUICE_SUPERVISED": "1", **more}
    return start_process(run.code_dir, words, log, told, inherited, _die_with_parent)


def _die_with_parent() -> None:
    """In a new rank: have the kernel send TERM when the supervisor dies; no rank goes on unwatched (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Ranks:
    """Processes of this machine: the ranks of one stage, or what starts them."""

    def __init__(self, run: Run, stage: str, size: int, lock: int) -> None:
        """`size` ranks, not started yet; they inherit the run's `lock`."""
        self._run, self._stage, self.size, self._lock = run, stage, size, lock
        self._alive: dict[int, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all ranks."""
        raise NotImplementedError

    def poll(self) -> list[RankExit]:
        """The ranks that left since the last call, in the order of their numbers."""
        gone = [RankExit(rank, p.returncode) for rank, p in self._alive.items() if p.poll() is not None]
        for item in gone:
            del self._alive[item.rank]
        return gone

    @property
    def running(self) -> bool:
        """Whether any rank is still there."""
        return bool(self._alive)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank that is still there."""
        for process in self._alive.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """End all ranks now, and wait until they are gone."""
        self.send(signal.SIGKILL)
        self._wait(30)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)


class LocalRanks(Ranks):
    """The rank processes of one stage on this machine."""

    def start(self) -> None:
        """Start all ranks."""
        run, size = self._run, self.size
        with socket.create_server(("127.0.0.1", 0), backlog=size + 8) as listener:
            for rank in range(size):
                sockets = [listener.fileno()] if rank == 0 else []
                rank_env = make_local_rank_env(rank, size, listener.getsockname()[1], *sockets)
                with open(run.stage_dir(self._stage) / f"rank-{rank}.log", "ab") as log:
                    log.write(f"--- {utc_timestamp()} rank {rank}\n".encode())
                    log.flush()
                    self._alive[rank] = _spawn(run, self._stage, [sys.executable], log, rank_env, self._lock, *sockets)


class SrunRanks(Ranks):
    """The rank processes of one stage in this job's allocation: one `srun` step, one task per rank.

    srun says how the step ended as a whole; which task ended badly first, and where, is read from its messages.
    """

    launcher = "srun"
    settings: Mapping[str, str] = {}
    """What is said to the launcher in variables."""

    def __init__(
        self, run: Run, stage: str, size: int, lock: int, *options: str, nodes: int = 1, task: int | None = None
    ) -> None:
        """On so many `nodes`; srun has more `options`. Raises UserError where the site's container cannot be used.

        `task`: which task of the array of shard this is; its files bear that number, for there are others beside it.
        """
        super().__init__(run, stage, size, lock)
        self._nodes, self._options, self.inside = nodes, options, get_rank_command(run, stage)
        self._log = "rank-%t.log" if task is None else f"rank-{task}.log"
        part = "" if task is None else f"-{task}"
        self.messages = run.stage_dir(stage) / f"{self.launcher}{part}.log"
        self._from = self.messages.stat().st_size if self.messages.exists() else 0

    def command(self) -> list[str]:
        """What starts the ranks, up to the program and its arguments."""
        folder = self._run.stage_dir(self._stage)
        command = ["srun", f"--ntasks={self.size}", "--kill-on-bad-exit=0"]
        command += [f"--wait={SRUN_WAIT_S}", "--open-mode=append", "--unbuffered"]
        if not STAGES[self._stage].is_array:  # whose tasks know nothing of each other: they sit where there is room
            command.append(f"--nodes={self._nodes}")
        if cpus := read_cpus_per_task(os.environ):  # srun(1): since Slurm 22.05 a step does not inherit it from its job
            command.append(f"--cpus-per-task={cpus}")
        command += [f"--output={folder}/{self._log}", f"--chdir={self._run.code_dir}"]
        return [*command, *self.inside.srun, *self._options]

    def start(self) -> None:
        """Start the step."""
        with open(self.messages, "ab") as log:
            program, told = [*self.command(), *self.inside.program], {**self.settings, **self.inside.variables}
            self._alive[0] = _spawn(self._run, self._stage, program, log, told, self._lock)

    def poll(self) -> list[RankExit]:
        """The whole step, once it has ended: as the task that ended badly first, or as task 0."""
        return [self._explained(left) for left in super().poll()]

    def _explained(self, left: RankExit) -> RankExit:
        if left.code in (ExitCode.DONE, ExitCode.STOPPED):
            return left
        messages = self.messages.read_bytes()[self._from :].decode(errors="replace")
        end = "\n".join(messages.splitlines()[-10:])
        told = f"{self.launcher} {left} and named no rank; the end of {self.messages}:\n{end}"
        return self.first_bad(messages, left.code) or replace(left, description=told)

    @staticmethod
    def first_bad(messages: str, code: int) -> RankExit | None:
        """The task that ended badly first, by srun's messages, but for those that only lost a peer; `code`: srun's.

        None where they name none. One that the kernel killed for its memory has `OUT_OF_MEMORY`: srun says so, or
        slurmstepd saw it.
        """
        found, starved = [], slurm_messages.STEPD_OUT_OF_MEMORY.search(messages) is not None
        for line in messages.splitlines():
            if match := slurm_messages.SRUN_TASK.match(line):
                host, task, told = match.groups()
                killed = next((-n for name, n in slurm_messages.SIGNAL_BY_NAME.items() if told.startswith(name)), None)
                if slurm_messages.SRUN_OUT_OF_MEMORY.search(told) or (killed == -signal.SIGKILL and starved):
                    killed = int(ExitCode.OUT_OF_MEMORY)
                exited = slurm_messages.SRUN_EXITED.search(told)
                found.append(RankExit(int(task), killed or (int(exited[1]) if exited else code), host))
        return next((left for left in found if left.code != ExitCode.PEER_LOST), next(iter(found), None))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank: srun passes it on, but for TERM, which makes it kill the step at once.

        To the ranks USR2 means the same as TERM (pipeline/base/signals.py), so that is sent instead.
        """
        super().send(signal.SIGUSR2 if number == signal.SIGTERM else number)

    def kill(self) -> None:
        """End all ranks now: srun ends its step by force when it is interrupted twice within a second."""
        deadline = time.monotonic() + 30
        while self.running:
            self.send(signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.2)
            self.poll()
