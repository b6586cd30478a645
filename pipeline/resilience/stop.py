"""Coordinated stopping: all ranks save and exit after the same optimizer step.

A signal may reach some ranks before others. If one rank exited alone, the others would block in a collective.

1. A signal handler only sets a flag (pipeline/base/signals.py).
2. A rank with a pending request contributes NaN to the all-reduce of the loss, which every step performs anyway. A
   step without requests therefore costs nothing extra. An exchange in each step would cost 0.5 ms of processor time.
3. If the reduced loss is NaN, all ranks exchange their requests on a small Gloo group and reduce the loss again.
4. If any rank requested a stop, all ranks save a checkpoint and exit. If a save can no longer finish in time
   (`Deadline`), the save is skipped, and the previous checkpoint remains the newest checkpoint.

The same exchange coordinates other requests: to save, to profile, and to complete the train stage early.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.base.signals import LOCAL_DEADLINE, STOP_SIGNALS, StopFlag
from pipeline.train.callback import Callback, TrainerContext

SAFETY_MARGIN_S = 10.0
"""Extra time reserved for process exit and clock differences between nodes."""
STOP_REASONS = (None, LOCAL_DEADLINE, *(number.name for number in STOP_SIGNALS))
"""Reasons to stop. Ranks exchange the index of their reason, and the largest index wins."""
SAVE_REQUEST = "save"
"""The user requested a checkpoint (`submit.py save`)."""
PROFILE_REQUEST = "profile"
"""The user requested profiled steps (`submit.py profile`)."""
EARLY_STOP_REQUEST = "early_stop"
"""A callback of the user requested that the train stage completes early (`TrainerContext.request_stop`)."""


class Deadline(Callback):
    """Measures how much time remains until this job is killed, and how long steps and saves take.

    All times are by this node's monotonic clock, because the clocks of nodes may differ.

    Args:
        flag: has the start time of this process and the time of the first signal.
        time_limit_s: seconds from the start of this process to the end of the job's time limit; None if unlimited.
        grace_period_s: seconds between a termination signal and SIGKILL; None if unknown.
    """

    def __init__(self, flag: StopFlag, time_limit_s: float | None = None, grace_period_s: float | None = None) -> None:
        self.flag = flag
        self.longest_step_s = 0.0
        """Duration of the longest recent step in seconds."""
        self.expected_save_s = 0.0
        """Expected duration of a save in seconds, on rank 0; 0 on other ranks, which do not measure it.

        The initial value is the duration of the latest save of earlier attempts. The value increases if a save takes
        longer.
        """
        self.is_saving = False
        """Whether a save is in progress. The next save must wait for the end of this save."""
        self._grace_period_s = math.inf if grace_period_s is None else grace_period_s
        self._end_time = math.inf if time_limit_s is None else flag.start_time + time_limit_s
        """When the job reaches its time limit, by the monotonic clock; infinity if the job has no time limit."""
        self._step_count = 0
        """Number of steps in this attempt so far."""

    def should_stop(self, after_s: float = 0.0) -> bool:
        """Return True if the job must stop now to save within its time limit.

        The job must stop if the remaining time is less than the time of two steps and of two and a half saves, plus a
        margin. More than one save is reserved, because a save in progress must finish before the next save.

        Args:
            after_s: seconds of other work that the caller wants to do before the stop.
        """
        reserve_s = 2 * self.longest_step_s + 2.5 * self.expected_save_s + SAFETY_MARGIN_S
        return time.monotonic() + after_s + reserve_s >= self._end_time

    def time_remaining_s(self) -> float:
        """Return the seconds until this process is killed: at the time limit, or when the grace period ends.

        The grace period begins with the first signal. Return infinity if neither of these times is known.
        """
        grace_period_end = math.inf if self.flag.signal_time is None else self.flag.signal_time + self._grace_period_s
        return min(self._end_time, grace_period_end) - time.monotonic()

    def save_duration_s(self) -> float:
        """Return the expected seconds until a save that is requested now would be finished.

        A save in progress must finish first, so the time of two saves is returned in this case.
        """
        return 2 * self.expected_save_s if self.is_saving else self.expected_save_s

    def record_step(self, seconds: float) -> None:
        """Update `longest_step_s` with the duration of a step.

        Each step reduces the previous maximum by 10 %. The second step of an attempt replaces the duration of the first
        step, because the first step may include the time of torch.compile.
        """
        self.longest_step_s = seconds if self._step_count < 2 else max(seconds, 0.9 * self.longest_step_s)
        self._step_count += 1

    def expect_longer_steps(self, factor: float) -> None:
        """Multiply `longest_step_s` by `factor`, because the next steps have more work."""
        self.longest_step_s *= factor

    def on_metrics(self, trainer: TrainerContext, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the duration of the step."""
        self.record_step(trainer.step_s)

    def on_save(self, trainer: TrainerContext, step: int) -> None:
        """Record that a save begins."""
        self.is_saving = True

    def on_saved(self, trainer: TrainerContext, step: int, save_duration_s: float) -> None:
        """Record that the save has ended, and its duration."""
        self.expected_save_s = max(self.expected_save_s, save_duration_s)
        self.is_saving = False


class StopCoordinator:
    """Exchanges the requests of all ranks, so that all ranks act on them after the same step.

    All ranks must call `exchange` together, or `start_exchange` and later `finish_exchange`.

    Args:
        flag: set by the signals that request a stop.
        group: a Gloo group of all ranks.
        deadline: the remaining time of the job; None if the time is not limited.
    """

    def __init__(self, flag: StopFlag, group: dist.ProcessGroup, deadline: Deadline | None = None) -> None:
        self.flag = flag
        self.group = group
        self.deadline = deadline or Deadline(flag)
        self.stop_reason: str | None = None
        """Why the ranks stop: the name of a signal, or `LOCAL_DEADLINE` if a rank must stop because of its `deadline`.

        None if no rank requested a stop.
        """
        self.is_too_late_to_save = False
        """Whether at least one rank would be killed before a save that starts now would finish."""
        self.pending_requests: set[str] = set()
        """The names of all requests, except a stop, that at least one rank had at the latest exchange."""
        self._pending_checks: dict[str, Callable[[], bool]] = {}
        """For the name of each request, a function that returns True if this rank has the request."""
        self._message: torch.Tensor | None = None
        """The numbers that the ranks exchange, as float64: the index of the reason to stop in `STOP_REASONS`, 1 or 0
        for each other request, the negated remaining seconds, and the duration of a save. The all-reduce replaces each
        number by the maximum over the ranks."""
        self._work: dist.Work | None = None
        """The all-reduce in progress."""

    def add_request(self, name: str, is_pending: Callable[[], bool]) -> None:
        """Add a kind of request to each exchange. All ranks must add the same names in the same order.

        Args:
            name: the name of the request.
            is_pending: returns True if this rank has the request.
        """
        self._pending_checks[name] = is_pending

    def wants_attention(self) -> bool:
        """Return True if this rank has any request, such as a stop. A call takes a few microseconds."""
        if self.flag or self.deadline.should_stop():
            return True
        return any(is_pending() for is_pending in self._pending_checks.values())

    def start_exchange(self) -> None:
        """Start an exchange with the requests that this rank has now."""
        reason = self.flag.reason or (LOCAL_DEADLINE if self.deadline.should_stop() else None)
        numbers = [float(STOP_REASONS.index(reason))]
        numbers += [float(is_pending()) for is_pending in self._pending_checks.values()]
        # The remaining time is negated, because the exchange computes the maximum, and the shortest time is needed.
        numbers += [-self.deadline.time_remaining_s(), self.deadline.save_duration_s()]
        self._message = torch.tensor(numbers, dtype=torch.float64)
        self._work = dist.all_reduce(self._message, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def finish_exchange(self) -> bool:
        """Wait for the end of the exchange, and set `stop_reason`, `pending_requests` and `is_too_late_to_save`.

        Return True if any rank had a request to stop when that rank called `start_exchange`.
        """
        assert self._message is not None and self._work is not None, "call start_exchange first"
        self._work.wait()
        reason_index, *requests, minus_remaining_s, save_s = self._message.tolist()
        self.stop_reason = STOP_REASONS[int(reason_index)]
        self.is_too_late_to_save = save_s >= -minus_remaining_s
        self.pending_requests = {
            name for name, request in zip(self._pending_checks, requests, strict=True) if request > 0
        }
        return self.stop_reason is not None

    def exchange(self) -> bool:
        """Exchange the requests of all ranks; return True if any rank requested a stop."""
        self.start_exchange()
        return self.finish_exchange()


class RequestFile:
    """A file in the run directory with which the user sends a request to the running train stage.

    The file `save` requests a checkpoint, and the file `profile` requests profiled steps. Rank 0 checks whether the
    file exists. If the file cannot be read, the run continues.

    Args:
        file: the path of the file.
    """

    CHECK_INTERVAL_S = 1.0
    """The pause between two queries of the file system."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._next_check_time = 0.0
        self._is_pending = False
        self._accepted_mtime_ns: int | None = None
        """Modification time of the file whose request is being carried out, by the clock of the file system."""

    def is_pending(self) -> bool:
        """Return True if there is a request. Query the file system at most once per `CHECK_INTERVAL_S` seconds."""
        now = time.monotonic()
        if not self._is_pending and self._accepted_mtime_ns is None and now >= self._next_check_time:
            self._next_check_time = now + self.CHECK_INTERVAL_S
            # Unlike Path.exists, os.path.exists raises no error if the file server fails.
            self._is_pending = os.path.exists(self.file)
        return self._is_pending

    def accept(self) -> None:
        """Record that the request, if there is one, is being carried out. The request is then no longer pending."""
        self._accepted_mtime_ns = self._read_mtime_ns() if self._is_pending else None
        self._is_pending = False

    def defer(self) -> None:
        """Ignore the file in the rest of this attempt, so that the next attempt carries out the request."""
        self._is_pending = False
        self._next_check_time = math.inf

    def complete(self) -> None:
        """Remove the file of the request that was carried out, unless a newer request has replaced it."""
        if self._accepted_mtime_ns is not None and self._accepted_mtime_ns == self._read_mtime_ns():
            with suppress(OSError):
                self.file.unlink()
        self._accepted_mtime_ns = None

    def _read_mtime_ns(self) -> int | None:
        """Return the modification time of the file in nanoseconds; None if the file cannot be read."""
        with suppress(OSError):
            return self.file.stat().st_mtime_ns
        return None


class SaveRequests(Callback):
    """Requests a checkpoint if the file `save` appears in the run directory (`submit.py save`).

    Args:
        file: the file `save`.
        coordinator: exchanges the request.
        checks_file: whether this rank checks for the file.
    """

    def __init__(self, file: Path, coordinator: StopCoordinator, *, checks_file: bool) -> None:
        self._request = RequestFile(file)
        coordinator.add_request(SAVE_REQUEST, self._request.is_pending if checks_file else lambda: False)

    def on_save(self, trainer: TrainerContext, step: int) -> None:
        """Accept the request, because this checkpoint fulfills it."""
        self._request.accept()

    def on_saved(self, trainer: TrainerContext, step: int, save_duration_s: float) -> None:
        """Remove the file of the request, because the checkpoint was saved."""
        self._request.complete()
