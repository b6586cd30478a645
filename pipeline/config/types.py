"""Types of config fields, policies, and the base class of sections.

The module also defines small sections that other sections contain.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

# plugins of pydantic could change how a config is read, and would slow down the start
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def must_match(pattern: re.Pattern[str], instruction: str) -> Any:
    """Return a validator that rejects strings which do not match `pattern`.

    Args:
        pattern: the pattern of the whole string.
        instruction: the error message, which says what to write instead.
    """

    def check_text(value: Any) -> Any:
        """Return `value`. Raises ValueError if `value` is a string that does not match."""
        if isinstance(value, str) and not pattern.fullmatch(value):
            raise ValueError(instruction)
        return value

    return BeforeValidator(check_text)


def parse_time_limit(value: str) -> int:
    """Return the seconds of a Slurm time limit: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`.

    Source: sbatch(1), `--time`. Raises ValueError for other formats.
    """
    match = _TIME.fullmatch(value)
    if match is None:
        raise ValueError('write a Slurm time limit such as "00:20:00" or "1-12:00:00"')
    days, *texts = match.groups()
    numbers = [int(text) for text in texts if text is not None]
    if days is None and len(numbers) < 3:  # the first number is minutes, so there are no hours
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_time_limit(value: Any) -> Any:
    """Return `value`. Raises ValueError if `value` is a number without a unit, or not a positive time limit."""
    if type(value) is int:
        raise ValueError(f"for {value} minutes write {value // 60:02}:{value % 60:02}:00")
    if isinstance(value, str) and parse_time_limit(value) <= 0:
        raise ValueError("a time limit must be longer than 0 seconds")
    return value


Name = Annotated[str, must_match(_NAME, "use letters, digits, '.', '_' and '-' (it becomes a folder and a job name)")]
TimeLimit = Annotated[str, BeforeValidator(_check_time_limit)]
FilePath = Annotated[Path, must_match(re.compile(r"[^\0]{0,3000}"), "write a path, shorter than 3,000 characters")]


class Policy(Enum):
    """A special property of a config key, as an annotation of its field: `name: Annotated[str, Policy.PATH]`.

    A policy of a section applies to every key in the section. `list_keys_with` (pipeline/config/sections.py) returns
    the keys and sections that have a policy.
    """

    CHANGEABLE = auto()
    """`resume` may change the key at any time, because existing outputs stay valid. The weights of a mixture and
    the lengths of sequences may change for later steps only (pipeline/run/changes.py)."""
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
    """A sweep may not vary the key, although the section of the key has the policy SWEEPABLE."""
    FIXED_IN_FORK = auto()
    """A fork must not change the key, because the state in the checkpoint would not fit (pipeline/run/fork.py)."""
    CHANGEABLE_IN_FORK = auto()
    """A fork may change the key, although its section has the policy FIXED_IN_FORK."""
    SHELL = auto()
    """The value is a list of shell lines, which may contain secrets."""
    OPTIONS = auto()
    """The value is a mapping of options of another program, which may contain secrets."""
    SECRET_VALUE = auto()
    """The value itself may be a secret."""


@dataclass(frozen=True)
class SecretReference:
    """Annotation of a field. Its value names an environment variable or a file that contains a secret."""

    pattern: str
    """The regular expression of a valid value. Any other value may be the secret itself, so it is masked."""


class Section(BaseModel):
    """The base class of all sections. Unknown keys are errors, and the values of a section cannot be changed."""

    other_keys: ClassVar[type[Section] | None] = None
    """The class of the values of keys that are not fields; None if such keys are errors."""
    # Parsing the source for docstrings takes as long as reading a config, and only the command `schema` needs them.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings="SLUICE_DOCSTRINGS" in os.environ)


def check_unused_keys(section: Section, used_keys: set[str], reason: str) -> None:
    """Raise ValueError if a key of `section` that is not in `used_keys` differs from its default.

    Args:
        section: the section.
        used_keys: the keys that have an effect.
        reason: why the other keys have no effect, or what to use instead.
    """
    for key, field in type(section).model_fields.items():
        if key not in used_keys and getattr(section, key) != field.get_default(call_default_factory=True):
            raise ValueError(f"{key} ({getattr(section, key)}) has no effect here: {reason}")


YARN_BETA_FAST = 32.0
YARN_BETA_SLOW = 1.0
"""Defaults of `beta_fast` and `beta_slow` (Peng et al., arXiv 2309.00071, section 3.2)."""


class RopeScaling(Section):
    """How rotary positions are scaled for longer sequences than the model was trained on. The keys are those of Hugging
    Face."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """`linear` divides all frequencies by `factor`; `llama3` and `yarn` divide only the low ones
    (pipeline/model/decoder.py)."""
    factor: PositiveFloat
    """The divisor of the frequencies."""
    low_freq_factor: PositiveFloat | None = None
    """`llama3`: a frequency with fewer full turns than this value within `original_max_position_embeddings` positions
    is divided by `factor`."""
    high_freq_factor: PositiveFloat | None = None
    """`llama3`: a frequency with more full turns than this value within `original_max_position_embeddings` positions is
    not changed."""
    original_max_position_embeddings: PositiveInt | None = None
    """`llama3` and `yarn`: the sequence length on which the model was trained before its positions were scaled."""
    beta_fast: PositiveFloat | None = None
    """`yarn`: a frequency with more full turns than this value within `original_max_position_embeddings` positions is
    not changed. null: 32."""
    beta_slow: PositiveFloat | None = None
    """`yarn`: a frequency with fewer full turns than this value is divided by `factor`. null: 1."""
    attention_factor: PositiveFloat | None = None
    """`yarn`: the factor by which rotated queries and keys are multiplied. null: 1 + ln(`factor`) / 10, or 1 if
    `factor` is less than 1."""
    truncate: bool = True
    """`yarn`: round the ends of the transition between unchanged and divided frequencies to whole frequencies,
    outwards."""

    @model_validator(mode="after")
    def _check_keys_fit(self) -> RopeScaling:
        """Raise ValueError if a key is set that `rope_type` does not use, or if a required key is missing."""
        used_keys = {"rope_type", "factor"}
        if self.rope_type == "linear":
            check_unused_keys(self, used_keys, "rope_type is linear")
            return self
        used_keys.add("original_max_position_embeddings")
        if self.rope_type == "yarn":
            used_keys |= {"beta_fast", "beta_slow", "attention_factor", "truncate"}
            check_unused_keys(self, used_keys, "rope_type is yarn")
            if not self.original_max_position_embeddings:
                raise ValueError("yarn needs original_max_position_embeddings")
            if (self.beta_slow or YARN_BETA_SLOW) >= (self.beta_fast or YARN_BETA_FAST):
                raise ValueError(
                    f"yarn needs beta_slow ({self.beta_slow or YARN_BETA_SLOW:g}) < beta_fast "
                    f"({self.beta_fast or YARN_BETA_FAST:g})"
                )
            return self
        check_unused_keys(self, used_keys | {"low_freq_factor", "high_freq_factor"}, "rope_type is llama3")
        if not self.original_max_position_embeddings or (self.low_freq_factor or 0) >= (self.high_freq_factor or 0):
            raise ValueError("llama3 needs original_max_position_embeddings, and low_freq_factor < high_freq_factor")
        return self

    @property
    def yarn_scale(self) -> float:
        """The factor of rotated queries and keys with `yarn` (arXiv 2309.00071, section 3.4)."""
        return self.attention_factor or (1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0)


INT8_BLOCK = 64
"""Number of consecutive entries of a row that share one scale if their moments are int8."""


class StateConfig(Section):
    """Types of weights and moments between steps.

    Values in bf16 or int8 are rounded up or down at random, so that the rounding is unbiased. The random numbers are a
    function of seed, parameter and step (pipeline/train/optimizer.py).
    """

    master: Literal["fp32", "none"] = "fp32"
    """Type of the weights that the optimizer updates. `fp32`: master weights in fp32. `none`: no master weights; the
    bf16 weights of forward and backward are updated, and their gradients are bf16 as well."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Type of the first and second moment. `int8` applies to the moments of matrices, with a scale for each 64 entries
    of a row."""
