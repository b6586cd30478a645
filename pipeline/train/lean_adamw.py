"""AdamW whose weights, or moments, are kept in bf16: 4 to 8 bytes less of each parameter.

The arithmetic is fp32, that of torch's AdamW; what is kept in bf16 is rounded up or down at random, so that on average
it is what fp32 would hold (stochastic rounding; Gupta et al., arXiv 1502.02551, section 3). Rounded to the nearest, a
weight would not move at all where an update is less than 1/512 of it.

What is drawn is a function of (seed, parameter's name, place in the whole parameter, step): neither a stop nor another
layout changes it, and it needs no generator's state in a checkpoint. torch's fused AdamW wants one type for all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.config.sections import OptimizerConfig
from pipeline.model.decoder import local, own_part

_AT_ONCE = 1 << 24
"""Entries that are updated together: each takes some 40 bytes meanwhile. Compiled, it takes none."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on parameters and moments of fp32 or bf16."""

    def __init__(
        self, groups: list[dict[str, Any]], config: OptimizerConfig, keys: Mapping[nn.Parameter, int], compiled: bool
    ) -> None:
        """`keys`: what seeds the rounding of each parameter; `compiled`: whether torch.compile joins the operations."""
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})
        self.keys = keys
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True) if compiled else _update
        self._at_once = 1 << 62 if compiled else _AT_ONCE
        self._places: dict[nn.Parameter, list[Tensor]] = {}
        self.factor = torch.ones(())
        """What gradients are multiplied with, in the update."""

    def clip_with_norm(self, limit: float, norm: Tensor) -> None:
        """What torch's `clip_grads_with_norm_` does, in the next step: no pass of its own, and no rounding to bf16."""
        self.factor = (limit / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every parameter with a gradient."""
        made: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                state["step"] += 1
                parts = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
                held = [torch.atleast_1d(local(tensor)) for tensor in parts]
                now = int(state["step"]), group["weight_decay"], held[0].device
                if now not in made:
                    numbers = _numbers(group, now[0]).to(now[2], non_blocking=True)
                    numbers[0] = self.factor
                    made[now] = numbers, _step_keys(now[0]).to(now[2], non_blocking=True)
                if parameter not in self._places:
                    self._places[parameter] = _places(parameter, self.keys[parameter])
                first, *rest = self._places[parameter]
                rows = max(1, self._at_once // max(1, held[0][:1].numel()))
                for pieces in zip(*(tensor.split(rows) for tensor in (*held, first)), strict=True):
                    self._update(*pieces, rest, *made[now])


def _numbers(group: Mapping[str, Any], step: int) -> Tensor:
    """What an update multiplies with, the gradient's factor first: a tensor, since numbers would be compiled in."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    kept, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
    return torch.tensor([1.0, 1 - beta1, 1 - beta2, kept, rate, 1 / math.sqrt(1 - beta2**step), group["eps"]])


def _update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    rows: Tensor,
    columns: list[Tensor],
    numbers: Tensor,
    step_keys: Tensor,
) -> None:
    """Update weights and both moments in place; int32 `rows` and `columns` add up to each entry's place."""
    factor, new1, new2, kept, rate, root, eps = numbers.unbind()
    gradient, mean, square = gradient.float() * factor, first.float(), second.float()
    mean = mean + new1 * (gradient - mean)
    square = square + new2 * (gradient * gradient - square)
    moved = weight.float() * kept - rate * mean / (square.sqrt() * root + eps)
    place = _mix(sum(columns, rows))
    for kept_in, values, key in zip((weight, first, second), (moved, mean, square), step_keys.unbind(), strict=True):
        kept_in.copy_(rounded(values, _mix(place ^ key)) if kept_in.dtype == torch.bfloat16 else values)


def rounded(values: Tensor, random: Tensor) -> Tensor:
    """fp32 `values` in bf16, rounded up with the probability of what is cut off; `random`: uniform int32."""
    return ((values.view(torch.int32) + (random & 0xFFFF)) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _mix(x: Tensor) -> Tensor:
    """A hash of int32 numbers: the finalizer of MurmurHash3 (Appleby, public domain); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _step_keys(step: int) -> Tensor:
    """Three numbers that tell apart what the weights and each moment draw in this step: int32."""
    digest = hashlib.sha256(f"rounding of step {step}".encode()).digest()
    return torch.frombuffer(bytearray(digest[:12]), dtype=torch.int32)


def _places(parameter: Tensor, key: int) -> list[Tensor]:
    """Along each dimension of what this rank holds, int32: together the place of an entry in the whole, and the key."""
    found = []
    for dim, size in enumerate(parameter.shape):
        line = torch.arange(size, dtype=torch.int32, device=local(parameter).device)
        line = line * (math.prod(parameter.shape[dim + 1 :]) % 2**31)
        if dim == 0:
            line = line + (key % 2**31)
        shape = [1] * parameter.ndim
        shape[dim] = size
        held = line.view(shape).expand(parameter.shape)
        held = own_part(held, parameter) if isinstance(parameter, DTensor) else held
        for other in set(range(parameter.ndim)) - {dim}:
            held = held.narrow(other, 0, min(1, held.shape[other]))
        found.append(held)
    return found or [torch.tensor([key % 2**31], dtype=torch.int32, device=parameter.device)]
