"""The chain on a Slurm cluster: every stage that is missing is submitted at once, tied by dependencies.

    prepare ─afterok─► shard (array) ─afterany─► shard (one task: does what the array left, validates, writes the
    manifest) ─afterok─► train ─afterok─► evaluate

Nothing stays running on the login node. Before anything is submitted all stages are looked at: done and validated →
no edge; submitted and alive → an edge; the others are submitted, parents first. A job that waits for something that
can no longer happen is cancelled and submitted again by `resume`; one that still saves, because a person stopped it,
has another one submitted behind its end. Jobs that an earlier call submitted without a record of it are found first
(slurm/submit/sbatch.py). A stage of which only a part is in the queue (the array without the job behind it,
the training without its successor) gets the rest. If Slurm refuses a job in the middle, what is queued stays, and the
message names it with the command that completes the chain.

Of a sweep, train and evaluate are arrays with one task for each point that lacks them:

    … ─afterok─► train (array over points) ─aftercorr─► evaluate (array over the same points)

`aftercorr` ties task to task: a point is evaluated when its own training is done. Each task is the supervisor of a run
of its own (pipeline/run/points.py), requeues itself by its own id (`JOB_TASK`: the id of the array would restart all),
and leaves the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.base.command import format_command
from pipeline.base.errors import UserError
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.events import CancelRequested, Resumed, read_stage_state
from pipeline.run.failure import describe_remedy
from pipeline.run.points import create_points, list_points
from slurm.query.capacity import check_limits
from slurm.query.job_states import NOT_RESPONDING, array_job_id, cancel_jobs
from slurm.query.run_jobs import (
    SubmittedJob,
    describe_stray_job,
    describe_unproven_jobs,
    find_awaited_job,
    find_run_jobs,
    find_successor,
    is_job_ending,
)
from slurm.submit.sbatch import resolve_open_submissions

CANCEL_WAIT_S = 60.0
"""How long `cancel` waits for another process that submits the run's jobs. It stops before its next sbatch."""


def submit_chain(run: Run, console: Console, *, again: bool) -> None:
    """Submit what is missing and not under way. `again`: a person said `resume`, so failed stages are tried again.

    Raises UserError where the run was cancelled, a stage failed and nobody said to try again, or Slurm refuses a job.
    """
    run.check_not_cancelled()
    run.stop_file.unlink(missing_ok=True)
    chain = Chain(run, console, again)
    chain.look()
    check_limits(run.config, chain.planned())
    for number, stage in enumerate(stages_of_run := list(run.config.active_stages)):
        try:
            chain.submit(stage)
        except UserError as error:
            raise UserError(
                error.code, "\n".join([str(error), *chain.describe_part(stages_of_run[number:])])
            ) from error
        except (OSError, KeyboardInterrupt):
            for words in chain.describe_part(stages_of_run[number:]):
                chain.say(words)
            raise
    if chain.waiting:
        chain.say(f"watch it: {format_command('status', run.name)}")


class Chain:
    """The jobs of one run, and of its sweep's points, while those that are missing are submitted."""

    def __init__(self, run: Run, console: Console, again: bool, points: Sequence[Run] | None = None) -> None:
        """`points`: those of a sweep; None: they are made if they are missing."""
        self.run, self.points, self.again = run, create_points(run) if points is None else points, again
        self.say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self.alive: dict[tuple[Path, str], list[SubmittedJob]] = {}
        """The jobs that run or may still run, by run and stage, as what follows."""
        self.waiting: dict[tuple[Path, str], str] = {}
        """The job that later stages wait for."""
        self.ending: dict[tuple[Path, str], str] = {}
        """The job that still saves, behind whose end another one comes."""
        self.arrays: dict[tuple[Path, str], str] = {}
        """The array that is in the queue without the job behind it, which completes the stage."""
        self.without_successor: dict[tuple[Path, str], str] = {}
        """The training that is in the queue without its successor."""
        self.queued: dict[str, list[str]] = {}
        """By stage, the jobs that were in the queue before, or were submitted now."""
        self.wanted: dict[str, list[Run]] = {}
        """By stage, what it is to be submitted for: the run, or points."""

    def look(self) -> None:
        """Find what is missing and not under way, and cancel what waits in vain. Raises UserError as `submit_chain`."""
        known = self._find_jobs()
        for words in describe_unproven_jobs(known):
            self.say(words)
        for job in known:
            if job.state.is_active and job.step is None and not job.is_stray:
                self.alive.setdefault((job.run, job.stage), []).append(job)
        vain = [job for job in known if job.state.is_unsatisfiable or (job.is_stray and job.state.is_active)]
        for job in vain:
            if job.is_stray:
                self.say(describe_stray_job(job))
        for stage, row in self.run.config.active_stages.items():
            everyone = self.points if self.points and row.is_per_point else [self.run]
            self.wanted[stage] = [one for one in everyone if self._lacks(one, stage)]
            for one in self.wanted[stage]:  # its jobs wait for one that is to be replaced
                array = self.arrays.get((one.path, stage))
                vain += (job for job in self.alive.get((one.path, stage), ()) if job.job_id != array)
        if self.points:
            lacking = {one.path for found in self.wanted.values() for one in found}
            whole = {one.path for one in self.points} - lacking
            busy = whole & {path for path, _ in self.waiting}
            self.say(f"sweep     {len(self.points)} points: {len(whole - busy)} done, {len(busy)} under way")
        ending = set(self.ending.values())
        self._cancel([job for job in vain if job.job_id not in ending])
        cancelled = {job.job_id for job in vain if job.job_id not in ending}
        for (_, stage), jobs in self.alive.items():
            self.queued.setdefault(stage, []).extend(job.job_id for job in jobs if job.job_id not in cancelled)

    def planned(self) -> dict[str, list[int]]:
        """By stage, how many tasks each submission will have, if the points that lack a stage wait for one array."""
        found: dict[str, list[int]] = {}
        for stage, lacking in self.wanted.items():
            found[stage] = [1] if (self.run.path, stage) in self.without_successor else []
            if lacking and lacking[0] is not self.run:
                found[stage].append(len(lacking))
            elif lacking:
                tasks = self.run.config.stages.get_resources(stage).array_tasks
                arrays = [tasks] if tasks > 1 and (self.run.path, stage) not in self.arrays else []
                found[stage] += [*arrays, 1, *([1] if self._has_successors(stage) else [])]
        return found

    def describe_part(self, left: Sequence[str]) -> list[str]:
        """What is in the queue, what is not, and what to do, if a job of the stages `left` could not be submitted."""
        queued = [f"{stage} ({', '.join(dict.fromkeys(jobs))})" for stage, jobs in self.queued.items() if jobs]
        missing = [stage for stage in left if self.wanted[stage]] or list(left[:1])
        return queued and [
            f"in the queue: {', '.join(queued)}; not submitted, or not all of it: {', '.join(missing)}",
            f"to complete the chain: {self.run.resume_command}",
            f"to end what is in the queue: {format_command('cancel', self.run.name)}",
        ]

    def _lacks(self, one: Run, stage: str) -> bool:
        """Whether a stage of the run, or of a point, is to be submitted: it is not done, and no job does it."""
        work, alive = stages.load_stage_module(stage), self.alive.get((one.path, stage), [])
        replaced = any(parent in self.wanted[name] for parent, name in self._parents(one, stage))
        if work.missing_outputs(one) is None and not replaced and not self._after(one, stage):
            if one is self.run:  # points are counted
                self.say(f"{stage:9} done: {work.progress(one).description}")
            return False
        if (job := find_awaited_job(stage, alive)) is not None:
            if is_job_ending(one, stage, job.state):
                self.ending[one.path, stage] = job.job_id
            elif not replaced or any(other.state.state != "PENDING" for other in alive):
                self.waiting[one.path, stage] = job.job_id
                if one is self.run:
                    self.say(f"{stage:9} job {job.job_id} {job.state.state.lower()}")
                    if self._has_successors(stage) and find_successor(job, alive) is None:
                        self.without_successor[one.path, stage] = job.job_id
                return False
        elif alive and is_job_ending(one, stage, alive[-1].state):
            self.ending[one.path, stage] = alive[-1].job_id
        elif alive and (not replaced or any(other.state.state != "PENDING" for other in alive)):
            self.arrays[one.path, stage] = alive[-1].job_id
        state = read_stage_state(one.read_events(stage))
        end = state.end_event
        if end is not None and state.has_failed and not self.again:
            message = end.message or ""
            raise UserError(
                "run.stage_failed",
                f"{stage} of {one.name} failed ({end.cause}): {message.rstrip()}\n"
                f"{describe_remedy(one, end.cause, message)}",
            )
        return True

    def _parents(self, one: Run, stage: str) -> list[tuple[Run, str]]:
        """What a stage reads: other stages of the same run, or of the one that all points share."""
        return [(one if STAGES[name].is_per_point else self.run, name) for name in STAGES[stage].depends_on]

    def _after(self, one: Run, stage: str) -> list[str]:
        keys = ((parent.path, name) for parent, name in self._parents(one, stage))
        return [self.waiting[key] for key in keys if key in self.waiting]

    def _has_successors(self, stage: str) -> bool:
        """Whether a successor waits behind the job of this stage from the start."""
        return STAGES[stage].is_training and not self.points and not self.run.config.site.requeue

    def submit(self, stage: str) -> None:
        """Submit a stage for what lacks it: one job or, for points that wait for one job or one array, an array."""
        if job := self.without_successor.get((self.run.path, stage)):
            self._submit_successor(stage, job)
        alike: dict[tuple[str, ...], list[Run]] = {}
        for one in self.wanted[stage]:
            alike.setdefault(tuple(map(array_job_id, self._after(one, stage))), []).append(one)
        for arrays, members in alike.items():
            after = [self._after(one, stage) for one in members]
            if all(jobs == after[0] for jobs in after):
                self._submit(stage, members, after[0])
            elif after == [[f"{array}_{task}" for array in arrays] for task in range(len(members))]:
                self._submit(stage, members, arrays, "aftercorr")
            else:
                for one, jobs in zip(members, after, strict=True):
                    self._submit(stage, [one], jobs)

    def _submit(self, stage: str, members: Sequence[Run], after: Sequence[str], kind: str = "afterok") -> None:
        run, swept = self.run, members if self.run not in members else ()
        if not after and (ending := [self.ending[key] for one in members if (key := (one.path, stage)) in self.ending]):
            after, kind = ending, "afterany"
        tasks, behind = (
            run.config.stages.get_resources(stage).array_tasks,
            f", after {', '.join(after)}" if after else "",
        )
        array = self.arrays.get((run.path, stage))
        if array is not None:
            self.say(f"{stage:9} job {array}: array, in the queue already")
        elif tasks > 1:
            array = self._sbatch(stage, after, kind, tasks=tasks)
            self.say(f"{stage:9} job {array}: array of {tasks}{behind}")
        if array is not None:
            after, kind, behind = [array], "afterany", f": validates, after {array}"
        job = self._sbatch(stage, after, kind, points=swept)
        for task, one in enumerate(members):
            self.waiting[one.path, stage] = f"{job}_{task}" if len(members) > 1 else job
        if swept:
            each = ", task by task" if kind == "aftercorr" else ""
            name = f"point {swept[0].path.name}" if len(swept) == 1 else f"array over {len(swept)} points"
            behind = f": {name}{behind}{each}"
        self.say(f"{stage:9} job {job}{behind}")
        if not swept and self._has_successors(stage):
            self._submit_successor(stage, job)

    def _submit_successor(self, stage: str, job: str) -> None:
        successor = self._sbatch(stage, [job], "afternotok")
        self.say(f"{stage:9} job {successor}: takes over if {job} does not end well")

    # What changes something is in these methods alone: `resume --dry-run` replaces them (cli/resume.py).

    def _find_jobs(self) -> list[SubmittedJob]:
        return resolve_open_submissions((self.run, *self.points), self.say)

    def _cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        for job in jobs:
            if job.is_stray:
                self.say(f"job {job.job_id} is cancelled")
        cancel_jobs(job.state for job in jobs)

    def _sbatch(self, stage: str, after: Sequence[str], kind: str, **more: Any) -> str:
        from slurm.submit.sbatch import submit_stage

        self.run.check_not_cancelled()  # since the last sbatch
        job = submit_stage(self.run, stage, after, kind=kind, say=self.say, **more)
        self.queued.setdefault(stage, []).append(job)
        return job


def reset_for_resume(run: Run, *, asked_anew: bool) -> None:
    """Forget stops and failures: a person said to go on. `asked_anew`: with other values than Slurm was asked with."""
    for one in (run, *create_points(run)):
        one.clear_requests()
        one.append_event(Resumed())
    if asked_anew:
        cancel_pending_jobs(run)  # what waits is submitted again


def cancel_run(run: Run) -> list[str]:
    """Ask what runs to save and leave, and cancel what waits; what is to be said of it."""
    everyone, held = (run, *create_points(run)), []
    for one in everyone:
        one.write_request(one.cancelled_file)
        one.append_event(CancelRequested())
    with run.lock_exclusively(patience_s=CANCEL_WAIT_S):  # whoever submits now stops before its next job
        jobs, unknown = cancel_pending_jobs(run)
    for one, stage in product(everyone, STAGES):
        if holder := one.lock_holder(stage):
            holder.terminate()
            held.append(stage)
    words = f"{', '.join(held)} saves and leaves" if held else "nothing was running here"
    if jobs:
        words = f"jobs {', '.join(jobs)} end"
    elif NOT_RESPONDING in unknown:
        words = "jobs that run save and leave, and those that begin end at once, but they stay in the queue until then"
    return [f"{run.name} is cancelled: {words}", *unknown]


def cancel_pending_jobs(run: Run) -> tuple[list[str], list[str]]:
    """Cancel what has not begun; running supervisors read the request in the run directory and save.

    The ids, and what is to be said of jobs that are left alone.
    """
    everyone, more = (run, *list_points(run)), list[str]()
    known = find_run_jobs(everyone)
    if not any(job.state.reason == NOT_RESPONDING for job in known):
        try:
            known = resolve_open_submissions(everyone, more.append, known=known)
        except UserError as error:  # sbatch of another process gets no answer
            more.append(str(error))
    jobs = [job for job in known if job.state.is_active or job.state.is_unsatisfiable]
    cancel_jobs(job.state for job in jobs if job.state.state == "PENDING" or job.is_stray)
    return [job.job_id for job in jobs], [*describe_unproven_jobs(known), *more]
