"""What a node agent does in the processes that it forks: become a rank of a stage, or the saver of a rank."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from pipeline.base.forked import run_and_exit
from pipeline.base.prctl import set_parent_death_signal, set_process_name
from pipeline.base.signals import STOP_SIGNALS, StopFlag
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from slurm.agent.messages import RankTask

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call set_mempolicy(2), by architecture."""


@dataclass(frozen=True)
class Child:
    """A rank that the agent forks. Call its methods in the forked process, with the stop signals still blocked."""

    task: RankTask
    stage: str
    run_path: Path
    agent_pid: int
    """The process id of the agent."""
    snapshot_buffers: Sequence[int]
    """The file descriptors of the buffers for snapshots of this rank."""
    copy_buffers: Sequence[int]
    """The file descriptors of the buffers for snapshots of another rank."""

    def run_rank(self, listen_fd: int | None, saver_fd: int | None, previous_savers: Mapping[int, int]) -> NoReturn:
        """Become the rank, run the stage, and exit.

        Args:
            listen_fd: a socket that listens for the other ranks; None except for rank 0.
            saver_fd: the connection to the saver; None without a saver.
            previous_savers: the savers of earlier attempts: the reading end of a pipe to each, by their process ids.
        """

        def run_stage() -> int:
            flag = StopFlag().install()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            self._set_up(f"sluice-rank-{self.task.rank}")
            variables = {
                "SLUICE_LISTEN_FD": listen_fd,
                "SLUICE_SAVER_FD": saver_fd,
                "SLUICE_SNAPSHOT_FDS": ",".join(map(str, self.snapshot_buffers)) or None,
                "SLUICE_SNAPSHOT_COPY_FDS": ",".join(map(str, self.copy_buffers)) or None,
                "SLUICE_PREVIOUS_SAVERS": ",".join(f"{pid}:{pipe}" for pid, pipe in previous_savers.items()) or None,
            }
            os.environ.update({name: str(value) for name, value in variables.items() if value is not None})
            with suppress(OSError):  # The disk may be full. The stage then fails with a message about it.
                os.write(1, f"--- {utc_timestamp()} rank {self.task.rank}\n".encode())
            if self.task.cpus:
                os.sched_setaffinity(0, self.task.cpus)
            if self.task.memory_policy is not None:
                _set_memory_policy(*self.task.memory_policy)
            from pipeline.__main__ import main

            return main([self.stage, str(self.run_path)], flag)

        run_and_exit(run_stage)

    def run_saver(self, rank_fd: int) -> NoReturn:
        """Become the saver of the rank, save its checkpoints, and exit when the rank has exited.

        Args:
            rank_fd: the connection to the rank.
        """

        def save_checkpoints() -> int:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:  # Slurm sends them to all processes of the step.
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            self._set_up(f"sluice-saver-{self.task.rank}")
            from pipeline.checkpoint.saver import run_saver

            run_saver(Connection(rank_fd), self.snapshot_buffers, Run.open(self.run_path))
            return 0

        run_and_exit(save_checkpoints)

    def _set_up(self, name: str) -> None:
        """Set the name, the environment and the output of this process."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        set_parent_death_signal(signal.SIGKILL)
        set_process_name(name)
        if os.getppid() != self.agent_pid:
            os._exit(1)  # The agent died before the kernel was asked to report that.
        os.environ.update(self.task.environment)
        log = os.open(self.task.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)  # The umask removes permissions.
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)


def _set_memory_policy(mode: int, node_mask: int) -> None:
    """Set the NUMA policy of this process. If the kernel refuses, print the reason: the rank works nevertheless."""
    number = _SET_MEMPOLICY.get(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    if number is not None and libc.syscall(number, mode, ctypes.byref(ctypes.c_ulong(node_mask)), 64):
        print(f"the NUMA policy cannot be set: {os.strerror(ctypes.get_errno())}", flush=True)
