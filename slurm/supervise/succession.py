"""Who comes after a job: successors that take over from it, and the jobs of later stages that wait for it.

Sites whose jobs cannot be put back into the queue (`site.requeue: false`) have successors:

    train T1 ◄─afterok─ evaluate        T1 dies (preempted with PreemptMode=CANCEL, time limit, node failure …):
       ▲                                T2 starts, submits T3 behind itself, and lets evaluate wait for T2
       └─afternotok─ T2

A training has its successor from the day it is submitted. Any other job (a point of a sweep, another stage, one that a
person submitted) submits it when it is stopped and is to go on (:func:`hand_over`); one that dies without a word, as
with its node, has none, and its stage waits for `resume`.

Slurm keeps a job whose dependency can no longer be satisfied pending for ever. So whoever makes a job superfluous
cancels it: a stage that is done cancels its successor; one that may not go on, or that a person cancelled, all that
waits for it, with and without requeue. `resume` submits those again.
"""

from __future__ import annotations

import sys

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.run import attempts
from pipeline.run.directory import Run
from pipeline.run.points import list_points
from slurm.query import job_states
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob, events_since_submission
from slurm.query.stop_causes import find_predecessor

LOCK_PATIENCE_S = 10.0
"""How long a job that is stopped waits for submit.py, which may be submitting jobs of the run, too."""


def _waiting(run: Run, job: str, *, further: bool = True) -> list[tuple[JobState, str]]:
    """The pending jobs that cannot do without `job`, or (`further`) others that cannot, oldest first; with their kinds.

    What waits for its end only (`afterany`), however that is, can do without.
    """
    from slurm.submit.sbatch import resolve_submissions_if_open

    try:
        resolve_submissions_if_open((run, *list_points(run)))
    except (UserError, OSError) as error:
        print(f"jobs that were submitted without a record are not seen: {error}", file=sys.stderr, flush=True)
    kinds = {job: ""}
    needed = kinds.keys() if further else {job}
    told = events_since_submission(run.read_events(None, "submitted", "took_over"), job)
    since = str(told[0]["time"]) if told else ""
    for point in list_points(run):
        told += [e for e in point.read_events(None, "submitted", "took_over") if str(e["time"]) >= since]
    for event in told:
        if event["event"] == "took_over" and event["job_id"] in needed:
            kinds.update(dict.fromkeys(event["children"], "afterok"))
        elif event.get("kind") == "afterany" and job in event["after"]:
            continue
        elif not needed.isdisjoint(event.get("after", ())):
            kinds[event["job_id"]] = event.get("kind") or ""
    known = _claims(run)
    shown = job_states.query_job_states(known[waits] for waits in kinds if waits in known and waits != job)
    pending = {state.job_id: state for state in shown.values() if state.state == "PENDING"}
    return [(pending[waits], kind) for waits, kind in kinds.items() if waits in pending]


def _claims(run: Run) -> dict[str, RecordedJob]:
    """The newest job of each id in the events of a run and the points of its sweep, as far as this cluster's."""
    started = [job_states.read_recorded_job(run, e) for e in run.read_events(None, "started") if e.get("slurm_job")]
    submitted = [one for each in (run, *list_points(run)) for _, one in job_states.list_recorded_jobs(each)]
    here = job_states.cluster_name()
    return {one.job_id: one for one in (*started, *submitted) if here is None or one.cluster in (None, here)}


def take_over(run: Run, stage: str, rank_info: RankInfo) -> str | None:
    """What a successor does first; a reason where it must not go on. Nothing in a job that is none.

    Its own successor is submitted before anything else: this job, too, may die at any moment. Where Slurm takes none
    now, the job trains all the same, and asks once more when it is stopped (:func:`hand_over`).
    """
    job = rank_info.job_id or ""
    if (predecessor := find_predecessor(run, stage, job)) is None:
        return None
    if _cancelled(run, stage, predecessor):
        facts = {"cause": "cancelled", "exit_code": int(ExitCode.CANCELLED)}
        run.event("cancelled", stage, job_id=job, **facts, message=f"job {predecessor} was cancelled")
        return f"job {predecessor}, which this one would have succeeded, was cancelled by a person"
    waiting = _waiting(run, predecessor, further=False)
    children = [waits.job_id for waits, kind in waiting if kind != "afternotok"]
    if rank_info.restart_count == 0 and (why_not := hand_over(run, stage, job)) is not None:
        print(f"{stage}: {why_not}; asking again when this job is stopped", file=sys.stderr, flush=True)
    for child in children:
        job_states.run_slurm_command("scontrol", "update", f"JobId={child}", f"Dependency=afterok:{job}")
    run.event("took_over", stage, job_id=job, predecessor=predecessor, children=children)
    return None


def hand_over(run: Run, stage: str, job: str) -> str | None:
    """See to it that `job` has a successor; the reason where Slurm takes no job from here."""
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


def _has_successor(run: Run, stage: str, job: str) -> bool:
    told = events_since_submission(run.read_events(stage, "submitted"), job)
    return any(e.get("kind") == "afternotok" and job in e["after"] for e in told)


def _cancelled(run: Run, stage: str, job: str) -> bool:
    """Whether a job was cancelled: by Slurm's word or, where Slurm has forgotten it, by its supervisor's last one."""
    one = _claims(run).get(job)
    state = job_states.query_job_states([one])[one].state if one is not None else UNKNOWN
    spoken = [e for e in events_since_submission(run.read_events(stage), job) if e.get("job_id") == job]
    return state == "CANCELLED" or (
        state == UNKNOWN and attempts.read_stage_state(spoken).last_stop_event.get("cause") == "cancelled"
    )


def cancel_unneeded_jobs(run: Run, stage: str, rank_info: RankInfo, *, done: bool) -> None:
    """Cancel what waits in vain: the successor of this job where the stage is done, everything where it ends for good.

    The newest first: a job may wait for the end of another one that is cancelled with it (`afterany`), and would start.
    """
    job = rank_info.job_id or ""
    waiting = [waits for waits, _ in _waiting(run, job if done else find_predecessor(run, stage, job) or job)]
    heirs = [waits for waits in waiting if find_predecessor(run, stage, waits.job_id) == job]
    job_states.cancel_jobs(heirs if done else reversed(waiting))
