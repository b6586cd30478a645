"""Choose where the stages of a run are executed: by Slurm, in the current allocation, or on this machine.

The command line imports this module before it parses anything, so slow imports are inside the function.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pipeline.base.errors import UserError

if TYPE_CHECKING:
    from pipeline.run.directory import Run


Executor = Literal["auto", "slurm", "allocation", "local"]
"""Where stages run. `auto`: Slurm if its controller responds, the allocation inside salloc, otherwise this machine."""


def choose_executor(executor: Executor, run: Run | None = None) -> Executor:
    """Return the executor to use: `executor`, or for `auto` a suitable one.

    `auto` selects Slurm for a run that was last submitted to Slurm, otherwise the allocation of this process if there
    is one. Without an allocation, a new run uses Slurm if it responds, and other runs use this machine.

    Args:
        executor: the executor that the user selected.
        run: an existing run; None for a new run.

    Raises:
        UserError: if the selected executor is not available, or `run` was executed in an allocation that has ended.
    """
    from pipeline.base.dist_env import is_in_allocation
    from pipeline.run.directory import list_points
    from pipeline.run.events import Started
    from slurm.query.run_jobs import uses_slurm
    from slurm.query.slurm_commands import is_slurm_responding

    has_allocation = is_in_allocation(os.environ)
    if executor == "allocation" and not has_allocation:
        raise UserError(
            "slurm.no_allocation",
            "--executor allocation: this process is not in an allocation: start one with salloc, or omit the option",
        )
    if executor == "slurm" and not is_slurm_responding():
        raise UserError(
            "slurm.not_responding",
            "--executor slurm: no Slurm controller responds (scontrol ping): use --executor local",
        )
    if executor != "auto":
        return executor
    if run is not None and uses_slurm(run):
        return "slurm"
    if has_allocation:
        return "allocation"
    if run is None:
        return "slurm" if is_slurm_responding() else "local"
    starts = [event for target in (run, *list_points(run)) for event in target.read_events(None, Started)]
    last_start = max(starts, key=lambda event: event.time, default=None)
    job_id = None if last_start is None else last_start.slurm_job
    if job_id and is_slurm_responding():
        raise UserError(
            "run.allocation_ended",
            f"{run.name} ran inside job {job_id} (salloc or a script): resume it inside an allocation, or use "
            "--executor slurm to submit jobs or --executor local for this machine",
        )
    return "local"
