"""What is between whole replicas of a model: the protocol that the engine speaks, a step after another.

    begin(step) → forward, backward → reduce() → together(norm) → the optimizer's step, or none → end(good)

The class itself is for replicas that send nothing but what DDP does, and for one alone. Compressed gradients
(pipeline/parallel/compression.py) and averaged weights (pipeline/parallel/local_sgd.py) are its two other forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pipeline.checkpoint.checkpointer import StateDict


class ReplicaSync:
    """One replica's part."""

    step = 1
    """The optimizer step that the next backward belongs to."""

    def begin(self, step: int) -> None:
        """Step number `step` begins."""
        self.step = step

    def reduce(self) -> None:
        """Backward is done."""

    def together(self, norm: Tensor) -> Tensor:
        """One number for all replicas' gradient norms, not finite where one of them is not."""
        return norm

    def end(self, good: bool) -> None:
        """The step's update was made, or (not `good`) left out."""

    def saved(self, state: StateDict) -> StateDict:
        """What a checkpoint keeps, from this replica's `state`. Every replica must call it."""
        return state

    def describe(self) -> dict[str, Any]:
        """What a restore must know of what `saved` adds."""
        return {}

    def restore(self, state: StateDict, kept: Mapping[str, Any], read: Callable[[StateDict], None]) -> None:
        """Take up what `saved` kept, on any number of replicas. `kept`: what `describe` said then; `read` fills tensors
        by their names; `state` is filled already."""
