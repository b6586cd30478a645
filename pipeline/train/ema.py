"""The exponential moving average (EMA) of the trained weights: `train.ema`.

After every `every_steps`-th optimizer step, average = decay · average + (1 - decay) · weight, as in
torch.optim.swa_utils. The average starts as the initial weights, without bias correction and without a warm-up. Each
rank averages the shards that it holds, so no rank sends a message. Averages are fp32, also of bf16 weights.

With local SGD, each replica averages its own weights. Checkpoints and evaluations use the mean over the replicas, which
is also the average of the mean weights, because both are linear.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.config.sections import EmaConfig
from pipeline.model.decoder import local_tensor


class WeightAverage:
    """The averages of this rank's trained weights.

    Args:
        config: the config section `train.ema`.
        named_weights: this rank's parameters, with their initial values and their names in the whole model. Frozen
            parameters have no average. If a name occurs twice (tied embeddings in a V schedule), the first parameter is
            averaged.
    """

    def __init__(self, config: EmaConfig, named_weights: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.config = config
        self._weights: dict[str, nn.Parameter] = {}
        for name, weight in named_weights:
            if weight.requires_grad:
                self._weights.setdefault(name, weight)
        self.averages: dict[str, Tensor] = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in self._weights.items()
        }
        """The averages by the names of the parameters: fp32, sharded like the parameters."""
        self._update_fp32 = get_ema_multi_avg_fn(config.decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after optimizer step number `step` to the averages, if `every_steps` divides this number."""
        if step % self.config.every_steps or not self.averages:
            return
        averages = [local_tensor(average) for average in self.averages.values()]
        weights = [local_tensor(weight) for weight in self._weights.values()]
        if all(weight.dtype == torch.float32 for weight in weights):
            self._update_fp32(averages, weights, None)
            return
        # The function of torch needs tensors of one type. Only one fp32 copy of a weight at a time is in memory.
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.float(), 1 - self.config.decay)
