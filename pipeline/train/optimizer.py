"""Optimizers, the loss scaler, gradient norms and frozen parameters.

The trainer calls :func:`set_learning_rate` before each step. The learning rate is a pure function of config, step and
number of steps. Therefore it is not saved, and a resumed run uses the same rates.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
"""Number of entries that are updated together. Without torch.compile, each needs about 40 bytes of temporary memory."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weights and moments of low precision.

    Weights are fp32 or bf16; moments are fp32, bf16 or int8, as `zero_moments` creates them.

    Args:
        groups: parameter groups.
        config: the config section `optimizer`.
        keys: the seed of the stochastic rounding of each parameter.
        compiled: whether torch.compile fuses the operations of an update.
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
        """The factor of all gradients in the next update, which clips them."""

    def clip_with_norm(self, limit: float, norm: Tensor) -> None:
        """Clip the gradients in the next step, as `clip_grads_with_norm_` does, without rounding them to bf16.

        Args:
            limit: the maximum norm of the gradient.
            norm: the norm of the full model's gradient: 0-d.
        """
        self.gradient_factor = (limit / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        constants: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["step"] += 1
                tensors = [parameter, parameter.grad, *(state[key] for key in state if key != "step")]
                local_tensors = [torch.atleast_1d(local_tensor(tensor)) for tensor in tensors]
                step = int(state["step"])
                device = local_tensors[0].device
                key = (step, group["weight_decay"], device)
                if key not in constants:
                    coefficients = _make_coefficients(group, step).to(device, non_blocking=True)
                    coefficients[0] = self.gradient_factor
                    constants[key] = (coefficients, _make_step_keys(step).to(device, non_blocking=True))
                if parameter not in self._positions:
                    self._positions[parameter] = _make_positions(parameter, self.keys[parameter])
                row_positions, *column_positions = self._positions[parameter]
                rows = max(1, self._chunk_size // max(1, local_tensors[0][:1].numel()))
                for chunk in zip(*(tensor.split(rows) for tensor in (row_positions, *local_tensors)), strict=True):
                    self._update(*constants[key], column_positions, *chunk)


def _make_coefficients(group: Mapping[str, Any], step: int) -> Tensor:
    """Return the coefficients of an update in the order in which `_update` unpacks them: fp32, shape (7,).

    They are a tensor, because torch.compile would recompile the update if a Python number changed.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    decay = 1 - lr * group["weight_decay"]
    rate = lr / (1 - beta1**step)
    return torch.tensor([1.0, 1 - beta1, 1 - beta2, decay, rate, 1 / math.sqrt(1 - beta2**step), group["eps"]])


def zero_moments(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return both moments before the first step, sharded like `parameter`; for int8 also their scales.

    Vectors get fp32 moments instead of int8. Raises UserError if the layout splits an int8 block (`_zero_scales`).
    """
    names = ("exp_avg", "exp_avg_sq")
    is_int8 = dtype == torch.int8 and parameter.ndim >= 2
    if dtype == torch.int8 and not is_int8:
        dtype = torch.float32
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
    return state | ({f"{name}_scale": _zero_scales(parameter) for name in names} if is_int8 else {})


def _zero_scales(parameter: Tensor) -> Tensor:
    """Return a zero scale for each block of `INT8_BLOCK` entries of a row: fp32, shape (rows, blocks per row).

    A row consists of all dimensions except the first. Raises UserError, on all ranks, if the layout splits a block.
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
                f"optimizer.state.moments int8: {INT8_BLOCK} entries of a row share a scale, but the rows of a "
                f"parameter of shape {tuple(parameter.shape)} are split over {size} ranks within such a block. Use "
                "bf16, or another layout",
            )
    shape = torch.Size((len(parameter), -(-math.prod(parameter.shape[1:]) // INT8_BLOCK)))
    sharded = DTensor.from_local(scales, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    return sharded.to(parameter.device)  # With `parallel.offload`, the parameter is not on the device of the mesh.


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
        coefficients: the result of `_make_coefficients`.
        step_keys: the result of `_make_step_keys`.
        column_positions: the positions along all dimensions except the first. With `row_positions` they add up to the
            position of each entry, which seeds its stochastic rounding.
        row_positions: the positions along the first dimension.
        weight: the weights.
        gradient: the gradients.
        first: the first moments.
        second: the second moments.
        scales: the scales of the first and second moments if they are int8; empty otherwise.
    """
    factor, one_minus_beta1, one_minus_beta2, decay, rate, root, eps = coefficients.unbind()
    gradient = gradient.float() * factor
    mean = first.float()
    square = second.float()
    if scales:
        mean = mean * mean.abs() * _expand_scales(scales[0], mean)
        square = ((square + 128).square() * _expand_scales(scales[1], square)).square()
    mean = mean + one_minus_beta1 * (gradient - mean)
    square = square + one_minus_beta2 * (gradient * gradient - square)
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
    """Quantize `values` to integer levels from -levels to levels, and write the scale of each block to `scale`.

    The value of a level l is sign(l) · l² · scale. Rounding is stochastic: the upper of the two nearest levels is
    chosen with the probability that preserves the expected value.

    Args:
        values: the values: fp32.
        random: uniformly distributed random numbers: int32, of the same shape.
        levels: the largest level.
        scale: the output for the scales: fp32, shape (rows, blocks per row).

    Returns:
        The levels, as fp32.
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
    """Return the scale of each entry's block, in the shape of `values`."""
    scale_by_entry = scale.unsqueeze(2).expand(-1, -1, INT8_BLOCK).flatten(1)
    return scale_by_entry[:, : values[:1].numel()].reshape(values.shape)


def _round_to_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 `values` to bf16 stochastically, with probabilities that preserve the expected value.

    Args:
        values: the values: fp32.
        random: uniformly distributed random numbers: int32, of the same shape.
    """
    return ((values.view(torch.int32) + (random & 0xFFFF)) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _hash_int32(x: Tensor) -> Tensor:
    """Hash int32 numbers with the finalizer of MurmurHash3 (Appleby, public domain); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _make_step_keys(step: int) -> Tensor:
    """Return the keys of a step's random numbers, for the weights and the two moments: int32, shape (3,)."""
    digest = hashlib.sha256(f"rounding of step {step}".encode()).digest()
    return torch.frombuffer(bytearray(digest[:12]), dtype=torch.int32)


def _make_positions(parameter: Tensor, key: int) -> list[Tensor]:
    """Return one int32 tensor for each dimension, whose broadcast sum is a number for each entry of this rank's shard.

    The number is the position of the entry in the full parameter plus `key`, so it does not depend on the layout.
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
    """Creates the optimizer from parameter groups, the config, and the argument `fused` of torch's optimizers."""
    moments: tuple[str, ...]
    """Names of the state tensors with the shape of the parameter. They are zero before the first step."""
    counts_steps: bool = True
    """Whether the state of each parameter has the number of its steps, as `step`."""
    allows_fused: bool = True
    """Whether to use torch's fused kernel if there is one. It needs `step` on the device of the parameter."""
    make_moments: Callable[[Tensor], dict[str, Tensor]] | None = None
    """Creates the state of a parameter except `step`; None to create `moments` with the dtype of the parameter."""


def _make_adamw(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool | None) -> torch.optim.Optimizer:
    """Return torch's AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _make_sgd(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """Return torch's SGD: buffer = momentum × buffer + gradient. Its fused kernel does not support DTensors."""
    momentum = 0.9 if config.momentum is None else config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum)


class _Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., kellerjordan.github.io/posts/muon), also for sharded matrices.

    Muon orthogonalizes whole matrices. If a matrix is sharded (ZeRO, tensor parallel), all ranks gather it, compute the
    same update and keep their shards. The result is the same as on one rank. One full matrix at a time is in memory,
    with its gradient and momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        groups = self.param_groups
        key = "momentum_buffer"
        for group in groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                matrix = nn.Parameter(full_tensor(parameter.detach()))  # A view of the parameter if it is not sharded.
                matrix.grad = full_tensor(parameter.grad)
                self.state[matrix] = {key: full_tensor(self.state[parameter][key])}
                self.param_groups = [{**group, "params": [matrix]}]
                super().step()  # type: ignore[no-untyped-call]
                write_parameter(matrix, parameter)
                write_parameter(self.state.pop(matrix)[key], self.state[parameter][key])
        self.param_groups = groups


def _make_muon(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """Return Muon with updates as large as AdamW's, so both use one learning rate (Liu et al., arXiv 2502.16982)."""
    momentum = 0.95 if config.momentum is None else config.momentum
    return _Muon(groups, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")


class _CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that act as one, with a common `state`."""

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
    "adamw": OptimizerKind(_make_adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": OptimizerKind(_make_sgd, ("momentum_buffer",), counts_steps=False),
    "muon": OptimizerKind(_make_muon, ("momentum_buffer",), counts_steps=False),
}


def make_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    device: torch.device,
    blocks: Sequence[nn.Module] = (),
    keys: Mapping[nn.Parameter, int] | None = None,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer of the model's parameters that are not frozen, with its state before the first step.

    Args:
        model: the module with the parameters.
        config: the config section `optimizer`.
        device: the device of the update.
        blocks: the decoder blocks. Muon optimizes only their matrices, AdamW all other parameters.
        keys: the seed of the stochastic rounding of each parameter, which `LeanAdamW` needs (`config.state`).
        compiled: whether to compile the update of `LeanAdamW`.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.state != StateConfig():
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[config.state.moments]
        kind = OptimizerKind(
            lambda groups, config, _: LeanAdamW(groups, config, keys or {}, compiled),
            moments=(),
            allows_fused=False,
            make_moments=partial(zero_moments, dtype=dtype),
        )
        return _create_optimizer(kind, parameters, config, device)
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
    """Return one optimizer of these parameters, with its state.

    Weight decay applies to parameters of two or more dimensions (matrices and embeddings), not to vectors (norms). The
    fused kernel is used if torch has one for the device type. The state is created here, before the first step, so that
    a checkpoint can be loaded into it.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = True if kind.allows_fused and device.type in ("cpu", "cuda") else None
    optimizer = kind.make(groups, config, fused)
    for parameter in parameters:
        state = (
            kind.make_moments(parameter)
            if kind.make_moments
            else {key: torch.zeros_like(parameter) for key in kind.moments}
        )
        if kind.counts_steps:
            state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"), **state}
        optimizer.state[parameter] = state
    return optimizer


def make_custom_optimizer(
    make: Callable[..., Any], named_parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer that a function of the user's module creates.

    Args:
        make: the function `optimizer(named_parameters, config)` of the user's module.
        named_parameters: the model's parameters with their names. Frozen ones are not passed to `make`.
        config: the config section `optimizer`.

    Raises:
        UserError: if `make` does not return a torch.optim.Optimizer of all parameters that it received.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = make(trainable, config)
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    optimized = {id(parameter) for group in groups for parameter in group["params"]}
    if missing := [name for name, parameter in trainable if id(parameter) not in optimized]:
        raise UserError(
            "model.incomplete_optimizer",
            "optimizer of model.target must return a torch.optim.Optimizer of all parameters that it receives; "
            f"{missing[0]} is in none of its groups",
        )
    for group in groups:
        group["lr_factor"] = group["lr"] / config.lr
    return optimizer


def _get_group_options(group: dict[str, Any]) -> dict[str, str]:
    """Return the options of a parameter group, as texts. The learning rate is not included, since each step sets it."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr", "lr_factor")}


@torch.no_grad()
def initialize_custom_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of a custom optimizer, so that a checkpoint can be loaded into it.

    The optimizer performs one step with zero gradients. Afterwards the weights are as before, and the state has
    arbitrary values.

    Raises:
        UserError: if the optimizer needs a closure, if its state is not a tensor, or if a step changes an option of a
            parameter group. Checkpoints can save only tensors of the state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    weights_before = [parameter.clone() for parameter in parameters]
    options_before = [_get_group_options(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except TypeError as error:
        message = f"optimizer of model.target must perform a step without a closure: {error}"
        raise UserError("model.optimizer_needs_closure", message) from None
    for group, options in zip(optimizer.param_groups, options_before, strict=True):
        if changed := [key for key, value in _get_group_options(group).items() if options.get(key) != value]:
            raise UserError(
                "model.optimizer_state",
                f"optimizer of model.target changes the option {changed[0]} of its parameter groups. Checkpoints do "
                "not save options, so a restart would lose the change. Keep a tensor in its state for each parameter",
            )
    optimizer.zero_grad(set_to_none=True)
    for parameter, weights in zip(parameters, weights_before, strict=True):
        parameter.copy_(weights)
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                message = (
                    f"optimizer of model.target has the state {key}, which is not a tensor: checkpoints cannot save it"
                )
                raise UserError("model.optimizer_state", message)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the optimizer's next step. Groups of a custom optimizer keep their ratios to it.

    Raises UserError if a custom schedule returned an `lr` that is not a finite number.
    """
    if not isinstance(lr, int | float) or not math.isfinite(lr):
        message = f"learning_rate of model.target must return a finite number; it returned {lr!r}"
        raise UserError("model.invalid_learning_rate", message)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


class LossScaler:
    """Scales the loss in fp16, so that small gradients do not vanish (Micikevicius et al., arXiv 1710.03740, 3.2).

    If the gradient is not finite, the step is skipped and the scale is halved. `INTERVAL` finite steps in a row double
    the scale. If the scale is 1 or less, scaling did not cause the overflow, and the bad-step guard handles the step.

    The constants are the same as in torch.amp.GradScaler. GradScaler checks only the gradients of its own rank, so the
    ranks of a pipeline or a tensor-parallel group could decide differently. This class uses the norm of the full
    model's gradient, which is the same on all ranks and is needed for clipping in any case.
    """

    INTERVAL = 2000
    """Number of finite steps in a row after which the scale is doubled."""

    def __init__(self) -> None:
        self.scale = 2.0**16
        self._good_steps = 0

    def update_scale(self, norm: float) -> bool:
        """Set the scale of the next step, and return whether `norm` is finite.

        Args:
            norm: the norm of the full model's gradient.
        """
        is_finite = math.isfinite(norm)
        self._good_steps = self._good_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self._good_steps == self.INTERVAL:
            self.scale *= 2
            self._good_steps = 0
        return is_finite

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        return {"scale": self.scale, "good": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.scale = float(state["scale"])
        self._good_steps = int(state["good"])


_CHUNK_ENTRIES = 2**15
"""Number of entries whose squares are summed sequentially."""


def compute_total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` together: fp32, 0-d.

    On CPUs, torch sums squares sequentially in fp32, so the norm of 2²⁷ entries would be 1.4 % too small. Therefore
    large tensors are split into chunks, which is accurate to 1e-7.
    """
    if any(gradient.device.type == "cpu" for gradient in gradients):
        gradients = [chunk for gradient in gradients for chunk in gradient.flatten().split(_CHUNK_ENTRIES)]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # `get_total_norm` would round the norm of each tensor to the tensor's dtype.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def find_frozen_names(patterns: Sequence[str], task: Task) -> set[str]:
    """Return the names of all frozen parameters of the full model, including parameters that only other ranks have.

    Args:
        patterns: the config key `optimizer.freeze`.
        task: builds the model.

    Raises:
        UserError: if a pattern matches no parameter, or all parameters match.
    """
    if not patterns:
        return set()
    all_layers = range(task.config.model.layers)
    return _match_patterns(patterns, [name for name, _ in task.named_weights(task.build(all_layers))])


def check_freeze(patterns: str, model: str) -> None:
    """Raise UserError if a pattern matches no parameter of the decoder, or all parameters match.

    Args:
        patterns: the config key `optimizer.freeze`, as JSON.
        model: the config section `model`, as JSON.
    """
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
        message = "optimizer.freeze: the patterns match all parameters, so no parameter would be trained: remove some"
        raise UserError("model.all_frozen", message)
    return frozen
