"""`evaluate.every: checkpoint`: the supervisor of a training submits an evaluation as each checkpoint appears.

Such a job is an ordinary evaluate stage, and does what is missing at its time. One runs after the other (each waits for
the one before), so a slow queue gives fewer, larger evaluations. The chain's own evaluate job, after the training, does
what is left; nothing depends on these.
"""

from __future__ import annotations

import time

from pipeline.base.errors import UserError
from pipeline.checkpoint.saved import saved_steps
from pipeline.data.manifest import steps_of
from pipeline.run.directory import Run
from slurm.query.states import claims, query, since_submitted

LOOK_EVERY_S = 2.0


class Evaluations:
    """Looks for new checkpoints of `run` and submits their evaluation."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.wanted = run.config.evaluate.every == "checkpoint" and run.config.data.held_out > 0
        before = [e for e in run.read_events("evaluate", "submitted") if "step" in e]
        self._last_step = max((int(e["step"]) for e in before), default=0)
        self._next = 0.0

    def one_of_many(self, job_id: str) -> bool:
        """Whether a job is such an evaluation: another checkpoint may have come while it ran, and that is no fault."""
        told = self.run.read_events("evaluate", "submitted")
        if not any("step" in e and e["job_id"] == job_id for e in told):  # Slurm need not be there
            return False
        return "step" in since_submitted(told, job_id)[0]

    def look(self) -> None:
        """Submit one job if there is a new checkpoint; called often, looks seldom."""
        if not self.wanted or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY_S
        newest = next(iter(saved_steps(self.run.checkpoints)), 0)
        if not self._last_step < newest < (steps_of(self.run.config, self.run.data) or 0):
            return
        from slurm.submit.sbatch import submit

        last = [one for event, one in claims(self.run) if event["stage"] == "evaluate" and "step" in event][-1:]
        after = [job.job_id for job in query(last).values() if job.active]
        try:
            submit(self.run, "evaluate", after, kind="afterany", step=newest)
        except UserError as error:  # some sites take no jobs from compute nodes; the chain's evaluation does it all
            self.wanted = False
            self.run.event("evaluation_not_submitted", "evaluate", step=newest, message=str(error))
            return
        self._last_step = newest
