"""Bad steps: a loss or gradient that is not finite, or a loss far above the previous ones.

All ranks skip a bad step together: its samples count as consumed, weights and optimizer do not change. All ranks see
the same loss and norm, so they decide alike without communication. If too many consecutive steps are bad, the training
returns to its last checkpoint and excludes the samples of those steps. No checkpoint is saved between consecutive bad
steps, because it would count samples as consumed that the order then excludes.

Every decision is a line of `decisions.jsonl`, written before it takes effect:

    {"decision": "skip", "position": P, "step": k, "reason": …}          no update for the batch that starts at P
    {"decision": "leave_out", "position": P, "samples": n, "step": k, …}  the order excludes n samples from P on

`position` counts run-global samples (sample_order.py), including excluded ones. A rerun, or another run with the same
file, repeats the decisions exactly, even if the cause was temporary (a flipped bit, a bad device).
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from pipeline.base.errors import NonFiniteError
from pipeline.base.files import add_checksum, append_line, fsync
from pipeline.comm.groups import all_gather_results
from pipeline.data.sample_order import skip_excluded
from pipeline.run.directory import Run
from pipeline.run.events import BadStepSkipped, SamplesExcluded, utc_timestamp
from pipeline.run.lines import has_fields, is_count, is_text, read_required_lines, read_valid_lines
from pipeline.run.metrics import is_step_line
from pipeline.train.callback import Callback, TrainerContext

MAX_LOSSES = 100
MIN_LOSSES = 20
"""The deviation is computed from at most and at least so many losses."""


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same positions as sorted (position, count) ranges that do not overlap."""
    result: list[tuple[int, int]] = []
    for start, count in sorted(ranges):
        if result and start <= sum(result[-1]):
            first, before = result.pop()
            count = max(before, start + count - first)
            start = first
        result.append((start, count))
    return result


def is_decision(line: Any) -> bool:
    """Return True for a line of decisions.jsonl: a skipped update, or samples that the training excludes."""
    required = {
        "decision": lambda value: value in ("skip", "leave_out"),
        "position": is_count,
        "reason": is_text,
    }
    if not has_fields(line, required, {"samples": is_count}):
        return False
    return "samples" in line or line["decision"] == "skip"


def select_recent_metrics(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last lines of metrics.jsonl that contain the losses that `BadStepGuard` compares with."""
    all_lines = list(metrics)
    good = [number for number, line in enumerate(all_lines) if "skipped" not in line]
    return all_lines[good[-MAX_LOSSES] :] if len(good) > MAX_LOSSES else all_lines


class BadStepGuard(Callback):
    """Decides whether a step is bad; all ranks decide alike.

    Args:
        decisions: lines of decisions.jsonl.
        metrics: lines of metrics.jsonl up to the restored step; like `decisions` the same on all ranks.
        writes: whether this rank writes decisions.jsonl.
    """

    def __init__(
        self, run: Run, *, decisions: Iterable[Mapping[str, Any]], metrics: Iterable[Mapping[str, Any]], writes: bool
    ) -> None:
        self.run = run
        self.limits = run.config.recovery
        self.writes = writes
        self._skip_reasons: dict[int, str] = {}
        excluded = []
        for line in decisions:
            if line["decision"] == "skip":
                self._skip_reasons[int(line["position"])] = str(line["reason"])
            else:
                excluded.append((int(line["position"]), int(line["samples"])))
        self.excluded_ranges = merge_ranges(excluded)
        """Ranges of positions that the order excludes: (position, number of samples), sorted and disjoint."""
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._bad_positions: list[int] = []
        """Positions of the latest consecutive bad steps."""
        batch = run.config.train.global_batch
        for line in metrics:
            if "skipped" in line:
                self._bad_positions.append(skip_excluded((line["step"] - 1) * batch, self.excluded_ranges))
            else:
                self._bad_positions.clear()
                self._losses.append(line["loss"])

    @classmethod
    def load(cls, run: Run, group: dist.ProcessGroup) -> BadStepGuard:
        """Return the guard for the steps that follow the restored one, from files that rank 0 reads.

        group: a Gloo group of all ranks, which call this together.
        """
        is_first = dist.get_rank(group) == 0

        def read_files() -> tuple[list[Any], list[Any]]:
            if not is_first:
                return [], []
            metrics = select_recent_metrics(read_valid_lines(run.metrics_file, is_step_line))
            return read_required_lines(run.decisions_file, is_decision), metrics

        decisions, metrics = all_gather_results(group, read_files)[0]
        return cls(run, decisions=decisions, metrics=metrics, writes=is_first)

    @property
    def consecutive_bad_steps(self) -> int:
        """How many of the latest steps were bad, without a good one between them."""
        return len(self._bad_positions)

    def on_before_optimizer_step(self, trainer: TrainerContext, step: int, loss: float, grad_norm: float) -> str | None:
        """Check the step."""
        return self.check_step(step, loss, grad_norm)

    def check_step(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Return why this step must not change the weights; None for a good step.

        Raises NonFiniteError on all ranks if too many consecutive steps are bad. The decision is on disk by then.

        Args:
            loss: mean over the global batch.
            grad_norm: norm of the whole model's gradient before clipping.
        """
        batch = self.run.config.train.global_batch
        position = skip_excluded((step - 1) * batch, self.excluded_ranges)
        reason = self._skip_reasons.get(position) or self._find_problem(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            self._bad_positions.clear()
            return None
        self._bad_positions.append(position)
        if len(self._bad_positions) > self.limits.skip_bad_steps:
            first = self._bad_positions[0]
            count = position + batch - first
            self._write_decision("leave_out", first, step, reason, samples=count)
            raise NonFiniteError(
                "train.bad_steps",
                f"step {step}: {reason}; this is bad step number {len(self._bad_positions)} in a row. The training "
                f"returns to its last checkpoint and excludes samples {first} to {first + count - 1}. If this happens "
                "again, lower optimizer.lr, raise optimizer.warmup_steps, or inspect those samples",
            )
        if position not in self._skip_reasons:
            self._write_decision("skip", position, step, reason)
        return reason

    def _find_problem(self, loss: float, grad_norm: float) -> str | None:
        """Return what is wrong with these numbers; None if nothing is."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        limit = self.limits.spike_deviations
        if limit is None or len(self._losses) < MIN_LOSSES:
            return None
        mean = statistics.fmean(self._losses)
        deviation = statistics.pstdev(self._losses, mean)
        if loss > mean + limit * deviation:
            return f"the loss {loss:.4f} is {(loss - mean) / max(deviation, 1e-12):.1f} deviations above {mean:.4f}"
        return None

    def _write_decision(self, decision: str, position: int, step: int, reason: str, **fields: int) -> None:
        if self.writes:
            line = {
                "time": utc_timestamp(),
                "decision": decision,
                "position": position,
                "step": step,
                "reason": reason,
                **fields,
            }
            append_line(self.run.decisions_file, json.dumps(add_checksum(line)))
            fsync(self.run.decisions_file)  # a checkpoint must never know more than this file
            event_class = BadStepSkipped if decision == "skip" else SamplesExcluded
            self.run.append_event(
                event_class(stage="train", step=step, position=position, reason=reason, samples=fields.get("samples"))
            )
