"""Machines of the test cluster: processes in their own namespaces.

A machine has two processes: `unshare`, and its child, the first process (init) of the new namespaces, which runs
machine.sh. The kernel ends a PID namespace with its init. One SIGKILL therefore ends all processes of the machine,
including daemons, and removes the mounts and network devices of its namespaces.

The file `machines/NAME.json` is the record of a machine: PID and start time of both processes. It is written before the
machine starts its daemon (see the handshake in machine.sh). Before a process is killed through a pidfd, its start time
is compared with the record, so another process with a reused PID is never killed by mistake.
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
"""Environment of each daemon, without variables of the calling process, as after a boot."""

_children: dict[int, subprocess.Popen[str]] = {}
"""The `unshare` processes that this Python process started, by PID. It must wait for them, to leave no zombies."""


@dataclass(frozen=True)
class Process:
    """A process of the host: its PID, and its start time in clock ticks since boot (field 22 of stat in proc(5))."""

    pid: int
    start: int

    @classmethod
    def parse(cls, stat: str) -> Process:
        """Parse a line of /proc/PID/stat. The name of the command, in parentheses, may contain spaces."""
        return cls(int(stat.split(" ", 1)[0]), int(stat.rsplit(")", 1)[1].split()[19]))

    @contextlib.contextmanager
    def open_pidfd(self) -> Iterator[int | None]:
        """Yield a pidfd of this process; None if the process has ended, even if another process now has its PID."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Compare the start time after opening, because the pidfd then always refers to the compared process.
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            stat = ""
        try:
            yield pidfd if stat and self.parse(stat) == self else None
        finally:
            os.close(pidfd)

    def is_alive(self) -> bool:
        """Return True if the process runs. A zombie process does not run."""
        with self.open_pidfd() as pidfd:
            return pidfd is not None and not select.select([pidfd], [], [], 0)[0]

    def end(self, timeout: float = 10) -> None:
        """If the process runs, send SIGKILL and wait for its end. Raise TimeoutError after `timeout` seconds."""
        with self.open_pidfd() as pidfd:
            if pidfd is None:
                return
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            if not select.select([pidfd], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} still exists {timeout:g} s after SIGKILL")


@dataclass(frozen=True)
class Machine:
    """A machine, identified by its name and the directory of its cluster."""

    name: str
    directory: Path

    @property
    def record(self) -> Path:
        """Return the path of the file with the processes of the machine."""
        return self.directory / "machines" / f"{self.name}.json"

    def processes(self) -> list[Process]:
        """Return the recorded processes: `unshare`, then init. The list is empty if the machine is off."""
        try:
            return [Process(**fields) for fields in json.loads(self.record.read_text())]
        except FileNotFoundError:
            return []

    def is_alive(self) -> bool:
        """Return True if a process of the machine runs."""
        return any(process.is_alive() for process in self.processes())

    def start(
        self,
        hostname: str,
        command: Sequence[str | Path],
        address: str | None = None,
        connect_network: Callable[[int], None] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the machine and its daemon. The output of the daemon is appended to `log/NAME.out`.

        Args:
            hostname: host name of the machine.
            command: command of the daemon, which must run in the foreground.
            address: address as A.B.C.D/LENGTH in a separate network namespace; None to share the network of the host.
            connect_network: called with the PID of init if `address` is given. It must create the interface eth0.
            environment: further environment variables of the daemon.

        Raises:
            RuntimeError: the machine does not start.
        """
        log = self.directory / "log" / f"{self.name}.out"
        init_command: list[str | Path] = ["bash", INIT, hostname, self.directory / "hosts", log, address or "-"]
        with open(log, "a") as errors:
            unshare = subprocess.Popen(
                [*NAMESPACES, *(["--net"] if address else []), *init_command, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.directory,
                env=ENVIRONMENT | (environment or {}),
                start_new_session=True,  # Ctrl-C in a terminal must not reach the cluster.
                text=True,
            )
        assert unshare.stdin and unshare.stdout
        _children[unshare.pid] = unshare
        with unshare.stdin as machine_input, unshare.stdout as machine_output:
            stat = machine_output.readline() if select.select([machine_output], [], [], 10)[0] else ""
            if not stat:
                unshare.kill()
                raise RuntimeError(f"machine {self.name} did not start: {log.read_text()[-2000:]}")
            unshare_process = Process.parse(Path(f"/proc/{unshare.pid}/stat").read_text())
            init_process = Process.parse(stat)
            write_file_atomically(self.record, json.dumps([asdict(unshare_process), asdict(init_process)]))
            if connect_network:
                connect_network(init_process.pid)
            machine_input.write("go\n")

    def end(self) -> None:
        """Kill all processes of the machine at once, with a SIGKILL to init. Wait until they have ended."""
        for process in reversed(self.processes()):
            process.end()
            if child := _children.pop(process.pid, None):
                child.wait(10)
        self.record.unlink(missing_ok=True)


def write_file_atomically(path: Path, text: str) -> None:
    """Write a file atomically. If this process is killed, it leaves no incomplete file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    temporary.replace(path)
