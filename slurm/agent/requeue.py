"""Requeue the job if the node of its supervisor has failed.

If a node of a job with `--no-kill` fails, Slurm does not end the job, even if the batch script ran on this node (seen
on Slurm 22.05). Without its supervisor, the job would do nothing until its time limit. The agents on the other nodes
therefore requeue it.
"""

from __future__ import annotations

import os
import time

from pipeline.base.dist_env import read_allocated_hosts, read_rank_info
from pipeline.run import stages
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from slurm.query.current_job import find_failed_nodes, find_unreachable_nodes, read_job_info, requeue_job

_PATIENCE_S = 3600.0
"""How long to try. Slurm notices a failed node after SlurmdTimeout (300 s by default), and may not respond at once."""
_TURN_S = 10.0
"""The pause between two attempts, and between the turns of two agents. Usually, the first agent requeues the job, and
Slurm ends the others."""


def requeue_after_loss_of_supervisor(run: Run, stage: str, node: int) -> None:
    """Requeue this job if it has lost the node of its supervisor: this agent cannot connect, and Slurm shows a failure.

    Nothing happens if the node accepts connections. The supervisor has then ended for another reason, and Slurm ends
    the job.

    Args:
        run: the run.
        stage: the stage.
        node: the index of this agent's node in the job.
    """
    nodes = read_allocated_hosts(os.environ)
    if not nodes or not stages.continues_without_node(run.config, stage):
        return
    rank_info = read_rank_info(os.environ)
    job_id = rank_info.job_id or ""
    supervisor_node = nodes[0]  # Slurm runs the batch script on the first node.
    deadline = time.monotonic() + _PATIENCE_S
    time.sleep(node * _TURN_S)
    while time.monotonic() < deadline:
        unreachable_nodes = find_unreachable_nodes([supervisor_node])
        if unreachable_nodes == []:
            return
        info = read_job_info(job_id)
        if info is not None and (info.state != "RUNNING" or info.restarts != rank_info.restart_count):
            return
        # Without an answer of the controller, this node may be the one that has lost its network.
        if unreachable_nodes and info is not None and find_failed_nodes(supervisor_node):
            print(
                f"{utc_timestamp()} {supervisor_node}, the node of the supervisor, has failed: requeueing", flush=True
            )
            requeue_job(job_id, rank_info.restart_count)
        time.sleep(_TURN_S)
