"""The types that config sections are made of: numbers with bounds, names, Slurm time limits, and their base."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # none may change how a config is read, or take time

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def matching(pattern: re.Pattern[str], what: str) -> Any:
    """A check that a text is as `pattern` says; `what` tells whoever wrote another one what to write."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise ValueError(what)
        return value

    return BeforeValidator(check)


def parse_time(value: str) -> int:
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
    if isinstance(value, str) and parse_time(value) <= 0:
        raise ValueError("a time limit is longer than nothing")
    return value


Name = Annotated[str, matching(_NAME, "use letters, digits, '.', '_' and '-' (it becomes a folder and a job name)")]
TimeLimit = Annotated[str, BeforeValidator(_time)]
FilePath = Annotated[Path, matching(re.compile(r"[^\0]{0,3000}"), "write a path, shorter than 3,000 characters")]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values never change after reading."""

    # not use_attribute_docstrings: parsing the source at each import would cost the login node more than reading the
    # config; pipeline/config/schema.py does it for the schema alone
    model_config = ConfigDict(extra="forbid", frozen=True)


def refuse_changed(section: Section, meant: set[str], why: str) -> None:
    """Raise ValueError for a key of `section` that is not its default and not among those that are `meant`."""
    for key, field in type(section).model_fields.items():
        if key not in meant and getattr(section, key) != field.get_default(call_default_factory=True):
            raise ValueError(f"{key} ({getattr(section, key)}) means nothing here: {why}")
