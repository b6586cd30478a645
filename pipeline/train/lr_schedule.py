"""The learning rate of each step. This module does not import torch, because login nodes use it."""

from __future__ import annotations

import math

from pipeline.config.sections import OptimizerConfig


def compute_learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of optimizer step `step`, counted from 1, of a training of `steps` steps.

    Each schedule is a function of a position p. With `schedule_counts_from: 1`, p is `step`; with 0, it is `step` - 1,
    the number of completed steps, as in the schedulers of transformers and `torch.optim.lr_scheduler`.
    Up to p = W = `warmup_steps`, the rate is peak * p / W. From W to p = `steps`:

    - `constant`: the peak;
    - `linear`: a straight line from the peak to peak * min_lr_ratio;
    - `cosine`: half a cosine to the same end (Loshchilov and Hutter, "SGDR", arXiv 1608.03983, equation 5);
    - `wsd`: the peak, then a straight line to the same end over the last `decay_fraction` of all steps, rounded to
      whole steps and never into the warm-up (Hu et al., "MiniCPM", arXiv 2404.06395, section 4).
    """
    position = step - 1 + config.schedule_counts_from
    if config.warmup_steps and position <= config.warmup_steps:
        return config.lr * position / config.warmup_steps
    after_warmup = steps - config.warmup_steps
    decay_steps = after_warmup
    if config.schedule == "wsd":
        decay_steps = min(after_warmup, max(1, round(config.decay_fraction * steps)))
    progress = max(0.0, 1 - (steps - position) / decay_steps)  # of the decay: 0 before it, 1 at its end
    if config.schedule == "constant":
        progress = 0.0
    left = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
