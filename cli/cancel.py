"""`cancel RUN`: stop a run until `resume`."""

from __future__ import annotations

from cli.common import RunPath, console
from pipeline.run.directory import Run
from slurm.submit.chain import cancel_run


def cancel(run_path: RunPath) -> None:
    """Cancel a run. Running stages save a checkpoint and exit; nothing restarts until `resume`."""
    for message in cancel_run(Run.open(run_path)):
        console.print(message, soft_wrap=True)
