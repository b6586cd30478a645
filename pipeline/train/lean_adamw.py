"""AdamW whose weights are kept in bf16, or its moments in bf16 or int8: 4 to 8 bytes less of each parameter.

The arithmetic is fp32, that of torch's AdamW; what is kept in bf16 is rounded up or down at random, so that on average
it is what fp32 would hold (stochastic rounding; Gupta et al., arXiv 1502.02551, section 3). Rounded to the nearest, a
weight would not move at all where an update is less than 1/512 of it.

Moments of matrices in int8 share a scale, that of the largest, in each block of 64 along a row (Dettmers et al.,
arXiv 2110.02861, section 2), and are rounded at random, too: to the nearest, small ones would never decay. A value is
the square of its level, so that levels of small ones are finer, as there: on the quickstart's gradients the embedding's
update is off by 2 % of itself then, by 8 % with even levels. Of the second moment the root is kept, whose range is the
first one's; it never becomes 0 where it was not, for updates are divided by it. Those of vectors, few and cut anywhere,
stay fp32.

What is drawn is a function of (seed, parameter's name, place in the whole parameter, step): neither a stop nor another
layout changes it, and it needs no generator's state in a checkpoint. torch's fused AdamW wants one type for all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.base.errors import UserError
from pipeline.config.sections import OptimizerConfig
from pipeline.config.types import INT8_BLOCK
from pipeline.model.decoder import local_tensor, select_local_part

_AT_ONCE = 1 << 24
"""Entries that are updated together: each takes some 40 bytes meanwhile. Compiled, it takes none."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) on fp32 or bf16, with moments as `zero_moments` makes them."""

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
                parts = [parameter, parameter.grad, *(state[key] for key in state if key != "step")]
                held = [torch.atleast_1d(local_tensor(tensor)) for tensor in parts]
                now = int(state["step"]), group["weight_decay"], held[0].device
                if now not in made:
                    numbers = _numbers(group, now[0]).to(now[2], non_blocking=True)
                    numbers[0] = self.factor
                    made[now] = numbers, _step_keys(now[0]).to(now[2], non_blocking=True)
                if parameter not in self._places:
                    self._places[parameter] = _places(parameter, self.keys[parameter])
                first, *rest = self._places[parameter]
                rows = max(1, self._at_once // max(1, held[0][:1].numel()))
                for pieces in zip(*(tensor.split(rows) for tensor in (first, *held)), strict=True):
                    self._update(*made[now], rest, *pieces)


def _numbers(group: Mapping[str, Any], step: int) -> Tensor:
    """What an update multiplies with, the gradient's factor first: a tensor, since numbers would be compiled in."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    kept, rate = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
    return torch.tensor([1.0, 1 - beta1, 1 - beta2, kept, rate, 1 / math.sqrt(1 - beta2**step), group["eps"]])


def zero_moments(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Both moments before the first step, on the ranks and in the shape of `parameter`; with int8 their scales, too.

    Raises UserError as `_zero_scales` does.
    """
    names, low = ("exp_avg", "exp_avg_sq"), dtype == torch.int8
    if low and parameter.ndim < 2:
        dtype, low = torch.float32, False
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
    return state | ({f"{name}_scale": _zero_scales(parameter) for name in names} if low else {})


def _zero_scales(parameter: Tensor) -> Tensor:
    """One for each block of a row, that is of all dimensions but the first: fp32.

    Raises UserError, on all ranks, where a block would lie on two of them.
    """
    rows = local_tensor(parameter).flatten(1)
    scales = rows.new_zeros(len(rows), -(-rows.shape[1] // INT8_BLOCK), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    mesh, placements = parameter.device_mesh, parameter.placements
    for size, placement in zip(mesh.shape, placements, strict=True):
        in_rows = getattr(placement, "dim", 0) > 0
        if in_rows and (parameter.ndim > 2 or -(-parameter.shape[1] // size) % INT8_BLOCK):
            raise UserError(
                f"optimizer.state.moments int8: {INT8_BLOCK} entries of a row share a scale; rows of a parameter of "
                f"shape {tuple(parameter.shape)} are cut elsewhere over {size} ranks: take bf16, or cut otherwise"
            )
    whole = torch.Size((len(parameter), -(-math.prod(parameter.shape[1:]) // INT8_BLOCK)))
    made = DTensor.from_local(scales, mesh, placements, run_check=False, shape=whole, stride=(whole[1], 1))
    return made.to(parameter.device)  # with `offload` not the mesh's


def _update(
    numbers: Tensor,
    step_keys: Tensor,
    columns: list[Tensor],
    rows: Tensor,
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *scales: Tensor,
) -> None:
    """Update weights and both moments in place; int32 `rows` and `columns` add up to each entry's place."""
    factor, new1, new2, kept, rate, root, eps = numbers.unbind()
    gradient, mean, square = gradient.float() * factor, first.float(), second.float()
    if scales:
        mean = mean * mean.abs() * _spread(scales[0], mean)
        square = ((square + 128).square() * _spread(scales[1], square)).square()
    mean = mean + new1 * (gradient - mean)
    square = square + new2 * (gradient * gradient - square)
    moved = weight.float() * kept - rate * mean / (square.sqrt() * root + eps)
    place = _mix(sum(columns, rows))
    draws = [_mix(place ^ key) for key in step_keys.unbind()]
    if scales:
        mean = _in_levels(mean, draws[1], 127, scales[0])
        deviation = square.sqrt()
        square = torch.maximum(_in_levels(deviation, draws[2], 255, scales[1]), (deviation > 0).float()) - 128
    for kept_in, values, draw in zip((weight, first, second), (moved, mean, square), draws, strict=True):
        kept_in.copy_(rounded(values, draw) if kept_in.dtype == torch.bfloat16 else values)


def _in_levels(values: Tensor, random: Tensor, levels: int, scale: Tensor) -> Tensor:
    """Levels, -levels to levels, of fp32 `values`; `scale` becomes what their squares are multiplied with.

    Of the two levels around a value the upper one is taken with the probability that keeps the mean.
    """
    rows = values.flatten(1)
    blocks = F.pad(rows, (0, -rows.shape[1] % INT8_BLOCK)).unflatten(1, (scale.shape[1], INT8_BLOCK))
    scale.copy_(blocks.abs().amax(dim=2) / levels**2)
    squares = values.abs() / _spread(scale, values).clamp(min=1e-38)
    lower = squares.sqrt().floor()
    chance = (random & 0xFFFFFF).float() / 2**24
    upper = chance * (2 * lower + 1) < squares - lower * lower
    return values.sign() * (lower + upper).clamp(max=levels)


def _spread(scale: Tensor, values: Tensor) -> Tensor:
    """Each block's scale for each of its values."""
    long = scale.unsqueeze(2).expand(-1, -1, INT8_BLOCK).flatten(1)
    return long[:, : values[:1].numel()].reshape(values.shape)


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
        line = torch.arange(size, dtype=torch.int32, device=local_tensor(parameter).device)
        line = line * (math.prod(parameter.shape[dim + 1 :]) % 2**31)
        if dim == 0:
            line = line + (key % 2**31)
        shape = [1] * parameter.ndim
        shape[dim] = size
        held = line.view(shape).expand(parameter.shape)
        held = select_local_part(held, parameter) if isinstance(parameter, DTensor) else held
        for other in set(range(parameter.ndim)) - {dim}:
            held = held.narrow(other, 0, min(1, held.shape[other]))
        found.append(held)
    return found or [torch.tensor([key % 2**31], dtype=torch.int32, device=parameter.device)]
