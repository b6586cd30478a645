"""The network of `--netns`: a bridge on the host, and a cable (a veth pair) from it to each node.

Each node has a network namespace of its own, with `eth0` as one end of its cable; the other end hangs on the
bridge and carries the node's name. Setting that end down is pulling the cable: no packet, not even the one
that closes a connection, gets through, so that the others see silence, as with a real cut. Without `--netns`
all nodes share the host's network, at 127.0.0.11 to .14.

The namespaces have no names (`ip netns` would leave files in /run/netns): they go with their machine.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from pipeline.base.errors import UserError

BENCHMARK_RANGE = IPv4Network("198.18.0.0/15")
"""RFC 2544: set aside for tests of networks, so that no real host is hidden behind it."""


def ip(*arguments: str, check: bool = True) -> str:
    """Run ip(8) and return its output. With `check`, a failure raises RuntimeError with what ip said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def free_subnet() -> str:
    """A /24 of the benchmark range that this host has no route to, such as `198.18.0`."""
    taken = [IPv4Network(r["dst"]) for r in json.loads(ip("-j", "-4", "route")) if r["dst"] != "default"]
    for subnet in BENCHMARK_RANGE.subnets(new_prefix=24):
        if not any(subnet.overlaps(other) for other in taken):
            return str(subnet.network_address).rsplit(".", 1)[0]
    raise UserError(
        "cluster.failed", f"every network of {BENCHMARK_RANGE} is taken on this host: take some clusters down"
    )


@dataclass(frozen=True)
class Network:
    """The bridge and the cables of the cluster in `directory`; their names come from the directory's path.

    Interface names have at most 15 characters, hence the short hash.
    """

    directory: Path

    @property
    def bridge(self) -> str:
        """Name of the bridge, such as sl1a2b3c4d."""
        return "sl" + hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]

    def cable(self, node: str) -> str:
        """Name of the host's end of a node's cable, such as sl1a2b3c4dn1."""
        return self.bridge + node

    def lay(self, subnet: str) -> None:
        """Make the bridge; the host is .1 on it."""
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{subnet}.1/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def plug(self, node: str, pid: int) -> None:
        """Lay the cable to the network namespace of process `pid`.

        The node keeps its hardware address over crashes: its neighbours would otherwise talk to the old one
        until their caches expire.
        """
        mac = f"02:00:00:00:00:{int(node[1:]):02x}"
        pair = ("type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid))
        ip("link", "add", self.cable(node), "master", self.bridge, *pair)
        ip("link", "set", self.cable(node), "up")

    def set(self, node: str, state: str) -> None:
        """Pull a node's cable (`down`) or put it back (`up`)."""
        ip("link", "set", self.cable(node), state)

    def remove(self, name: str) -> None:
        """Remove the bridge or a cable; nothing if it is gone already."""
        ip("link", "delete", name, check=False)
