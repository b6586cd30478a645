"""Predict the communication of expert parallelism, and of context parallelism as a ring.

Sluice has neither: it gathers keys and values instead (`RankModel.context_time`).

`python -m benchmarks.plan` passes `expert_and_context_time` to `predict_step` (planning/predict.py), which adds the
returned time to each block.
"""

from __future__ import annotations

from planning.machine import Machine
from planning.predict import CommGroup, RankModel, all_gather_time


def expert_and_context_time(rank: RankModel, forward: float) -> float:
    """Return the seconds of exposed expert-parallel and context-parallel communication in a block's forward pass.

    The communication of the block's backward pass takes the same time.

    Args:
        rank: the model of the rank.
        forward: seconds of computation in the forward pass of one block.
    """
    exchange = expert_exchange_time(rank)
    # In DualPipe-V, the exchange overlaps with the computation of another micro-batch. The estimate is cautious: it
    # counts only a forward pass as this computation.
    if rank.work.schedule == "dualpipe_v":
        exchange = max(0.0, exchange - forward)
    return ring_attention_time(rank) + exchange


def ring_attention_time(rank: RankModel) -> float:
    """Return the seconds of exposed communication of keys and values in a block's forward pass.

    In each of `context` ring steps, a rank computes attention to one part of the keys and values. Meanwhile, this part
    is sent to the next rank, except in the last ring step. Communication that takes longer than the computation of its
    ring step is exposed.
    """
    work = rank.work
    group = rank.group(work.context, work.tensor)
    size = 2 * rank.tokens * work.kv_heads * work.head / work.tensor * work.low_bytes
    round_trip = all_gather_time(size * work.context, group, rank.machine, rank.constants.link)
    return max(0.0, round_trip - rank.attention_time() * (1 - 1 / work.context))


def expert_exchange_time(rank: RankModel) -> float:
    """Return the seconds to send tokens to their experts and back, in a block's forward pass."""
    work = rank.work
    size = rank.tokens * work.active * work.hidden * work.low_bytes / work.tensor
    group = rank.group(work.expert, work.tensor)
    exchanges = 2 if work.expert > 1 else 0  # to the experts and back
    time = exchanges * all_to_all_time(size, group, rank.machine, share=rank.constants.link, copies=work.active)
    return time * (1 - rank.constants.hidden if work.hide_tensor else 1)


def all_to_all_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0, copies: int = 1) -> float:
    """Return the seconds of an all-to-all in which each rank sends `size` bytes. Each GPU has its own network card.

    Args:
        size: bytes that each rank sends, including copies.
        group: ranks of the all-to-all.
        machine: the machine with the bandwidths and latencies.
        share: fraction of the bandwidth that is reached.
        copies: number of ranks that receive the same bytes. Several ranks of one node receive them only once from
            another node, and then distribute them inside their node.
    """
    remote_fraction = (1 - group.ranks_per_node / group.ranks) * min(1.0, group.nodes / copies)
    inside = size * (group.ranks_per_node - 1) / group.ranks / (machine.inside.bandwidth * share)
    between = size * remote_fraction / (machine.between.bandwidth * share)
    link = machine.between if group.nodes > 1 else machine.inside
    return max(inside, between) + link.latency * (group.ranks > 1)
