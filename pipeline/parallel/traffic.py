"""What a rank holds of the decoder, and what it sends in one step, counted from the config.

Parameters are counted exactly, bytes from shapes. Traffic is what one rank sends with ring algorithms: an all-reduce
of n bytes over r ranks sends 2·n·(r−1)/r, an all-gather or a reduce-scatter half of that. The trainer writes it beside
its measurements (pipeline/train/meter.py); pipeline/planning shows it before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.layout import Layout
from pipeline.config.sections import Config

EMBEDDING = "model.embed_tokens.weight"


def weights_of(config: Config, layout: Layout, pipeline: int, vocab: int) -> Iterator[tuple[str, int, int]]:
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


def parameters_of(config: Config, layout: Layout, pipeline: int, vocab: int) -> int:
    """Values that one tensor parallel rank of this pipeline position holds."""
    return sum(count for _, count, _ in weights_of(config, layout, pipeline, vocab))


def kept_width(config: Config) -> int:
    """Bytes of a weight between steps, and of its gradient."""
    return 2 if config.optimizer.state.master == "none" else 4


def stream_width(config: Config, layout: Layout) -> int:
    """Bytes of a value of the residual stream: it is in the type of the embedding's weights."""
    return 2 if layout.fsdp and config.train.precision != "fp32" else kept_width(config)


def traffic(config: Config, layout: Layout, vocab: int) -> Iterator[tuple[str, int, str]]:
    """Group, bytes that one rank sends in a step (the one that sends most), and what it sends."""
    parameters = max(parameters_of(config, layout, rank, vocab) for rank in range(layout.pipeline))
    width = 4 if config.train.precision == "fp32" else 2
    micro, zero = layout.micro_batches, layout.zero
    hidden = config.train.micro_batch * config.data.sequence_length * config.model.dim * width
    hook, local = config.parallel.hook, config.parallel.local_sgd
    if layout.data > 1 and not zero:
        size, words = _ring(2 * kept_width(config) * parameters, layout.data), "gradients, all-reduced once"
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
        wide = hidden // width * stream_width(config, layout)
        size = 2 * wide // cut * micro * layout.virtual_stages
        yield "pipeline", size, "hidden states to the next stage, their gradients back"


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks
