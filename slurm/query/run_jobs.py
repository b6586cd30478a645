"""The jobs that were submitted for a run, and what runs of it now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import STAGES
from pipeline.run.directory import Run
from pipeline.run.events import Started, SubmissionEvent, Submitted, Submitting, get_job_id, read_stage_state
from pipeline.run.points import list_points
from slurm.query.job_states import (
    NOT_RESPONDING,
    SUBMIT_TIME_TOLERANCE_S,
    UNKNOWN,
    JobState,
    RecordedJob,
    array_job_id,
    events_since_submission,
    find_jobs,
    job_comment,
    list_submissions,
    require_response,
)


@dataclass(frozen=True)
class SubmittedJob:
    """A job that was submitted for a run and not seen to end."""

    run: Path
    stage: str
    """Empty for a job of the run, known by its comment only, whose stage cannot be told."""
    job_id: str
    """Empty if the submission is open and no job of it is found."""
    state: JobState
    step: int | None = None
    """The checkpoint that it evaluates (slurm/supervise/background.py): nothing in the chain waits for it."""
    event: Submitting | Submitted | None = None
    """Its submission: `Submitted`, or `Submitting` if the submission is open. None if no event names the job."""
    is_stray: bool = False
    """Whether the job has the run's comment, but no submission of the run made it."""

    @property
    def is_recorded(self) -> bool:
        """Whether an event names the job."""
        return not isinstance(self.event, Submitting) and not self.is_stray

    @property
    def is_array_of_parts(self) -> bool:
        """Whether it is an array whose tasks share the work of one stage; another job behind it completes the stage."""
        return self.event is not None and (self.event.tasks or 1) > 1 and bool(STAGES[self.stage].is_array)


def find_run_jobs(runs: Sequence[Run], forgotten: dict[RecordedJob, JobState] | None = None) -> list[SubmittedJob]:
    """The jobs of `runs`, oldest first, with their states from one query (`forgotten`: see there).

    These are the jobs in their events, those of open submissions, and those with a run's comment that no event names
    (unless the runs were last submitted on one machine).
    """
    events = [run.read_events(None, SubmissionEvent) for run in runs]
    told = [(run, *pair) for run, own in zip(runs, events, strict=True) for pair in list_submissions(run, own)]
    executor = _last_executor(event for own in events for event in own)
    by_comment = {job_comment(run.path).strip(): run for run in runs} if executor in (None, "slurm") else {}
    states, unclaimed = find_jobs((one for *_, one in told), by_comment.keys(), forgotten)
    found = [
        SubmittedJob(run.path, event.stage, states[one].job_id, states[one], event.step, event)
        for run, event, one in told
    ]
    if unclaimed is None and executor == "slurm" and not found:
        return [SubmittedJob(runs[0].path, "", "", JobState("", UNKNOWN, NOT_RESPONDING))]
    strays: dict[str, JobState] = {}
    arrays = {array_job_id(one.job_id) for *_, one in told if one.job_id}
    for job in unclaimed or ():  # of the tasks of an array one that may run; each by itself if events name others of it
        job_id = job.job_id if array_job_id(job.job_id) in arrays else array_job_id(job.job_id)
        if job_id not in strays or job.is_active:
            strays[job_id] = job
    return found + [_stray(by_comment[job.comment], runs, job_id, job) for job_id, job in strays.items()]


def _stray(run: Run, runs: Sequence[Run], job_id: str, job: JobState) -> SubmittedJob:
    """A job that no submission of the run names. If it has started, the event of that tells what it is.

    `job_id`: the id of the whole array, if nothing of it is named, and `job` is one of its tasks.
    """
    array = array_job_id(job.job_id)
    for one in runs:
        for event in one.read_events(None, Started):
            ran_as = event.slurm_job or ""
            is_its_task = ran_as == job.job_id or (
                one is run and job_id == array_job_id(ran_as)
            )  # points have own tasks
            same = is_its_task and event.cluster in (None, job.cluster)
            if same and event.timestamp >= job.submit_time - SUBMIT_TIME_TOLERANCE_S:
                submitting = Submitting(
                    time="",
                    stage=event.stage,
                    after=[],
                    executor="slurm",
                    kind="afterok",
                    tasks=1,
                    key="",
                    cluster=job.cluster,
                    uid=job.uid,
                    job_name=job.name,
                )
                return SubmittedJob(one.path, event.stage, ran_as if one is not run else array, job, None, submitting)
    places = (re.search(r"/jobs/(\w+)/[^/]*$", job.command), re.match(r"(\w+)-", job.name))
    stage = next((place[1] for place in places if place and place[1] in STAGES), "")
    return SubmittedJob(run.path, stage, job_id, JobState(job_id, job.state, job.reason), is_stray=True)


def find_awaited_job(stage: str, alive: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Of a stage's jobs that run or may still run, oldest first, the one that later stages wait for.

    None if there is none, or only the array that shares the stage's work, without the job that completes it.
    """
    if STAGES[stage].is_training:  # behind a training are its successors
        return next(iter(alive), None)
    return next((job for job in reversed(alive) if not job.is_array_of_parts), None)


def find_successor(job: SubmittedJob, alive: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """The job that takes over from a training if it does not end well."""
    return next(
        (one for one in alive if one.event and one.event.is_successor and job.job_id in (one.event.after or ())), None
    )


def describe_stray_job(job: SubmittedJob) -> str:
    """Name a job that has the run's comment, and that no event of the run names."""
    state = job.state.state.lower()
    return f"job {job.job_id} ({state}) has the comment of this run, but no submission of the run made it"


def describe_unproven_jobs(jobs: Sequence[SubmittedJob]) -> list[str]:
    """What is to be said of jobs that may be the run's, and are left alone."""
    return list(dict.fromkeys(job.state.reason for job in jobs if job.state.state == UNKNOWN and job.state.reason))


def list_running_work(run: Run) -> list[str]:
    """What runs now of a run and the points of its sweep, in words: what holds a lock, and jobs that have begun.

    Raises UserError where Slurm cannot be asked about its jobs.
    """
    everyone = (run, *list_points(run))
    held = [f"{stage} of {one.name}" for one in everyone for stage in STAGES if one.lock_holder(stage)]
    jobs = find_run_jobs(everyone)
    require_response(job.state for job in jobs)
    begun = [job for job in jobs if job.state.is_active and job.state.state != "PENDING"]
    return held or [f"{job.stage or job.state.name} (job {job.job_id})" for job in begun]


def uses_slurm(run: Run) -> bool:
    """Whether the run was last submitted to Slurm: `resume` keeps a run's executor."""
    return (
        _last_executor(event for one in (run, *list_points(run)) for event in one.read_events(None, SubmissionEvent))
        == "slurm"
    )


def _last_executor(events: Iterable[SubmissionEvent]) -> str | None:
    """Return the executor of the last submission; None if there is none."""
    last = max(events, key=lambda event: event.time, default=None)
    return None if last is None else last.executor


def is_job_ending(run: Run, stage: str, job: JobState) -> bool:
    """Return True if a job that Slurm still lists will end without a retry, by a request or after its final event."""
    events = events_since_submission(run.read_events(stage), job.job_id)
    # an event of the job itself, or of a task of this array
    job_events = (event for event in events if f"{get_job_id(event)}_".startswith(f"{job.job_id}_"))
    state = read_stage_state(job_events)
    if job.state == "PENDING" or state.retry_event is not None:
        return False
    return job.state == "COMPLETING" or state.end_event is not None or state.user_request is not None
