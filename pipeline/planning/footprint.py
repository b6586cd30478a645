"""Memory of the fullest rank of a `Workload`: for runs of other frameworks, and other models than the decoder.

Of Sluice's own decoder pipeline/planning/memory.py knows more. Activations are what the backward pass needs of each
operator (Korthikanti et al., arXiv 2205.05198, section 4), with fused attention, which keeps no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeline.planning.timeline import Action, orders_of
from pipeline.planning.workload import Workload

FRAGMENTS = 1.08
"""What an allocator holds beyond the tensors, to what they are."""


@dataclass(frozen=True)
class Footprint:
    """Bytes of one rank."""

    weights: float
    gathered: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it, with what the allocator holds."""
        sizes = (self.weights, self.gathered, self.gradients, self.optimizer, self.activations, self.logits)
        return sum(sizes) * FRAGMENTS


def footprint(work: Workload) -> Footprint:
    """What the fullest rank of a training holds: of the first two and the last of its pipeline the one with most."""
    orders = orders_of(work.schedule, work.pipeline, work.virtual_stages, min(work.micro_batches, 4 * work.pipeline))
    ends = {0, min(1, work.pipeline - 1), work.pipeline - 1}
    return max((_of_rank(work, rank, orders[rank]) for rank in ends), key=lambda found: found.total)


def _of_rank(work: Workload, rank: int, order: Sequence[Action]) -> Footprint:
    experts = work.expert_weights * max(1, work.experts) / work.expert
    block = (work.attention_weights + experts) / work.tensor
    tables = 2 if work.pipeline == 1 and not work.tied else rank in (0, work.pipeline - 1)
    table = work.vocab * work.hidden / work.tensor * tables
    own = {action.stage for action in order}
    held = sum(work.stages[stage] for stage in own) * block + table
    share = work.shard * work.context if work.zero else 1
    tokens = work.micro_batch * work.sequence / work.context
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    most = max(accumulate(change[action.kind] * work.stages[action.stage] for action in order))
    again = work.kept_values("none") if work.recompute != "none" else 0.0
    logits = tokens * work.vocab / work.tensor * (8 if work.native else 12)
    return Footprint(
        weights=held * work.weight_bytes / share,
        gathered=work.low_bytes * (min(held, 2 * block + table) if work.gathers_blocks else held),
        gradients=held * work.gradient_bytes / (share if work.reduces_blocks else 1),
        optimizer=held * work.optimizer_bytes / share,
        activations=work.low_bytes * tokens * (most * work.kept_values(work.recompute) + again),
        logits=logits if len(work.stages) - 1 in own else 0.0,
    )
