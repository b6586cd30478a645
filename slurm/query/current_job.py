"""Query the state of this process's job, requeue the job, and exclude bad nodes from jobs.

When a stage ends, the output of `scontrol show job` shows the cause (seen on Slurm 22.05):

- From the start of a preemption's grace period, the output contains `PreemptTime`.
- Once the job is requeued, `Restarts` is one more than at the start of this process, and `PreemptTime` is gone.
- After a plain `scancel`, there is no `PreemptTime`, and `Restarts` is unchanged.
- The state is COMPLETING until the last process has exited, whatever the cause. Only accounting then distinguishes a
  preemption with PreemptMode=CANCEL from `scancel` in the grace period. Accounting also shows TIMEOUT if the job ended
  before its own time limit, for example at the end of a reservation.

Nodes that failed are recorded in `bad_nodes.jsonl` of the run. For `recovery.exclude_hours`, new jobs exclude these
nodes by `--exclude`, and requeued jobs by `scontrol update` of their ExcNodeList.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.base.dist_env import expand_hostlist
from pipeline.base.errors import ExitCode
from pipeline.base.files import append_line
from pipeline.config.types import parse_time_limit
from pipeline.run.directory import Run
from pipeline.run.lines import has_fields, is_number, is_text, read_valid_lines
from slurm.query.slurm_commands import parse_key_values, parse_slurm_time, read_slurm_config, run_slurm_command

CAUSE_BY_STATE = {
    "PREEMPTED": ExitCode.PREEMPTED,
    "TIMEOUT": ExitCode.TIME_LIMIT,
    "DEADLINE": ExitCode.TIME_LIMIT,
    "NODE_FAIL": ExitCode.NODE_FAILURE,
    "CANCELLED": ExitCode.CANCELLED,
    "OUT_OF_MEMORY": ExitCode.OUT_OF_MEMORY,
}
"""Cause of a stop, by the final state of the job in accounting."""
UNUSABLE_NODE_STATES = ("down", "drain", "fail", "maint", "unknown", "error", "future", "power")
"""Prefixes of the states of nodes on which no job can start (sinfo(1), NODE STATE CODES)."""
_REQUEUE_TIMEOUT_S = 4.0
"""How long to repeat a failing command while this process requeues its job. Slurm kills this process after KillWait (30
seconds by default)."""
_CONNECTION_TRIAL_S = 3.0
"""How long to try to connect to a daemon."""


@dataclass(frozen=True)
class JobInfo:
    """The state of one job, as the controller shows it."""

    state: str
    """Such as RUNNING, COMPLETING, CANCELLED, PREEMPTED, TIMEOUT, NODE_FAIL."""
    restarts: int
    """How often the job was requeued."""
    is_preempted: bool
    """Whether a preemption of the job has started, or has ended the job."""
    time_left_s: float | None
    """Seconds until the time limit, by the controller's clock. None if there is no limit or the job has not started."""
    is_batch: bool
    """Whether the job was submitted with sbatch. Only batch jobs can be requeued."""
    start: str = ""
    """When the job last started, as Slurm writes times."""
    exit_code: int = 0
    """The exit code of the batch script; 0 before the script exits."""
    partition: str = ""
    qos: str = ""
    may_requeue: bool = True
    """Whether the job may be requeued (sbatch --requeue)."""
    excluded_nodes: str = ""
    """The nodes on which the job may not run, as a host list."""
    submit_time: float = 0.0
    """When the job was submitted or last requeued, in seconds since 1970."""


def read_job_info(job_id: str, timeout_s: float = 0.5) -> JobInfo | None:
    """Return what the controller shows about a job.

    A busy controller refuses some queries, so a failed query is repeated for `timeout_s` seconds. Without a response,
    the supervisor could report a wrong cause for a stop. While the job is COMPLETING, its state is replaced by the
    final state in accounting, if there is one.

    Args:
        job_id: the id of a job (`12`) or of a task of an array (`12_3`).
        timeout_s: how long to repeat a query that fails.

    Returns:
        The state of the job; None if no query succeeds in time.
    """
    deadline = time.monotonic() + timeout_s
    while (output := run_slurm_command("scontrol", "show", "job", job_id)) is None:
        if time.monotonic() >= deadline:
            print(f"scontrol show job {job_id}: no response", file=sys.stderr, flush=True)
            return None
        time.sleep(0.5)
    info = parse_job_info(output)
    if info.state == "COMPLETING":
        # sacct prints, for example, `CANCELLED by 0`; a state such as RUNNING is ignored, because accounting lags
        states = (run_slurm_command("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State") or "").split()
        if states and states[0] in CAUSE_BY_STATE:
            info = replace(info, state=states[0])
    return info


def parse_job_info(output: str) -> JobInfo:
    """Parse the output of `scontrol show job`."""
    fields = parse_key_values(output)
    time_left_s = None
    with suppress(ValueError):  # TimeLimit may be UNLIMITED
        time_left_s = float(parse_time_limit(fields.get("TimeLimit", "")) - parse_time_limit(fields.get("RunTime", "")))
    state = fields.get("JobState", "UNKNOWN")
    exit_code = fields.get("ExitCode", "").split(":")[0]  # Slurm prints CODE:SIGNAL
    excluded_nodes = fields.get("ExcNodeList", "")
    return JobInfo(
        state=state,
        restarts=int(fields["Restarts"]) if fields.get("Restarts", "").isdigit() else 0,
        is_preempted=state == "PREEMPTED" or fields.get("PreemptTime", "None") not in ("None", "Unknown", "(null)"),
        time_left_s=time_left_s,
        is_batch=fields.get("BatchFlag", "0") != "0",  # may be more than 1, after Slurm has requeued a job that ended
        start=fields.get("StartTime", ""),
        partition=fields.get("Partition", ""),
        qos=fields.get("QOS", ""),
        may_requeue=fields.get("Requeue") != "0",
        excluded_nodes=excluded_nodes if excluded_nodes != "(null)" else "",
        submit_time=parse_slurm_time(fields.get("SubmitTime", "")),
        exit_code=int(exit_code) if exit_code.isdigit() else 0,
    )


def query_accounted_state(job_id: str, start: str) -> str | None:
    """Return the state in which one execution of a job ended, such as PREEMPTED or REQUEUED.

    Args:
        job_id: a job, or a task of an array, that has been requeued. Accounting has one row for each execution.
        start: when the execution started, as Slurm writes times.

    Returns:
        The state in accounting; None if accounting has no execution with this start.
    """
    output = run_slurm_command("sacct", "-n", "-P", "-X", "-D", "-j", job_id, "-o", "Start,State") or ""
    rows = (line.split("|") for line in output.splitlines())
    states = [cells[1].split(" ")[0] for cells in rows if len(cells) == 2 and cells[0] == start]
    return states[-1] if states else None


def find_failed_nodes(nodes: str, since: str = "") -> list[str]:
    """Return the nodes that are down or do not respond to the controller; [] if the controller does not respond.

    Args:
        nodes: the nodes to check, as a host list; "" for none.
        since: a time as Slurm writes times; "" for none. If given, the result also contains nodes on which slurmd
            started after `since`: these nodes have failed and are up again.
    """
    failed = set()
    output = run_slurm_command("scontrol", "show", "node", "--oneliner", nodes) if nodes else None
    for line in (output or "").splitlines():
        fields = parse_key_values(line)
        state = fields.get("State", "")
        slurmd_start = fields.get("SlurmdStartTime", "")
        is_down = "DOWN" in state or "*" in state or "NOT_RESPONDING" in state  # `*` means that it does not respond
        # the later of two times in Slurm's format is also the greater text; without a time, Slurm prints a word
        has_restarted = bool(since) and slurmd_start[:1].isdigit() and slurmd_start > since
        if is_down or has_restarted:
            failed.add(fields["NodeName"])
    return sorted(failed)


def find_unreachable_nodes(nodes: Sequence[str]) -> list[str] | None:
    """Return the nodes whose slurmd accepts no connection; None if the controller does not respond.

    srun connects to slurmd in the same way. slurmd is usually started again within seconds if it crashes.
    """
    if not nodes:
        return []
    output = run_slurm_command("scontrol", "show", "node", "--oneliner", ",".join(nodes))
    if not output:
        return None
    addresses = {}
    for line in output.splitlines():
        fields = parse_key_values(line)
        # A node shows its port only if it differs from SlurmdPort, which may be a range such as 6818-6820.
        port = fields.get("Port") or read_slurm_config().get("SlurmdPort", "").partition("-")[0]
        if (address := fields.get("NodeAddr")) and port.isdigit():
            addresses[fields["NodeName"]] = (address, int(port))
    with ThreadPoolExecutor(max_workers=len(addresses) or 1) as executor:
        are_reachable = executor.map(_accepts_connection, addresses.values())
        return [node for node, is_reachable in zip(addresses, are_reachable, strict=True) if not is_reachable]


def _accepts_connection(address: tuple[str, int]) -> bool:
    """Return True if a process listens at this address. If a connection is refused, try again for a few seconds."""
    deadline = time.monotonic() + _CONNECTION_TRIAL_S
    while True:
        try:
            socket.create_connection(address, timeout=_CONNECTION_TRIAL_S).close()
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)


def requeue_job(job_id: str, restarts: int, exclude: str | None = None) -> bool:
    """Requeue the job of this process.

    Slurm then ends all processes of the job: it sends SIGTERM, and SIGKILL after KillWait. The SIGTERM may kill
    `scontrol` before `scontrol` reports success. If `scontrol` fails, the job's number of restarts therefore decides
    whether the job was requeued. The list of excluded nodes can only be changed after the requeue, and this process has
    time for this until the SIGKILL.

    Args:
        job_id: the id of the job.
        restarts: how often the job was requeued before.
        exclude: the new list of excluded nodes; None to leave the list unchanged.

    Returns:
        Whether Slurm requeued the job. False also if Slurm does not respond.
    """
    if run_slurm_command("scontrol", "requeue", job_id) is None:
        info = read_job_info(job_id, timeout_s=_REQUEUE_TIMEOUT_S)
        if info is None or info.restarts <= restarts:
            return False
    if exclude is not None:
        deadline = time.monotonic() + _REQUEUE_TIMEOUT_S
        update = ("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={exclude}")
        while run_slurm_command(*update) is None and time.monotonic() <= deadline:
            time.sleep(0.2)
    return True


def record_bad_node(run: Run, host: str, cause: str) -> None:
    """Record a node that failed the health check at the start of a job.

    Nodes that are down need no record, because Slurm starts no jobs on them.

    Args:
        run: the run.
        host: the hostname of the node.
        cause: why the node is bad.
    """
    append_line(run.path / "bad_nodes.jsonl", json.dumps({"time": time.time(), "host": host, "cause": cause}))


def select_bad_nodes(
    runs: Sequence[Run], now: float, nodes: Mapping[str, bool], already_excluded: Iterable[str], min_nodes: int
) -> list[str]:
    """Return the bad nodes to exclude, the last recorded first.

    These are nodes that were recorded in the last `recovery.exclude_hours` hours. At most `recovery.exclude_at_most`
    nodes are returned.

    Args:
        runs: the runs with the records of bad nodes. The config of the first run is used.
        now: the current time, in seconds since 1970.
        nodes: the nodes of the partition, and whether jobs can start on them. Other nodes are not returned, because
            Slurm refuses a list that contains them.
        already_excluded: nodes that are excluded anyway.
        min_nodes: the number of nodes that the job needs. A usable node is selected only if at least this many usable
            nodes remain.
    """
    limits = runs[0].config.recovery
    records = sorted((record for run in runs for record in _read_bad_nodes(run)), key=lambda record: -record["time"])
    recent_nodes = [_node_name(r["host"], nodes) for r in records if now - r["time"] < limits.exclude_hours * 3600]
    candidates = [node for node in dict.fromkeys(recent_nodes) if node in nodes]
    usable = {node for node, is_usable in nodes.items() if is_usable} - set(already_excluded)
    selected: list[str] = []
    for node in candidates[: limits.exclude_at_most]:
        if node not in usable or len(usable) > min_nodes:
            selected.append(node)
            usable.discard(node)
    return selected


def excluded_nodes_at_submission(runs: Sequence[Run], stage: str) -> str | None:
    """Return the value of `--exclude` for a new job; None if the job excludes no nodes.

    The value contains `site.sbatch.exclude` and the bad nodes. If `site.sbatch.exclude` is a file, no bad nodes are
    added.

    Args:
        runs: the run, or the sweep points for which the job is submitted.
        stage: the stage that the job runs.
    """
    site = runs[0].config.resolve_site(stage)
    configured = str(site.sbatch.get("exclude") or "")
    bad_nodes: list[str] = []
    is_file = "/" in configured  # by the rule of sbatch(1), --exclude
    if not is_file and any((run.path / "bad_nodes.jsonl").exists() for run in runs):
        already_excluded = expand_hostlist(configured) if configured else []
        nodes = _list_nodes(site.partition)
        bad_nodes = select_bad_nodes(runs, time.time(), nodes, already_excluded, _min_nodes(runs[0], stage))
    return ",".join(filter(None, [configured, *bad_nodes])) or None


def excluded_nodes_at_requeue(run: Run, stage: str, info: JobInfo) -> str | None:
    """Return the new ExcNodeList of a job that is requeued.

    Nodes that the user excludes stay in the list. Bad nodes are removed from the list after `recovery.exclude_hours`.

    Args:
        run: the run.
        stage: the stage that the job runs.
        info: the job.

    Returns:
        The nodes, separated by commas; "" if no node is excluded any more. None if the list does not change, no bad
        node was ever recorded, or Slurm does not respond.
    """
    current = expand_hostlist(info.excluded_nodes) if info.excluded_nodes else []
    records = list(_read_bad_nodes(run))
    if not records or not (nodes := _list_nodes(info.partition)):
        return None
    recorded = {_node_name(record["host"], nodes) for record in records}
    configured = str(run.config.resolve_site(stage).sbatch.get("exclude") or "")
    is_file = "/" in configured  # by the rule of sbatch(1), --exclude
    nodes_of_user = expand_hostlist(configured) if configured and not is_file else []
    kept_nodes = list(dict.fromkeys([*nodes_of_user, *(node for node in current if node not in recorded)]))
    new_list = kept_nodes + select_bad_nodes([run], time.time(), nodes, kept_nodes, _min_nodes(run, stage))
    return None if set(new_list) == set(current) else ",".join(dict.fromkeys(new_list))


def _is_valid_record(line: Any) -> bool:
    """Return True if a parsed line of bad_nodes.jsonl is valid."""
    return has_fields(line, {"time": is_number, "host": is_text}, {})


def _read_bad_nodes(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the records of bad nodes of a run, oldest first."""
    return read_valid_lines(run.path / "bad_nodes.jsonl", _is_valid_record)


def _list_nodes(partition: str | None) -> dict[str, bool]:
    """Return the nodes of a partition, and whether jobs can start on each node. Empty if Slurm does not respond.

    If `partition` is None, these are the nodes of the default partition.
    """
    command = ["sinfo", "-h", "-N", *(["-p", partition] if partition else []), "-o", "%N|%T|%P"]
    rows = [line.split("|") for line in (run_slurm_command(*command) or "").splitlines()]
    # after a state, `*` means that the node does not respond; after a partition, that it is the default partition
    return {
        name: not state.endswith("*") and not state.startswith(UNUSABLE_NODE_STATES)
        for name, state, partition_name in rows
        if partition or partition_name.endswith("*")
    }


def _node_name(host: str, nodes: Mapping[str, bool]) -> str:
    """Return Slurm's name of a host. The hostname may be longer, such as `n1.cluster` for the node `n1`."""
    return host if host in nodes else host.partition(".")[0]


def _min_nodes(run: Run, stage: str) -> int:
    """Return the smallest number of nodes with which a stage can run."""
    return run.config.stages.get_resources(stage).min_nodes
