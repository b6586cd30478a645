"""A flag that termination signals set. The signal handlers do nothing else; ranks stop at the next step boundary.

Every rank and supervisor installs the flag in its first lines, before slow imports. A signal during start-up is
therefore not lost, and does not kill the process.

Python runs signal handlers only in the main thread, between two bytecode instructions. While the main thread waits
inside a collective, the handler cannot run. Python then still writes the signal number to a pipe
(signal.set_wakeup_fd), which any other thread can read with :meth:`StopFlag.poll`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType

from pipeline.base.errors import ExitCode

LOCAL_DEADLINE = "time limit"
"""The stop reason if the deadline of a rank expires before Slurm sends a signal."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that request a process to stop."""


class StopFlag:
    """A flag that is False until the first of `STOP_SIGNALS` arrives.

    After the first signal, `reason` is the name of this signal, and `signal_time` its time by time.monotonic().
    """

    def __init__(self) -> None:
        self.start_time = time.monotonic()
        """The approximate time at which this process started, by time.monotonic()."""
        self.reason: str | None = None
        self.signal_time: float | None = None
        self.signal_count = 0
        """How often the signal handler has run."""
        self._pipe: int | None = None
        """The end of the pipe from which `poll` reads signal numbers; None before `install`."""

    def install(self) -> StopFlag:
        """Install the handlers for `STOP_SIGNALS` and return the flag. Only the main thread may call this."""
        self._pipe, write_end = os.pipe()
        for fd in (self._pipe, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)
        return self

    def poll(self) -> None:
        """Set the flag for signals that the main thread could not handle yet. Other threads call this method."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                for number in os.read(self._pipe, 64):  # each byte is the number of a signal
                    if number in STOP_SIGNALS:
                        self._set(number)

    def exit_on_signal(self) -> None:
        """Let signals end the process at once, without cleanup. If a signal has already arrived, end the process now.

        Call this if an interruption at any point is harmless, for example because files are written atomically.
        """
        if self:
            os._exit(ExitCode.STOPPED)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: os._exit(ExitCode.STOPPED))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Set the flag and count the signal, as the handler of each signal."""
        self._set(number)
        self.signal_count += 1

    def _set(self, number: int) -> None:
        """Set the flag for signal `number`, unless an earlier signal has set it."""
        if self.reason is None:
            self.reason = signal.Signals(number).name
            self.signal_time = time.monotonic()

    def __bool__(self) -> bool:
        """Return whether a signal arrived."""
        return self.reason is not None
