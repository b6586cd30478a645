"""The model: a Llama-style decoder with the parameter names of Hugging Face's `LlamaForCausalLM`.

Each block is `x + attention(norm(x))`, then `x + mlp(norm(x))`: RMSNorm (Zhang and Sennrich, arXiv 1910.07467), rotary
positions (Su et al., arXiv 2104.09864), grouped-query attention (Ainslie et al., arXiv 2305.13245) and SwiGLU (Shazeer,
arXiv 2002.05202). The config can add attention biases (Qwen2), norms of queries and keys (Qwen3) and scaled rotary
positions (Llama 3.1). pipeline/model/spec.py describes the parameters.

Names of tensors end with their shape: B sequences, T tokens, D = `dim`, H heads, K = head size, V = `vocab_size`,
N = B · T. `Decoder(…, layers=range(4, 8))` builds the model part of a pipeline-parallel stage.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
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
from pipeline.config.types import YARN_BETA_FAST, YARN_BETA_SLOW, RopeScaling
from pipeline.model.attention import KeyRanges
from pipeline.model.spec import EMBEDDING, LM_HEAD, ParameterSpec, block_parameters, is_adapter_name
from pipeline.parallel.context_parallel import ContextParallel
from pipeline.parallel.host_tensor import HostTensor
from pipeline.parallel.tensor_parallel import Replicated, VocabParallelEmbedding

IGNORE_INDEX = -100
"""Target of a position without a loss: the default `ignore_index` of torch's cross-entropy."""

# -- positions ------------------------------------------------------------------------


class RotaryEmbedding(nn.Module):
    """Rotary position tables for all positions up to `sequence_length`. They are neither trained nor saved.

    As an argument of a block, it describes samples with one document each: positions begin at 0, and each token reads
    all tokens before it.
    """

    cos_TK: Tensor
    sin_TK: Tensor
    context = None
    """This rank has all tokens."""

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
        """Fill the tables in fp32. They are computed on the CPU, so that every device has the same bits.

        The angle of position t and pair i is t * theta^(-2i/K) with i < K/2 (arXiv 2104.09864, section 3.2.2). The
        second half of each row repeats the angles of the first half, as transformers' `rotate_half` expects.
        """
        length, head_size = self.cos_TK.shape
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size  # 2i/K of each pair i
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.theta**exponents
        scale = 1.0
        if self.scaling is not None:
            frequencies, scale = _scale_frequencies(frequencies, self.scaling, self.theta)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.cos_TK.copy_(angles.cos() * scale)
        self.sin_TK.copy_(angles.sin() * scale)

    def forward(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """Rotate each head's vectors by their positions, which begin at `start`.

        The rotation is computed in fp32. The result has the dtype of the input.
        """
        positions = slice(start, start + x_BHTK.shape[2])
        return _rotate(x_BHTK, self.cos_TK[positions], self.sin_TK[positions])

    def get_key_ranges(self, window: int | None) -> KeyRanges | None:
        """Return None: each token reads all tokens before it."""
        return None


class TokenPositions:
    """Positions of the tokens of a micro-batch, and the keys that they may read.

    Positions restart at each document. A block gets this object instead of a `RotaryEmbedding` if samples have several
    documents or are longer than a window. The tables are attributes of a plain object, because FSDP2 would round
    tensors that are inputs of a block to bf16.

    Args:
        rotary: the tables of all positions.
        starts_BT: bool on the CPU, True if a document starts at this token. The first token of a sample always starts a
            document.
        windows: the windows of the blocks of this part: numbers of tokens, or None for full attention.
        context: the tokens of each sample that this rank has; None for all.
    """

    def __init__(
        self,
        rotary: RotaryEmbedding,
        starts_BT: Tensor,
        windows: Iterable[int | None],
        context: ContextParallel | None = None,
    ) -> None:
        device = rotary.cos_TK.device
        batch, length = starts_BT.shape
        indices_T = torch.arange(length)
        start_BT = torch.where(starts_BT, indices_T, 0).cummax(dim=1).values
        if context is not None:
            indices_T = context.list_positions(length)
            start_BT = start_BT[:, indices_T]
        positions_BT = (indices_T - start_BT).to(device, non_blocking=True)
        self.context = context
        self.cos_B1TK = rotary.cos_TK[positions_BT].unsqueeze(1)
        self.sin_B1TK = rotary.sin_TK[positions_BT].unsqueeze(1)
        # Keys are numbered through the samples of the micro-batch.
        first_key_B1 = length * torch.arange(batch).unsqueeze(1)
        start_N, index_N = (start_BT + first_key_B1).flatten(), (indices_T + first_key_B1).flatten()
        self._ranges = {window: KeyRanges(start_N, index_N, window, device) for window in windows}

    def __call__(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """Rotate as `RotaryEmbedding` does. `start` is ignored, because all tokens of the samples are here."""
        return _rotate(x_BHTK, self.cos_B1TK, self.sin_B1TK)

    def get_key_ranges(self, window: int | None) -> KeyRanges | None:
        """Return the keys that each token may read in a block with this window."""
        return self._ranges[window]


def _rotate(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of values by the angle with these cosines and sines. The result has the dtype of `x_BHTK`."""
    left, right = x_BHTK.chunk(2, dim=-1)
    return (x_BHTK * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BHTK.dtype)


def _scale_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> tuple[Tensor, float]:
    """Scale rotary frequencies (fp32, radians per position), so that the model can read longer sequences.

    `linear` divides all frequencies by `factor` (Chen et al., arXiv 2306.15595). `llama3` depends on the number of full
    turns that a frequency makes within `original_max_position_embeddings` tokens, the original sequence length. It does
    the same as `_compute_llama3_parameters` in transformers' modeling_rope_utils.py:

    - fewer than `low_freq_factor` turns: the frequency is divided by `factor`,
    - more than `high_freq_factor` turns: the frequency is unchanged,
    - between the two: the result is interpolated between the divided and the unchanged frequency.

    `yarn` interpolates linearly in the number of the pair, between the pairs that make `beta_fast` and `beta_slow`
    turns (Peng et al., arXiv 2309.00071, section 3.2, and `_compute_yarn_parameters` of transformers).

    Returns:
        The frequencies, and the factor by which sines and cosines are multiplied: for yarn, the square root of the
        factor of the scores in section 3.4; otherwise 1.
    """
    divided_frequencies = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return divided_frequencies, 1.0
    # The config check makes sure that `high` and the original sequence length are not 0.
    original_length = scaling.original_max_position_embeddings or 0
    if scaling.rope_type == "yarn":
        pairs = len(frequencies)

        def find_pair(turns: float) -> float:
            """Return the number of the pair that makes this number of full turns, which may be a fraction."""
            return pairs * math.log(original_length / (turns * 2 * math.pi)) / math.log(theta)

        first, last = find_pair(scaling.beta_fast or YARN_BETA_FAST), find_pair(scaling.beta_slow or YARN_BETA_SLOW)
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        ramp = (torch.arange(pairs, dtype=torch.float32, device=frequencies.device) - first) / ((last - first) or 0.001)
        unchanged_share = 1 - ramp.clamp(0.0, 1.0)
        return (1 - unchanged_share) * divided_frequencies + unchanged_share * frequencies, scaling.yarn_scale
    low = scaling.low_freq_factor or 0.0
    high = scaling.high_freq_factor or 0.0
    turns = original_length * frequencies / (2 * math.pi)
    unchanged_share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - unchanged_share) * divided_frequencies + unchanged_share * frequencies, 1.0


# -- blocks ----------------------------------------------------------------------------------------------


def _get_specs(config: ModelConfig, module: str) -> dict[str, ParameterSpec]:
    """Return the parameters of the submodule `module` of a block, by their names inside the submodule.

    If `module` is "", return the parameters of the whole block. All blocks have the same parameters, so those of block
    0 are used.
    """
    prefix = f"model.layers.0.{module}".rstrip(".") + "."
    return {p.name.removeprefix(prefix): p for p in block_parameters(config, 0) if p.name.startswith(prefix)}


def _build_linear(specs: Mapping[str, ParameterSpec], name: str) -> nn.Linear:
    """Build the linear layer whose parameters `specs` describes under `name`."""
    out_features, in_features = specs[f"{name}.weight"].shape
    return nn.Linear(in_features, out_features, bias=f"{name}.bias" in specs)


def _build_norm(specs: Mapping[str, ParameterSpec], name: str, eps: float) -> nn.RMSNorm:
    """Build the RMSNorm whose weight `specs` describes under `name`."""
    return nn.RMSNorm(specs[f"{name}.weight"].shape[0], eps=eps)


class Attention(nn.Module):
    """Causal self-attention. `group_size` query heads share one key and value head (grouped-query attention).

    Args:
        config: the model.
        window: number of tokens that a token reads; None: all tokens before it.
    """

    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        specs = _get_specs(config, "self_attn")
        self.window = window
        self.head_size = config.head_size
        self.group_size = config.heads // config.num_kv_heads
        self.q_proj = _build_linear(specs, "q_proj")
        self.k_proj = _build_linear(specs, "k_proj")
        self.v_proj = _build_linear(specs, "v_proj")
        self.o_proj = _build_linear(specs, "o_proj")
        self.q_norm = _build_norm(specs, "q_norm", config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = _build_norm(specs, "k_norm", config.rms_norm_eps) if config.qk_norm else None
        self.past: tuple[Tensor, Tensor] | None = None
        """Key-value cache: keys and values of the previous tokens during generation. None during training."""

    def forward(self, x_BTD: Tensor, positions: RotaryEmbedding | TokenPositions) -> Tensor:
        """Let each token read itself and the tokens before it, as far as `positions` and the window permit."""
        q_BHTK = self._split_heads(self.q_proj(x_BTD))
        k_BHTK = self._split_heads(self.k_proj(x_BTD))
        if self.q_norm is not None and self.k_norm is not None:
            q_BHTK = self.q_norm(q_BHTK)
            k_BHTK = self.k_norm(k_BHTK)
        start = 0 if self.past is None else self.past[0].shape[2]
        q_BHTK = positions(q_BHTK, start)
        k_BHTK = positions(k_BHTK, start)
        v_BHTK = self._split_heads(self.v_proj(x_BTD))
        if self.past is not None:
            k_BHTK = torch.cat((self.past[0], k_BHTK), dim=2)
            v_BHTK = torch.cat((self.past[1], v_BHTK), dim=2)
            self.past = k_BHTK, v_BHTK
        out_BTX = self._attend(q_BHTK, k_BHTK, v_BHTK, positions, is_first=start == 0)
        out_BTD: Tensor = self.o_proj(out_BTX)
        return out_BTD

    def _attend(
        self,
        q_BHTK: Tensor,
        k_BHTK: Tensor,
        v_BHTK: Tensor,
        positions: RotaryEmbedding | TokenPositions,
        is_first: bool,
    ) -> Tensor:
        """Return the attention of the queries, with the heads side by side: shape (B, T, H * K).

        Args:
            q_BHTK: queries.
            k_BHTK: keys, which may have fewer heads.
            v_BHTK: values, with as many heads as the keys.
            positions: has the keys that each query may read.
            is_first: False if there are more keys than queries. There is then one query for each sample.
        """
        ranges = positions.get_key_ranges(self.window)
        if ranges is not None:
            q_BTHK, k_BTHK, v_BTHK = (x_BHTK.transpose(1, 2) for x_BHTK in (q_BHTK, k_BHTK, v_BHTK))
            if positions.context is None:
                k_NHK, v_NHK = k_BTHK.flatten(0, 1), v_BTHK.flatten(0, 1)
            else:
                k_NHK, v_NHK = positions.context.gather(k_BTHK, v_BTHK)
            return ranges.attend(q_BTHK.flatten(0, 1), k_NHK, v_NHK).view(*q_BTHK.shape[:2], -1)
        if not is_first and self.window is not None:
            k_BHTK, v_BHTK = k_BHTK[:, :, -self.window :], v_BHTK[:, :, -self.window :]
        # CUDA's flash kernels support grouped heads (enable_gqa). CUDA's kernels for fp32 do not: torch would silently
        # fall back to the kernel that stores all T x T scores. For these kernels, and on CPUs, key and value heads are
        # therefore repeated.
        enable_gqa = self.group_size > 1 and q_BHTK.is_cuda and q_BHTK.dtype != torch.float32
        if self.group_size > 1 and not enable_gqa:
            k_BHTK = k_BHTK.repeat_interleave(self.group_size, dim=1)
            v_BHTK = v_BHTK.repeat_interleave(self.group_size, dim=1)
        # If the cache is not empty, the only new token attends to all tokens, so no causal mask is needed.
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=is_first, enable_gqa=enable_gqa)
        return out_BHTK.transpose(1, 2).flatten(2)

    def _split_heads(self, x_BTD: Tensor) -> Tensor:
        """Reshape (B, T, heads * K) to (B, heads, T, K). A tensor-parallel rank has only some of the heads."""
        x_BHTK: Tensor = x_BTD.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        return x_BHTK


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        specs = _get_specs(config, "mlp")
        self.gate_proj = _build_linear(specs, "gate_proj")
        self.up_proj = _build_linear(specs, "up_proj")
        self.down_proj = _build_linear(specs, "down_proj")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each position independently."""
        out_BTD: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out_BTD


class Block(nn.Module):
    """One decoder layer: attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        specs = _get_specs(config, "")
        self.self_attn = Attention(config, config.get_window(number))
        self.mlp = MLP(config)
        self.input_layernorm = _build_norm(specs, "input_layernorm", config.rms_norm_eps)
        self.post_attention_layernorm = _build_norm(specs, "post_attention_layernorm", config.rms_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, positions: RotaryEmbedding | TokenPositions) -> Tensor:
        """Add the outputs of attention and MLP to the residual stream."""
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), positions))
        out_BTD: Tensor = x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))
        return out_BTD


class Backbone(nn.Module):
    """Embedding, blocks and last norm of the model. A model part has only some of these modules.

    It is the submodule `model` of the decoder, as in Hugging Face's `LlamaForCausalLM`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, layers: range) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.dim) if layers.start == 0 else None
        self.layers = nn.ModuleDict({str(number): Block(config, number) for number in layers})
        self.norm = nn.RMSNorm(config.dim, eps=config.rms_norm_eps) if layers.stop == config.layers else None
        self.rotary = RotaryEmbedding(config, sequence_length)
        self.sequence_shards = 1
        """Number of tensor-parallel ranks that split the sequence of the hidden states that this part receives."""
        self.context: ContextParallel | None = None
        """How sequences are split over ranks; None if this rank has whole sequences."""

    @property
    def blocks(self) -> list[Block]:
        """Decoder blocks in order."""
        return [cast(Block, block) for block in self.layers.values()]

    def forward(self, x: Tensor, starts_BT: Tensor | HostTensor | None = None) -> Tensor:
        """Map token ids to hidden states `x_BTD`, or hidden states to hidden states if this is not the first part.

        The last part also applies the last norm. `starts_BT` is explained in :meth:`Decoder.forward`.
        """
        x_BTD = x if self.embed_tokens is None else self.embed_tokens(x)
        shards = self.sequence_shards * (1 if self.context is None else self.context.size)
        positions = self._get_positions(x.shape[0], x.shape[1] * shards, starts_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, positions)
        return x_BTD if self.norm is None else self.norm(x_BTD)

    def _get_positions(
        self, batch: int, length: int, starts_BT: Tensor | HostTensor | None
    ) -> RotaryEmbedding | TokenPositions:
        """Return the positions of a micro-batch of `batch` samples with `length` tokens."""
        windows = {block.self_attn.window for block in self.blocks}
        has_effect = any(window is not None and window < length for window in windows)
        if starts_BT is None and self.context is None and not has_effect:
            return self.rotary
        if starts_BT is None:
            starts_BT = torch.zeros((batch, length), dtype=torch.bool)
        elif isinstance(starts_BT, HostTensor):
            starts_BT = starts_BT.tensor
        return TokenPositions(self.rotary, starts_BT.cpu(), windows, self.context)


# -- output layer and loss -------------------------------------------------------------------------------


CrossEntropy = Callable[[Tensor, Tensor, dist.ProcessGroup | None], tuple[Tensor, Tensor]]
"""Function of logits (N, V), targets (N) and the group that shares the vocabulary, which returns the summed loss (fp32)
and the gradient of the logits."""


class LMHead(nn.Linear):
    """The output layer. It maps hidden states `x_BTD` to logits or, with targets, to the summed loss.

    The loss is computed for one chunk of tokens after another, because the logits of all tokens need too much memory.
    Whole fp32 logits, their log-softmax and its gradient take 12 bytes per token and vocabulary entry: 6.3 GB for 4,096
    tokens and 128,256 entries. The forward pass computes the gradient of a chunk's logits together with the loss. It
    uses this gradient at once for the gradients of the hidden states and of the weights (summed in fp32). Nothing is
    computed twice, and only tensors of the size of hidden states and weights remain until the backward pass. Liger
    Kernel's fused linear cross-entropy does the same (Hsu et al., arXiv 2410.10989).

    With tensor parallelism each rank has the logits of its share of the vocabulary. For each token, ranks exchange the
    largest logit, the sum of exponentials and the target's logit (Shoeybi et al., arXiv 1909.08053, section 3).
    """

    chunk = 1024
    """Number of tokens whose logits exist at the same time while the loss is computed."""
    compute_dtype: torch.dtype | None = None
    """Type of the loss's matrix products. None: the type of the hidden states."""
    compiles_loss = False
    """Whether torch.compile fuses the operations of the loss. This has no effect if the layer is sharded."""

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return `logits_BTV`, or the summed loss of `targets_BT` (int64) as an fp32 scalar.

        The loss equals :func:`cross_entropy_sum` of the logits. If the layer is sharded, the hidden states must be a
        replicated DTensor, and the loss is also a replicated DTensor.
        """
        if targets_BT is None:
            return super().forward(x_BTD)
        weight: Tensor = self.weight
        dtype = self.compute_dtype or x_BTD.dtype
        group = None
        mesh = None
        if isinstance(x_BTD, DTensor) and isinstance(weight, DTensor):
            mesh = weight.device_mesh
            group = mesh.get_group()
            # Each rank computes the share of the gradient that comes from its part of the vocabulary.
            x_BTD = x_BTD.to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        x_ND = x_BTD.flatten(0, 1).to(dtype)
        weight_VD = weight.to(dtype)
        if group is None and not torch.is_grad_enabled():
            pairs = zip(x_ND.split(self.chunk), targets_BT.flatten().split(self.chunk), strict=True)
            losses = [cross_entropy_sum(chunk_x[None] @ weight_VD.T, targets_N[None]) for chunk_x, targets_N in pairs]
            return torch.stack(losses).sum()
        is_fused = self.compiles_loss and group is None
        cross_entropy = _compile_cross_entropy() if is_fused else _cross_entropy_with_gradient
        loss, grad_x, grad_weight = _compute_loss_in_chunks(
            x_ND, weight_VD, targets_BT.flatten(), self.chunk, cross_entropy, group
        )
        # These are two autograd nodes with one input each, because the schedules of torch 2.11 that split the backward
        # pass cannot split a node that is implemented in Python.
        loss = loss + _KnownGradient.apply(x_ND, grad_x)  # type: ignore[no-untyped-call]
        loss = loss + _KnownGradient.apply(weight_VD, grad_weight)  # type: ignore[no-untyped-call]
        return loss if mesh is None else DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


class _KnownGradient(torch.autograd.Function):
    """Function with the value 0. Its gradient with respect to `tensor` is `gradient`, which is computed beforehand."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None


@torch.no_grad()
def _compute_loss_in_chunks(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, cross_entropy: CrossEntropy,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the summed loss (fp32), and its gradients with respect to `x_ND` and `weight_VD`.

    Each gradient has the type of its tensor. `chunk` is the number of tokens whose logits exist at the same time.
    """
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    grad_x = torch.empty_like(x_ND)
    grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32)
    for chunk_x, chunk_targets, chunk_grad in zip(
        x_ND.split(chunk), targets_N.split(chunk), grad_x.split(chunk), strict=True
    ):
        chunk_loss, grad_logits = cross_entropy(chunk_x @ weight_VD.T, chunk_targets, group)
        loss += chunk_loss
        torch.mm(grad_logits, weight_VD, out=chunk_grad)
        if x_ND.is_cuda and x_ND.dtype != torch.float32:
            # The matrix product adds to the fp32 sum. Without `out_dtype`, it would be rounded first.
            torch.addmm(grad_weight, grad_logits.T, chunk_x, out_dtype=torch.float32, out=grad_weight)
        else:
            grad_weight += grad_logits.T @ chunk_x
        del grad_logits  # Free the memory before the logits of the next chunk are computed.
    return loss, grad_x, grad_weight.to(weight_VD.dtype)


def _cross_entropy_with_gradient(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, computed in fp32, and its gradient in the type of the logits.

    The gradient is the softmax, minus 1 at the target. It is 0 for tokens without a loss. If there is a `group`, each
    of its ranks has the logits of its share of the vocabulary.
    """
    local_vocab_size = logits_NV.shape[1]
    dtype = logits_NV.dtype
    logits_NV = logits_NV.float()
    columns_N = targets_N - (0 if group is None else dist.get_rank(group) * local_vocab_size)
    is_local_N = (columns_N >= 0) & (columns_N < local_vocab_size)
    has_loss_N = targets_N != IGNORE_INDEX
    rows_N = torch.arange(len(targets_N), device=targets_N.device)
    columns_N = columns_N.clamp(0, local_vocab_size - 1)
    # To save memory, the next lines change the fp32 logits in place, first to exponentials, then to the gradient. The
    # largest logit is subtracted, so that exponentials do not overflow.
    logits_NV -= _all_reduce(logits_NV.amax(dim=1), "max", group).unsqueeze(1)
    target_logit_N = torch.where(is_local_N, logits_NV[rows_N, columns_N], 0.0)
    logits_NV.exp_()
    total_N, target_logit_N = _all_reduce(torch.stack([logits_NV.sum(dim=1), target_logit_N]), "sum", group)
    logits_NV *= (has_loss_N / total_N).unsqueeze(1)
    logits_NV[rows_N, columns_N] -= is_local_N.float()
    return torch.where(has_loss_N, total_N.log() - target_logit_N, 0.0).sum(), logits_NV.to(dtype)


def _fused_cross_entropy_with_gradient(
    logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return the same as :func:`_cross_entropy_with_gradient`. `group` must be None. Call this only compiled.

    Compiled, it reads the logits and writes the gradient, without fp32 logits in memory. The other function changes
    fp32 logits in place, which torch.compile cannot fuse.
    """
    dtype = logits_NV.dtype
    has_loss_N1 = (targets_N != IGNORE_INDEX).unsqueeze(1)
    columns_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_target_NV = columns_V == targets_N.unsqueeze(1)
    logits_NV = logits_NV.float()
    logits_NV = logits_NV - logits_NV.amax(dim=1, keepdim=True)
    exponentials_NV = logits_NV.exp()
    total_N1 = exponentials_NV.sum(dim=1, keepdim=True)
    target_logit_N1 = torch.where(is_target_NV, logits_NV, 0.0).sum(dim=1, keepdim=True)
    gradient_NV = torch.where(has_loss_N1, exponentials_NV / total_N1 - is_target_NV.float(), 0.0)
    return torch.where(has_loss_N1, total_N1.log() - target_logit_N1, 0.0).sum(), gradient_NV.to(dtype)


@cache
def _compile_cross_entropy() -> CrossEntropy:
    """Return :func:`_fused_cross_entropy_with_gradient`, which torch compiles at its first call."""
    compiled: CrossEntropy = torch.compile(_fused_cross_entropy_with_gradient, dynamic=False)
    return compiled


def _all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> Tensor:
    """Return the tensor reduced over the ranks of a group; without a group, return it unchanged."""
    return tensor if group is None else collectives.wait_tensor(collectives.all_reduce(tensor, op, group))


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over all tokens and computed in fp32, as an fp32 scalar.

    The loss is a sum so that the losses of micro-batches and ranks add up. The caller divides it by the number of
    tokens of the global batch. Targets equal to IGNORE_INDEX have no loss.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


# -- the model -------------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """The language model, or the model part with the blocks `layers`.

    The part with the first block also has the embedding. The part with the last block also has the last norm and the
    output layer. Parameters have the same names as in the whole model.

    The constructor samples torch's default weights. :func:`init_weights` sets the weights from which training starts.
    Under `torch.device("meta")` the model takes no memory: call `to_empty(device=...)` and :func:`init_weights`
    afterwards.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int, layers: range | None = None) -> None:
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        self.model = Backbone(config, vocab_size, sequence_length, layers)
        self.lm_head = LMHead(config.dim, vocab_size, bias=False) if layers.stop == config.layers else None
        self.compute_dtype: torch.dtype | None = None
        """Type in which autocast computes matrix products. None: the type of the weights."""
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output layer use the embedding's parameter if `model.tie_word_embeddings` is set.

        A part that has only one of the two modules is not changed. Call this again after `to_empty`, which separates
        tied parameters.
        """
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter with its name in the whole model. A tied output layer has the embedding's name."""
        for name, parameter in self.named_parameters():
            yield (EMBEDDING if name == LM_HEAD and self.config.tie_word_embeddings else name), parameter

    def forward(
        self, x: Tensor, targets_BT: Tensor | None = None, starts_BT: Tensor | HostTensor | None = None
    ) -> Tensor:
        """Map token ids (int64, T <= `sequence_length`) to the logits of each next token, `logits_BTV`.

        Parts other than the last one return hidden states `x_BTD`.

        Args:
            x: token ids, or hidden states `x_BTD` if this is not the first part. With context parallelism, these are
                the tokens of this rank, as are `targets_BT`.
            targets_BT: if given, the last part returns their summed loss instead of logits (see :class:`LMHead`).
            starts_BT: bool, True for the first token of each document. If given, tokens only read tokens of the same
                document. Every part needs this argument. If it is not a `HostTensor`, a GPU is waited for, because the
                ranges of keys are computed on the CPU.
        """
        with torch.autocast(x.device.type, self.compute_dtype, enabled=self.compute_dtype is not None):
            x_BTD: Tensor = self.model(x, starts_BT)
            if self.lm_head is None:
                return x_BTD
            if targets_BT is None:
                logits_BTV: Tensor = self.lm_head(x_BTD)
                return logits_BTV
        # The loss is computed outside autocast, which has freed its copies of the weights by now.
        loss: Tensor = self.lm_head(x_BTD, targets_BT=targets_BT)
        return loss


# -- initial weights -------------------------------------------------------------------------------------


@torch.no_grad()
def init_weights(model: Decoder, seed: int | None, std: float, device: torch.device | str = "cpu") -> None:
    """Set all parameters and the rotary tables in place. If a parameter is a DTensor, set only this rank's shard.

    Norm weights are 1, and biases and adapters are 0. Other weights are sampled from a normal distribution with mean 0
    and standard deviation `std`. Projections that write to the residual stream have the standard deviation std /
    sqrt(2 * layers), because the stream is the sum of the outputs of 2 * layers such projections (Radford et al.,
    "Language Models are Unsupervised Multitask Learners", 2019, section 2.3).

    Initial weights depend only on the seed, the parameter's name and the position in the parameter. Each parameter is
    sampled separately and whole, by a generator that is seeded with the seed and the name (:func:`parameter_seed`). A
    model part therefore gets the same values as the whole model. These values are the same on all CPUs, and on all
    GPUs of the same model.

    Args:
        model: the decoder or a part of it, on any device.
        seed: seed of the values. None fills all parameters with zeros, because weights are loaded afterwards.
        std: standard deviation of parameters that do not write to the residual stream.
        device: device that samples the values. It needs memory for one whole parameter at a time.
    """
    model.tie_weights()
    model.model.rotary.reset()
    residual_std = std / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_weights():
        if is_adapter_name(name):
            parameter.zero_()
            continue
        if seed is None or parameter.ndim == 1:
            parameter.fill_(0.0 if seed is None or name.endswith(".bias") else 1.0)
            continue
        writes_to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter_std = residual_std if writes_to_residual else std
        write_parameter(sample_initial_values(seed, name, parameter.shape, parameter_std, device), parameter)


def sample_initial_values(seed: int, name: str, shape: torch.Size, std: float, device: torch.device | str) -> Tensor:
    """Return the initial values (fp32) of a whole parameter, sampled from a normal distribution with mean 0."""
    generator = torch.Generator(device=device).manual_seed(parameter_seed(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    """Return the seed of the initial values of one parameter."""
    digest = hashlib.sha256(f"sluice init seed {seed} parameter {name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


# -- shards of DTensors ----------------------------------------------------------------------------------


def write_parameter(values: Tensor, parameter: Tensor) -> None:
    """Copy the `values` of a whole parameter into `parameter`. If it is a DTensor, set only this rank's shard."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(select_local_part(values, parameter))
    else:
        parameter.copy_(values)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a DTensor; return any other tensor unchanged.

    All ranks of the DTensor must call this, because its shards are gathered from them.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; return any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def select_local_part(values: Tensor, like: DTensor) -> Tensor:
    """Return a view of the part of `values` (a whole tensor) that is this rank's shard of the DTensor `like`."""
    return values[local_slices(like)]


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor that this rank's shard of a DTensor covers.

    For any other tensor, the slices cover the whole tensor.

    Tensor parallelism shards a tensor first, and FSDP shards the result, although FSDP's mesh dimension comes first.
    Shards are therefore computed from the innermost mesh dimension outwards. Shards have the sizes of `torch.chunk`.
    """
    ranges = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
        axes = list(zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True))
        for index, size, placement in reversed(axes):
            dim = getattr(placement, "dim", None)  # None if the tensor is replicated along this mesh dimension
            if dim is not None:
                length = -(-len(ranges[dim]) // size)  # rounded up
                ranges[dim] = ranges[dim][index * length : (index + 1) * length]
    return tuple(slice(indices.start, indices.stop) for indices in ranges)


# -- tensor parallelism ----------------------------------------------------------------------------------


def apply_tensor_parallel(part: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, shard_logits: bool) -> None:
    """Parallelize `part` over the one-dimensional `mesh`, in place. See pipeline/parallel/tensor_parallel.py.

    The mesh size `tp` must divide the model's sizes (`pipeline/parallel/mesh.py` checks this). Hidden states between
    layers are local tensors of shape (B, T / tp, D) with `sequence_parallel`, otherwise (B, T, D). With `shard_logits`,
    logits are a DTensor that is sharded along the vocabulary. Otherwise each rank has all logits as a local tensor.
    """
    # DTensor's from_local and to_local return views. FSDP warns that it loses its hook if a view is changed in place,
    # but neither the blocks nor the loss change their inputs in place.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor")
    hidden_placement = Shard(1) if sequence_parallel else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence_parallel else Replicated()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": VocabParallelEmbedding(hidden_placement),
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=hidden_placement,
            output_layouts=Shard(-1) if shard_logits else Replicate(),
            use_local_output=not shard_logits,
        ),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(hidden_placement, None), desired_input_layouts=(Replicate(), None)
        ),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(hidden_placement,), desired_input_layouts=(Replicate(),)
        ),
    }
    for name, spec in _get_specs(part.config, "").items():
        if spec.is_matrix:
            style = ColwiseParallel() if spec.tp_dim == 0 else RowwiseParallel(output_layouts=hidden_placement)
            plan[f"model.layers.*.{name.removesuffix('.weight')}"] = style
    if part.config.qk_norm:  # Each rank normalizes its share of the heads, which are dimension 1 of (B, H, T, K).
        head_norm = SequenceParallel(sequence_dim=1, use_local_output=True)
        plan |= {f"model.layers.*.self_attn.{name}": head_norm for name in ("q_norm", "k_norm")}
    optional_modules = {
        "model.embed_tokens": part.model.embed_tokens,
        "model.norm": part.model.norm,
        "lm_head": part.lm_head,
    }
    missing_modules = {name for name, module in optional_modules.items() if module is None}
    parallelize_module(part, mesh, {name: style for name, style in plan.items() if name not in missing_modules})
    norms = [norm for block in part.model.blocks for norm in (block.input_layernorm, block.post_attention_layernorm)]
    if part.model.norm is not None:
        norms.append(part.model.norm)
    for module in norms:
        module.register_forward_hook(_cast_to_autocast_dtype)
    if sequence_parallel and part.model.embed_tokens is None:
        part.model.sequence_shards = mesh.size()
    part.tie_weights()  # parallelize_module has replaced the parameters, which separates tied parameters


def _cast_to_autocast_dtype(_: nn.Module, __: object, output: Tensor) -> Tensor:
    """Cast a norm's output to the dtype of the matrix products that follow.

    Autocast would cast the output later anyway. Casting it before communication halves the bytes that the all-gather of
    the output and the reduce-scatter of its gradient transfer.
    """
    device_type = output.device.type
    return output.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else output
