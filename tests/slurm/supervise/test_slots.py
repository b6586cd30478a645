"""Test which rank runs in which slot of a Slurm job, and how a rank is described to itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.dist_env import read_rank_info
from pipeline.config.stages import NodeRange, StageResources
from slurm.supervise.slots import Slot, assign_slots, describe_rank


def make_slots(node_count: int, ranks_per_node: int) -> list[Slot]:
    """Return the slots that tasks of srun report for nodes n0, n1 … with a block distribution."""
    slots = []
    for task in range(node_count * ranks_per_node):
        node, local_rank = divmod(task, ranks_per_node)
        environment = {
            "SLURM_JOB_ID": "7",
            "SLURM_STEP_ID": "3",
            "SLURM_JOB_NODELIST": f"n[0-{node_count - 1}]",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NTASKS": str(node_count * ranks_per_node),
            "CUDA_VISIBLE_DEVICES": f"GPU-{node}-{local_rank}",
        }
        slots.append(Slot(node, task, f"host{node}", environment, [local_rank], None))
    return slots


@given(data=st.data(), ranks_per_node=st.integers(1, 4), distribution=st.sampled_from(["block", "cyclic", "plane=2"]))
def test_ranks_on_any_nodes_see_themselves_as_an_ordinary_job_step(
    data: st.DataObject, ranks_per_node: int, distribution: str
) -> None:
    """Some nodes of the job are used, in any order: spare nodes have replaced others."""
    node_count = data.draw(st.integers(1, 6))
    nodes = data.draw(st.permutations(range(node_count)))[: data.draw(st.integers(1, node_count))]
    names = [f"n{node}" for node in range(node_count)]
    slots = assign_slots(make_slots(node_count, ranks_per_node), nodes, ranks_per_node, distribution)
    assert len({slot.task for slot in slots}) == len(slots) == len(nodes) * ranks_per_node
    assert {slot.node for slot in slots} == set(nodes)
    local_ranks: dict[int, list[int]] = {}
    for rank, slot in enumerate(slots):
        environment = describe_rank(rank, slots, names)
        info = read_rank_info({**environment, "SLUICE_MASTER_PORT": "20001"})
        assert (info.launcher, info.rank, info.world_size) == ("srun", rank, len(slots))
        assert (info.local_rank, info.local_world_size) == (slot.local_rank, ranks_per_node)
        assert info.master_host == names[slots[0].node]
        assert environment["CUDA_VISIBLE_DEVICES"] == f"GPU-{slot.node}-{slot.local_rank}"
        assert environment["SLURM_NTASKS"] == str(len(slots))
        local_ranks.setdefault(slot.node, []).append(info.local_rank)
    assert all(ranks == list(range(ranks_per_node)) for ranks in local_ranks.values())


def test_a_replaced_node_keeps_its_place() -> None:
    slots = make_slots(4, 2)
    before = assign_slots(slots, [0, 1, 2], 2, "cyclic")
    after = assign_slots(slots, [0, 3, 2], 2, "cyclic")
    assert [slot.node for slot in before] == [0, 1, 2, 0, 1, 2]
    assert [slot.node for slot in after] == [0, 3, 2, 0, 3, 2]


@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 3), st.data())
def test_spare_nodes_are_kept_free_until_nodes_fail(
    minimum: int, elasticity: int, spares: int, data: st.DataObject
) -> None:
    nodes = NodeRange(min=minimum, max=minimum + elasticity, spares=spares)
    resources = StageResources(nodes=nodes)
    granted = data.draw(st.integers(resources.min_nodes, resources.max_requested_nodes))
    granted_spares = min(spares, granted - minimum)
    available = [resources.count_available_nodes(granted, failed) for failed in range(granted + 1)]
    assert available[0] == granted - granted_spares >= minimum
    for failed, count in enumerate(available):
        assert count == (available[0] if failed <= granted_spares else granted - failed)
