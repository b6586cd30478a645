"""Which rank is on which node: checked before ranks start, against what Slurm granted.

The ranks of one tensor parallel group exchange activations twice a layer, so they must share a node. Groups are
consecutive ranks (the mesh is `pp × dp × tp`, tp innermost). That holds when the group's size divides the ranks per
node and ranks are laid out in blocks; `--distribution=cyclic` deals them out one by one and tears groups apart
without any error: training would only be slow. The same check runs on what a job would ask for (slurm/submit/sbatch.py)
and on what it got, which by hand in `salloc` or a template may be anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from pipeline.base.dist_env import read_granted_tasks
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.run.directory import Run


def assign_ranks_to_nodes(tasks: Sequence[int], distribution: str) -> list[int]:
    """The node of each rank, where node n has room for `tasks[n]` (srun(1), `--distribution`).

    block fills a node before the next, plane=N deals out N ranks to each node in turn, cyclic one.
    """
    first = re.split("[:,]", distribution.lower())[0]
    at_once = _plane(distribution) or (1 if first == "cyclic" else max(tasks, default=1))
    left, nodes = list(tasks), list[int]()
    while any(left):
        for node, room in enumerate(left):
            dealt = min(room, at_once)
            nodes += [node] * dealt
            left[node] -= dealt
    return nodes


def _plane(distribution: str) -> int | None:
    match = re.match(r"plane=(\d+)", distribution.lower())
    return int(match[1]) if match else None


def describe_placement_problem(
    stage: str, nodes: int, per_node: int, tensor: int, tasks: Sequence[int], distribution: str | None
) -> str | None:
    """Why `nodes` × `per_node` ranks in groups of `tensor`, which divides `per_node`, do not fit what was granted; None
    where they do.

    `tasks`: how many each granted node may run; `distribution` as sbatch takes it, None for the default (block).
    More nodes than wanted are no problem: srun takes the first ones.
    """
    if len(tasks) < nodes or min(tasks[:nodes]) < per_node:
        return (
            f"{stage} wants {nodes} nodes × {per_node} ranks, and Slurm granted {len(tasks)} nodes for "
            f"{', '.join(map(str, tasks))} tasks: ask with --nodes={nodes} --ntasks-per-node={per_node}, or set "
            f"stages.{stage}.nodes and stages.{stage}.tasks_per_node to what is there"
        )
    plane = _plane(distribution or "")
    if plane and per_node % plane:  # srun would fill planes where there is room: 3 and 1 ranks instead of 2 and 2
        return (
            f"--distribution={distribution} makes planes that do not divide the ranks per node ({per_node}): ask with "
            "--distribution=block (site.distribution)"
        )
    place = assign_ranks_to_nodes([per_node] * nodes, distribution or "block")
    for first in range(0, len(place), tensor):
        if len(set(place[first : first + tensor])) > 1:
            return (
                f"--distribution={distribution} puts ranks {first} to {first + tensor - 1} on several nodes, and the "
                f"ranks of a tensor parallel group (parallel.tensor={tensor}) must share one: ask with "
                "--distribution=block (site.distribution)"
            )
    return None


def find_planned_placement_problem(config: Config) -> str | None:
    """What is wrong with the placement that the training's job would ask for; None where nothing is."""
    wanted, nodes = config.stages.train, config.stages.train.max_nodes
    tasks = [wanted.tasks_per_node] * nodes
    return describe_placement_problem(
        "train", nodes, wanted.tasks_per_node, config.parallel.tensor, tasks, config.site.distribution
    )


def find_placement_problem(run: Run, stage: str, size: int) -> str | None:
    """Why this allocation does not fit `size` ranks of `stage`; None where it does, or Slurm does not say."""
    granted = read_granted_tasks(os.environ)
    if not STAGES[stage].is_distributed or granted is None:
        return None
    per_node, tensor = (
        run.config.stages.get_resources(stage).processes_per_node,
        run.config.parallel.tensor if STAGES[stage].is_training else 1,
    )
    return describe_placement_problem(stage, size // per_node, per_node, tensor, *granted)
