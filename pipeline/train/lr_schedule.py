"""The course of the learning rate over a training, a function of the step alone; a login node asks, too (no torch)."""

from __future__ import annotations

import math

from pipeline.config.sections import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1, of a training of `steps` steps.

    Up to step W = `warmup_steps`: peak * step / W, thus the peak at W. From there to the last step:

    - `constant`: the peak;
    - `linear`: a straight line to peak * min_lr_ratio at the last step;
    - `cosine`: half a cosine to the same end (Loshchilov and Hutter, "SGDR", arXiv 1608.03983, equation 5);
    - `wsd`: the peak, then a straight line to the same end over the last `decay_fraction` of all steps, rounded to
      whole steps and never into the warm-up (Hu et al., "MiniCPM", arXiv 2404.06395, section 4).
    """
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
