"""Where a run's stages run: by Slurm, in the allocation that this is, or on this machine.

The command line reads the names before anything else, so what costs time to import stands inside.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from pipeline.base.errors import UserError

if TYPE_CHECKING:
    from pipeline.run.directory import Run


Executor = Literal["auto", "slurm", "allocation", "local"]
"""Where stages run; `auto`: Slurm where its controller answers, the allocation inside salloc, else this machine."""


def choose_executor(executor: Executor, run: Run | None = None) -> Executor:
    """What `auto` means here: where `run` was, else what there is.

    Raises UserError where the executor that was asked for cannot work, or `run` was in an allocation and this is none.
    """
    from pipeline.base.dist_env import is_in_allocation
    from pipeline.run.events import Started
    from pipeline.run.points import list_points
    from slurm.query.job_states import is_slurm_responding
    from slurm.query.run_jobs import uses_slurm

    inside = is_in_allocation(os.environ)
    if executor == "allocation" and not inside:
        raise UserError(
            "slurm.no_allocation",
            "--executor allocation: this process is not in an allocation: start one with salloc, or omit the option",
        )
    if executor == "slurm" and not is_slurm_responding():
        raise UserError(
            "slurm.not_responding",
            "--executor slurm: no Slurm controller answers (scontrol ping); use --executor local",
        )
    if executor != "auto":
        return executor
    if run is not None and uses_slurm(run):
        return "slurm"
    if inside:
        return "allocation"
    if run is None:
        return "slurm" if is_slurm_responding() else "local"
    started = [event for one in (run, *list_points(run)) for event in one.read_events(None, Started)]
    last_start = max(started, key=lambda event: event.time, default=None)
    job = None if last_start is None else last_start.slurm_job
    if job and is_slurm_responding():
        raise UserError(
            "run.allocation_ended",
            f"{run.name} ran inside job {job} (salloc or a script): resume it inside an allocation, or use --executor "
            "slurm to submit jobs or --executor local for this machine",
        )
    return "local"
