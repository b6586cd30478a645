"""Stopping together: the ranks agree at a step boundary, and everybody leaves alike.

A signal may reach one rank, some, or all, at different moments; a rank that simply left would hang the others
in their next collective. So a signal only sets a flag (pipeline/signals.py). Once a step each rank contributes its
votes: a number that travels with the loss, in the all-reduce over all ranks that a step has anyway, and is read with
it. (On a group of their own votes cost each rank 0.5 ms of processor time per step.) Any vote to stop stops all ranks
after the same step; then they save together. Where there is no loss to travel with, at the start and in an evaluation,
:meth:`Agreement.start` and :meth:`Agreement.stop` use a small Gloo group.

Ranks do not only wait for signals: a job knows when it ends (:class:`Clock`), and stops while there is time for the
save that it has measured. A save that cannot end in time any more is left out: the one before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline.run import Run
from pipeline.signals import OWN_CLOCK, SIGNALS, StopFlag

SPARE_S = 10.0
"""Beyond what a step and a save took so far: for leaving, and for clocks that differ."""
REASONS = (None, OWN_CLOCK, *(number.name for number in SIGNALS))
"""Where ranks have different ones, the last one here holds."""


class Clock:
    """The time that is left to this job, by the monotonic clock: those of nodes need not agree on the hour.

    `left_s`: seconds from the start of this process to the end of the time limit; `grace_s`: how long the job has after
    a signal.
    """

    def __init__(self, flag: StopFlag, left_s: float | None, grace_s: float | None) -> None:
        self.flag, self.grace_s = flag, grace_s
        self.end = None if left_s is None else flag.since + left_s
        self.step_s = 0.0
        """Longest of the last steps."""
        self.save_s = 0.0
        """Longest save so far."""

    def due(self) -> bool:
        """Whether the job must stop now to save within its time limit."""
        wanted = 2 * self.step_s + 1.5 * self.save_s + SPARE_S
        return self.end is not None and time.monotonic() + wanted >= self.end

    def too_late(self) -> bool:
        """Whether a save begun now would be cut off."""
        ends = [self.end] if self.end is not None else []
        if self.flag.at is not None and self.grace_s is not None:
            ends.append(self.flag.at + self.grace_s)
        return bool(ends) and time.monotonic() + self.save_s >= min(ends)

    def stepped(self, seconds: float) -> None:
        """Count a step; old ones fade."""
        self.step_s = max(seconds, 0.9 * self.step_s)


class Agreement:
    """Once per step: `votes()` on every rank, their sum to `count()`: then all ranks know the same."""

    def __init__(self, flag: StopFlag, group: dist.ProcessGroup, clock: Clock | None = None) -> None:
        self.flag, self.group = flag, group
        self.clock = clock or Clock(flag, None, None)
        self.wants_save: Callable[[], bool] = lambda: False
        """Asked once a step: whether this rank knows of a request to save."""
        self.stopping = self.save = self.too_late = False
        """Whether any rank wanted to stop, wanted a save, would find a save cut off."""
        self._base = dist.get_world_size(group) + 1
        self._sum: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def votes(self) -> float:
        """What this rank knows now: three digits, of which each has room for the sum over all ranks.

        One number, since Gloo's time for so small a message grows with its elements: eight took 1 ms more than one.
        """
        stop = bool(self.flag) or self.clock.due()
        return float(stop + self._base * (self.wants_save() + self._base * self.clock.too_late()))

    def count(self, total: float) -> None:
        """Take the sum of all ranks' votes."""
        rest, stop = divmod(int(total), self._base)
        late, save = divmod(rest, self._base)
        self.stopping, self.save, self.too_late = stop > 0, save > 0, late > 0

    def start(self) -> None:
        """Contribute this rank's votes, on the side group."""
        self._sum = torch.tensor(self.votes(), dtype=torch.float64)
        self._work = dist.all_reduce(self._sum, group=self.group, async_op=True)

    def stop(self) -> bool:
        """Whether any rank wanted to stop when it called `start`."""
        assert self._sum is not None and self._work is not None, "start first"
        self._work.wait()
        self.count(self._sum.item())
        return self.stopping

    def reason(self) -> str | None:
        """Why the ranks stop, the same on all (which all call it): a signal's name, or `OWN_CLOCK`."""
        mine = self.flag.reason or (OWN_CLOCK if self.clock.due() else None)
        index = torch.tensor(REASONS.index(mine))
        dist.all_reduce(index, dist.ReduceOp.MAX, group=self.group)
        return REASONS[int(index)]


class SaveRequest:
    """A file in the run directory, `save`, by which anybody who may write there asks for a checkpoint; rank 0 looks."""

    EVERY_S = 1.0

    def __init__(self, run: Run) -> None:
        self.file = run.save_file
        self._next = 0.0

    def __call__(self) -> bool:
        """Whether there is a request; asks the file system once a second at most."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.EVERY_S
        return self.file.exists()

    def honoured(self) -> None:
        """Forget the request: its save has begun."""
        self.file.unlink(missing_ok=True)
