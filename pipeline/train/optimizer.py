"""Optimizers, the loss scaler, gradient norms and frozen parameters.

The trainer calls :func:`set_learning_rate` before each step. The learning rate is a pure function of (config, step,
steps), so it is not saved, and a resumed run uses the same rates.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline.base.errors import UserError
from pipeline.config.sections import ModelConfig, OptimizerConfig
from pipeline.config.types import INT8_BLOCK, StateConfig
from pipeline.model.decoder import Decoder, full_tensor, local_tensor, select_local_part, write_parameter
from pipeline.model.task import Task

_CHUNK_SIZE = 1 << 24
"""Entries that are updated together. Without torch.compile each needs about 40 bytes of temporary memory."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weights and moments of low precision.

    Weights are fp32 or bf16; moments are fp32, bf16 or int8, as `zero_moments` creates them.

    Args:
        groups: parameter groups.
        config: the section `optimizer`.
        keys: seeds the stochastic rounding of each parameter.
        compiled: whether torch.compile fuses the operations.
    """

    def __init__(
        self, groups: list[dict[str, Any]], config: OptimizerConfig, keys: Mapping[nn.Parameter, int], compiled: bool
    ) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})
        self.keys = keys
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True) if compiled else _update
        self._chunk_size = 1 << 62 if compiled else _CHUNK_SIZE
        self._positions: dict[nn.Parameter, list[Tensor]] = {}
        self.gradient_factor = torch.ones(())
        """Gradients are multiplied by this in the update."""

    def clip_with_norm(self, limit: float, norm: Tensor) -> None:
        """Clip gradients in the next step, as `clip_grads_with_norm_` does, but without rounding them to bf16."""
        self.gradient_factor = (limit / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        constants: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                state["step"] += 1
                parts = [parameter, parameter.grad, *(state[key] for key in state if key != "step")]
                local_parts = [torch.atleast_1d(local_tensor(tensor)) for tensor in parts]
                step = int(state["step"])
                device = local_parts[0].device
                key = (step, group["weight_decay"], device)
                if key not in constants:
                    coefficients = _make_coefficients(group, step).to(device, non_blocking=True)
                    coefficients[0] = self.gradient_factor
                    constants[key] = (coefficients, _make_step_keys(step).to(device, non_blocking=True))
                if parameter not in self._positions:
                    self._positions[parameter] = _make_positions(parameter, self.keys[parameter])
                row_positions, *column_positions = self._positions[parameter]
                rows = max(1, self._chunk_size // max(1, local_parts[0][:1].numel()))
                for chunk in zip(*(tensor.split(rows) for tensor in (row_positions, *local_parts)), strict=True):
                    self._update(*constants[key], column_positions, *chunk)


def _make_coefficients(group: Mapping[str, Any], step: int) -> Tensor:
    """Return the coefficients of an update; the first is the factor of the gradient.

    They are a tensor, because torch.compile would compile numbers into the code.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    decay = 1 - lr * group["weight_decay"]
    rate = lr / (1 - beta1**step)
    return torch.tensor([1.0, 1 - beta1, 1 - beta2, decay, rate, 1 / math.sqrt(1 - beta2**step), group["eps"]])


def zero_moments(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return both moments before the first step, sharded like `parameter`; for int8 also their scales.

    Vectors have fp32 moments instead of int8. Raises UserError as `_zero_scales` does.
    """
    names = ("exp_avg", "exp_avg_sq")
    is_int8 = dtype == torch.int8 and parameter.ndim >= 2
    if dtype == torch.int8 and not is_int8:
        dtype = torch.float32
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
    return state | ({f"{name}_scale": _zero_scales(parameter) for name in names} if is_int8 else {})


def _zero_scales(parameter: Tensor) -> Tensor:
    """Return a scale for each block of `INT8_BLOCK` entries of a row: fp32. A row is all dimensions except the first.

    Raises UserError, on all ranks, if the layout splits a block.
    """
    rows = local_tensor(parameter).flatten(1)
    scales = rows.new_zeros(len(rows), -(-rows.shape[1] // INT8_BLOCK), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    mesh = parameter.device_mesh
    placements = parameter.placements
    for size, placement in zip(mesh.shape, placements, strict=True):
        splits_rows = getattr(placement, "dim", 0) > 0
        if splits_rows and (parameter.ndim > 2 or -(-parameter.shape[1] // size) % INT8_BLOCK):
            raise UserError(
                "parallel.split_int8_block",
                f"optimizer.state.moments int8: {INT8_BLOCK} entries of a row share a scale; rows of a parameter of "
                f"shape {tuple(parameter.shape)} are split elsewhere over {size} ranks. Use bf16, or another layout",
            )
    shape = torch.Size((len(parameter), -(-math.prod(parameter.shape[1:]) // INT8_BLOCK)))
    sharded = DTensor.from_local(scales, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    return sharded.to(parameter.device)  # with `offload` the parameter is not on the mesh's device


def _update(
    coefficients: Tensor,
    step_keys: Tensor,
    column_positions: list[Tensor],
    row_positions: Tensor,
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    *scales: Tensor,
) -> None:
    """Update a chunk of weights and both moments in place.

    Args:
        coefficients: of `_make_coefficients`.
        step_keys: of `_make_step_keys`.
        column_positions: with `row_positions` they add up to the position of each entry, which seeds its rounding.
        row_positions: the positions along the first dimension.
        weight: the weights.
        gradient: their gradients.
        first: first moments.
        second: second moments.
        scales: those of both moments if they are int8.
    """
    factor, new1, new2, decay, rate, root, eps = coefficients.unbind()
    gradient = gradient.float() * factor
    mean = first.float()
    square = second.float()
    if scales:
        mean = mean * mean.abs() * _expand_scales(scales[0], mean)
        square = ((square + 128).square() * _expand_scales(scales[1], square)).square()
    mean = mean + new1 * (gradient - mean)
    square = square + new2 * (gradient * gradient - square)
    new_weight = weight.float() * decay - rate * mean / (square.sqrt() * root + eps)
    position_hash = _hash_int32(sum(column_positions, row_positions))
    random = [_hash_int32(position_hash ^ key) for key in step_keys.unbind()]
    if scales:
        mean = _quantize(mean, random[1], 127, scales[0])
        deviation = square.sqrt()
        square = torch.maximum(_quantize(deviation, random[2], 255, scales[1]), (deviation > 0).float()) - 128
    for target, values, bits in zip((weight, first, second), (new_weight, mean, square), random, strict=True):
        target.copy_(_round_to_bf16(values, bits) if target.dtype == torch.bfloat16 else values)


def _quantize(values: Tensor, random: Tensor, levels: int, scale: Tensor) -> Tensor:
    """Return quadratic levels from -levels to levels for fp32 `values`; a value is level² · scale, with its sign.

    Rounding is stochastic: the upper one of two levels is chosen with the probability that preserves the mean.

    Args:
        values: fp32.
        random: uniform int32.
        levels: the largest level.
        scale: receives the scale of each block.
    """
    rows = values.flatten(1)
    blocks = F.pad(rows, (0, -rows.shape[1] % INT8_BLOCK)).unflatten(1, (scale.shape[1], INT8_BLOCK))
    scale.copy_(blocks.abs().amax(dim=2) / levels**2)
    squares = values.abs() / _expand_scales(scale, values).clamp(min=1e-38)
    lower = squares.sqrt().floor()
    chance = (random & 0xFFFFFF).float() / 2**24
    upper = chance * (2 * lower + 1) < squares - lower * lower
    return values.sign() * (lower + upper).clamp(max=levels)


def _expand_scales(scale: Tensor, values: Tensor) -> Tensor:
    """Return the scale of its block for each of `values`."""
    scale_by_entry = scale.unsqueeze(2).expand(-1, -1, INT8_BLOCK).flatten(1)
    return scale_by_entry[:, : values[:1].numel()].reshape(values.shape)


def _round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `values` to bf16 stochastically: up with the probability that preserves the mean.

    random: uniform int32.
    """
    return ((values.view(torch.int32) + (random & 0xFFFF)) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _hash_int32(x: Tensor) -> Tensor:
    """Hash int32 numbers with the finalizer of MurmurHash3 (Appleby, public domain); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _make_step_keys(step: int) -> Tensor:
    """Return the keys of this step's random numbers for the weights and each moment: int32, shape (3,)."""
    digest = hashlib.sha256(f"rounding of step {step}".encode()).digest()
    return torch.frombuffer(bytearray(digest[:12]), dtype=torch.int32)


def _make_positions(parameter: Tensor, key: int) -> list[Tensor]:
    """Return int32 tensors, one per dimension of this rank's shard, that broadcast to a number for each entry.

    The sum is the position of the entry in the whole parameter plus `key`, so it does not depend on the layout.
    """
    positions = []
    for dim, size in enumerate(parameter.shape):
        line = torch.arange(size, dtype=torch.int32, device=local_tensor(parameter).device)
        line = line * (math.prod(parameter.shape[dim + 1 :]) % 2**31)
        if dim == 0:
            line = line + (key % 2**31)
        shape = [1] * parameter.ndim
        shape[dim] = size
        position = line.view(shape).expand(parameter.shape)
        position = select_local_part(position, parameter) if isinstance(parameter, DTensor) else position
        for other in set(range(parameter.ndim)) - {dim}:
            position = position.narrow(other, 0, min(1, position.shape[other]))
        positions.append(position)
    return positions or [torch.tensor([key % 2**31], dtype=torch.int32, device=parameter.device)]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `optimizer.name` can select."""

    make: Callable[[list[dict[str, Any]], OptimizerConfig, bool | None], torch.optim.Optimizer]
    """Creates it from parameter groups, the config and whether to use torch's fused kernel (None: it has none)."""
    moments: tuple[str, ...]
    """Names of the state tensors with the shape of the parameter. They are zero before the first step."""
    counts: bool = True
    """Whether it counts each parameter's steps, as `step`."""
    fuses: bool = True
    """Whether to use torch's fused kernel if there is one. It counts steps on the device."""
    make_moments: Callable[[Tensor], dict[str, Tensor]] | None = None
    """Creates the state of a parameter; None: `moments`, with the parameter's type."""


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool | None) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """torch's SGD: buffer = momentum × buffer + gradient. Its fused kernel does not support DTensors."""
    momentum = 0.9 if config.momentum is None else config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum)


class _Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., kellerjordan.github.io/posts/muon), which orthogonalizes whole matrices.

    If a matrix is sharded (ZeRO, tensor parallel), all ranks gather it, compute the same update and keep their parts.
    The result is that of one process. Memory: one whole matrix at a time, with its gradient and momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        groups = self.param_groups
        key = "momentum_buffer"
        for group in groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                matrix = nn.Parameter(full_tensor(parameter.detach()))  # shares the memory if it is not sharded
                matrix.grad = full_tensor(parameter.grad)
                self.state[matrix] = {key: full_tensor(self.state[parameter][key])}
                self.param_groups = [{**group, "params": [matrix]}]
                super().step()  # type: ignore[no-untyped-call]
                write_parameter(matrix, parameter)
                write_parameter(self.state.pop(matrix)[key], self.state[parameter][key])
        self.param_groups = groups


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """Muon with updates scaled to the size of AdamW's, so both use one learning rate (Liu et al., arXiv 2502.16982)."""
    momentum = 0.95 if config.momentum is None else config.momentum
    return _Muon(groups, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")


class _CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Perform one step of each optimizer."""
        for part in self.parts:
            part.step()


OPTIMIZERS = {
    "adamw": OptimizerKind(_adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": OptimizerKind(_sgd, ("momentum_buffer",), counts=False),
    "muon": OptimizerKind(_muon, ("momentum_buffer",), counts=False),
}


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    keys: Mapping[nn.Parameter, int] | None = None,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    """Create the optimizer of `model`'s trained parameters, with its state before the first step.

    Args:
        model: its parameters are optimized.
        config: the section `optimizer`.
        device: where the update runs.
        blocks: decoder blocks. Muon optimizes only their matrices, AdamW all other parameters.
        keys: seeds of stochastic rounding, which `config.state` may request.
        compiled: whether to compile the update then.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.state != StateConfig():
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[config.state.moments]
        kind = OptimizerKind(lambda groups, config, _: LeanAdamW(groups, config, keys or {}, compiled), (), fuses=False)
        return _create_optimizer(
            replace(kind, make_moments=partial(zero_moments, dtype=dtype)), parameters, config, device
        )
    if config.name != "muon":
        return _create_optimizer(OPTIMIZERS[config.name], parameters, config, device)
    matrices = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    shares = {"muon": [p for p in parameters if id(p) in matrices]}
    shares["adamw"] = [p for p in parameters if id(p) not in matrices]
    return _CombinedOptimizer(
        [_create_optimizer(OPTIMIZERS[name], share, config, device) for name, share in shares.items()]
    )


def _create_optimizer(
    kind: OptimizerKind, parameters: Sequence[nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Create one optimizer of these parameters.

    Parameters of two or more dimensions (matrices and embeddings) decay by `config.weight_decay`; vectors (norms) do
    not. The fused kernel is used if torch has it for the device type. The state is created at once, so that a
    checkpoint can be loaded into it.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = True if kind.fuses and device.type in ("cpu", "cuda") else None
    optimizer = kind.make(groups, config, fused)
    for parameter in parameters:
        state = (
            kind.make_moments(parameter)
            if kind.make_moments
            else {key: torch.zeros_like(parameter) for key in kind.moments}
        )
        if kind.counts:
            state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"), **state}
        optimizer.state[parameter] = state
    return optimizer


def make_custom_optimizer(
    make: Callable[..., Any], named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer that `make`, a function of the user's module, creates.

    Raises UserError if it is not a torch.optim.Optimizer over all trained parameters.
    """
    optimizer: torch.optim.Optimizer = make(
        [(name, parameter) for name, parameter in named if parameter.requires_grad], config
    )
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    if missing := [name for name, parameter in named if parameter.requires_grad and id(parameter) not in taken]:
        raise UserError(
            "model.incomplete_optimizer",
            "optimizer of model.target must return a torch.optim.Optimizer over all parameters that it is given; "
            f"{missing[0]} is in none of its groups",
        )
    for group in groups:
        group["lr_factor"] = group["lr"] / config.lr
    return optimizer


def _get_group_options(group: dict[str, Any]) -> dict[str, str]:
    """Return the options of a parameter group, except the learning rate, which is set before each step."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr", "lr_factor")}


@torch.no_grad()
def initialize_custom_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of a custom optimizer by one step with zero gradients, so that a checkpoint can be loaded.

    The weights are restored afterwards; the state has arbitrary values.

    Raises:
        UserError: if a checkpoint cannot save the state, because it is not a tensor or is in a parameter group, or if
            the optimizer needs a closure.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    settings = [_get_group_options(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except TypeError as error:
        message = f"optimizer of model.target must perform a step without a closure: {error}"
        raise UserError("model.optimizer_needs_closure", message) from None
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        if changed := [key for key, value in _get_group_options(group).items() if values.get(key) != value]:
            raise UserError(
                "model.optimizer_state",
                f"optimizer of model.target changes an option of its groups ({changed[0]}), which checkpoints do not "
                "save: after a restart it would not continue as before. Keep a tensor in its state for each parameter",
            )
    optimizer.zero_grad(set_to_none=True)
    for parameter, values in zip(parameters, before, strict=True):
        parameter.copy_(values)
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                message = (
                    f"optimizer of model.target has the state {key}, which is not a tensor: checkpoints cannot save it"
                )
                raise UserError("model.optimizer_state", message)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the optimizer's next step. Groups of a custom optimizer keep their proportions.

    Raises UserError if `lr`, which a custom schedule may compute, is not a finite number.
    """
    if not isinstance(lr, int | float) or not math.isfinite(lr):
        message = f"learning_rate of model.target must return a finite number; it returned {lr!r}"
        raise UserError("model.invalid_learning_rate", message)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


class LossScaler:
    """Scale of the loss in fp16, so that small gradients do not vanish (Micikevicius et al., arXiv 1710.03740, 3.2).

    A step whose gradient is not finite is skipped and halves the scale; `INTERVAL` good steps in a row double it. If
    the scale is 1 or less, scaling did not cause the overflow, and the bad-step guard checks the step.

    The constants are those of torch.amp.GradScaler. That class checks only the gradients of its process, so ranks
    of a pipeline or a tensor parallel group could decide differently. Here the norm of the whole model's gradient
    decides, which is the same on all ranks and is needed for clipping in any case.
    """

    INTERVAL = 2000

    def __init__(self) -> None:
        self.scale = 2.0**16
        self._good_steps = 0

    def update_scale(self, norm: float) -> bool:
        """Return whether `norm` is finite, and set the scale of the next step."""
        is_finite = math.isfinite(norm)
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self._good_steps == self.INTERVAL:
            self.scale *= 2
            self._good_steps = 0
        return is_finite

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint saves."""
        return {"scale": self.scale, "good": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good"])


_CHUNK_ENTRIES = 2**15
"""Number of entries whose squares are summed sequentially."""


def compute_total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm of all `gradients` together: fp32, 0-d.

    On CPUs torch sums squares sequentially in fp32: the norm of 2²⁷ entries would be 1.4 % too small. Large tensors are
    therefore split into chunks, which is accurate to 1e-7.
    """
    if any(gradient.device.type == "cpu" for gradient in gradients):
        gradients = [chunk for gradient in gradients for chunk in gradient.flatten().split(_CHUNK_ENTRIES)]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # torch would round each tensor's norm to its type
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def find_frozen_names(patterns: Sequence[str], task: Task) -> set[str]:
    """Return the names of the whole model's frozen parameters, also of those that other ranks have.

    Raises UserError as `_match_patterns` does.
    """
    if not patterns:
        return set()
    all_layers = range(task.config.model.layers)
    return _match_patterns(patterns, [name for name, _ in task.named_weights(task.build(all_layers))])


def check_freeze(patterns: str, model: str) -> None:
    """Raise UserError if `patterns` do not fit the decoder of the section `model`. Both are JSON."""
    with torch.device("meta"):
        decoder = Decoder(ModelConfig.model_validate_json(model), 1, 1)
    _match_patterns(json.loads(patterns), [name for name, _ in decoder.named_weights()])


def _match_patterns(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that match. Raise UserError if a pattern matches none, or if all names match."""
    frozen: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            existing = shorten(", ".join(names), 300, placeholder=" …")
            message = f"optimizer.freeze: {pattern!r} matches no parameter; the parameters are {existing}"
            raise UserError("model.no_such_parameter", message)
        frozen.update(matched)
    if frozen == set(names):
        message = "optimizer.freeze: the patterns match all parameters, so that nothing would be trained: remove some"
        raise UserError("model.all_frozen", message)
    return frozen
