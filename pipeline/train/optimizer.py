"""Optimizers, the loss scaler, gradient norms and frozen parameters.

The trainer calls :func:`set_learning_rate` before each step. The learning rate is a pure function of config, step and
number of steps. Therefore checkpoints do not contain the learning rate, and a resumed run uses the same rates.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections import Counter
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
from pipeline.model.transformers_model import build_model

_CHUNK_SIZE = 1 << 24
"""Number of entries that `LeanAdamW` updates together without torch.compile. Each entry needs about 40 bytes of
temporary memory."""


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) whose weights and moments may have a low precision.

    Weights are fp32 or bf16. Moments are fp32, bf16 or int8, as `create_zero_moments` creates them. Values are rounded
    stochastically to bf16 and int8. An update of one entry uses the same random numbers in every layout.

    Args:
        groups: parameter groups.
        config: the config section `optimizer`.
        rounding_seeds: for each parameter, the seed of its stochastic rounding.
        compiled: whether torch.compile fuses the operations of an update.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        rounding_seeds: Mapping[nn.Parameter, int],
        compiled: bool,
    ) -> None:
        super().__init__(groups, {"lr": config.lr, "betas": config.betas, "eps": config.eps})
        self.rounding_seeds = rounding_seeds
        self._update: Callable[..., None] = torch.compile(_update, dynamic=True) if compiled else _update
        # A compiled update is fused and needs little temporary memory, so one call updates a whole parameter.
        self._chunk_size = 1 << 62 if compiled else _CHUNK_SIZE
        self._positions: dict[nn.Parameter, list[Tensor]] = {}
        """The results of `_make_positions` by parameter, which do not change from step to step."""
        self.gradient_factor = torch.ones(())
        """The factor by which the next update multiplies all gradients, to clip them; at most 1: fp32, 0-d."""

    def clip_with_norm(self, limit: float, norm: Tensor) -> None:
        """Clip the gradients in the next step, as `clip_grads_with_norm_` does, but without rounding them to bf16.

        Args:
            limit: the maximum norm of the gradient.
            norm: the norm of the full model's gradient: 0-d.
        """
        # torch.nn.utils.clip_grads_with_norm_ adds the same 1e-6, to avoid a division by zero.
        self.gradient_factor = (limit / (norm + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: not used. torch.optim.Optimizer.step has this parameter.
        """
        # Coefficients and step keys. Parameters with the same step, weight decay and device share these tensors.
        constants: dict[tuple[int, float, torch.device], tuple[Tensor, Tensor]] = {}
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["step"] += 1
                # The state has the order of `create_zero_moments`: the two moments, then their scales.
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
                    self._positions[parameter] = _make_positions(parameter, self.rounding_seeds[parameter])
                row_positions, *column_positions = self._positions[parameter]
                row_size = max(1, local_tensors[0][:1].numel())  # This rank's shard may be empty.
                rows_per_chunk = max(1, self._chunk_size // row_size)
                split_tensors = [tensor.split(rows_per_chunk) for tensor in (row_positions, *local_tensors)]
                for chunk in zip(*split_tensors, strict=True):
                    self._update(*constants[key], column_positions, *chunk)


def _make_coefficients(group: Mapping[str, Any], step: int) -> Tensor:
    """Return the coefficients of an update in the order in which `_update` unpacks them: fp32, shape (7,).

    The coefficients are a tensor, because torch.compile would recompile the update if a Python number changed.

    Args:
        group: the parameter group.
        step: the number of the step, counted from 1. AdamW's bias correction depends on it.
    """
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    gradient_factor = 1.0  # The caller overwrites this entry with the factor that clips the gradients.
    weight_factor = 1 - lr * group["weight_decay"]
    corrected_lr = lr / (1 - beta1**step)
    root_factor = 1 / math.sqrt(1 - beta2**step)
    return torch.tensor([gradient_factor, 1 - beta1, 1 - beta2, weight_factor, corrected_lr, root_factor, group["eps"]])


def create_zero_moments(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the two moments of a parameter before the first step: zeros, sharded like `parameter`.

    If `dtype` is int8, also return the scales of the moments. Vectors and scalars then get fp32 moments without scales.
    Raises UserError if the layout splits an int8 block (`_create_zero_scales`).
    """
    names = ("exp_avg", "exp_avg_sq")
    is_int8 = dtype == torch.int8 and parameter.ndim >= 2
    if dtype == torch.int8 and not is_int8:
        dtype = torch.float32
    state = {name: torch.zeros_like(parameter, dtype=dtype) for name in names}
    return state | ({f"{name}_scale": _create_zero_scales(parameter) for name in names} if is_int8 else {})


def _create_zero_scales(parameter: Tensor) -> Tensor:
    """Return a zero scale for each block of `INT8_BLOCK` entries of a row: fp32, shape (rows, blocks per row).

    A row has one index of the first dimension, and all entries of the other dimensions. Raises UserError, on all ranks,
    if the layout splits a block.
    """
    rows = local_tensor(parameter).flatten(1)
    scales = rows.new_zeros(len(rows), math.ceil(rows.shape[1] / INT8_BLOCK), dtype=torch.float32)
    if not isinstance(parameter, DTensor):
        return scales
    mesh = parameter.device_mesh
    placements = parameter.placements
    for size, placement in zip(mesh.shape, placements, strict=True):
        splits_rows = getattr(placement, "dim", 0) > 0  # Replicate has no `dim`; Shard(0) splits no row.
        shard_width = math.ceil(parameter.shape[1] / size)  # DTensor splits a dimension as torch.chunk does.
        if splits_rows and (parameter.ndim > 2 or shard_width % INT8_BLOCK):
            raise UserError(
                "parallel.split_int8_block",
                f"optimizer.state.moments int8: {INT8_BLOCK} entries of a row share a scale, but the rows of a "
                f"parameter of shape {tuple(parameter.shape)} are split over {size} ranks within such a block. Use "
                "bf16, or another layout",
            )
    shape = torch.Size((len(parameter), math.ceil(math.prod(parameter.shape[1:]) / INT8_BLOCK)))
    sharded = DTensor.from_local(scales, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))
    return sharded.to(parameter.device)  # With `parallel.offload`, the parameter is not on the device of the mesh.


def _update(
    coefficients: Tensor,
    step_keys: Tensor,
    column_positions: list[Tensor],
    row_positions: Tensor,
    weight: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    *scales: Tensor,
) -> None:
    """Update a chunk of weights and their two moments in place.

    int8 moments are stored as integer levels with one scale for each block of `INT8_BLOCK` entries of a row. The value
    of a level l is sign(l) · l² · scale. The levels of the first moment are -127 to 127. Instead of the second moment,
    its square root is stored. The levels of this root are 0 to 255. The stored number is the level minus 128, which
    fits into int8.

    Args:
        coefficients: fp32, shape (7,): the factor that clips the gradients; 1 - beta1; 1 - beta2; the factor of the
            weight decay; the learning rate with the bias correction of the first moment; the factor of the bias
            correction for the root of the second moment; and eps.
        step_keys: the keys of this step's random numbers, for the weights and the two moments: int32, shape (3,).
        column_positions: for each dimension except the first, a tensor of int32 numbers. Their broadcast sum with
            `row_positions` has a number for each entry, which seeds the stochastic rounding of the entry.
        row_positions: the same for the first dimension.
        weight: the weights: fp32 or bf16.
        gradient: the gradients: fp32 or bf16.
        first_moment: the first moments, or their int8 levels.
        second_moment: the second moments, or the int8 levels of their square roots.
        scales: the scales of the two moments if they are int8; empty otherwise.
    """
    gradient_factor, one_minus_beta1, one_minus_beta2, weight_factor, corrected_lr, root_factor, eps = (
        coefficients.unbind()
    )
    gradient = gradient.float() * gradient_factor
    mean = first_moment.float()
    square = second_moment.float()
    if scales:  # Until here, `mean` and `square` are levels.
        mean = mean * mean.abs() * _expand_scales(scales[0], mean)
        root_level = square + 128
        root = root_level.square() * _expand_scales(scales[1], square)
        square = root.square()
    mean = mean + one_minus_beta1 * (gradient - mean)
    square = square + one_minus_beta2 * (gradient * gradient - square)
    new_weight = weight.float() * weight_factor - corrected_lr * mean / (square.sqrt() * root_factor + eps)
    entry_hash = _hash_int32(sum(column_positions, row_positions))
    weight_bits, mean_bits, square_bits = [_hash_int32(entry_hash ^ key) for key in step_keys.unbind()]
    if scales:
        mean = _quantize(mean, mean_bits, 127, scales[0])
        root = square.sqrt()
        root_level = _quantize(root, square_bits, 255, scales[1])
        # A positive root must not be rounded down to level 0, because updates divide by the root.
        square = torch.maximum(root_level, (root > 0).float()) - 128
    _write_rounded(weight, new_weight, weight_bits)
    _write_rounded(first_moment, mean, mean_bits)
    _write_rounded(second_moment, square, square_bits)


def _write_rounded(target: Tensor, values: Tensor, random_bits: Tensor) -> None:
    """Write fp32 `values` to `target`. If `target` is bf16, round the values stochastically.

    Args:
        target: the output: fp32, bf16, or int8 if `values` are integer levels.
        values: the values: fp32.
        random_bits: uniformly distributed random numbers: int32, of the same shape.
    """
    target.copy_(_round_to_bf16(values, random_bits) if target.dtype == torch.bfloat16 else values)


def _quantize(values: Tensor, random_bits: Tensor, max_level: int, scales: Tensor) -> Tensor:
    """Quantize `values` to integer levels from -max_level to max_level, and write the scale of each block to `scales`.

    The value of a level l is sign(l) · l² · scale. Rounding is stochastic: of the two nearest levels, the level of
    larger magnitude is chosen with the probability that makes the expected value equal to the input.

    Args:
        values: the values: fp32.
        random_bits: uniformly distributed random numbers: int32, of the same shape.
        max_level: the largest level.
        scales: the output for the scale of each block: fp32, shape (rows, blocks per row).

    Returns:
        The levels, as fp32.
    """
    rows = values.flatten(1)
    padding = -rows.shape[1] % INT8_BLOCK  # The number of zeros that complete the last block of a row.
    blocks = F.pad(rows, (0, padding)).unflatten(1, (scales.shape[1], INT8_BLOCK))
    scales.copy_(blocks.abs().amax(dim=2) / max_level**2)
    # The minimum avoids a division by zero in blocks of zeros.
    squared_levels = values.abs() / _expand_scales(scales, values).clamp(min=1e-38)
    lower = squared_levels.sqrt().floor()
    # Only the 24 lowest random bits are used, because fp32 represents integers of 24 bits exactly.
    uniform = (random_bits & 0xFFFFFF).float() / 2**24  # Uniformly distributed in [0, 1).
    # The squares of the levels `lower` and `lower` + 1 differ by 2 · lower + 1.
    rounds_up = uniform * (2 * lower + 1) < squared_levels - lower * lower
    return values.sign() * (lower + rounds_up).clamp(max=max_level)


def _expand_scales(scales: Tensor, like: Tensor) -> Tensor:
    """Return a tensor of the shape of `like` that contains, for each entry, the scale of its block.

    Args:
        scales: the scale of each block: fp32, shape (rows, blocks per row).
        like: a tensor with as many rows as `scales`. Only its shape is used.
    """
    scale_by_entry = scales.unsqueeze(2).expand(-1, -1, INT8_BLOCK).flatten(1)
    # If the row size is not a multiple of `INT8_BLOCK`, the last block extends beyond the end of the row.
    row_size = like[:1].numel()
    return scale_by_entry[:, :row_size].reshape(like.shape)


def _round_to_bf16(values: Tensor, random_bits: Tensor) -> Tensor:
    """Round fp32 `values` to bf16 stochastically, with probabilities that preserve the expected value.

    A bf16 number is the upper half of an fp32 number. A random number of 16 bits is added to the lower half, and the
    carry rounds the upper half up. Then the lower half is cleared.

    Args:
        values: the values: fp32.
        random_bits: uniformly distributed random numbers: int32, of the same shape.
    """
    return ((values.view(torch.int32) + (random_bits & 0xFFFF)) & ~0xFFFF).view(torch.float32).to(torch.bfloat16)


def _hash_int32(x: Tensor) -> Tensor:
    """Hash int32 numbers with the finalizer `fmix32` of MurmurHash3 (Appleby, public domain).

    int32 products wrap around, as the hash requires. The masks turn the arithmetic shifts into logical shifts. The
    factors are 0x85EBCA6B and 0xC2B2AE35 as signed numbers.
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * -0x7A143595
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)


def _make_step_keys(step: int) -> Tensor:
    """Return the keys of a step's random numbers, for the weights and the two moments: int32, shape (3,)."""
    digest = hashlib.sha256(f"rounding of step {step}".encode()).digest()
    return torch.frombuffer(bytearray(digest[:12]), dtype=torch.int32)  # Three keys of four bytes each.


def _make_positions(parameter: Tensor, seed: int) -> list[Tensor]:
    """Return one int32 tensor for each dimension. Their broadcast sum has a number for each entry of this rank's shard.

    The number is the position of the entry in the flattened full parameter, plus `seed`. The sum is computed in int32,
    which wraps around. The number of an entry does not depend on the layout, because the position does not. For a
    scalar, which has no dimensions, return one tensor of shape (1,).

    Args:
        parameter: the parameter. If it is a DTensor, the result describes the entries of this rank's shard.
        seed: the seed of the parameter's stochastic rounding.
    """
    seed = seed % 2**31  # The seed and the strides must fit into an int32.
    positions = []
    for dim, size in enumerate(parameter.shape):
        stride = math.prod(parameter.shape[dim + 1 :]) % 2**31
        dim_positions = torch.arange(size, dtype=torch.int32, device=local_tensor(parameter).device) * stride
        if dim == 0:
            dim_positions = dim_positions + seed
        shape = [1] * parameter.ndim
        shape[dim] = size
        # `select_local_part` needs the shape of the full parameter. Afterwards, the other dimensions shrink to size 1.
        local_positions = dim_positions.view(shape).expand(parameter.shape)
        if isinstance(parameter, DTensor):
            local_positions = select_local_part(local_positions, parameter)
        for other_dim in set(range(parameter.ndim)) - {dim}:
            local_positions = local_positions.narrow(other_dim, 0, min(1, local_positions.shape[other_dim]))
        positions.append(local_positions)
    return positions or [torch.tensor([seed], dtype=torch.int32, device=parameter.device)]


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that `optimizer.name` can select."""

    make: Callable[[list[dict[str, Any]], OptimizerConfig, bool | None], torch.optim.Optimizer]
    """Creates the optimizer from parameter groups, the config section `optimizer`, and torch's argument `fused`."""
    moments: tuple[str, ...]
    """Names of the state tensors with the shape of the parameter. These tensors are zero before the first step."""
    counts_steps: bool = True
    """Whether the state of each parameter contains the number of its completed steps, under the key `step`."""
    allows_fused: bool = True
    """Whether to use torch's fused kernel if there is one. The kernel needs `step` on the device of the parameter."""
    make_moments: Callable[[Tensor], dict[str, Tensor]] | None = None
    """Creates the state of a parameter except `step`; None to create `moments` with the dtype of the parameter."""


def _make_adamw(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool | None) -> torch.optim.Optimizer:
    """Return torch's AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _make_sgd(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """Return torch's SGD: buffer = momentum × buffer + gradient.

    The argument `fused` is not used, because the fused kernel of SGD does not support DTensors.
    """
    momentum = 0.9 if config.momentum is None else config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum)


class _Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., kellerjordan.github.io/posts/muon), also for sharded matrices.

    Muon orthogonalizes full matrices. If a matrix is sharded (ZeRO, tensor parallel), all ranks gather the matrix,
    compute the same update and keep their shards. The result is the same as on one rank. Only one full matrix at a time
    is in memory, with its gradient and momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gather every matrix that has a gradient, update the matrix with torch, and write it to the shards.

        Args:
            closure: not used. torch.optim.Optimizer.step has this parameter.
        """
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
    """Return Muon with updates that are as large as those of AdamW (Liu et al., arXiv 2502.16982).

    Therefore Muon and AdamW use the same learning rate. The argument `fused` is not used, because Muon has no fused
    kernel.
    """
    momentum = 0.95 if config.momentum is None else config.momentum
    return _Muon(groups, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that act as one, with common parameter groups and a common `state`.

    Args:
        optimizers: the optimizers.
        names: a name for each optimizer; () if they have none.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Sequence[str] = ()) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        self.by_name = dict(zip(names, optimizers, strict=bool(names)))
        """The optimizers by their names."""
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            # With one common dict, a checkpoint that is loaded into `state` of this object reaches all optimizers.
            optimizer.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Perform one step of each optimizer.

        Args:
            closure: not used. torch.optim.Optimizer.step has this parameter.
        """
        for optimizer in self.optimizers:
            optimizer.step()


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
    rounding_seeds: Mapping[nn.Parameter, int] | None = None,
    compiled: bool = False,
) -> torch.optim.Optimizer:
    """Return an optimizer of the model's parameters that are not frozen.

    Its state (moments and step counts) exists before the first step, so that a checkpoint can be loaded into it.

    Args:
        model: the module with the parameters.
        config: the config section `optimizer`.
        device: the device of the update.
        blocks: the decoder blocks. Muon optimizes only the matrices of these blocks, and AdamW all other parameters.
        rounding_seeds: for each parameter, the seed of its stochastic rounding. Only `LeanAdamW` needs the seeds.
        compiled: whether to compile the update of `LeanAdamW`.

    Raises:
        UserError: if moments are int8, and the layout splits a group of entries that share a scale.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.state != StateConfig():  # the config accepts another `optimizer.state` than the default only with AdamW
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[config.state.moments]
        kind = OptimizerKind(
            lambda groups, config, _: LeanAdamW(groups, config, rounding_seeds or {}, compiled),
            moments=(),
            allows_fused=False,
            make_moments=partial(create_zero_moments, dtype=dtype),
        )
        return _create_optimizer(kind, parameters, config, device)
    if config.name != "muon":
        return _create_optimizer(OPTIMIZERS[config.name], parameters, config, device)
    matrix_ids = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    matrices = [p for p in parameters if id(p) in matrix_ids]
    other_parameters = [p for p in parameters if id(p) not in matrix_ids]
    return CombinedOptimizer(
        [
            _create_optimizer(OPTIMIZERS["muon"], matrices, config, device),
            _create_optimizer(OPTIMIZERS["adamw"], other_parameters, config, device),
        ]
    )


def _create_optimizer(
    kind: OptimizerKind, parameters: Sequence[nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Return one optimizer of these parameters, with its state.

    Weight decay applies to parameters of two or more dimensions (matrices and embeddings), not to vectors (norms). The
    fused kernel is used if torch has one for the device type. The state is created here, before the first step, so that
    a checkpoint can be loaded into the state.

    Args:
        kind: how to create the optimizer.
        parameters: the parameters to optimize.
        config: the config section `optimizer`.
        device: the device of the update.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = True if kind.allows_fused and device.type in ("cpu", "cuda") else None
    optimizer = kind.make(groups, config, fused)
    for parameter in parameters:
        if kind.make_moments:
            state = kind.make_moments(parameter)
        else:
            state = {key: torch.zeros_like(parameter) for key in kind.moments}
        if kind.counts_steps:
            step_device = parameter.device if fused else torch.device("cpu")
            state = {"step": torch.zeros((), dtype=torch.float32, device=step_device), **state}
        optimizer.state[parameter] = state
    return optimizer


def make_custom_optimizer(
    make: Callable[..., Any], named_parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """Return the optimizer that a function of the user's module creates.

    Args:
        make: the function `optimizer(named_parameters, config)` of the user's module. It returns an optimizer, or a
            dict of optimizers by name.
        named_parameters: the model's parameters with their names. Frozen parameters are not passed to `make`.
        config: the config section `optimizer`.

    Raises:
        UserError: if `make` does not return optimizers that together have each parameter once.
    """
    trainable = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    made = make(trainable, config)
    optimizers = list(made.values()) if isinstance(made, dict) else [made]
    are_optimizers = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups] if are_optimizers else []
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    if wrong := [name for name, parameter in trainable if counts[id(parameter)] != 1]:
        place = "is in several of its groups" if counts[id(dict(trainable)[wrong[0]])] else "is in none of its groups"
        raise UserError(
            "model.incomplete_optimizer",
            "optimizer of model.target must return a torch.optim.Optimizer, or a dict of them, that has each parameter "
            f"once that it receives; {wrong[0]} {place}",
        )
    optimizer = CombinedOptimizer(optimizers, list(made)) if isinstance(made, dict) else optimizers[0]
    for group in groups:  # `set_learning_rate` multiplies each learning rate by this factor.
        group["lr_factor"] = group["lr"] / config.lr
    return optimizer


@torch.no_grad()
def check_elementwise(
    make: Callable[..., Any], named_parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> None:
    """Check that a custom optimizer updates each entry of a parameter independently of all other entries.

    Only then can it update a shard of a parameter. The check creates the optimizer for small random parameters with the
    names of the real ones. Three steps on the first half of each parameter, and three on the second half, must give the
    same values as three steps on whole parameters.

    Args:
        make: the function `optimizer(named_parameters, config)` of the user's module.
        named_parameters: the model's parameters with their names. Frozen parameters are not passed to `make`.
        config: the config section `optimizer`.

    Raises:
        UserError: if the values differ.
    """
    generator = torch.Generator().manual_seed(0)
    names = [name for name, parameter in named_parameters if parameter.requires_grad]
    shapes = [(4,) * max(1, min(parameter.ndim, 4)) for _, parameter in named_parameters if parameter.requires_grad]
    initial = [torch.randn(shape, generator=generator) for shape in shapes]
    # The gradients of the second half are larger, so that norms and maxima of the two halves differ.
    factors = torch.tensor([1.0, 1.0, 30.0, 30.0])
    gradients = [
        [
            torch.randn(shape, generator=generator) * factors.view(-1, *[1] * (len(shape) - 1))
            for shape in shapes
        ]
        for _ in range(3)
    ]  # fmt: skip

    def update(rows: slice) -> list[Tensor]:
        """Return these rows of all parameters after the three steps."""
        parameters = [nn.Parameter(values[rows].clone()) for values in initial]
        optimizer = make_custom_optimizer(make, list(zip(names, parameters, strict=True)), config)
        for step_gradients in gradients:
            for parameter, gradient in zip(parameters, step_gradients, strict=True):
                parameter.grad = gradient[rows].clone()
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    whole, first, second = update(slice(None)), update(slice(0, 2)), update(slice(2, 4))
    for name, values, halves in zip(names, whole, zip(first, second, strict=True), strict=True):
        if not torch.allclose(values, torch.cat(halves), rtol=1e-5, atol=1e-7):
            raise UserError(
                "model.optimizer_not_elementwise",
                "optimizer of model.target is not element-wise, although ELEMENTWISE is set: the update of one half of "
                f"{name} depends on the other half. Set parallel.zero, parallel.tensor and parallel.pipeline to their "
                "defaults, and remove ELEMENTWISE",
            )


def _get_group_options(group: dict[str, Any]) -> dict[str, str]:
    """Return the options of a parameter group as strings, except the learning rate, which the trainer sets."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr", "lr_factor")}


@torch.no_grad()
def initialize_custom_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of a custom optimizer, so that a checkpoint can be loaded into it.

    The optimizer performs one step with zero gradients. Afterwards the weights have their previous values again, and
    the state has arbitrary values. Checkpoints save only tensors of the state.

    Raises:
        UserError: if the optimizer needs a closure, if its state contains a value that is not a tensor, or if a step
            changes an option of a parameter group.
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
                "not save options, so a restart would lose the change. Keep the value as a tensor in the optimizer's "
                "state of each parameter",
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
    """Set the learning rate of the optimizer's next step.

    A custom optimizer may have created its groups with different learning rates. The ratios between these rates remain:
    each group gets `lr` times the ratio of its initial rate to `optimizer.lr`.

    Raises UserError if `lr` is not a finite number, because a custom schedule may return any value.
    """
    if not isinstance(lr, int | float) or not math.isfinite(lr):
        message = f"learning_rate of model.target must return a finite number; it returned {lr!r}"
        raise UserError("model.invalid_learning_rate", message)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


class LossScaler:
    """Scales the loss in fp16, so that small gradients do not vanish.

    The method is that of Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740, section 3.2).

    If the gradient is not finite, the step is skipped and the scale is halved. After `GROWTH_INTERVAL` finite steps in
    a row, the scale is doubled. If the scale is 1 or less, scaling did not cause the overflow. In this case, the step
    also counts as a bad step (`Trainer.step`).

    The constants are the same as in torch.amp.GradScaler. GradScaler checks only the gradients of its own rank, so the
    ranks of a pipeline or a tensor-parallel group could decide differently. This class uses the norm of the full
    model's gradient, which is the same on all ranks and is needed for clipping in any case.
    """

    GROWTH_INTERVAL = 2000
    """Number of finite steps in a row after which the scale is doubled."""

    def __init__(self) -> None:
        self.scale = 2.0**16
        self._finite_step_count = 0
        """Number of finite steps in a row since the scale last changed."""

    def update_scale(self, norm: float) -> bool:
        """Halve the scale if `norm` is not finite. Double it after `GROWTH_INTERVAL` finite steps in a row.

        Args:
            norm: the norm of the full model's gradient in this step.

        Returns:
            Whether `norm` is finite. If not, the step must be skipped.
        """
        is_finite = math.isfinite(norm)
        self._finite_step_count = self._finite_step_count + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self._finite_step_count == self.GROWTH_INTERVAL:
            self.scale *= 2
            self._finite_step_count = 0
        return is_finite

    def state_dict(self) -> dict[str, float]:
        """Return the state that a checkpoint saves."""
        # The name `good` is part of the format of checkpoints.
        return {"scale": self.scale, "good": self._finite_step_count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state that `state_dict` returned."""
        self.scale = float(state["scale"])
        self._finite_step_count = int(state["good"])


_NORM_CHUNK_SIZE = 2**15
"""Number of entries whose squares are summed sequentially by `compute_total_norm`."""


def compute_total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the L2 norm of all `gradients` together: fp32, 0-d.

    On CPUs, torch sums squares sequentially in fp32, so the norm of 2²⁷ entries would be 1.4 % too small. Therefore
    large tensors are split into chunks. The relative error is then about 1e-7.
    """
    if any(gradient.device.type == "cpu" for gradient in gradients):
        gradients = [chunk for gradient in gradients for chunk in gradient.flatten().split(_NORM_CHUNK_SIZE)]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # `get_total_norm` would round the norm of each tensor to the tensor's dtype.
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def find_frozen_names(patterns: Sequence[str], task: Task) -> set[str]:
    """Return the names of all frozen parameters of the full model, including parameters that only other ranks have.

    If the model has adapters, all other parameters are frozen.

    Args:
        patterns: the config key `optimizer.freeze`: names of parameters, with wildcards as in `fnmatch`.
        task: builds the model.

    Raises:
        UserError: if a pattern matches no parameter, or if no parameter would be trained.
    """
    has_adapters = task.config.adapter is not None
    if not patterns and not has_adapters:
        return task.list_untrained_weights()
    model = task.build(range(task.config.model.layers))
    names = [name for name, _ in task.named_weights(model)]
    if has_adapters:
        return {name for name, _ in task.base_weights(model)}
    return _match_patterns(patterns, names) | task.list_untrained_weights()


def check_freeze(patterns_json: str, model_json: str) -> None:
    """Raise UserError if a pattern matches no parameter of a language model, or if every parameter matches a pattern.

    Args:
        patterns_json: the config key `optimizer.freeze`, as JSON.
        model_json: the config section `model`, as JSON.
    """
    model = ModelConfig.model_validate_json(model_json)
    if model.backend == "transformers":
        names = [name for name, _ in build_model(model).named_parameters()]
    else:
        with torch.device("meta"):
            # The names of the parameters depend neither on the vocabulary size nor on the sequence length.
            names = [name for name, _ in Decoder(model, vocab_size=1, sequence_length=1).named_weights()]
    _match_patterns(json.loads(patterns_json), names)


def _match_patterns(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that match a pattern. Raise UserError if a pattern matches no name, or if all names match.

    Args:
        patterns: the config key `optimizer.freeze`: names of parameters, with wildcards as in `fnmatch`.
        names: the names of all parameters.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matching_names = fnmatch.filter(names, pattern)
        if not matching_names:
            existing_names = shorten(", ".join(names), 300, placeholder=" …")
            message = f"optimizer.freeze: {pattern!r} matches no parameter; the parameters are {existing_names}"
            raise UserError("model.no_such_parameter", message)
        frozen.update(matching_names)
    if frozen == set(names):
        message = "optimizer.freeze: the patterns match all parameters, so no parameter would be trained: remove some"
        raise UserError("model.all_frozen", message)
    return frozen
