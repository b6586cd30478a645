"""Format values for display."""

from __future__ import annotations

from datetime import timedelta


def format_duration(seconds: float) -> str:
    """Return a number of seconds as `2 days, 1:02:03`, `1:02:03` or `02:03`; a negative number as `00:00`."""
    return str(timedelta(seconds=max(0, int(seconds + 0.5)))).removeprefix("0:")
