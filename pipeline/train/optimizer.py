"""Optimizers, and the learning rate.

The learning rate of a step is a pure function of (config, step, steps): nothing to save, nothing to restore, and a
run that stops and goes on sees the same rates. The trainer calls :func:`set_learning_rate` before each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline.config.sections import OptimizerConfig


@dataclass(frozen=True)
class Kind:
    """An optimizer of `optimizer.name`."""

    make: Callable[[list[dict[str, Any]], OptimizerConfig, bool | None], torch.optim.Optimizer]
    """From parameter groups, the config, and whether torch's fused kernel is to be used (None: it has none)."""
    moments: tuple[str, ...]
    """What it keeps of each parameter in the parameter's shape; zeros before the first step."""
    counts: bool = True
    """Whether it counts each parameter's steps, as `step`."""


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig, fused: bool | None) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


KINDS = {
    "adamw": Kind(_adamw, ("exp_avg", "exp_avg_sq")),
}


def make_optimizer(model: nn.Module, config: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer over the trained parameters of `model`, each once, with its state as before the first step.

    Two groups: parameters of two or more dimensions (matrices, and embeddings with them) decay by
    `config.weight_decay`, vectors (norms) do not. The fused kernel is used where torch has it for the device type. The
    state is there from the start, so that a checkpoint can be loaded into it.
    """
    kind, parameters = KINDS[config.name], [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused = True if device.type in ("cpu", "cuda") else None
    optimizer = kind.make(groups, config, fused)
    for parameter in parameters:
        state = {key: torch.zeros_like(parameter) for key in kind.moments}
        if kind.counts:
            state = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"), **state}
        optimizer.state[parameter] = state
    return optimizer


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1, of a training of `steps` steps.

    Up to step W = `warmup_steps`: peak * step / W, thus the peak at W. From there to the last step:

    - `constant`: the peak;
    - `linear`: a straight line to peak * min_lr_ratio at the last step;
    - `cosine`: half a cosine to the same end (Loshchilov and Hutter, "SGDR", arXiv 1608.03983, equation 5);
    - `wsd`: the peak, then a straight line to the same end over the last `decay_fraction` of all steps, rounded to
      whole steps and never into the warm-up (Hu et al., "MiniCPM", arXiv 2404.06395, section 4).

    Raises ValueError for a step outside [1, steps].
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is outside a training of {steps} steps")
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    after_warmup = steps - config.warmup_steps
    decay_steps = after_warmup
    if config.schedule == "wsd":
        decay_steps = min(after_warmup, max(1, round(config.decay_fraction * steps)))
    progress = max(0.0, 1 - (steps - step) / decay_steps)  # of the decay: 0 before it, 1 at the last step
    if config.schedule == "constant":
        progress = 0.0
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` in the optimizer's next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


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
