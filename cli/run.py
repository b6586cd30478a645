"""`sluice run [options] -- COMMAND`: make a run with one stage that runs a command, and submit it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from cli.common import console
from cli.submit import check_submission, start_run
from pipeline.base.dist_env import is_in_allocation, read_granted_tasks
from pipeline.base.errors import UserError
from pipeline.config.read import apply_overrides, load_site, make_point_configs, parse_config
from pipeline.run.directory import Run
from slurm.query.run_jobs import uses_slurm
from slurm.submit.executor import Executor, choose_executor

STAGE = "run"
"""The name of the stage that runs the command."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="the command and its arguments")],
    name: Annotated[str, typer.Option(help="name of the run; its directory is ROOT/NAME")],
    nodes: Annotated[
        int | None, typer.Option("-N", "--nodes", help="number of nodes; default: 1, or those of the allocation")
    ] = None,
    tasks_per_node: Annotated[
        int | None,
        typer.Option(
            "--ntasks-per-node",
            help="processes per node; each gets RANK, WORLD_SIZE …; default: 1, or those of the allocation",
        ),
    ] = None,
    time: Annotated[str, typer.Option("-t", "--time", help="time limit, as for sbatch")] = "01:00:00",
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs per node")] = None,
    cpus_per_task: Annotated[int | None, typer.Option("-c", "--cpus-per-task", help="CPUs per process")] = None,
    partition: Annotated[str | None, typer.Option("-p", "--partition", help="Slurm partition")] = None,
    site: Annotated[Path | None, typer.Option(help="a site profile, such as configs/sites/mycluster.yaml")] = None,
    progress: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="files that show progress, such as 'checkpoints/*.ckpt'")
    ] = None,
    output: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="a file that must exist at the end; may be repeated")
    ] = None,
    signal: Annotated[str, typer.Option(help="signal that asks the command to save: TERM, INT, USR1, USR2")] = "TERM",
    key_values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="another key of the config, such as site.requeue=false"),
    ] = None,
    executor: Annotated[Executor, typer.Option(help="where to run: auto, slurm, allocation or local")] = "auto",
) -> None:
    """Run a command as a job that survives preemption, time limits and crashes.

    The working directory is copied into the run. Files that .sluiceignore names are not copied.
    """
    if executor in ("auto", "allocation") and is_in_allocation(os.environ):
        nodes, tasks_per_node = _fill_from_allocation(nodes, tasks_per_node)
    section = {
        "command": shlex.join(command), "nodes": nodes or 1, "tasks_per_node": tasks_per_node or 1, "time": time,
        "gpus_per_node": gpus_per_node, "cpus_per_task": cpus_per_task, "partition": partition, "progress": progress,
        "outputs": output or [], "signal": signal,
    }  # fmt: skip
    # Braces in a command from the command line are not placeholders.
    section["command"] = str(section["command"]).replace("{", "{{")
    values = {
        "run": {"name": name},
        "site": load_site(site).model_dump(mode="json") if site is not None else {},
        "stages": {STAGE: {key: value for key, value in section.items() if value is not None}},
    }
    config = parse_config(apply_overrides(values, key_values or []), "command line")
    make_point_configs(config)
    existing_run = Run(config.run.root / config.run.name)
    is_on_slurm = existing_run.config_file.exists() and uses_slurm(existing_run)
    chosen_executor = choose_executor(executor, existing_run if is_on_slurm else None)
    corrections = check_submission(config, chosen_executor == "slurm").corrections
    if corrections:
        raise UserError(
            "run.exists",
            f"{existing_run.name} exists, and runs another command or has other resources: choose another --name, or "
            f"continue it: {existing_run.resume_command}",
        )
    exists = existing_run.config_file.exists()
    if exists:
        resume = f"{existing_run.resume_command} --update-code"
        console.print(f"note: this run exists, and uses the files that it has copied; to copy them again: {resume}")
    start_run(Run.create(config), chosen_executor, is_resumed=exists)


def _fill_from_allocation(nodes: int | None, tasks_per_node: int | None) -> tuple[int | None, int | None]:
    """Return the numbers of nodes and of processes per node: those of the allocation where an argument is None.

    Raises:
        UserError: if the nodes of the allocation have different numbers of tasks.
    """
    granted = read_granted_tasks(os.environ)
    if granted is None:
        return nodes, tasks_per_node
    tasks, _ = granted
    if tasks_per_node is None and len(set(tasks)) > 1:
        raise UserError(
            "cli.uneven_allocation",
            f"the nodes of this allocation have {', '.join(map(str, tasks))} tasks, but a command has the same number "
            "of processes on each node: add --ntasks-per-node",
        )
    return nodes or len(tasks), tasks_per_node or tasks[0]
