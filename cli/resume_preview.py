"""`resume --dry-run`: what a resume would change and submit, printed. Nothing is written, submitted or cancelled.

What it refuses and warns of is what `resume` itself refuses and warns of, because both call the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from cli.dry_run import describe_stages
from cli.submission_checks import check_jobs, warnings
from pipeline.config.masking import masked
from pipeline.config.sections import Config
from pipeline.run import stages
from pipeline.run.changes import differences
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query.job_states import require_response
from slurm.query.run_jobs import SubmittedJob, find_run_jobs
from slurm.submit.chain import Chain
from slurm.submit.executor import Executor
from slurm.submit.limits import check_limits
from slurm.submit.sbatch import render_batch_script


class PreviewChain(Chain):
    """A chain that says which jobs it would submit and cancel, and does neither."""

    def __init__(self, run: Run, console: Console, found: Sequence[Run], replaces_waiting: bool) -> None:
        """`found`: the points of a sweep. `replaces_waiting`: whether all jobs that wait would be cancelled first."""
        super().__init__(run, console, True, found)
        self.replaces_waiting = replaces_waiting
        self.submitted: list[tuple[str, int]] = []
        """Stage and number of tasks of each job that would be submitted."""

    def _find_jobs(self) -> list[SubmittedJob]:
        known = find_run_jobs((self.run, *self.points))
        require_response(job.state for job in known)
        if not self.replaces_waiting:
            return known
        waiting = [job for job in known if job.state.state == "PENDING"]
        self._cancel(waiting)
        return [replace(job, state=replace(job.state, state="CANCELLED")) if job in waiting else job for job in known]

    def _cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        for job in jobs:
            self.say(f"{job.stage:9} job {job.job_id} would be cancelled")

    def _sbatch(self, stage: str, after: Sequence[str], kind: str, **more: Any) -> str:
        self.submitted.append((stage, max(more.get("tasks", 1), len(more.get("points", ())))))
        return f"new-{len(self.submitted)}"


def print_resume(
    run: Run,
    overrides: Sequence[str],
    update_code: bool,
    executor: Executor,
    replaces_waiting: bool,
    console: Console,
    *,
    scripts: bool = False,
) -> None:
    """Print what `resume` would do.

    Args:
        run: The run.
        overrides: `key=value` to change.
        update_code: Whether the run's copy of the code would be replaced.
        executor: Where the stages would run.
        replaces_waiting: Whether jobs that wait in the queue would be replaced, because of the changes.
        console: Where to print.
        scripts: Whether to print the sbatch scripts as well.

    Raises:
        UserError: `resume` would raise it, too.
    """
    changed = run.with_config(run.preview_overrides(overrides, update_code))
    changed.code_notes = run.code_notes
    found = [
        point.with_config(point.preview_overrides(overrides, update_code)) if point.config_file.exists() else point
        for point in points(changed)
    ]
    lines = [f"{key}: {words}" for key, words in differences(run.config, changed.config).items()]
    if update_code:
        lines.append(f"code: {run.code_dir} would be replaced by the code that is here now")
    lines += [
        f"{file.name}: the request would be removed" for file in (run.cancelled_file, run.stop_file) if file.exists()
    ]

    def say(*words: str) -> None:
        console.print("\n".join(words), highlight=False, markup=False, soft_wrap=True)

    say("# ---- what would change", *(lines or ["nothing"]))
    if executor == "slurm":
        check_jobs(changed)
        say("", "# ---- what would be submitted")
        chain = PreviewChain(changed, console, found, replaces_waiting)
        chain.look()
        check_limits(changed.config, chain.planned())
        for stage in changed.config.rows:
            chain.submit(stage)
        shown = Config.model_validate(masked(changed.config.model_dump(mode="json")))
        say("", *describe_stages(shown, len(found), True, dict(chain.submitted)))
        for stage, tasks in dict.fromkeys(chain.submitted) if scripts else ():
            heading = f"{stage}, {tasks} tasks" if tasks > 1 else stage
            say("", f"# ---- on Slurm: {heading}", render_batch_script(changed, shown, stage, tasks).rstrip())
    else:
        say("", "# ---- what would run here")
        for one, names in [(changed, stages.own_stages(changed)), *((one, stages.point_stages()) for one in found)]:
            name = f"point {one.path.name} " if one is not changed else ""
            for stage in names:
                work = stages.load(stage)
                words = "done" if work.missing(one) is None else "would run"
                say(f"{name}{stage:9} {words}: {work.progress(one).words}".removesuffix(": -"))
    say("", *warnings(changed, executor), "nothing was written or submitted")
