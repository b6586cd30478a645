"""Slots: the places for ranks on the nodes of a Slurm job, and which rank runs in which slot.

The program slurm/agent/report_placement.py reports a slot for each task that srun would start. At first, each rank gets
a slot of the first nodes. If a node fails, the slots of another node replace its slots, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from slurm.query.capacity import assign_ranks_to_nodes

_VARIABLES_OF_ALL_NODES = ("SLURM_NNODES", "SLURM_NODELIST", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE")
"""Variables that srun may set to the values of the job step. They are changed only if srun has set them."""


@dataclass(frozen=True)
class Slot:
    """A place for a rank on a node, with the binding that srun gives to a task in this place."""

    node: int
    """The index of the node in the job step."""
    task: int
    """The index of the task in the job step."""
    host: str
    environment: Mapping[str, str]
    """The variables of the task."""
    cpus: Sequence[int]
    """The CPUs that the task may use."""
    memory_policy: tuple[int, int] | None
    """The NUMA policy of the task: mode and node mask, as in set_mempolicy(2). None for the default policy."""

    @property
    def local_rank(self) -> int:
        """The index of the task on its node."""
        return int(self.environment["SLURM_LOCALID"])


def assign_slots(slots: Sequence[Slot], nodes: Sequence[int], ranks_per_node: int, distribution: str) -> list[Slot]:
    """Return the slot of each rank.

    Args:
        slots: all slots of the job, in the order of their tasks.
        nodes: the indexes of the nodes to use, in the order in which they get ranks.
        ranks_per_node: the number of ranks on each node.
        distribution: how srun distributes ranks, a value of its option `--distribution`.
    """
    if len(nodes) * ranks_per_node == len(slots) and list(nodes) == sorted({slot.node for slot in slots}):
        return list(slots)  # the order of srun, also for a distribution that is not known here
    slots_by_node = {
        node: sorted((slot for slot in slots if slot.node == node), key=lambda slot: slot.local_rank) for node in nodes
    }
    assigned_counts: Counter[int] = Counter()
    assigned = []
    for place in assign_ranks_to_nodes([ranks_per_node] * len(nodes), distribution):
        node = nodes[place]
        assigned.append(slots_by_node[node][assigned_counts[node]])
        assigned_counts[node] += 1
    return assigned


def describe_rank(rank: int, slots: Sequence[Slot], node_names: Sequence[str]) -> dict[str, str]:
    """Return the variables that srun would set for a rank if it started exactly these ranks.

    Args:
        rank: the rank.
        slots: the slot of each rank.
        node_names: the name of each node in Slurm, by index.
    """
    slot = slots[rank]
    nodes = list(dict.fromkeys(each.node for each in slots))
    counts = Counter(each.node for each in slots)
    tasks_per_node = ",".join(
        f"{count}(x{repetitions})" if (repetitions := len(list(group))) > 1 else str(count)
        for count, group in groupby(counts[node] for node in nodes)
    )
    host_list = ",".join(node_names[node] for node in nodes)
    values = {
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NODELIST": host_list,
        "SLURM_NTASKS": str(len(slots)),
        "SLURM_NPROCS": str(len(slots)),
        "SLURM_TASKS_PER_NODE": tasks_per_node,
    }
    return {
        **slot.environment,
        **{name: values[name] for name in _VARIABLES_OF_ALL_NODES if name in slot.environment},
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(sum(each.node == slot.node for each in slots[:rank])),
        "SLURM_NODEID": str(nodes.index(slot.node)),
        "SLURM_GTIDS": ",".join(str(index) for index, each in enumerate(slots) if each.node == slot.node),
        "SLURM_STEP_NUM_TASKS": str(len(slots)),
        "SLURM_STEP_NUM_NODES": str(len(nodes)),
        "SLURM_STEP_NODELIST": host_list,
        "SLURM_STEP_TASKS_PER_NODE": tasks_per_node,
    }
