"""Messages between the supervisor and the node agents: JSON objects, one per line, over TCP.

The supervisor listens, and writes its addresses and a random token to a file that only the owner of the run can read.
Agents read the file, connect, and send the token in their first message. The supervisor closes a connection without the
right token. Connections are not encrypted.

To the supervisor:

- `placement`: token, task, node, host, environment, cpus, memory_policy: where srun has placed a task, and how
- `hello`: token, node (index in the job step, from 0), host, pid: an agent has connected
- `failed`: code, message: the agent cannot import the pipeline
- `ready`: the agent has imported the pipeline and can fork ranks
- `listening`: port: the agent has opened the port on which rank 0 will listen
- `forked`: attempt, pids (rank → pid): the ranks run
- `exited`: attempt, rank, code (minus the number of a signal), out_of_memory, snapshot_step: a rank has exited
- `pong`: the answer to `ping`

To an agent:

- `listen`: open a port for rank 0
- `fork`: attempt, ranks: the arguments of each :class:`RankTask`
- `signal`: number: send a signal to all ranks
- `ping`: answer with `pong`
- `exit`: kill the ranks, wait a limited time for the saves in progress, and exit
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]

CONNECT_TIMEOUT_S = 10.0
"""How long an agent tries to connect to one address of the supervisor."""
SEND_TIMEOUT_S = 10.0
"""How long a process may wait until the kernel accepts a message. The kernel has room for many messages."""
KEEPALIVE_S = 120
"""How long the other machine may be unreachable, before the connection is lost."""
SAVE_WAIT_S = 60.0
"""How long an agent waits for the saves in progress before it exits."""
MAX_MESSAGE_BYTES = 1 << 24
"""The longest valid message: 16 MiB."""


@dataclass(frozen=True)
class RankTask:
    """A rank to fork."""

    rank: int
    environment: dict[str, str]
    """Variables that the rank has in addition to those of the agent."""
    log: str
    """The file to which the output of the rank is appended."""
    cpus: Sequence[int] = ()
    """The CPUs that the rank may use; empty for all CPUs of the agent."""
    memory_policy: tuple[int, int] | None = None
    """The NUMA policy of the rank: mode and node mask, as in set_mempolicy(2). None for the default policy."""
    listens: bool = False
    """Whether the rank gets the port that the agent opened (`listen`)."""
    snapshot_buffers: int = 0
    """How many buffers for its own snapshots the rank gets. The agent keeps them when the rank exits."""
    copy_buffers: int = 0
    """How many buffers for the snapshots of another rank the rank gets. The agent keeps them as well."""
    has_saver: bool = False
    """Whether the agent also forks a saver, which writes the checkpoints of the rank."""


class Connection:
    """A TCP connection that carries messages.

    Args:
        connected: the connected socket. This object closes it.
        max_message_bytes: the longest valid message.
    """

    def __init__(self, connected: socket.socket, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        connected.settimeout(SEND_TIMEOUT_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel notices that the other machine is gone, even if this process sends nothing (tcp(7)). A process that
        # is blocked or stopped does not lose its connection, because its kernel answers.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S // 4)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 8)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * KEEPALIVE_S)
        self._socket = connected
        self.max_message_bytes = max_message_bytes
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, so that `select` accepts this object."""
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Raises ConnectionError if the connection is lost, or the peer reads nothing for too long."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as error:
            raise ConnectionError(f"cannot send {kind}: {error}") from error

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting for more.

        Raises:
            ConnectionError: if the peer closed the connection, the connection is lost, or a message is invalid.
        """
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while poller.poll(0):
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                raise ConnectionError(f"cannot receive: {error}") from error
            if not data:
                if b"\n" in self._received:
                    break  # The last messages are returned now. The next call raises the error.
                raise ConnectionError("the connection was closed")
            self._received += data
            if len(self._received) > self.max_message_bytes:
                raise ConnectionError("a message is too long")
        return list(self._take_messages())

    def _take_messages(self) -> Iterator[Message]:
        """Remove the complete messages from the received bytes, and yield them."""
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConnectionError("a message is not JSON") from error
            if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
                raise ConnectionError("a message has no kind")
            yield message

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def connect(address_file: Path) -> tuple[Connection, str]:
    """Connect to the supervisor. Return the connection and the token.

    Args:
        address_file: the file of the supervisor: a JSON object with `hosts`, `port` and `token`.

    Raises:
        ConnectionError: if no address accepts a connection.
    """
    address = json.loads(address_file.read_text())
    problems = []
    for host in address["hosts"]:
        try:
            return Connection(socket.create_connection((host, address["port"]), CONNECT_TIMEOUT_S)), address["token"]
        except OSError as error:
            problems.append(f"{host}: {error}")
    raise ConnectionError(f"cannot connect to the supervisor, port {address['port']}: {'; '.join(problems)}")


def write_address_file(address_file: Path, hosts: Sequence[str], port: int, token: str) -> None:
    """Write the file that :func:`connect` reads. Only the owner can read it."""
    temporary = address_file.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "w") as file:
        json.dump({"hosts": list(hosts), "port": port, "token": token}, file)
    temporary.rename(address_file)
