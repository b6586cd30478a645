"""The flag that a signal sets. Handlers do nothing else: what stopping means is decided at a step boundary.

Installed in the first lines of every rank and supervisor, before anything heavy is imported, so that a signal
during start-up is not lost and kills nothing half-way. Python runs a handler only between two of its own instructions
in the main thread; while that waits inside a collective, the signal shows in a pipe (signal.set_wakeup_fd), which any
other thread can look into with :meth:`StopFlag.poll`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from pipeline.base.errors import ExitCode

LOCAL_DEADLINE = "time limit"
"""The reason of ranks that stop by their own clock, before Slurm tells them."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopFlag:
    """False until the first of `SIGNALS` arrives; `reason` then names it, `signal_time` is when (time.monotonic)."""

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        """When this process began, or nearly."""
        self.reason: str | None = None
        self.signal_time: float | None = None
        self.signal_count = 0
        """How many signals came in all."""
        self._pipe: int | None = None

    def install(self) -> StopFlag:
        """Take over the signals of this process (main thread only)."""
        self._pipe, end = os.pipe()
        for fd in (self._pipe, end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def poll(self) -> None:
        """Notice signals whose handlers could not run yet; for another thread than the main one."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                for number in os.read(self._pipe, 64):
                    if number in STOP_SIGNALS:
                        self._set(number)

    def exit_on_signal(self) -> None:
        """For work that may be cut anywhere (it is atomic by files): a signal now ends the process."""
        if self:
            os._exit(ExitCode.STOPPED)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: os._exit(ExitCode.STOPPED))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._set(number)
        self.signal_count += 1

    def _set(self, number: int) -> None:
        if self.reason is None:
            self.reason, self.signal_time = signal.Signals(number).name, time.monotonic()

    def __bool__(self) -> bool:
        return self.reason is not None
