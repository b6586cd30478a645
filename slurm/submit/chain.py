"""The chain on a Slurm cluster: every stage that is missing is submitted at once, tied by dependencies.

    prepare ─afterok─► shard (array) ─afterany─► shard (one task: does what the array left, validates, writes the
    manifest) ─afterok─► train ─afterok─► evaluate

Nothing stays running on the login node. Before a stage is submitted its parents are looked at: done and validated →
no edge; submitted and alive → an edge; otherwise they are submitted first. A job that waits for something that
can no longer happen is cancelled and submitted again by `resume`; one that still saves, because a person stopped it,
has another one submitted behind its end.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from rich.console import Console

from pipeline.base.command import command
from pipeline.base.errors import UserError
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.failure import once_mended
from pipeline.run.points import make_points, points
from slurm.query import attempts
from slurm.query.causes import leaving
from slurm.query.jobs import jobs_of, unproven
from slurm.query.states import SILENT, cancel, must_answer
from slurm.submit.sweeps import submit_sweep


def submit_chain(run: Run, console: Console, *, again: bool) -> None:
    """Submit what is missing and not under way. `again`: a person said `resume`, so failed stages are tried again.

    Raises UserError where the run was cancelled, or a stage failed and nobody said to try again.
    """
    run.refuse_cancelled()
    run.stop_file.unlink(missing_ok=True)
    chain = Chain(run, console, again)
    for stage in stages.own_stages(run):
        chain.submit(stage)
    if run.config.sweep is not None:
        submit_sweep(run, chain.waiting, chain.fresh, chain.say, chain.refuse_failed)
    if chain.waiting:
        chain.say(f"watch it: {command('status', run.name)}")


class Chain:
    """The jobs of one run, while those that are missing are submitted."""

    def __init__(self, run: Run, console: Console, again: bool) -> None:
        self.run, self.again = run, again
        self.say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self.known = jobs_of([run])
        must_answer(job.state for job in self.known)
        self.waiting: dict[str, str] = {}
        """By stage, the job that later stages wait for."""
        self.fresh: set[str] = set()
        """The stages that were submitted just now."""
        for words in unproven(self.known):
            self.say(words)
        cancel(job.state for job in self.known if job.state.dead)

    def submit(self, stage: str) -> None:
        """Submit a stage, if it is missing and not under way."""
        from slurm.submit.sbatch import submit

        run, work, row = self.run, stages.load(stage), STAGES[stage]
        if work.missing(run) is None and self.waiting.keys().isdisjoint(row.needs):
            self.say(f"{stage:9} done: {work.progress(run).words}")
            return
        alive = [job for job in self.known if job.stage == stage and job.state.active and job.step is None]
        counts = alive[:1] if row.trains else alive[-1:]  # behind a training stand its successors
        ending = [job.job_id for job in counts if leaving(run, stage, job.state)]
        replaced = not self.fresh.isdisjoint(row.needs) and all(job.state.state == "PENDING" for job in alive)
        if counts and not ending and not replaced:
            self.waiting[stage] = counts[0].job_id
            self.say(f"{stage:9} job {counts[0].job_id} {counts[0].state.state.lower()}")
            return
        self.refuse_failed(run, stage)
        # they wait for a job that was replaced just now, or is to be
        cancel(job.state for job in alive if job.job_id not in ending)
        self.fresh.add(stage)
        parents = [self.waiting[parent] for parent in row.needs if parent in self.waiting]
        after, kind = (ending, "afterany") if ending and not parents else (parents, "afterok")
        behind, tasks = f", after {', '.join(after)}" if after else "", run.config.stages.of(stage).array_tasks
        if tasks > 1:
            array = submit(run, stage, after, kind=kind, tasks=tasks)
            self.say(f"{stage:9} job {array}: array of {tasks}{behind}")
            after, kind, behind = [array], "afterany", f": validates, after {array}"
        self.waiting[stage] = job = submit(run, stage, after, kind=kind)
        self.say(f"{stage:9} job {job}{behind}")
        if row.trains and not run.config.site.requeue:
            heir = submit(run, stage, [job], kind="afternotok")
            self.say(f"{stage:9} job {heir}: takes over if {job} does not end well")

    def refuse_failed(self, run: Run, stage: str) -> None:
        """Raise UserError where a stage of the run, or of a point, failed and nobody said to try again."""
        told = attempts.read(run.read_events(stage))
        if told.failed and not self.again:
            end = told.told
            raise UserError(
                f"{stage} of {run.name} failed ({end.get('cause')}): {str(end.get('message', '')).rstrip()}\n"
                f"{once_mended(run, end.get('cause'))}"
            )


def begin_anew(run: Run, *, asked_anew: bool) -> None:
    """Forget stops and failures: a person said to go on. `asked_anew`: with other values than Slurm was asked with."""
    for one in (run, *make_points(run)):
        one.clear_requests()
        one.event("resumed")
    if asked_anew:
        cancel_jobs(run)  # what waits is submitted again


def cancel_run(run: Run) -> list[str]:
    """Ask what runs to save and leave, and cancel what waits; what is to be said of it."""
    everyone, held = (run, *make_points(run)), []
    for one in everyone:
        one.request(one.cancelled_file)
        one.event("cancel_requested")
    jobs, unknown = cancel_jobs(run)
    for one, stage in product(everyone, STAGES):
        if holder := one.holder(stage):
            holder.terminate()
            held.append(stage)
    words = f"{', '.join(held)} saves and leaves" if held else "nothing was running here"
    if jobs:
        words = f"jobs {', '.join(jobs)} end"
    elif SILENT in unknown:
        words = "jobs that run save and leave, and those that begin end at once, but they stay in the queue until then"
    return [f"{run.name} is cancelled: {words}", *unknown]


def cancel_jobs(run: Run) -> tuple[list[str], list[str]]:
    """Cancel what has not begun; running supervisors read the request in the run directory and save.

    The ids, and what is to be said of jobs that are left alone.
    """
    known = jobs_of((run, *points(run)))
    jobs = [job for job in known if job.state.active or job.state.dead]
    cancel(job.state for job in jobs if job.state.state == "PENDING")
    return [job.job_id for job in jobs], unproven(known)
