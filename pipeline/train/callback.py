"""Callbacks: the interface through which other code acts at fixed points of a training step.

The trainer calls each hook of all its callbacks in one fixed order (`Trainer._make_callbacks`). Watchdog, bad-step
guard, profiler, held-out evaluation, metrics and requests to save are callbacks. A user's module may add callbacks:
`callbacks(config) -> list[Callback]` (docs/callbacks.md). Hooks are named as in Lightning and OLMo-core.
"""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.data.loader import Batch


class TrainerContext(Protocol):
    """The part of the trainer that callbacks may use."""

    config: Config
    rank: int
    device: torch.device
    start_step: int
    """The step of the checkpoint that was restored; 0 if the run starts from scratch."""
    steps: int
    """The number of the last step of the run, counted from 1."""
    samples_consumed: int
    """The number of samples in all steps so far."""
    step_s: float
    """Duration of the latest step in seconds, without `overhead_s`."""
    data_wait_s: float
    """Seconds for which the latest step waited for its batch."""
    update_number: int | None
    """While a `training_step` of the user updates weights: the index of the update in the step, from 0. Otherwise
    None."""
    overhead_s: dict[str, float]
    """Seconds since the metrics of the previous step that were spent on other work, by name, such as `evaluate_s`."""

    @property
    def loss_scale(self) -> float:
        """The factor by which gradients are too large in `on_backward_end`; 1 unless `train.precision` is fp16."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters with their names in the full model."""

    def compute_held_out_outputs(self, count: int) -> Iterator[tuple[Batch, Any]]:
        """Yield batches of held-out samples and the outputs of the model for them, on all ranks.

        The model has the current weights, and is in evaluation mode. All ranks must call this method together, and
        consume all batches. Every rank computes the outputs of all batches, so `count` should be small.

        Args:
            count: the number of samples: the first ones of the held-out data, at most `train.evaluate_sequences`. A
                batch has at most `evaluate.batch` samples.

        Yields:
            The arrays of the samples by name, such as `tokens` (int64, shape (B, T + 1)), and what the model returns,
            such as logits of shape (B, T, vocabulary).

        Raises:
            UserError: if `train.evaluate_every` is not set.
        """

    def add_image(self, name: str, step: int, image: Any) -> None:
        """Add an image to report.html, on rank 0 only. An image of the same name and step is replaced.

        If the image is invalid or too large, a warning is printed and the image is left out.

        Args:
            name: letters, digits, `.`, `_` and `-`.
            step: the step that the image shows.
            image: the content of a PNG or SVG file (bytes), at most 1 MiB; or the pixels as an array or tensor of type
                uint8 with the shape (H, W) or (H, W, 3).
        """

    def request_stop(self, reason: str) -> None:
        """Complete the train stage early: all ranks finish the next step, save and exit.

        It is enough if a single rank calls this method. The stage is then done, and no later job continues it.
        """

    def enter_phase(self, step: int, phase: str) -> None:
        """Call `on_phase` of all callbacks, because `step` enters `phase`."""

    def log(self, message: str) -> None:
        """Print a line to the job's output, on rank 0 only."""


class Callback:
    """Hooks that the trainer calls. Override the hooks you need; hooks that are not overridden cost nothing.

    A hook runs on every rank, in the thread that trains, unless its docstring says otherwise. A hook that communicates
    must do so on all ranks. `step` counts optimizer steps from 1.
    """

    def on_start(self, trainer: TrainerContext) -> None:
        """Run once before the first step of an attempt, after the checkpoint was restored."""

    def on_phase(self, trainer: TrainerContext, step: int, phase: str) -> None:
        """Run when `step` enters a phase, such as `data`, `forward`, `backward`, `reduce` or `save`."""

    def on_step_begin(self, trainer: TrainerContext, step: int) -> None:
        """Run before the step's batch is loaded."""

    def on_learning_rate(self, trainer: TrainerContext, step: int, lr: float) -> float | None:
        """Return the learning rate of the step; None to keep `lr`. All ranks must return the same value.

        Args:
            lr: the learning rate of the schedule, or of an earlier callback.
        """

    def on_backward_end(self, trainer: TrainerContext, step: int) -> None:
        """Run after gradients and loss were reduced over all ranks, before gradients are clipped.

        With `train.precision: fp16`, divide gradients by `trainer.loss_scale`.
        """

    def on_before_optimizer_step(self, trainer: TrainerContext, step: int, loss: float, grad_norm: float) -> str | None:
        """Return a reason to skip the update of the weights; None to update them.

        All ranks must return the same value. If a user's `training_step` runs the step, this hook runs before each of
        its updates.

        Args:
            loss: the mean over the global batch; in a `training_step`, the mean loss since its previous update.
            grad_norm: the norm of the gradient of the updated weights before clipping.
        """

    def on_step_end(self, trainer: TrainerContext, step: int, metrics: dict[str, Any]) -> None:
        """Run after the weights were updated, or their update was skipped.

        Entries that rank 0 adds to `metrics` are written to metrics.jsonl.
        """

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Run when the metrics of `step` are complete."""

    def on_evaluation(self, trainer: TrainerContext, step: int, metrics: dict[str, float]) -> None:
        """Run after an evaluation on held-out data (`train.evaluate_every`). `metrics` are the same on all ranks.

        Entries that rank 0 adds to `metrics` are written to metrics.jsonl. If their names begin with `held_out_`, the
        report shows them as the other metrics on held-out data. Add entries on all ranks.

        A stop may prevent the evaluation of a step. The next attempt then evaluates the restored step before it calls
        `on_start` of your callbacks, so `on_evaluation` may run before `on_start`.
        """

    def on_save(self, trainer: TrainerContext, step: int) -> None:
        """Run when the checkpoint of `step` is about to be saved."""

    def on_saved(self, trainer: TrainerContext, step: int, save_duration_s: float) -> None:
        """Run after the checkpoint was committed, on rank 0 only and in the thread that writes it.

        Args:
            save_duration_s: the duration of the save in seconds.
        """

    def on_stop(self, trainer: TrainerContext, step: int, reason: str) -> None:
        """Run when the ranks have agreed to stop after `step`, before the checkpoint is saved.

        No checkpoint is saved if there is no time for a save, or if the step was bad. This hook does not run after the
        last step of the run.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart needs, as JSON values. Each checkpoint contains the state of rank 0."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that rank 0's `state_dict` returned. Runs on every rank."""


class CallbackList:
    """Calls each hook of several callbacks, in the order of the callbacks."""

    def __init__(self, trainer: TrainerContext, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self.callbacks = list(callbacks)

        self._start_hooks = self._list_overrides("on_start")
        self._phase_hooks = self._list_overrides("on_phase")
        self._step_begin_hooks = self._list_overrides("on_step_begin")
        self._learning_rate_hooks = self._list_overrides("on_learning_rate")
        self._backward_end_hooks = self._list_overrides("on_backward_end")
        self._before_optimizer_step_hooks = self._list_overrides("on_before_optimizer_step")
        self._step_end_hooks = self._list_overrides("on_step_end")
        self._metrics_hooks = self._list_overrides("on_metrics")
        self._evaluation_hooks = self._list_overrides("on_evaluation")
        self._save_hooks = self._list_overrides("on_save")
        self._saved_hooks = self._list_overrides("on_saved")
        self._stop_hooks = self._list_overrides("on_stop")

    def _list_overrides(self, hook: str) -> list[Callable[..., Any]]:
        """Return the bound method `hook` of each callback whose class overrides it."""
        default = getattr(Callback, hook)
        return [getattr(callback, hook) for callback in self.callbacks if getattr(type(callback), hook) is not default]

    def on_start(self) -> None:
        """Call `on_start` of every callback that overrides the hook."""
        for hook in self._start_hooks:
            hook(self._trainer)

    def on_phase(self, step: int, phase: str) -> None:
        """Call `on_phase` of every callback that overrides the hook.

        Args:
            step: the number of the step.
            phase: the part of the step that begins, such as `forward`.
        """
        for hook in self._phase_hooks:
            hook(self._trainer, step, phase)

    def on_step_begin(self, step: int) -> None:
        """Call `on_step_begin` of every callback that overrides the hook."""
        for hook in self._step_begin_hooks:
            hook(self._trainer, step)

    def on_learning_rate(self, step: int, lr: float) -> float:
        """Call `on_learning_rate` of every callback. Return the last rate that is not None, or `lr`."""
        for hook in self._learning_rate_hooks:
            new_lr = hook(self._trainer, step, lr)
            lr = lr if new_lr is None else new_lr
        return lr

    def on_backward_end(self, step: int) -> None:
        """Call `on_backward_end` of every callback that overrides the hook."""
        for hook in self._backward_end_hooks:
            hook(self._trainer, step)

    def on_before_optimizer_step(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Call `on_before_optimizer_step` of every callback. Return the first reason to skip the update, or None."""
        reasons = [hook(self._trainer, step, loss, grad_norm) for hook in self._before_optimizer_step_hooks]
        return next((reason for reason in reasons if reason is not None), None)

    def on_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        """Call `on_step_end` of every callback that overrides the hook."""
        for hook in self._step_end_hooks:
            hook(self._trainer, step, metrics)

    def on_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Call `on_metrics` of every callback that overrides the hook."""
        for hook in self._metrics_hooks:
            hook(self._trainer, step, metrics)

    def on_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Call `on_evaluation` of every callback that overrides the hook. Callbacks may add entries to `metrics`."""
        for hook in self._evaluation_hooks:
            hook(self._trainer, step, metrics)

    def on_save(self, step: int) -> None:
        """Call `on_save` of every callback that overrides the hook."""
        for hook in self._save_hooks:
            hook(self._trainer, step)

    def on_saved(self, step: int, save_duration_s: float) -> None:
        """Call `on_saved` of every callback that overrides the hook."""
        for hook in self._saved_hooks:
            hook(self._trainer, step, save_duration_s)

    def on_stop(self, step: int, reason: str) -> None:
        """Call `on_stop` of every callback that overrides the hook."""
        for hook in self._stop_hooks:
            hook(self._trainer, step, reason)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each callback that has one, by class name.

        The states are copies, because a background save writes them after callbacks may have changed the originals.

        Raises UserError if a state cannot be converted to JSON, or if two callbacks of one class have a state.
        """
        states = [(type(callback).__name__, state) for callback in self.callbacks if (state := callback.state_dict())]
        for name, count in Counter(name for name, _ in states).items():
            if count > 1:
                raise UserError(
                    "model.callback_state",
                    f"{count} callbacks of the class {name} have state, but a checkpoint stores states "
                    "by class name. Combine them, or derive a class for each",
                )
        copies = {}
        for name, state in states:
            try:
                copies[name] = json.loads(json.dumps(state))
            except (TypeError, ValueError) as error:
                raise UserError(
                    "model.callback_state",
                    f"state_dict of the callback {name} must return JSON values: {error}. Convert "
                    "tensors with .item() or .tolist()",
                ) from error
        return copies

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Pass each callback the state that `state_dict` returned for its class."""
        for callback in self.callbacks:
            if (state := states.get(type(callback).__name__)) is not None:
                callback.load_state_dict(state)


def make_user_callbacks(module: Any, config: Config) -> list[Callback]:
    """Return the callbacks that the function `callbacks` of a user's module creates; [] if there is no such function.

    Raises UserError if the function does not return a list of callbacks.
    """
    if not hasattr(module, "callbacks"):
        return []
    callbacks = module.callbacks(config)
    if not isinstance(callbacks, list) or not all(isinstance(callback, Callback) for callback in callbacks):
        raise UserError(
            "model.not_a_callback",
            "model.target: callbacks(config) must return a list of objects whose classes derive from "
            f"pipeline.train.callback.Callback; it returned {callbacks!r}",
        )
    return callbacks


def try_callback_module(target: str) -> None:
    """Import a module of `train.callbacks`, and check that its `callbacks` is a function.

    Any error of the user's code is raised.
    """
    if not callable(importlib.import_module(target).callbacks):
        raise UserError("model.not_a_callback", f"train.callbacks: callbacks of {target} must be a function")
