"""Choose where the stages of a run are executed: by Slurm, in the current allocation, or on this machine.

The command line imports this module before it parses its arguments. Slow imports are therefore inside the function.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pipeline.base.errors import UserError

if TYPE_CHECKING:
    from pipeline.run.directory import Run


Executor = Literal["auto", "slurm", "allocation", "local"]
"""Where stages run: as Slurm jobs, inside the allocation of this process, or on this machine. `auto` selects one of
these (:func:`choose_executor`)."""


def choose_executor(executor: Executor, run: Run | None = None) -> Executor:
    """Return the executor to use: `executor`, or if it is `auto`, the first of these that applies.

    1. `slurm` if `run` was last submitted to Slurm
    2. `allocation` if this process is inside an allocation
    3. `slurm` for a new run, if Slurm responds
    4. `local`

    Args:
        executor: the executor that the user selected.
        run: an existing run; None for a new run.

    Raises:
        UserError: if the selected executor is not available, or `run` was executed in an allocation that has ended. For
            a new run, also if this machine belongs to a cluster whose controller does not respond.
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
