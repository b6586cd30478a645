"""Machines: processes in namespaces of their own, started on record and ended by that record.

A machine is two processes: `unshare`, and its child, the first process (init) of the new namespaces, which
runs machine.sh. The kernel ends a PID namespace with its init, so one SIGKILL ends every process of the
machine, whatever it forked or daemonized; mounts and network devices of the namespaces go with them.

The record `machines/NAME.json` is written before the machine may start its daemon (the handshake is in
machine.sh), and holds each pid with its start time. Ending goes through a pidfd whose process has that start
time: a recycled pid is never touched, and nothing is ever ended by its name.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

INIT = Path(__file__).with_name("machine.sh")
NAMESPACES = ("unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child=KILL")
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""What a daemon is given; of the caller's variables nothing, as after a boot."""

_children: dict[int, subprocess.Popen[str]] = {}
"""The machines that this Python process started: it must reap them, or they stay as zombies."""


@dataclass(frozen=True)
class Process:
    """One process of the host: its pid, and its start in clock ticks since boot (proc(5), field 22 of stat)."""

    pid: int
    start: int

    @classmethod
    def parse(cls, stat: str) -> Process:
        """From a line of /proc/PID/stat; the command in parentheses may hold spaces."""
        return cls(int(stat.split(" ", 1)[0]), int(stat.rsplit(")", 1)[1].split()[19]))

    @contextlib.contextmanager
    def handle(self) -> Iterator[int | None]:
        """A pidfd of this very process; None when it is gone and its pid free or another's."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # The check comes after the open: the pidfd stays bound to the process that is checked.
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            stat = ""
        try:
            yield pidfd if stat and self.parse(stat) == self else None
        finally:
            os.close(pidfd)

    def alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        with self.handle() as pidfd:
            return pidfd is not None and not select.select([pidfd], [], [], 0)[0]

    def end(self, timeout: float = 10) -> None:
        """SIGKILL and wait for the end; nothing if it is gone already. Raises TimeoutError."""
        with self.handle() as pidfd:
            if pidfd is None:
                return
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not select.select([pidfd], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} is still there {timeout:g} s after SIGKILL")


@dataclass(frozen=True)
class Machine:
    """A name and the folder of the cluster that it belongs to."""

    name: str
    directory: Path

    @property
    def record(self) -> Path:
        """The file that says which processes the machine is."""
        return self.directory / "machines" / f"{self.name}.json"

    def processes(self) -> list[Process]:
        """`unshare` and init, in that order, as recorded; empty when the machine is off."""
        try:
            return [Process(**entry) for entry in json.loads(self.record.read_text())]
        except FileNotFoundError:
            return []

    def alive(self) -> bool:
        """Whether the machine runs."""
        return any(process.alive() for process in self.processes())

    def start(
        self,
        hostname: str,
        command: Sequence[str | Path],
        address: str | None = None,
        plug: Callable[[int], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the machine with its daemon `command`, which must stay in the foreground.

        With `address` (A.B.C.D/LENGTH) it has a network namespace, and `plug(pid of init)` must lay its cable,
        eth0. What the daemon prints goes to `log/NAME.out`. Raises RuntimeError when no machine comes up.
        """
        log = self.directory / "log" / f"{self.name}.out"
        init: list[str | Path] = ["bash", INIT, hostname, self.directory / "hosts", log, address or "-"]
        with open(log, "a") as errors:
            unshare = subprocess.Popen(
                [*NAMESPACES, *(["--net"] if address else []), *init, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.directory,
                env=ENVIRONMENT | (environment or {}),
                start_new_session=True,  # a terminal's Ctrl-C is not for the cluster
                text=True,
            )
        assert unshare.stdin and unshare.stdout
        _children[unshare.pid] = unshare
        with unshare.stdin as go, unshare.stdout as said:
            stat = said.readline() if select.select([said], [], [], 10)[0] else ""
            if not stat:
                unshare.kill()
                raise RuntimeError(f"machine {self.name} did not start: {log.read_text()[-2000:]}")
            first = Process.parse(Path(f"/proc/{unshare.pid}/stat").read_text())
            save(self.record, json.dumps([asdict(first), asdict(Process.parse(stat))]))
            if plug:
                plug(Process.parse(stat).pid)
            go.write("go\n")

    def end(self) -> None:
        """Power off, at once: SIGKILL to init, and with it to everything on the machine. Waits for the end."""
        for process in reversed(self.processes()):
            process.end()
            if child := _children.pop(process.pid, None):
                child.wait(10)
        self.record.unlink(missing_ok=True)


def save(path: Path, text: str) -> None:
    """Write the whole file or nothing, so that whoever dies meanwhile leaves a readable record."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    fresh.write_text(text)
    fresh.replace(path)
