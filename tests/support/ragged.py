"""A custom model for samples of different lengths.

It predicts the running sum of a series with a causal convolution. Tests use the module as the `model.target` of a run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from pipeline.parallel.tensor_parallel import Replicated

# pipeline/config/user_model.py describes these four names and the functions below.
ARRAYS = ("series", "lengths")
INPUTS = ("series",)
PADDED = ("series",)
CUTS = True


class CausalConvolution(nn.Module):
    """Convolve a series and its time steps, then project to one value per position.

    With pipeline parallelism, a rank may have only the first or only the last layer. The other one is None.

    Args:
        width: number of channels between the layers.
        has_first: create the convolution.
        has_last: create the projection.
    """

    time_steps: Tensor
    """Relative time of each position, from 0 to 1: fp32 of shape (64,). A series has at most 64 values."""

    def __init__(self, width: int, has_first: bool, has_last: bool) -> None:
        super().__init__()
        self.first_layer = self.last_layer = None
        if has_first:
            self.first_layer = nn.Conv1d(2, width, 3, padding=2)
        if has_last:
            self.last_layer = nn.Linear(width, 1)
        self.register_buffer("time_steps", torch.empty(64), persistent=False)

    def reset_buffers(self) -> None:
        self.time_steps.copy_(torch.linspace(0, 1, 64))

    def forward(self, x: Tensor) -> Tensor:
        if self.first_layer is not None:
            length = x.shape[1]
            x = torch.stack([x, self.time_steps[:length].expand_as(x)], dim=1)
            x = torch.tanh(self.first_layer(x)[..., :length]).transpose(1, 2)
        return x if self.last_layer is None else self.last_layer(x)[..., 0]


def build(options: dict[str, Any], layers: range) -> nn.Module:
    return CausalConvolution(options["width"], layers.start == 0, layers.stop == options["layers"])


def tensor_plan(options: dict[str, Any]) -> dict[str, ParallelStyle]:
    return {"first_layer": Replicated(), "last_layer": Replicated()}


def init(name: str, values: Tensor, options: dict[str, Any]) -> None:
    values.normal_(0.0, 0.3)


def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    is_in_series = torch.arange(outputs.shape[1]) < batch["lengths"][:, None]
    return (outputs - batch["series"].cumsum(1)).square().masked_fill(~is_in_series, 0.0).sum()
