"""The chain on a Slurm cluster: every stage that is missing is submitted at once, tied by dependencies.

    prepare ─afterok─► shard (array) ─afterany─► shard (one task: does what the array left, validates, writes the
    manifest) ─afterok─► train ─afterok─► evaluate

Nothing stays running on the login node. Before a stage is submitted its parents are looked at: done and validated →
no edge; submitted and alive → an edge; otherwise they are submitted first. A job that waits for something that
can no longer happen is cancelled and submitted again by `resume`; one that still saves, because a person stopped it,
has another one submitted behind its end.
"""

from __future__ import annotations

from rich.console import Console

from pipeline.base.errors import Exit, UserError
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query import attempts
from slurm.query.causes import leaving
from slurm.query.jobs import Submitted, jobs_of, unproven
from slurm.query.states import cancel


def submit_chain(run: Run, console: Console, *, again: bool) -> Exit:
    """Submit what is missing and not under way. `again`: a person said `resume`, so failed stages are tried again.

    Raises UserError where the run was cancelled, or a stage failed and nobody said to try again.
    """
    run.refuse_cancelled()
    run.stop_file.unlink(missing_ok=True)
    known = jobs_of([run])
    for words in unproven(known):
        console.print(words, highlight=False, markup=False, soft_wrap=True)
    cancel(job.state for job in known if job.state.dead)
    waiting: dict[str, str] = {}
    fresh: set[str] = set()
    for stage in stages.own_stages(run):
        _submit_stage(run, stage, known, waiting, fresh, console, again)
    if run.config.sweep is not None:
        from slurm.submit.sweeps import submit_sweep

        failed = (lambda point, stage: None) if again else _failed
        submit_sweep(run, waiting, fresh, console, failed)
    if waiting:
        console.print(f"watch it: python submit.py status {run.name}", highlight=False, soft_wrap=True)
    return Exit.DONE


def _submit_stage(
    run: Run,
    stage: str,
    known: list[Submitted],
    waiting: dict[str, str],
    fresh: set[str],
    console: Console,
    again: bool,
) -> None:
    """Submit one stage, if it is missing and not under way; `waiting` gets the job that later stages wait for."""
    from slurm.submit.sbatch import submit

    work, row = stages.load(stage), STAGES[stage]
    if work.missing(run) is None and not set(row.needs) & waiting.keys():
        console.print(f"{stage:9} done: {work.progress(run).words}", highlight=False, soft_wrap=True)
        return
    alive = [job for job in known if job.stage == stage and job.state.active and job.step is None]
    counts = alive[:1] if row.trains else alive[-1:]  # behind a training stand its successors
    ending = [job.job_id for job in counts if leaving(run, stage, job.state)]
    replaced = bool(fresh.intersection(row.needs)) and all(job.state.state == "PENDING" for job in alive)
    if counts and not ending and not replaced:
        waiting[stage] = counts[0].job_id
        console.print(f"{stage:9} job {counts[0].job_id} {counts[0].state.state.lower()}", highlight=False)
        return
    if not again and (reason := _failed(run, stage)) is not None:
        raise UserError(reason)
    # they wait for a job that was replaced just now, or is to be
    cancel(job.state for job in alive if job.job_id not in ending)
    fresh.add(stage)
    parents = [waiting[parent] for parent in row.needs if parent in waiting]
    after, kind = (ending, "afterany") if ending and not parents else (parents, "afterok")
    tasks = run.config.stages.of(stage).array_tasks
    if tasks > 1:
        array = submit(run, stage, after, kind=kind, tasks=tasks)
        console.print(f"{stage:9} job {array}: array of {tasks}{_after(after)}", highlight=False)
        waiting[stage] = submit(run, stage, [array], kind="afterany")
        console.print(f"{stage:9} job {waiting[stage]}: validates, after {array}", highlight=False)
    else:
        waiting[stage] = submit(run, stage, after, kind=kind)
        console.print(f"{stage:9} job {waiting[stage]}{_after(after)}", highlight=False)
    if row.trains and not run.config.site.requeue:
        heir = submit(run, stage, [waiting[stage]], kind="afternotok")
        console.print(f"{stage:9} job {heir}: takes over if {waiting[stage]} does not end well", highlight=False)


def _failed(run: Run, stage: str) -> str | None:
    """Why a stage is not submitted again without `resume`: it failed; None where it did not."""
    told = attempts.read(run.read_events(stage))
    if not told.failed or (end := told.end) is None:
        return None
    return (
        f"{stage} of {run.name} failed ({end.get('cause')}): {str(end.get('message', '')).rstrip()}\n"
        f"once that is mended: {run.resume_command}"
    )


def _after(parents: list[str]) -> str:
    return f", after {', '.join(parents)}" if parents else ""


def cancel_jobs(run: Run) -> tuple[list[str], list[str]]:
    """Cancel what has not begun; running supervisors read the request in the run directory and save.

    The ids, and what is to be said of jobs that are left alone.
    """
    known = jobs_of((run, *points(run)))
    jobs = [job for job in known if job.state.active or job.state.dead]
    cancel(job.state for job in jobs if job.state.state == "PENDING")
    return [job.job_id for job in jobs], unproven(known)
