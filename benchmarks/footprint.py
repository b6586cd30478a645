"""Estimate the memory of the rank that needs the most, for published runs of other frameworks and models.

For Sluice's own decoder, planning/memory.py is more exact. Here, weights, gradients and Adam's moments are in fp32,
with a copy of the weights in the low precision. Activations are those that the backward pass needs of each operator
(Korthikanti et al., arXiv 2205.05198, section 4), with fused attention, which saves no scores.
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
        """Return the sum in bytes, including fragmentation of the allocator."""
        sizes = (self.weights, self.gathered, self.gradients, self.optimizer, self.activations, self.logits)
        return sum(sizes) * FRAGMENTATION_FACTOR


def estimate_footprint(work: Workload) -> Footprint:
    """Return the footprint of the rank that needs the most, of the first two and the last rank of the pipeline."""
    orders = build_schedule(
        work.schedule, work.pipeline, work.virtual_stages, min(work.micro_batches, 4 * work.pipeline)
    )
    candidates = {0, min(1, work.pipeline - 1), work.pipeline - 1}
    footprints = [_estimate_rank(work, rank, orders[rank]) for rank in candidates]
    return max(footprints, key=lambda footprint: footprint.total)


def _estimate_rank(work: Workload, rank: int, order: Sequence[Action]) -> Footprint:
    experts = work.expert_weights * max(1, work.experts) / work.expert
    block = (work.attention_weights + experts) / work.tensor
    tables = 2 if work.pipeline == 1 and not work.tied else rank in (0, work.pipeline - 1)
    table = work.vocab * work.hidden / work.tensor * tables
    rank_stages = {action.stage for action in order}
    weights = sum(work.stages[stage] for stage in rank_stages) * block + table
    shards = work.shard * work.context if work.zero else 1
    tokens = work.micro_batch * work.sequence / work.context
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    max_blocks = max(accumulate(change[action.kind] * work.stages[action.stage] for action in order))
    recomputed = count_saved_values(work, "none") if work.recompute != "none" else 0.0
    logits = tokens * work.vocab / work.tensor * (8 if work.native else 12)
    return Footprint(
        weights=weights * 4 / shards,
        gathered=work.low_bytes * (min(weights, 2 * block + table) if work.gathers_blocks else weights),
        gradients=weights * 4 / (shards if work.reduces_blocks else 1),
        optimizer=weights * 8 / shards,
        activations=work.low_bytes * tokens * (max_blocks * count_saved_values(work, work.recompute) + recomputed),
        logits=logits if len(work.stages) - 1 in rank_stages else 0.0,
    )


def count_saved_values(work: Workload, recompute: str) -> float:
    """Return how many values per token a block saves for backward (Korthikanti et al., arXiv 2205.05198, section 4)."""
    stream = work.hidden / (work.tensor if work.split_sequence else 1)
    query, shared = (heads * work.head / work.tensor for heads in (work.heads, work.kv_heads))
    inner = work.ffn * work.active / work.tensor
    gated = (3 if work.fused else 4) if work.matrices == 3 else 2
    whole = (4 if work.fused else 6) * stream + 2 * query + 2 * shared + gated * inner
    if not work.fused:  # autograd saves the gathered inputs of the matrix products; fused kernels gather them again
        whole += 2 * (work.hidden - stream)
    scores = 2.5 * work.heads / work.tensor * work.sequence if work.scores else 0.0
    return {
        "none": whole + scores,
        "attention": whole,
        "selective": 2 * stream + 2 * query + 2 * shared + (work.matrices - 1) * inner,
        "half": (whole + stream) / 2,
        "full": stream,
    }[recompute]
