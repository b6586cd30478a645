"""Entry point of a job: `python -m slurm STAGE RUN` supervises a stage of a run, in a Slurm job or on this machine."""

from __future__ import annotations

import sys

from pipeline.base.errors import UserError, print_error
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run


def main(arguments: list[str]) -> int:
    """Supervise a stage of a run, both given by `arguments`. Return the exit code."""
    flag = StopFlag().install()
    try:
        if len(arguments) != 2 or arguments[0].startswith("-"):
            raise UserError("cli.usage", "usage: python -m slurm STAGE RUN")
        from slurm.supervise.supervisor import supervise

        run = Run.open(arguments[1])
        run.check_owner()
        return supervise(run, arguments[0], flag)
    except Exception as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
