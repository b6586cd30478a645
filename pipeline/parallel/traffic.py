"""Count the parameters of a rank, and the bytes that it sends in one step, from the config.

Both numbers follow from the shapes in pipeline/model/spec.py. Traffic is the number of bytes that one rank sends if
collectives use ring algorithms. In an all-reduce of n bytes over r ranks, each rank sends 2·n·(r−1)/r bytes. In an
all-gather or a reduce-scatter, each rank sends half as many. The trainer writes the traffic to the event `ready`
(pipeline/train/trainer.py), and `plan` shows it for a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from functools import lru_cache
from typing import NamedTuple

from pipeline.config.sections import Config
from pipeline.model.spec import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    NF4_BLOCK,
    NF4_SCALE_BLOCK,
    ParameterSpec,
    adapter_parameters,
    block_parameters,
    check_targets,
    count_block_parameters,
    decoder_parameters,
    is_adapter_name,
    key_value_width,
    list_layers,
)
from pipeline.parallel.mesh import Layout


def list_rank_parameters(config: Config, layout: Layout, pp_rank: int, vocab: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of a rank at position `pp_rank` of the pipeline, as tensor parallelism shards them."""
    for stage in layout.stages_on_pipeline_rank(pp_rank):
        for parameter in decoder_parameters(config.model, vocab, layout.stage_layers[stage], config.adapter):
            yield parameter.local_shard(layout.tp)


class AxisTraffic(NamedTuple):
    """Bytes that one rank sends in one step to the other ranks along one axis of the layout."""

    axis: str
    """`data` (data parallelism without ZeRO), `shard`, `replicate`, `context`, `tensor` or `pipeline`.

    The ranks along the axis `cp` of the mesh also belong to `data`, or with ZeRO to `shard`.
    """
    num_bytes: int
    description: str
    """What the rank sends, as text."""


class TrainedParameters(NamedTuple):
    """The parameters that are trained: those of adapters, or all parameters that `optimizer.freeze` does not match."""

    names: frozenset[str]
    """Names of the trained parameters."""
    block_shares: tuple[float, ...]
    """For each block, the number of its trained elements, divided by the number of its elements without adapters."""
    first_block: int
    """The first block that needs a backward pass.

    This is block 0 if the embedding is trained, otherwise the first block with a trained parameter. If no block is
    trained, the value is the number of blocks, plus one if the last norm is not trained either.
    """


def find_trained_parameters(config: Config) -> TrainedParameters:
    """Return which parameters of the decoder are trained. The result does not depend on the layout.

    Raises UserError if a pattern of `adapter.targets` matches no layer.
    """
    model = config.model
    if config.adapter is not None:
        check_targets(config.adapter, list_layers(model))
        blocks = [list(adapter_parameters(model, config.adapter, layer)) for layer in range(model.layers)]
        total = count_block_parameters(model)
        return TrainedParameters(
            names=frozenset(parameter.name for block in blocks for parameter in block),
            block_shares=tuple(sum(parameter.numel for parameter in block) / total for block in blocks),
            first_block=next((layer for layer, block in enumerate(blocks) if block), model.layers + 1),
        )
    sizes = tuple((p.name.removeprefix("model.layers.0"), p.numel) for p in block_parameters(model, 0))
    return _find_trained(tuple(config.optimizer.freeze), config.model.layers, sizes)


@lru_cache(maxsize=64)
def _find_trained(freeze: tuple[str, ...], layers: int, sizes: tuple[tuple[str, int], ...]) -> TrainedParameters:
    """Return the result of `find_trained_parameters` for these arguments, and cache it.

    Args:
        freeze: `optimizer.freeze`.
        layers: number of blocks.
        sizes: name and number of elements of each parameter of a block. The names lack the prefix `model.layers.N`.
    """
    # For each block, the number of elements of each parameter by its full name.
    blocks = [{f"model.layers.{block}{name}": size for name, size in sizes} for block in range(layers)]
    all_names = {EMBEDDING, FINAL_NORM, LM_HEAD, *(name for block_sizes in blocks for name in block_sizes)}
    names = frozenset(name for name in all_names if not any(fnmatch(name, pattern) for pattern in freeze))
    total = sum(size for _, size in sizes)
    shares = tuple(sum(size for name, size in block_sizes.items() if name in names) / total for block_sizes in blocks)
    is_trained = (*shares, FINAL_NORM in names)
    first_block = next((block for block, share in enumerate(is_trained) if share), layers + 1)
    return TrainedParameters(names, shares, 0 if EMBEDDING in names else first_block)


def stored_weight_bytes(config: Config) -> int:
    """Return the bytes per element in which weights are stored between steps; their gradients have the same type."""
    return 2 if config.optimizer.state.master == "none" else 4


def is_quantized(config: Config, parameter: ParameterSpec) -> bool:
    """Return whether a parameter is stored in NF4 (pipeline/model/lora.py)."""
    has_quantized_matrices = config.adapter is not None and config.adapter.base is not None
    return has_quantized_matrices and parameter.is_matrix_in_block and not is_adapter_name(parameter.name)


def weight_bytes(config: Config, parameter: ParameterSpec) -> float:
    """Return the bytes per element in which a parameter is stored between steps.

    With adapters, the matrices of the blocks are stored in the type in which they are multiplied, or in NF4: 4 bits per
    element, 8 bits per block of elements, and one value in the type of products per block of blocks.
    """
    is_frozen_matrix = parameter.is_matrix_in_block and not is_adapter_name(parameter.name)
    if config.adapter is None or not is_frozen_matrix:
        return stored_weight_bytes(config)
    product_bytes = 4 if config.train.precision == "fp32" else 2
    if config.adapter.base == "nf4":
        return 1 / 2 + (1 + product_bytes / NF4_SCALE_BLOCK) / NF4_BLOCK
    return min(product_bytes, stored_weight_bytes(config))


def residual_stream_bytes(config: Config, layout: Layout) -> int:
    """Return the bytes per element of the residual stream, which has the type of the embedding's weights.

    FSDP2 gathers these weights in the type of `train.precision`.
    """
    return 2 if layout.fsdp and config.train.precision != "fp32" else stored_weight_bytes(config)


def count_traffic(config: Config, layout: Layout, vocab: int) -> Iterator[AxisTraffic]:
    """Yield the traffic of one step along each axis, for the pipeline rank that sends most along this axis."""
    largest: dict[str, AxisTraffic] = {}
    for pp_rank in range(layout.pp):
        for traffic in count_rank_traffic(config, layout, vocab, pp_rank):
            # Both have the same axis, so `max` compares their numbers of bytes.
            largest[traffic.axis] = max(traffic, largest.get(traffic.axis, traffic))
    yield from largest.values()


def count_rank_traffic(config: Config, layout: Layout, vocab: int, pp_rank: int) -> Iterator[AxisTraffic]:
    """Yield the traffic of one step along each axis, for a rank at position `pp_rank` of the pipeline."""
    rank = _RankTraffic(config, layout, vocab, pp_rank)
    if layout.gradient_ranks > 1 and not layout.zero:
        yield rank.count_data()
    if layout.state_shards > 1:
        yield rank.count_shard()
    if layout.state_replicas > 1 and layout.zero:
        yield rank.count_replicate()
    if layout.cp > 1:
        yield rank.count_context()
    if layout.tp > 1:
        yield rank.count_tensor()
    if layout.pp > 1:
        yield rank.count_pipeline()


class _RankTraffic:
    """Traffic of one rank. Each method counts one axis, which must have more than one rank."""

    def __init__(self, config: Config, layout: Layout, vocab: int, pp_rank: int) -> None:
        self.config = config
        self.layout = layout
        self.vocab = vocab
        self.pp_rank = pp_rank
        self.stages = layout.stages_on_pipeline_rank(pp_rank)
        self.has_first_stage = 0 in self.stages
        self.has_last_stage = layout.stages - 1 in self.stages
        trained_names, _, self.first_trained_block = find_trained_parameters(config)
        self.has_trained_embedding = EMBEDDING in trained_names
        self.parameters = list(list_rank_parameters(config, layout, pp_rank, vocab))
        self.trained = [parameter for parameter in self.parameters if parameter.name in trained_names]
        self.compute_bytes = 4 if config.train.precision == "fp32" else 2
        """Bytes per element in the type of `train.precision`."""
        self.residual_bytes = residual_stream_bytes(config, layout)
        self.tokens = config.train.micro_batch * config.data.sequence_length // layout.cp
        """Tokens of one micro-batch on this rank and its tensor-parallel ranks."""
        self.hidden_values = self.tokens * config.model.dim
        """Number of elements of the hidden states of one micro-batch."""
        # Muon's update needs whole matrices: the fp32 weight, gradient and momentum are gathered. Matrices that are
        # sharded row-wise are gathered over the tensor-parallel ranks first, the others over the ZeRO ranks first.
        uses_muon = config.optimizer.name == "muon"
        self.muon_matrices = [p for p in self.trained if uses_muon and p.is_matrix_in_block]
        self.rowwise_muon_matrices = [p for p in self.muon_matrices if p.tp_dim == 1]
        self.muon_bytes = 3 * 4
        """Bytes that are gathered per element of a matrix: weight, gradient and momentum, 4 bytes each."""

    def count_data(self) -> AxisTraffic:
        """Count the gradients (with local SGD: the weights) that data-parallel ranks without ZeRO reduce."""
        hook = self.config.parallel.hook
        local_sgd = self.config.parallel.local_sgd
        numel = sum(parameter.numel for parameter in self.trained)
        num_bytes = _count_all_reduce(stored_weight_bytes(self.config) * numel, self.layout.gradient_ranks)
        description = "gradients, all-reduced once"
        if local_sgd is not None:
            num_bytes //= local_sgd.every
            description = f"weights, all-reduced every {local_sgd.every} steps"
        elif hook.kind in ("fp16", "bf16"):
            num_bytes //= 2
            description = f"gradients, all-reduced once in {hook.kind}"
        elif hook.kind == "topk" and hook.ratio * self.layout.dp < 1:  # Gradient hooks exclude other axes.
            # With a higher ratio, Top-K all-reduces the gradients (`GradientHook`). A pair has 8 bytes: an int32
            # position and an fp32 value.
            num_bytes = round(8 * hook.ratio * numel) * (self.layout.dp - 1)
            description = "positions and values of the largest gradients, all-gathered"
        elif hook.kind == "powersgd":
            description = "gradients, all-reduced once; less if PowerSGD compresses them"
        return AxisTraffic("data", num_bytes, description)

    def count_shard(self) -> AxisTraffic:
        """Count the weights that ZeRO gathers and the gradients that it reduce-scatters."""
        layout = self.layout
        ranks = layout.state_shards
        # Numbers of reductions of each gradient, and of all-gathers of each weight in forward passes, in one step.
        reductions = layout.micro_batches if layout.reduce_each_micro_batch else 1
        gathers = layout.micro_batches if layout.gathers_blocks else 1
        gathered_numel = 0
        for parameter in self.parameters:
            runs_backward = self.first_trained_block == 0 or parameter.layer >= self.first_trained_block
            backward_gathers = gathers if layout.gathers_blocks and runs_backward else 0
            if parameter.name in (FINAL_NORM, LM_HEAD) and not self.config.model.tie_word_embeddings:
                # These two parameters stay gathered from forward to backward. If gradients are reduced more than once,
                # FSDP gathers both parameters once more.
                backward_gathers = int(reductions > 1)
            gathered_numel += parameter.fsdp_numel(ranks) * (gathers + backward_gathers)
        num_bytes = self.compute_bytes * gathered_numel
        num_bytes += 4 * reductions * sum(parameter.fsdp_numel(ranks) for parameter in self.trained)
        for parameter in self.muon_matrices:
            tensor_ranks = layout.tp if parameter in self.rowwise_muon_matrices else 1
            num_bytes += self.muon_bytes * tensor_ranks * parameter.fsdp_numel(ranks)
        description = f"weights gathered {(1 + layout.gathers_blocks) * gathers}×, gradients reduced {reductions}×"
        # `num_bytes` are the bytes of shards. In a ring, each rank sends `ranks` - 1 shards.
        return AxisTraffic("shard", num_bytes * (ranks - 1), description)

    def count_replicate(self) -> AxisTraffic:
        """Count the fp32 shards of the gradients that replicas of the ZeRO shards all-reduce."""
        numel = sum(parameter.fsdp_numel(self.layout.state_shards) for parameter in self.trained)
        num_bytes = _count_all_reduce(4 * numel, self.layout.state_replicas)
        return AxisTraffic("replicate", num_bytes, "shards of gradients, all-reduced once")

    def count_context(self) -> AxisTraffic:
        """Count the keys and values that each block gathers, and their gradients, which it reduce-scatters."""
        layout = self.layout
        blocks = [block for stage in self.stages for block in layout.stage_layers[stage]]
        trained_blocks = sum(block >= self.first_trained_block for block in blocks)
        # Recomputation gathers the keys and values again.
        is_repeated = self.config.parallel.activation_checkpointing != "none"
        collectives = len(blocks) + (1 + is_repeated) * trained_blocks
        width = 2 * key_value_width(self.config.model) // layout.tp
        num_bytes = self.compute_bytes * self.tokens * layout.cp * width * collectives * layout.micro_batches
        description = "keys and values, gathered before attention; gradients reduce-scattered"
        return AxisTraffic("context", _count_all_gather(num_bytes, layout.cp), description)

    def count_tensor(self) -> AxisTraffic:
        """Count hidden states, logits, and the gradients and weights that tensor-parallel ranks exchange."""
        layout = self.layout
        config = self.config
        # Count all-gathers and reduce-scatters of hidden states. An all-reduce counts as two collectives. A block has
        # four collectives in forward and four in backward. Activation checkpointing repeats some of the forward
        # collectives in backward. How many are repeated depends on sequence parallelism.
        repeated_with_sequence, repeated_without_sequence = {
            "none": (0, 0),
            "selective": (2, 0),
            "full": (3, 2),
        }[config.parallel.activation_checkpointing]
        per_backward = 4 + (repeated_with_sequence if layout.sequence_parallel else repeated_without_sequence)
        blocks = [block for stage in self.stages for block in layout.stage_layers[stage]]
        trained_blocks = sum(block >= self.first_trained_block for block in blocks)
        collectives = 4 * len(blocks) + per_backward * trained_blocks
        bytes_per_value = self.compute_bytes * collectives
        if self.has_last_stage:  # One collective before the output layer, and one for the gradient of its input.
            bytes_per_value += self.compute_bytes * 2
        if self.has_first_stage:  # One collective after the embedding, and one for its gradient if it is trained.
            bytes_per_value += self.residual_bytes * (2 if self.first_trained_block == 0 else 1)
        micro_batch_bytes = self.hidden_values * bytes_per_value
        if self.has_last_stage:
            tokens = self.tokens
            if config.parallel.loss_parallel or config.train.loss_chunk is not None:
                # Three fp32 values per token are all-reduced, which counts twice: the largest logit, the sum of
                # exponentials, and the logit of the target.
                micro_batch_bytes += 2 * 3 * 4 * tokens
            else:
                # The logits are all-gathered.
                micro_batch_bytes += self.compute_bytes * tokens * self.vocab
        # With sequence parallelism, each rank computes the gradients of replicated parameters from its part of the
        # sequence, so these gradients are all-reduced. The bias of a row-wise layer is an exception, because it is
        # added to the whole sequence.
        replicated_numel = 0
        if layout.sequence_parallel:
            replicated = [p for p in self.trained if p.tp_dim is None and not p.name.endswith("o_proj.bias")]
            replicated_numel = sum(parameter.numel for parameter in replicated)
        muon_numel = 0
        for parameter in self.muon_matrices:
            zero_ranks = layout.state_shards if parameter in self.rowwise_muon_matrices else 1
            muon_numel += parameter.fsdp_numel(zero_ranks)
        num_bytes = micro_batch_bytes * layout.micro_batches
        num_bytes += 2 * 4 * replicated_numel  # An all-reduce of fp32 values counts twice.
        num_bytes += self.muon_bytes * layout.tp * muon_numel
        collective = "gathered and reduce-scattered" if layout.sequence_parallel else "all-reduced"
        description = f"hidden states, {collective} before and after attention and MLP, forward and backward"
        return AxisTraffic("tensor", _count_all_gather(num_bytes, layout.tp), description)

    def count_pipeline(self) -> AxisTraffic:
        """Count the hidden states sent to the next stages, and the gradients sent to the previous stages."""
        layout = self.layout
        sending, receiving = find_cross_rank_stages(layout, self.pp_rank)
        # A stage sends gradients back only if a parameter before it is trained.
        gradient_messages = sum(layout.stage_layers[stage].start > self.first_trained_block for stage in receiving)
        messages = layout.micro_batches * (len(sending) + gradient_messages)
        sequence_shards = layout.tp if layout.sequence_parallel else 1
        num_bytes = self.hidden_values * self.residual_bytes // sequence_shards * messages
        has_one_end_only = self.has_first_stage != self.has_last_stage
        if self.config.model.tie_word_embeddings and has_one_end_only and self.has_trained_embedding:
            # The first and the last stage have copies of the embedding and add up their gradients. The embedding is the
            # first parameter of the first stage, and the last parameter of the last stage.
            embedding = self.parameters[0 if self.has_first_stage else -1]
            num_bytes += stored_weight_bytes(self.config) * embedding.fsdp_numel(layout.state_shards)
        return AxisTraffic("pipeline", num_bytes, "hidden states to the next stage, their gradients back")


def find_cross_rank_stages(layout: Layout, pp_rank: int) -> tuple[list[int], list[int]]:
    """Return the stages of a pipeline rank that send to another rank, and those that receive from another rank.

    Both lists refer to hidden states in forward. In a V-shaped schedule, consecutive stages may be on the same rank.
    """
    stages = layout.stages_on_pipeline_rank(pp_rank)
    sending = [stage for stage in stages if stage + 1 < layout.stages and stage + 1 not in stages]
    receiving = [stage for stage in stages if stage and stage - 1 not in stages]
    return sending, receiving


def _count_all_reduce(num_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-reduce of a tensor of `num_bytes`."""
    return _count_all_gather(2 * num_bytes, ranks)


def _count_all_gather(num_bytes: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-gather or reduce-scatter of a tensor of `num_bytes`."""
    return num_bytes * (ranks - 1) // ranks
