"""Choose how the ranks of a stage are started."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.supervise.agents import AgentLauncher, AgentPool
from slurm.supervise.launch import LocalLauncher, RankLauncher, SrunLauncher, create_mpi_launcher


def create_agents(
    run: Run,
    stage: str,
    rank_count: int,
    lock_fd: int,
    *,
    on_slurm: bool,
    nodes: Sequence[str],
    excluded_nodes: Sequence[str] = (),
) -> AgentPool | None:
    """Return node agents for the ranks of a stage, not started yet; None if the ranks are started without agents.

    If a job of the stage may continue without one of its nodes, all nodes of the job get an agent, up to the number
    that the config requests. Otherwise, only the nodes that the ranks need get one.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock.
        on_slurm: whether this process runs in a Slurm job that was started with sbatch or salloc.
        nodes: the nodes of the Slurm job; empty outside a job.
        excluded_nodes: those of these nodes that get no agent, because they have failed.

    Raises:
        UserError: if the container of the config section `site` cannot be used.
    """
    if not stages.uses_agents(run.config, stage):
        return None
    node_count = count_nodes(run, stage, rank_count)
    resources = run.config.stages.get_resources(stage)
    if stages.continues_without_node(run.config, stage):
        usable_count = len(set(nodes) - set(excluded_nodes))
        node_count = max(node_count, min(usable_count, resources.max_requested_nodes))
    return AgentPool(
        run, stage, node_count, resources.processes_per_node, lock_fd, on_slurm=on_slurm, excluded_nodes=excluded_nodes
    )


def create_launcher(
    run: Run,
    stage: str,
    rank_count: int,
    lock_fd: int,
    *,
    on_slurm: bool,
    task: int | None = None,
    agents: AgentPool | None = None,
    attempt: int = 1,
) -> RankLauncher:
    """Return a launcher for the ranks of a stage. Call its method `start` to start the ranks.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock.
        on_slurm: whether this process runs in a Slurm job that was started with sbatch or salloc.
        task: the index of this Slurm array task; None if the job is not part of an array. Only srun needs the index.
        agents: the node agents, if they start the ranks (:func:`create_agents`).
        attempt: the number of the attempt. Only agents need the number.

    Raises:
        UserError: if mpirun is needed and not found; or in a Slurm job, if the container of the config section `site`
            cannot be used.
    """
    if agents is not None:
        return AgentLauncher(run, stage, rank_count, agents, attempt)
    node_count = count_nodes(run, stage, rank_count)
    if run.config.uses_mpi(stage):
        return create_mpi_launcher(run, stage, rank_count, node_count, lock_fd, on_slurm)
    if on_slurm:
        return SrunLauncher(run, stage, rank_count, lock_fd, node_count=node_count, task=task)
    return LocalLauncher(run, stage, rank_count, lock_fd)


def count_nodes(run: Run, stage: str, rank_count: int) -> int:
    """Return the number of nodes for the ranks of a stage.

    The ranks of stages that are not distributed do not communicate. Such a stage runs on one node, or is an array stage
    (shard), whose ranks may run on any nodes.
    """
    ranks_per_node = run.config.stages.get_resources(stage).processes_per_node
    return math.ceil(rank_count / ranks_per_node) if run.config.get_stage(stage).is_distributed else 1
