"""Memory of one rank: weights, gradients, optimizer counted exactly; activations from shapes.

`memory` follows a rank through its step: what a forward keeps, what passes through a block's backward and the loss,
when gradients come, what ZeRO has gathered then; the most of all moments is what it holds. What torch keeps of each
operator was read off rehearsed ranks; tests/planning/test_arithmetic.py holds it to them, test_plan.py to what torch's
allocator counts on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK, StateConfig
from pipeline.model.spec import ParameterSpec, key_value_width, query_width
from pipeline.parallel.mesh import SPLIT_BACKWARD, Layout
from pipeline.parallel.traffic import (
    find_cross_rank_stages,
    find_trained_parameters,
    list_rank_parameters,
    residual_stream_bytes,
    stored_weight_bytes,
)
from planning.timeline import Action, rank_actions

GB = 1e9
CONTEXT = 400_000_000
"""Bytes of CUDA's context, its kernels loaded when wanted: some 400 MB (github.com/pytorch/pytorch/issues/109888)."""
COMMUNICATOR = 688 * 2**20
"""And of NCCL's buffers for each group: 688 MB between more than two of four A100 (github.com/NVIDIA/nccl/issues/964);
context and a first group of eight H100 were 1.06 GB together (issue 1685)."""


def reserved_gpu_bytes(layout: Layout) -> int:
    """Bytes of a GPU that are there for no tensor. Groups: all ranks, and each dimension of the mesh."""
    groups = sum(size > 1 for size in (layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp))
    return CONTEXT + COMMUNICATOR * (groups + (groups > 1))


MEMORY_KINDS = ("weights", "gathered", "gradients", "optimizer", "activations")
"""The parts of `Memory`, as tables name them."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank."""

    parameters: int
    """Parameter values of this rank's stages, after tensor parallelism; a count, no bytes."""
    weights: int
    """Weights between steps: in fp32, or without a master in bf16."""
    gathered: int
    """Weights that ZeRO holds whole beside its shard during a step; without ZeRO, their copies in the low precision."""
    gradients: int
    optimizer: int
    """Its moments; and what replicas have of their own: residuals, weights of the last average."""
    activations: int
    """Most of a step, estimated."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gathered + self.gradients + self.optimizer + self.activations

    def on_gpu(self, config: Config) -> int:
        """What of it is not in host memory."""
        return self.gathered + self.activations if config.parallel.offload else self.total


class GpuFit(NamedTuple):
    """How the fullest rank of a layout fits into a GPU; sizes in bytes."""

    rank: int
    """The pipeline rank that needs most."""
    needed: int
    """What its tensors take."""
    reserved: int
    """What CUDA and NCCL take."""
    size: float
    """What the GPU has."""

    @property
    def fits(self) -> bool:
        """Whether there is enough."""
        return self.needed + self.reserved <= self.size


def check_gpu_fit(config: Config, layout: Layout, ranks: Sequence[RankMemory], gib: float) -> GpuFit:
    """Return how a layout, whose pipeline ranks hold `ranks`, fits into GPUs of so many GiB."""
    needs = [part.on_gpu(config) for part in ranks]
    return GpuFit(needs.index(max(needs)), max(needs), reserved_gpu_bytes(layout), gib * 2**30)


def describe_overflow(config: Config, fit: GpuFit, whence: str) -> str:
    """Return what does not fit, and what to change. `whence`: where the GPU's size is from."""
    return (
        f"rank {fit.rank} of the pipeline needs {fit.needed / GB:.1f} GB, CUDA's context and NCCL some "
        f"{fit.reserved / GB:.1f}, and a GPU has {fit.size / GB:.1f} ({whence}): lower train.micro_batch "
        f"({config.train.micro_batch}), let parallel.activation_checkpointing be selective or full, set "
        "train.loss_chunk or optimizer.state, or cut the model over more ranks (parallel.zero, tensor, pipeline)"
    )


def needs_torch(layout: Layout) -> bool:
    """Return whether the actions of the layout's schedule are torch's own: `actions` imports torch for it."""
    return layout.pp > 1 and layout.schedule in SPLIT_BACKWARD


def describe_size(size: float) -> str:
    """Return bytes in GB with two digits or three: 0.35 GB, 12.5 GB, 1,300 GB."""
    return f"{size / GB:.2g} GB" if size < GB else f"{size / GB:,.1f} GB" if size < 100 * GB else f"{size / GB:,.0f} GB"


def _moment_bytes(config: Config, weight: ParameterSpec, ranks: int) -> int:
    """Bytes that the optimizer keeps of a weight on each of so many ranks."""
    optimizer, count = config.optimizer, weight.fsdp_numel(ranks)
    if optimizer.state.moments == "int8" and weight.is_matrix:
        return 2 * (count + 4 * count // INT8_BLOCK)
    alone = optimizer.name == "sgd" or (optimizer.name == "muon" and weight.is_block_matrix)
    return (4 if alone or optimizer.state.moments == "bf16" else 8) * count


def _updating(config: Config, layout: Layout, trained: Sequence[ParameterSpec], ranks: int) -> int:
    """Bytes that pass through the optimizer's step, of its largest weight."""
    optimizer = config.optimizer
    if optimizer.name == "muon":  # whole: weight, gradient, momentum; products in bf16
        largest = max((weight.numel for weight in trained if weight.is_block_matrix), default=0)
        return largest * layout.tp * (22 if ranks * layout.tp > 1 else 10)
    if optimizer.state == StateConfig() or config.train.compile:
        return 0
    return 40 * min(1 << 24, max((weight.fsdp_numel(ranks) for weight in trained), default=0))


def _block_activations(config: Config, layout: Layout, kind: str, on_cpu: bool) -> int:
    """Bytes that one block keeps for the backward pass of one micro-batch, by what torch was seen to save.

    `kind`: of activation checkpointing. `on_cpu`: by its kernels, which share no heads and norm in several steps.
    """
    model, compiled, cut_stream = config.model, config.train.compile, layout.tp if layout.sequence_parallel else 1
    low, wide = config.train.precision != "fp32", residual_stream_bytes(config, layout)
    width = 2 if low else 4
    query, shared = query_width(model), key_value_width(model)
    seen = query + 2 * (
        shared if low and not on_cpu else query
    )  # keys and values for each query, but for flash kernels
    casts = 3 if low and wide == 4 and layout.tp == 1 else 0  # of a wide input, for each matrix; compiled, made again
    # of width wide: the stream; of the other: inputs of products, whole even where the stream is cut; what is cut
    streams, sums, whole, cut = {
        "none": (1, 0, 3, seen + query + 3 * model.ffn_size)
        if compiled
        else (2, 0, 2 + casts, seen + query + 4 * model.ffn_size),
        "selective": (1, 1 if compiled else 2, 0, 2 * query + 2 * shared + 2 * model.ffn_size),
        "full": (1, 0, 0, 0),
    }[kind]
    norms = 2 * 4 + 2 * (4 - wide) if on_cpu and kind == "none" else 0
    found = (wide * streams + width * sums + norms) * model.dim // cut_stream
    found += width * (whole * model.dim + cut // layout.tp) + (kind != "full") * 4 * model.heads // layout.tp
    return config.train.micro_batch * config.data.sequence_length * found


def estimate_memory_of_ranks(config: Config, layout: Layout, vocab: int) -> list[RankMemory]:
    """What each pipeline rank holds."""
    return [estimate_memory(config, layout, rank, vocab, order) for rank, order in enumerate(rank_actions(layout))]


def _of_replicas(config: Config, values: int, state: int, peak: int) -> tuple[int, int]:
    """The most of all moments, and bytes between steps, with what replicas have that differ, of so many values each."""
    parallel = config.parallel
    if parallel.hook.kind in ("topk", "powersgd"):  # residuals, and this step's
        return peak + 4 * values, 4 * values
    if parallel.local_sgd is None:
        return peak, 0
    outer = parallel.local_sgd.outer_lr != 1 or parallel.local_sgd.outer_momentum > 0
    return max(peak, state), 8 * values * outer  # a save makes means of the whole state


def estimate_memory(
    config: Config, layout: Layout, pipeline: int, vocab: int, order: Sequence[Action], on_cpu: bool = False
) -> RankMemory:
    """What a rank of this pipeline position holds; `on_cpu`: by its kernels, as in a rehearsal."""
    stages, model, chunk = layout.stages_on_rank(pipeline), config.model, config.train.loss_chunk
    low, kept, wide = (
        config.train.precision != "fp32",
        stored_weight_bytes(config),
        residual_stream_bytes(config, layout),
    )
    width, share, tensor = 2 if low else 4, layout.dp_shard if layout.zero else 1, layout.tp
    tokens, cut_stream = (
        config.train.micro_batch * config.data.sequence_length,
        tensor if layout.sequence_parallel else 1,
    )
    table, kind = vocab * model.dim // tensor * width, config.parallel.activation_checkpointing
    weights = list(list_rank_parameters(config, layout, pipeline, vocab))
    parameters = sum(weight.numel for weight in weights)
    names, _, first = find_trained_parameters(config)
    trained = [weight for weight in weights if weight.name in names]
    whole, block = (_block_activations(config, layout, each, on_cpu) for each in ("none", kind))
    blocks = sum(len(layout.stage_layers[stage]) for stage in stages)
    copy = 0  # of a block's weights, by autocast
    if low and kept == 4 and not layout.fsdp:
        copy = width * sum(weight.numel for weight in weights if weight.layer >= first) // max(1, blocks)
    copies = copy * blocks
    if kind == "none":  # of each micro-batch that is on its way
        block, copies = block + copy, 0
    # what passes through a block's backward: what is made again, gradients of the stream and of the MLP's widest
    stream = tokens * wide * model.dim // cut_stream
    passing = stream + width * tokens * (model.dim + 2 * model.ffn_size // tensor)
    if kind != "none":  # what is made again: all but the stream, and products that are kept
        found = query_width(model) + key_value_width(model) + 2 * model.ffn_size
        passing += whole + copy - stream - (width * tokens * found // tensor if kind == "selective" else 0)
    gathered = gathered_at_loss = copies
    blockwise = width * sum(weight.numel for weight in weights if weight.layer >= 0) // max(1, blocks)
    if layout.fsdp:
        gathered = gathered_at_loss = width * share * sum(weight.fsdp_numel(share) for weight in weights)
        if layout.gathers_blocks:  # a block, and the next; a tied table stays
            gathered = min(gathered, 2 * blockwise + table * model.tie_word_embeddings)
            gathered_at_loss = table
        # what is reduced, in fp32; a pipeline does so at the end
        passing += 4 * blockwise // width if layout.pp == 1 and layout.dp > 1 else 0
    tail = loss = 0
    if layout.stages - 1 in stages:  # of the log-softmax in fp32; for a while three times that, four where it is cut
        cut = tensor if config.parallel.loss_parallel else 1
        tail, loss = (4 * tokens * vocab // cut, (12 if cut > 1 else 8) * tokens * vocab // cut)
        if chunk is not None:  # its logits, or the chunk's share of the weights' gradient; hidden states
            rows, dim = min(chunk, tokens), model.dim
            tail = width * (vocab // tensor + tokens) * dim
            loss = (
                4 * dim + max((4 + width) * rows, width * (rows + dim))
            ) * vocab // tensor + 2 * width * tokens * dim
            loss -= tail
        tail += width * tokens * model.dim + stream + (tokens * (8 - wide) * model.dim // cut_stream if on_cpu else 0)
        tail += table if copy else 0
        tail += width * tokens * vocab // cut if chunk is None and layout.pp > 1 else 0  # logits, its output
    if copies:  # made again by what is compiled; of others gone when backward begins
        gathered = gathered_at_loss = 0 if config.train.compile else max(0, copies - max(loss, passing))
    split = layout.fsdp and (layout.reduce_each_micro_batch or layout.micro_batches == 1)
    every = kept * sum(weight.fsdp_numel(share) if split else weight.numel for weight in trained)
    gradients = every if layout.dp > 1 and not layout.fsdp else 0  # DDP's buckets stay
    away, back = find_cross_rank_stages(layout, pipeline)
    wanted = [stage for stage in range(layout.stages) if layout.stage_layers[stage].start > first]  # by its inputs
    held = stream * layout.micro_batches * (len(back) + sum(stage + 1 in wanted for stage in away))  # what comes
    waiting = 4 * table // width if split and layout.micro_batches > 1 else 0  # the last to be reduced
    peak, seen = 0, set[int]()
    for kind_of, stage, _ in order:
        count = sum(number >= first for number in layout.stage_layers[stage])
        at_end = stage == layout.stages - 1
        through = tail * at_end + stream * (not at_end) * (layout.pp > 1) - stream * (stage in back)
        if kind_of == "F":
            held += count * block + through
            continue
        if kind_of != "W":
            if at_end:
                peak = max(peak, held + gradients + loss + gathered_at_loss + waiting * (stage in seen))
            peak = max(peak, held + gradients + gathered - through + (passing if kind_of == "B" else 0))
            before, gradients = gradients, gradients if stage in seen else min(every, gradients + every // len(stages))
            seen.add(stage)
        if kind_of != "B" and kind == "full":  # I and W each make it again, and torch keeps both to the end of the step
            held += count * (whole + copy)
        elif kind_of != "I":
            held -= count * block + through
        if kind_of == "B":  # in that of its first block, whose gradients, and the embedding's, are still to come
            late = 0 if split else kept * (blockwise // width + (stage == 0) * table // width)
            peak = max(peak, held + max(before, gradients - late) + gathered + (kind == "none") * block + passing)
        peak = max(peak, held + gradients + gathered)
    values = sum(weight.fsdp_numel(share) for weight in trained)
    moments = sum(_moment_bytes(config, weight, share) for weight in trained)
    peak = max(peak, kept * values + _updating(config, layout, trained, share))
    peak, besides = _of_replicas(config, values, kept * values + moments, peak)
    copied = 0
    if config.train.evaluate_every is not None:  # weights, for held-out data (pipeline/evaluate/evaluator.py)
        copied = parameters // (layout.dp if layout.zero == 3 or layout.pp * tensor > 1 else 1)
    held = kept * sum(weight.fsdp_numel(share) for weight in weights) + 4 * copied
    return RankMemory(
        parameters=parameters, weights=held, gathered=gathered, gradients=every, optimizer=moments + besides,
        activations=max(0, peak - every - gathered),
    )  # fmt: skip
