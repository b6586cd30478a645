"""The stages of a run, and their sections under `stages:`.

Each stage is a field of :class:`StagesConfig`. A :class:`Stage` in the annotation of the field describes the stage.
Code that treats stages differently reads these properties, never the name of a stage. pipeline/run/stages.py defines
what the module of a stage must contain. To add a stage, write its module and add a field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt, model_validator

from pipeline.config.site import JobRequest
from pipeline.config.types import Section, TimeLimit


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
    the progress of the stage, and metrics.jsonl contains its steps. If jobs cannot be requeued, the successor job is
    submitted when the stage starts."""
    section: str | None = None
    """The section that a config must contain to have this stage; None if all configs have the stage."""
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


class StagesConfig(Section):
    """The resources of each stage."""

    prepare: Annotated[Resources, Stage("data_prep.prepare")] = Resources()
    """The stage that prepares the tokenizer and divides the source into work units."""
    shard: Annotated[ShardResources, Stage("data_prep.shard", depends_on=("prepare",), is_array=True)] = (
        ShardResources()
    )
    """The stage that converts documents to shards of tokens."""
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
    """The stage that trains the model."""
    evaluate: Annotated[
        StageResources,
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
        Resources, Stage("pipeline.publish.publish_stage", depends_on=("evaluate",), section="publish")
    ] = Resources()
    """The stage that publishes the model. A run has this stage only if its config has a section `publish`."""

    def get_resources(self, stage: str) -> Resources:
        """Return the resources of `stage`."""
        resources: Resources = getattr(self, stage)
        return resources


STAGES: Mapping[str, Stage] = {
    name: next(annotation for annotation in field.metadata if isinstance(annotation, Stage))
    for name, field in StagesConfig.model_fields.items()
}
"""The properties of each stage by its name, in the order in which a chain runs them."""
