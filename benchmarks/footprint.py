"""Estimate the memory of the rank that needs most memory, for published runs of other frameworks and models.

For Sluice's own decoder, planning/memory.py is more exact. This module assumes that weights, gradients and Adam's
moments are in fp32. Each rank also has a copy of weights in the precision of the matrix products. Activations are those
that each operator saves for the backward pass (Korthikanti et al., arXiv 2205.05198, section 4). Attention is fused and
saves no scores, unless `Workload.scores` is set.
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
    """Memory of one rank in bytes."""

    weights: float
    """Weights in fp32."""
    gathered: float
    """Copies of weights in the precision of the matrix products.

    If blocks are gathered one by one (`Workload.gathers_blocks`, for example with ZeRO 3), the copies of two blocks
    exist at a time. Otherwise the copies of all weights exist.
    """
    gradients: float
    optimizer: float
    """The two moments of Adam."""
    activations: float
    logits: float
    """Logits of the output layer, and their gradients."""

    @property
    def total(self) -> float:
        """Sum in bytes, including fragmentation of the allocator."""
        sizes = (self.weights, self.gathered, self.gradients, self.optimizer, self.activations, self.logits)
        return sum(sizes) * FRAGMENTATION_FACTOR


def estimate_footprint(work: Workload) -> Footprint:
    """Return the footprint of the pipeline rank that needs most memory: the first, the second or the last rank."""
    # A longer schedule takes longer to build. Except with gpipe, it does not change the peak.
    orders = build_schedule(
        work.schedule, work.pipeline, work.virtual_stages, min(work.micro_batches, 4 * work.pipeline)
    )
    ranks = {0, min(1, work.pipeline - 1), work.pipeline - 1}
    footprints = [_estimate_rank(work, rank, orders[rank]) for rank in ranks]
    return max(footprints, key=lambda footprint: footprint.total)


def _estimate_rank(work: Workload, rank: int, order: Sequence[Action]) -> Footprint:
    """Return the footprint of a pipeline rank that executes the actions `order`."""
    experts = work.expert_weights * max(1, work.experts) / work.expert
    block = (work.attention_weights + experts) / work.tensor
    # A rank has the embedding, the output layer, both or neither. A tied output layer counts as the embedding.
    table_count = 2 if work.pipeline == 1 and not work.tied else int(rank in (0, work.pipeline - 1))
    tables = work.vocab * work.hidden / work.tensor * table_count
    rank_stages = {action.stage for action in order}
    weights = sum(work.stages[stage] for stage in rank_stages) * block + tables
    shards = work.shard * work.context if work.zero else 1
    tokens = work.micro_batch * work.sequence / work.context
    # A forward pass (F) saves the activations of its blocks, and the end of the backward pass frees them. The backward
    # pass is one action (B), or two: gradients of inputs (I), then gradients of weights (W).
    saved_change = {"F": 1, "B": -1, "I": 0, "W": -1}
    max_blocks = max(accumulate(saved_change[action.kind] * work.stages[action.stage] for action in order))
    recomputed = count_saved_values(work, "none") if work.recompute != "none" else 0.0
    # Bytes of a logit with its gradient: 8 with kernels that are written for this GPU, otherwise 12.
    logits = tokens * work.vocab / work.tensor * (8 if work.native else 12)
    return Footprint(
        weights=weights * 4 / shards,
        gathered=work.low_bytes * (min(weights, 2 * block + tables) if work.gathers_blocks else weights),
        gradients=weights * 4 / (shards if work.reduces_blocks else 1),
        optimizer=weights * 8 / shards,
        activations=work.low_bytes * tokens * (max_blocks * count_saved_values(work, work.recompute) + recomputed),
        logits=logits if len(work.stages) - 1 in rank_stages else 0.0,
    )


def count_saved_values(work: Workload, recompute: str) -> float:
    """Return the number of values per token that a block saves for the backward pass.

    Source: Korthikanti et al., arXiv 2205.05198, section 4. `recompute` is as in `Workload.recompute`.
    """
    stream = work.hidden / (work.tensor if work.split_sequence else 1)
    query, key_value = (heads * work.head / work.tensor for heads in (work.heads, work.kv_heads))
    inner = work.ffn * work.active / work.tensor
    # Saved values of the MLP for each value of its hidden layer: an MLP with a gate has three matrices, else two.
    gated = (3 if work.fused else 4) if work.matrices == 3 else 2
    whole = (4 if work.fused else 6) * stream + 2 * query + 2 * key_value + gated * inner
    # Autograd saves the gathered inputs of the matrix products. Fused kernels gather these inputs again.
    if not work.fused:
        whole += 2 * (work.hidden - stream)
    scores = 2.5 * work.heads / work.tensor * work.sequence if work.scores else 0.0
    return {
        "none": whole + scores,
        "attention": whole,
        "selective": 2 * stream + 2 * query + 2 * key_value + (work.matrices - 1) * inner,
        "half": (whole + stream) / 2,
        "full": stream,
    }[recompute]
