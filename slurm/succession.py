"""Successor jobs, for sites whose jobs cannot be put back into the queue (`site.requeue: false`).

    train T1 ◄─afterok─ evaluate        T1 dies (preempted with PreemptMode=CANCEL, time limit, node failure …):
       ▲                                T2 starts, submits T3 behind itself, and lets evaluate wait for T2
       └─afternotok─ T2

Slurm keeps a job whose dependency can no longer be satisfied pending for ever. So whoever makes a successor
superfluous cancels it: a training that reached its end, one that may not go on, one that a person cancelled.
"""

from __future__ import annotations

from pipeline import stages
from pipeline.run import Run
from slurm.cluster import Submitted, jobs_of
from slurm.environment import Place
from slurm.job import job_facts, move_children
from slurm.states import call


def submit_successor(run: Run, stage: str, job_id: str) -> str:
    """Submit a job that starts when `job_id` has ended in any way but well; its id."""
    from slurm.sbatch import submit

    return submit(run, stage, [job_id], kind="afternotok")


def _predecessor(run: Run, stage: str, job_id: str) -> str | None:
    """The job that `job_id` was submitted to succeed."""
    for event in run.read_events(stage):
        if event["event"] == "submitted" and event.get("job_id") == job_id and event.get("kind") == "afternotok":
            return str(event["after"][0])
    return None


def take_over(run: Run, stage: str, place: Place) -> str | None:
    """What a successor does first; a reason where it must not go on. Nothing in a job that is none.

    Its own successor is submitted before anything else: this job, too, may die at any moment.
    """
    job = place.job_id or ""
    predecessor = _predecessor(run, stage, job)
    if predecessor is None:
        return None
    children = [job.job_id for job in _waiting(run, stage)]
    facts = job_facts(predecessor)
    if facts is not None and facts.state == "CANCELLED":
        run.event("cancelled", stage, job_id=job, cause="cancelled", message=f"job {predecessor} was cancelled")
        if children:
            call("scancel", *children)
        return f"job {predecessor}, which this one would have succeeded, was cancelled by a person"
    if place.restart_count == 0:
        submit_successor(run, stage, job)
    move_children(job, children)
    run.event("took_over", stage, job_id=job, predecessor=predecessor, children=children)
    return None


def _waiting(run: Run, stage: str) -> list[Submitted]:
    """Jobs of later stages that are still pending, with hope or in vain; not those of single checkpoints."""
    later = [name for name in stages.STAGES if stage in stages.load(name).NEEDS]
    single = {e["job_id"] for e in run.read_events() if e["event"] == "submitted" and "step" in e}
    pending = [job for job in jobs_of(run) if job.stage in later and job.state.state == "PENDING"]
    return [job for job in pending if job.job_id not in single]


def not_needed(run: Run, stage: str, place: Place, *, done: bool) -> None:
    """Cancel what would succeed this job: the stage is done, or may not go on by itself.

    In the second case the jobs of later stages wait in vain, and go with it; `resume` submits them again.
    """
    for event in run.read_events(stage):
        if event["event"] == "submitted" and event.get("kind") == "afternotok" and place.job_id in event["after"]:
            children = [] if done else [job.job_id for job in _waiting(run, stage)]
            call("scancel", event["job_id"], *children)
