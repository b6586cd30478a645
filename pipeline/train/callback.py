"""Callbacks: what happens around a training step, apart from the step itself.

The trainer calls each hook of all its callbacks in one fixed order (`Trainer._make_callbacks`). Watchdog, bad-step
guard, profiler, held-out evaluation, metrics and requests are callbacks. A user's module may add its own:
`callbacks(config) -> list[Callback]` (docs/models.md). Hooks are named as in Lightning and OLMo-core.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from pipeline.base.errors import UserError
from pipeline.config.sections import Config


class TrainerContext(Protocol):
    """The part of the trainer that callbacks may use."""

    config: Config
    rank: int
    device: torch.device
    start_step: int
    """The step that was restored; 0 for a new training."""
    steps: int
    """The number of the last step."""
    samples_consumed: int
    step_s: float
    """Duration of the latest step in seconds, without `overhead_s`."""
    data_wait_s: float
    """Seconds for which the latest step waited for its batch."""
    overhead_s: dict[str, float]
    """Seconds since the previous step's metrics that were not spent on a step, such as `evaluate_s`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the whole model."""

    def request_stop(self, reason: str) -> None:
        """Complete the training early: all ranks finish the next step, save and exit.

        One rank may call it. The stage is then done, and no later job continues it.
        """

    def enter_phase(self, step: int, phase: str) -> None:
        """Call `on_phase` of all callbacks."""

    def log(self, message: str) -> None:
        """Print a line to the job's output, on rank 0 only."""


class Callback:
    """Hooks of a training. Override those you need; hooks that are not overridden cost nothing.

    Hooks run on every rank, in the thread that trains, unless they say otherwise. A hook that communicates must do so
    on all ranks. `step` counts optimizer steps from 1.
    """

    def on_start(self, trainer: TrainerContext) -> None:
        """Run once before the first step, after a checkpoint was restored."""

    def on_phase(self, trainer: TrainerContext, step: int, phase: str) -> None:
        """Run when `step` enters a phase, such as `data`, `forward`, `backward`, `reduce` or `save`."""

    def on_step_begin(self, trainer: TrainerContext, step: int) -> None:
        """Run before the step's batch is loaded."""

    def on_backward_end(self, trainer: TrainerContext, step: int) -> None:
        """Run after gradients and loss were reduced over all ranks, before gradients are clipped."""

    def on_before_optimizer_step(self, trainer: TrainerContext, step: int, loss: float, grad_norm: float) -> str | None:
        """Return a reason to skip the update of the weights, the same on all ranks; None to update them.

        Args:
            loss: mean over the global batch.
            grad_norm: norm of the whole model's gradient before clipping.
        """

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Run after the weights were updated. Entries added to `metrics` go to metrics.jsonl (rank 0's are written)."""

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Run when the metrics of `step` are complete."""

    def on_evaluation(self, trainer: TrainerContext, step: int, metrics: Mapping[str, float]) -> None:
        """Run after an evaluation on held-out data (`train.evaluate_every`). `metrics` are the same on all ranks.

        If a stop prevented the evaluation of the restored step, it runs at the next start, before this callback's
        `on_start`.
        """

    def on_save(self, trainer: TrainerContext, step: int) -> None:
        """Run when a checkpoint of `step` begins."""

    def on_saved(self, trainer: TrainerContext, step: int, seconds: float) -> None:
        """Run on rank 0 after the checkpoint was committed, in the thread that writes it."""

    def on_stop(self, trainer: TrainerContext, step: int, reason: str) -> None:
        """Run when the ranks agreed to stop after `step`, before the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a restart needs, as JSON values; that of rank 0 is saved in each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on every rank."""


class CallbackList:
    """Calls each hook of several callbacks in their order."""

    def __init__(self, trainer: TrainerContext, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self.callbacks = list(callbacks)

        def overridden(hook: str) -> list[Callable[..., Any]]:
            users = [each for each in self.callbacks if getattr(type(each), hook) is not getattr(Callback, hook)]
            return [getattr(each, hook) for each in users]

        self._on_start = overridden("on_start")
        self._on_phase = overridden("on_phase")
        self._on_step_begin = overridden("on_step_begin")
        self._on_backward_end = overridden("on_backward_end")
        self._on_before_optimizer_step = overridden("on_before_optimizer_step")
        self._on_step_end = overridden("on_step_end")
        self._on_metrics = overridden("on_metrics")
        self._on_evaluation = overridden("on_evaluation")
        self._on_save = overridden("on_save")
        self._on_saved = overridden("on_saved")
        self._on_stop = overridden("on_stop")

    def on_start(self) -> None:
        """Call `Callback.on_start`."""
        for hook in self._on_start:
            hook(self._trainer)

    def on_phase(self, step: int, phase: str) -> None:
        """Call `Callback.on_phase`."""
        for hook in self._on_phase:
            hook(self._trainer, step, phase)

    def on_step_begin(self, step: int) -> None:
        """Call `Callback.on_step_begin`."""
        for hook in self._on_step_begin:
            hook(self._trainer, step)

    def on_backward_end(self, step: int) -> None:
        """Call `Callback.on_backward_end`."""
        for hook in self._on_backward_end:
            hook(self._trainer, step)

    def on_before_optimizer_step(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Call `Callback.on_before_optimizer_step` of all callbacks; return the first reason to skip the update."""
        reasons = [hook(self._trainer, step, loss, grad_norm) for hook in self._on_before_optimizer_step]
        return next((reason for reason in reasons if reason is not None), None)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Call `Callback.on_step_end`."""
        for hook in self._on_step_end:
            hook(self._trainer, step, metrics)

    def on_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call `Callback.on_metrics`."""
        for hook in self._on_metrics:
            hook(self._trainer, step, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `Callback.on_evaluation`."""
        for hook in self._on_evaluation:
            hook(self._trainer, step, metrics)

    def on_save(self, step: int) -> None:
        """Call `Callback.on_save`."""
        for hook in self._on_save:
            hook(self._trainer, step)

    def on_saved(self, step: int, seconds: float) -> None:
        """Call `Callback.on_saved`."""
        for hook in self._on_saved:
            hook(self._trainer, step, seconds)

    def on_stop(self, step: int, reason: str) -> None:
        """Call `Callback.on_stop`."""
        for hook in self._on_stop:
            hook(self._trainer, step, reason)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of the callbacks that have any, by the names of their classes.

        Raises UserError if a state is not JSON, or if two callbacks of one class have state.
        """
        states = [(type(each).__name__, state) for each in self.callbacks if (state := each.state_dict())]
        for name, count in Counter(name for name, _ in states).items():
            if count > 1:
                raise UserError(
                    "model.callback_state",
                    f"model.target: {count} callbacks of the class {name} have state, so that a restart could not tell "
                    "them apart. Combine them, or derive a class for each",
                )
        for name, state in states:
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise UserError(
                    "model.callback_state",
                    f"model.target: state_dict of the callback {name} must return JSON values: {error}. Convert "
                    "tensors with .item() or .tolist()",
                ) from error
        return dict(states)

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Give each callback the state that `state_dict` returned for it."""
        for callback in self.callbacks:
            if (state := states.get(type(callback).__name__)) is not None:
                callback.load_state_dict(state)


def make_user_callbacks(module: Any, config: Config) -> list[Callback]:
    """Return the callbacks that a user's module makes; none if it has no function `callbacks`.

    Raises UserError if it returns anything else than a list of callbacks.
    """
    if not hasattr(module, "callbacks"):
        return []
    callbacks = module.callbacks(config)
    if not isinstance(callbacks, list) or not all(isinstance(each, Callback) for each in callbacks):
        raise UserError(
            "model.not_a_callback",
            "model.target: callbacks(config) must return a list of objects whose classes derive from "
            f"pipeline.train.callback.Callback; it returned {callbacks!r}",
        )
    return callbacks
