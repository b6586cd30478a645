"""Which jobs continue after this one: its successor, and the jobs of later stages that wait for it.

If jobs cannot be requeued (`site.requeue: false`), successors continue a stage:

    train T1 ◄─afterok─ evaluate        T1 dies (preempted with PreemptMode=CANCEL, time limit, node failure …):
       ▲                                T2 starts, submits T3 behind itself, and makes evaluate wait for T2
       └─afternotok─ T2

The successor of a training is submitted together with it. Any other job (a sweep point, another stage, a job that the
user submitted) submits its successor when it is stopped and should be retried (:func:`hand_over`). If that job dies
before, for example with its node, it has no successor and the stage waits for `resume`.

Slurm keeps a job pending forever if its dependency can no longer be satisfied. Therefore a stage that is done cancels
its successor. A stage that ends without being done cancels all jobs that wait for it, with or without requeueing.
`resume` submits them again.
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
"""How long a job that is stopped waits for submit.py, which may be submitting jobs of the same run."""


def find_predecessor(run: Run, stage: str, job: str) -> str | None:
    """Return the job whose successor `job` is; None if it is not a successor."""
    for event in events_since_submission(run.read_events(None, Submitted), job)[:1]:
        if (event.stage, event.job_id) == (stage, job) and event.is_successor:
            return next(iter(event.after or ()), None)
    return None


def take_over(run: Run, stage: str, rank_info: RankInfo) -> str | None:
    """Continue from the predecessor of this job, if this job is a successor.

    Its own successor is submitted first, because this job may die at any moment. If Slurm accepts no job now, this job
    trains nevertheless, and submits it when it is stopped (:func:`hand_over`).

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
        return f"the user cancelled job {predecessor}, whose successor this job is"
    waiting = _list_waiting_jobs(run, predecessor, is_transitive=False)
    children = [state.job_id for state, kind in waiting if kind != "afternotok"]
    if rank_info.restart_count == 0 and (problem := hand_over(run, stage, job)) is not None:
        print(f"{stage}: {problem}; trying again when this job is stopped", file=sys.stderr, flush=True)
    for child in children:
        slurm_commands.run_slurm_command("scontrol", "update", f"JobId={child}", f"Dependency=afterok:{job}")
    run.append_event(TookOver(stage=stage, job_id=job, predecessor=predecessor, children=children))
    return None


def hand_over(run: Run, stage: str, job: str) -> str | None:
    """Submit the successor of `job` if it has none. Return the reason if this is not possible now."""
    from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, resolve_submissions_if_open, submit_stage

    if _has_successor(run, stage, job):
        return None
    try:
        with run.lock_exclusively(patience_s=LOCK_PATIENCE_S):  # submit.py may be submitting it
            resolve_submissions_if_open([run])
            if not _has_successor(run, stage, job):
                submit_stage(run, stage, [job], kind="afternotok", patience_s=JOB_SBATCH_TIMEOUT_S)
    except (UserError, OSError) as error:
        return f"no successor could be submitted ({error})"
    return None


def cancel_unneeded_jobs(run: Run, stage: str, rank_info: RankInfo, *, is_done: bool) -> None:
    """Cancel the jobs that can no longer start, or need not.

    The newest job is cancelled first: a job may wait for the end of another one (`afterany`) that is also cancelled,
    and would otherwise start.

    Args:
        run: the run.
        stage: the stage of this job, which ends permanently.
        rank_info: identifies this job.
        is_done: whether the stage is done. In that case only the successor of this job is cancelled, otherwise all jobs
            that wait for the stage.
    """
    job = rank_info.job_id or ""
    last_needed = job if is_done else find_predecessor(run, stage, job) or job
    waiting = [state for state, _ in _list_waiting_jobs(run, last_needed)]
    successors = [state for state in waiting if find_predecessor(run, stage, state.job_id) == job]
    job_states.cancel_jobs(successors if is_done else reversed(waiting))


def _list_waiting_jobs(run: Run, job: str, *, is_transitive: bool = True) -> list[tuple[JobState, str]]:
    """Return the pending jobs that need the success of `job`, oldest first, each with the type of its dependency.

    Jobs that only wait for the end of `job` (`afterany`) do not need it.

    Args:
        run: the run.
        job: the job.
        is_transitive: whether to include jobs that wait for the ones found.
    """
    from slurm.submit.sbatch import resolve_submissions_if_open

    try:
        resolve_submissions_if_open((run, *list_points(run)))
    except (UserError, OSError) as error:
        print(f"jobs that were submitted without a record are not found: {error}", file=sys.stderr, flush=True)
    kinds = {job: ""}
    needed = kinds.keys() if is_transitive else {job}
    events = events_since_submission(_read_dependencies(run), job)
    start_time = events[0].time if events else ""
    for point in list_points(run):
        events += [event for event in _read_dependencies(point) if event.time >= start_time]
    for event in events:
        if isinstance(event, TookOver):
            if event.job_id in needed:
                kinds.update(dict.fromkeys(event.children, "afterok"))
            continue
        after = event.after or []
        if event.kind == "afterany" and job in after:
            continue
        if not needed.isdisjoint(after):
            kinds[event.job_id] = event.kind or ""
    recorded = _index_recorded_jobs(run)
    states = job_states.query_job_states(recorded[each] for each in kinds if each in recorded and each != job)
    pending = {state.job_id: state for state in states.values() if state.state == "PENDING"}
    return [(pending[each], kind) for each, kind in kinds.items() if each in pending]


def _read_dependencies(run: Run) -> list[Submitted | TookOver]:
    """Return the events of a run that tell which jobs depend on which."""
    return [event for event in run.read_events() if isinstance(event, Submitted | TookOver)]


def _index_recorded_jobs(run: Run) -> dict[str, RecordedJob]:
    """Return the newest recorded job of each id, of the run and its sweep points, on this cluster."""
    started = [run_jobs.read_recorded_job(run, e) for e in run.read_events(None, Started) if e.slurm_job]
    submitted = [job for each in (run, *list_points(run)) for _, job in run_jobs.list_recorded_jobs(each)]
    cluster = slurm_commands.cluster_name()
    return {job.job_id: job for job in (*started, *submitted) if cluster is None or job.cluster in (None, cluster)}


def _has_successor(run: Run, stage: str, job: str) -> bool:
    submissions = events_since_submission(run.read_events(stage, Submitted), job)
    return any(event.is_successor and job in (event.after or ()) for event in submissions)


def _was_cancelled(run: Run, stage: str, job: str) -> bool:
    """Return True if a job was cancelled according to Slurm, or to its last event if Slurm no longer knows it."""
    recorded = _index_recorded_jobs(run).get(job)
    state = job_states.query_job_states([recorded])[recorded].state if recorded is not None else UNKNOWN
    events = [e for e in events_since_submission(run.read_events(stage), job) if get_job_id(e) == job]
    last_cause = read_stage_state(events).last_cause
    return state == "CANCELLED" or (state == UNKNOWN and last_cause == "cancelled")
