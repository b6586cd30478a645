"""Tensors that stay on the CPU although they are arguments of a model on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HostTensor:
    """A tensor that stays on the CPU. DDP and FSDP move the tensors among the arguments of a model to its device."""

    tensor: Tensor
