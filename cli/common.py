"""Shared by the commands: argument types, the console, and the set-up of a process that imports torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from pipeline.base.console import PlainConsole
from pipeline.base.files import raise_open_file_limit

RunPath = Annotated[str, typer.Argument(metavar="RUN", help="a run directory, such as runs/quickstart")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="config keys to set, such as train.steps=400")
]
Step = Annotated[str | None, typer.Option(help="step of the checkpoint; default: the newest checkpoint")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="check everything and print the plan; create and submit nothing")
]
Scripts = Annotated[
    bool, typer.Option("--scripts", help="with --dry-run: also print the resolved config and the sbatch scripts")
]
PreviewMachine = Annotated[
    str | None, typer.Option(metavar="NAME|FILE", help="with --dry-run: check the memory of this machine's GPU")
]

console = PlainConsole(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
"""The console to which commands print. The width is set because rich would wrap at 80 columns without a terminal."""


def prepare_for_torch() -> None:
    """Set up this process for a command that imports torch or h5py. Call this function before the import.

    Ctrl-C then ends the command at once, even inside a library. This is safe because such a command changes files only
    atomically. If the output is piped into a program that closes the pipe early, such as `head`, the command exits
    without a traceback.
    """
    from pipeline.run.code import CODE_ROOT, make_code_env

    faulthandler.enable()
    raise_open_file_limit()
    signal.signal(signal.SIGINT, _exit_at_once)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if str(CODE_ROOT) not in sys.path[:1]:  # PYTHONPATH may contain another package called `pipeline`
        sys.path.insert(0, str(CODE_ROOT))
    os.environ.update(make_code_env(os.environ, CODE_ROOT))  # for the processes that torch and h5py start


def _exit_at_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal: exit without cleanup, with the exit code that a shell reports for this signal."""
    os._exit(128 + number)
