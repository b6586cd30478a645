"""The `stages:` section of the config: the nodes, tasks and time that each stage asks for."""

from __future__ import annotations

from pydantic import PositiveInt, model_validator

from pipeline.config.types import Section, TimeLimit


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


class StageResources(Section):
    """What one stage asks for."""

    nodes: PositiveInt | NodeRange = 1
    """Nodes, or {min, max}: a job starts, and after a stop starts again, with as many of them as Slurm has and the
    layout and the batch allow. On one machine without Slurm, nodes (the most) × tasks_per_node processes start."""
    tasks_per_node: PositiveInt = 1
    """Processes per node."""
    time: TimeLimit = "01:00:00"
    """Time limit, as Slurm writes it."""

    @property
    def fewest_nodes(self) -> int:
        """With fewer it does not start."""
        return self.nodes.min if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def most_nodes(self) -> int:
        """It uses no more."""
        return self.nodes.max if isinstance(self.nodes, NodeRange) else self.nodes

    @property
    def ranks(self) -> int:
        """Processes of the stage, on the most nodes."""
        return self.most_nodes * self.tasks_per_node


class ShardResources(Section):
    """What the shard stage asks for."""

    tasks: PositiveInt = 1
    """Tasks that shard at the same time; the shards are the same for any number."""
    time: TimeLimit = "01:00:00"
    """Time limit of one task, as Slurm writes it."""

    @property
    def ranks(self) -> int:
        """Processes of the stage."""
        return self.tasks


class PrepareResources(Section):
    """What the prepare stage asks for: one process."""

    time: TimeLimit = "01:00:00"
    """Time limit, as Slurm writes it."""

    @property
    def ranks(self) -> int:
        """Processes of the stage."""
        return 1


class StagesConfig(Section):
    """Resources by stage."""

    prepare: PrepareResources = PrepareResources()
    """Tokenizer and work units."""
    shard: ShardResources = ShardResources()
    """Documents to shards."""
    train: StageResources = StageResources()
    """Training."""
    evaluate: StageResources = StageResources()
    """Evaluation."""
