"""Successor jobs, for sites whose jobs cannot be put back into the queue (`site.requeue: false`).

    train T1 ◄─afterok─ evaluate        T1 dies (preempted with PreemptMode=CANCEL, time limit, node failure …):
       ▲                                T2 starts, submits T3 behind itself, and lets evaluate wait for T2
       └─afternotok─ T2

Slurm keeps a job whose dependency can no longer be satisfied pending for ever. So whoever makes a successor
superfluous cancels it: a training that reached its end, one that may not go on, one that a person cancelled.
"""

from __future__ import annotations

from typing import Any

from pipeline import stages
from pipeline.run import Run
from slurm.cluster import Submitted, jobs_of
from slurm.environment import Place
from slurm.recovery import ENDS, newest
from slurm.states import FORGOTTEN, call, query


def _successors(run: Run, stage: str) -> list[dict[str, Any]]:
    """The events that tell of successors submitted so far."""
    return [e for e in run.read_events(stage, "submitted") if e.get("kind") == "afternotok"]


def take_over(run: Run, stage: str, place: Place) -> str | None:
    """What a successor does first; a reason where it must not go on. Nothing in a job that is none.

    Its own successor is submitted before anything else: this job, too, may die at any moment.
    """
    from slurm.sbatch import submit

    job = place.job_id or ""
    predecessor = next((str(e["after"][0]) for e in _successors(run, stage) if e["job_id"] == job), None)
    if predecessor is None:
        return None
    children = [job.job_id for job in _waiting(run, stage)]
    if _cancelled(run, stage, predecessor):
        run.event("cancelled", stage, job_id=job, cause="cancelled", message=f"job {predecessor} was cancelled")
        if children:
            call("scancel", *children)
        return f"job {predecessor}, which this one would have succeeded, was cancelled by a person"
    if place.restart_count == 0:
        submit(run, stage, [job], kind="afternotok")
    for child in children:
        call("scontrol", "update", f"JobId={child}", f"Dependency=afterok:{job}")
    run.event("took_over", stage, job_id=job, predecessor=predecessor, children=children)
    return None


def _cancelled(run: Run, stage: str, job: str) -> bool:
    """Whether a job was cancelled: by Slurm's word or, where Slurm has forgotten it, by its supervisor's last one."""
    state = query([job])[job].state
    told = newest([e for e in run.read_events(stage) if e.get("job_id") == job], "started", "stopping", *ENDS) or {}
    return state == "CANCELLED" or (state == FORGOTTEN and told.get("cause") == "cancelled")


def _waiting(run: Run, stage: str) -> list[Submitted]:
    """Jobs of later stages that are still pending, with hope or in vain; not those of single checkpoints."""
    later = [name for name in stages.STAGES if stage in stages.load(name).NEEDS]
    single = {e["job_id"] for e in run.read_events(None, "submitted") if "step" in e}
    pending = [job for job in jobs_of(run) if job.stage in later and job.state.state == "PENDING"]
    return [job for job in pending if job.job_id not in single]


def not_needed(run: Run, stage: str, place: Place, *, done: bool) -> None:
    """Cancel what would succeed this job: the stage is done, or may not go on by itself.

    In the second case the jobs of later stages wait in vain, and go with it; `resume` submits them again.
    """
    for event in _successors(run, stage):
        if place.job_id in event["after"]:
            children = [] if done else [job.job_id for job in _waiting(run, stage)]
            call("scancel", event["job_id"], *children)
