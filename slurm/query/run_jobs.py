"""Find the jobs of a run, and their states: the jobs in its events, and jobs that Slurm shows but no event contains.

A submission is unconfirmed until an event contains the id of its job (slurm/query/job_states.py). A stray job has the
comment of the run, but belongs to none of the run's submissions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.stages import Stage
from pipeline.run.directory import Run, list_points
from pipeline.run.events import (
    Event,
    NotSubmitted,
    Started,
    SubmissionEvent,
    Submitted,
    Submitting,
    get_job_id,
    read_stage_state,
)
from slurm.query import slurm_commands
from slurm.query.job_states import (
    COMMENT_PREFIX,
    SUBMIT_TIME_TOLERANCE_S,
    UNKNOWN,
    JobState,
    RecordedJob,
    array_job_id,
    find_jobs,
    require_response,
)
from slurm.query.slurm_commands import NOT_RESPONDING

E = TypeVar("E", bound=Event)


# -- jobs in the events of a run ---------------------------------------------------------------------------------------


def job_comment(run_path: Path) -> str:
    """Return the comment of the jobs of the run in the directory `run_path`."""
    return f"{COMMENT_PREFIX}{run_path}"


def job_identity(job_name: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an event that distinguish its job from other jobs with the same id.

    Args:
        job_name: the name of the job.
        **fields: further fields, which are added to the result.
    """
    return {"cluster": slurm_commands.cluster_name(), "uid": os.getuid(), "job_name": job_name, **fields}


def read_recorded_job(run: Run, event: Submitting | Submitted | Started) -> RecordedJob:
    """Return the job that an event describes.

    The comments of the returned job contain the current path of the run. If a run directory was copied, the copy
    therefore does not take the jobs of the original run as its own.
    """
    job_id: str | None = None
    key: str | None = None
    submit_time: float | None = None
    array_task: int | None = None
    if isinstance(event, Started):
        job_id = event.slurm_job
        submit_time = event.job_submitted
    elif isinstance(event, Submitted):
        job_id = event.job_id
        key = event.key
        submit_time = event.job_submitted
    else:
        key = event.key
        array_task = event.array_task
    paths = dict.fromkeys((run.path, run.sweep_or_self.path))
    return RecordedJob(
        job_id=job_id or "",
        comments=tuple(job_comment(path).strip() for path in paths),  # the comments in squeue's rows are stripped too
        cluster=event.cluster,
        uid=event.uid,
        name=event.job_name or "",
        submit_time=submit_time or event.timestamp,
        key=key or "",
        array_task=array_task,
    )


def list_submissions(
    run: Run, events: Sequence[SubmissionEvent] | None = None
) -> list[tuple[Submitting | Submitted, RecordedJob]]:
    """Return the newest event and the job of each submission of a run to Slurm, oldest submission first.

    Unconfirmed submissions are included; submissions that failed (`not_submitted`) are not.

    Args:
        run: the run.
        events: the run's submission events; None to read them.
    """
    newest: dict[str | int, Submitting | Submitted] = {}
    for number, event in enumerate(run.read_events(None, SubmissionEvent) if events is None else events):
        if event.executor != "slurm":
            continue
        key = event.key or number  # without a key, each event counts as a separate submission
        if isinstance(event, NotSubmitted):
            newest.pop(key, None)
        elif isinstance(event, Submitted) or (isinstance(event, Submitting) and key not in newest):
            newest[key] = event
    return [(event, read_recorded_job(run, event)) for event in newest.values()]


def list_recorded_jobs(run: Run) -> list[tuple[Submitting | Submitted, RecordedJob]]:
    """Return the event and the job of each confirmed submission of a run to Slurm, oldest first."""
    return [(event, job) for event, job in list_submissions(run) if not job.is_unconfirmed]


def events_since_submission(events: Sequence[E], job_id: str) -> list[E]:
    """Return the events from the last submission of a job with this id on this cluster; all events if there is none.

    Earlier events may concern another job that had the same id. Events of other clusters are left out.
    """
    cluster = slurm_commands.cluster_name()
    array_id = array_job_id(job_id)
    local_events = [event for event in events if cluster is None or getattr(event, "cluster", None) in (None, cluster)]
    submissions = [
        index
        for index in find_submission_indices(local_events)
        if array_job_id(get_job_id(local_events[index]) or "") == array_id
    ]
    return local_events[max(submissions, default=0) :]


def find_submission_indices(events: Sequence[Event]) -> list[int]:
    """Return the index of the first `submitted` event of each submission in `events`.

    A submission may have two of these events: a job writes the event if it is missing when the job starts, and
    submit.py may still write its own event afterwards.
    """
    first: dict[str | int, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, Submitted):
            first.setdefault(event.key or number, number)
    return list(first.values())


def is_job_ending(run: Run, stage: str, job: JobState) -> bool:
    """Return True if a job that Slurm still lists is about to end, and will not be requeued.

    That is the case if a user requested a stop, if the job is COMPLETING, or if its last attempt has ended. The result
    is always False for a pending job, and for a job whose last attempt will be retried.
    """
    events = events_since_submission(run.read_events(stage), job.job_id)
    # the events of the job itself; for an array, also the events of its tasks
    job_events = (event for event in events if f"{get_job_id(event)}_".startswith(f"{job.job_id}_"))
    state = read_stage_state(job_events)
    if job.state == "PENDING" or state.retry_event is not None:
        return False
    return job.state == "COMPLETING" or state.end_event is not None or state.user_request is not None


# -- jobs that exist ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmittedJob:
    """A submission of a run, with its job if one was found; or a stray job, which has only the comment of the run."""

    run_path: Path
    stage: str
    """Empty if the stage of a stray job is unknown."""
    job_id: str
    """Empty if the submission is unconfirmed and Slurm shows no job with its key."""
    reported_job: JobState
    """The job as Slurm reports it."""
    step: int | None = None
    """If the job evaluates a checkpoint while the train stage runs (slurm/supervise/background.py), the step of that
    checkpoint. No job in the chain depends on this job."""
    event: Submitting | Submitted | None = None
    """The event of the submission: `Submitting` if no `submitted` event has the job's id. None for a stray job."""
    is_stray: bool = False
    """Whether the job has the run's comment, but belongs to no submission of the run."""
    is_array_of_parts: bool = False
    """Whether the job is an array whose tasks share the work of one stage. Another job completes the stage."""

    @property
    def is_recorded(self) -> bool:
        """Whether a `submitted` event contains the id of the job."""
        return not isinstance(self.event, Submitting) and not self.is_stray


def find_run_jobs(runs: Sequence[Run], final_states: dict[RecordedJob, JobState] | None = None) -> list[SubmittedJob]:
    """Return the jobs of `runs`, oldest first, with their states from one query of Slurm.

    These are the jobs of all submissions, including unconfirmed submissions, and active jobs that have the comment of a
    run but no event of a submission. The latter are left out if the runs were last executed without Slurm.

    If Slurm does not respond, all states are UNKNOWN. If there are then no jobs to return because all submissions have
    failed, the result is one job without an id. Its state tells the caller that Slurm does not respond.

    Args:
        runs: a run, or a sweep and its points.
        final_states: see :func:`slurm.query.job_states.query_job_states`.
    """
    events_of_runs = [run.read_events(None, SubmissionEvent) for run in runs]
    submissions = [
        (run, event, job)
        for run, events in zip(runs, events_of_runs, strict=True)
        for event, job in list_submissions(run, events)
    ]
    executor = _find_last_executor(event for events in events_of_runs for event in events)
    run_by_comment = {job_comment(run.path).strip(): run for run in runs} if executor in (None, "slurm") else {}
    states, unclaimed = find_jobs((job for *_, job in submissions), run_by_comment.keys(), final_states)
    submitted = [
        SubmittedJob(
            run.path,
            event.stage,
            states[job].job_id,
            states[job],
            event.step,
            event,
            is_array_of_parts=(event.tasks or 1) > 1 and run.config.get_stage(event.stage).is_array,
        )
        for run, event, job in submissions
    ]
    if unclaimed is None and executor == "slurm" and not submitted:
        return [SubmittedJob(runs[0].path, "", "", JobState("", UNKNOWN, NOT_RESPONDING))]
    # Unrecorded tasks of an array count as one job, unless an event contains another task of the array. An active task
    # is preferred as the state of this job.
    unrecorded: dict[str, JobState] = {}
    recorded_arrays = {array_job_id(job.job_id) for *_, job in submissions if job.job_id}
    for listed in unclaimed or ():
        array_id = array_job_id(listed.job_id)
        job_id = listed.job_id if array_id in recorded_arrays else array_id
        if job_id not in unrecorded or listed.is_active:
            unrecorded[job_id] = listed
    return submitted + [
        _make_unrecorded_job(run_by_comment[listed.comment], runs, job_id, listed)
        for job_id, listed in unrecorded.items()
    ]


def _make_unrecorded_job(comment_run: Run, runs: Sequence[Run], job_id: str, listed: JobState) -> SubmittedJob:
    """Return a job for which no event of a submission was found.

    If the job has written a `started` event, this event shows the run and the stage, and the submission of the job
    counts as unconfirmed. Otherwise the job is a stray job. The stage of a stray job is taken from the path of its
    script or from its name.

    Args:
        comment_run: the run in the job's comment.
        runs: the runs in which to look for a `started` event of the job.
        job_id: the id of the job; if tasks of an array count as one job, the id of the array.
        listed: the job, or a task of the array, as squeue shows it.
    """
    array_id = array_job_id(listed.job_id)
    for run in runs:
        for event in run.read_events(None, Started):
            started_id = event.slurm_job or ""
            # if the tasks of an array belong to sweep points, each task writes `started` into the run of its point, and
            # counts as a separate job
            is_task_of_array = run is comment_run and job_id == array_job_id(started_id)
            if started_id != listed.job_id and not is_task_of_array:
                continue
            is_same_cluster = event.cluster in (None, listed.cluster)
            # an event from before the submission belongs to an earlier job with the same id
            if not is_same_cluster or event.timestamp < listed.submit_time - SUBMIT_TIME_TOLERANCE_S:
                continue
            # This event replaces the missing one. Without a time in the event, Slurm's submit time is recorded later
            # (slurm/submit/sbatch.py).
            submitting = Submitting(
                time="",
                stage=event.stage,
                after=[],
                executor="slurm",
                kind="afterok",
                tasks=1,
                key="",
                cluster=listed.cluster,
                uid=listed.uid,
                job_name=listed.name,
            )
            job_id_of_run = array_id if run is comment_run else started_id
            return SubmittedJob(run.path, event.stage, job_id_of_run, listed, None, submitting)
    stage_matches = (re.search(r"/jobs/([\w-]+)/[^/]*$", listed.command), re.match(r"([\w-]+?)-", listed.name))
    known_stages = comment_run.config.active_stages
    stage = next((match[1] for match in stage_matches if match and match[1] in known_stages), "")
    state = JobState(job_id, listed.state, listed.reason)
    return SubmittedJob(comment_run.path, stage, job_id, state, is_stray=True)


def find_awaited_job(stage: Stage, active: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Return the job of a stage that later stages wait for.

    Args:
        stage: the stage.
        active: the active jobs of the stage, oldest first.

    Returns:
        The job; None if no job is active. The result is also None if the only active job is an array whose tasks share
        the work of the stage: later stages wait for the job after the array.
    """
    if stage.is_training:  # all jobs of this stage except the first are successor jobs
        return next(iter(active), None)
    return next((job for job in reversed(active) if not job.is_array_of_parts), None)  # the newest of these jobs


def find_successor(job: SubmittedJob, active: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Return the job in `active` that is the successor job of `job`; None if there is none."""
    for candidate in active:
        event = candidate.event
        if event is not None and event.is_successor and job.job_id in (event.after or ()):
            return candidate
    return None


def describe_stray_job(job: SubmittedJob) -> str:
    """Return a message about a stray job for the user."""
    state = job.reported_job.state.lower()
    return f"job {job.job_id} ({state}) has the comment of this run, but the run has no record of its submission"


def describe_unknown_states(jobs: Sequence[SubmittedJob]) -> list[str]:
    """Return why the states of some jobs are UNKNOWN, each reason once.

    For example, Slurm does not respond, or it is not certain that a job belongs to the run.
    """
    return list(
        dict.fromkeys(
            job.reported_job.reason for job in jobs if job.reported_job.state == UNKNOWN and job.reported_job.reason
        )
    )


def describe_running_stages(run: Run) -> list[str]:
    """Return descriptions of the stages of a run and its sweep points that run now, such as `train of my-run`.

    These are the stages whose lock is held. If no lock is held, the running jobs are described instead, because a
    supervisor that is still starting has no lock yet.

    Raises:
        UserError: if the controller does not respond.
    """
    runs = (run, *list_points(run))
    locked = [
        f"{stage} of {each.name}" for each in runs for stage in each.config.active_stages if each.lock_holder(stage)
    ]
    jobs = find_run_jobs(runs)
    require_response(job.reported_job for job in jobs)
    running = [job for job in jobs if job.reported_job.is_active and job.reported_job.state != "PENDING"]
    return locked or [f"{job.stage or job.reported_job.name} (job {job.job_id})" for job in running]


def uses_slurm(run: Run) -> bool:
    """Return True if the run was last submitted to Slurm. `resume` then submits jobs again."""
    events = (event for each in (run, *list_points(run)) for event in each.read_events(None, SubmissionEvent))
    return _find_last_executor(events) == "slurm"


def _find_last_executor(events: Iterable[SubmissionEvent]) -> str | None:
    """Return the executor of the last submission in `events`; None if `events` is empty."""
    last = max(events, key=lambda event: event.time, default=None)
    return None if last is None else last.executor
