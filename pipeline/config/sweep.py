"""The `sweep:` section of the config: many trainings that differ in a few values and share one set of shards.

A point of the sweep is a run of its own, in `runs/NAME/points/000` and so on: with its own config, metrics, checkpoints
and evaluation, and with links to the sweep's `data/` and `code/`. What a point sets may not change the data or what
is asked of Slurm, so that all points can be tasks of one job array.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.types import NonNegativeInt, PositiveFloat, Section

ALLOWED = ("train.", "optimizer.", "model.", "checkpoint.", "evaluate.", "run.seed")
"""Keys that a point may set begin with one of these."""

MOST_POINTS = 5000
"""Each is a folder with a config, and all of them are checked before anything is submitted."""


class Range(Section):
    """Numbers to draw from."""

    low: PositiveFloat
    """Least value."""
    high: PositiveFloat
    """Greatest value."""
    scale: Literal["linear", "log"] = "log"
    """Drawn uniformly on this scale."""

    @model_validator(mode="after")
    def _in_order(self) -> Range:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low}) is not less than high ({self.high})")
        return self

    def draw(self, source: random.Random) -> float:
        """One value, to four digits: it is a name in tables, too."""
        if self.scale == "linear":
            value = source.uniform(self.low, self.high)
        else:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return float(f"{value:.4g}")


Values = Annotated[list[Any], Field(min_length=1)]


class SweepConfig(Section):
    """Which points there are: every combination of `grid`, each with every draw of `random`."""

    grid: dict[str, Values] = Field(default_factory=dict)
    """Dot keys and the values that each takes, such as `optimizer.lr: [1.0e-3, 3.0e-3]`."""
    random: dict[str, Values | Range] = Field(default_factory=dict)
    """Dot keys, each with a list to choose from or a range `{low, high, scale}`."""
    samples: PositiveInt = 8
    """How often the keys of `random` are drawn."""
    seed: NonNegativeInt = 0
    """Seed of the draws."""
    at_most: PositiveInt | None = None
    """How many points may run at the same time; null: no limit."""
    sources: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """What the folders of a swept `model.init_from` say of `model`, by folder. Sluice writes it; leave it out."""

    @model_validator(mode="after")
    def _keys_are_free(self) -> SweepConfig:
        if not self.grid and not self.random:
            raise ValueError("give `grid`, `random` or both: there is nothing to vary")
        if both := self.grid.keys() & self.random.keys():
            raise ValueError(f"{min(both)} stands in grid and in random")
        count = math.prod(map(len, self.grid.values())) * (self.samples if self.random else 1)
        if count > MOST_POINTS:
            raise ValueError(f"these are {count:,} points; a sweep may have {MOST_POINTS:,}: make several sweeps of it")
        for key in (*self.grid, *self.random):
            if not key.startswith(ALLOWED) or key in ("train.threads", "model.target"):
                raise ValueError(
                    f"{key} cannot be swept: points share their shards and what they ask of Slurm; a sweep may vary "
                    "train.*, optimizer.*, model.*, checkpoint.*, evaluate.* and run.seed"
                )
        return self

    def points(self) -> list[dict[str, Any]]:
        """The values of each point, by dot key; always the same points in the same order."""
        source = random.Random(self.seed)
        draws: list[dict[str, Any]] = [{}]
        if self.random:
            draws = [
                {k: v.draw(source) if isinstance(v, Range) else source.choice(v) for k, v in self.random.items()}
                for _ in range(self.samples)
            ]
        combinations = [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]
        return [{**combination, **draw} for combination in combinations for draw in draws]
