"""Manage the jobs that depend on the job of this process: its successor job, and the jobs of later stages.

If jobs cannot be requeued (`site.requeue: false`), a successor job continues the stage. Example: train job T1 has the
successor T2 (`afternotok:T1`), and the evaluate job has `afterok:T1`. If T1 is killed, T2 starts. T2 submits its
successor T3 and changes the dependency of the evaluate job to `afterok:T2`.

The successor of the chain's train job is submitted with the chain. Any other job submits its successor only when the
job is stopped and its stage should be retried (:func:`hand_over`). Examples are jobs of other stages, jobs of sweep
points, and jobs that the user submitted. If such a job is killed, for example because its node fails, it has no
successor, and the user must run `resume`.
"""

from __future__ import annotations

import sys

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.run.directory import Run, list_points
from pipeline.run.events import Cancelled, Started, Submitted, TookOver, get_job_id, read_stage_state
from slurm.query import job_states, run_jobs, slurm_commands
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob
from slurm.query.run_jobs import events_since_submission

LOCK_TIMEOUT_S = 10.0
"""How long to wait for the lock of the run directory. `submit.py` holds this lock while it submits jobs."""


def find_predecessor(run: Run, stage: str, job_id: str) -> str | None:
    """Return the id of the job whose stage the job `job_id` continues; None if `job_id` is not a successor job."""
    # If the submission of the job `job_id` was recorded, the first of these events is this submission.
    for event in events_since_submission(run.read_events(None, Submitted), job_id)[:1]:
        if (event.stage, event.job_id) == (stage, job_id) and event.is_successor:
            return next(iter(event.after or ()), None)
    return None


def take_over(run: Run, stage: str, rank_info: RankInfo) -> str | None:
    """Take over the stage from the predecessor of this job, if this job is a successor.

    This function submits the next successor, and makes the jobs of later stages wait for this job instead of its
    predecessor. The next successor is submitted now, because this job may be killed at any moment. If Slurm does not
    accept the submission, this job runs the stage nevertheless. The supervisor then submits the successor when this job
    is stopped (:func:`hand_over`).

    If the predecessor was cancelled, this function only writes the event `cancelled` for this job.

    Args:
        run: the run.
        stage: the stage.
        rank_info: has the id of this job and the number of its restarts.

    Returns:
        Why this job must not continue the stage; None if it may continue the stage, or is not a successor.
    """
    job_id = rank_info.job_id or ""
    if (predecessor := find_predecessor(run, stage, job_id)) is None:
        return None
    if _was_cancelled(run, stage, predecessor):
        code = int(ExitCode.CANCELLED)
        message = f"job {predecessor} was cancelled"
        run.append_event(Cancelled(stage=stage, job_id=job_id, exit_code=code, cause="cancelled", message=message))
        return f"job {predecessor} was cancelled, and this job is its successor"
    waiting_jobs = _list_waiting_jobs(run, predecessor, is_transitive=False)
    # Jobs of later stages depend on the success of the predecessor (`afterok`). Successors depend on its failure.
    children = [state.job_id for state, dependency_type in waiting_jobs if dependency_type != "afternotok"]
    # If this job was requeued, its first start has submitted the next successor.
    if rank_info.restart_count == 0 and (problem := hand_over(run, stage, job_id)) is not None:
        print(f"{stage}: {problem}; trying again when this job is stopped", file=sys.stderr, flush=True)
    for child in children:
        slurm_commands.run_slurm_command("scontrol", "update", f"JobId={child}", f"Dependency=afterok:{job_id}")
    run.append_event(TookOver(stage=stage, job_id=job_id, predecessor=predecessor, children=children))
    return None


def hand_over(run: Run, stage: str, job_id: str) -> str | None:
    """Submit a successor of the job `job_id`, unless it has a successor. Return a message if the submission fails."""
    from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, confirm_submissions_from_job, submit_stage

    if _has_successor(run, stage, job_id):
        return None
    try:
        with run.lock_exclusively(timeout_s=LOCK_TIMEOUT_S):  # `submit.py` may be submitting the successor now.
            confirm_submissions_from_job([run])
            if not _has_successor(run, stage, job_id):
                submit_stage(run, stage, [job_id], dependency_type="afternotok", timeout_s=JOB_SBATCH_TIMEOUT_S)
    except (UserError, OSError) as error:
        return f"no successor could be submitted ({error})"
    return None


def cancel_unneeded_jobs(run: Run, stage: str, rank_info: RankInfo, *, is_done: bool) -> None:
    """Cancel the pending jobs that cannot start or are not needed after the end of this stage.

    - If the stage is done, cancel only the successor of this job.
    - If the stage ends without a retry, cancel all jobs that depend on the stage. Slurm would keep these jobs pending
      forever, because their dependency can no longer be satisfied. `resume` submits the jobs of later stages again.

    Args:
        run: the run.
        stage: the stage of this job.
        rank_info: has the id of this job.
        is_done: whether the stage is done.
    """
    job_id = rank_info.job_id or ""
    # Until this job has taken over from its predecessor, jobs of later stages still wait for the predecessor.
    awaited_job_id = job_id if is_done else find_predecessor(run, stage, job_id) or job_id
    waiting_jobs = [state for state, _ in _list_waiting_jobs(run, awaited_job_id)]
    successors = [state for state in waiting_jobs if find_predecessor(run, stage, state.job_id) == job_id]
    # The newest job is cancelled first. If an older job were cancelled first, its end could start a newer job.
    job_states.cancel_jobs(successors if is_done else reversed(waiting_jobs))


def _list_waiting_jobs(run: Run, job_id: str, *, is_transitive: bool = True) -> list[tuple[JobState, str]]:
    """Return the pending jobs that depend on the success or failure of the job `job_id`, oldest first.

    Jobs that only wait for the end of this job (`afterany`) are not included, because such jobs can start in any case.

    Args:
        run: the run.
        job_id: the id of the job.
        is_transitive: whether to include jobs that depend on this job indirectly, through other jobs.

    Returns:
        The state of each job, and the type of its dependency, such as `afterok`.
    """
    from slurm.submit.sbatch import confirm_submissions_from_job

    try:
        confirm_submissions_from_job((run, *list_points(run)))
    except (UserError, OSError) as error:
        print(f"jobs that were submitted without a record are not found: {error}", file=sys.stderr, flush=True)
    dependency_type_by_job = {job_id: ""}
    # With `is_transitive`, this is a view of the keys, so it grows with each job that the loop below finds.
    awaited_jobs = dependency_type_by_job.keys() if is_transitive else {job_id}
    events = events_since_submission(_read_dependency_events(run), job_id)
    start_time = events[0].time if events else ""
    for point in list_points(run):
        events += [event for event in _read_dependency_events(point) if event.time >= start_time]
    for event in events:
        if isinstance(event, TookOver):
            if event.job_id in awaited_jobs:
                dependency_type_by_job.update(dict.fromkeys(event.children, "afterok"))
            continue
        after = event.after or []
        if event.kind == "afterany" and job_id in after:
            continue
        if not awaited_jobs.isdisjoint(after):
            dependency_type_by_job[event.job_id] = event.kind or ""
    recorded_jobs = _index_recorded_jobs(run)
    waiting_ids = [waiting_id for waiting_id in dependency_type_by_job if waiting_id != job_id]
    queried_jobs = [recorded_jobs[waiting_id] for waiting_id in waiting_ids if waiting_id in recorded_jobs]
    states = job_states.query_job_states(queried_jobs)
    pending = {state.job_id: state for state in states.values() if state.state == "PENDING"}
    return [
        (pending[waiting_id], dependency_type)
        for waiting_id, dependency_type in dependency_type_by_job.items()
        if waiting_id in pending
    ]


def _read_dependency_events(run: Run) -> list[Submitted | TookOver]:
    """Return the events of a run that set the dependencies of jobs."""
    return [event for event in run.read_events() if isinstance(event, Submitted | TookOver)]


def _index_recorded_jobs(run: Run) -> dict[str, RecordedJob]:
    """Return the recorded jobs of this cluster, by job id.

    These are the jobs in `started` events of the run, and all jobs submitted for the run or its sweep points. If Slurm
    has reused a job id, the newest job with this id is returned. A job without a recorded cluster counts as a job of
    this cluster. If the name of this cluster is unknown, all jobs are returned.
    """
    started_jobs = [
        run_jobs.read_recorded_job(run, event) for event in run.read_events(None, Started) if event.slurm_job
    ]
    runs = (run, *list_points(run))
    submitted_jobs = [job for each_run in runs for _, job in run_jobs.list_recorded_jobs(each_run)]
    cluster = slurm_commands.cluster_name()
    all_jobs = [*started_jobs, *submitted_jobs]
    return {job.job_id: job for job in all_jobs if cluster is None or job.cluster in (None, cluster)}


def _has_successor(run: Run, stage: str, job_id: str) -> bool:
    """Return True if a successor of the job `job_id` was submitted."""
    submissions = events_since_submission(run.read_events(stage, Submitted), job_id)
    return any(event.is_successor and job_id in (event.after or ()) for event in submissions)


def _was_cancelled(run: Run, stage: str, job_id: str) -> bool:
    """Return True if Slurm shows that the job was cancelled. If Slurm no longer lists the job, use its last event."""
    recorded_job = _index_recorded_jobs(run).get(job_id)
    state = job_states.query_job_states([recorded_job])[recorded_job].state if recorded_job is not None else UNKNOWN
    events_since = events_since_submission(run.read_events(stage), job_id)
    events = [event for event in events_since if get_job_id(event) == job_id]
    last_cause = read_stage_state(events).last_cause
    return state == "CANCELLED" or (state == UNKNOWN and last_cause == "cancelled")
