"""The `recovery:` section of the config: how often a run may go on by itself after each kind of stop, and when it
waits too long. See slurm/supervise/decision.py for what is done with it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from pipeline.config.types import NonNegativeInt, PositiveFloat, Section

Patience = Annotated[float, Field(gt=0.0, le=6000.0)]
"""Seconds, less than what collectives may take (pipeline/comm/groups.py)."""


class RecoveryConfig(Section):
    """What happens after a stop. The counts are budgets: how often a stage goes on by itself until a `resume`."""

    preempted: NonNegativeInt = 1000
    """Preemptions, and stops by a signal of unknown origin: they say nothing about the run, so the cap is high."""
    node_failure: NonNegativeInt = 100
    """Nodes that died under the job."""
    time_limit: NonNegativeInt = 1000
    """Ends of the time limit; each must have brought a new checkpoint."""
    bad_node: NonNegativeInt = 10
    """Nodes that failed the check at the start; the job goes on without them."""
    out_of_memory: NonNegativeInt = 2
    """Times that host or device memory ran out."""
    crash: NonNegativeInt = 2
    """Unexpected errors: exceptions, killed or lost ranks."""
    hang: NonNegativeInt = 3
    """Steps that took longer than `hang_s`."""
    non_finite: NonNegativeInt = 2
    """Returns to an earlier checkpoint because loss or gradient stayed bad."""
    user_error: NonNegativeInt = 0
    """Errors that a person has to mend (a config, a full disk, damaged inputs)."""
    fruitless: PositiveInt = 3
    """How many preemptions or node failures in a row may bring no new checkpoint. After any other cause a training
    without a new checkpoint stops at once: it would loop."""
    hang_s: Patience | None = None
    """Longest time without progress inside a step, in seconds; null: 20 times the longest of the last steps, at least
    300."""
    start_s: Patience = 1800.0
    """Longest time from the start of the ranks to their first step, in seconds."""
    save_s: Patience = 1800.0
    """Longest time of a checkpoint, in seconds."""
    grace_s: PositiveFloat | None = None
    """Seconds that the site leaves a preempted job (GraceTime; `submit.py doctor` shows it); null: unknown. A save
    that cannot end in time is left out, and the one before it counts."""
    preflight: bool = True
    """Check each node before training: device, file system, communication."""
    exclude_hours: PositiveFloat = 24.0
    """How long a node that failed is avoided."""
    exclude_at_most: NonNegativeInt = 4
    """How many nodes are avoided at a time; the oldest are tried again first."""
    skip_bad_steps: NonNegativeInt = 3
    """How many steps in a row may have a loss or gradient that is not finite (or a spike): each is left out by all
    ranks. One more, and training returns to the last checkpoint and leaves those samples out."""
    spike_deviations: PositiveFloat | None = Field(default=None, ge=3.0)
    """A loss so many standard deviations above the mean of the last 100 steps counts as bad; null: never."""
