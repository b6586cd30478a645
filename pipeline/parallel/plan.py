"""`plan CONFIG`: what a layout means, before anything runs: mesh, memory, pipeline, communication.

Parameters are counted exactly; memory of activations and traffic are estimates from shapes, good enough to compare
layouts. Bytes of communication are what one rank sends in one step, with ring algorithms: an all-reduce of n bytes
over r ranks sends 2·n·(r−1)/r, an all-gather or a reduce-scatter half of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from traceback import extract_tb
from typing import NamedTuple

from pipeline.base.errors import UserError, printable
from pipeline.config.layout import Layout, layout_of
from pipeline.config.sections import Config
from pipeline.config.types import INT8_BLOCK
from pipeline.config.user_model import UserModel, found_for
from pipeline.data.manifest import steps_words
from pipeline.run.code import CODE_ROOT

EMBEDDING = "model.embed_tokens.weight"
COLUMNS = 100
"""Width of the timeline's picture; a longer one is cut."""
GB = 1e9
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One box of the timeline. `kind`: F forward, B backward, I its part for inputs, W its part for weights."""

    kind: str
    stage: int
    micro: int


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


def actions(layout: Layout) -> list[list[Action]]:
    """What each pipeline rank does in one step, in order. The schedules of several stages are torch's own."""
    ranks, batches = range(layout.pipeline), layout.micro_batches
    if layout.schedule in ("gpipe", "1f1b"):
        orders = []
        for rank in ranks:
            ahead = batches if layout.schedule == "gpipe" else min(batches, layout.pipeline - rank)
            order = [Action("F", rank, micro) for micro in range(ahead)]
            for micro in range(batches):
                order.append(Action("B", rank, micro))
                order += [Action("F", rank, micro + ahead)] if micro + ahead < batches else []
            orders.append(order)
        return orders
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import NAMES

    found = get_schedule_ops(NAMES[layout.schedule], layout.pipeline, batches, layout.virtual_stages)
    # an action prints as "2F0": stage, kind, micro-batch; overlapping ones as a pair of those
    texts = (" ".join(map(str, order)) for order in found)
    return [[Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts]


def timeline(orders: Sequence[Sequence[Action]], stages: int) -> list[str]:
    """A row of text per pipeline rank, a column per time of one forward (a whole backward takes two).

    Each rank begins an action as soon as it is free and the neighbouring stages have delivered.
    """
    ends: dict[tuple[bool, int, int], int] = {}  # (forward?, stage, micro-batch) -> when it is done
    rows, at = ["" for _ in orders], [0 for _ in orders]
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, micro = order[at[rank]]
                needs = []
                if kind == "F" and stage:
                    needs = [(True, stage - 1, micro)]
                elif kind in "BI":
                    needs = [(True, stage, micro)] + ([(False, stage + 1, micro)] if stage + 1 < stages else [])
                if any(need not in ends for need in needs):
                    break
                start = max([len(rows[rank]), *(ends[need] for need in needs)])
                width = 2 if kind == "B" else 1
                letter = str(micro % 10)
                box = {"F": letter, "B": f"{letter}▒", "I": "▒", "W": "▓"}[kind]
                rows[rank] = rows[rank].ljust(start, "·") + box
                if kind != "W":
                    ends[(kind == "F", stage, micro)] = start + width
                at[rank] += 1
        if sum(at) == before:
            raise RuntimeError("the schedule waits for itself")
    longest = max(map(len, rows))
    return [row.ljust(longest, "·") for row in rows]


def _weights(config: Config, layout: Layout, pipeline: int, vocab: int) -> Iterator[tuple[str, int, int]]:
    """What one tensor parallel rank of this pipeline position holds: name in the whole model, values, dimensions."""
    model = config.model
    query, shared, ffn = model.heads * model.head_size, model.num_kv_heads * model.head_size, model.ffn_size
    widths = {f"mlp.{name}_proj": ffn for name in ("gate", "up", "down")}
    widths |= {"self_attn.q_proj": query, "self_attn.k_proj": shared, "self_attn.v_proj": shared}
    widths["self_attn.o_proj"] = query
    table = vocab * model.dim // layout.tensor
    for stage in layout.stages_of(pipeline):
        blocks, first, last = layout.stage_layers[stage], stage == 0, stage == layout.stages - 1
        if first:
            yield EMBEDDING, table, 2
        for number in blocks:
            for name, width in widths.items():
                yield f"model.layers.{number}.{name}.weight", model.dim * width // layout.tensor, 2
            yield f"model.layers.{number}.input_layernorm.weight", model.block_vectors, 1  # and others of its size
        if last:
            yield "model.norm.weight", model.dim, 1
        if last and not (model.tie_word_embeddings and first):
            yield EMBEDDING if model.tie_word_embeddings else "lm_head.weight", table, 2


def _frozen(config: Config, name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in config.optimizer.freeze)


def _moment_bytes(config: Config, name: str, count: int, dimensions: int) -> int:
    """Bytes that the optimizer keeps of a weight with so many values."""
    optimizer = config.optimizer
    if optimizer.state.moments == "int8" and dimensions > 1:
        return 2 * (count + 4 * count // INT8_BLOCK)
    alone = optimizer.name == "sgd" or (optimizer.name == "muon" and dimensions > 1 and _block(name) >= 0)
    return (4 if alone or optimizer.state.moments == "bf16" else 8) * count


def _parameters(config: Config, layout: Layout, pipeline: int, vocab: int) -> int:
    """Values that one tensor parallel rank of this pipeline position holds."""
    return sum(count for _, count, _ in _weights(config, layout, pipeline, vocab))


def _first_trained(config: Config, layout: Layout, vocab: int) -> int:
    """The first block that keeps something for the backward pass: it, or the embedding, is trained."""
    ranks = range(layout.pipeline if config.optimizer.freeze else 0)
    names = [name for rank in ranks for name, *_ in _weights(config, layout, rank, vocab) if not _frozen(config, name)]
    blocks = [_block(name) for name in names if _block(name) >= 0]
    return 0 if EMBEDDING in names or not ranks else min(blocks, default=config.model.layers)


def _block(name: str) -> int:
    """The number of the block that has a weight; -1: none has."""
    return int(name.split(".")[2]) if ".layers." in name else -1


def _kept_width(config: Config) -> int:
    """Bytes of a weight between steps, and of its gradient."""
    return 2 if config.optimizer.state.master == "none" else 4


def _stream_width(config: Config, layout: Layout) -> int:
    """Bytes of a value of the residual stream: it is in the type of the embedding's weights."""
    return 2 if layout.fsdp and config.train.precision != "fp32" else _kept_width(config)


def _block_activations(config: Config, layout: Layout, kind: str) -> int:
    """Bytes that one block keeps for the backward pass of one micro-batch, by what torch was seen to save.

    `kind`: of activation checkpointing.
    """
    model, compiled = config.model, config.train.compile
    low, wide = config.train.precision != "fp32", _stream_width(config, layout)
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
    parameters = _parameters(config, layout, pipeline, vocab)
    low, kept = config.train.precision != "fp32", _kept_width(config)
    width = 2 if low else 4
    share = layout.shard if layout.zero else 1
    last, chunk = layout.stages - 1 in stages, config.train.loss_chunk
    table = vocab * config.model.dim // layout.tensor * width
    kind, size = config.parallel.activation_checkpointing, _block_activations
    weights = list(_weights(config, layout, pipeline, vocab))
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
            logits += tokens * dim * (_stream_width(config, layout) + 2 * width)
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


def traffic(config: Config, layout: Layout, vocab: int) -> Iterator[tuple[str, int, str]]:
    """Group, bytes that one rank sends in a step (the one that sends most), and what it sends."""
    parameters = max(_parameters(config, layout, rank, vocab) for rank in range(layout.pipeline))
    width = 4 if config.train.precision == "fp32" else 2
    micro, zero = layout.micro_batches, layout.zero
    hidden = config.train.micro_batch * config.data.sequence_length * config.model.dim * width
    hook, local = config.parallel.hook, config.parallel.local_sgd
    if layout.data > 1 and not zero:
        size, words = _ring(2 * _kept_width(config) * parameters, layout.data), "gradients, all-reduced once"
        if local is not None:
            size, words = size // local.every, f"weights, all-reduced every {local.every} steps"
        elif hook.kind in ("fp16", "bf16"):
            size, words = size // 2, f"gradients, all-reduced once in {hook.kind}"
        elif hook.kind == "topk" and hook.ratio * layout.data < 1:
            size, words = round(8 * hook.ratio * parameters) * (layout.data - 1), "places and values, gathered by all"
        elif hook.kind == "powersgd":
            words += ", where PowerSGD does not send less"
        yield "data", size, words
    elif layout.data > 1:
        gathers = 2 * micro if zero == 3 and layout.pipeline == 1 else 1
        times = micro if layout.reduce_each_micro_batch else 1
        words = f"weights gathered {gathers}×, gradients reduced {times}×"
        size = _ring(width * parameters, layout.shard) * gathers + _ring(4 * parameters, layout.shard) * times
        yield "shard", size, words
        if layout.replicate > 1:
            size = _ring(2 * 4 * parameters // layout.shard, layout.replicate)
            yield "replicate", size, "shards of gradients, all-reduced once"
    if layout.tensor > 1:
        blocks = sum(map(len, layout.stage_layers)) // layout.pipeline
        kind = "gathered and reduce-scattered" if layout.sequence else "all-reduced"
        size = _ring(hidden, layout.tensor) * 8 * blocks * micro
        yield "tensor", size, f"hidden states, {kind} before and after attention and MLP, forward and backward"
    if layout.pipeline > 1:
        cut = layout.tensor if layout.sequence else 1
        wide = hidden // width * _stream_width(config, layout)
        size = 2 * wide // cut * micro * layout.virtual_stages
        yield "pipeline", size, "hidden states to the next stage, their gradients back"


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks


def _own_parameters(config: Config, layout: Layout, facts: UserModel) -> Iterator[int]:
    """Values of each pipeline rank's stages of a model of the user's own, which is built without memory."""
    import torch

    options = config.model.all_options
    for rank in range(layout.pipeline):
        try:
            module = facts.load(facts.root.parent)
            with torch.device("meta"):
                parts = [module.build(options, layout.stage_layers[stage]) for stage in layout.stages_of(rank)]
            count = sum(parameter.numel() for part in parts for parameter in part.parameters())
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:  # it is anybody's code
            at = extract_tb(error.__traceback__)[-1]
            told = f"{facts.target} fails at {at.filename}:{at.lineno}: {type(error).__name__}: {error}"
            raise UserError(printable(f"model.target: {told}")) from error
        yield count


def _room(config: Config, ranks: Sequence[Memory]) -> str:
    """What is left of a GPU, in words. Raises UserError where it is nothing."""
    size = (config.site.gpu_memory_gib or 0) * 2**30
    needs = [part.gathered + part.activations if config.parallel.offload else part.total for part in ranks]
    most = max(needs)
    if most > size:
        raise UserError(
            f"rank {needs.index(most)} of the pipeline needs {most / GB:.1f} GB, and a GPU has {size / GB:.1f} "
            f"(site.gpu_memory_gib {config.site.gpu_memory_gib:g}): lower train.micro_batch "
            f"({config.train.micro_batch}), let parallel.activation_checkpointing be selective or full, set "
            "train.loss_chunk or optimizer.state, or cut the model over more ranks (parallel.zero, tensor, pipeline)"
        )
    return f"a GPU has {size / GB:.3f} GB: {(size - most) / GB:.3f} are left for fragmentation and the libraries' own"


def plan(config: Config) -> Iterator[str]:
    """The lines of the plan. Raises UserError, after the memory, where that is more than `site.gpu_memory_gib`."""
    facts = found_for(config, [Path.cwd(), CODE_ROOT])
    layout, vocab = layout_of(config), config.model.vocab_size or config.data.tokenizer.vocab_size
    parallel = config.parallel
    zero = f", ZeRO {layout.zero} over {layout.shard}" if layout.zero else ""
    yield f"{layout.world} ranks: {layout.words()}{zero}; {layout.micro_batches} micro-batches of a step each"
    if config.train.epochs is not None:
        yield steps_words(config, config.run.root / config.run.name / "data")
    if config.data.tokenizer.kind == "file" and config.model.vocab_size is None:
        yield f"the tokenizer's size is not known yet: {vocab} ids are assumed (data.tokenizer.vocab_size)"
    yield ""
    yield f"{'rank':>5} {'node':>5} {'pp':>4} {'dp':>4} {'tp':>4}   stages and blocks"
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        blocks = (layout.stage_layers[stage] for stage in layout.stages_of(at.pipeline))
        words = ", ".join(f"{part.start}–{part.stop - 1}" for part in blocks)
        yield f"{rank:>5} {rank // layout.ranks_per_node:>5} {at.pipeline:>4} {at.data:>4} {at.tensor:>4}   {words}"
    single = [[Action("F", 0, 0), Action("B", 0, 0)]]  # one micro-batch after the other: the first is like all
    orders = actions(layout) if layout.pipeline > 1 else single
    if layout.pipeline > 1:
        rows = timeline(orders, layout.stages)
        idle = sum(row.count("·") for row in rows) / sum(map(len, rows))
        yield ""
        yield f"{layout.schedule}: a digit is a micro-batch's forward, digit and ▒ its backward; ▒ and ▓ apart are its"
        yield f"gradients of inputs and of weights; · is waiting, {100 * idle:.0f} % if all stages take the same time"
        yield from (f"{rank:>5} {row[:COLUMNS]}{'…' if len(row) > COLUMNS else ''}" for rank, row in enumerate(rows))
    if facts is not None:
        yield ""
        yield f"{facts.target}: memory and communication are not estimated"
        yield f"{'pp':>5} {'parameters':>15}" + (", before tensor parallelism cuts them" if layout.tensor > 1 else "")
        yield from (f"{rank:>5} {count:>15,}" for rank, count in enumerate(_own_parameters(config, layout, facts)))
        return
    yield ""
    yield "memory of a rank in GB (activations are an estimate; without fragmentation and the libraries' own)"
    heads = ("weights", "gathered", "gradients", "optimizer", "activ.", "sum")
    yield f"{'pp':>5} {'parameters':>15}" + "".join(f" {head:>9}" for head in heads)
    found = [memory(config, layout, rank, vocab, order) for rank, order in enumerate(orders)]
    for rank, part in enumerate(found):
        sizes = (part.weights, part.gathered, part.gradients, part.optimizer, part.activations, part.total)
        yield f"{rank:>5} {part.parameters:>15,}" + "".join(f" {size / GB:>9.3f}" for size in sizes)
    if parallel.offload:
        yield "offload: weights, gradients and optimizer are in host memory; gathered and activations on the device"
    if config.site.gpu_memory_gib is not None:
        yield _room(config, found)
    yield ""
    yield "a rank sends in a step"
    sent = list(traffic(config, layout, vocab))
    yield from (f"{group:>10} {size / GB:>9.3f} GB  {words}" for group, size, words in sent or [("-", 0, "nothing")])
