"""Count which parameters a rank has and how many bytes it sends in one step, from the config.

Parameters are counted exactly, bytes from shapes (pipeline/model/spec.py). Traffic is what one rank sends with ring
algorithms: an all-reduce of n bytes over r ranks sends 2·n·(r−1)/r, an all-gather or a reduce-scatter half of that. The
trainer writes it next to its measurements (pipeline/train/metrics.py), and `plan` shows it before anything runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.model.spec import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    ParameterSpec,
    block_parameters,
    decoder_parameters,
    hidden_state_shape,
)
from pipeline.parallel.mesh import Layout


def list_rank_parameters(config: Config, layout: Layout, pp_rank: int, vocab: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of one tensor parallel rank at this position of the pipeline."""
    for stage in layout.stages_on_rank(pp_rank):
        for parameter in decoder_parameters(config.model, vocab, layout.stage_layers[stage]):
            yield parameter.local(layout.tp)


class TrainedParameters(NamedTuple):
    """What `optimizer.freeze` leaves to be trained."""

    names: frozenset[str]
    """Names of the trained parameters."""
    block_shares: tuple[float, ...]
    """Share of each block's values that is trained."""
    first_block: int
    """The first block whose backward pass runs, because it or the embedding is trained.

    It is the number of blocks if only the last norm is trained, and one more if not even that is.
    """


def find_trained_parameters(config: Config) -> TrainedParameters:
    """Return which parameters of the decoder are trained, on any layout."""
    sizes = tuple((p.name.removeprefix("model.layers.0"), p.numel) for p in block_parameters(config.model, 0))
    return _find_trained(tuple(config.optimizer.freeze), config.model.layers, sizes)


@lru_cache(maxsize=64)
def _find_trained(freeze: tuple[str, ...], layers: int, sizes: tuple[tuple[str, int], ...]) -> TrainedParameters:
    blocks = [{f"model.layers.{number}{name}": size for name, size in sizes} for number in range(layers)]
    all_names = {EMBEDDING, FINAL_NORM, LM_HEAD, *(name for block in blocks for name in block)}
    names = frozenset(name for name in all_names if not any(fnmatch(name, pattern) for pattern in freeze))
    total = sum(size for _, size in sizes)
    shares = tuple(sum(size for name, size in block.items() if name in names) / total for block in blocks)
    is_trained = (*shares, FINAL_NORM in names)
    first = next((number for number, share in enumerate(is_trained) if share), layers + 1)
    return TrainedParameters(names, shares, 0 if EMBEDDING in names else first)


def stored_weight_bytes(config: Config) -> int:
    """Return the bytes of a weight between steps, and of its gradient."""
    return 2 if config.optimizer.state.master == "none" else 4


def residual_stream_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes of a value of the residual stream, which has the type of the embedding's weights."""
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
    values = math.prod(hidden_state_shape(config.model, config.train.micro_batch, config.data.sequence_length))
    hook, local = config.parallel.hook, config.parallel.local_sgd
    parameters = sum(weight.numel for weight in trained)
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
    orthogonal = [each for each in trained if config.optimizer.name == "muon" and each.is_block_matrix]
    whole = 3 * 4 * layout.tp  # bytes of such a weight, its gradient and momentum, gathered for the update
    rows = [each for each in orthogonal if each.tp_dim == 1]  # over tensor first, the others at last
    if layout.dp > 1 and zero:
        times = micro if layout.reduce_each_micro_batch else 1
        gathers, gathered = micro if layout.gathers_blocks else 1, 0
        for weight in weights:
            again = gathers * (layout.gathers_blocks and (started == 0 or weight.layer >= started))  # for backward
            if weight.name in (FINAL_NORM, LM_HEAD) and not config.model.tie_word_embeddings:
                # kept from forward to backward; if gradients are reduced more often, FSDP gathers it once more
                again = int(times > 1)
            gathered += weight.fsdp_numel(shard) * (gathers + again)
        size = width * gathered + 4 * times * sum(weight.fsdp_numel(shard) for weight in trained)
        size += sum((whole if each in rows else 12) * each.fsdp_numel(shard) for each in orthogonal)
        words = f"weights gathered {(1 + layout.gathers_blocks) * gathers}×, gradients reduced {times}×"
        yield "shard", size * (shard - 1), words
        if layout.dp_replicate > 1:
            size = _ring(2 * 4 * sum(weight.fsdp_numel(shard) for weight in trained), layout.dp_replicate)
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
        # gradients of what each rank applies to its part of the sequence; a row-wise bias sees the whole sequence
        norms = sum(p.numel for p in trained if p.tp_dim is None and not p.name.endswith("o_proj.bias"))
        norms = norms if layout.sequence_parallel else 0
        update = whole * sum(each.fsdp_numel(shard if zero and each in rows else 1) for each in orthogonal)
        size = _ring(each * micro + 2 * 4 * norms + update, layout.tp)
        yield "tensor", size, f"hidden states, {kind} before and after attention and MLP, forward and backward"
    if layout.pp > 1:
        away, back = find_cross_rank_stages(layout, pipeline)
        times = len(away) + sum(layout.stage_layers[stage].start > started for stage in back)
        size = values * wide // (layout.tp if layout.sequence_parallel else 1) * micro * times
        if config.model.tie_word_embeddings and first != last and EMBEDDING in names:  # both ends add up
            size += stored_weight_bytes(config) * weights[0 if first else -1].fsdp_numel(shard if zero else 1)
        yield "pipeline", size, "hidden states to the next stage, their gradients back"


def find_cross_rank_stages(layout: Layout, pipeline: int) -> tuple[list[int], list[int]]:
    """The stages of a rank whose next stage another rank has, and those whose stage before."""
    stages = layout.stages_on_rank(pipeline)
    away = [stage for stage in stages if stage + 1 < layout.stages and stage + 1 not in stages]
    return away, [stage for stage in stages if stage and stage - 1 not in stages]


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks
