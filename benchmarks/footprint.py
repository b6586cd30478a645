"""Memory of the fullest rank of a `Workload`: for published runs of other frameworks, and other models.

What `plan` prints of Sluice's own decoder is planning/memory.py's, which knows more. Here weights, gradients
and Adam's moments are in fp32, with a copy of the weights in the low precision; activations are what the backward pass
needs of each operator (Korthikanti et al., arXiv 2205.05198, section 4), with fused attention, which keeps no scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planning.search import FRAGMENTATION_FACTOR
from planning.timeline import Action, build_schedule
from planning.workload import Workload


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
        return sum(sizes) * FRAGMENTATION_FACTOR


def estimate_footprint(work: Workload) -> Footprint:
    """What the fullest rank of a training holds: of the first two and the last of its pipeline the one with most."""
    orders = build_schedule(
        work.schedule, work.pipeline, work.virtual_stages, min(work.micro_batches, 4 * work.pipeline)
    )
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
    again = count_saved_values(work, "none") if work.recompute != "none" else 0.0
    logits = tokens * work.vocab / work.tensor * (8 if work.native else 12)
    return Footprint(
        weights=held * 4 / share,
        gathered=work.low_bytes * (min(held, 2 * block + table) if work.gathers_blocks else held),
        gradients=held * 4 / (share if work.reduces_blocks else 1),
        optimizer=held * 8 / share,
        activations=work.low_bytes * tokens * (most * count_saved_values(work, work.recompute) + again),
        logits=logits if len(work.stages) - 1 in own else 0.0,
    )


def count_saved_values(work: Workload, recompute: str) -> float:
    """Values of a token that one block keeps for backward (Korthikanti et al., arXiv 2205.05198, section 4)."""
    stream = work.hidden / (work.tensor if work.split_sequence else 1)
    query, shared = (heads * work.head / work.tensor for heads in (work.heads, work.kv_heads))
    inner = work.ffn * work.active / work.tensor
    gated = (3 if work.fused else 4) if work.matrices == 3 else 2
    whole = (4 if work.fused else 6) * stream + 2 * query + 2 * shared + gated * inner
    if not work.fused:  # autograd keeps what was gathered for the products, by hand it is gathered again
        whole += 2 * (work.hidden - stream)
    scores = 2.5 * work.heads / work.tensor * work.sequence if work.scores else 0.0
    return {
        "none": whole + scores,
        "attention": whole,
        "selective": 2 * stream + 2 * query + 2 * shared + (work.matrices - 1) * inner,
        "half": (whole + stream) / 2,
        "full": stream,
    }[recompute]
