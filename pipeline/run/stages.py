"""Stage modules: the interface between a stage's code and the rest of Sluice.

The table of stages (pipeline/config/stages.py) names the module of each stage. Importing a stage module must not load
torch, numpy or h5py, because commands on the login node call its `describe_missing_outputs` and `progress`. Slow
imports belong inside `run_stage`.

A stage is done when its outputs validate, never because a job exited with 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.signals import StopFlag
from pipeline.config.sections import Config
from pipeline.config.stages import Stage
from pipeline.parallel.mesh import count_usable_nodes
from pipeline.run.directory import Run


@dataclass(frozen=True)
class Progress:
    """How much of its work a stage has done."""

    description: str
    """The progress as a short phrase, such as `120/200 steps`."""
    completed: int = 0
    """Number of complete work units or steps."""
    total: int = 0
    """Number of work units or steps in total; 0 if the stage counts neither."""
    running_description: str = "running"
    """The phrase to show while the stage runs."""
    loss_description: str = ""
    """The loss of the last step as text; "" if there is none."""
    remaining_s: float | None = None
    """Estimated seconds until the stage is done, at the speed of its last step; None if unknown."""


class StageModule(Protocol):
    """The functions of a stage's module.

    A module may also define these optional functions. Use the functions of this file to call them.

    - `describe_missing_outputs_quickly(run) -> str | None`: a cheap version of `describe_missing_outputs` for commands
      that only show a run. This version opens few files.
    - `missing_inputs(run) -> str | None`: which input file is missing for a stage that has not started, and what to do.
    - `resume_note(run) -> str | None`: what a user should know before the stage continues from existing outputs.
    - `describe_saved_progress(run) -> str`: a string that changes whenever the stage makes progress that a later
      attempt does not have to repeat. By default, the description of `progress` is used.
    - `check_inputs(run) -> None`: raise UserError for inputs that `run_stage` would reject. The run may not exist yet.
    """

    def describe_missing_outputs(self, run: Run) -> str | None:
        """Return why the stage is not done; None if its outputs validate.

        This method checks the sizes of files. The code that reads the files verifies the hashes.
        """

    def progress(self, run: Run) -> Progress:
        """Return how much of its work the stage has done."""

    def run_stage(self, run: Run, rank_info: RankInfo, options: Mapping[str, str], flag: StopFlag) -> ExitCode:
        """Do the work of one rank of the stage and return the exit code of the rank. Return soon after `flag` is set.

        Args:
            run: the run.
            rank_info: the rank.
            options: further options of `python -m pipeline`, by name: `step`, the step of the checkpoint to evaluate.
            flag: set if the rank should stop.
        """


def load_stage_module(run: Run, stage: str) -> StageModule:
    """Import the module of a stage of a run. Raises UserError if there is no such stage."""
    definition = run.config.get_stage(stage)
    module = importlib.import_module(definition.module)
    # All stages with a command share a module, so their functions are methods of an object that knows the stage.
    return cast(StageModule, module if definition.command is None else module.make_stage_module(stage))


def describe_missing_outputs_quickly(run: Run, stage: str) -> str | None:
    """Return why the stage is not done; None if it seems to be done.

    The result comes from the cheap check of the stage, or from `describe_missing_outputs` if there is no cheap check.
    """
    module = load_stage_module(run, stage)
    check = getattr(module, "describe_missing_outputs_quickly", module.describe_missing_outputs)
    reason: str | None = check(run)
    return reason


def missing_inputs(run: Run, stage: str) -> str | None:
    """Return which input file of the stage is missing, and what to do.

    Returns None if all input files exist or the stage does not check them.
    """
    check = getattr(load_stage_module(run, stage), "missing_inputs", None)
    reason: str | None = check(run) if check is not None else None
    return reason


def check_stage_inputs(run: Run, done_stages: Container[str] | None = None) -> None:
    """Raise UserError if a stage that is not done would reject its inputs. The run may not exist yet.

    Args:
        run: the run.
        done_stages: the stages that are done; None: those whose outputs exist.
    """
    for stage in list_run_stages(run):
        module = load_stage_module(run, stage)
        check = getattr(module, "check_inputs", None)
        if check is None:
            continue
        is_done = module.describe_missing_outputs(run) is None if done_stages is None else stage in done_stages
        if not is_done:
            check(run)


def list_resume_notes(run: Run) -> list[str]:
    """Return what a user should know before continuing the run, at most one note for each stage."""
    checks = [getattr(load_stage_module(run, stage), "resume_note", None) for stage in list_run_stages(run)]
    notes = [check(run) for check in checks if check is not None]
    return [note for note in notes if note]


def list_run_stages(run: Run) -> dict[str, Stage]:
    """Return the stages of this run by name. For a sweep, these are only the stages that its points share."""
    return {
        stage: definition
        for stage, definition in run.config.active_stages.items()
        if run.config.sweep is None or not definition.is_per_point
    }


def list_point_stages(run: Run) -> dict[str, Stage]:
    """Return the stages that each point of a sweep has, by name.

    A trial of a search that does not train to the last step has only the train stage.

    Args:
        run: the run of the sweep, or a point.
    """
    pauses = run.pause_step is not None
    return {
        stage: definition
        for stage, definition in run.config.active_stages.items()
        if definition.is_per_point and (definition.is_training or not pauses)
    }


def count_ranks(run: Run, stage: str, granted_nodes: int | None = None) -> int:
    """Return the number of ranks to start for a stage.

    Args:
        run: the run.
        stage: the stage.
        granted_nodes: the number of nodes in the allocation; None if it is unknown. The largest number of nodes in the
            config is then used. For a stage that is not distributed, this argument is ignored.
    """
    resources = run.config.stages.get_resources(stage)
    definition = run.config.get_stage(stage)
    if granted_nodes is None or not definition.is_distributed:
        return resources.ranks
    if definition.is_training:
        nodes = count_usable_nodes(run.config, granted_nodes)
    else:
        nodes = max(resources.min_nodes, min(granted_nodes, resources.max_nodes))
    return nodes * resources.processes_per_node


def uses_agents(config: Config, stage: str) -> bool:
    """Return True if node agents start the ranks of a stage (slurm/agent).

    Agents start the ranks of distributed stages, except MPI ranks, which `mpirun` or `srun --mpi` must start.
    """
    return config.get_stage(stage).is_distributed and not config.uses_mpi(stage) and config.recovery.in_place


def continues_without_node(config: Config, stage: str) -> bool:
    """Return True if a job of a stage may continue after one of its nodes has failed.

    If the site forbids requeueing, the job must end with its first node, because only then can its successor start. In
    a container, the agents cannot requeue a job whose supervisor has failed, because images usually lack `scontrol`.
    """
    resources = config.stages.get_resources(stage)
    has_other_nodes = resources.min_nodes < resources.max_requested_nodes
    can_requeue = config.site.requeue and config.site.container is None
    return has_other_nodes and can_requeue and uses_agents(config, stage)


def get_array_task(run: Run, stage: str, rank_info: RankInfo) -> int | None:
    """Return the index of the array task in which a rank runs; None if the stage or its job is not an array."""
    return rank_info.array[0] if run.config.get_stage(stage).is_array and rank_info.array else None
