"""The stages of a run, and their sections under `stages:`.

There are two kinds of stages:

- The stages of the training pipeline (`prepare` to `publish`) are fields of :class:`StagesConfig`. A run has these
  stages if its config has the section `train`.
- A stage with a key `command` runs a command of the user (:class:`CommandStage`). It may have any name.

A :class:`Stage` describes each stage. Code that treats stages differently reads these properties, never the name of a
stage. pipeline/run/stages.py defines what the module of a stage must contain. To add a stage to the pipeline, write its
module and add a field.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator

from pipeline.config.site import JobRequest
from pipeline.config.types import Name, Section, TimeLimit, must_match

COMMAND_TAG = "command stage"
"""The tag of :class:`CommandStage` in the types of the fields of the pipeline's stages."""
_STAGE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,49}")
_PLACEHOLDER = re.compile(r"(?<![$\w])\{([A-Za-z_]\w*)\}|\{\{")
"""A placeholder in a command, or an escaped brace. `${NAME}` is a variable of the shell."""


def _check_pattern(pattern: str) -> str:
    """Return `pattern`. Raises ValueError if Path.glob does not accept it."""
    try:
        list(Path("/nonexistent").glob(pattern.lstrip("/")))
    except (ValueError, IndexError, NotImplementedError) as error:
        raise ValueError(f"write a path, or a pattern with * and ? ({error})") from error
    return pattern


OutputPattern = Annotated[
    str,
    AfterValidator(_check_pattern),
    must_match(re.compile(r"[^\0]*[^\0\s/][^\0]*"), "write a path, or a pattern with *"),
]


@dataclass(frozen=True)
class Stage:
    """The properties of a stage. Its resources are not included, because they are a section of the config."""

    module: str
    """The Python module that runs the stage."""
    depends_on: tuple[str, ...] = ()
    """The stages that produce the inputs of this stage."""
    is_distributed: bool = False
    """True if the processes of the stage are the ranks of one process group, on the nodes and GPUs that `site`
    requests. Otherwise they are independent processes with the resources of `site.data_jobs`, by default without
    GPUs."""
    is_array: bool = False
    """True if the stage is a Slurm job array. A job after the array does the work that the array tasks did not finish,
    and validates the outputs."""
    is_per_point: bool = False
    """True if each point of a sweep runs the stage. Otherwise the stage runs once for all points."""
    is_training: bool = False
    """True if the stage performs `train.steps` on the layout of `parallel` and saves checkpoints. The checkpoints show
    the progress of the stage. If jobs cannot be requeued, the successor job is
    submitted when the stage starts."""
    section: str = "train"
    """The section that a config must contain to have this stage. Stages with a command need no section."""
    command: CommandStage | None = None
    """The section of a stage that runs a command; None for a stage of the pipeline."""
    records_metrics: bool = False
    """True if metrics.jsonl contains the steps of the stage. At most one stage of a run has this property."""
    lock_timeout_s: float = 60.0
    """How many seconds a job of the stage waits for another job that runs the same stage of the same run."""


class NodeRange(Section):
    """A number of nodes that may change each time a job starts, and spare nodes."""

    min: PositiveInt
    """Smallest number of nodes with which the job starts."""
    max: PositiveInt
    """Largest number of nodes that the job uses."""
    spares: NonNegativeInt = 0
    """Number of nodes that the job requests in addition, if they are free when the job starts. A spare node waits until
    it replaces a node that fails."""

    @model_validator(mode="after")
    def _check_order(self) -> NodeRange:
        """Raise ValueError if the smallest number is more than the largest."""
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Resources(JobRequest):
    """The resources of a stage. By default, a stage has one process. The keys of a stage override the options in
    `site`."""

    time: TimeLimit = "01:00:00"
    """Time limit of a job, or of one Slurm array task, in the syntax of Slurm."""
    needs: list[Name] = Field(default_factory=list)
    """Stages that must be done before this stage starts; for the stages of the pipeline, in addition to those that
    produce their inputs."""

    @property
    def _node_range(self) -> NodeRange:
        """The number of nodes as a range; one node if the stage has no key `nodes`."""
        nodes = getattr(self, "nodes", 1)
        return nodes if isinstance(nodes, NodeRange) else NodeRange(min=nodes, max=nodes)

    @property
    def min_nodes(self) -> int:
        """The smallest number of nodes with which the stage starts."""
        return self._node_range.min

    @property
    def max_nodes(self) -> int:
        """The largest number of nodes that the stage uses."""
        return self._node_range.max

    @property
    def spare_nodes(self) -> int:
        """The number of nodes that the job requests in addition to those that the stage uses."""
        return self._node_range.spares

    @property
    def max_requested_nodes(self) -> int:
        """The largest number of nodes that a job of the stage requests."""
        return self.max_nodes + self.spare_nodes

    def count_available_nodes(self, granted: int, failed: int = 0) -> int:
        """Return on how many nodes ranks may run, if some nodes of the job have failed.

        As many nodes as `spare_nodes` are kept free, if the job has more than the smallest number of nodes.

        Args:
            granted: the number of nodes with which the job started.
            failed: how many of these nodes have failed.
        """
        spares = min(self.spare_nodes, max(0, granted - self.min_nodes))
        return min(granted - spares, granted - failed)

    @property
    def processes_per_node(self) -> int:
        """The number of processes on each node."""
        processes: int = getattr(self, "tasks_per_node", 1)
        return processes

    @property
    def array_tasks(self) -> int:
        """The number of Slurm array tasks; 1 if the stage is not an array."""
        tasks: int = getattr(self, "tasks", 1)
        return tasks

    @property
    def ranks(self) -> int:
        """The number of processes of the stage, on its largest number of nodes or in all array tasks."""
        return self.max_nodes * self.processes_per_node * self.array_tasks


class StageResources(Resources):
    """The resources of a distributed stage."""

    nodes: PositiveInt | NodeRange = 1
    """Number of nodes, or a range `{min, max}`. With a range, the number may change at each start: the job gets as many
    nodes as Slurm has available. It uses as many of these nodes as the layout and the global batch allow. With
    `{min, max, spares}`, the job also requests spare nodes, which replace nodes that fail. Without Slurm, (largest
    number of nodes) × `tasks_per_node` processes start on this machine."""
    tasks_per_node: PositiveInt = 1
    """Number of processes (ranks) per node."""


class ShardResources(Resources):
    """The resources of the shard stage."""

    tasks: PositiveInt = 1
    """Number of Slurm array tasks that write shards in parallel. The content of the shards does not depend on this
    number."""


def find_placeholders(command: str) -> list[str]:
    """Return the names of the parameters in a command: `["lr"]` for `python train.py --lr {lr}`."""
    return [match[1] for match in _PLACEHOLDER.finditer(command) if match[1]]


def fill_placeholders(command: str, parameters: Mapping[str, object]) -> str:
    """Return a command with the values of its parameters, quoted for the shell.

    Args:
        command: the command.
        parameters: the value of each parameter that the command contains.
    """
    return _PLACEHOLDER.sub(lambda match: shlex.quote(str(parameters[match[1]])) if match[1] else "{", command)


class CommandStage(StageResources):
    """A stage that runs a command of the user."""

    command: Annotated[str, must_match(re.compile(r"(?s)[^\0]*\S[^\0]*"), "write a shell command")]
    """Shell command (`sh -c`) of each process of the stage. Its working directory is the copy of the working directory
    from which the run was submitted. `{NAME}` is replaced by the value of `parameters.NAME`; write `{{` for `{`."""
    tasks: PositiveInt = 1
    """Number of Slurm array tasks. Each runs the command, with the number of the task in SLUICE_TASK, from 0."""
    outputs: list[OutputPattern] = Field(default_factory=list)
    """Files that exist when the stage is done, relative to the working directory of the command; may contain `*`.
    [ ]: the stage is done when the command has exited with 0."""
    progress: OutputPattern | None = None
    """Pattern of the files that show the progress of the stage, such as its checkpoints. A new or changed file is
    progress. After a failure, the command runs again only if it made progress. null: the stage is not repeated after a
    failure, but is after a preemption."""
    signal: Literal["TERM", "INT", "USR1", "USR2"] = "TERM"
    """Signal that asks the command to save and exit."""
    mpi: bool = False
    """Whether the processes are started by `mpirun` or `srun --mpi`, as ranks of an MPI program."""

    @model_validator(mode="after")
    def _check_array(self) -> CommandStage:
        """Raise ValueError if the stage is an array whose tasks have several processes, which is not possible."""
        if self.tasks > 1 and (self.max_nodes > 1 or self.tasks_per_node > 1 or self.mpi):
            raise ValueError("tasks cannot be combined with nodes, tasks_per_node and mpi: each task has one process")
        return self

    def describe(self) -> Stage:
        """Return the properties of this stage."""
        return Stage(
            "pipeline.command.command_stage",
            depends_on=tuple(self.needs),
            is_distributed=self.tasks == 1,
            is_array=self.tasks > 1,
            is_per_point=bool(find_placeholders(self.command)),
            command=self,
        )


def _choose_kind(section: Any) -> str:
    """Return the tag of the class that reads the section of a stage of the pipeline."""
    is_command = isinstance(section, CommandStage) or (isinstance(section, dict) and "command" in section)
    return COMMAND_TAG if is_command else "pipeline stage"


_Command = Annotated[CommandStage, Tag(COMMAND_TAG)]
_KIND = Discriminator(_choose_kind)


class StagesConfig(Section):
    """The resources of each stage. A stage with a key `command` runs a command, and may have any name."""

    model_config = ConfigDict(extra="allow")
    other_keys = CommandStage
    __pydantic_extra__: dict[str, CommandStage] = Field(init=False)

    prepare: Annotated[_Command | Annotated[Resources, Tag("pipeline stage")], _KIND, Stage("data_prep.prepare")] = (
        Resources()
    )
    """The stage that prepares the tokenizer and divides the source into work units."""
    shard: Annotated[
        _Command | Annotated[ShardResources, Tag("pipeline stage")],
        _KIND,
        Stage("data_prep.shard", depends_on=("prepare",), is_array=True),
    ] = ShardResources()
    """The stage that converts documents to shards of tokens."""
    train: Annotated[
        _Command | Annotated[StageResources, Tag("pipeline stage")],
        _KIND,
        Stage(
            "pipeline.train.train_stage",
            depends_on=("shard",),
            is_distributed=True,
            is_per_point=True,
            is_training=True,
            records_metrics=True,
        ),
    ] = StageResources()
    """The stage that trains the model."""
    evaluate: Annotated[
        _Command | Annotated[StageResources, Tag("pipeline stage")],
        _KIND,
        # The lock timeout is long, because the stage may have to wait for the evaluation of an earlier checkpoint.
        Stage(
            "pipeline.evaluate.evaluate_stage",
            depends_on=("train",),
            is_distributed=True,
            is_per_point=True,
            lock_timeout_s=3600.0,
        ),
    ] = StageResources()
    """The stage that evaluates checkpoints on the held-out data."""
    publish: Annotated[
        _Command | Annotated[Resources, Tag("pipeline stage")],
        _KIND,
        Stage("pipeline.publish.publish_stage", depends_on=("evaluate",), section="publish"),
    ] = Resources()
    """The stage that publishes the model. A run has this stage only if its config has a section `publish`."""

    def get_resources(self, stage: str) -> Resources:
        """Return the resources of `stage`."""
        resources: Resources = getattr(self, stage)
        return resources

    @property
    def commands(self) -> dict[str, CommandStage]:
        """The stages that run a command, by name."""
        sections = {name: getattr(self, name) for name in (*type(self).model_fields, *self.__pydantic_extra__)}
        return {name: section for name, section in sections.items() if isinstance(section, CommandStage)}

    def list_stages(self, pipeline_stages: Mapping[str, Stage]) -> dict[str, Stage]:
        """Return all stages by name, in an order in which each stage follows those that it needs.

        Stages with an unknown need, or with a cycle of needs, are left out.

        Args:
            pipeline_stages: the stages of the pipeline that the config has.
        """
        remaining: dict[str, Stage] = {}
        for name, stage in pipeline_stages.items():
            remaining[name] = replace(stage, depends_on=(*stage.depends_on, *self.get_resources(name).needs))
        commands = self.commands
        # Only one stage writes to metrics.jsonl, because each step appears once: the first that shows its progress,
        # otherwise the last.
        recording = next((name for name, section in commands.items() if section.progress), next(reversed(commands), ""))
        for name, section in commands.items():
            remaining[name] = replace(section.describe(), records_metrics=name == recording and not pipeline_stages)
        ordered: dict[str, Stage] = {}
        while ready := next((name for name in remaining if ordered.keys() >= {*remaining[name].depends_on}), None):
            stage = remaining.pop(ready)
            depends_on_points = any(ordered[name].is_per_point for name in stage.depends_on)
            ordered[ready] = replace(stage, is_per_point=True) if depends_on_points else stage
        return ordered

    @model_validator(mode="after")
    def _check_names(self) -> StagesConfig:
        """Raise ValueError if the name of a stage is not valid."""
        for name in self.__pydantic_extra__:
            if not _STAGE_NAME.fullmatch(name):
                raise ValueError(f"{name}: use letters, digits and '_' in the name of a stage (it becomes a job name)")
        return self


STAGES: Mapping[str, Stage] = {
    name: next(annotation for annotation in field.metadata if isinstance(annotation, Stage))
    for name, field in StagesConfig.model_fields.items()
}
"""The properties of each stage of the pipeline by its name, in the order in which a chain runs them."""
