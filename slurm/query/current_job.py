"""What Slurm says of the job that this process runs in, and what it can be asked to do with it.

`scontrol show job` is read when something ends, to tell why (facts seen on Slurm 22.05): from the first moment of a
preemption's grace period it shows a `PreemptTime`; once a job is put back into the queue (by us, by a preemption
without grace, after a node failure) `Restarts` is one more than this process was started with, and `PreemptTime` is not
shown any more; a plain `scancel` shows neither. Until the last process of a job is gone its state is COMPLETING,
whatever ended it: only
accounting tells a job that was preempted with PreemptMode=CANCEL from one that a person cancelled in its grace period,
or a time limit that came before the job's own (a reservation's end).
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from pipeline.base.errors import ExitCode
from pipeline.config.types import parse_time_limit
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
