"""A plain Llama-style decoder, for benchmarks that compare Sluice with a handwritten training loop.

It shares no code with pipeline/model, so that a comparison shows if the kernels of pipeline/model are slower. Names of
tensors end with their shape: B sequences, T tokens, D model width, H heads, K head width, V vocabulary size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864).

    `cos_TK` and `sin_TK` have the shape (T, K / 2): one angle for each value of the first half of K and the value at
    the same place in the second half.
    """
    first, second = x_BHTK.chunk(2, dim=-1)
    return torch.cat((first * cos_TK - second * sin_TK, second * cos_TK + first * sin_TK), dim=-1)


class PlainAttention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        batch, length, dim = x_BTD.shape
        q_BHTK = self.wq(x_BTD).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k_BHTK = self.wk(x_BTD).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v_BHTK = self.wv(x_BTD).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q_BHTK = rotate(q_BHTK, cos_TK, sin_TK)
        k_BHTK = rotate(k_BHTK, cos_TK, sin_TK)
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, enable_gqa=True)
        return self.wo(out_BHTK.transpose(1, 2).reshape(batch, length, dim))


class PlainBlock(nn.Module):
    """Attention and SwiGLU, each after an RMSNorm and with a residual connection."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = PlainAttention(dim, heads, kv_heads)
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos_TK, sin_TK)
        h_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.w2(F.silu(self.w1(h_BTD)) * self.w3(h_BTD))


class PlainDecoder(nn.Module):
    """A decoder that maps int64 `tokens_BT` to `logits_BTV`. Embedding and output layer are separate parameters."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(
        self, vocab: int, length: int, *, dim: int, layers: int, heads: int, kv_heads: int, ffn: int, theta: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(PlainBlock(dim, heads, kv_heads, ffn) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab, bias=False)
        width = dim // heads
        frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), frequencies)
        self.register_buffer("cos_TK", angles.cos(), persistent=False)
        self.register_buffer("sin_TK", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        length = tokens_BT.shape[1]
        for block in self.blocks:
            x_BTD = block(x_BTD, self.cos_TK[:length], self.sin_TK[:length])
        return self.output(self.norm(x_BTD))
