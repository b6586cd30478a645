"""`resume RUN`: continue a run, optionally with a changed config or updated code.

`--dry-run` prints what would change and what would be submitted. It calls the same functions as a `resume` without this
option, and therefore reports the same errors and warnings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.common import Overrides, RunPath, console
from cli.submit import check_jobs, describe_stages, list_warnings, start_run
from pipeline.base.errors import UserError
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config
from pipeline.run import stages
from pipeline.run.changes import changeable_keys, describe_changes
from pipeline.run.directory import Run, create_points, list_points
from pipeline.run.events import CodeUpdated
from slurm.query.capacity import check_limits
from slurm.query.job_states import require_response
from slurm.query.run_jobs import SubmittedJob, describe_running_stages, find_run_jobs
from slurm.submit.chain import Chain, reset_for_resume
from slurm.submit.executor import Executor, choose_executor
from slurm.submit.sbatch import render_batch_script


def resume(
    run_path: RunPath,
    overrides: Overrides = None,
    update_code: Annotated[bool, typer.Option(help="replace the run's copy of the code with the current code")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check everything and print what would change and run; change nothing")
    ] = False,
    scripts: Annotated[bool, typer.Option("--scripts", help="with --dry-run: also print the sbatch scripts")] = False,
    executor: Annotated[Executor, typer.Option(help="where to run; auto: where the run was before")] = "auto",
) -> None:
    """Continue a run, optionally with a changed config."""
    if scripts and not dry_run:
        raise UserError("cli.conflict", "--scripts requires --dry-run")
    run = Run.open(run_path)
    run.check_owner()
    chosen_executor = choose_executor(executor, run)
    changes = overrides or []
    # no batch script depends on the section `recovery`, so its changes need no new jobs
    replaces_jobs = any(not change.startswith("recovery.") for change in changes)
    # a second `resume` waits for the lock, and then finds what the first one changed
    with nullcontext() if dry_run else run.lock_exclusively():
        if replaces_jobs or update_code:
            run.check_not_running(describe_running_stages(run))
        if update_code:
            run.code_notes = run.check_model_code()
        if dry_run:
            preview_resume(run, changes, update_code, chosen_executor, replaces_jobs, console, scripts=scripts)
            return
        # jobs are checked before the changes are written, so that an error leaves the run unchanged
        if chosen_executor == "slurm":
            check_jobs(run.with_config(run.preview_overrides(changes, update_code)))
        for each in (run, *create_points(run)):
            each.apply_overrides(changes, update_code)
        reset_for_resume(run, replaces_jobs=replaces_jobs)
        if update_code:
            run.copy_code()
            run.copy_working_dir()
            run.append_event(CodeUpdated(commit=run.commit))
    # outside the `with` block, because `start_run` takes the lock again
    start_run(run, chosen_executor, is_resumed=True)


resume.__doc__ = (
    "Continue a run, optionally with a changed config. KEY=VALUE may change "
    f"{', '.join(changeable_keys())}, and increase train.steps. Before the first checkpoint, it may change any key."
)


class PreviewChain(Chain):
    """A chain that only prints which jobs would be submitted and cancelled.

    Args:
        run: the run.
        console: for messages.
        sweep_points: the sweep points.
        replaces_pending: whether all pending jobs would be cancelled first.
    """

    def __init__(self, run: Run, console: Console, sweep_points: Sequence[Run], replaces_pending: bool) -> None:
        super().__init__(run, console, resubmit_failed=True, points=sweep_points)
        self.replaces_pending = replaces_pending
        self.planned_jobs: list[tuple[str, int]] = []
        """Stage and number of tasks of each job that would be submitted."""

    def _find_jobs(self) -> list[SubmittedJob]:
        """Return the jobs of the run and its points.

        If `replaces_pending` is set, print the pending jobs, and return them with the state CANCELLED.
        """
        jobs = find_run_jobs((self.run, *self.points))
        require_response(job.reported_job for job in jobs)
        if not self.replaces_pending:
            return jobs
        pending = [job for job in jobs if job.reported_job.state == "PENDING"]
        self._cancel(pending)
        return [
            replace(job, reported_job=replace(job.reported_job, state="CANCELLED")) if job in pending else job
            for job in jobs
        ]

    def _cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Print the jobs that would be cancelled."""
        for job in jobs:
            self.say(f"{job.stage:9} job {job.job_id} would be cancelled")

    def _sbatch(self, stage: str, after: Sequence[str], dependency_type: str, **options: Any) -> str:
        """Record a job that would be submitted, and return a placeholder for its id, such as `new-1`."""
        tasks = max(options.get("tasks", 1), len(options.get("points", ())))
        self.planned_jobs.append((stage, tasks))
        return f"new-{len(self.planned_jobs)}"


def preview_resume(
    run: Run,
    overrides: Sequence[str],
    update_code: bool,
    executor: Executor,
    replaces_pending: bool,
    console: Console,
    *,
    scripts: bool = False,
) -> None:
    """Print what `resume` would do. Write, submit and cancel nothing.

    Args:
        run: the run.
        overrides: the changes of the config, as `KEY=VALUE`.
        update_code: whether the run's copy of the code would be replaced.
        executor: where the stages would run.
        replaces_pending: whether all pending jobs would be cancelled and submitted again.
        console: where to print.
        scripts: whether to also print the sbatch scripts.

    Raises:
        UserError: in the same cases as `resume`.
    """
    changed_run = run.with_config(run.preview_overrides(overrides, update_code))
    changed_run.code_notes = run.code_notes
    sweep_points = [
        point.with_config(point.preview_overrides(overrides, update_code)) if point.config_file.exists() else point
        for point in list_points(changed_run)
    ]

    def print_lines(*lines: str) -> None:
        """Print lines without markup."""
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    changes = [f"{key}: {change}" for key, change in describe_changes(run.config, changed_run.config).items()]
    if update_code:
        changes.append(f"code: {run.code_dir} would be replaced with the current code")
    for file in (run.cancelled_file, run.stop_file):
        if file.exists():
            changes.append(f"{file.name}: the request would be removed")
    print_lines("# ---- what would change", *(changes or ["nothing"]))
    if executor == "slurm":
        _preview_jobs(changed_run, sweep_points, replaces_pending, console, print_lines, scripts)
    else:
        print_lines("", "# ---- what would run here")
        runs = [("", changed_run, stages.list_run_stages(changed_run))]
        runs += [(f"point {point.path.name} ", point, stages.list_point_stages(point)) for point in sweep_points]
        for prefix, each, names in runs:
            for stage in names:
                stage_module = stages.load_stage_module(each, stage)
                state = "done" if stage_module.describe_missing_outputs(each) is None else "would run"
                # the description is "-" if there is no progress to describe
                print_lines(f"{prefix}{stage:9} {state}: {stage_module.progress(each).description}".removesuffix(": -"))
    print_lines("", *list_warnings(changed_run, executor), "nothing was written or submitted")


def _preview_jobs(
    run: Run,
    sweep_points: Sequence[Run],
    replaces_pending: bool,
    console: Console,
    print_lines: Callable[..., None],
    scripts: bool,
) -> None:
    """Print the jobs that would be cancelled and submitted on Slurm.

    Args:
        run: the run with the changed config.
        sweep_points: the sweep points with the changed config.
        replaces_pending: whether all pending jobs would be cancelled first.
        console: where to print the messages of the chain.
        print_lines: prints lines.
        scripts: whether to also print the sbatch scripts.
    """
    check_jobs(run)
    print_lines("", "# ---- what would be submitted")
    chain = PreviewChain(run, console, sweep_points, replaces_pending)
    chain.inspect_jobs()
    check_limits(run.config, chain.count_planned_tasks())
    for stage in run.config.active_stages:
        chain.submit(stage)
    masked_config = Config.model_validate(mask_secrets(run.config.model_dump(mode="json")))
    planned_stages = {stage for stage, _ in chain.planned_jobs}
    print_lines("", *describe_stages(masked_config, len(sweep_points), on_slurm=True, selected_stages=planned_stages))
    # jobs of a stage with the same number of tasks have the same script, which is printed once
    for stage, tasks in dict.fromkeys(chain.planned_jobs) if scripts else ():
        heading = f"{stage}, {tasks} tasks" if tasks > 1 else stage
        print_lines("", f"# ---- on Slurm: {heading}", render_batch_script(run, masked_config, stage, tasks).rstrip())
