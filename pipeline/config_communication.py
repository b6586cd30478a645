"""`parallel.hook` and `parallel.local_sgd`: how whole replicas of the model send less than their gradients.

See pipeline/compression.py and pipeline/local_sgd.py for what is done with them, docs/communication.md for what they
cost. Both are for purely replicated data parallel; pipeline/layout.py refuses other combinations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.config_types import NonNegativeInt, PositiveFloat, Section


class HookConfig(Section):
    """What happens to gradients on their way between replicas."""

    kind: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"
    """`none` sends them as they are; `fp16` and `bf16` in half the bytes; `powersgd` as products of two thin matrices;
    `topk` only the largest. What the last two leave out is added to the next step's gradient."""
    rank: PositiveInt = 4
    """Columns of PowerSGD's thin matrices."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """Fraction of each parameter's gradient that Top-K sends."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the training in which more is sent: Top-K's fraction falls from 1 to `ratio`, each step in equal
    proportion; PowerSGD sends whole gradients."""


class LocalSgdConfig(Section):
    """Replicas that step alone and average their weights now and then."""

    every: PositiveInt
    """Steps from one average to the next."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the training in which replicas average every gradient, as without local SGD."""
    outer_lr: PositiveFloat = 1.0
    """How far the weights go from the last average towards the new one: 1 with no momentum is the average itself."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Nesterov momentum of that outer step (DiLoCo, arXiv 2311.08105, takes outer_lr 0.7 and outer_momentum 0.9)."""
