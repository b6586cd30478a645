"""Positions in attention: rotary tables, and what samples of several documents have in their place.

Rotary positions: Su et al., arXiv 2104.09864; shapes as in pipeline/model/decoder.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.config.sections import ModelConfig, RopeScaling


class RotaryEmbedding(nn.Module):
    """Tables of rotary positions, for all positions up to `sequence_length`; never trained, never saved."""

    cos_TK: Tensor
    sin_TK: Tensor
    mask_B1TT = None
    """Each position sees all before it."""

    def __init__(self, config: ModelConfig, sequence_length: int) -> None:
        super().__init__()
        self.theta, self.scaling = config.rope_theta, config.rope_scaling
        shape = (sequence_length, config.head_size)
        self.register_buffer("cos_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin_TK", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Fill the tables: fp32, computed on the CPU so that every device has the same bits.

        Angle of position t and pair i: t * theta^(-2i/K), i < K/2, written twice (arXiv 2104.09864, section 3.2.2;
        the two halves as in transformers' `rotate_half`). Stretched positions turn by `_stretched` frequencies.
        """
        length, width = self.cos_TK.shape
        pairs = torch.arange(0, width, 2, dtype=torch.float32, device="cpu")
        positions = torch.arange(length, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / self.theta ** (pairs / width)
        if self.scaling is not None:
            frequencies = _stretched(frequencies, self.scaling)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        self.cos_TK.copy_(angles.cos())
        self.sin_TK.copy_(angles.sin())

    def forward(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """Turn each head's vectors by their positions, from `start`; computed in fp32, returned in the input's type."""
        at = slice(start, start + x_BHTK.shape[2])
        return _turned(x_BHTK, self.cos_TK[at], self.sin_TK[at])


class PackedRotaryEmbedding:
    """In the place of :class:`Rotary` for samples of several documents: positions that start again, and who sees whom.

    A class that torch does not look into: FSDP2 would round tables among a block's inputs to bf16. SDPA with a mask,
    not flex attention: that one trains on GPUs only, and compiled.
    """

    def __init__(self, rotary: RotaryEmbedding, starts_BT: Tensor) -> None:
        """starts_BT: bool, where a document begins; the first input of a sample begins one in any case."""
        places_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
        first_BT = torch.where(starts_BT, places_T, 0).cummax(dim=1).values  # of the own document
        positions_BT = places_T - first_BT
        self.cos_B1TK, self.sin_B1TK = (table[positions_BT].unsqueeze(1) for table in (rotary.cos_TK, rotary.sin_TK))
        same_BTT = first_BT.unsqueeze(2) == first_BT.unsqueeze(1)
        self.mask_B1TT = (same_BTT & (places_T.unsqueeze(1) >= places_T)).unsqueeze(1)

    def __call__(self, x_BHTK: Tensor, start: int = 0) -> Tensor:
        """As `Rotary` does; a text that is continued is one document, so `start` is 0."""
        return _turned(x_BHTK, self.cos_B1TK, self.sin_B1TK)


def _turned(x_BHTK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x_BHTK.chunk(2, dim=-1)
    return (x_BHTK * cos + torch.cat((-right, left), dim=-1) * sin).to(x_BHTK.dtype)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies (fp32, in radians a position) as `scaling` asks for.

    `linear`: Chen et al., arXiv 2306.15595. `llama3`: `_compute_llama3_parameters` in transformers'
    modeling_rope_utils.py: divided by the factor where they turn less than `low_freq_factor` times in the original
    length, as they are beyond `high_freq_factor` times, in between a mixture of the two.
    """
    divided = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return divided
    low, high = scaling.low_freq_factor or 0.0, scaling.high_freq_factor or 0.0
    turns = (scaling.original_max_position_embeddings or 0) * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * divided + kept * frequencies
