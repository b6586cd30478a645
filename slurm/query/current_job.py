"""What Slurm knows about the job of this process, and how to requeue it without its bad nodes.

`scontrol show job` is read when a stage ends, to find out why (seen on Slurm 22.05):

- It shows a `PreemptTime` from the start of a preemption's grace period.
- Once the job is requeued, `Restarts` is one more than at the start of this process, and `PreemptTime` is gone.
- After a plain `scancel` neither is shown.
- The state is COMPLETING until the last process is gone, whatever the cause. Only accounting then tells a preemption
  with PreemptMode=CANCEL from `scancel` in the grace period, or a limit before the job's own (end of a reservation).

- The state is COMPLETING until the last process is gone, whatever the cause. Only accounting then tells a preemption
`--exclude`, and requeued ones by `scontrol update` of their ExcNodeList, for `recovery.exclude_hours`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.base.dist_env import expand_hostlist
from pipeline.base.errors import ExitCode
from pipeline.base.files import append_line
from pipeline.config.types import parse_time_limit
from pipeline.run import lines
from pipeline.run.directory import Run
from slurm.query.job_states import parse_key_values, parse_slurm_time, run_slurm_command

CAUSE_BY_STATE = {
    "PREEMPTED": ExitCode.PREEMPTED,
    "TIMEOUT": ExitCode.TIME_LIMIT,
    "DEADLINE": ExitCode.TIME_LIMIT,
    "NODE_FAIL": ExitCode.NODE_FAILURE,
    "CANCELLED": ExitCode.CANCELLED,
    "OUT_OF_MEMORY": ExitCode.OUT_OF_MEMORY,
}
"""States in which Slurm ends jobs, as accounting has them."""


@dataclass(frozen=True)
class JobInfo:
    """One job, as the controller sees it now."""

    state: str
    """Such as RUNNING, COMPLETING, CANCELLED, PREEMPTED, TIMEOUT, NODE_FAIL."""
    restarts: int
    """How often it was put back into the queue."""
    is_preempted: bool
    """Whether a preemption has begun (or was how it ended)."""
    time_left_s: float | None
    """Seconds until its time limit ends, by the controller's clock; None without a limit, or before it has begun."""
    is_batch: bool
    """Whether it was submitted with sbatch: nothing else can be requeued."""
    start: str = ""
    """When it started, as Slurm writes it."""
    exit_code: int = 0
    """What its batch script left with, once it has."""
    partition: str = ""
    qos: str = ""
    may_requeue: bool = True
    """Whether it may be put back into the queue."""
    excluded_nodes: str = ""
    """The nodes that it may not run on, as a host list."""
    submit_time: float = 0.0
    """When it was submitted, or last put back into the queue."""


def read_job_info(job_id: str, patience_s: float = 0.5) -> JobInfo | None:
    """The facts of a job (`12`, or `12_3` for a task of an array); None where the controller does not say for so long.

    A busy one refuses now and then, and a cause would be told wrong for it.
    """
    deadline = time.monotonic() + patience_s
    while (text := run_slurm_command("scontrol", "show", "job", job_id)) is None:
        if time.monotonic() >= deadline:
            print(f"scontrol show job {job_id}: no answer", file=sys.stderr, flush=True)
            return None
        time.sleep(0.5)
    facts = parse_job_info(text)
    if facts.state == "COMPLETING":
        states = (
            run_slurm_command("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State") or ""
        ).split()  # such as CANCELLED by 0
        if states and states[0] in CAUSE_BY_STATE:  # it lags: RUNNING says nothing
            facts = replace(facts, state=states[0])
    return facts


def parse_job_info(text: str) -> JobInfo:
    """Read the output of `scontrol show job`."""
    shown = parse_key_values(text)
    left = None
    with suppress(ValueError):  # UNLIMITED
        left = float(parse_time_limit(shown.get("TimeLimit", "")) - parse_time_limit(shown.get("RunTime", "")))
    state = shown.get("JobState", "UNKNOWN")
    return JobInfo(
        state=state,
        restarts=int(shown["Restarts"]) if shown.get("Restarts", "").isdigit() else 0,
        is_preempted=state == "PREEMPTED" or shown.get("PreemptTime", "None") not in ("None", "Unknown", "(null)"),
        time_left_s=left,
        is_batch=shown.get("BatchFlag", "0") != "0",  # 2 and more: Slurm has put it back so often after it had ended
        start=shown.get("StartTime", ""),
        partition=shown.get("Partition", ""),
        qos=shown.get("QOS", ""),
        may_requeue=shown.get("Requeue") != "0",
        excluded_nodes=hosts if (hosts := shown.get("ExcNodeList", "")) != "(null)" else "",
        submit_time=parse_slurm_time(shown.get("SubmitTime", "")),
        exit_code=int(code) if (code := shown.get("ExitCode", "").split(":")[0]).isdigit() else 0,
    )


def query_accounted_state(job_id: str, start: str) -> str | None:
    """Return the state of one run of a job in accounting, such as PREEMPTED or REQUEUED; None if it has none.

    Args:
        job_id: The job, or the task of an array, that was requeued since: it has a row for each of its runs.
        start: When that run started, as Slurm writes it.
    """
    listed = run_slurm_command("sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "Start,State") or ""
    rows = (line.split("|") for line in listed.splitlines())
    states = [cells[1].split(" ")[0] for cells in rows if len(cells) == 2 and cells[0] == start]
    return states[-1] if states else None


def find_failed_nodes(nodes: str, since: str = "") -> list[str]:
    """Those of `nodes` (a host list) that the controller holds for down or that do not answer it.

    With `since` (a time as Slurm writes it) also those whose slurmd started later: they were away, and are back.
    """
    found = set()
    for line in (
        (run_slurm_command("scontrol", "show", "node", "--oneliner", nodes) if nodes else None) or ""
    ).splitlines():
        shown = parse_key_values(line)
        state, up = shown.get("State", ""), shown.get("SlurmdStartTime", "")
        if "DOWN" in state or "*" in state or "NOT_RESPONDING" in state or (since and up[:1].isdigit() and up > since):
            found.add(shown["NodeName"])
    return sorted(found)


def requeue_job(job_id: str, restarts: int, exclude: str | None = None) -> bool:
    """Put this process's own job back into the queue, to run without the nodes `exclude`; whether Slurm agreed.

    `restarts`: how often it was put back before. `exclude`: None leaves the list as it is. Slurm then ends this run of
    the job: it sends TERM, and KILL after KillWait. The TERM may reach the scontrol that asked for it before that has
    left with 0, so a failure is only believed once Slurm says that the job was not put back. In the time before KILL,
    not before, the job's list of excluded nodes can be changed.
    """
    if run_slurm_command("scontrol", "requeue", job_id) is None:
        facts = read_job_info(job_id, patience_s=4.0)
        if facts is None or facts.restarts <= restarts:
            return False
    deadline, update = time.monotonic() + 4, ("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={exclude}")
    while exclude is not None and run_slurm_command(*update) is None and time.monotonic() <= deadline:
        time.sleep(0.2)
    return True


_UNUSABLE = ("down", "drain", "fail", "maint", "unknown", "error", "future", "power")


def record_bad_node(run: Run, host: str, cause: str) -> None:
    """Note a node that failed the check at the start in `bad_nodes.jsonl`. (One that died Slurm itself avoids.)"""
    append_line(run.path / "bad_nodes.jsonl", json.dumps({"time": time.time(), "host": host, "cause": cause}))


def _noted(run: Run) -> Iterator[dict[str, Any]]:
    return lines.read_valid_lines(run.path / "bad_nodes.jsonl", lines.is_bad_node)


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
