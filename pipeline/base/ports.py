"""Choose TCP ports at which the ranks of an attempt meet."""

from __future__ import annotations

import random
import socket

MASTER_PORTS = range(20_000, 30_000)
"""Rendezvous ports to choose from if no variable sets one.

With the default settings of Linux (`net.ipv4.ip_local_port_range`), outgoing connections never use these ports.
"""
_MAX_ATTEMPTS = 100
"""How many ports to try."""


def listen(backlog: int, *, local: bool, port: int = 0) -> socket.socket:
    """Return a socket that listens over IPv4 and IPv6.

    Args:
        backlog: how many connections may wait until they are accepted.
        local: whether only this machine can connect, over IPv4.
        port: the port; 0 lets the kernel choose a free one.

    Raises:
        OSError: if the port is in use.
    """
    if local:
        return socket.create_server(("127.0.0.1", port), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def listen_on_master_port(backlog: int, *, local: bool) -> socket.socket:
    """Return a socket that listens on a random free port of `MASTER_PORTS`.

    The command of a user opens this port itself, often seconds after Sluice has closed it. Meanwhile, an outgoing
    connection could take a port that the kernel has chosen.

    Args:
        backlog: how many connections may wait until they are accepted.
        local: whether only this machine can connect, over IPv4.
    """
    for port in random.SystemRandom().sample(MASTER_PORTS, _MAX_ATTEMPTS):
        try:
            return listen(backlog, local=local, port=port)
        except OSError:
            continue
    return listen(backlog, local=local)
