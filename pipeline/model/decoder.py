"""The model: a Llama-style decoder whose parameter names are those of Hugging Face's `LlamaForCausalLM`.

Each block is `x + attention(norm(x))`, then `x + mlp(norm(x))`: RMSNorm (Zhang and Sennrich, arXiv 1910.07467), rotary
positions (Su et al., arXiv 2104.09864), grouped-query attention (Ainslie et al., arXiv 2305.13245) and SwiGLU (Shazeer,
arXiv 2002.05202). Options of the config add biases of attention (Qwen2), norms of queries and keys (Qwen3) and scaled
rotary positions (Llama 3.1). pipeline/model/spec.py describes the parameters.

Shapes are in the names: B sequences, T tokens, D = `dim`, H heads, K width of a head, V = `vocab_size`, N = B · T.

`Decoder(…, layers=range(4, 8))` is a pipeline stage: the part that has only these blocks.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeline.config.sections import ModelConfig
from pipeline.config.types import RopeScaling
from pipeline.model.spec import EMBEDDING, LM_HEAD, ParameterSpec, block_parameters
from pipeline.parallel.tensor_parallel import Replicated, VocabParallelEmbedding

IGNORE_INDEX = -100
"""A target without a loss, as in torch's cross-entropy."""

# -- positions and document masks ------------------------------------------------------------------------


class RotaryEmbedding(nn.Module):
    """Rotary position tables for all positions up to `sequence_length`; not trained and not saved."""

    cos_TK: Tensor
    sin_TK: Tensor
    mask_B1TT = None
    """No mask other than the causal one."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.theta = config.rope_theta
        self.scaling = config.rope_scaling
        shape = (sequence_length, config.head_size)
        self.register_buffer("cos_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the tables: fp32, computed on the CPU so that every device has the same bits.

        The angle of position t and pair i is t * theta^(-2i/K), i < K/2, stored twice (arXiv 2104.09864, section 3.2.2;
        the two halves as in transformers' `rotate_half`).
        """
        length, width = self.cos_TK.shape
        pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.theta ** (pairs / width)
        if self.scaling is not None:
            frequencies = _scale_frequencies(frequencies, self.scaling)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.cos_TK.copy_(angles.cos())
        self.sin_TK.copy_(angles.sin())

    def forward(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """Rotate each head's vectors by their positions from `start` on.

        The rotation is computed in fp32; the result has the input's type.
        """
        positions = slice(start, start + x_BHTK.shape[2])
        return _rotate(x_BHTK, self.cos_TK[positions], self.sin_TK[positions])


class PackedRotaryEmbedding:
    """Rotary positions and attention mask of samples with several documents: positions restart at each document.

    This is no torch module, because FSDP2 would round tables among a block's inputs to bf16. Attention uses SDPA with a
    mask; flex attention trains only on GPUs and only if compiled.

    Args:
        rotary: the tables.
        starts_BT: bool, True where a document starts. The first input of a sample starts one in any case.
    """

    def __init__(self, rotary: RotaryEmbedding, starts_BT: Tensor) -> None:
        indices_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
        document_start_BT = torch.where(starts_BT, indices_T, 0).cummax(dim=1).values
        positions_BT = indices_T - document_start_BT
        self.cos_B1TK = rotary.cos_TK[positions_BT].unsqueeze(1)
        self.sin_B1TK = rotary.sin_TK[positions_BT].unsqueeze(1)
        same_document_BTT = document_start_BT.unsqueeze(2) == document_start_BT.unsqueeze(1)
        self.mask_B1TT = (same_document_BTT & (indices_T.unsqueeze(1) >= indices_T)).unsqueeze(1)

    def __call__(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """Rotate as `RotaryEmbedding` does. `start` is ignored: a text that is continued is one document."""
        return _rotate(x_BHTK, self.cos_B1TK, self.sin_B1TK)


def _rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, dim=-1)
    return (x_BHTK * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BHTK.dtype)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale rotary frequencies (fp32, radians per position) for sequences longer than the original ones.

    `linear`: Chen et al., arXiv 2306.15595. `llama3`: `_compute_llama3_parameters` in transformers'
    modeling_rope_utils.py. Frequencies with fewer than `low_freq_factor` turns in the original length are divided by
    the factor, those with more than `high_freq_factor` turns are unchanged, and those between are interpolated.
    """
    divided = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return divided
    low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
    turns = (scaling.original_max_position_embeddings or 0) * frequencies / (2 * math.pi)
    unchanged = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - unchanged) * divided + unchanged * frequencies


# -- blocks ----------------------------------------------------------------------------------------------


def _specs_in(config: ModelConfig, module: str) -> dict[str, ParameterSpec]:
    """Return the parameters of a block's submodule by their names in it."""
    prefix = f"model.layers.0.{module}".rstrip(".") + "."
    return {p.name.removeprefix(prefix): p for p in block_parameters(config, 0) if p.name.startswith(prefix)}


def _linear(specs: Mapping[str, ParameterSpec], name: str) -> nn.Linear:
    out_features, in_features = specs[f"{name}.weight"].shape
    return nn.Linear(in_features, out_features, bias=f"{name}.bias" in specs)


def _norm(specs: Mapping[str, ParameterSpec], name: str, eps: float) -> nn.RMSNorm:
    return nn.RMSNorm(specs[f"{name}.weight"].shape[0], eps=eps)


class Attention(nn.Module):
    """Causal self-attention; H / G query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        specs = _specs_in(config, "self_attn")
        self.head_size = config.head_size
        self.groups = config.heads // config.num_kv_heads
        self.q_proj = _linear(specs, "q_proj")
        self.k_proj = _linear(specs, "k_proj")
        self.v_proj = _linear(specs, "v_proj")
        self.o_proj = _linear(specs, "o_proj")
        self.q_norm = _norm(specs, "q_norm", config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = _norm(specs, "k_norm", config.rms_norm_eps) if config.qk_norm else None
        self.past: tuple[Tensor, Tensor] | None = None
        """Key-value cache: keys and values of the previous tokens during generation; None otherwise."""

    def forward(self, x_BTD: Tensor, rotary: RotaryEmbedding | PackedRotaryEmbedding) -> Tensor:
        """Let each position attend to the previous ones of its document."""
        q_BHTK, k_BHTK = self._split_heads(self.q_proj(x_BTD)), self._split_heads(self.k_proj(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        start = 0 if self.past is None else self.past[0].shape[2]
        q_BHTK, k_BHTK = rotary(q_BHTK, start), rotary(k_BHTK, start)
        v_BHTK = self._split_heads(self.v_proj(x_BTD))
        if self.past is not None:
            k_BHTK, v_BHTK = torch.cat((self.past[0], k_BHTK), dim=2), torch.cat((self.past[1], v_BHTK), dim=2)
            self.past = k_BHTK, v_BHTK
        # CUDA's flash kernels share heads themselves. Its kernels for fp32 and for masks cannot: with enable_gqa, torch
        # would silently use the kernel that stores all T x T scores.
        mask = rotary.mask_B1TT
        enable_gqa = self.groups > 1 and mask is None and q_BHTK.is_cuda and q_BHTK.dtype != torch.float32
        if self.groups > 1 and not enable_gqa:
            k_BHTK = k_BHTK.repeat_interleave(self.groups, dim=1)
            v_BHTK = v_BHTK.repeat_interleave(self.groups, dim=1)
        is_causal = mask is None and start == 0  # a single token after others attends to all of them
        out_BHTK = F.scaled_dot_product_attention(
            q_BHTK, k_BHTK, v_BHTK, mask, is_causal=is_causal, enable_gqa=enable_gqa
        )
        out_BTD: Tensor = self.o_proj(out_BHTK.transpose(1, 2).flatten(2))
        return out_BTD

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        """Reshape (B, T, heads * K) to (B, heads, T, K); a tensor parallel rank has only some of the heads."""
        x_BHTK: Tensor = x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return x_BHTK


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        specs = _specs_in(config, "mlp")
        self.gate_proj = _linear(specs, "gate_proj")
        self.up_proj = _linear(specs, "up_proj")
        self.down_proj = _linear(specs, "down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position independently."""
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        specs = _specs_in(config, "")
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = _norm(specs, "input_layernorm", config.rms_norm_eps)
        self.post_attention_layernorm = _norm(specs, "post_attention_layernorm", config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, rotary: RotaryEmbedding | PackedRotaryEmbedding) -> Tensor:
        """Add the outputs of attention and MLP to the residual stream."""
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), rotary))
        out_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))
        return out_BTD


class Backbone(nn.Module):
    """Embedding, blocks and last norm: the `model.` of the parameter names; or what a part has of them."""

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
        """Map token ids (in a later part: hidden states) to hidden states `x_BTD`, normalized by the last part."""
        x_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        rotary = self.rotary if starts_BT is None else PackedRotaryEmbedding(self.rotary, starts_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, rotary)
        return x_BTD if self.norm is None else self.norm(x_BTD)


# -- output layer and loss -------------------------------------------------------------------------------


class LMHead(nn.Linear):
    """The output layer: hidden states `x_BTD` to logits or, with targets, to the summed loss.

    The loss is computed without the logits of all tokens, one chunk of tokens after another. Whole fp32 logits, their
    log-softmax and its gradient take 12 bytes per token and id: 6.3 GB for 4,096 tokens and 128,256 ids. Here the
    gradient of a chunk's logits is computed with its loss, in the forward pass. It is used at once for the gradient of
    the chunk's hidden states and, summed in fp32, for that of the weights. Nothing is computed twice, and what remains
    until the backward pass has the size of hidden states and weights. Liger Kernel's fused linear cross-entropy does
    the same (Hsu et al., arXiv 2410.10989).

    With tensor parallelism each rank has the logits of its own ids. Ranks exchange the largest logit, the sum of
    exponentials and the target's logit of each token (Shoeybi et al., arXiv 1909.08053, section 3).
    """

    chunk = 1024
    """Number of tokens whose logits exist at the same time, if the loss is requested."""
    compute_dtype: torch.dtype | None = None
    """Type of the matrix products of the loss; None: that of the hidden states."""

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return `logits_BTV`, or the summed loss of `targets_BT` (int64): an fp32 scalar.

        The loss equals :func:`cross_entropy_sum` of the logits. If the layer is sharded, hidden states are a replicated
        DTensor, and so is the loss.
        """
        if targets_BT is None:
            return super().forward(x_BTD)
        weight: Tensor = self.weight
        dtype, group, mesh = self.compute_dtype or x_BTD.dtype, None, None
        if isinstance(x_BTD, DTensor) and isinstance(weight, DTensor):
            mesh = weight.device_mesh
            group = mesh.get_group()
            # each rank has the share of the gradient that comes from its own ids
            x_BTD, weight = x_BTD.to_local(grad_placements=[Partial()]), weight.to_local()
        x_ND, weight_VD = x_BTD.flatten(0, 1).to(dtype), weight.to(dtype)
        loss, grad_x, grad_weight = _chunked_loss(x_ND, weight_VD, targets_BT.flatten(), self.chunk, group)
        # two nodes with one input each: schedules of torch 2.11 that split backward cannot split a Python node
        loss = loss + _KnownGradient.apply(x_ND, grad_x)  # type: ignore[no-untyped-call]
        loss = loss + _KnownGradient.apply(weight_VD, grad_weight)  # type: ignore[no-untyped-call]
        return loss if mesh is None else DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


class _KnownGradient(torch.autograd.Function):
    """A zero whose gradient has been computed already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None


@torch.no_grad()
def _chunked_loss(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the summed loss and its gradients by hidden states and weights, in their types."""
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    grad_x, grad_weight = torch.empty_like(x_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
    for chunk_x, chunk_targets, chunk_grad in zip(
        x_ND.split(chunk), targets_N.split(chunk), grad_x.split(chunk), strict=True
    ):
        value, gradient = _cross_entropy_with_gradient(chunk_x @ weight_VD.T, chunk_targets, group)
        loss += value
        torch.mm(gradient, weight_VD, out=chunk_grad)
        grad_weight += gradient.T @ chunk_x
        del gradient  # before the logits of the next chunk
    return loss, grad_x, grad_weight.to(weight_VD.dtype)


def _cross_entropy_with_gradient(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, computed in fp32, and its gradient in the type of the logits.

    The gradient is the softmax minus one at the target.
    """
    size, dtype = logits_NV.shape[1], logits_NV.dtype
    logits_NV = logits_NV.float()
    columns_N = targets_N - (0 if group is None else dist.get_rank(group) * size)
    is_local_N, has_loss_N = (columns_N >= 0) & (columns_N < size), targets_N != IGNORE_INDEX
    rows_N, columns_N = torch.arange(len(targets_N), device=targets_N.device), columns_N.clamp(0, size - 1)
    logits_NV -= _all_reduce(logits_NV.amax(dim=1), "max", group).unsqueeze(1)
    target_logit_N = torch.where(is_local_N, logits_NV[rows_N, columns_N], 0.0)
    logits_NV.exp_()
    total_N, target_logit_N = _all_reduce(torch.stack([logits_NV.sum(dim=1), target_logit_N]), "sum", group)
    logits_NV *= (has_loss_N / total_N).unsqueeze(1)
    logits_NV[rows_N, columns_N] -= is_local_N.float()
    return torch.where(has_loss_N, total_N.log() - target_logit_N, 0.0).sum(), logits_NV.to(dtype)


def _all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> Tensor:
    return tensor if group is None else collectives.wait_tensor(collectives.all_reduce(tensor, op, group))


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the sum over all tokens of the cross-entropy in nats: an fp32 scalar, computed in fp32.

    It is a sum so that micro-batches and ranks add up; the caller divides by the tokens of the global batch. Targets
    equal to IGNORE_INDEX have no loss.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


# -- the model -------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """The language model, or the part of it that has the blocks `layers`.

    The part with the first block also has the embedding; the part with the last block also has the last norm and the
    output layer. Parameters have the same names as in the whole model.

    Building it samples torch's default weights; :func:`init_weights` sets those from which a training starts. Under
    `torch.device("meta")` it takes no memory: call `to_empty(device=...)` and :func:`init_weights` afterwards.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, layers: range | None = None) -> None:
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        self.model = Backbone(config, vocab_size, sequence_length, layers)
        self.lm_head = LMHead(config.dim, vocab_size, bias=False) if layers.stop == config.layers else None
        self.compute_dtype: torch.dtype | None = None
        """Type in which autocast computes matrix products; None: that of the weights."""
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output layer use the embedding's parameter, if the config says so. `to_empty` separates them."""
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model; a tied output layer has the embedding's name."""
        for name, parameter in self.named_parameters():
            yield (EMBEDDING if name == LM_HEAD and self.config.tie_word_embeddings else name), parameter

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, starts_BT: Tensor | None = None) -> Tensor:
        """Map token ids (int64, T <= `sequence_length`) to `logits_BTV` of each next token.

        Args:
            x: token ids; in a later part, hidden states `x_BTD`. An earlier part returns hidden states.
            targets_BT: the last part returns the summed loss of these instead of logits (see :class:`LMHead`).
            starts_BT: bool, where documents start. Attention is masked across documents; every part needs it.
        """
        with torch.autocast(x.device.type, self.compute_dtype, enabled=self.compute_dtype is not None):
            x_BTD: Tensor = self.model(x, starts_BT)
            if self.lm_head is None:
                return x_BTD
            if targets_BT is None:
                logits_BTV: Tensor = self.lm_head(x_BTD)
                return logits_BTV
        loss: Tensor = self.lm_head(x_BTD, targets_BT=targets_BT)  # autocast has freed its copies of weights here
        return loss


# -- initial weights -------------------------------------------------------------------------------------


@torch.no_grad()
def init_weights(model: Decoder, seed: int | None, std: float, device: torch.device | str = "cpu") -> None:
    """Set all parameters and the rotary tables in place; of a DTensor, this rank's shard.

    Norms are ones and biases 0. Everything else is normal with mean 0 and standard deviation `std`. The projections
    that write to the residual stream have std / sqrt(2 * layers), because 2 * layers of them add up (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", 2019, section 2.3).

    Initial weights are a function of (seed, parameter name, position in the parameter) only. Each parameter is sampled
    separately and whole, by a generator that is seeded with a hash of its name. Any part of the model, built in any
    order, therefore gets the same numbers on any CPU, and the same numbers on any GPU of one kind.

    Args:
        model: the decoder or a part of it, on any device.
        seed: None for zeros, if the weights are loaded at once.
        std: standard deviation.
        device: where values are sampled. Memory: one whole parameter at a time.
    """
    model.tie_weights()
    model.model.rotary.reset()
    residual_std = std / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_weights():
        if seed is None or parameter.ndim == 1:
            parameter.fill_(0.0 if seed is None or name.endswith(".bias") else 1.0)
            continue
        writes_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter_std = residual_std if writes_to_residual else std
        write_parameter(sample_initial_values(seed, name, parameter.shape, parameter_std, device), parameter)


def sample_initial_values(seed: int, name: str, shape: torch.Size, std: float, device: torch.device | str) -> Tensor:
    """Return the initial values of a whole parameter, normal with mean 0: fp32."""
    generator = torch.Generator(device=device).manual_seed(parameter_seed(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of the initial values of one parameter."""
    digest = hashlib.sha256(f"sluice init seed {seed} parameter {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


# -- shards of DTensors ----------------------------------------------------------------------------------


def write_parameter(values: Tensor, parameter: Tensor) -> None:
    """Copy a whole parameter's `values` into it; into a DTensor, only this rank's shard."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(select_local_part(values, parameter))
    else:
        parameter.copy_(values)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered from all its ranks, which must all call it; any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def select_local_part(values: Tensor, like: DTensor) -> Tensor:
    """Return the part of the whole tensor `values` that this rank has of `like`: a view, without communication."""
    return values[local_slices(like)]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank's shard of a DTensor is; of any other tensor, all of it.

    Tensor parallelism shards first and FSDP shards the result, although its mesh dimension comes first. Shards are
    therefore computed from the innermost mesh dimension outwards. Their sizes are those of `torch.chunk`.
    """
    ranges = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        axes = list(zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True))
        for index, size, placement in reversed(axes):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                length = -(-len(ranges[dim]) // size)
                ranges[dim] = ranges[dim][index * length : (index + 1) * length]
    return tuple(slice(part.start, part.stop) for part in ranges)


# -- tensor parallelism ----------------------------------------------------------------------------------


def apply_tensor_parallel(part: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, shard_logits: bool) -> None:
    """Parallelize `part` over the one-dimensional `mesh`, in place. See pipeline/parallel/tensor_parallel.py.

    Sizes must divide (`pipeline/parallel/mesh.py` checks). Hidden states between layers are local tensors: of shape
    (B, T / tp, D) with `sequence_parallel`, otherwise (B, T, D). With `shard_logits` logits are a DTensor that is
    sharded along the vocabulary, otherwise whole local tensors.
    """
    # from_local and to_local of DTensor return views, and FSDP warns that views lose its hook if they are changed in
    # place. Neither a block nor the loss changes its inputs.
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
    for name, spec in _specs_in(part.config, "").items():
        if spec.is_matrix:
            style = ColwiseParallel() if spec.tp_dim == 0 else RowwiseParallel(output_layouts=stream)
            plan[f"model.layers.*.{name.removesuffix('.weight')}"] = style
    if part.config.qk_norm:  # each rank normalizes its own heads: dimension 1 of (B, H, T, K)
        heads = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {f"model.layers.*.self_attn.{name}": heads for name in ("q_norm", "k_norm")}
    ends = {"model.embed_tokens": part.model.embed_tokens, "model.norm": part.model.norm, "lm_head": part.lm_head}
    parallelize_module(part, mesh, {name: style for name, style in plan.items() if ends.get(name, part) is not None})
    norms = [norm for block in part.model.blocks for norm in (block.input_layernorm, block.post_attention_layernorm)]
    for module in [*norms, part.model.norm] if part.model.norm is not None else norms:
        module.register_forward_hook(_cast_to_autocast_type)
    part.tie_weights()


def _cast_to_autocast_type(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Cast a norm's output to the type of the matrix products that follow.

    They would cast it anyway; so it is gathered, and its gradient reduced, in half the bytes.
    """
    kind = output.device.type
    return output.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else output
