"""`plan CONFIG --measure FILE`: a run of its own that times this machine with the ranks of CONFIG's training."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cli.submit import check_submission
from pipeline.base.command import format_command
from pipeline.base.errors import ExitCode, UserError
from pipeline.config.read import load_config, parse_config
from pipeline.config.sections import Config
from pipeline.config.types import parse_time_limit
from pipeline.run.directory import Run
from slurm.submit.executor import choose_executor

_TIME = "00:30:00"
"""At most so long a job may take."""


def config_of(path: Path, overrides: Sequence[str], file: Path, machine: str | None, console: Console) -> Config:
    """The config of a run that measures as `path` trains, with a name of its own for each FILE."""
    if machine is not None and not Path(machine).is_file():
        raise UserError(f"--measure goes on with a --machine FILE that it wrote itself; {machine} is none")
    values: dict[str, Any] = load_config(path, overrides).model_dump(mode="json")
    stem, own = re.sub(r"[^A-Za-z0-9_-]", "-", file.stem)[:20], hashlib.sha256(os.fsencode(file)).hexdigest()[:6]
    values["run"]["name"] = f"{values['run']['name'][:60]}-measure-{stem}-{own}"
    values["track"] = {}  # trackers hear of trainings
    values["stages"]["measure"] = stage = dict(values["stages"]["train"])
    if parse_time_limit(stage["time"]) > parse_time_limit(_TIME):
        console.print(f"time limit {_TIME}, not stages.train.time ({stage['time']}): it takes minutes", soft_wrap=True)
        stage["time"] = _TIME
    values["measure"] = {"file": str(file), "machine": machine and str(Path(machine).absolute())}
    return parse_config(values | {"publish": None, "sweep": None}, "plan --measure")


def measure(path: Path, overrides: Sequence[str], file: Path, machine: str | None, console: Console) -> ExitCode:
    """Start it where `submit` would start the training; on Slurm as a job, else it has ended when this returns.

    `machine`: a file that was measured before, to which the step of this config is added. Raises UserError where FILE
    exists, for what cannot be measured, and where its jobs cannot be written.
    """
    if path.is_dir():
        raise UserError(f"--measure: {path} is a run; name a config, such as {path / 'config.yaml'}")
    file = file.absolute()
    if file.exists() or not file.parent.is_dir():
        raise UserError(f"--measure {file}: name a file that does not exist yet, in a folder that does")
    config = config_of(path, overrides, file, machine, console)
    chosen = choose_executor("auto")
    check_submission(config, chosen == "slurm")
    run = Run.create(config)
    console.print(f"run {run.name}: {config.stages.measure.ranks} ranks time this machine", soft_wrap=True)
    again = format_command("plan", str(path), "--machine", str(file))
    if chosen == "slurm":
        from slurm.submit.chain import submit_chain

        with run.lock_exclusively():
            submit_chain(run, console, again=True)
        console.print(f"when it is done: {again}", soft_wrap=True)
        return ExitCode.DONE
    from slurm.submit.local_runner import run_chain_locally

    code = run_chain_locally(run, console)
    if code == ExitCode.DONE:
        console.print(f"predict other layouts with it: {again}", soft_wrap=True)
    return code
