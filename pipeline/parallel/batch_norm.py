"""Batch normalization over the samples of all data-parallel ranks.

In training, a batch-norm layer normalizes with the mean and variance of its batch. With several ranks, each rank has
only a part of the batch, so the sums are reduced over all ranks (`torch.nn.SyncBatchNorm`). The statistics are still
those of one micro-batch: `train.micro_batch` × data-parallel ranks samples.

torch's SyncBatchNorm needs a GPU. On a CPU, `HostSyncBatchNorm` computes the same with two all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.base.errors import UserError
from pipeline.config.sections import Config


class HostSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm computes, on a CPU."""

    def _check_input_dim(self, input: Tensor) -> None:
        """Raise ValueError unless the input has a batch and a channel dimension."""
        if input.ndim < 2:
            raise ValueError(f"expected an input of at least 2 dimensions, but it has the shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalize x of shape (B, C) or (B, C, …) for each channel C.

        In training, also update the running mean and variance.
        """
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float()
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1, *[1] * (x.ndim - 2)]
        count = torch.tensor(float(x.numel() // x.shape[1]))
        dist.all_reduce(count)
        if count <= 1:
            raise ValueError(f"expected more than 1 value per channel, but the input has the shape {tuple(x.shape)}")
        mean_C: Tensor = all_reduce(x.sum(dims)) / count
        centered = x - mean_C.view(shape)
        variance_C: Tensor = all_reduce(centered.square().sum(dims)) / count
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * count / (count - 1), self.momentum)
        y = centered * (variance_C + self.eps).rsqrt().view(shape)
        if self.affine:
            y = y * self.weight.float().view(shape) + self.bias.float().view(shape)
        return y.to(input.dtype)


def list_batch_norms(part: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the batch-norm layers of a model with their names."""
    return [(name, module) for name, module in part.named_modules() if isinstance(module, _BatchNorm)]


def iterate_statistics(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the running means and variances (fp32) of all batch-norm layers, with their names in the model."""
    for name, module in list_batch_norms(part):
        for key in ("running_mean", "running_var"):
            yield f"{name}.{key}", getattr(module, key)


def check_batch_norms(target: str, part: nn.Module) -> None:
    """Raise UserError if a batch-norm layer has options that Sluice does not support."""
    for name, module in list_batch_norms(part):
        if getattr(module, "momentum", None) is None or not getattr(module, "track_running_stats", False):
            raise UserError(
                "model.batch_norm_options",
                f"{target}: batch norm {name} must have a momentum and track_running_stats=True, so that evaluations "
                "have running statistics: change these options",
            )


def synchronize_batch_norms(config: Config, part: nn.Module, ranks: int, device: torch.device) -> None:
    """Replace the batch-norm layers of a model by SyncBatchNorm for this device, in place, if there are several ranks.

    Raises UserError if the config has options that change or repeat the statistics of a micro-batch.
    """
    names = [name for name, _ in list_batch_norms(part)]
    if not names:
        return
    parallel = config.parallel
    conflicts = {
        f"parallel.tensor {parallel.tensor}": parallel.tensor > 1,
        f"parallel.pipeline {parallel.pipeline}": parallel.pipeline > 1,
        "parallel.local_sgd": parallel.local_sgd is not None,
        f"parallel.activation_checkpointing {parallel.activation_checkpointing}": (
            parallel.activation_checkpointing != "none"
        ),
    }
    if keys := ", ".join(key for key, is_set in conflicts.items() if is_set):
        raise UserError(
            "config.conflict",
            f"model.target: batch norm ({names[0]}) cannot be combined with {keys}: remove these keys, or use "
            "GroupNorm",
        )
    if ranks > 1:
        _replace_batch_norms(part, HostSyncBatchNorm if device.type == "cpu" else nn.SyncBatchNorm)


def _replace_batch_norms(module: nn.Module, layer: type[_BatchNorm]) -> None:
    """Replace the batch-norm layers below `module` by layers of another type with the same parameters and buffers."""
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            options: dict[str, Any] = {"eps": child.eps, "momentum": child.momentum, "affine": child.affine}
            with torch.device("meta"):
                synchronized = layer(child.num_features, **options)
            synchronized._parameters = child._parameters
            synchronized._buffers = child._buffers
            setattr(module, name, synchronized)
        else:
            _replace_batch_norms(child, layer)
