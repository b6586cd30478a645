"""The jobs that were submitted for a run, and what runs of it now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.stages import STAGES
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query.states import FORGOTTEN, Claim, JobState, claims, must_answer, query


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted for a run and not seen to end."""

    run: Path
    stage: str
    job_id: str
    state: JobState
    step: int | None = None
    """The checkpoint that it evaluates (slurm/supervise/evaluations.py): nothing in the chain waits for it."""


def jobs_of(runs: Sequence[Run], forgotten: dict[Claim, JobState] | None = None) -> list[Submitted]:
    """The jobs in the events of `runs`, oldest first, with their states from one query (`forgotten`: see there)."""
    told = [(run.path, *pair) for run in runs for pair in claims(run)]
    states = query((one for *_, one in told), forgotten)
    return [Submitted(path, e["stage"], e["job_id"], states[one], e.get("step")) for path, e, one in told]


def unproven(jobs: Sequence[Submitted]) -> list[str]:
    """What is to be said of jobs that may be the run's, and are left alone."""
    return list(dict.fromkeys(job.state.reason for job in jobs if job.state.state == FORGOTTEN and job.state.reason))


def running(run: Run) -> list[str]:
    """What runs now of a run and the points of its sweep, in words: what holds a lock, and jobs that have begun.

    Raises UserError where Slurm cannot be asked about its jobs.
    """
    everyone = (run, *points(run))
    held = [f"{stage} of {one.name}" for one in everyone for stage in STAGES if one.holder(stage)]
    jobs = jobs_of(everyone)
    must_answer(job.state for job in jobs)
    begun = [job for job in jobs if job.state.active and job.state.state != "PENDING"]
    return held or [f"{job.stage} (job {job.job_id})" for job in begun]


def uses_slurm(run: Run) -> bool:
    """Whether the run was last submitted to Slurm: `resume` keeps a run's executor."""
    submitted = [e for one in (run, *points(run)) for e in one.read_events(None, "submitted")]
    return bool(submitted) and max(submitted, key=lambda e: str(e["time"])).get("executor") == "slurm"
