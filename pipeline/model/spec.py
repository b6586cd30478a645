"""The only description of the decoder's parameters: names, shapes, sharding and FLOPs.

The description is used to build the decoder (pipeline/model/decoder.py), to split it (tensor and pipeline parallelism),
to count communication (pipeline/parallel/traffic.py), to plan, and to export. This module needs no torch, so it can be
used on the login node. Names are those of Hugging Face's `LlamaForCausalLM`. tests/model/test_spec.py compares the
description with the built decoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from textwrap import shorten
from typing import NamedTuple

from pipeline.base.errors import UserError
from pipeline.config.sections import AdapterConfig, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
"""Name of the output layer's weight. It may be tied to the embedding."""
LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"
"""Endings of the names of an adapter's parameters."""
NF4_BLOCK = 64
"""Number of elements of a weight in NF4 that share a scale."""
NF4_SCALE_BLOCK = 256
"""Number of scales that share a factor. The scales are stored in 8 bits."""


class ParameterSpec(NamedTuple):
    """A parameter of the decoder."""

    name: str
    """Name in the whole model."""
    shape: tuple[int, ...]
    tp_dim: int | None = None
    """Dimension that tensor parallelism shards: 0 column-wise, 1 row-wise (torch's terms); None: replicated."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter has two dimensions. Norms and biases have one dimension."""
        return len(self.shape) > 1

    @property
    def layer(self) -> int:
        """Number of the parameter's block; -1 if it belongs to no block."""
        return int(self.name.split(".")[2]) if ".layers." in self.name else -1

    @property
    def is_matrix_in_block(self) -> bool:
        """Whether the parameter is a matrix inside a block. The embedding and the output layer are outside blocks."""
        return self.is_matrix and self.layer >= 0

    def local_shard(self, tp: int) -> ParameterSpec:
        """Return the shard of one tensor-parallel rank out of `tp`. `tp` must divide the sharded dimension."""
        if self.tp_dim is None:
            return self
        shape = tuple(size // tp if dim == self.tp_dim else size for dim, size in enumerate(self.shape))
        return self._replace(shape=shape)

    def fsdp_numel(self, ranks: int) -> int:
        """Return the number of elements per rank if FSDP shards the parameter over `ranks`.

        FSDP splits the rows and pads all shards to the size of the first one.
        """
        return math.ceil(self.shape[0] / ranks) * math.prod(self.shape[1:])


def is_adapter_name(name: str) -> bool:
    """Return whether this is the name of a parameter of an adapter (pipeline/model/lora.py)."""
    return name.endswith((LORA_A, LORA_B))


def query_width(model: ModelConfig) -> int:
    """Return the total width of all query heads."""
    return model.heads * model.head_size


def key_value_width(model: ModelConfig) -> int:
    """Return the total width of all key heads, which is also that of all value heads."""
    return model.num_kv_heads * model.head_size


def block_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of one block."""
    query = query_width(model)
    key_value = key_value_width(model)
    ffn = model.ffn_size
    prefix = f"model.layers.{layer}"
    for projection, width in (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value)):
        yield ParameterSpec(f"{prefix}.self_attn.{projection}.weight", (width, model.dim), 0)
        if model.attention_bias != "none":
            yield ParameterSpec(f"{prefix}.self_attn.{projection}.bias", (width,), 0)
    yield ParameterSpec(f"{prefix}.self_attn.o_proj.weight", (model.dim, query), 1)
    if model.attention_bias == "all":
        yield ParameterSpec(f"{prefix}.self_attn.o_proj.bias", (model.dim,))
    if model.qk_norm:
        yield ParameterSpec(f"{prefix}.self_attn.q_norm.weight", (model.head_size,))
        yield ParameterSpec(f"{prefix}.self_attn.k_norm.weight", (model.head_size,))
    yield ParameterSpec(f"{prefix}.mlp.gate_proj.weight", (ffn, model.dim), 0)
    yield ParameterSpec(f"{prefix}.mlp.up_proj.weight", (ffn, model.dim), 0)
    yield ParameterSpec(f"{prefix}.mlp.down_proj.weight", (model.dim, ffn), 1)
    yield ParameterSpec(f"{prefix}.input_layernorm.weight", (model.dim,))
    yield ParameterSpec(f"{prefix}.post_attention_layernorm.weight", (model.dim,))


def list_layers(model: ModelConfig) -> list[str]:
    """Return the names of the decoder's linear layers that may have adapters: those of the blocks."""
    parameters = (parameter for layer in range(model.layers) for parameter in block_parameters(model, layer))
    return [parameter.name.removesuffix(".weight") for parameter in parameters if parameter.is_matrix]


def check_targets(adapter: AdapterConfig, layers: Sequence[str]) -> None:
    """Raise UserError if a pattern of `adapter.targets` matches none of the names `layers`."""
    for pattern in adapter.targets:
        if not any(fnmatchcase(layer, pattern) for layer in layers):
            names = shorten(", ".join(layers), 300, placeholder=" …") or "none"
            message = f"adapter.targets: {pattern!r} matches no linear layer; the linear layers are {names}"
            raise UserError("model.no_such_layer", message)


def adapter_parameters(model: ModelConfig, adapter: AdapterConfig, layer: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of the adapters of one block."""
    for parameter in block_parameters(model, layer):
        module = parameter.name.removesuffix(".weight")
        if parameter.is_matrix and any(fnmatchcase(module, pattern) for pattern in adapter.targets):
            outputs, inputs = parameter.shape
            tp_dim = parameter.tp_dim
            yield ParameterSpec(module + LORA_A, (adapter.rank, inputs), 1 if tp_dim == 1 else None)
            yield ParameterSpec(module + LORA_B, (outputs, adapter.rank), 0 if tp_dim == 0 else None)


def decoder_parameters(
    model: ModelConfig, vocab_size: int, layers: range | None = None, adapter: AdapterConfig | None = None
) -> Iterator[ParameterSpec]:
    """Yield the parameters of the decoder, or of the model part with the blocks `layers`.

    The part with the first block has the embedding. The part with the last block has the last norm and the output
    layer. A tied output layer shares the embedding's parameter. If the embedding is in another part, the output layer
    has a copy under the embedding's name.
    """
    layers = range(model.layers) if layers is None else layers
    is_first = layers.start == 0
    is_last = layers.stop == model.layers
    if is_first:
        yield ParameterSpec(EMBEDDING, (vocab_size, model.dim), 0)
    for layer in layers:
        yield from block_parameters(model, layer)
        if adapter is not None:
            yield from adapter_parameters(model, adapter, layer)
    if is_last:
        yield ParameterSpec(FINAL_NORM, (model.dim,))
    if is_last and not (model.tie_word_embeddings and is_first):
        yield ParameterSpec(EMBEDDING if model.tie_word_embeddings else LM_HEAD, (vocab_size, model.dim), 0)


def count_block_parameters(model: ModelConfig, *, matrices_only: bool = False) -> int:
    """Return the number of elements of all parameters of one block, or only of its matrices."""
    return sum(p.numel for p in block_parameters(model, 0) if p.is_matrix or not matrices_only)


def count_windows(model: ModelConfig, sequence_length: int) -> list[tuple[int, int]]:
    """Return the numbers of tokens that a token reads at most, each with the number of blocks that have this window."""
    window = min(model.sliding_window or sequence_length, sequence_length)
    full_layers = min(model.max_window_layers or 0, model.layers)
    return [(sequence_length, full_layers), (window, model.layers - full_layers)]


def training_flops_per_token(model: ModelConfig, vocab_size: int, sequence_length: int) -> int:
    """Return the floating-point operations of the forward and backward pass per token: 6 N + 12 L H Q T.

    The formula is from Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B: N parameters, L layers, H heads of width
    Q, T tokens of context. In blocks with a shorter window, T is the length of the window. The causal mask and the
    boundaries of documents are not deducted, and recomputation is not counted. As usual, N includes the embedding,
    although the embedding is only a lookup (7 % of 8.03 billion parameters with a vocabulary of 128,256).
    """
    vocab_matrices = 1 if model.tie_word_embeddings else 2  # the embedding and the output layer
    parameters = model.layers * count_block_parameters(model) + model.dim + vocab_matrices * vocab_size * model.dim
    context = sum(layers * window for window, layers in count_windows(model, sequence_length))
    return 6 * parameters + 12 * query_width(model) * context


def block_multiplications_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the number of multiplications per token in a block's forward pass, for matrix products and attention.

    For each pair of tokens, attention multiplies twice per channel of the query: once for the score and once for the
    value. Without a window, a token reads half the sequence on average. If the blocks differ, the result is their mean.
    """
    # The first w tokens of a sequence read 1 to w tokens, the others w. Half of `pairs` are their number.
    windows = count_windows(model, sequence_length)
    pairs = sum(layers * window * (2 * sequence_length - window) for window, layers in windows)
    attention = query_width(model) * pairs // (sequence_length * model.layers)
    return count_block_parameters(model, matrices_only=True) + attention


def hidden_state_shape(
    model: ModelConfig, micro_batch: int, sequence_length: int, sequence_shards: int = 1
) -> tuple[int, int, int]:
    """Return the shape (B, T, D) of the hidden states between blocks.

    Pipeline-parallel stages send tensors of this shape to each other.

    Args:
        model: the model's config.
        micro_batch: B, the number of samples of a micro-batch.
        sequence_length: length of a whole sequence.
        sequence_shards: number of ranks that split the sequence (sequence parallelism).
    """
    return micro_batch, sequence_length // sequence_shards, model.dim
