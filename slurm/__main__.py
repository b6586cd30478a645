"""The job's door: `python -m slurm STAGE RUN` supervises one stage of a run, in a job or by hand."""

from __future__ import annotations

import sys
import traceback

from pipeline.base.errors import Exit, UserError, storage_error
from pipeline.base.signals import StopFlag
from pipeline.config.stages import STAGES
from pipeline.run.directory import Run


def main(arguments: list[str]) -> int:
    """Supervise; returns the exit code."""
    flag = StopFlag().install()
    try:
        if len(arguments) != 2 or arguments[0].startswith("-"):
            raise UserError(f"usage: python -m slurm {'|'.join(STAGES)} RUN")
        from slurm.supervise.supervisor import supervise

        run = Run.open(arguments[1])
        run.refuse_foreign()
        return supervise(run, arguments[0], flag)
    except Exception as error:
        found = error if isinstance(error, UserError) else storage_error(error)
        print(f"error: {found}" if found else traceback.format_exc(), file=sys.stderr)
        return found.code if found else Exit.CRASHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
