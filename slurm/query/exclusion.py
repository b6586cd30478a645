"""The nodes that jobs avoid: those that failed the check at the start, noted in `bad_nodes.jsonl`, for some hours.

A new job gets the list by `--exclude`, one that goes back into the queue by `scontrol update` of its ExcNodeList: also
an empty one, for a node whose time is over comes back. What a person excludes (`site.sbatch.exclude`, or a script's own
option) stays in the list. The list never takes so many nodes that too few are left to start on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeline.base.dist_env import expand_hostlist
from pipeline.base.files import append_line
from pipeline.run import lines
from pipeline.run.directory import Run
from slurm.query.current_job import JobInfo
from slurm.query.job_states import run_slurm_command

_UNUSABLE = ("down", "drain", "fail", "maint", "unknown", "error", "future", "power")


def record_bad_node(run: Run, host: str, cause: str) -> None:
    """Note a node that failed the check at the start in `bad_nodes.jsonl`. (One that died Slurm itself avoids.)"""
    append_line(run.path / "bad_nodes.jsonl", json.dumps({"time": time.time(), "host": host, "cause": cause}))


def _noted(run: Run) -> Iterator[dict[str, Any]]:
    return lines.read(run.path / "bad_nodes.jsonl", lines.bad_node)


def select_bad_nodes(
    runs: Sequence[Run], now: float, nodes: dict[str, bool], taken: Iterable[str], fewest: int
) -> list[str]:
    """The nodes to avoid: those of the last `exclude_hours`, at most `exclude_at_most`, the newest ones.

    `nodes`: the partition's, and whether each can be used now; others are not named, for Slurm would refuse the list.
    `taken`: those that a person excludes. `fewest`: how many the job needs, which are always left.
    """
    limits = runs[0].config.recovery
    entries = sorted((e for run in runs for e in _noted(run)), key=lambda e: -e["time"])
    fresh = [_short(e["host"], nodes) for e in entries if now - e["time"] < limits.exclude_hours * 3600]
    usable = {node for node, can in nodes.items() if can} - set(taken)
    found: list[str] = []
    for node in [node for node in dict.fromkeys(fresh) if node in nodes][: limits.exclude_at_most]:
        if node not in usable or len(usable) > fewest:
            found.append(node)
            usable.discard(node)
    return found


def excluded_nodes_at_submission(runs: Sequence[Run], stage: str) -> str | None:
    """The `--exclude` of a new job for `stage` of these runs; None where there is none."""
    site = runs[0].config.resolve_site(stage)
    own = str(site.sbatch.get("exclude") or "")
    found: list[str] = []
    if "/" not in own and any((run.path / "bad_nodes.jsonl").exists() for run in runs):  # else a file with names
        taken = expand_hostlist(own) if own else []
        found = select_bad_nodes(runs, time.time(), _nodes(site.partition), taken, _fewest(runs[0], stage))
    return ",".join(filter(None, [own, *found])) or None


def excluded_nodes_at_requeue(run: Run, stage: str, facts: JobInfo) -> str | None:
    """What a job's ExcNodeList must become before it runs again, maybe ""; None where it may stay as it is."""
    now, noted = expand_hostlist(facts.excluded_nodes) if facts.excluded_nodes else [], list(_noted(run))
    if not noted or not (nodes := _nodes(facts.partition)):  # Slurm is silent
        return None
    ours = {_short(e["host"], nodes) for e in noted}
    own = str(run.config.resolve_site(stage).sbatch.get("exclude") or "")
    named = expand_hostlist(own) if own and "/" not in own else []
    kept = list(dict.fromkeys([*named, *(node for node in now if node not in ours)]))
    wanted = kept + select_bad_nodes([run], time.time(), nodes, kept, _fewest(run, stage))
    return None if set(wanted) == set(now) else ",".join(dict.fromkeys(wanted))


def _nodes(partition: str | None) -> dict[str, bool]:
    """The nodes of a partition (None: the default one), and whether jobs can start on them; none if Slurm is silent."""
    command = ["sinfo", "-h", "-N", *(["-p", partition] if partition else []), "-o", "%N|%T|%P"]
    lines = [line.split("|") for line in (run_slurm_command(*command) or "").splitlines()]
    return {
        name: not state.endswith("*") and not state.startswith(_UNUSABLE)
        for name, state, which in lines
        if partition or which.endswith("*")
    }


def _short(host: str, nodes: dict[str, bool]) -> str:
    """Slurm's name of a host, which may call itself by a longer one."""
    return host if host in nodes else host.partition(".")[0]


def _fewest(run: Run, stage: str) -> int:
    return run.config.stages.get_resources(stage).min_nodes
