"""metrics.jsonl: one line per optimizer step, each step exactly once, through any number of crashes.

The line of a step is written after the next step was launched (reading the loss at once would make a GPU
wait), and always before a checkpoint of that step begins: a checkpoint never knows more steps than the file.
After a restore the lines beyond the restored step are moved to events.jsonl as lost work, and a torn last line
is dropped.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import NonFiniteError
from pipeline.files import read_jsonl, write_atomic, write_line


@dataclass
class StepRecord:
    """What one step leaves behind; loss and gradient norm are still on the device."""

    step: int
    loss: torch.Tensor
    """Mean over the global batch's tokens: a 0-d tensor, the same on all ranks."""
    grad_norm: torch.Tensor
    """Norm of the whole model's gradient before clipping: a 0-d tensor."""
    values: dict[str, Any]
    """The other keys of the line."""
    may_overflow: bool = False
    """With fp16 an infinite gradient is the scaler's business: the step is skipped, the norm written as null."""


class Metrics:
    """Collects records on all ranks and writes them on rank 0 (`path` is None elsewhere)."""

    def __init__(self, path: Path | None) -> None:
        # kept open: on a parallel file system an open costs milliseconds, and this happens every step
        self._file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115
        self._pending: StepRecord | None = None

    def record(self, record: StepRecord) -> dict[str, Any] | None:
        """Hold this step's record, write the one before it and return that line."""
        line = self.flush()
        self._pending = record
        return line

    def sync(self) -> None:
        """Make what was written durable: before a checkpoint, so that it never knows more steps than the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def flush(self) -> dict[str, Any] | None:
        """Write what is held. Raises NonFiniteError, on all ranks alike, where a loss is not a finite number."""
        record, self._pending = self._pending, None
        if record is None:
            return None
        loss, norm = record.loss.item(), record.grad_norm.item()
        if not math.isfinite(loss) or not (math.isfinite(norm) or record.may_overflow):
            raise NonFiniteError(
                f"step {record.step}: the loss is {loss} and the gradient norm {norm}; the checkpoints before it are "
                "intact. Lower optimizer.lr, raise optimizer.warmup_steps, or look at the data of this step"
            )
        line = {"step": record.step, "loss": loss, "grad_norm": norm if math.isfinite(norm) else None, **record.values}
        if self._file is not None:
            write_line(self._file.fileno(), json.dumps(line), self._file.name)
        return line


def lost_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines beyond `step`: work that a restore of `step` loses."""
    return [line for line in read_jsonl(path) if line["step"] > step]


def rewind(path: Path, step: int) -> None:
    """Cut metrics.jsonl after `step`, and mend a torn tail."""
    kept: dict[int, dict[str, Any]] = {line["step"]: line for line in read_jsonl(path) if line["step"] <= step}
    text = "".join(json.dumps(kept[s]) + "\n" for s in sorted(kept))
    if path.exists() and path.read_text(errors="replace") != text:
        write_atomic(path, text)
