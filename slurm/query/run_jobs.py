"""Find the jobs of a run: the jobs that its events name, which of them exist now, and jobs that no event names.

A submission is unconfirmed while its events do not name a job (slurm/query/job_states.py). A stray job has the comment
of the run, but belongs to none of its submissions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.config.stages import STAGES
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


def job_comment(run: Path) -> str:
    """Return the comment of a run's jobs."""
    return f"{COMMENT_PREFIX}{run}"


def job_identity(job_name: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of an event that distinguish its job from other jobs with the same id, and `fields`."""
    return {"cluster": slurm_commands.cluster_name(), "uid": os.getuid(), "job_name": job_name, **fields}


def read_recorded_job(run: Run, event: Submitting | Submitted | Started) -> RecordedJob:
    """Return the job that an event describes.

    The comments contain the current path of the run. A copied run therefore does not take the jobs of the original.
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
        comments=tuple(job_comment(path).strip() for path in paths),
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
    """Return the submissions of a run to Slurm, oldest first. Each has its newest event and its job.

    Unconfirmed submissions are included; submissions that failed (`not_submitted`) are not.

    Args:
        run: the run.
        events: the run's submission events, if they were already read.
    """
    newest: dict[str | int, Submitting | Submitted] = {}
    for number, event in enumerate(run.read_events(None, SubmissionEvent) if events is None else events):
        if event.executor != "slurm":
            continue
        key = event.key or number
        if isinstance(event, NotSubmitted):
            newest.pop(key, None)
        elif isinstance(event, Submitted) or (isinstance(event, Submitting) and key not in newest):
            newest[key] = event
    return [(event, read_recorded_job(run, event)) for event in newest.values()]


def list_recorded_jobs(run: Run) -> list[tuple[Submitting | Submitted, RecordedJob]]:
    """Return the jobs that events of a run name, oldest first, with these events.

    Unconfirmed submissions are left out.
    """
    return [(event, job) for event, job in list_submissions(run) if not job.is_unconfirmed]


def events_since_submission(events: Sequence[E], job_id: str) -> list[E]:
    """Return the events that may concern the job that now has this id on this cluster.

    Events before the last submission with this id concern another job, and so do events of other clusters.
    """
    cluster = slurm_commands.cluster_name()
    array_id = array_job_id(job_id)
    local = [event for event in events if cluster is None or getattr(event, "cluster", None) in (None, cluster)]
    submissions = [
        index for index in find_first_submissions(local) if array_job_id(get_job_id(local[index]) or "") == array_id
    ]
    return local[max(submissions, default=0) :]


def find_first_submissions(events: Sequence[Event]) -> list[int]:
    """Return the indices of the first `submitted` event of each submission key in `events`.

    A submission may have two such events: if the event is missing when a job starts, the job writes the event, and
    submit.py may write the event later.
    """
    first: dict[str | int, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, Submitted):
            first.setdefault(event.key or number, number)
    return list(first.values())


def is_job_ending(run: Run, stage: str, job: JobState) -> bool:
    """Return True if a job that Slurm still lists will end, and its stage will not be retried.

    That is the case if a user requested a stop, if the job is COMPLETING, or if its attempt has an end event. A pending
    job, and a job whose last attempt will be retried, will not end.
    """
    events = events_since_submission(run.read_events(stage), job.job_id)
    # an event of the job itself, or of a task of this array
    job_events = (event for event in events if f"{get_job_id(event)}_".startswith(f"{job.job_id}_"))
    state = read_stage_state(job_events)
    if job.state == "PENDING" or state.retry_event is not None:
        return False
    return job.state == "COMPLETING" or state.end_event is not None or state.user_request is not None


# -- jobs that exist ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted for a run and was not seen to end."""

    run: Path
    stage: str
    """Empty if the stage of a stray job is unknown."""
    job_id: str
    """Empty if the submission is unconfirmed and no job of it was found."""
    state: JobState
    step: int | None = None
    """If the job evaluates a checkpoint during the run (slurm/supervise/background.py), the step of that checkpoint. No
    job in the chain depends on this job."""
    event: Submitting | Submitted | None = None
    """The event of its submission: `Submitting` if the submission is unconfirmed. None if no event names the job."""
    is_stray: bool = False
    """Whether the job has the run's comment, but belongs to no submission of the run."""

    @property
    def is_recorded(self) -> bool:
        """Whether a `submitted` event names the job."""
        return not isinstance(self.event, Submitting) and not self.is_stray

    @property
    def is_array_of_parts(self) -> bool:
        """Whether the job is an array of tasks that share the work of one stage. Another job completes the stage."""
        return self.event is not None and (self.event.tasks or 1) > 1 and bool(STAGES[self.stage].is_array)


def find_run_jobs(runs: Sequence[Run], final_states: dict[RecordedJob, JobState] | None = None) -> list[SubmittedJob]:
    """Return the jobs of `runs`, oldest first, with their states from one query.

    These are the jobs of all submissions, also unconfirmed ones, and jobs that have the comment of a run but that no
    event names. Jobs without an event are left out if the runs were last executed without Slurm. If Slurm does not
    respond and no submission is recorded, the result is one job in the state UNKNOWN.

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
        SubmittedJob(run.path, event.stage, states[job].job_id, states[job], event.step, event)
        for run, event, job in submissions
    ]
    if unclaimed is None and executor == "slurm" and not submitted:
        return [SubmittedJob(runs[0].path, "", "", JobState("", UNKNOWN, NOT_RESPONDING))]
    # unclaimed tasks of an array count as one job, unless an event names another task of the array
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
    """Return a job that no submission event names.

    If an attempt of the job has started, its `started` event has the run and the stage, and the job counts as
    unconfirmed. Otherwise the job is a stray job. Its stage is taken from its script or its name.

    Args:
        comment_run: the run in the job's comment.
        runs: the runs to search for a `started` event of the job.
        job_id: the id of the job; if tasks of an array count as one job, the id of the array.
        listed: the job, or a task of the array, as squeue shows it.
    """
    array_id = array_job_id(listed.job_id)
    for run in runs:
        for event in run.read_events(None, Started):
            started_id = event.slurm_job or ""
            # an array over the points of a sweep starts in the runs of the points, and counts there as single tasks
            is_task_of_array = run is comment_run and job_id == array_job_id(started_id)
            if started_id != listed.job_id and not is_task_of_array:
                continue
            is_same_cluster = event.cluster in (None, listed.cluster)
            if not is_same_cluster or event.timestamp < listed.submit_time - SUBMIT_TIME_TOLERANCE_S:
                continue
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
    stage_matches = (re.search(r"/jobs/(\w+)/[^/]*$", listed.command), re.match(r"(\w+)-", listed.name))
    stage = next((match[1] for match in stage_matches if match and match[1] in STAGES), "")
    state = JobState(job_id, listed.state, listed.reason)
    return SubmittedJob(comment_run.path, stage, job_id, state, is_stray=True)


def find_awaited_job(stage: str, active: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Return the job of a stage that later stages wait for.

    Args:
        stage: the stage.
        active: the active jobs of the stage, oldest first.

    Returns:
        The job; None if no job is active. The result is also None if only the array that shares the stage's work is
        active, without the job after the array that completes the stage.
    """
    if STAGES[stage].is_training:  # later jobs of this stage are successor jobs
        return next(iter(active), None)
    return next((job for job in reversed(active) if not job.is_array_of_parts), None)


def find_successor(job: SubmittedJob, active: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Return the successor job among `active`, which continues the stage if `job` fails; None if there is none."""
    for candidate in active:
        event = candidate.event
        if event is not None and event.is_successor and job.job_id in (event.after or ()):
            return candidate
    return None


def describe_stray_job(job: SubmittedJob) -> str:
    """Return a message about a stray job."""
    state = job.state.state.lower()
    return f"job {job.job_id} ({state}) has the comment of this run, but no submission of the run made it"


def describe_unproven_jobs(jobs: Sequence[SubmittedJob]) -> list[str]:
    """Return why the states of jobs are unknown, each reason once, such as a job that only may belong to the run."""
    return list(dict.fromkeys(job.state.reason for job in jobs if job.state.state == UNKNOWN and job.state.reason))


def list_running_work(run: Run) -> list[str]:
    """Return descriptions of the stages that run now, in a run and its sweep points.

    These are the stages that hold a lock. If no stage holds one, these are the running jobs.

    Raises:
        UserError: the controller does not respond.
    """
    runs = (run, *list_points(run))
    locked = [f"{stage} of {each.name}" for each in runs for stage in STAGES if each.lock_holder(stage)]
    jobs = find_run_jobs(runs)
    require_response(job.state for job in jobs)
    running = [job for job in jobs if job.state.is_active and job.state.state != "PENDING"]
    return locked or [f"{job.stage or job.state.name} (job {job.job_id})" for job in running]


def uses_slurm(run: Run) -> bool:
    """Return True if the run was last submitted to Slurm. `resume` then submits it to Slurm again."""
    events = (event for each in (run, *list_points(run)) for event in each.read_events(None, SubmissionEvent))
    return _find_last_executor(events) == "slurm"


def _find_last_executor(events: Iterable[SubmissionEvent]) -> str | None:
    """Return the executor of the last submission; None if there is none."""
    last = max(events, key=lambda event: event.time, default=None)
    return None if last is None else last.executor
