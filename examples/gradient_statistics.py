"""Record the norm of the gradient of each block of a model in metrics.jsonl. It works with all models and layouts.

    python submit.py examples/vit.yaml run.name=gradients 'train.callbacks=[examples.gradient_statistics]'

The metrics are called `gradient.GROUP`, such as `gradient.model.layers.0`. They are the norms before clipping.
examples/plain_script.py uses `gradient_norms` in a script without Sluice's trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def gradient_norms(parameters: Iterable[tuple[str, nn.Parameter]], *, gather: bool = False) -> dict[str, float]:
    """Return the norm of the gradient of each group of parameters.

    A group has the parameters with the same name up to its first number, such as `model.layers.0`.

    Args:
        parameters: names and parameters.
        gather: whether other ranks have other parameters. All ranks must then call this function together.
    """
    squares = {}  # by the name of the parameter
    for name, parameter in parameters:
        if (gradient := parameter.grad) is not None:
            if hasattr(gradient, "full_tensor"):  # With ZeRO or tensor parallelism, this rank has only a shard.
                gradient = gradient.full_tensor()
            squares[name] = gradient.double().square().sum()
    by_rank = [dict(zip(squares, torch.stack([*squares.values()]).tolist(), strict=True))]  # one copy from the GPU
    if gather:
        by_rank *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(by_rank, by_rank[0])
    sums: dict[str, float] = {}
    for name, square in {name: square for squares in by_rank for name, square in squares.items()}.items():
        match = re.match(r"(.*?\.\d+)\.", name)
        group = match[1] if match else name.rpartition(".")[0] or name
        sums[group] = sums.get(group, 0.0) + square
    return {group: square**0.5 for group, square in sums.items()}


def callbacks(config: Any) -> list[Any]:
    """Return the callback."""
    from pipeline.train.callback import Callback  # Here, because other scripts import this module without Sluice.

    class GradientStatistics(Callback):
        def on_backward_end(self, trainer: Any, step: int) -> None:
            # In a pipeline, each rank has only some of the blocks.
            norms = gradient_norms(trainer.named_parameters(), gather=config.parallel.pipeline > 1)
            self.metrics = {f"gradient.{group}": norm / trainer.loss_scale for group, norm in norms.items()}

        def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any]) -> None:
            metrics.update(self.metrics)

    return [GradientStatistics()]
