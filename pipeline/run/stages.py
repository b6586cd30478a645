"""Stage modules: the interface between a stage's code and the rest of Sluice.

The table of stages (pipeline/config/stages.py) names the module of each stage. Importing a stage module must not load
torch, numpy or h5py, because commands on the login node call its `describe_missing_outputs` and `progress`. Slow
imports belong inside `run_stage`.

A stage is done when its outputs validate, never because a job exited with 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.signals import StopFlag
from pipeline.config.stages import STAGES
from pipeline.parallel.mesh import count_usable_nodes
from pipeline.run.directory import Run


@dataclass(frozen=True)
class Progress:
    """How far a stage is."""

    description: str
    """The progress as a short phrase, such as `120/200 steps`."""
    completed: int = 0
    """Number of units or steps that are complete."""
    total: int = 0
    """Number of units or steps in total; 0 if the stage does not count anything."""
    running_description: str = "running"
    """The phrase to show while the stage runs."""
    loss_description: str = ""
    """The loss of the last step."""
    remaining_s: float | None = None
    """Estimated seconds until the stage is done, at the pace of its last step."""


class StageModule(Protocol):
    """The functions of a stage's module.

    A module may also define these optional functions. Use the functions of this file to call them.

    - `describe_missing_outputs_quickly(run) -> str | None`: a cheap version of `describe_missing_outputs` for commands
      that only show a run. It opens few files.
    - `missing_inputs(run) -> str | None`: for a stage that has not started, which input file is missing, and the
      remedy.
    - `resume_note(run) -> str | None`: what a user should know before the stage continues from existing outputs.
    - `check_inputs(run) -> None`: raise UserError for inputs that `run_stage` would reject. The run may not exist yet.
    """

    def describe_missing_outputs(self, run: Run) -> str | None:
        """Return why the stage is not done; None if its outputs validate.

        This checks the sizes of files. The readers of the files verify the hashes.
        """

    def progress(self, run: Run) -> Progress:
        """Return how far the stage is."""

    def run_stage(self, run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
        """Do the work of one rank of the stage and return its exit code. Return soon after `flag` is set."""


def load_stage_module(stage: str) -> StageModule:
    """Import the module of a stage. Raises UserError if there is no such stage."""
    if stage not in STAGES:
        raise UserError("cli.unknown_stage", f"{stage}: no such stage; choose one of {', '.join(STAGES)}")
    return cast(StageModule, importlib.import_module(STAGES[stage].module))


def describe_missing_outputs_quickly(run: Run, stage: str) -> str | None:
    """Return why the stage is not done, by its cheap check if it has one; None if it seems done."""
    module = load_stage_module(stage)
    check = getattr(module, "describe_missing_outputs_quickly", module.describe_missing_outputs)
    reason: str | None = check(run)
    return reason


def missing_inputs(run: Run, stage: str) -> str | None:
    """Return which input file of the stage is missing, with the remedy; None if all exist or the stage has no check."""
    check = getattr(load_stage_module(stage), "missing_inputs", None)
    reason: str | None = check(run) if check is not None else None
    return reason


def check_stage_inputs(run: Run) -> None:
    """Raise UserError if a stage that is not done would reject its inputs. The run may not exist yet."""
    for stage in list_run_stages(run):
        module = load_stage_module(stage)
        check = getattr(module, "check_inputs", None)
        if check is not None and module.describe_missing_outputs(run) is not None:
            check(run)


def list_resume_notes(run: Run) -> list[str]:
    """Return what a user should know before continuing the run: at most one note for each stage."""
    checks = [getattr(load_stage_module(stage), "resume_note", None) for stage in list_run_stages(run)]
    notes = [check(run) for check in checks if check is not None]
    return [note for note in notes if note]


def list_run_stages(run: Run) -> list[str]:
    """Return the stages of this run. For a sweep, these are only the stages that its points share."""
    return [
        stage for stage, entry in run.config.active_stages.items() if run.config.sweep is None or not entry.is_per_point
    ]


def list_point_stages() -> list[str]:
    """Return the stages that each point of a sweep has."""
    return [stage for stage, entry in STAGES.items() if entry.is_per_point]


def count_ranks(run: Run, stage: str, granted_nodes: int | None = None) -> int:
    """Return the number of ranks to start for a stage.

    Args:
        run: the run.
        stage: the stage.
        granted_nodes: the number of nodes in the allocation; None if it is unknown.
    """
    resources = run.config.stages.get_resources(stage)
    if granted_nodes is None or not STAGES[stage].is_distributed:
        return resources.ranks
    if STAGES[stage].is_training:
        nodes = count_usable_nodes(run.config, granted_nodes)
    else:
        nodes = max(resources.min_nodes, min(granted_nodes, resources.max_nodes))
    return nodes * resources.processes_per_node


def get_array_task(stage: str, rank_info: RankInfo) -> int | None:
    """Return the index of this job in the stage's job array; None if the job is not an array task of the stage."""
    return rank_info.array[0] if STAGES[stage].is_array and rank_info.array else None
