"""A custom model on samples of different lengths: it predicts the running sum of a series by a causal convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from pipeline.parallel.tensor_parallel import Replicated

ARRAYS = ("series", "lengths")
INPUTS = ("series",)
PADDED = ("series",)
CUTS = True


class CausalConvolution(nn.Module):
    """Convolve the series and its times, then project to one value per position. Either layer may be absent."""

    times: Tensor

    def __init__(self, width: int, has_first: bool, has_last: bool) -> None:
        super().__init__()
        self.first = self.last = None
        if has_first:
            self.first = nn.Conv1d(2, width, 3, padding=2)
        if has_last:
            self.last = nn.Linear(width, 1)
        self.register_buffer("times", torch.empty(64), persistent=False)

    def reset_buffers(self) -> None:
        self.times.copy_(torch.linspace(0, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        if self.first is not None:
            length = x.shape[1]
            x = torch.stack([x, self.times[:length].expand_as(x)], dim=1)
            x = torch.tanh(self.first(x)[..., :length]).transpose(1, 2)
        return x if self.last is None else self.last(x)[..., 0]


def build(options: dict[str, Any], layers: range) -> nn.Module:
    return CausalConvolution(options["width"], layers.start == 0, layers.stop == options["layers"])


def tensor_plan(options: dict[str, Any]) -> dict[str, ParallelStyle]:
    return {"first": Replicated(), "last": Replicated()}


def init(name: str, values: Tensor, options: dict[str, Any]) -> None:
    values.normal_(0.0, 0.3)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    is_in_series = torch.arange(outputs.shape[1]) < batch["lengths"][:, None]
    return (outputs - batch["series"].cumsum(1)).square().masked_fill(~is_in_series, 0.0).sum()
