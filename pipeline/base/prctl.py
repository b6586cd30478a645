"""Attributes of this process that only prctl(2) of Linux can set (linux/prctl.h)."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None)  # It is loaded here, because a forked child must not load libraries.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: object) -> None:
    """Call prctl(2). On systems other than Linux, nothing happens."""
    if (prctl := getattr(_LIBC, "prctl", None)) is not None:
        prctl(option, argument)


def set_parent_death_signal(number: int) -> None:
    """Make the kernel send a signal to this process when its parent exits. Child processes do not inherit this.

    If the parent may have exited already, compare `os.getppid()` after the call.
    """
    _prctl(_PR_SET_PDEATHSIG, number)


def set_process_name(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    _prctl(_PR_SET_NAME, name.encode())


def set_timer_slack(nanoseconds: int) -> None:
    """Set how much the kernel may extend the sleeps of this thread to save energy. The default is 50 µs."""
    _prctl(_PR_SET_TIMERSLACK, nanoseconds)


def become_subreaper() -> None:
    """Make this process the parent of all descendants whose own parent exits."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
