"""Skip bad steps: steps with a loss or gradient norm that is not finite, or a loss far above the previous losses.

A skipped step consumes its samples, but changes neither weights nor optimizer. All ranks have the same loss and norm,
so they make the same decision without communication. After too many consecutive bad steps, the run restarts from its
last checkpoint and excludes the samples of these steps. Each decision is written to `decisions.jsonl` before it takes
effect:

    {"decision": "skip", "position": P, "step": k, "reason": …}           no update for the batch that starts at P
    {"decision": "leave_out", "position": P, "samples": n, "step": k, …}  exclude n samples, starting at P

A `training_step` of the user may update weights several times. Its updates are checked for values that are not finite.
If an update is bad, it and the later updates of the step are skipped, and the line also has the index of the update
(`update`). Earlier updates of the step are kept.

`position` is an index into the sample order of the run (pipeline/data/sample_order.py), which includes excluded
samples. A new attempt with the same file repeats the decisions, even if the cause was temporary, such as a flipped bit.
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
from pipeline.run.decisions import is_decision, merge_ranges
from pipeline.run.directory import Run
from pipeline.run.events import BadStepSkipped, SamplesExcluded, utc_timestamp
from pipeline.run.lines import read_required_lines, read_valid_lines
from pipeline.run.metrics import MAX_LOSSES, is_step_line, select_recent_metrics
from pipeline.run.origin import read_origin
from pipeline.train.callback import Callback, TrainerContext

MIN_LOSSES = 20
"""Minimum number of recent losses that this comparison needs. With fewer losses, a loss is not compared."""


class BadStepGuard(Callback):
    """Decides whether a step is bad. All ranks make the same decision.

    Args:
        run: the run.
        decisions: the lines of decisions.jsonl, the same on all ranks.
        metrics: the last lines of metrics.jsonl (:func:`select_recent_metrics`), the same on all ranks. The last of
            these lines belongs to the step of the restored checkpoint.
        writes_decisions: whether this rank writes decisions.jsonl and events.
    """

    def __init__(
        self,
        run: Run,
        *,
        decisions: Iterable[Mapping[str, Any]],
        metrics: Iterable[Mapping[str, Any]],
        writes_decisions: bool,
    ) -> None:
        self.run = run
        self.limits = run.config.recovery
        self.writes_decisions = writes_decisions
        self._skip_reasons: dict[int, str] = {}
        """Why each skipped batch was skipped, by the position of its first sample."""
        self._first_skipped_updates: dict[int, int] = {}
        """The index of the first skipped update of each skipped batch, by the position of its first sample."""
        excluded_ranges = []
        for line in decisions:
            if line["decision"] == "skip":
                self._skip_reasons[int(line["position"])] = str(line["reason"])
                self._first_skipped_updates[int(line["position"])] = int(line.get("update", 0))
            else:
                excluded_ranges.append((int(line["position"]), int(line["samples"])))
        self.excluded_ranges = merge_ranges(excluded_ranges)
        """Ranges of samples that the run excludes: (position, number of samples), ascending and disjoint."""
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        """Losses of the latest good steps."""
        self._bad_positions: list[int] = []
        """The positions of the batches of all bad steps since the latest good step."""
        global_batch = run.config.train.global_batch
        for line in metrics:
            if "skipped" in line:
                self._bad_positions.append(skip_excluded((line["step"] - 1) * global_batch, self.excluded_ranges))
            else:
                self._bad_positions.clear()
                self._losses.append(line["loss"])

    @classmethod
    def load(cls, run: Run, group: dist.ProcessGroup) -> BadStepGuard:
        """Return a guard for the steps that follow the restored checkpoint. All ranks must call this method.

        Rank 0 reads decisions.jsonl and metrics.jsonl, and sends their lines to the other ranks. For a fork, the lines
        of its origin precede those of metrics.jsonl.

        Args:
            run: the run.
            group: a Gloo group of all ranks.
        """
        is_rank0 = dist.get_rank(group) == 0

        def read_files() -> tuple[list[Any], list[Any]]:
            if not is_rank0:
                return [], []
            origin = read_origin(run)
            earlier_metrics = origin.recent_metrics if origin else []
            metrics = select_recent_metrics([*earlier_metrics, *read_valid_lines(run.metrics_file, is_step_line)])
            return read_required_lines(run.decisions_file, is_decision), metrics

        decisions, metrics = all_gather_results(group, read_files)[0]
        return cls(run, decisions=decisions, metrics=metrics, writes_decisions=is_rank0)

    @property
    def consecutive_bad_steps(self) -> int:
        """Number of bad steps since the latest good step."""
        return len(self._bad_positions)

    def on_before_optimizer_step(self, trainer: TrainerContext, step: int, loss: float, grad_norm: float) -> str | None:
        """Return why the step is bad; None if the step is good. See :meth:`check_step` and :meth:`check_update`."""
        if trainer.update_number is not None:
            return self.check_update(step, trainer.update_number, loss, grad_norm)
        return self.check_step(step, loss, grad_norm)

    def check_step(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Return why this step must not change the weights; None if the step is good.

        A step is bad if its loss or gradient norm is not finite, or if its loss is far above the recent losses. A step
        is also bad if an earlier attempt skipped its batch.

        Args:
            step: the number of the step.
            loss: the mean over the global batch.
            grad_norm: the norm of the full model's gradient before clipping.

        Raises:
            NonFiniteError: on all ranks, if more than `recovery.skip_bad_steps` consecutive steps are bad. Before the
                error, the decision to exclude the samples of these steps is written.
        """
        position = self._compute_position(step)
        reason = self._skip_reasons.get(position) or self._find_problem(loss, grad_norm)
        if reason is None:
            self._losses.append(loss)
            self._bad_positions.clear()
            return None
        self._record_bad_step(step, position, reason)
        return reason

    def check_update(self, step: int, update: int, loss: float, grad_norm: float) -> str | None:
        """Return why this update of a user's `training_step` must be skipped; None if it must not.

        Args:
            step: the number of the step.
            update: the index of the update in the step, from 0.
            loss: the mean loss since the previous update.
            grad_norm: the norm of the gradient of the updated weights before clipping.

        Raises:
            NonFiniteError: as :meth:`check_step`.
        """
        position = self._compute_position(step)
        if position in self._bad_positions[-1:]:  # An earlier update of this step was bad.
            return self._skip_reasons[position]
        if position in self._skip_reasons:
            reason = self._skip_reasons[position] if update >= self._first_skipped_updates[position] else None
        else:
            reason = self._find_non_finite(loss, grad_norm)
        if reason is not None:
            self._record_bad_step(step, position, reason, update=update)
            self._skip_reasons[position] = reason
        return reason

    def end_step(self, step: int) -> None:
        """Finish a step whose updates were checked with `check_update`."""
        if self._compute_position(step) not in self._bad_positions[-1:]:
            self._bad_positions.clear()

    def _compute_position(self, step: int) -> int:
        """Return the position of the first sample of the step's batch."""
        return skip_excluded((step - 1) * self.run.config.train.global_batch, self.excluded_ranges)

    def _record_bad_step(self, step: int, position: int, reason: str, **fields: int) -> None:
        """Record a bad step, and write the decision. Raises NonFiniteError if too many consecutive steps are bad."""
        global_batch = self.run.config.train.global_batch
        self._bad_positions.append(position)
        if len(self._bad_positions) > self.limits.skip_bad_steps:
            first_position = self._bad_positions[0]
            # The range also includes samples between the bad batches that were excluded before.
            count = position + global_batch - first_position
            self._write_decision("leave_out", first_position, step, reason, samples=count)
            raise NonFiniteError(
                "train.bad_steps",
                f"step {step}: {reason}; this is bad step number {len(self._bad_positions)} in a row. The run restarts "
                f"from its last checkpoint and excludes samples {first_position} to {first_position + count - 1}. If "
                "this happens again, lower optimizer.lr, raise optimizer.warmup_steps, or inspect these samples",
            )
        if position not in self._skip_reasons:  # Otherwise an earlier attempt has written this decision.
            self._write_decision("skip", position, step, reason, **fields)

    def _find_non_finite(self, loss: float, grad_norm: float) -> str | None:
        """Return which of these values is not finite; None if both are finite."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return None if math.isfinite(grad_norm) else f"the gradient norm is {grad_norm}"

    def _find_problem(self, loss: float, grad_norm: float) -> str | None:
        """Return why a step with this loss and this gradient norm is bad; None if the step is good."""
        if problem := self._find_non_finite(loss, grad_norm):
            return problem
        limit = self.limits.spike_deviations
        if limit is None or len(self._losses) < MIN_LOSSES:
            return None
        mean = statistics.fmean(self._losses)
        deviation = statistics.pstdev(self._losses, mean)
        if loss > mean + limit * deviation:
            deviations = (loss - mean) / max(deviation, 1e-12)  # The minimum avoids a division by zero.
            return f"the loss {loss:.4f} is {deviations:.1f} deviations above {mean:.4f}"
        return None

    def _write_decision(self, decision: str, position: int, step: int, reason: str, **fields: int) -> None:
        """Write a decision to decisions.jsonl, and an event, if this rank writes decisions.

        Args:
            decision: `skip` or `leave_out`.
            position: the position of the first sample of the batch, or of the excluded samples.
            step: the number of the step.
            reason: why the step is bad.
            **fields: more fields of the line.
        """
        if self.writes_decisions:
            line = {
                "time": utc_timestamp(),
                "decision": decision,
                "position": position,
                "step": step,
                "reason": reason,
                **fields,
            }
            append_line(self.run.decisions_file, json.dumps(add_checksum(line)))
            fsync(self.run.decisions_file)  # The decision must be on disk before a checkpoint that depends on it.
            event_class = BadStepSkipped if decision == "skip" else SamplesExcluded
            self.run.append_event(
                event_class(stage="train", step=step, position=position, reason=reason, samples=fields.get("samples"))
            )
