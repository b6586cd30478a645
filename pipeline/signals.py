"""The flag that a signal sets. Handlers do nothing else: what stopping means is decided at a step boundary.

Installed in the first lines of every rank and supervisor, before anything heavy is imported, so that a signal
during start-up is not lost and kills nothing half-way.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from pipeline.errors import Exit

OWN_CLOCK = "time limit"
"""The reason of ranks that stop by their own clock, before Slurm tells them."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """False until the first of `SIGNALS` arrives; `reason` then names it."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.count = 0
        """How many signals came in all."""

    def install(self) -> StopFlag:
        """Take over the signals of this process (main thread only)."""
        for number in SIGNALS:
            signal.signal(number, self._handle)
        return self

    def leave_at_once(self) -> None:
        """For work that may be cut anywhere (it is atomic by files): a signal now ends the process."""
        if self:
            os._exit(Exit.STOPPED)
        for number in SIGNALS:
            signal.signal(number, lambda *_: os._exit(Exit.STOPPED))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        self.count += 1

    def __bool__(self) -> bool:
        return self.reason is not None
