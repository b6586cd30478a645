"""The `checkpoint:`, `evaluate:` and `publish:` sections of the config: what becomes of a training's weights.

See pipeline/checkpoint/checkpointer.py, pipeline/evaluate/evaluate_stage.py and pipeline/publish/publish_stage.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from pipeline.config.types import Name, Policy, Section, must_match


class CheckpointConfig(Section):
    """When the training saves and what it keeps."""

    every_steps: PositiveInt = 100
    """Steps between two checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept."""
    mode: Literal["sync", "async"] = "async"
    """`async` writes in the background while training goes on."""


class EvaluateConfig(Section):
    """What is evaluated on the held-out documents."""

    every: Annotated[Literal["end", "checkpoint"], Policy.CHANGEABLE] = "end"
    """`end`: the newest checkpoint once training is done; `checkpoint`: every checkpoint that is kept."""
    batch: PositiveInt = 8
    """Most sequences of one forward pass, fewer (one at least) where their fp32 logits would take more than 2 GiB; it
    does not change the result's meaning, only its last digits."""
    max_sequences: PositiveInt | None = None
    """Evaluate at most so many sequences; null: all held-out text."""
    tasks: Annotated[Path | list[Path], Policy.PATH] = Field(default_factory=list)
    """Files of questions with choices or answers, jsonl (pipeline/evaluate/task_files.py); figures have their names."""
    answer_tokens: PositiveInt = 32
    """Most tokens of a free answer."""

    @property
    def task_files(self) -> list[Path]:
        """As a list."""
        return self.tasks if isinstance(self.tasks, list) else [self.tasks]


class Bounds(Section):
    """What a figure may be."""

    max: float | None = Field(default=None, allow_inf_nan=False)
    """At most."""
    min: float | None = Field(default=None, allow_inf_nan=False)
    """At least."""

    @model_validator(mode="after")
    def _bound_something(self) -> Bounds:
        if self.max is None and self.min is None:
            raise ValueError("give max, min or both")
        return self


class RegistryConfig(Section):
    """An MLflow model registry."""

    uri: Annotated[
        str,
        must_match(re.compile(r"https?://[^@\s]+"), "write http(s)://HOST:PORT, and who you are in MLflow's variables"),
    ]
    """The server, such as `http://mlflow.example:5000`. Its user and password, or token, are in the variables that
    MLflow names (`MLFLOW_TRACKING_USERNAME`, …): give them by `site.pass` or `site.secrets`."""
    model: Name | None = None
    """The model's name there, made where there is none; null: the run's."""


class PublishConfig(Section):
    """What becomes of the newest checkpoint when it is evaluated: `TO/NAME/step-…`, whole or not at all."""

    to: Annotated[Path, Policy.PATH]
    """Folder of all that is published; made where there is none."""
    name: Name | None = None
    """The model's folder in it; null: the run's name."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of the published weights."""
    rules: dict[str, Bounds | None] = Field(default_factory=dict)
    """What the evaluation must have found, by the names of its figures: `{bits_per_byte: {max: 1.9}}`; null takes a
    rule back."""
    no_worse_than: Annotated[Path | None, Policy.PATH] = None
    """Directory of a run whose newest evaluation this one must reach: bits per byte of text, else the loss."""
    license: str | None = None
    """The model's licence, as the Hub writes it, such as `apache-2.0`; null: the card says that none is given."""
    data_license: str | None = None
    """The data's licence, or where it may be read."""
    description: str | None = None
    """What the card says first."""
    mlflow: RegistryConfig | None = None
    """A model registry that gets an entry of each version once it has its name; null: none."""
    run: str | None = None
    """A shell command that runs in the folder once it has its name, such as an upload; where it fails the stage does,
    and does it again when it is tried again."""
