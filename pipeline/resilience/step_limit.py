"""The time limit of a phase of a step, after which a rank counts as hung.

By default, the limit is 20 times the longest recent step, at least `MIN_LIMIT_S`, and at most `MAX_LIMIT_S`, which is
below the time-out of a collective. `recovery.hang_s` sets another limit.
"""

from __future__ import annotations

MIN_LIMIT_S = 300.0
"""Minimum of the default limit."""
MAX_LIMIT_S = 6000.0
"""Maximum of the default limit."""
LIMIT_IN_STEPS = 20.0
"""The default limit, as a multiple of the longest recent step."""


class StepLimit:
    """Adapts the limit to the durations of steps.

    Args:
        hang_s: `recovery.hang_s`; None for the default limit.
    """

    def __init__(self, hang_s: float | None) -> None:
        self._hang_s = hang_s
        self.longest_step_s = 0.0
        """Duration of the longest recent step in seconds."""
        self._step_count = 0

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step.

        Each step reduces the previous maximum by 5 %. The second step of an attempt replaces the duration of the first
        step, because the first step may include the time of torch.compile.
        """
        self.longest_step_s = seconds if self._step_count < 2 else max(seconds, 0.95 * self.longest_step_s)
        self._step_count += 1

    def get_s(self) -> float:
        """Return how many seconds a phase may take."""
        return self._hang_s or min(MAX_LIMIT_S, max(MIN_LIMIT_S, LIMIT_IN_STEPS * self.longest_step_s))
