"""The stages of a run, and their sections under `stages:`.

Each stage is a field of :class:`StagesConfig` with a :class:`Stage` that describes it. Code that treats stages
differently reads these properties, never the name of a stage. The module of a stage does its work;
pipeline/run/stages.py defines what the module must contain. To add a stage, write its module and add its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import PositiveInt, model_validator

from pipeline.config.site import JobRequest
from pipeline.config.types import Section, TimeLimit


@dataclass(frozen=True)
class Stage:
    """The properties of a stage, except its resources, which are a section of the config."""

    module: str
    """The Python module that does its work."""
    depends_on: tuple[str, ...] = ()
    """The stages whose outputs it reads."""
    is_distributed: bool = False
    """Whether its ranks are one process group on the nodes and GPUs that `site` requests. Otherwise they are
    independent processes on the resources of `site.data_jobs`, by default without GPUs."""
    is_array: bool = False
    """Whether its tasks are a Slurm job array. A job after the array does the work that the tasks have left undone, and
    validates the outputs."""
    is_per_point: bool = False
    """Whether each point of a sweep runs the stage. Otherwise it runs once for all points."""
    is_training: bool = False
    """Whether the stage performs `train.steps` on the layout of `parallel` and saves checkpoints. The checkpoints show
    its progress, and its steps are in metrics.jsonl. If jobs cannot be requeued, its successor job is submitted at the
    start."""
    section: str | None = None
    """The section that a config must contain to have this stage; None if all configs have the stage."""
    lock_timeout_s: float = 60.0
    """How many seconds its job waits for another job that runs the same stage of the same run."""


class NodeRange(Section):
    """A number of nodes that may differ between the starts of a job."""

    min: PositiveInt
    """Smallest number of nodes with which the job starts."""
    max: PositiveInt
    """Largest number of nodes that the job uses."""

    @model_validator(mode="after")
    def _check_order(self) -> NodeRange:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Resources(JobRequest):
    """The resources of a stage. By default it has one process. Its Slurm options are those of `site`, overridden by its
    own keys."""

    time: TimeLimit = "01:00:00"
    """Time limit of a job, or of one Slurm array task, in the syntax of Slurm."""

    @property
    def _node_range(self) -> NodeRange:
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
    """Number of nodes, or {min, max}. At each start, the job uses as many nodes as Slurm has and the layout and the
    batch allow. On one machine without Slurm, (largest number of nodes) × tasks_per_node processes start."""
    tasks_per_node: PositiveInt = 1
    """Number of processes per node."""


class ShardResources(Resources):
    """The resources of the shard stage."""

    tasks: PositiveInt = 1
    """Number of Slurm array tasks that shard in parallel. The shards do not depend on it."""


class StagesConfig(Section):
    """The resources of each stage."""

    prepare: Annotated[Resources, Stage("data_prep.prepare")] = Resources()
    """Prepares the tokenizer and divides the source into work units."""
    shard: Annotated[ShardResources, Stage("data_prep.shard", depends_on=("prepare",), is_array=True)] = (
        ShardResources()
    )
    """Converts documents to shards of tokens."""
    train: Annotated[
        StageResources,
        Stage(
            "pipeline.train.train_stage",
            depends_on=("shard",),
            is_distributed=True,
            is_per_point=True,
            is_training=True,
        ),
    ] = StageResources()
    """Trains the model."""
    evaluate: Annotated[
        StageResources,
        # its lock timeout is long, because it may have to wait for the evaluation of an earlier checkpoint
        Stage(
            "pipeline.evaluate.evaluate_stage",
            depends_on=("train",),
            is_distributed=True,
            is_per_point=True,
            lock_timeout_s=3600.0,
        ),
    ] = StageResources()
    """Evaluates checkpoints on the held-out data."""
    publish: Annotated[
        Resources, Stage("pipeline.publish.publish_stage", depends_on=("evaluate",), section="publish")
    ] = Resources()
    """Publishes the model, if the config has a section `publish`."""

    def get_resources(self, stage: str) -> Resources:
        """Return the resources of `stage`."""
        resources: Resources = getattr(self, stage)
        return resources


STAGES: Mapping[str, Stage] = {
    name: next(entry for entry in field.metadata if isinstance(entry, Stage))
    for name, field in StagesConfig.model_fields.items()
}
"""The properties of each stage by its name, in the order in which a chain runs them."""
