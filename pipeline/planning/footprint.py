"""Memory of the fullest rank of a `Workload`: for runs of other frameworks, and other models than the decoder.

Of Sluice's own decoder pipeline/planning/memory.py knows more. Activations are what the backward pass needs of each
operator (Korthikanti et al., arXiv 2205.05198, section 4), with fused attention, which keeps no scores.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.planning.timeline import orders_of
from pipeline.planning.workload import Workload

FRAGMENTS = 1.05
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
    """What the fullest rank of a training holds."""
    experts = work.expert_weights * max(1, work.experts) / work.expert
    block = (work.attention_weights + experts) / work.tensor
    table = work.vocab * work.hidden / work.tensor * (2 if work.pipeline == 1 and not work.tied else 1)
    held = work.layers / work.pipeline * block + table
    share = work.shard * work.context if work.zero else 1
    tokens = work.micro_batch * work.sequence / work.context
    width, stream = work.low_bytes, work.hidden / (work.tensor if work.split_sequence else 1)
    query, shared = work.heads * work.head / work.tensor, work.kv_heads * work.head / work.tensor
    inner = work.ffn * work.active / work.tensor
    gated = (3 if work.fused else 4) if work.matrices == 3 else 2
    kept = {
        "none": (4 if work.fused else 6) * stream + 2 * query + 2 * shared + gated * inner,
        "selective": 2 * stream + 2 * query + 2 * shared + (work.matrices - 1) * inner,
        "half": 2 * stream + 1.5 * query + shared + (work.matrices - 1) * inner / 2,
        "full": stream,
    }
    most = _most_in_flight(work) * work.layers / len(work.stages)
    again = kept["none"] if work.recompute != "none" else 0.0
    logits = tokens * work.vocab / work.tensor * (8 if work.fused else 12)
    return Footprint(
        weights=held * work.weight_bytes / share,
        gathered=width * (min(held, 2 * block + table) if work.zero == 3 else held),
        gradients=held * work.gradient_bytes / (share if work.zero >= 2 and work.each_micro_batch else 1),
        optimizer=held * work.optimizer_bytes / share,
        activations=width * tokens * (most * kept[work.recompute] + again),
        logits=logits if work.pipeline == 1 else 0.0,
    )


def _most_in_flight(work: Workload) -> int:
    """Micro-batches times stages that the fullest rank keeps for backward."""
    if work.pipeline == 1:
        return 1
    most = 0
    batches = min(work.micro_batches, 4 * work.pipeline)
    for order in orders_of(work.schedule, work.pipeline, work.virtual_stages, batches):
        held = 0
        for action in order:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            most = max(most, held)
    return most
