"""Parameters that stay as they are: those that a pattern of `optimizer.freeze` names.

They have no gradient, no optimizer state and no part in the gradient's norm; checkpoints hold them all the same.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Sequence
from textwrap import shorten

import torch

from pipeline.base.errors import UserError
from pipeline.config.sections import ModelConfig
from pipeline.model.decoder import Decoder
from pipeline.model.task import Task


def frozen_names(patterns: Sequence[str], task: Task) -> set[str]:
    """Names of the whole model's parameters that do not move; no rank need hold them all.

    Raises UserError as `_matching` does.
    """
    whole = range(task.config.model.layers)
    return _matching(patterns, [name for name, _ in task.weights(task.build(whole))]) if patterns else set()


def check_freeze(patterns: str, model: str) -> None:
    """Raise UserError where `patterns` do not fit the decoder of the section `model`; both are JSON."""
    with torch.device("meta"):
        whole = Decoder(ModelConfig.model_validate_json(model), 1, 1)
    _matching(json.loads(patterns), [name for name, _ in whole.named_weights()])


def _matching(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Raises UserError for a pattern that matches nothing, and where nothing is left to train."""
    found: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            there = shorten(", ".join(names), 300, placeholder=" …")
            raise UserError(f"optimizer.freeze: {pattern!r} matches no parameter; there are {there}")
        found.update(matched)
    if found == set(names):
        raise UserError("optimizer.freeze: all parameters match, so nothing would be trained: leave some out")
    return found
