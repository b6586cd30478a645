"""The model: a Llama-style decoder whose parameter names are those of Hugging Face's `LlamaForCausalLM`.

Each block is `x + attention(norm(x))`, then `x + mlp(norm(x))`: RMSNorm (Zhang and Sennrich, arXiv 1910.07467),
rotary positions (Su et al., arXiv 2104.09864), grouped-query attention (Ainslie et al., arXiv 2305.13245) and SwiGLU
(Shazeer, arXiv 2002.05202); no biases. Names and conventions follow transformers' Llama, so that weights move
between the two unchanged and anyone's tools can read a checkpoint.

Shapes are in the names: B sequences, T tokens, D = `dim`, H heads, K width of a head, V = `vocab_size`.

**Initial weights** are a function of (seed, parameter name, position in the parameter) and of nothing else: each
parameter is drawn on its own, on the CPU, whole, from a generator seeded by a hash of its name. Whoever builds a part
of the model, in any order, on any device, even from `meta`, gets the same numbers.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.config import ModelConfig


class Rotary(nn.Module):
    """Tables of rotary positions, for all positions up to `sequence_length`; never trained, never saved."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.theta = config.rope_theta
        shape = (sequence_length, config.head_size)
        self.register_buffer("cos_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the tables: fp32, computed on the CPU so that every device has the same bits.

        Angle of position t and pair i: t * theta^(-2i/K), i < K/2, written twice (arXiv 2104.09864, section 3.2.2;
        the two halves as in transformers' `rotate_half`).
        """
        length, width = self.cos_TK.shape
        pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, 1.0 / self.theta ** (pairs / width)).repeat(1, 2)
        self.cos_TK.copy_(angles.cos())
        self.sin_TK.copy_(angles.sin())

    def forward(self, x_BHTK: Tensor) -> Tensor:
        """Turn each head's vectors by their positions; computed in fp32, returned in the input's type."""
        length = x_BHTK.shape[2]
        left, right = x_BHTK.chunk(2, dim=-1)
        turned = x_BHTK * self.cos_TK[:length] + torch.cat((-right, left), dim=-1) * self.sin_TK[:length]
        return turned.to(x_BHTK.dtype)


class Attention(nn.Module):
    """Causal self-attention; H / G query heads share one key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.groups = config.heads // config.num_kv_heads
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(config.dim, config.num_kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(config.dim, config.num_kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(config.heads * self.head_size, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Mix each position with the ones before it."""
        q_BHTK = rotary(self._heads(self.q_proj(x_BTD)))
        k_BHTK = rotary(self._heads(self.k_proj(x_BTD)))
        v_BHTK = self._heads(self.v_proj(x_BTD))
        if self.groups > 1:
            # Repeated, not `enable_gqa`: with that, CUDA's memory-efficient kernel (the one for fp32) refuses, and
            # torch silently takes the kernel that holds all T x T scores.
            k_BHTK = k_BHTK.repeat_interleave(self.groups, dim=1)
            v_BHTK = v_BHTK.repeat_interleave(self.groups, dim=1)
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
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

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Add attention's and the MLP's output to the residual stream."""
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), rotary))
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class Backbone(nn.Module):
    """Embedding, blocks and last norm: the `model.` of the parameter names."""

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.rms_norm_eps)
        self.rotary = Rotary(config, sequence_length)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Token ids to normalised hidden states `x_BTD`."""
        x_BTD = self.embed_tokens(tokens_BT)
        for block in self.layers:
            x_BTD = block(x_BTD, self.rotary)
        return self.norm(x_BTD)


class Decoder(nn.Module):
    """The whole language model: int64 `tokens_BT` (T <= `sequence_length`) to `logits_BTV`.

    Building it draws weights of torch's own kind; :func:`init_weights` sets those that a training starts from. Under
    `torch.device("meta")` it takes no memory: then call `to_empty(device=...)` and :func:`init_weights`.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, sequence_length: int) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config, vocab_size, sequence_length)
        self.lm_head = nn.Linear(config.dim, vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Let the output layer use the embedding's parameter, if the config says so (`to_empty` parts them)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Token ids to `logits_BTV` of each next token."""
        return self.lm_head(self.model(tokens_BT))


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum over all tokens of the cross-entropy in nats: an fp32 scalar, computed in fp32.

    A sum, so that micro-batches and ranks add up; the caller divides by the global batch's tokens. Targets of -100
    (torch's `ignore_index`) count nothing.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum")


@torch.no_grad()
def init_weights(model: Decoder, seed: int, std: float) -> None:
    """Set all parameters and the rotary tables, in place, on whatever device they are.

    Norms are ones. All else is normal with mean 0 and deviation `std`; the projections that write to the residual
    stream have std / sqrt(2 * layers), since 2 * layers of them add up (Radford et al., "Language Models are
    Unsupervised Multitask Learners", 2019, section 2.3). Bits are those of torch's CPU generator, whose last digits
    may differ between kinds of processors.
    """
    model.tie_weights()
    model.model.rotary.reset()
    residual_std = std / math.sqrt(2 * model.config.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"sluice init seed {seed} parameter {name}".encode()).digest()
        generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))
        values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        scaled = name.endswith(("o_proj.weight", "down_proj.weight"))
        parameter.copy_(values.normal_(0.0, residual_std if scaled else std, generator=generator))


def num_parameters(model: nn.Module) -> int:
    """Number of trained values; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(config: ModelConfig, vocab_size: int, sequence_length: int) -> int:
    """Floating-point operations of training on one token, forward and backward: 6 N + 12 L H Q T.

    Chowdhery et al., "PaLM", arXiv 2204.02311, appendix B: L layers, H heads of width Q, T tokens of context (the
    causal mask is not deducted), nothing recomputed. N counts the parameters that multiply: all of them, save an
    embedding of its own, which is only looked up (a tied one multiplies as the output layer).
    """
    heads = 2 * (config.heads + config.num_kv_heads) * config.head_size
    block = config.dim * (heads + 3 * config.ffn_size + 2)
    parameters = config.layers * block + config.dim + vocab_size * config.dim
    return 6 * parameters + 12 * config.layers * config.heads * config.head_size * sequence_length
