"""The stages of a run as a table: each is one row, which gives the section under `stages:` too.

Everybody who treats one stage otherwise than another asks its row (:class:`Stage`), never its name. The work is done by
the row's module; what such a module offers stands in pipeline/run/stages.py. To add a stage: write its module, add its
row to :class:`StagesConfig`.
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
    """What is particular to a stage. Its resources are the section that the row is about."""

    module: str
    """Where its work is done, as Python names modules."""
    depends_on: tuple[str, ...] = ()
    """The stages whose outputs it reads."""
    is_distributed: bool = False
    """Whether its ranks are one process group, on nodes and GPUs that `site` asks for. Else processes that know nothing
    of each other, on what `site.data_jobs` asks for, without GPUs where nobody asks for some."""
    is_array: bool = False
    """Whether its tasks are an array on Slurm, with one job behind them that does what they left, and validates."""
    is_per_point: bool = False
    """Whether each point of a sweep has its own; else all points share it."""
    is_training: bool = False
    """Whether it goes through `train.steps` on the layout of `parallel`, and leaves checkpoints: its progress is
    counted by them, its steps are in metrics.jsonl, and where jobs cannot be requeued a successor waits from the
    start."""
    section: str | None = None
    """The section of the config without which there is no such stage; null: always."""
    lock_timeout_s: float = 60.0
    """How long its job waits for another one that runs the same stage of the same run."""


class NodeRange(Section):
    """A number of nodes that may differ from one start of a job to the next."""

    min: PositiveInt
    """The fewest that the job starts with."""
    max: PositiveInt
    """The most that it takes."""

    @model_validator(mode="after")
    def _in_order(self) -> NodeRange:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


class Resources(JobRequest):
    """What a stage asks for: one process, where nothing else is said; of Slurm what `site` says, or its own keys."""

    time: TimeLimit = "01:00:00"
    """Time limit of a job (of one task of an array), as Slurm writes it."""

    @property
    def _asked(self) -> tuple[int | NodeRange, int, int]:
        """Nodes, processes on each, and tasks of an array: 1 of what the section has no key for."""
        return getattr(self, "nodes", 1), getattr(self, "tasks_per_node", 1), getattr(self, "tasks", 1)

    @property
    def min_nodes(self) -> int:
        """With fewer it does not start."""
        nodes = self._asked[0]
        return nodes.min if isinstance(nodes, NodeRange) else nodes

    @property
    def max_nodes(self) -> int:
        """It uses no more."""
        nodes = self._asked[0]
        return nodes.max if isinstance(nodes, NodeRange) else nodes

    @property
    def processes_per_node(self) -> int:
        """Processes on each node."""
        return self._asked[1]

    @property
    def array_tasks(self) -> int:
        """Tasks of its array; 1 where it is none."""
        return self._asked[2]

    @property
    def ranks(self) -> int:
        """Processes of the stage, on the most nodes, or in all tasks."""
        return self.max_nodes * self.processes_per_node * self.array_tasks


class StageResources(Resources):
    """What one stage asks for."""

    nodes: PositiveInt | NodeRange = 1
    """Nodes, or {min, max}: a job starts, and after a stop starts again, with as many of them as Slurm has and the
    layout and the batch allow. On one machine without Slurm, nodes (the most) × tasks_per_node processes start."""
    tasks_per_node: PositiveInt = 1
    """Processes per node."""


class ShardResources(Resources):
    """What the shard stage asks for."""

    tasks: PositiveInt = 1
    """Tasks that shard at the same time; the shards are the same for any number."""


class StagesConfig(Section):
    """Resources by stage."""

    prepare: Annotated[Resources, Stage("data_prep.prepare")] = Resources()
    """Tokenizer and work units."""
    shard: Annotated[ShardResources, Stage("data_prep.shard", depends_on=("prepare",), is_array=True)] = (
        ShardResources()
    )
    """Documents to shards."""
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
    """Training."""
    evaluate: Annotated[
        StageResources,
        # it may come after those of earlier checkpoints
        Stage(
            "pipeline.evaluate.evaluate_stage",
            depends_on=("train",),
            is_distributed=True,
            is_per_point=True,
            lock_timeout_s=3600.0,
        ),
    ] = StageResources()
    """Evaluation."""
    publish: Annotated[
        Resources, Stage("pipeline.publish.publish_stage", depends_on=("evaluate",), section="publish")
    ] = Resources()
    """Publishing, where there is a section `publish`."""

    def get_resources(self, stage: str) -> Resources:
        """What `stage` asks for."""
        found: Resources = getattr(self, stage)
        return found


STAGES: Mapping[str, Stage] = {
    name: next(entry for entry in field.metadata if isinstance(entry, Stage))
    for name, field in StagesConfig.model_fields.items()
}
"""The rows, in the order in which a chain runs them."""
