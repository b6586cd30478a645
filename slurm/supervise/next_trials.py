"""Submit the next trials of a search when the train stage of a trial has ended.

Each supervisor of a trial calls :func:`submit_next_trials` before it exits, so no process has to keep running between
two trials. The lock of the run directory ensures that one process at a time decides. If two trials end at the same
time, the second process sees the results of both. If a process is killed before it has submitted a decided trial, the
next trial that ends submits it. If no other trial is running, `resume` does so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pipeline.base.errors import UserError
from pipeline.run import stages
from pipeline.run.directory import Run, list_points
from pipeline.run.events import Event, NotSubmitted, Paused, SubmissionEvent, Submitted, TrialsNotSubmitted
from pipeline.run.trials import read_study
from pipeline.search.study import TRAIN, update_study

LOCK_TIMEOUT_S = 300.0
"""How long to wait for the lock of the run directory. `submit.py`, or another trial, holds it while it submits jobs."""


def submit_next_trials(trial: Run) -> None:
    """Decide which trials run next, and submit their jobs. An error is printed and recorded, but not raised.

    Nothing is submitted if the user has cancelled the search, or if the trial was not submitted to Slurm. In that case,
    `submit.py` runs the trials one after the other, for example in a job of chain.sbatch.

    Args:
        trial: the run of a trial whose train stage has ended.
    """
    sweep = trial.sweep_or_self
    submissions = trial.read_events(TRAIN, Submitted)
    if not submissions or submissions[-1].executor != "slurm":
        return
    try:
        with sweep.lock_exclusively(timeout_s=LOCK_TIMEOUT_S):
            if sweep.cancelled_file.exists():
                return
            update_study(sweep)
            _submit(sweep, list_points(sweep))
    except Exception as error:  # The stage of this job has ended, and no error here may change its exit code.
        message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        print(f"the next trials could not be submitted: {message}", file=sys.stderr, flush=True)
        with suppress(OSError):
            sweep.append_event(TrialsNotSubmitted(stage=TRAIN, message=message))


def was_replaced(trial: Run, job_id: str) -> bool:
    """Return True if a later job was submitted for the next rung of a trial.

    Slurm may requeue a preempted job although its trial has already paused. The requeued job must then not train.

    Args:
        trial: the run of a trial.
        job_id: the id under which a job of the trial was submitted.
    """
    job_ids = [event.job_id for event in trial.read_events(TRAIN, Submitted) if not event.is_successor]
    return job_id in job_ids[:-1] and job_id != job_ids[-1]


def _needs_job(point: Run) -> bool:
    """Return True if a trial must train to its next rung, and no job was submitted for this.

    A job that ended without reaching the rung is continued by Slurm or by `resume`, not here.
    """
    if point.is_failed_trial or stages.load_stage_module(point, TRAIN).describe_missing_outputs(point) is None:
        return False
    trial = point.trial
    assert trial is not None
    events = point.read_events(TRAIN)
    if trial.rung:
        previous_step = read_study(point.sweep_or_self.path).rungs[trial.rung - 1]
        pauses = [i for i, event in enumerate(events) if isinstance(event, Paused) and event.step == previous_step]
        events = events[max(pauses, default=-1) + 1 :]
    return not _was_submitted(events)


def _was_submitted(events: Iterable[Event]) -> bool:
    """Return True if the events of a stage contain a submission that created a job, or may have created one."""
    submissions = [
        event
        for event in events
        if isinstance(event, SubmissionEvent) and not event.is_successor and event.step is None
    ]
    return bool(submissions) and not isinstance(submissions[-1], NotSubmitted)


def _submit(sweep: Run, points: Sequence[Run]) -> None:
    """Submit the train jobs of trials, and the evaluate job of each trial that trains to the last step.

    Args:
        sweep: the run of the sweep.
        points: all trials so far.

    Raises:
        UserError: if Slurm refuses a job or does not respond.
    """
    from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, confirm_submissions_from_job, submit_stage

    confirm_submissions_from_job((sweep, *points))
    options: dict[str, Any] = {"dependency_type": "afterok", "timeout_s": JOB_SBATCH_TIMEOUT_S}
    if new_points := [point for point in points if _needs_job(point)]:
        submit_stage(sweep, TRAIN, [], points=new_points, **options)
    for point in points:
        if point.pause_step is not None or point.is_failed_trial:
            continue
        for stage, definition in stages.list_point_stages(point).items():
            is_done = stages.load_stage_module(point, stage).describe_missing_outputs(point) is None
            if definition.is_training or is_done or _was_submitted(point.read_events(stage)):
                continue
            after = [job_id for name in definition.depends_on if (job_id := _find_awaited_job(point, name))]
            submit_stage(sweep, stage, after, points=[point], **options)


def _find_awaited_job(point: Run, stage: str) -> str | None:
    """Return the id of the newest job of a stage of a trial; None if the stage is done or has no job."""
    if stages.load_stage_module(point, stage).describe_missing_outputs(point) is None:
        return None
    submitted = [event for event in point.read_events(stage, Submitted) if event.step is None]
    return submitted[-1].job_id if submitted else None
