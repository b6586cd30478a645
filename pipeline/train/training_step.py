"""Run the `training_step` of the user's module: a step with several backward passes and optimizers.

In all other runs, the engine computes the loss, runs one backward pass and updates all weights. Some methods need more:
a GAN updates two networks in turn, each with its own loss and optimizer. For them, a module defines

    training_step(engine, batch) -> dict     the metrics of the step, with at least `loss`

`engine` is a `StepEngine`. It does what the training loop does otherwise: it reduces gradients over ranks, scales and
clips them, checks them for bad values, updates weights, and sets the random seeds. So a stopped run still continues
with the same bits.

Data parallelism differs from other runs. Without ZeRO, gradients are reduced after the backward passes and not during
them, because DDP allows only one forward pass for each backward pass. With ZeRO, FSDP gathers the weights of a network
when it is first called, and keeps them until the next update, so that gradients of gradients can be computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pipeline.base.errors import UserError
from pipeline.data.loader import Batch
from pipeline.model.task import DTYPES
from pipeline.train.engine import Engine, compute_step_seed
from pipeline.train.optimizer import CombinedOptimizer

_RESERVED_METRICS = {"step", "grad_norm", "lr", "samples_consumed", "samples", "skipped"}
"""Names in metrics.jsonl that `training_step` must not return."""


@dataclass(frozen=True)
class StepHooks:
    """What the trainer does during a step of the user."""

    enter_phase: Callable[[str], None]
    """Called with the name of each phase when it begins."""
    on_backward_end: Callable[[], None]
    """Called when the gradients of an update are reduced."""
    find_skip_reason: Callable[[int, float, float], str | None]
    """Returns why an update must be skipped; None if it must not. The arguments are the index of the update in the
    step, the mean loss since the previous update, and the norm of the gradient. All ranks get the same result."""
    wants_attention: Callable[[], bool]
    """Returns True if this rank has a request, such as a stop."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step."""

    metrics: dict[str, float]
    """The metrics that `training_step` returned: means over all ranks."""
    grad_norm: float
    """The root of the sum of the squared gradient norms of all updates."""
    skip_reason: str | None
    """Why an update was skipped; None if all updates were performed."""
    needs_attention: bool
    """Whether any rank has a request."""


class StepEngine:
    """The `engine` argument of `training_step`.

    Args:
        engine: the engine with the model and the optimizers.
        hooks: functions of the trainer.
        step: the number of the step, counted from 1.
    """

    def __init__(self, engine: Engine, hooks: StepHooks, step: int) -> None:
        self.model: nn.Module = engine.parts[0]
        """The model. With ZeRO, call only its children, such as `engine.model.generator(z)`, not the model itself."""
        self.device: torch.device = engine.world.device
        """The device of the weights and of the batch."""
        self.step_number = step
        """The number of the step, counted from 1."""
        self.updates = 0
        """The number of updates so far in this step, including skipped ones."""
        self.skip_reason: str | None = None
        """Why an update of this step was skipped; None if none was skipped."""
        self.applied_updates = 0
        """The number of updates that changed weights."""
        self.squared_norms = 0.0
        """The sum of the squared gradient norms of all updates."""
        self._engine = engine
        self._hooks = hooks
        self._seed_number = 0
        self._micro_batches = 1
        """The number of micro-batches over which the losses are averaged."""
        self._losses: list[Tensor] = []
        """The losses of all backward passes since the previous update, divided by the number of micro-batches."""
        self._set_seed()

    def _set_seed(self) -> None:
        """Set the seed of the next random numbers. It depends on the run's seed, the step and the rank."""
        engine = self._engine
        torch.manual_seed(
            compute_step_seed(engine.config.run.seed, self.step_number, engine.random_stream, self._seed_number)
        )
        self._seed_number += 1

    def micro_batches(self, batch: Batch) -> Iterator[Batch]:
        """Yield the batch in parts of `train.micro_batch` samples. In this loop, `backward` averages over the parts.

        Args:
            batch: the `batch` argument of `training_step`.
        """
        parts = self._engine.task.split_micro_batches(batch, self._engine.config.train.micro_batch)
        self._micro_batches = len(parts)
        try:
            for part in parts:
                self._set_seed()
                self._hooks.enter_phase("forward")
                yield part
        finally:
            self._micro_batches = 1

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss to the gradients of all weights that the loss depends on.

        Args:
            loss: a scalar, the mean over the samples of a batch or micro-batch.

        Raises:
            UserError: if `loss` is not a scalar with a gradient.
        """
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise UserError(
                "model.wrong_loss",
                "training_step of model.target: engine.backward needs a tensor without dimensions that depends on "
                f"weights, such as a mean over the samples; it got {_describe(loss)}",
            )
        self._hooks.enter_phase("backward")
        scaler = self._engine.scaler
        scale = (1.0 if scaler is None else scaler.scale) / self._micro_batches
        with torch.autocast(self.device.type, enabled=False):
            (loss.float() * scale).backward()
        self._losses.append(loss.detach().double() / self._micro_batches)
        self._hooks.enter_phase("forward")

    def step(self, *names: str) -> float:
        """Update the weights of some optimizers with the gradients so far. Then clear all gradients of the model.

        All ranks must call this method equally often, with the same names. If the loss or the gradient is not finite,
        this update and all later updates of the step are skipped (`recovery.skip_bad_steps`).

        Args:
            names: keys of the dict that the module's `optimizer` function returns; none: all optimizers.

        Returns:
            The norm of the gradient of these weights before clipping, the same on all ranks.

        Raises:
            UserError: if there is no such optimizer, or if none of its weights has a gradient.
        """
        engine = self._engine
        optimizers = _select_optimizers(engine.optimizer, names)
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._hooks.enter_phase("reduce")
        losses = torch.stack(self._losses).sum() if self._losses else torch.zeros((), dtype=torch.float64)
        loss_tensor = losses.to(self.device)
        dist.all_reduce(loss_tensor)
        if not engine.has_distributed_model:
            _average_gradients(parameters, engine.config.parallel.bucket_mb)
        if all(parameter.grad is None for parameter in parameters):
            raise UserError(
                "model.no_gradient",
                f"training_step of model.target: engine.step({', '.join(map(repr, names))}) has no gradients: call "
                "engine.backward before it. engine.step clears all gradients, so to update several optimizers with the "
                "same gradients, name all of them in one call",
            )
        self._hooks.on_backward_end()
        norm: float
        norm_tensor = engine.clip_gradients(engine.config.optimizer.clip_norm, parameters)
        loss, norm = torch.stack([loss_tensor / engine.world.size, norm_tensor.double()]).tolist()
        has_overflowed = engine.scaler is not None and engine.scaler.scale > 1 and not math.isfinite(norm)
        reason = self._hooks.find_skip_reason(self.updates, loss, 0.0 if has_overflowed else norm)
        if reason is None and (engine.scaler is None or engine.scaler.update_scale(norm)):
            for optimizer in optimizers:
                optimizer.step()
            self.applied_updates += 1
        self.skip_reason = self.skip_reason or reason
        self.updates += 1
        self.squared_norms += norm**2
        self.clear_gradients()
        self._losses.clear()
        self._hooks.enter_phase("forward")
        return norm

    def clear_gradients(self) -> None:
        """Clear all gradients, and free gathered weights, which the update has changed."""
        for parameter in self.model.parameters():
            parameter.grad = None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def run_training_step(engine: Engine, batch: Batch, step: int, hooks: StepHooks) -> StepResult:
    """Run the user's `training_step`. All ranks must call this function.

    Args:
        engine: the engine of this rank.
        batch: this rank's part of the global batch.
        step: the number of the step, counted from 1.
        hooks: functions of the trainer.

    Raises:
        UserError: if `training_step` performs no update, or returns something else than metrics.
    """
    step_engine = StepEngine(engine, hooks, step)
    dtype = DTYPES.get(engine.config.train.precision)
    hooks.enter_phase("forward")
    with nullcontext() if dtype is None else torch.autocast(engine.world.device.type, dtype):
        returned = engine.task.user_module.training_step(step_engine, batch)
    if not step_engine.updates:
        raise UserError(
            "model.no_update", "training_step of model.target must call engine.step: no weights were updated"
        )
    step_engine.clear_gradients()
    engine.end_training_step(step, is_applied=step_engine.applied_updates > 0)
    values = _check_metrics(returned)
    needs_attention = hooks.wants_attention()
    reduced = torch.tensor([*values.values(), float(needs_attention)], dtype=torch.float64).to(engine.world.device)
    dist.all_reduce(reduced)
    *sums, requests = reduced.tolist()
    metrics = {name: total / engine.world.size for name, total in zip(values, sums, strict=True)}
    return StepResult(metrics, math.sqrt(step_engine.squared_norms), step_engine.skip_reason, requests > 0)


def _check_metrics(returned: Any) -> dict[str, float]:
    """Return the metrics that `training_step` returned as numbers, sorted by name. Raises UserError if it cannot."""
    if not isinstance(returned, Mapping) or "loss" not in returned:
        raise UserError(
            "model.wrong_metrics",
            "training_step of model.target must return a dict of numbers with the key `loss`, which the log shows; it "
            f"returned {_describe(returned)}",
        )
    if reserved := sorted(_RESERVED_METRICS & returned.keys()):
        raise UserError(
            "model.reserved_metric",
            f"training_step of model.target returns the metric {reserved[0]}, which Sluice writes; choose another name",
        )
    try:
        return {str(name): float(returned[name]) for name in sorted(returned, key=str)}
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            "model.wrong_metrics", f"training_step of model.target must return numbers, but a metric is none: {error}"
        ) from error


def _describe(value: Any) -> str:
    """Describe a wrong value for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    return f"{str(value)[:100]!r}"


def _select_optimizers(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> list[torch.optim.Optimizer]:
    """Return the optimizers with these names; all of them if there are no names. Raises UserError for unknown names."""
    if not names:
        return [optimizer]
    known = optimizer.by_name if isinstance(optimizer, CombinedOptimizer) else {}
    if unknown := [name for name in names if name not in known]:
        existing = f"it has {', '.join(known)}" if known else "the run has one optimizer without a name"
        raise UserError(
            "model.unknown_optimizer",
            f"training_step of model.target: there is no optimizer {unknown[0]!r}: {existing}. Names are the keys of "
            "the dict that the module's function `optimizer` returns (optimizer.name own)",
        )
    return [known[name] for name in names]


def _average_gradients(parameters: list[nn.Parameter], bucket_mb: int) -> None:
    """Average the gradients of these parameters over all ranks, in place. All ranks must call this function.

    If only some ranks have a gradient of a parameter, it counts as 0 on the other ranks.
    """
    size = dist.get_world_size()
    if size == 1 or not parameters:
        return
    has_gradient = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient)
    used = [p for p, count in zip(parameters, has_gradient.tolist(), strict=True) if count]
    bucket: list[Tensor] = []
    bucket_bytes = 0
    for index, parameter in enumerate(used):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert not isinstance(gradient, DTensor)
        bucket.append(gradient)
        bucket_bytes += gradient.nbytes
        next_dtype = used[index + 1].dtype if index + 1 < len(used) else None
        if bucket_bytes >= bucket_mb << 20 or next_dtype != parameter.dtype:
            flat = torch.cat([each.flatten() for each in bucket])
            dist.all_reduce(flat)
            flat /= size
            for each, values in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                each.copy_(values.view_as(each))
            bucket, bucket_bytes = [], 0
