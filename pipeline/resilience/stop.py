"""Stopping together: the ranks agree at a step boundary, and everybody leaves alike.

A signal may reach one rank, some, or all, at different moments; a rank that simply left would hang the others
in their next collective. So a signal only sets a flag (pipeline/base/signals.py), and a rank with something to say
raises its hand: in the all-reduce of the loss, which a step has anyway, it gives NaN instead of its part. All ranks
read NaN then, tell each other on a small Gloo group what they know (:meth:`Agreement.start`, :meth:`Agreement.stop`),
and take the sum of the loss again. So a step in which nobody has anything to say pays nothing; an exchange in each step
cost a rank 0.5 ms of processor time. Where one rank wants to stop, all stop after the same step and save together.

Ranks do not only wait for signals: a job knows when it ends (:class:`Clock`), and stops while there is time for the
save that it has measured. A save that cannot end in time any more is left out: the one before it counts.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.base.signals import LOCAL_DEADLINE, STOP_SIGNALS, StopFlag

SPARE_S = 10.0
"""Beyond what a step and a save took so far: for leaving, and for clocks that differ."""
REASONS = (None, LOCAL_DEADLINE, *(number.name for number in STOP_SIGNALS))
"""Why ranks stop, by number; where they have different reasons, the last one here holds."""


class Deadline:
    """The time that is left to this job, by the monotonic clock: those of nodes need not agree on the hour.

    `left_s`: seconds from the start of this process to the end of the time limit; `grace_s`: how long the job has after
    a signal.
    """

    def __init__(self, flag: StopFlag, left_s: float | None = None, grace_s: float | None = None) -> None:
        self.flag, self.grace_s = flag, math.inf if grace_s is None else grace_s
        self.end = math.inf if left_s is None else flag.start_time + left_s
        self.step_s = 0.0
        """Longest of the last steps."""
        self.save_s = 0.0
        """Longest save so far; known to rank 0, which measures it."""
        self.saving = False
        """Whether a save is in flight; the next one begins after it."""
        self._steps = 0

    def due(self, before_s: float = 0.0) -> bool:
        """Whether the job must stop now to save within its time limit; or that it must after so many seconds."""
        return time.monotonic() + before_s + 2 * self.step_s + 2.5 * self.save_s + SPARE_S >= self.end

    def left_s(self) -> float:
        """Seconds until this rank is ended, as far as it knows."""
        grace_ends = math.inf if self.flag.signal_time is None else self.flag.signal_time + self.grace_s
        return min(self.end, grace_ends) - time.monotonic()

    def needed_s(self) -> float:
        """Seconds that a save takes which is asked for now."""
        return 2 * self.save_s if self.saving else self.save_s

    def stepped(self, seconds: float) -> None:
        """Count a step. Old ones fade, and the first one of a start, which compiles, with the next."""
        self.step_s = seconds if self._steps < 2 else max(seconds, 0.9 * self.step_s)
        self._steps += 1


class StopCoordinator:
    """What any rank knows, known to all: every rank calls `start`, and some time later `stop`."""

    def __init__(self, flag: StopFlag, group: dist.ProcessGroup, clock: Deadline | None = None) -> None:
        self.flag, self.group = flag, group
        self.clock = clock or Deadline(flag)
        self.wants_save: Callable[[], bool] = lambda: False
        """Asked once a step: whether this rank knows of a request to save."""
        self.wants_profile: Callable[[], bool] = lambda: False
        """The same of a request to profile."""
        self.reason: str | None = None
        """Why the ranks stop: a signal's name, or `OWN_CLOCK`; None while none wants to."""
        self.save = self.profile = self.too_late = False
        """Whether any rank wanted a save, or a profile; whether a save would be cut off on any."""
        self._votes: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def hand(self) -> bool:
        """Whether this rank has something to say; costs microseconds."""
        return bool(self.flag) or self.clock.due() or self.wants_save() or self.wants_profile()

    def start(self) -> None:
        """Contribute what this rank knows now."""
        mine = self.flag.reason or (LOCAL_DEADLINE if self.clock.due() else None)
        votes: list[float] = [REASONS.index(mine), self.wants_save(), self.wants_profile()]
        votes += [-self.clock.left_s(), self.clock.needed_s()]
        self._votes = torch.tensor(votes, dtype=torch.float64)
        self._work = dist.all_reduce(self._votes, dist.ReduceOp.MAX, group=self.group, async_op=True)

    def stop(self) -> bool:
        """Whether any rank wanted to stop when it called `start`; sets `reason`, `save` and `too_late`."""
        assert self._votes is not None and self._work is not None, "start first"
        self._work.wait()
        reason, save, profile, minus_left_s, needed_s = self._votes.tolist()
        self.reason, self.too_late = REASONS[int(reason)], needed_s >= -minus_left_s
        self.save, self.profile = save > 0, profile > 0
        return self.reason is not None


class RequestFile:
    """A file in the run directory by which anybody who may write there asks for something; rank 0 looks.

    `save` asks for a checkpoint, `profile` for profiled steps.
    """

    EVERY_S = 1.0

    def __init__(self, file: Path) -> None:
        self.file = file
        self._next = 0.0
        self._asked = False
        self._answering: int | None = None
        """When the file was written that what is done now answers (ns, by the file system)."""

    def __call__(self) -> bool:
        """Whether there is a request; asks the file system once a second at most."""
        now = time.monotonic()
        if not self._asked and self._answering is None and now >= self._next:
            self._next = now + self.EVERY_S
            self._asked = os.path.exists(self.file)  # unlike Path.exists quiet where a file server stutters
        return self._asked

    def begun(self) -> None:
        """What answers a request begins."""
        self._answering = self._written() if self._asked else None
        self._asked = False

    def leave(self) -> None:
        """Leave it, and what may come, to the next attempt."""
        self._asked, self._next = False, math.inf

    def done(self) -> None:
        """It is done: the request that it answers is forgotten, and not before. No file is worth a training."""
        if self._answering is not None and self._answering == self._written():  # else there is a newer one
            with suppress(OSError):
                self.file.unlink()
        self._answering = None

    def _written(self) -> int | None:
        with suppress(OSError):
            return self.file.stat().st_mtime_ns
        return None
