"""`evaluate.every: checkpoint`: the supervisor of a training submits an evaluation as each checkpoint appears.

Such a job is an ordinary evaluate stage, and does what is missing at its time. One runs after the other (each waits for
the one before), so a slow queue gives fewer, larger evaluations. The chain's own evaluate job, after the training, does
what is left; nothing depends on these.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from pipeline.base.errors import UserError
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.data.manifest import count_training_steps
from pipeline.run.directory import Run
from slurm.query.job_states import events_since_submission, list_recorded_jobs, query_job_states

LOOK_EVERY_S = 2.0
AGAIN_S, AGAIN_AT_MOST_S = 60.0, 3600.0
"""How long after a look that failed the next one comes: twice as long after each that fails in a row."""


class Evaluations:
    """Looks for new checkpoints of `run` and submits their evaluation."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_enabled = run.config.evaluate.every == "checkpoint" and run.config.data.held_out > 0
        before = [e for e in run.read_events("evaluate", "submitted") if "step" in e]
        self._last_step = max((int(e["step"]) for e in before), default=0)
        self._next, self._again_s, self._told = 0.0, AGAIN_S, ""

    def one_of_many(self, job_id: str) -> bool:
        """Whether a job is such an evaluation: another checkpoint may have come while it ran, and that is no fault."""
        told = self.run.read_events("evaluate", "submitted")
        if not any("step" in e and e["job_id"] == job_id for e in told):  # Slurm need not be there
            return False
        return "step" in events_since_submission(told, job_id)[0]

    def submit_new_evaluation(self) -> None:
        """Submit one job if there is a new checkpoint; called often, looks seldom. What fails is tried again later."""
        if not self.is_enabled or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_EVERY_S
        try:
            self._submit_newest()
            self._again_s = AGAIN_S
        except Exception as error:  # some sites take no jobs from compute nodes; whatever it is, the training goes on
            self._next, self._again_s = time.monotonic() + self._again_s, min(2 * self._again_s, AGAIN_AT_MOST_S)
            message = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
            if message != self._told:
                self._told = message
                print(f"no evaluation could be submitted; trying again later: {message}", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self.run.event("evaluation_not_submitted", "evaluate", message=message)

    def _submit_newest(self) -> None:
        newest = next(iter(list_checkpoint_steps(self.run.checkpoints_dir)), 0)
        if not self._last_step < newest < (count_training_steps(self.run.config, self.run.data_dir) or 0):
            return
        from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, resolve_submissions_if_open, submit_stage

        resolve_submissions_if_open([self.run])
        before = [(e, one) for e, one in list_recorded_jobs(self.run) if e["stage"] == "evaluate" and "step" in e]
        self._last_step = max([self._last_step, *(int(event["step"]) for event, _ in before)])
        if newest <= self._last_step:  # it was submitted, and its record is settled only now
            return
        after = [job.job_id for job in query_job_states(one for _, one in before[-1:]).values() if job.is_active]
        submit_stage(self.run, "evaluate", after, kind="afterany", patience_s=JOB_SBATCH_TIMEOUT_S, step=newest)
        self._last_step = newest
