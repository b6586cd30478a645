"""Starting ranks, watching them, and ending them: here as processes of this machine.

A rank's output goes to `jobs/STAGE/rank-N.log`, appended across attempts. The rendezvous socket is bound here
and handed to rank 0 already listening, so that no other process can take its port in between.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pipeline.run import Run, now
from slurm.environment import local_environment


@dataclass(frozen=True)
class Left:
    """A rank that is gone: its exit code (negative: the signal that killed it)."""

    rank: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"left with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"


def free_listener(size: int) -> socket.socket:
    """A socket that listens on a free port of this machine, for `size` ranks."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(size + 8)
    return listener


class LocalRanks:
    """The rank processes of one stage on this machine."""

    def __init__(self, run: Run, stage: str, size: int, keep_open: Sequence[int]) -> None:
        """Start `size` ranks; `keep_open` are descriptors that they inherit (the run's lock)."""
        self.left: list[Left] = []
        self._alive: dict[int, subprocess.Popen[bytes]] = {}
        with free_listener(size) as listener:
            for rank in range(size):
                socket_of_rank0 = [listener.fileno()] if rank == 0 else []
                port = listener.getsockname()[1]
                place = local_environment(rank, size, size, "127.0.0.1", port, *socket_of_rank0)
                inherited = [*keep_open, *socket_of_rank0]
                self._alive[rank] = self._start(run, stage, rank, place, inherited)

    @staticmethod
    def _start(
        run: Run, stage: str, rank: int, place: Mapping[str, str], inherited: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        with open(run.stage_folder(stage) / f"rank-{rank}.log", "ab") as log:
            log.write(f"--- {now()} rank {rank}\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-m", "pipeline", stage, str(run.path)],
                env={**os.environ, **place, "PYTHONPATH": str(run.code)},
                cwd=run.code,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=inherited,
            )

    def poll(self) -> list[Left]:
        """The ranks that left since the last call, in the order of their numbers."""
        gone = [Left(rank, p.returncode) for rank, p in self._alive.items() if p.poll() is not None]
        for item in gone:
            del self._alive[item.rank]
        self.left += gone
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
        deadline = time.monotonic() + 30
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)
