"""Complete the train stage when a metric on held-out data no longer improves (`train.early_stopping`).

The callback counts evaluations in a row without an improvement. Its state is in each checkpoint, so an interrupted run
ends at the same step as an uninterrupted one. If a run ended early, `resume` with a larger patience continues it as if
it had had this patience from the start (`completes_stage` in pipeline/checkpoint/catalog.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pipeline.base.errors import UserError
from pipeline.config.sections import EarlyStoppingConfig
from pipeline.evaluate.result import HELD_OUT_PREFIX
from pipeline.train.callback import Callback, TrainerContext


class EarlyStopping(Callback):
    """Calls `trainer.request_stop` after `patience` evaluations in a row without an improvement.

    All ranks get the same metrics, so all ranks have the same state.

    Args:
        config: the section `train.early_stopping`.
        fork_step: the step of the checkpoint with which this run began as a fork; None if it is no fork. A fork starts
            to count at 0, because its held-out data may differ.
    """

    def __init__(self, config: EarlyStoppingConfig, fork_step: int | None = None) -> None:
        self.config = config
        self._fork_step = fork_step
        self._best: float | None = None
        """The best value so far; None before the first evaluation with a finite value."""
        self._best_step = 0
        self.evaluations_without_improvement = 0
        self._has_completed = False
        """Whether this callback has completed the stage. True only in the checkpoint of this step."""

    @property
    def reason(self) -> str | None:
        """Why the stage must be completed; None if it continues."""
        count = self.evaluations_without_improvement
        if count < self.config.patience:
            return None
        best = "" if self._best is None else f": {self._best:.6g} at step {self._best_step}"
        return f"held-out {self.config.metric} has not improved in {count} evaluation{'s' * (count > 1)}{best}"

    def describe_condition(self) -> dict[str, Any]:
        """Return why the stage was completed, for `completes_stage` in pipeline/checkpoint/catalog.py."""
        return {**self.config.rule, "evaluations_without_improvement": self.evaluations_without_improvement}

    def on_start(self, trainer: TrainerContext) -> None:
        """Request the stop that the previous attempt could not carry out.

        If the stage was already complete and now continues with a larger `train.steps`, the count starts again at 0.
        """
        if trainer.start_step == self._fork_step:
            self._best = None
            self.evaluations_without_improvement = 0
        elif self.reason is not None and self._has_completed:
            self.evaluations_without_improvement = 0
        elif self.reason is not None:
            trainer.request_stop(self.reason)
        self._has_completed = False

    def on_evaluation(self, trainer: TrainerContext, step: int, metrics: dict[str, float]) -> None:
        """Count the evaluation.

        Raises:
            UserError: if evaluations do not report the metric.
        """
        key = f"{HELD_OUT_PREFIX}{self.config.metric}"
        if key not in metrics:
            names = [name.removeprefix(HELD_OUT_PREFIX) for name in metrics if name.startswith(HELD_OUT_PREFIX)]
            remedy = f"but only {', '.join(names)}: set train.early_stopping.metric to one of them"
            if self.config.metric in metrics:
                remedy = f"because a callback added it without the prefix: call it {key} in on_evaluation"
            raise UserError(
                "train.unknown_metric",
                f"train.early_stopping.metric: evaluations do not report {self.config.metric}, {remedy}",
            )
        value = metrics[key]
        sign = -1.0 if self.config.resolved_mode == "max" else 1.0
        is_better = self._best is None or sign * value < sign * self._best - self.config.min_delta
        if math.isfinite(value) and is_better:
            self._best = value
            self._best_step = step
            self.evaluations_without_improvement = 0
            return
        self.evaluations_without_improvement += 1
        if self.reason is not None:
            trainer.request_stop(self.reason)

    def on_stop(self, trainer: TrainerContext, step: int, reason: str) -> None:
        """Record whether the stage is completed because of this callback."""
        self._has_completed = reason == self.reason

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, and the metric to which they belong."""
        return {
            "metric": self.config.metric,
            "mode": self.config.resolved_mode,
            "best": self._best,
            "best_step": self._best_step,
            "evaluations_without_improvement": self.evaluations_without_improvement,
            "has_completed": self._has_completed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, unless they belong to another metric."""
        if (state["metric"], state["mode"]) == (self.config.metric, self.config.resolved_mode):
            self._best = state["best"]
            self._best_step = state["best_step"]
            self.evaluations_without_improvement = state["evaluations_without_improvement"]
            self._has_completed = state["has_completed"]
