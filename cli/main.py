"""Sluice turns one YAML file into a trained and evaluated model, on this machine or on a Slurm cluster. To begin:

    python submit.py init                     write my_text.yaml to fill in
    python submit.py my_text.yaml --dry-run   check it and print the plan
    python submit.py my_text.yaml             create the run, run its stages

After `source .venv/bin/activate`, `sluice` is short for `python submit.py`. CONFIG is a YAML file. RUN is a run
directory such as runs/my-text. KEY=VALUE sets a config key, such as train.steps=400. `COMMAND --help` lists the options
of a command.

    Run
    CONFIG [KEY=VALUE]…      create the run or find it; run what is not done
    run --name NAME -- CMD   run a command of your own as a job
    resume RUN [KEY=VALUE]…  continue a run, also with other resources
    fork RUN --name NEW      start a new run from a checkpoint of RUN
    cancel RUN               save a checkpoint and stop, until `resume`
    init [--model]           write a small config to start from

    Monitor
    status [RUN] [--watch]   state of each stage; without RUN: all runs
    logs RUN STAGE [-f]      log of a rank or of the supervisor
    report RUN               hours, losses and evaluation; report.html
    profile RUN              trace the next steps of all ranks
    verify RUN               check a checkpoint and print its digest
    track RUN                update TensorBoard, W&B, MLflow …

    Use
    export RUN DIR           write the weights for transformers (safetensors)
    generate RUN TEXT        continue a text with the model
    data ACTION PATH…        inspect, verify or import existing tokens

    Plan
    plan CONFIG              predict a layout's memory, communication, speed
    doctor [FOLDER]          check what this cluster or machine supports
    drill RUN                cause faults in a copy of a run; does it survive?
    schema                   print the JSON Schema of configs, for editors
"""
# `--help` prints the text above: commands in groups, and lines of at most 80 columns. click's own list of commands has
# no groups and would truncate the lines.

from __future__ import annotations

import gc
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from cli import VERSION
from pipeline.base.errors import UserError, find_storage_error, format_error, make_printable

COMMANDS = (
    "submit", "run", "resume", "fork", "cancel", "init", "status", "logs", "report", "profile", "verify", "track",
    "export", "generate", "data", "plan", "doctor", "drill", "schema",
)  # fmt: skip
"""Each name is a module in `cli/`. The function of the same name in that module is the command."""

HELP = re.sub(r"\n\n(?=    )", "\n\n\b\n", __doc__ or "")
"""The module docstring with `\\b` before each block of indented lines. Without `\\b`, click would join the lines."""


class CommandGroup(typer.core.TyperGroup):
    """The commands; `submit.py CONFIG` is short for `submit.py submit CONFIG`.

    The module of a command is imported only when the command is used, because imports from a cluster's shared file
    system are slow.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is no such command."""
        if cmd_name not in COMMANDS:
            return None
        command = typer.Typer(add_completion=False, rich_markup_mode=None)
        command.command(cmd_name)(getattr(import_module(f"cli.{cmd_name}"), cmd_name))
        return typer.main.get_command(command)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert `submit` before the arguments if the first argument without a leading hyphen is not a command.

        Raises:
            UserError: if `args[0]` is probably a mistyped command.
        """
        positional = [arg for arg in args if not arg.startswith("-")]
        if positional and positional[0] not in COMMANDS:
            # after an option, the argument may be the option's value; with `resilient_parsing`, click expects no errors
            if positional[0] == args[0] and not ctx.resilient_parsing:
                _check_is_config(args[0])
            args = ["submit", *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Print no list of commands, because the help text already contains one."""


def _check_is_config(argument: str) -> None:
    """Raise UserError if `argument` is probably a mistyped command: it has only letters and hyphens, and is no file."""
    from difflib import get_close_matches

    if Path(argument).exists() or not argument.replace("-", "").isalpha():
        return
    matches = get_close_matches(argument, COMMANDS, n=1)
    hint = f"did you mean {matches[0]}?" if matches else f"the commands are {', '.join(COMMANDS)}"
    raise UserError("cli.unknown_command", f"{argument}: no such command, and no such file; {hint}")


app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help=HELP, pretty_exceptions_enable=False
)


def _print_version(is_requested: bool) -> None:
    """Print the version and exit, if the option `--version` was given."""
    if is_requested:
        print(f"sluice {VERSION}")
        raise typer.Exit()


@app.callback()
def handle_global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    """Accept options that precede the command. `--version` is handled by its callback."""


def main() -> None:
    """Run the command in `sys.argv`. For a user error or a storage error, print a message without a traceback."""
    gc.disable()  # garbage collection would take a sixth of the import time, and this process is short-lived
    try:
        app()
    except (UserError, OSError) as error:
        user_error = error if isinstance(error, UserError) else find_storage_error(error)
        if user_error is None:
            raise
        print(make_printable(format_error(user_error)), file=sys.stderr)
        sys.exit(user_error.exit_code)
