"""Memory of one rank: weights, gradients, optimizer counted exactly; activations estimated from shapes.

The estimate is what torch was seen to save for the backward pass of the decoder, good enough to compare layouts
(tests/planning/test_plan.py holds it to 5 % of torch's own account).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from pipeline.config.layout import Layout
from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK
from pipeline.parallel.traffic import EMBEDDING, kept_width, parameters_of, stream_width, weights_of
from pipeline.planning.timeline import Action


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: int
    """Parameter values of this rank's stages, after tensor parallelism; a count, no bytes."""
    weights: int
    """Weights between steps: in fp32, or without a master in bf16."""
    gathered: int
    """Weights that ZeRO holds whole beside its shard during a step; without ZeRO, their copies in the low precision."""
    gradients: int
    optimizer: int
    activations: int
    """Most of a step, estimated."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations

    def on_gpu(self, config: Config) -> int:
        """What of it is not in host memory."""
        return self.gathered + self.activations if config.parallel.offload else self.total


def _frozen(config: Config, name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in config.optimizer.freeze)


def _moment_bytes(config: Config, name: str, count: int, dimensions: int) -> int:
    """Bytes that the optimizer keeps of a weight with so many values."""
    optimizer = config.optimizer
    if optimizer.state.moments == "int8" and dimensions > 1:
        return 2 * (count + 4 * count // INT8_BLOCK)
    alone = optimizer.name == "sgd" or (optimizer.name == "muon" and dimensions > 1 and _block(name) >= 0)
    return (4 if alone or optimizer.state.moments == "bf16" else 8) * count


def _first_trained(config: Config, layout: Layout, vocab: int) -> int:
    """The first block that keeps something for the backward pass: it, or the embedding, is trained."""
    ranks = range(layout.pipeline if config.optimizer.freeze else 0)
    weights = (name for rank in ranks for name, *_ in weights_of(config, layout, rank, vocab))
    names = [name for name in weights if not _frozen(config, name)]
    blocks = [_block(name) for name in names if _block(name) >= 0]
    return 0 if EMBEDDING in names or not ranks else min(blocks, default=config.model.layers)


def _block(name: str) -> int:
    """The number of the block that has a weight; -1: none has."""
    return int(name.split(".")[2]) if ".layers." in name else -1


def _block_activations(config: Config, layout: Layout, kind: str) -> int:
    """Bytes that one block keeps for the backward pass of one micro-batch, by what torch was seen to save.

    `kind`: of activation checkpointing.
    """
    model, compiled = config.model, config.train.compile
    low, wide = config.train.precision != "fp32", stream_width(config, layout)
    width = 2 if low else 4
    query, shared = model.heads * model.head_size, model.num_kv_heads * model.head_size
    seen = query + 2 * (shared if low else query)  # fp32's kernel for attention wants keys and values for each query
    casts = 3 if low and wide == 4 else 0  # of a wide input, for each matrix; compiled, they are made again
    streams, whole, cut = {
        "none": (1, 3, seen + query + 3 * model.ffn_size)
        if compiled
        else (2, 2 + casts, seen + query + 4 * model.ffn_size),
        "selective": (1, 1 if compiled else 2, 2 * query + 2 * shared + 2 * model.ffn_size),
        "full": (1, 0, 0),
    }[kind]
    tokens, stream = config.train.micro_batch * config.data.sequence_length, layout.tensor if layout.sequence else 1
    return tokens * ((wide * streams + width * whole) * model.dim // stream + width * cut // layout.tensor)


def memory(config: Config, layout: Layout, pipeline: int, vocab: int, order: Sequence[Action]) -> Memory:
    """What a rank of this pipeline position holds."""
    stages = layout.stages_of(pipeline)
    parameters = parameters_of(config, layout, pipeline, vocab)
    low, kept = config.train.precision != "fp32", kept_width(config)
    width = 2 if low else 4
    share = layout.shard if layout.zero else 1
    last, chunk = layout.stages - 1 in stages, config.train.loss_chunk
    table = vocab * config.model.dim // layout.tensor * width
    kind, size = config.parallel.activation_checkpointing, _block_activations
    weights = list(weights_of(config, layout, pipeline, vocab))
    trained = [weight for weight in weights if not _frozen(config, weight[0])]
    held, peak, block, first = 0, 0, size(config, layout, kind), _first_trained(config, layout, vocab)
    for action in order:
        keeping = [number for number in layout.stage_layers[action.stage] if number >= first]
        held += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] * len(keeping) * block
        peak = max(peak, held)
    again = block_again = 0 if kind == "none" else size(config, layout, "none")  # of the block in backward
    if last:  # three times in fp32: log-softmax, its gradient, that of the logits
        cut = layout.tensor if config.parallel.loss_parallel else 1
        tokens = config.train.micro_batch * config.data.sequence_length
        logits = tokens * vocab // cut * 12
        if chunk is not None:  # its logits, or the chunk's share of the weights' gradient; hidden states
            rows, dim = min(chunk, tokens), config.model.dim
            logits = (4 * dim + max((4 + width) * rows, width * (rows + dim))) * vocab // layout.tensor
            logits += tokens * dim * (stream_width(config, layout) + 2 * width)
        again = max(again, logits)
    gathered = 0
    if layout.fsdp:
        gathered = whole = parameters * width
        if layout.zero == 3 and layout.pipeline == 1:  # two blocks at a time, and what is no block
            blocks = sum(len(layout.stage_layers[stage]) for stage in stages)
            gathered = min(whole, 2 * table + 2 * (whole - 2 * table) // max(1, blocks))
    elif low and kept == 4:  # autocast's copies
        copies = width * sum(count for name, count, _ in weights if _block(name) >= first)
        if kind != "none":  # made again by what is compiled; of others gone when backward begins
            copies = 0 if config.train.compile else max(0, copies - again)
        gathered = copies + table * last
    gradients = kept * sum(count for _, count, _ in trained) // (share if layout.reduce_each_micro_batch else 1)
    activations = peak + again
    if layout.world == layout.micro_batches == 1:  # gradients come while activations go
        activations = max(activations - gradients, block_again)
    copy = 0
    if config.train.evaluate_every is not None:  # of the weights, for held-out data (pipeline/evaluate/evaluator.py)
        copy = parameters // (layout.data if layout.zero == 3 or layout.pipeline * layout.tensor > 1 else 1)
    return Memory(
        parameters=parameters,
        weights=kept * (parameters // share) + 4 * copy,
        gathered=gathered,
        gradients=gradients,
        optimizer=sum(_moment_bytes(config, *weight) // share for weight in trained),
        activations=activations,
    )
