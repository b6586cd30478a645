"""The model: a Llama-style decoder whose parameter names are those of Hugging Face's `LlamaForCausalLM`.

Each block is `x + attention(norm(x))`, then `x + mlp(norm(x))`: RMSNorm (Zhang and Sennrich, arXiv 1910.07467),
rotary positions (Su et al., arXiv 2104.09864), grouped-query attention (Ainslie et al., arXiv 2305.13245) and SwiGLU
(Shazeer, arXiv 2002.05202). Names and conventions follow transformers' Llama, so that weights move between the two
unchanged and anyone's tools can read a checkpoint. What its relatives add is asked for by the config: biases of
attention (Qwen2), norms of queries and keys (Qwen3), stretched rotary positions (Llama 3.1).

Shapes are in the names: B sequences, T tokens, D = `dim`, H heads, K width of a head, V = `vocab_size`.

**A part of the model**: `Decoder(…, layers=range(4, 8))` has only these blocks, with the embedding only if it starts at
the first block and norm and output layer only if it ends with the last: a pipeline stage. Parameters keep the names
that they have in the whole model.

**Initial weights** are a function of (seed, parameter name, position in the parameter) and of nothing else: each
parameter is drawn on its own, whole, from a generator seeded by a hash of its name: where it will compute, for a GPU
draws in a second what takes a CPU minutes. Whoever builds a part of the model, in any order, even from `meta`, gets the
same numbers on any CPU, and others, the same ones, on any GPU of one kind.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeline.config.sections import ModelConfig
from pipeline.model.head import LMHead
from pipeline.model.rotary import PackedRotaryEmbedding, RotaryEmbedding
from pipeline.parallel.tensor_parallel import Replicated, VocabParallelEmbedding

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two parameters that may be tied."""


class Attention(nn.Module):
    """Causal self-attention; H / G query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.groups = config.heads // config.num_kv_heads
        bias, keys = config.attention_bias != "none", config.num_kv_heads * self.head_size
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_size, bias=bias)
        self.k_proj = nn.Linear(config.dim, keys, bias=bias)
        self.v_proj = nn.Linear(config.dim, keys, bias=bias)
        self.o_proj = nn.Linear(config.heads * self.head_size, config.dim, bias=config.attention_bias == "all")
        self.q_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.past: tuple[Tensor, Tensor] | None = None
        """Keys and values of the tokens before these, where a text is continued token by token; None: no text is."""

    def forward(self, x_BTD: Tensor, rotary: RotaryEmbedding | PackedRotaryEmbedding) -> Tensor:
        """Mix each position with the ones before it, of its document."""
        q_BHTK, k_BHTK = self._heads(self.q_proj(x_BTD)), self._heads(self.k_proj(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        start = 0 if self.past is None else self.past[0].shape[2]
        q_BHTK, k_BHTK = rotary(q_BHTK, start), rotary(k_BHTK, start)
        v_BHTK = self._heads(self.v_proj(x_BTD))
        if self.past is not None:
            k_BHTK, v_BHTK = torch.cat((self.past[0], k_BHTK), dim=2), torch.cat((self.past[1], v_BHTK), dim=2)
            self.past = k_BHTK, v_BHTK
        # CUDA's flash kernels share heads themselves. Those for fp32 and for masks cannot: asked to, torch silently
        # takes the kernel that holds all T x T scores.
        mask = rotary.mask_B1TT
        sharing = self.groups > 1 and mask is None and q_BHTK.is_cuda and q_BHTK.dtype != torch.float32
        if self.groups > 1 and not sharing:
            k_BHTK = k_BHTK.repeat_interleave(self.groups, dim=1)
            v_BHTK = v_BHTK.repeat_interleave(self.groups, dim=1)
        causal = mask is None and start == 0  # one token after others sees them all
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, mask, is_causal=causal, enable_gqa=sharing)
        return self.o_proj(out_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor) -> Tensor:
        """(B, T, heads * K) to (B, heads, T, K); the number of heads is taken from the tensor."""
        return x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_size, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_size, bias=False)
        self.down_proj = nn.Linear(config.ffn_size, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.dim, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, eps=config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rotary: RotaryEmbedding | PackedRotaryEmbedding) -> Tensor:
        """Add attention's and the MLP's output to the residual stream."""
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), rotary))
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class Backbone(nn.Module):
    """Embedding, blocks and last norm: the `model.` of the parameter names. Of a part, what belongs to it."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, layers: range) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.dim) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): Block(config) for number in layers})
        self.norm = nn.RMSNorm(config.dim, eps=config.rms_norm_eps) if layers.stop == config.layers else None
        self.rotary = RotaryEmbedding(config, sequence_length)

    @property
    def blocks(self) -> list[Block]:
        """The decoder blocks in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Token ids (of a later part: hidden states) to hidden states `x_BTD`, normalised by the last part."""
        x_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        rotary = self.rotary if starts_BT is None else PackedRotaryEmbedding(self.rotary, starts_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return x_BTD if self.norm is None else self.norm(x_BTD)


class Decoder(nn.Module):
    """The language model: int64 `tokens_BT` (T <= `sequence_length`) to `logits_BTV`; or a part of it.

    Building it draws weights of torch's own kind; :func:`init_weights` sets those that a training starts from. Under
    `torch.device("meta")` it takes no memory: then call `to_empty(device=...)` and :func:`init_weights`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, layers: range | None = None) -> None:
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        self.model = Backbone(config, vocab_size, sequence_length, layers)
        self.lm_head = LMHead(config.dim, vocab_size, bias=False) if layers.stop == config.layers else None
        self.compute_dtype: torch.dtype | None = None
        """Type in which matrix products are computed, by autocast; None: that of the weights."""
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output layer use the embedding's parameter, if the config says so (`to_empty` parts them)."""
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter with its name in the whole model; a tied output layer's is the embedding's."""
        for name, parameter in self.named_parameters():
            yield (EMBEDDING if name == HEAD and self.config.tie_word_embeddings else name), parameter

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, starts_BT: Tensor | None = None) -> Tensor:
        """Token ids to `logits_BTV` of each next token; a part takes or gives hidden states `x_BTD`.

        With `targets_BT` the last part gives their summed loss, and keeps no logits (pipeline/model/head.py). With
        `starts_BT` (bool) documents begin there, and none sees another; every part needs it.
        """
        with torch.autocast(x.device.type, self.compute_dtype, enabled=self.compute_dtype is not None):
            x_BTD = self.model(x, starts_BT)
            if self.lm_head is None or targets_BT is None:
                return x_BTD if self.lm_head is None else self.lm_head(x_BTD)
        return self.lm_head(x_BTD, targets_BT=targets_BT)  # autocast's copies of weights are gone by now


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over all tokens of the cross-entropy in nats: an fp32 scalar, computed in fp32.

    A sum, so that micro-batches and ranks add up; the caller divides by the global batch's tokens. Targets of -100
    (torch's `ignore_index`) count nothing.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


@torch.no_grad()
def init_weights(model: Decoder, seed: int | None, std: float, device: torch.device | str = "cpu") -> None:
    """Set all parameters and the rotary tables, in place, on whatever device they are; of a DTensor, this rank's part.

    They are drawn on `device`. Without a seed they are zeros: for weights that are loaded at once.

    Norms are ones, biases 0. All else is normal with mean 0 and deviation `std`; the projections that write to the
    residual stream have std / sqrt(2 * layers), since 2 * layers of them add up (Radford et al., "Language Models are
    Unsupervised Multitask Learners", 2019, section 2.3). Bits are those of the device's generator in torch: last digits
    may differ between kinds of CPUs, all digits between kinds of GPUs. Memory: one whole parameter at a time.
    """
    model.tie_weights()
    model.model.rotary.reset()
    residual_std = std / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_weights():
        if seed is None or parameter.ndim == 1:
            parameter.fill_(0.0 if seed is None or name.endswith(".bias") else 1.0)
            continue
        scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
        write_parameter(
            sample_initial_values(seed, name, parameter.shape, residual_std if scaled else std, device), parameter
        )


def sample_initial_values(seed: int, name: str, shape: torch.Size, std: float, device: torch.device | str) -> Tensor:
    """A whole parameter's initial values, normal with mean 0: fp32."""
    generator = torch.Generator(device=device).manual_seed(parameter_seed(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """What seeds the draw of one parameter's initial values."""
    digest = hashlib.sha256(f"sluice init seed {seed} parameter {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def write_parameter(values: Tensor, parameter: Tensor) -> None:
    """Write a whole parameter's `values` into it; of a DTensor, this rank's part."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(select_local_part(values, parameter))
    else:
        parameter.copy_(values)


def full_tensor(tensor: Tensor) -> Tensor:
    """A DTensor gathered, which all its ranks must ask for; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def select_local_part(values: Tensor, like: DTensor) -> Tensor:
    """The part of the whole tensor `values` that this rank holds of `like`, as a view; no communication."""
    return values[local_slices(like)]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Where in the whole tensor the part lies that this rank holds of a DTensor; of anything else, all of it.

    Tensor parallelism cuts first and sharded data parallelism cuts its pieces again, though its mesh dimension comes
    first: so cuts are made from the innermost mesh dimension outwards. Pieces are those of `torch.chunk`.
    """
    places = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        where: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        for at, size, placement in list(zip(where, tensor.device_mesh.shape, tensor.placements, strict=True))[::-1]:
            dim = getattr(placement, "dim", None)
            if dim is not None:
                piece = -(-len(places[dim]) // size)
                places[dim] = places[dim][at * piece : (at + 1) * piece]
    return tuple(slice(place.start, place.stop) for place in places)


def training_flops_per_token(config: ModelConfig, vocab_size: int, sequence_length: int) -> int:
    """Floating-point operations of training on one token, forward and backward: 6 N + 12 L H Q T.

    Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B: N parameters, L layers, H heads of width Q, T tokens of
    context (the causal mask is not deducted), nothing recomputed. N counts all of them, as is usual: also an embedding
    of its own, though that is only looked up (7 % of 8.03 billion parameters with a vocabulary of 128,256).
    """
    heads = 2 * (config.heads + config.num_kv_heads) * config.head_size
    block = config.dim * (heads + 3 * config.ffn_size) + config.block_vectors
    tables = 1 if config.tie_word_embeddings else 2
    parameters = config.layers * block + config.dim + tables * vocab_size * config.dim
    return 6 * parameters + 12 * config.layers * config.heads * config.head_size * sequence_length


def apply_tensor_parallel(part: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, shard_logits: bool) -> None:
    """Cut `part` over the one-dimensional `mesh`, in place.

    Sizes must divide (`pipeline/parallel/mesh.py` checks). Hidden states between layers are local tensors: of shape
    (B, T / tensor, D) with `sequence_parallel`, else (B, T, D). Logits are a DTensor cut along the vocabulary with
    `shard_logits`, else whole local tensors.
    """
    # DTensor's from_local and to_local give views, of which FSDP warns: changed in place they lose its hook. Neither a
    # block nor the loss changes what it is given.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    stream = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence_parallel else Replicated()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": VocabParallelEmbedding(stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if shard_logits else Replicate(),
            use_local_output=not shard_logits,
        ),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
        ),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=stream)
    if part.config.qk_norm:  # each rank normalises its own heads: dimension 1 of (B, H, T, K)
        heads = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {f"model.layers.*.self_attn.{name}": heads for name in ("q_norm", "k_norm")}
    absent = {"model.embed_tokens": part.model.embed_tokens, "model.norm": part.model.norm, "lm_head": part.lm_head}
    parallelize_module(part, mesh, {name: style for name, style in plan.items() if absent.get(name, part) is not None})
    norms = [norm for block in part.model.blocks for norm in (block.input_layernorm, block.post_attention_layernorm)]
    for module in [*norms, part.model.norm] if part.model.norm is not None else norms:
        module.register_forward_hook(_as_products)
    part.tie_weights()


def _as_products(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """In the type that products cast it to at once: so it is gathered in half the bytes, and its gradient reduced."""
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output
