"""The learning rate of each step. This module does not import torch, because login nodes use it."""

from __future__ import annotations

import math

from pipeline.config.sections import OptimizerConfig


def compute_learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1, in a run of `steps` steps.

    Each schedule is a function of a position p. With `schedule_counts_from: 1`, p is `step`; with 0, p is `step` - 1,
    the number of completed steps, as in the schedulers of transformers and `torch.optim.lr_scheduler`. Up to
    p = `warmup_steps`, the rate is lr * p / warmup_steps. From there to p = `steps`, the rate is:

    - `constant`: lr.
    - `linear`: a straight line from lr to lr * min_lr_ratio.
    - `cosine`: half a cosine from lr to lr * min_lr_ratio (Loshchilov and Hutter, "SGDR", arXiv 1608.03983, eq. 5).
    - `wsd`: first lr, then a straight line to lr * min_lr_ratio (Hu et al., "MiniCPM", arXiv 2404.06395, section 4).
      The line takes the last `decay_fraction` of all steps, rounded to an integer. If this would include steps of the
      warm-up, the line begins at the end of the warm-up.
    """
    position = step - 1 + config.schedule_counts_from
    if config.warmup_steps and position <= config.warmup_steps:
        return config.lr * position / config.warmup_steps
    after_warmup = steps - config.warmup_steps
    decay_steps = after_warmup
    if config.schedule == "wsd":
        decay_steps = min(after_warmup, max(1, round(config.decay_fraction * steps)))
    progress = max(0.0, 1 - (steps - position) / decay_steps)  # 0 before the decay, 1 at its end
    if config.schedule == "constant":
        progress = 0.0
    decay_factor = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay_factor)
