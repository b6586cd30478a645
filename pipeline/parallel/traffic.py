"""What a rank holds of the decoder, and what it sends in one step, counted from the config.

Parameters are counted exactly, bytes from shapes. Traffic is what one rank sends with ring algorithms: an all-reduce
of n bytes over r ranks sends 2·n·(r−1)/r, an all-gather or a reduce-scatter half of that. The trainer writes it beside
its measurements (pipeline/train/meter.py); pipeline/planning shows it before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.parallel.mesh import Layout

EMBEDDING = "model.embed_tokens.weight"
ENDS = NORM, HEAD = "model.norm.weight", "lm_head.weight"
ROWWISE = ("o_proj.weight", "down_proj.weight")
"""Matrices that tensor parallelism cuts along their columns; the others along their rows."""


class ParameterShape(NamedTuple):
    """A weight of one tensor parallel rank: its name in the whole model, and its sizes; of a vector `columns` is 0."""

    name: str
    rows: int
    columns: int

    @property
    def values(self) -> int:
        """How many."""
        return self.rows * max(1, self.columns)

    @property
    def block(self) -> int:
        """The number of the block that has it; -1: none has."""
        return int(self.name.split(".")[2]) if ".layers." in self.name else -1

    def part(self, ranks: int) -> int:
        """Values that each of so many ranks keeps: FSDP cuts rows, and pads all ranks to as many as the first has."""
        return -(-self.rows // ranks) * max(1, self.columns)


def list_rank_parameters(config: Config, layout: Layout, pipeline: int, vocab: int) -> Iterator[ParameterShape]:
    """What one tensor parallel rank of this pipeline position holds."""
    model, tensor = config.model, layout.tp
    for stage in layout.stages_on_rank(pipeline):
        first, last = stage == 0, stage == layout.stages - 1
        if first:
            yield ParameterShape(EMBEDDING, vocab // tensor, model.dim)
        for number in layout.stage_layers[stage]:
            yield from _block(config, number, tensor)
        if last:
            yield ParameterShape(NORM, model.dim, 0)
        if last and not (model.tie_word_embeddings and first):
            yield ParameterShape(EMBEDDING if model.tie_word_embeddings else HEAD, vocab // tensor, model.dim)


def _block(config: Config, number: int, tensor: int = 1) -> Iterator[ParameterShape]:
    model, block = config.model, f"model.layers.{number}"
    query, shared, ffn = model.heads * model.head_size, model.num_kv_heads * model.head_size, model.ffn_size
    widths = {"mlp.gate_proj": ffn, "mlp.up_proj": ffn}
    widths |= {"self_attn.q_proj": query, "self_attn.k_proj": shared, "self_attn.v_proj": shared}
    for name, width in widths.items():
        yield ParameterShape(f"{block}.{name}.weight", width // tensor, model.dim)
    yield ParameterShape(f"{block}.self_attn.o_proj.weight", model.dim, query // tensor)
    yield ParameterShape(f"{block}.mlp.down_proj.weight", model.dim, ffn // tensor)
    for name in ("input", "post_attention"):  # with half of the block's other vectors
        yield ParameterShape(f"{block}.{name}_layernorm.weight", model.block_vectors // 2, 0)


class TrainedParameters(NamedTuple):
    """What `optimizer.freeze` leaves to be trained."""

    names: frozenset[str]
    """Of weights."""
    blocks: tuple[float, ...]
    """Share of each block's weights."""
    first: int
    """The first block that keeps something for the backward pass: it, or the embedding, is trained. The number of
    blocks where only the last norm is, one more where not even that."""


def find_trained_parameters(config: Config) -> TrainedParameters:
    """What of the decoder is trained, whatever the layout."""
    sizes = tuple((weight.name.removeprefix("model.layers.0"), weight.values) for weight in _block(config, 0))
    return _trained(tuple(config.optimizer.freeze), config.model.layers, sizes)


@lru_cache(maxsize=64)
def _trained(freeze: tuple[str, ...], layers: int, sizes: tuple[tuple[str, int], ...]) -> TrainedParameters:
    blocks = [{f"model.layers.{number}{name}": size for name, size in sizes} for number in range(layers)]
    every = {EMBEDDING, *ENDS, *(name for block in blocks for name in block)}
    names = frozenset(name for name in every if not any(fnmatch(name, pattern) for pattern in freeze))
    total = sum(size for _, size in sizes)
    shares = tuple(sum(size for name, size in block.items() if name in names) / total for block in blocks)
    ahead = (*shares, NORM in names)
    first = 0 if EMBEDDING in names else next((at for at, share in enumerate(ahead) if share), layers + 1)
    return TrainedParameters(names, shares, first)


def stored_weight_bytes(config: Config) -> int:
    """Bytes of a weight between steps, and of its gradient."""
    return 2 if config.optimizer.state.master == "none" else 4


def residual_stream_bytes(config: Config, layout: Layout) -> int:
    """Bytes of a value of the residual stream: it is in the type of the embedding's weights."""
    return 2 if layout.fsdp and config.train.precision != "fp32" else stored_weight_bytes(config)


def count_traffic(config: Config, layout: Layout, vocab: int) -> Iterator[tuple[str, int, str]]:
    """Group, bytes that one rank sends in a step (of the pipeline's the one that sends most), and what it sends."""
    found: dict[str, tuple[int, str]] = {}
    for rank in range(layout.pp):
        for group, size, words in count_rank_traffic(config, layout, vocab, rank):
            found[group] = max((size, words), found.get(group, (0, "")))
    yield from ((group, *made) for group, made in found.items())


def count_rank_traffic(config: Config, layout: Layout, vocab: int, pipeline: int) -> Iterator[tuple[str, int, str]]:
    """The same of a rank in this place of the pipeline."""
    weights, stages = list(list_rank_parameters(config, layout, pipeline, vocab)), layout.stages_on_rank(pipeline)
    names, _, started = find_trained_parameters(config)
    trained = [weight for weight in weights if weight.name in names]
    width, wide = 4 if config.train.precision == "fp32" else 2, residual_stream_bytes(config, layout)
    micro, zero, shard = layout.micro_batches, layout.zero, layout.dp_shard
    values = config.train.micro_batch * config.data.sequence_length * config.model.dim
    hook, local = config.parallel.hook, config.parallel.local_sgd
    parameters = sum(weight.values for weight in trained)
    first, last = 0 in stages, layout.stages - 1 in stages
    if layout.dp > 1 and not zero:
        size, words = _ring(2 * stored_weight_bytes(config) * parameters, layout.dp), "gradients, all-reduced once"
        if local is not None:
            size, words = size // local.every, f"weights, all-reduced every {local.every} steps"
        elif hook.kind in ("fp16", "bf16"):
            size, words = size // 2, f"gradients, all-reduced once in {hook.kind}"
        elif hook.kind == "topk" and hook.ratio * layout.dp < 1:
            size, words = round(8 * hook.ratio * parameters) * (layout.dp - 1), "places and values, gathered by all"
        elif hook.kind == "powersgd":
            words += ", where PowerSGD does not send less"
        yield "data", size, words
    orthogonal = [each for each in trained if config.optimizer.name == "muon" and each.columns and each.block >= 0]
    whole = 3 * 4 * layout.tp  # bytes of such a weight, its gradient and momentum, gathered for the update
    rows = [each for each in orthogonal if each.name.endswith(ROWWISE)]  # over tensor first, the others at last
    if layout.dp > 1 and zero:
        times = micro if layout.reduce_each_micro_batch else 1
        gathers, gathered = micro if layout.gathers_blocks else 1, 0
        for weight in weights:
            again = gathers * (layout.gathers_blocks and (started == 0 or weight.block >= started))  # for backward
            if weight.name in ENDS and not config.model.tie_word_embeddings:  # kept from forward to backward; where
                again = int(times > 1)  # gradients are reduced more often FSDP asks for it once too often
            gathered += weight.part(shard) * (gathers + again)
        size = width * gathered + 4 * times * sum(weight.part(shard) for weight in trained)
        size += sum((whole if each in rows else 12) * each.part(shard) for each in orthogonal)
        words = f"weights gathered {(1 + layout.gathers_blocks) * gathers}×, gradients reduced {times}×"
        yield "shard", size * (shard - 1), words
        if layout.dp_replicate > 1:
            size = _ring(2 * 4 * sum(weight.part(shard) for weight in trained), layout.dp_replicate)
            yield "replicate", size, "shards of gradients, all-reduced once"
    if layout.tp > 1:
        kind = "gathered and reduce-scattered" if layout.sequence_parallel else "all-reduced"
        more = {"none": (0, 0), "selective": (2, 0), "full": (3, 2)}[config.parallel.activation_checkpointing]
        blocks = [number for stage in stages for number in layout.stage_layers[stage]]
        trained_on = sum(number >= started for number in blocks)
        times = 4 * len(blocks) + (4 + more[not layout.sequence_parallel]) * trained_on
        each = values * (width * (times + 2 * last) + wide * (1 + (started == 0)) * first)
        tokens = config.train.micro_batch * config.data.sequence_length
        if last:  # the largest logit, the sum of exponentials, the target's logit
            cut = config.parallel.loss_parallel or config.train.loss_chunk is not None
            each += 2 * 3 * 4 * tokens if cut else width * tokens * vocab
        norms = sum(weight.values for weight in trained if not weight.columns) if layout.sequence_parallel else 0
        update = whole * sum(each.part(shard if zero and each in rows else 1) for each in orthogonal)
        size = _ring(each * micro + 2 * 4 * norms + update, layout.tp)
        yield "tensor", size, f"hidden states, {kind} before and after attention and MLP, forward and backward"
    if layout.pp > 1:
        away, back = find_cross_rank_stages(layout, pipeline)
        times = len(away) + sum(layout.stage_layers[stage].start > started for stage in back)
        size = values * wide // (layout.tp if layout.sequence_parallel else 1) * micro * times
        if config.model.tie_word_embeddings and first != last and EMBEDDING in names:  # both ends add up
            size += stored_weight_bytes(config) * weights[0 if first else -1].part(shard if zero else 1)
        yield "pipeline", size, "hidden states to the next stage, their gradients back"


def find_cross_rank_stages(layout: Layout, pipeline: int) -> tuple[list[int], list[int]]:
    """The stages of a rank whose next stage another rank has, and those whose stage before."""
    stages = layout.stages_on_rank(pipeline)
    away = [stage for stage in stages if stage + 1 < layout.stages and stage + 1 not in stages]
    return away, [stage for stage in stages if stage and stage - 1 not in stages]


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks
