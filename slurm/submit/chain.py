"""Submit the chain of a run's stages to Slurm: all missing stages at once, connected by dependencies.

    prepare ─afterok─► shard (array) ─afterany─► shard (one task: completes what the array left, validates all,
    writes the manifest) ─afterok─► train ─afterok─► evaluate

No process stays on the login node. First, all stages are checked. A stage that is done is skipped. If a stage has an
active job, later stages depend on this job. The other stages are submitted in order:

- Jobs whose dependency can never be satisfied are cancelled and submitted again.
- If a stage has a job that is about to end because a user stopped it, the new job starts after the end of that job.
- If only some jobs of a stage are in the queue, the missing jobs are submitted. Examples are an array without the job
  that follows the array, and a train job without its successor job.
- If Slurm refuses a job, the jobs already in the queue stay. The message names them and the command that completes the
  chain.

In a sweep, train and evaluate are arrays with one task for each sweep point that needs the stage:

    … ─afterok─► train (array over points) ─aftercorr─► evaluate (array over the same points)

With `aftercorr`, each task depends on the task with the same index: a point is evaluated when its train stage is done.
Each task supervises the run directory of its point (pipeline/run/directory.py). A task is requeued by the id
`JOB_TASK`, because `scontrol requeue` with the id of the array would restart all tasks.

In a search, the chain has only the trials that were decided so far. The supervisor of a trial that ends submits the
next ones (slurm/supervise/next_trials.py).
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
from pipeline.run import stages
from pipeline.run.directory import Run, create_points, list_points
from pipeline.run.events import CancelRequested, Resumed, read_stage_state
from pipeline.run.failure import describe_remedy
from pipeline.search.study import get_search, update_study
from slurm.query.capacity import check_limits
from slurm.query.job_states import array_job_id, cancel_jobs
from slurm.query.run_jobs import (
    SubmittedJob,
    describe_stray_job,
    describe_unknown_states,
    find_awaited_job,
    find_run_jobs,
    find_successor,
    is_job_ending,
)
from slurm.query.slurm_commands import NOT_RESPONDING
from slurm.submit.sbatch import confirm_submissions

CANCEL_WAIT_S = 60.0
"""How long `cancel` waits for another process that is submitting jobs of the run. The other process looks for a request
to cancel before each job, and stops if there is one."""


def submit_chain(run: Run, console: Console, *, resubmit_failed: bool) -> None:
    """Submit the missing jobs of a run to Slurm.

    Args:
        run: the run.
        console: for messages.
        resubmit_failed: submit failed stages again, because the user ran `resume`.

    Raises:
        UserError: if the run was cancelled, or a stage failed and is not retried. Also if the jobs exceed a limit of
            the cluster, or Slurm refuses a job or does not respond.
    """
    run.check_not_cancelled()
    run.stop_file.unlink(missing_ok=True)  # an earlier request to stop must not stop the new jobs
    if get_search(run) is not None:
        update_study(run)
    chain = Chain(run, console, resubmit_failed)
    chain.inspect_jobs()
    check_limits(run.config, chain.count_planned_tasks())
    active_stages = list(run.config.active_stages)
    for number, stage in enumerate(active_stages):
        try:
            chain.submit(stage)
        except UserError as error:
            remaining = chain.describe_incomplete_chain(active_stages[number:])
            raise UserError(error.code, "\n".join([str(error), *remaining])) from error
        except (OSError, KeyboardInterrupt):
            for message in chain.describe_incomplete_chain(active_stages[number:]):
                chain.say(message)
            raise
    if chain.awaited_ids:
        chain.say(f"watch it: {format_command('status', run.name)}")


class Chain:
    """The jobs of one run and its sweep points. Submits the jobs that are missing.

    The keys of most attributes are `(path, stage)`, with the path of the run or of a sweep point.

    Args:
        run: the run.
        console: for messages.
        resubmit_failed: submit failed stages again.
        points: the sweep points; None to create the missing ones.
    """

    def __init__(self, run: Run, console: Console, resubmit_failed: bool, points: Sequence[Run] | None = None) -> None:
        self.run = run
        self.points = create_points(run) if points is None else points
        self.resubmit_failed = resubmit_failed
        self.say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self.active_jobs: dict[tuple[Path, str], list[SubmittedJob]] = {}
        """The jobs that run or may still run, except stray jobs and jobs that evaluate a checkpoint while the train
        stage runs."""
        self.awaited_ids: dict[tuple[Path, str], str] = {}
        """The id of the job of the stage for which later stages wait."""
        self.ending_ids: dict[tuple[Path, str], str] = {}
        """The id of a job that is about to end, for example because a user stopped it. A new job of the stage starts
        after this job has ended."""
        self.incomplete_array_ids: dict[tuple[Path, str], str] = {}
        """The id of an array in the queue. The job after the array, which completes the stage, is missing."""
        self.ids_without_successor: dict[tuple[Path, str], str] = {}
        """The id of a train job in the queue whose successor job is missing."""
        self.queued_ids: dict[str, list[str]] = {}
        """By stage, the ids of all jobs in the queue: those that were found, and those that this object submitted."""
        self.targets: dict[str, list[Run]] = {}
        """By stage, the runs for which the stage must be submitted: the run itself, or sweep points."""

    def inspect_jobs(self) -> None:
        """Find the jobs that exist, decide what to submit, and cancel the jobs that will be replaced.

        The replaced jobs are stray jobs, jobs whose dependency can never be satisfied, and pending jobs of stages that
        are submitted again. Jobs that are about to end are not cancelled.

        Raises:
            UserError: if a stage failed and is not retried, Slurm does not respond, or another process is still
                submitting a job of the run.
        """
        jobs = self._find_jobs()
        for message in describe_unknown_states(jobs):
            self.say(message)
        for job in jobs:
            if job.reported_job.is_active and job.step is None and not job.is_stray:
                self.active_jobs.setdefault((job.run_path, job.stage), []).append(job)
        replaced_jobs = [
            job for job in jobs if job.reported_job.is_unsatisfiable or (job.is_stray and job.reported_job.is_active)
        ]
        for job in replaced_jobs:
            if job.is_stray:
                self.say(describe_stray_job(job))
        for stage, stage_spec in self.run.config.active_stages.items():
            has_points = self.run.config.sweep is not None and stage_spec.is_per_point
            candidates = [self.run]
            if has_points:
                candidates = [
                    point
                    for point in self.points
                    if stage in stages.list_point_stages(point) and not point.is_failed_trial
                ]
            self.targets[stage] = [target for target in candidates if self._needs_submission(target, stage)]
            for target in self.targets[stage]:
                array_id = self.incomplete_array_ids.get((target.path, stage))
                active = self.active_jobs.get((target.path, stage), ())
                # the pending jobs of this stage depend on a job that is replaced; only an incomplete array is kept
                replaced_jobs += (job for job in active if job.job_id != array_id)
        if self.points:
            paths_to_submit = {target.path for targets in self.targets.values() for target in targets}
            other_paths = {point.path for point in self.points} - paths_to_submit
            active_paths = other_paths & {path for path, _ in self.awaited_ids}
            done_count = len(other_paths - active_paths)
            self.say(f"sweep     {len(self.points)} points: {done_count} done, {len(active_paths)} active")
        ending_ids = set(self.ending_ids.values())
        cancelled_jobs = [job for job in replaced_jobs if job.job_id not in ending_ids]
        self._cancel(cancelled_jobs)
        cancelled_ids = {job.job_id for job in cancelled_jobs}
        for (_, stage), stage_jobs in self.active_jobs.items():
            remaining_ids = [job.job_id for job in stage_jobs if job.job_id not in cancelled_ids]
            self.queued_ids.setdefault(stage, []).extend(remaining_ids)

    def count_planned_tasks(self) -> dict[str, list[int]]:
        """Return the number of tasks of each job to submit, by stage; 1 for a job without an array.

        All sweep points for which a stage must be submitted are counted as one array, although
        :meth:`submit` may divide them into several jobs.
        """
        planned: dict[str, list[int]] = {}
        for stage, targets in self.targets.items():
            # the successor of the job in the queue
            planned[stage] = [1] if (self.run.path, stage) in self.ids_without_successor else []
            if targets and targets[0] is not self.run:
                planned[stage].append(len(targets))
            elif targets:
                tasks = self.run.config.stages.get_resources(stage).array_tasks
                if tasks > 1 and (self.run.path, stage) not in self.incomplete_array_ids:
                    planned[stage].append(tasks)
                planned[stage].append(1)  # the job after the array, or the only job
                if self._has_successors(stage):
                    planned[stage].append(1)  # the successor of that job
        return planned

    def describe_incomplete_chain(self, remaining_stages: Sequence[str]) -> list[str]:
        """Return messages for the user after a job could not be submitted.

        The messages list the jobs in the queue, the missing stages, and the commands that complete or cancel the chain.
        If no job is in the queue, there are no messages.

        Args:
            remaining_stages: the stage of the failed submission, and all later stages.
        """
        queued = [f"{stage} ({', '.join(dict.fromkeys(jobs))})" for stage, jobs in self.queued_ids.items() if jobs]
        # if only the successor of a job in the queue could not be submitted, no stage may have targets
        missing = [stage for stage in remaining_stages if self.targets[stage]] or list(remaining_stages[:1])
        if not queued:
            return []
        return [
            f"in the queue: {', '.join(queued)}; not submitted, or only in part: {', '.join(missing)}",
            f"to complete the chain: {self.run.resume_command}",
            f"to cancel what is in the queue: {format_command('cancel', self.run.name)}",
        ]

    def _needs_submission(self, target: Run, stage: str) -> bool:
        """Return True if a stage of the run or of a sweep point must be submitted.

        A stage that is done is also submitted if a stage on which it depends is submitted or has an active job. A stage
        is not submitted if an active job will complete it. However, a pending job is replaced if it depends on a stage
        that is submitted again.

        The method also fills `awaited_ids`, `ending_ids`, `incomplete_array_ids` and `ids_without_successor`.

        Raises:
            UserError: if the stage failed and failed stages are not retried.
        """
        stage_module = stages.load_stage_module(target, stage)
        active = self.active_jobs.get((target.path, stage), [])
        has_started = any(job.reported_job.state != "PENDING" for job in active)
        depends_on_new_job = any(parent in self.targets[name] for parent, name in self._list_parents(target, stage))
        is_done = stage_module.describe_missing_outputs(target) is None
        if is_done and not depends_on_new_job and not self._list_awaited_ids(target, stage):
            if target is self.run:  # sweep points are only counted
                self.say(f"{stage:9} done: {stage_module.progress(target).description}")
            return False
        if (job := find_awaited_job(target.config.get_stage(stage), active)) is not None:
            if is_job_ending(target, stage, job.reported_job):
                self.ending_ids[target.path, stage] = job.job_id
            elif not depends_on_new_job or has_started:
                self._keep_active_job(target, stage, job, active)
                return False
        # otherwise, if there is an active job, it is an array without the job that completes the stage after the array
        elif active and is_job_ending(target, stage, active[-1].reported_job):
            self.ending_ids[target.path, stage] = active[-1].job_id
        elif active and (not depends_on_new_job or has_started):
            self.incomplete_array_ids[target.path, stage] = active[-1].job_id
        state = read_stage_state(target.read_events(stage))
        end = state.end_event
        if end is not None and state.has_failed and not self.resubmit_failed:
            message = end.message or ""
            raise UserError(
                "run.stage_failed",
                f"{stage} of {target.name} failed ({end.cause}): {message.rstrip()}\n"
                f"{describe_remedy(target, end.cause, message)}",
            )
        return True

    def _keep_active_job(self, target: Run, stage: str, job: SubmittedJob, active: Sequence[SubmittedJob]) -> None:
        """Make later stages wait for `job`, and check that `job` has its successor job.

        Args:
            target: the run or sweep point.
            stage: the stage.
            job: the active job that will complete the stage.
            active: all active jobs of the stage.
        """
        self.awaited_ids[target.path, stage] = job.job_id
        if target is self.run:
            self.say(f"{stage:9} job {job.job_id} {job.reported_job.state.lower()}")
            if self._has_successors(stage) and find_successor(job, active) is None:
                self.ids_without_successor[target.path, stage] = job.job_id

    def _list_parents(self, target: Run, stage: str) -> list[tuple[Run, str]]:
        """Return the stages on which a stage of `target` depends.

        Each is a pair of a run and a stage. If `target` is a sweep point, stages that all points share belong to the
        run of the sweep.
        """
        return [
            (target if self.run.config.get_stage(name).is_per_point else self.run, name)
            for name in self.run.config.get_stage(stage).depends_on
        ]

    def _list_awaited_ids(self, target: Run, stage: str) -> list[str]:
        """Return the ids of the jobs on which a job of this stage must depend."""
        keys = ((parent.path, name) for parent, name in self._list_parents(target, stage))
        return [self.awaited_ids[key] for key in keys if key in self.awaited_ids]

    def _has_successors(self, stage: str) -> bool:
        """Return True if a successor job is submitted together with the job of this stage."""
        return self.run.config.get_stage(stage).is_training and not self.points and not self.run.config.site.requeue

    def submit(self, stage: str) -> None:
        """Submit the missing jobs of a stage.

        Sweep points that wait for the same jobs become one array. Points also become one array if they wait for all
        tasks of another array, in the same order (`aftercorr`). Otherwise, each point gets its own job.
        """
        if job_id := self.ids_without_successor.get((self.run.path, stage)):
            self._submit_successor(stage, job_id)
        targets_by_array_ids: dict[tuple[str, ...], list[Run]] = {}
        for target in self.targets[stage]:
            array_ids = tuple(map(array_job_id, self._list_awaited_ids(target, stage)))
            targets_by_array_ids.setdefault(array_ids, []).append(target)
        for array_ids, targets in targets_by_array_ids.items():
            after_by_target = [self._list_awaited_ids(target, stage) for target in targets]
            corresponding_tasks = [[f"{array_id}_{task}" for array_id in array_ids] for task in range(len(targets))]
            if all(after == after_by_target[0] for after in after_by_target):
                self._submit(stage, targets, after_by_target[0])
            elif after_by_target == corresponding_tasks:
                self._submit(stage, targets, array_ids, "aftercorr")
            else:
                for target, after in zip(targets, after_by_target, strict=True):
                    self._submit(stage, [target], after)

    def _submit(
        self, stage: str, targets: Sequence[Run], after: Sequence[str], dependency_type: str = "afterok"
    ) -> None:
        """Submit one job or array of a stage.

        If the tasks of an array share the work of the stage, a second job is submitted, which runs after the array and
        completes the stage. If the site does not requeue jobs, the train job of a run without a sweep gets a successor
        job.

        Args:
            stage: the stage.
            targets: the run, or the sweep points that become one array.
            after: the ids of the jobs on which the job depends.
            dependency_type: the type of this dependency.
        """
        run = self.run
        points = targets if run not in targets else ()
        if not after:
            # if a job of this stage is about to end, the new job starts after the end of that job
            keys = [(target.path, stage) for target in targets]
            if ending_ids := [self.ending_ids[key] for key in keys if key in self.ending_ids]:
                after = ending_ids
                dependency_type = "afterany"
        tasks = run.config.stages.get_resources(stage).array_tasks
        suffix = f", after {', '.join(after)}" if after else ""
        array_id = self.incomplete_array_ids.get((run.path, stage))
        if array_id is not None:
            self.say(f"{stage:9} job {array_id}: array, in the queue already")
        elif tasks > 1:
            array_id = self._sbatch(stage, after, dependency_type, tasks=tasks)
            self.say(f"{stage:9} job {array_id}: array of {tasks}{suffix}")
        if array_id is not None:
            after = [array_id]
            dependency_type = "afterany"
            suffix = f": validates, after {array_id}"
        job_id = self._sbatch(stage, after, dependency_type, points=points)
        for task, target in enumerate(targets):
            self.awaited_ids[target.path, stage] = f"{job_id}_{task}" if len(targets) > 1 else job_id
        if points:
            pairing = ", task by task" if dependency_type == "aftercorr" else ""
            name = f"point {points[0].path.name}" if len(points) == 1 else f"array over {len(points)} points"
            suffix = f": {name}{suffix}{pairing}"
        self.say(f"{stage:9} job {job_id}{suffix}")
        if not points and self._has_successors(stage):
            self._submit_successor(stage, job_id)

    def _submit_successor(self, stage: str, job_id: str) -> None:
        """Submit a successor job, which continues the stage if the job `job_id` ends without finishing the stage."""
        successor_id = self._sbatch(stage, [job_id], "afternotok")
        self.say(f"{stage:9} job {successor_id}: the successor, continues if {job_id} does not succeed")

    # Only the methods below change jobs and events. `resume --dry-run` overrides them (cli/resume.py).

    def _find_jobs(self) -> list[SubmittedJob]:
        """Confirm the unconfirmed submissions, and return the jobs of the run and its points."""
        return confirm_submissions((self.run, *self.points), self.say)

    def _cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Cancel jobs, and print a message for each stray job."""
        for job in jobs:
            if job.is_stray:
                self.say(f"job {job.job_id} is cancelled")
        cancel_jobs(job.reported_job for job in jobs)

    def _sbatch(self, stage: str, after: Sequence[str], dependency_type: str, **options: Any) -> str:
        """Submit one job or array, and return its id. `options`: further arguments of `submit_stage`."""
        from slurm.submit.sbatch import submit_stage

        self.run.check_not_cancelled()  # the user may have cancelled the run since the last submission
        job_id = submit_stage(self.run, stage, after, dependency_type=dependency_type, say=self.say, **options)
        self.queued_ids.setdefault(stage, []).append(job_id)
        return job_id


def reset_for_resume(run: Run, *, replaces_jobs: bool) -> None:
    """Remove the requests to stop or cancel, and reset the retry budgets of a run and its sweep points.

    Args:
        run: the run that the user resumes.
        replaces_jobs: whether to cancel the pending jobs, because the changed config requires new jobs.
    """
    for target in (run, *create_points(run)):
        target.clear_requests()
        target.append_event(Resumed())  # retry budgets count only the events after this one
    if replaces_jobs:
        cancel_pending_jobs(run)


def cancel_run(run: Run) -> list[str]:
    """Cancel a run and its sweep points. Running stages save and exit, and pending jobs are cancelled.

    Returns:
        Messages for the user.
    """
    targets = (run, *create_points(run))
    for target in targets:
        target.write_request(target.cancelled_file)
        target.append_event(CancelRequested())
    # another process that is submitting jobs holds this lock, finds the request before its next job, and stops
    with run.lock_exclusively(timeout_s=CANCEL_WAIT_S):
        job_ids, notes = cancel_pending_jobs(run)
    running_stages = []
    for target, stage in product(targets, run.config.active_stages):
        if holder := target.lock_holder(stage):
            holder.terminate()
            running_stages.append(stage)
    outcome = "nothing was running on this machine"
    if running_stages:
        outcome = f"{', '.join(running_stages)} saves and exits"
    if job_ids:
        outcome = f"jobs {', '.join(job_ids)} end"
    elif NOT_RESPONDING in notes:
        outcome = "running jobs save and exit; pending jobs stay in the queue and end as soon as they start"
    return [f"{run.name} is cancelled: {outcome}", *notes]


def cancel_pending_jobs(run: Run) -> tuple[list[str], list[str]]:
    """Cancel the pending jobs and the stray jobs of a run.

    Running jobs are not cancelled: their supervisors find the request to cancel in the run directory, save and exit.

    Returns:
        The ids of all jobs of the run in the queue before the call, and messages. The messages tell why the states of
        some jobs are unknown, and what was found out about unconfirmed submissions.
    """
    targets = (run, *list_points(run))
    messages: list[str] = []
    run_jobs = find_run_jobs(targets)
    if not any(job.reported_job.reason == NOT_RESPONDING for job in run_jobs):
        try:
            run_jobs = confirm_submissions(targets, messages.append, jobs=run_jobs)
        except UserError as error:  # another process is still calling sbatch, or the controller no longer responds
            messages.append(str(error))
    jobs = [job for job in run_jobs if job.reported_job.is_active or job.reported_job.is_unsatisfiable]
    cancel_jobs(job.reported_job for job in jobs if job.reported_job.state == "PENDING" or job.is_stray)
    return [job.job_id for job in jobs], [*describe_unknown_states(run_jobs), *messages]
