"""What published runs of other frameworks wait for beyond what Sluice has: experts, and context parallel.

`python -m benchmarks.plan` hands `talk` to the prediction (planning/predict.py), which adds it to each block.
"""

from __future__ import annotations

from planning.machine import Machine
from planning.predict import CommGroup, RankModel, all_gather_time


def communication_time(rank: RankModel, forward: float) -> float:
    """Seconds of one block's forward that wait; `forward`: its computing. Backward waits as long."""
    away = expert_exchange_time(rank)
    if rank.work.schedule == "dualpipe_v":  # one micro-batch's backward runs beside another's way to its experts
        away = max(0.0, away - forward)
    return ring_attention_time(rank) + away


def ring_attention_time(rank: RankModel) -> float:
    """Keys and values of one block's forward that go round, as far as attention does not hide them."""
    work, group = rank.work, rank.group(rank.work.context, rank.work.tensor)
    size = 2 * rank.tokens * work.kv_heads * work.head / work.tensor * work.low_bytes
    round_trip = all_gather_time(size * work.context, group, rank.machine, rank.constants.link)
    return max(0.0, round_trip - rank.attention() * (1 - 1 / work.context))


def expert_exchange_time(rank: RankModel) -> float:
    """Tokens of one block's forward to their experts and back."""
    work = rank.work
    size = rank.tokens * work.active * work.hidden * work.low_bytes / work.tensor
    group = rank.group(work.expert, work.tensor)
    time = 2 * all_to_all_time(size, group, rank.machine, rank.constants.link, work.active) * (work.expert > 1)
    return time * (1 - rank.constants.hidden if work.hide_tensor else 1)


def all_to_all_time(size: float, group: CommGroup, machine: Machine, share: float = 1.0, copies: int = 1) -> float:
    """Seconds in which each rank sends `size` bytes, spread over all: what leaves the node takes its own card.

    Of `copies` copies of the same bytes each node gets one, and hands it on inside.
    """
    away = (1 - group.in_node / group.ranks) * min(1.0, group.nodes / copies)
    inside = size * (group.in_node - 1) / group.ranks / (machine.inside.bandwidth * share)
    between = size * away / (machine.between.bandwidth * share)
    link = machine.between if group.nodes > 1 else machine.inside
    return max(inside, between) + link.latency * (group.ranks > 1)
