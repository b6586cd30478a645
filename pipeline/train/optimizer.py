"""Optimizers, and the learning rate.

The learning rate of a step is a pure function of (config, step, steps): nothing to save, nothing to restore, and a
run that stops and goes on sees the same rates. The trainer calls :func:`set_learning_rate` before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.config.sections import OptimizerConfig
from pipeline.config.types import StateConfig
from pipeline.model.decoder import full_tensor, write_parameter
from pipeline.train.lean_adamw import LeanAdamW, zero_moments
from pipeline.train.lr_schedule import learning_rate as learning_rate


@dataclass(frozen=True)
class Kind:
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
                super().step()
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


KINDS = {
    "adamw": Kind(_adamw, ("exp_avg", "exp_avg_sq")),
    "sgd": Kind(_sgd, ("momentum_buffer",), counts=False),
    "muon": Kind(_muon, ("momentum_buffer",), counts=False),
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
        kind = Kind(lambda groups, config, _: LeanAdamW(groups, config, keys or {}, compiled), (), fuses=False)
        return _make(replace(kind, zeros=partial(zero_moments, dtype=dtype)), parameters, config, device)
    if config.name != "muon":
        return _make(KINDS[config.name], parameters, config, device)
    matrices = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    shares = {"muon": [p for p in parameters if id(p) in matrices]}
    shares["adamw"] = [p for p in parameters if id(p) not in matrices]
    return _Joined([_make(KINDS[name], share, config, device) for name, share in shares.items()])


def _make(
    kind: Kind, parameters: Sequence[nn.Parameter], config: OptimizerConfig, device: torch.device
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


def own_optimizer(
    make: Callable[..., Any], named: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig
) -> torch.optim.Optimizer:
    """What `make`, of the user's module, makes. Raises UserError for what is no optimizer of all parameters."""
    optimizer = make([(name, parameter) for name, parameter in named if parameter.requires_grad], config)
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    taken = {id(parameter) for group in groups for parameter in group["params"]}
    if lacking := [name for name, parameter in named if parameter.requires_grad and id(parameter) not in taken]:
        raise UserError(
            "optimizer of model.target must return a torch.optim.Optimizer over all parameters that it is given; "
            f"{lacking[0]} is in none of its groups"
        )
    for group in groups:
        group["lr_factor"] = group["lr"] / config.lr
    return optimizer


def _settings(group: dict[str, Any]) -> dict[str, str]:
    """What a group has beside its parameters and the rate that is set before each step."""
    return {key: repr(value) for key, value in group.items() if key not in ("params", "lr", "lr_factor")}


@torch.no_grad()
def try_out(optimizer: torch.optim.Optimizer) -> None:
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
        raise UserError(f"optimizer of model.target must make a step without a closure: {error}") from None
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        if kept := [key for key, value in _settings(group).items() if values.get(key) != value]:
            raise UserError(
                f"optimizer of model.target counts in its groups ({kept[0]}), which checkpoints do not hold: after a "
                "stop it would not go on as before; let it keep a tensor in its state for each parameter"
            )
    optimizer.zero_grad(set_to_none=True)
    for parameter, values in zip(parameters, before, strict=True):
        parameter.copy_(values)
        for key, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                raise UserError(f"optimizer of model.target keeps {key}, no tensor, so checkpoints cannot hold it")


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the optimizer's next step, for all parameters; groups of the user's own keep their proportions.

    Raises UserError for what is no number: it may be the user's own.
    """
    if not isinstance(lr, int | float) or not math.isfinite(lr):
        raise UserError(f"learning_rate of model.target must return a finite number; it returned {lr!r}")
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

    def see(self, norm: float) -> bool:
        """Whether a gradient with this norm is finite; sets the next step's scale."""
        finite = math.isfinite(norm)
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._good == self.INTERVAL:
            self.scale, self._good = self.scale * 2, 0
        return finite

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good": self._good}

    def load(self, state: Mapping[str, float]) -> None:
        """Take up what `state` returned."""
        self.scale, self._good = float(state["scale"]), int(state["good"])
