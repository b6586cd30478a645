"""How long collectives take: α seconds per hop and β per byte, for the algorithm and the links that a group has.

A ring over ranks of several nodes passes each node boundary once in each of its channels, so all ranks of the group in
one node send through their own network cards together: r of them have r times one card's bandwidth, up to that of the
links inside (Thakur, Rabenseifner and Gropp 2005; Hu et al., arXiv 2507.04786, for NCCL's).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from planning.machine import Machine


@dataclass(frozen=True)
class Group:
    """Ranks that talk: how many, and how many of them share a node."""

    ranks: int
    in_node: int

    @classmethod
    def of(cls, ranks: int, stride: int, machine: Machine) -> Group:
        """The group of `ranks` ranks with numbers `stride` apart."""
        return cls(ranks, max(1, min(ranks, machine.gpus_per_node // stride)))

    @property
    def nodes(self) -> int:
        """Nodes that it is on."""
        return ceil(self.ranks / self.in_node)


def bandwidth(group: Group, machine: Machine, share: float = 1.0) -> float:
    """Bytes per second that a rank of a ring sends; `share`: what protocols leave of the links' figures."""
    if group.nodes == 1:
        return machine.inside.bandwidth * share
    return min(machine.inside.bandwidth, machine.between.bandwidth * group.in_node) * share


def gather(size: float, group: Group, machine: Machine, share: float = 1.0) -> float:
    """Seconds of an all-gather, or a reduce-scatter, of `size` bytes (the whole, not a shard), by a ring.

    Its latency: every hop of a node's ring, and between nodes a tree's, which NCCL has taken for many nodes since 2.23.
    """
    if group.ranks == 1:
        return 0.0
    hops = (group.in_node - 1) * machine.inside.latency + ceil(log2(group.nodes)) * machine.between.latency
    return hops + size * (group.ranks - 1) / group.ranks / bandwidth(group, machine, share)


def all_reduce(size: float, group: Group, machine: Machine, share: float = 1.0) -> float:
    """Seconds of an all-reduce of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * gather(size, group, machine, share)


def send(size: float, neighbours: Group, machine: Machine, share: float = 1.0) -> float:
    """Seconds of a message to the next rank of a group."""
    link = machine.between if neighbours.in_node == 1 else machine.inside
    return (link.latency + size / (link.bandwidth * share)) * (neighbours.ranks > 1)
