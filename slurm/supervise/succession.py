"""The jobs that depend on this one: its successor, and the jobs of later stages.

If jobs cannot be requeued (`site.requeue: false`), a successor job continues the stage. Example: train job T1 has the
successor T2 (`afternotok:T1`), and the evaluate job has `afterok:T1`. If T1 is killed, T2 starts. T2 submits its own
successor T3 and changes the dependency of the evaluate job to `afterok:T2`.

The successor of the chain's train job is submitted with the chain. Any other job submits its successor only when it is
stopped and its stage should be retried (:func:`hand_over`). Examples are jobs of other stages, of sweep points, and
jobs that the user submitted. If such a job is killed, for example because its node fails, it has no successor, and the
user must run `resume`.
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

LOCK_PATIENCE_S = 10.0
"""How long to wait for the lock of the run directory, which `submit.py` holds while it submits jobs."""


def find_predecessor(run: Run, stage: str, job: str) -> str | None:
    """Return the id of the job that `job` is the successor of; None if `job` is not a successor."""
    for event in events_since_submission(run.read_events(None, Submitted), job)[:1]:
        if (event.stage, event.job_id) == (stage, job) and event.is_successor:
            return next(iter(event.after or ()), None)
    return None


def take_over(run: Run, stage: str, rank_info: RankInfo) -> str | None:
    """Take over the stage from the predecessor of this job, if this job is a successor.

    This submits the next successor, and makes the jobs of later stages wait for this job instead of its predecessor.
    The successor is submitted now because this job may be killed at any moment. If Slurm does not accept the successor
    now, this job runs the stage nevertheless, and submits the successor when it is stopped (:func:`hand_over`).

    Args:
        run: the run.
        stage: the stage.
        rank_info: identifies this job and the number of its restarts.

    Returns:
        Why this job must not continue the stage; None if it may.
    """
    job = rank_info.job_id or ""
    if (predecessor := find_predecessor(run, stage, job)) is None:
        return None
    if _was_cancelled(run, stage, predecessor):
        code = int(ExitCode.CANCELLED)
        message = f"job {predecessor} was cancelled"
        run.append_event(Cancelled(stage=stage, job_id=job, exit_code=code, cause="cancelled", message=message))
        return f"job {predecessor} was cancelled, and this job is its successor"
    waiting_jobs = _list_waiting_jobs(run, predecessor, is_transitive=False)
    children = [state.job_id for state, kind in waiting_jobs if kind != "afternotok"]
    if rank_info.restart_count == 0 and (problem := hand_over(run, stage, job)) is not None:
        print(f"{stage}: {problem}; trying again when this job is stopped", file=sys.stderr, flush=True)
    for child in children:
        slurm_commands.run_slurm_command("scontrol", "update", f"JobId={child}", f"Dependency=afterok:{job}")
    run.append_event(TookOver(stage=stage, job_id=job, predecessor=predecessor, children=children))
    return None


def hand_over(run: Run, stage: str, job: str) -> str | None:
    """Submit the successor of `job` if it has none. Return a message if this fails; None otherwise."""
    from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, confirm_submissions_from_job, submit_stage

    if _has_successor(run, stage, job):
        return None
    try:
        with run.lock_exclusively(patience_s=LOCK_PATIENCE_S):  # `submit.py` may be submitting the successor now.
            confirm_submissions_from_job([run])
            if not _has_successor(run, stage, job):
                submit_stage(run, stage, [job], kind="afternotok", patience_s=JOB_SBATCH_TIMEOUT_S)
    except (UserError, OSError) as error:
        return f"no successor could be submitted ({error})"
    return None


def cancel_unneeded_jobs(run: Run, stage: str, rank_info: RankInfo, *, is_done: bool) -> None:
    """Cancel the pending jobs that are not needed, or can no longer start, because this stage ends permanently.

    Slurm would keep them pending forever, because their dependency can no longer be satisfied. `resume` submits the
    jobs of later stages again.

    Args:
        run: the run.
        stage: the stage of this job.
        rank_info: identifies this job.
        is_done: whether the stage is done. If so, only the successor of this job is cancelled; otherwise all jobs that
            wait for the stage.
    """
    job = rank_info.job_id or ""
    # Until this job has taken over from its predecessor, jobs of later stages still wait for the predecessor.
    awaited_job = job if is_done else find_predecessor(run, stage, job) or job
    waiting_jobs = [state for state, _ in _list_waiting_jobs(run, awaited_job)]
    successors = [state for state in waiting_jobs if find_predecessor(run, stage, state.job_id) == job]
    # The newest job is cancelled first. Otherwise a job that only waits for the end of an older one could start.
    job_states.cancel_jobs(successors if is_done else reversed(waiting_jobs))


def _list_waiting_jobs(run: Run, job: str, *, is_transitive: bool = True) -> list[tuple[JobState, str]]:
    """Return the pending jobs that depend on the success or failure of `job`, oldest first.

    Jobs that only wait for the end of `job` (`afterany`) are not included, because they can start in any case.

    Args:
        run: the run.
        job: the job id.
        is_transitive: whether to include jobs that depend on `job` indirectly, through another one of these jobs.

    Returns:
        The state of each job, and the type of its dependency, such as `afterok`.
    """
    from slurm.submit.sbatch import confirm_submissions_from_job

    try:
        confirm_submissions_from_job((run, *list_points(run)))
    except (UserError, OSError) as error:
        print(f"jobs that were submitted without a record are not found: {error}", file=sys.stderr, flush=True)
    kind_by_job = {job: ""}
    awaited_jobs = kind_by_job.keys() if is_transitive else {job}
    events = events_since_submission(_read_dependency_events(run), job)
    start_time = events[0].time if events else ""
    for point in list_points(run):
        events += [event for event in _read_dependency_events(point) if event.time >= start_time]
    for event in events:
        if isinstance(event, TookOver):
            if event.job_id in awaited_jobs:
                kind_by_job.update(dict.fromkeys(event.children, "afterok"))
            continue
        after = event.after or []
        if event.kind == "afterany" and job in after:
            continue
        if not awaited_jobs.isdisjoint(after):
            kind_by_job[event.job_id] = event.kind or ""
    recorded = _index_recorded_jobs(run)
    states = job_states.query_job_states(recorded[each] for each in kind_by_job if each in recorded and each != job)
    pending = {state.job_id: state for state in states.values() if state.state == "PENDING"}
    return [(pending[each], kind) for each, kind in kind_by_job.items() if each in pending]


def _read_dependency_events(run: Run) -> list[Submitted | TookOver]:
    """Return the events of a run that set the dependencies of jobs."""
    return [event for event in run.read_events() if isinstance(event, Submitted | TookOver)]


def _index_recorded_jobs(run: Run) -> dict[str, RecordedJob]:
    """Return the jobs that events of the run and its sweep points record on this cluster, by job id.

    Slurm may reuse a job id. If it did, the newest job is returned.
    """
    started = [run_jobs.read_recorded_job(run, e) for e in run.read_events(None, Started) if e.slurm_job]
    submitted = [job for each in (run, *list_points(run)) for _, job in run_jobs.list_recorded_jobs(each)]
    cluster = slurm_commands.cluster_name()
    return {job.job_id: job for job in (*started, *submitted) if cluster is None or job.cluster in (None, cluster)}


def _has_successor(run: Run, stage: str, job: str) -> bool:
    """Return True if a successor of `job` was submitted."""
    submissions = events_since_submission(run.read_events(stage, Submitted), job)
    return any(event.is_successor and job in (event.after or ()) for event in submissions)


def _was_cancelled(run: Run, stage: str, job: str) -> bool:
    """Return True if a job was cancelled, according to Slurm, or to its last event if Slurm no longer lists the job."""
    recorded = _index_recorded_jobs(run).get(job)
    state = job_states.query_job_states([recorded])[recorded].state if recorded is not None else UNKNOWN
    events = [e for e in events_since_submission(run.read_events(stage), job) if get_job_id(e) == job]
    last_cause = read_stage_state(events).last_cause
    return state == "CANCELLED" or (state == UNKNOWN and last_cause == "cancelled")
