"""Optimizers, and the learning rate.

The learning rate of a step is a pure function of (config, step, steps): nothing to save, nothing to restore, and a
run that stops and goes on sees the same rates. The trainer calls :func:`set_learning_rate` before each step.
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
                "parallel.split_int8_block",
                f"optimizer.state.moments int8: {INT8_BLOCK} entries of a row share a scale; rows of a parameter of "
                f"shape {tuple(parameter.shape)} are split elsewhere over {size} ranks. Use bf16, or another layout",
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


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of `optimizer.name`."""

    make: Callable[[list[dict[str, Any]], OptimizerConfig, bool | None], torch.optim.Optimizer]
    """From parameter groups, the config, and whether torch's fused kernel is to be used (None: it has none)."""
    moments: tuple[str, ...]
    """What it keeps of each parameter in the parameter's shape; zeros before the first step."""
    counts: bool = True
    """Whether it counts each parameter's steps, as `step`."""
    fuses: bool = True
    """Whether torch's fused kernel, where there is one, is taken; it counts on the device."""
    zeros: Callable[[Tensor], dict[str, Tensor]] | None = None
    """Makes them of a parameter; None: in its type."""


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool | None) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """SGD with momentum, as torch has it: buffer = momentum × buffer + gradient. Its fused kernel knows no DTensors."""
    momentum = 0.9 if config.momentum is None else config.momentum
    return torch.optim.SGD(groups, lr=config.lr, momentum=momentum)


class _Muon(torch.optim.Muon):
    """torch's Muon (Jordan et al., kellerjordan.github.io/posts/muon), which orthogonalizes whole matrices.

    Where a rank holds a part of a matrix (ZeRO, tensor parallel), all of them gather it, do the same, and keep their
    parts: what comes out is that of one process. Memory: one whole matrix at a time, its gradient and momentum.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every matrix with a gradient."""
        groups, key = self.param_groups, "momentum_buffer"
        for group in groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                matrix = nn.Parameter(full_tensor(parameter.detach()))  # of an uncut one, the same memory
                matrix.grad = full_tensor(parameter.grad)
                self.state[matrix] = {key: full_tensor(self.state[parameter][key])}
                self.param_groups = [{**group, "params": [matrix]}]
                super().step()  # type: ignore[no-untyped-call]
                write_parameter(matrix, parameter)
                write_parameter(self.state.pop(matrix)[key], self.state[parameter][key])
        self.param_groups = groups


def _muon(groups: list[dict[str, Any]], config: OptimizerConfig, _: bool | None) -> torch.optim.Optimizer:
    """Muon, its updates scaled to the size of AdamW's, so that one rate serves both (Liu et al., arXiv 2502.16982)."""
    momentum = 0.95 if config.momentum is None else config.momentum
    return _Muon(groups, lr=config.lr, momentum=momentum, adjust_lr_fn="match_rms_adamw")


class _Joined(torch.optim.Optimizer):
    """Several optimizers as one, with one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = parts
        for part in parts:
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
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
    """The optimizer over the trained parameters of `model`, each once, with its state as before the first step.

    Muon takes the matrices of `blocks` alone, AdamW the rest: embeddings, the output layer, vectors. `keys` seed what
    is rounded at random, and `compiled` says whether torch.compile is taken, where `config.state` asks for bf16.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.state != StateConfig():
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}[config.state.moments]
        kind = OptimizerKind(lambda groups, config, _: LeanAdamW(groups, config, keys or {}, compiled), (), fuses=False)
        return _make(replace(kind, zeros=partial(zero_moments, dtype=dtype)), parameters, config, device)
    if config.name != "muon":
        return _make(OPTIMIZERS[config.name], parameters, config, device)
    matrices = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    shares = {"muon": [p for p in parameters if id(p) in matrices]}
    shares["adamw"] = [p for p in parameters if id(p) not in matrices]
    return _Joined([_make(OPTIMIZERS[name], share, config, device) for name, share in shares.items()])


def _make(
    kind: OptimizerKind, parameters: Sequence[nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """One optimizer of these parameters.

    Two groups: parameters of two or more dimensions (matrices, and embeddings with them) decay by
    `config.weight_decay`, vectors (norms) do not. The fused kernel is used where torch has it for the device type. The
    state is there from the start, so that a checkpoint can be loaded into it.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = True if kind.fuses and device.type in ("cpu", "cuda") else None
    optimizer = kind.make(groups, config, fused)
    for parameter in parameters:
        state = kind.zeros(parameter) if kind.zeros else {key: torch.zeros_like(parameter) for key in kind.moments}
        if kind.counts:
            state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"), **state}
        optimizer.state[parameter] = state
    return optimizer


def make_custom_optimizer(
    make: Callable[..., Any], named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """What `make`, of the user's module, makes. Raises UserError for what is no optimizer of all parameters."""
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


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """What a group has beside its parameters and the rate that is set before each step."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr", "lr_factor")}


@torch.no_grad()
def initialize_custom_state(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer of the user's own the state that a checkpoint is loaded into: one step, of which nothing stays.

    Its values are not those before the first step. Raises UserError for what no checkpoint would hold, state that is no
    tensor or that is kept in groups, and for an optimizer whose steps ask for the loss again.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    before = [parameter.clone() for parameter in parameters]
    settings = [_settings(group) for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except TypeError as error:
        message = f"optimizer of model.target must perform a step without a closure: {error}"
        raise UserError("model.optimizer_needs_closure", message) from None
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        if kept := [key for key, value in _settings(group).items() if values.get(key) != value]:
            raise UserError(
                "model.optimizer_state",
                f"optimizer of model.target counts in its groups ({kept[0]}), which checkpoints do not hold: after a "
                "restart it would not continue as before. Keep a tensor in its state for each parameter",
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
    """Use `lr` in the optimizer's next step, for all parameters; groups of the user's own keep their proportions.

    Raises UserError for what is no number: it may be the user's own.
    """
    if not isinstance(lr, int | float) or not math.isfinite(lr):
        message = f"learning_rate of model.target must return a finite number; it returned {lr!r}"
        raise UserError("model.invalid_learning_rate", message)
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


class LossScaler:
    """Scale of the loss in fp16, so that small gradients do not vanish (Micikevicius et al., arXiv 1710.03740, 3.2).

    A step whose gradient is not finite is skipped and halves the scale; `INTERVAL` good ones in a row double it. At a
    scale of 1 or less nothing overflowed by scaling: the trainer has such a step judged as a bad one.

    The constants are those of torch.amp.GradScaler. That class itself looks for infinities in the gradients of its own
    process, and torch's sharded one asks one group: under a pipeline or tensor parallelism ranks would part. Here the
    norm of the whole model's gradient, the same on all ranks and needed for clipping anyway, says it for all.
    """

    INTERVAL = 2000

    def __init__(self) -> None:
        self.scale = 2.0**16
        self._good = 0

    def update_scale(self, norm: float) -> bool:
        """Whether a gradient with this norm is finite; sets the next step's scale."""
        finite = math.isfinite(norm)
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._good == self.INTERVAL:
            self.scale, self._good = self.scale * 2, 0
        return finite

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self._good}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up what `state_dict` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])


_CHUNK_ENTRIES = 2**15
"""Entries whose squares are added up one after the other."""


def compute_total_norm(gradients: list[Tensor]) -> Tensor:
    """Their common norm: 0-d. On CPUs torch adds up squares one after the other: a large tensor in pieces.

    In fp32 a whole norm of 2²⁷ entries is 1.4 % too small; of pieces it is right to 1e-7.
    """
    if any(gradient.device.type == "cpu" for gradient in gradients):
        gradients = [piece for gradient in gradients for piece in gradient.flatten().split(_CHUNK_ENTRIES)]
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    # torch would round each tensor's norm to its type
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def find_frozen_names(patterns: Sequence[str], task: Task) -> set[str]:
    """Names of the whole model's parameters that do not move; no rank need hold them all.

    Raises UserError as `_matching` does.
    """
    whole = range(task.config.model.layers)
    return _matching(patterns, [name for name, _ in task.named_weights(task.build(whole))]) if patterns else set()


def check_freeze(patterns: str, model: str) -> None:
    """Raise UserError where `patterns` do not fit the decoder of the section `model`; both are JSON."""
    with torch.device("meta"):
        whole = Decoder(ModelConfig.model_validate_json(model), 1, 1)
    _matching(json.loads(patterns), [name for name, _ in whole.named_weights()])


def _matching(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Raises UserError for a pattern that matches nothing, and where nothing is left to train."""
    found: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            existing = shorten(", ".join(names), 300, placeholder=" …")
            message = f"optimizer.freeze: {pattern!r} matches no parameter; there are {existing}"
            raise UserError("model.no_such_parameter", message)
        found.update(matched)
    if found == set(names):
        message = "optimizer.freeze: the patterns match all parameters, so that nothing would be trained: remove some"
        raise UserError("model.all_frozen", message)
    return found
