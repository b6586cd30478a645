"""The network of `--netns`: a bridge on the host, and a veth pair from it to each node.

Each node has its own network namespace. One end of its veth pair is `eth0` in the node. The other end is attached to
the bridge, and its name ends with the name of the node. If this end is set down, the node is disconnected. Then no
packet passes, not even one that closes a connection. Other nodes only notice that the node does not respond. Without
`--netns`, all nodes share the network of the host, and have the addresses 127.0.0.11 to 127.0.0.14.

The network namespaces have no names, because `ip netns` would leave files in /run/netns. A namespace is removed when
its machine ends.
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
"""Addresses that RFC 2544 reserves for benchmarks. No real host has such an address."""


def run_ip(*arguments: str, check: bool = True) -> str:
    """Run ip(8) and return its output. If it fails and `check` is True, raise RuntimeError with its error output."""
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if check and result.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout


def find_free_subnet() -> str:
    """Return the first three bytes of a free /24 network in BENCHMARK_RANGE, such as `198.18.0`.

    A network is free if no route of this host overlaps it.
    """
    routes = json.loads(run_ip("-j", "-4", "route"))
    used_networks = [IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
    for subnet in BENCHMARK_RANGE.subnets(new_prefix=24):
        if not any(subnet.overlaps(network) for network in used_networks):
            return str(subnet.network_address).rsplit(".", 1)[0]
    raise UserError(
        "cluster.failed", f"every network of {BENCHMARK_RANGE} is in use on this host: take some clusters down"
    )


@dataclass(frozen=True)
class Network:
    """The bridge and the veth pairs of the cluster in `directory`.

    Their names contain a short hash of the path of the directory, because interface names have at most 15 characters.
    """

    directory: Path

    @property
    def bridge(self) -> str:
        """Return the name of the bridge, such as sl1a2b3c4d."""
        return "sl" + hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]

    def veth_name(self, node: str) -> str:
        """Return the name of the end of a node's veth pair that is on the host, such as sl1a2b3c4dn1."""
        return self.bridge + node

    def create_bridge(self, subnet: str) -> None:
        """Create the bridge and give the host the address SUBNET.1 on it."""
        run_ip("link", "add", self.bridge, "type", "bridge")
        run_ip("address", "add", f"{subnet}.1/24", "dev", self.bridge)
        run_ip("link", "set", self.bridge, "up")

    def connect_node(self, node: str, pid: int) -> None:
        """Create the veth pair to the network namespace of the process `pid`, which is the init of the node.

        After a crash, the node gets the same hardware address again. Otherwise, other nodes would send to the old
        address until their caches expire.
        """
        mac = f"02:00:00:00:00:{int(node[1:]):02x}"
        pair = ("type", "veth", "peer", "name", "eth0", "address", mac, "netns", str(pid))
        run_ip("link", "add", self.veth_name(node), "master", self.bridge, *pair)
        run_ip("link", "set", self.veth_name(node), "up")

    def set_link_state(self, node: str, state: str) -> None:
        """Disconnect a node (`down`) or reconnect it (`up`)."""
        run_ip("link", "set", self.veth_name(node), state)

    def remove_interface(self, name: str) -> None:
        """Remove the bridge or a veth pair, if it exists."""
        run_ip("link", "delete", name, check=False)
