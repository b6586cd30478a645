"""The types that config sections are made of: numbers with bounds, names, Slurm time limits, small sections
of sections, and their base."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # none may change how a config is read, or take time

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def must_match(pattern: re.Pattern[str], what: str) -> Any:
    """A check that a text is as `pattern` says; `what` tells whoever wrote another one what to write."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise ValueError(what)
        return value

    return BeforeValidator(check)


def parse_time_limit(value: str) -> int:
    """Seconds of a Slurm time limit: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`.

    Source: sbatch(1), `--time`. Raises ValueError for anything else.
    """
    match = _TIME.fullmatch(value)
    if match is None:
        raise ValueError('write a Slurm time limit such as "00:20:00" or "1-12:00:00"')
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None and len(parts) < 3:  # minutes come first
        parts = [0, *parts]
    hours, minutes, seconds = [*parts, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _time(value: Any) -> Any:
    if type(value) is int:
        raise ValueError(f"for {value} minutes write {value // 60:02}:{value % 60:02}:00")
    if isinstance(value, str) and parse_time_limit(value) <= 0:
        raise ValueError("a time limit is longer than nothing")
    return value


Name = Annotated[str, must_match(_NAME, "use letters, digits, '.', '_' and '-' (it becomes a folder and a job name)")]
TimeLimit = Annotated[str, BeforeValidator(_time)]
FilePath = Annotated[Path, must_match(re.compile(r"[^\0]{0,3000}"), "write a path, shorter than 3,000 characters")]


class Policy(Enum):
    """What is special about a key, as an annotation of its field: `name: Annotated[str, Policy.PATH]`.

    A policy of a section holds for every key in it. `list_keys_with` (pipeline/config/schema.py) finds the keys.
    """

    CHANGEABLE = auto()
    """`resume` may change the key at any time, because it affects no result."""
    INCREASABLE = auto()
    """`resume` may increase the value at any time."""
    PATH = auto()
    """The value is a path, relative to the file that contains the key."""
    NOT_IN_IDENTITY = auto()
    """Checkpoints stay valid if the value changes (pipeline/checkpoint/identity.py)."""
    KEEPS_SHARDS = auto()
    """Finished shards stay valid if the value changes."""
    SWEEPABLE = auto()
    """A sweep may vary the key."""
    NOT_SWEEPABLE = auto()
    """A sweep may not vary the key, although it may vary the others of the section."""
    SHELL = auto()
    """The value is lines of shell, which may contain secrets."""
    OPTIONS = auto()
    """The value is a mapping of options of another program, which may contain secrets."""
    SECRET_VALUE = auto()
    """The value itself may be a secret."""


@dataclass(frozen=True)
class SecretReference:
    """Annotation of a field whose value says where a secret is: a variable, or a file."""

    pattern: str
    """The regular expression of such a value. Anything else in its place may be the secret itself, and is masked."""


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values never change after reading."""

    # parsing the source for docstrings takes as long as reading a config: the command `schema` alone asks for them
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings="SLUICE_DOCSTRINGS" in os.environ)


def check_unused_keys(section: Section, meant: set[str], why: str) -> None:
    """Raise ValueError for a key of `section` that is not its default and not among those that are `meant`."""
    for key, field in type(section).model_fields.items():
        if key not in meant and getattr(section, key) != field.get_default(call_default_factory=True):
            raise ValueError(f"{key} ({getattr(section, key)}) means nothing here: {why}")


class RopeScaling(Section):
    """How rotary positions are stretched for longer sequences than a model began with; keys are Hugging Face's."""

    rope_type: Literal["linear", "llama3"]
    """`linear` divides all frequencies by `factor`; `llama3` only the low ones (pipeline/model/decoder.py)."""
    factor: PositiveFloat
    """By how much."""
    low_freq_factor: PositiveFloat | None = None
    """`llama3`: frequencies of fewer turns than this in the original length are divided."""
    high_freq_factor: PositiveFloat | None = None
    """`llama3`: frequencies of more turns than this stay as they are."""
    original_max_position_embeddings: PositiveInt | None = None
    """`llama3`: the length that the model began with."""

    @model_validator(mode="after")
    def _keys_fit(self) -> RopeScaling:
        if self.rope_type == "linear":
            check_unused_keys(self, {"rope_type", "factor"}, "rope_type is linear")
        elif not self.original_max_position_embeddings or (self.low_freq_factor or 0) >= (self.high_freq_factor or 0):
            raise ValueError("llama3 needs original_max_position_embeddings, and low_freq_factor < high_freq_factor")
        return self


INT8_BLOCK = 64
"""Entries of a row whose moments in int8 share a scale."""


class StateConfig(Section):
    """Types of what is kept from step to step. What is bf16 or int8 is rounded up or down at random, so that on average
    nothing is lost: a function of seed, parameter and step (pipeline/train/optimizer.py)."""

    master: Literal["fp32", "none"] = "fp32"
    """The weights that steps move: in `fp32`; `none`: those of forward and backward themselves, in bf16, as are their
    gradients then."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type of the first and second moment; `int8`: of matrices', with a scale for each 64 entries of a row."""
