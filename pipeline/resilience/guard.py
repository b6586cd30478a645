"""Bad numbers: a loss or gradient that is not finite, or a loss far above its neighbours.

A bad step is left out by all ranks together: its samples count as consumed, weights and optimizer stay. All ranks see
the same loss and norm, so they decide alike without asking each other. When too many steps in a row are bad,
the training returns to its last checkpoint and leaves the samples of those steps out of its order. So no checkpoint is
taken inside such a row: it would count samples as consumed that the order then jumps over.

Every decision is a line of `decisions.jsonl`, written before it takes effect:

    {"decision": "skip", "position": P, "step": k, "reason": …}          no update for the batch that starts at P
    {"decision": "leave_out", "position": P, "samples": n, "step": k, …}  the order goes on after those n samples

`position` counts run-global samples (sample_order.py), left out ones included. A rerun, or another run with
the same file, repeats the decisions exactly: also where a cause was a passing one (a flipped bit, a bad device).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.base.errors import NonFiniteError
from pipeline.base.files import add_checksum, append_line, fsync
from pipeline.data.sample_order import position_of
from pipeline.run.directory import Run, utc_timestamp

WINDOW = 100
LEAST = 20
"""How many losses the deviation is taken of, at most and at least."""


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same positions as sorted (position, count) ranges that do not overlap."""
    result: list[tuple[int, int]] = []
    for start, count in sorted(ranges):
        if result and start <= sum(result[-1]):
            first, before = result.pop()
            start, count = first, max(before, start + count - first)
        result.append((start, count))
    return result


def select_recent_metrics(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last lines of metrics.jsonl with all the losses that :class:`Guard` compares with."""
    lines = list(metrics)
    good = [number for number, line in enumerate(lines) if "skipped" not in line]
    return lines[good[-WINDOW] :] if len(good) > WINDOW else lines


class BadStepGuard:
    """Judges each step; the same answers on all ranks."""

    def __init__(
        self, run: Run, *, decisions: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]], writes: bool
    ) -> None:
        """`decisions` and `metrics`: the lines of their files up to the step that was restored, the same on all ranks.
        `writes`: whether this rank keeps the file."""
        self.run, self.limits, self.writes = run, run.config.recovery, writes
        batch = run.config.train.global_batch
        self._skips: dict[int, str] = {}
        ranges = []
        for line in decisions:
            if line["decision"] == "skip":
                self._skips[int(line["position"])] = str(line["reason"])
            else:
                ranges.append((int(line["position"]), int(line["samples"])))
        self.left_out = merge_ranges(ranges)
        """Ranges of positions that the order jumps over: (position, number of samples), sorted and apart."""
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._row: list[int] = []
        """Positions of the bad steps in a row, up to now."""
        for line in metrics:
            if "skipped" in line:
                self._row.append(position_of((line["step"] - 1) * batch, self.left_out))
            else:
                self._row.clear()
                self._losses.append(line["loss"])

    @property
    def in_a_row(self) -> int:
        """How many steps in a row were bad."""
        return len(self._row)

    def judge(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Why this step must not change the weights; None for a good one.

        `loss`: mean over the global batch; `grad_norm`: of the whole model before clipping. Raises NonFiniteError, on
        all ranks, where too many in a row are bad: the decision is on disk by then.
        """
        batch = self.run.config.train.global_batch
        position = position_of((step - 1) * batch, self.left_out)
        reason = self._skips.get(position) or self._judge(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            self._row.clear()
            return None
        self._row.append(position)
        if len(self._row) > self.limits.skip_bad_steps:
            first, count = self._row[0], position + batch - self._row[0]
            self._write("leave_out", first, step, reason, samples=count)
            raise NonFiniteError(
                f"step {step}: {reason}, bad step number {len(self._row)} in a row. The training returns to its last "
                f"checkpoint and leaves out samples {first} to {first + count - 1}. If it comes again: lower "
                "optimizer.lr, raise optimizer.warmup_steps, or look at those samples"
            )
        if position not in self._skips:
            self._write("skip", position, step, reason)
        return reason

    def _judge(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        limit = self.limits.spike_deviations
        if limit is None or len(self._losses) < LEAST:
            return None
        mean = statistics.fmean(self._losses)
        deviation = statistics.pstdev(self._losses, mean)
        if loss > mean + limit * deviation:
            return f"the loss {loss:.4f} is {(loss - mean) / max(deviation, 1e-12):.1f} deviations above {mean:.4f}"
        return None

    def _write(self, decision: str, position: int, step: int, reason: str, **more: int) -> None:
        if self.writes:
            line = {
                "time": utc_timestamp(),
                "decision": decision,
                "position": position,
                "step": step,
                "reason": reason,
                **more,
            }
            append_line(self.run.decisions_file, json.dumps(add_checksum(line)))
            fsync(self.run.decisions_file)  # a checkpoint never knows more than this file
            self.run.event(f"bad_step_{decision}", "train", step=step, position=position, reason=reason, **more)
