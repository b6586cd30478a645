"""The config section `sweep.search`: a study whose trials are sampled one after the other, and stopped early.

This module also computes the rungs: the steps at which trials pause until a decision (pipeline/search/schedule.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.types import NonNegativeInt, Section

DEFAULT_TRIALS_AT_ONCE = 8
"""Number of trials that run at the same time if `sweep.at_most` is not set."""
UNSEARCHABLE_KEYS = ("train.steps", "train.epochs", "train.evaluate_every", "train.evaluate_sequences")
"""Keys that a sweep may vary but a search may not, because the values of trials must be comparable at each rung."""


class Distribution(Section):
    """The distribution of a number."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    scale: Literal["linear", "log"] = "log"
    """Scale on which values are sampled."""
    type: Literal["float", "int"] = "float"
    """Type of the values. Values of type `float` have four significant digits."""

    @model_validator(mode="after")
    def _check_range(self) -> Distribution:
        """Raise ValueError if the range is empty or does not fit the scale or the type."""
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low ({self.low:g}) is not less than high ({self.high:g}), or one of them is not finite")
        if self.scale == "log" and self.low <= 0:
            raise ValueError(f"low ({self.low:g}) must be greater than 0 for scale log: set scale: linear")
        if self.type == "int" and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError(f"low ({self.low:g}) and high ({self.high:g}) must be whole numbers for type int")
        return self


Choices = Annotated[list[str | int | float | bool | None], Field(min_length=1)]


def round_value(distribution: Distribution, value: float) -> float:
    """Return a sampled number as the config contains it: a whole number, or one with four significant digits.

    With few digits, tables can show the exact value.
    """
    if distribution.type == "int":
        return round(value)
    return min(max(float(f"{value:.4g}"), distribution.low), distribution.high)


def sample_value(distribution: list[Any] | Distribution, generator: random.Random) -> Any:
    """Return a random value."""
    if isinstance(distribution, list):
        return generator.choice(distribution)
    low, high = distribution.low, distribution.high
    if distribution.scale == "log":
        return round_value(distribution, math.exp(generator.uniform(math.log(low), math.log(high))))
    return round_value(distribution, generator.uniform(low, high))


class OptunaConfig(Section):
    """How Optuna samples trials, and which trials continue."""

    sampler: Literal["tpe", "random"] = "tpe"
    """How the values of a trial are chosen. `tpe`: by a tree-structured Parzen estimator of the earlier trials.
    `random`: independently of the earlier trials."""
    pruner: Literal["asha", "none"] = "asha"
    """Which trials continue. `asha`: trials pause at rungs, and only the best ones continue, by the rule of ASHA
    (docs/search.md). `none`: all trials train to the last step."""
    trials: PositiveInt = 20
    """Number of trials."""
    min_steps: PositiveInt | None = None
    """Step of the first rung. Each further rung has `eta` times as many steps; the last one is `train.steps`. null:
    about `train.steps` divided by `eta` squared, which gives three rungs."""
    eta: Annotated[int, Field(ge=2)] = 3
    """At each rung, one of `eta` trials continues."""
    startup_trials: NonNegativeInt = 10
    """Number of trials that `tpe` samples at random before it uses the results of earlier trials."""
    storage: Literal["journal"] = "journal"
    """Where Optuna's copy of the study is. `journal`: in the file `search/journal.log` of the run directory."""


class SearchConfig(Section):
    """A search: the values of each trial depend on the results of earlier trials."""

    space: dict[str, Choices | Distribution] = Field(min_length=1)
    """What each varied key may be: a list of values, or a distribution `{low, high, scale, type}`."""
    metric: Literal["held_out_loss", "loss"] = "held_out_loss"
    """What is minimized. `held_out_loss`: the loss on held-out data, which needs `train.evaluate_every`. `loss`: the
    mean loss in training over the last tenth of the steps so far."""
    optuna: OptunaConfig = OptunaConfig()
    """How Optuna samples trials, and which trials continue."""


def compute_rungs(search: SearchConfig, steps: int, evaluate_every: int | None) -> list[int]:
    """Return the steps at which trials pause, ascending. The last one is the last step of the run.

    Args:
        search: the section `sweep.search`.
        steps: number of optimizer steps of the whole run.
        evaluate_every: `train.evaluate_every`.
    """
    optuna = search.optuna
    if optuna.pruner == "none":
        return [steps]
    unit = (evaluate_every or 1) if search.metric == "held_out_loss" else 1
    step = optuna.min_steps or max(1, -(-(steps // optuna.eta**2) // unit)) * unit
    rungs = []
    while step < steps:
        rungs.append(step)
        step *= optuna.eta
    return [*rungs, steps]


def find_search_conflicts(
    search: SearchConfig, steps: int | None, evaluate_every: int | None, held_out: float
) -> Iterator[str]:
    """Yield a message for each conflict between `sweep.search` and other sections.

    Args:
        search: the section `sweep.search`.
        steps: `train.steps`.
        evaluate_every: `train.evaluate_every`.
        held_out: `data.held_out`.
    """
    if steps is None:
        yield "sweep.search needs train.steps, because the rungs are steps: set train.steps instead of train.epochs"
        return
    min_steps = search.optuna.min_steps
    if min_steps is not None and min_steps >= steps and search.optuna.pruner == "asha":
        yield f"sweep.search.optuna.min_steps ({min_steps}) must be less than train.steps ({steps})"
    if search.metric == "loss":
        return
    if held_out == 0 or evaluate_every is None:
        yield (
            "sweep.search.metric held_out_loss needs data.held_out and train.evaluate_every: set both, or "
            "sweep.search.metric: loss"
        )
        return
    for step in compute_rungs(search, steps, evaluate_every):
        if step % evaluate_every:
            yield (
                f"the rung at step {step} of sweep.search is not evaluated: train.evaluate_every ({evaluate_every}) "
                "must divide train.steps and sweep.search.optuna.min_steps"
            )
            return
