"""One job's supervisor: starts the ranks of a stage, watches them, and alone decides what their end means.

Ranks compute and leave with a code. From the codes, the error reports that ranks leave in the run directory and
the requests of a person, the supervisor tells why a stage ended, writes it to events.jsonl and leaves with
that cause's own exit code. Success is a matter of outputs: a stage whose ranks all left with 0 and whose outputs do
not validate has failed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

from pipeline import stages
from pipeline.checkpoint_files import newest_step
from pipeline.errors import Exit, UserError
from pipeline.run import Run
from pipeline.signals import StopFlag
from slurm.environment import Place, allocated_tasks, identify, in_allocation
from slurm.launch import Left, LocalRanks, SrunRanks
from slurm.states import call, query

POLL_S = 0.05
REQUEST_POLL_S = 0.5
REQUEUED_WAIT_S = 120.0
NO_PROGRESS = "it was stopped before it could save a new checkpoint; requeueing would loop: ask for more time"
STOP_GRACE_S = 600.0
"""How long the ranks may take to save and leave once they were asked to."""
PEERS_LEAVE_S = 5.0
"""After one rank failed, how long the others have to leave by themselves before they are killed."""


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong."""

    code: Exit
    rank: int
    host: str
    message: str


def supervise(run: Run, stage: str, flag: StopFlag) -> Exit:
    """Run one attempt of `stage`. Raises UserError where it may not start."""
    work = stages.load(stage)
    place = identify(os.environ)
    # on Slurm the run of this job before it may still be ending; here, somebody else is at work
    patience = 60.0 if in_allocation(os.environ) else 1.0
    lock = run.lock(stage, place.array[0] if place.array else None, patience)
    if lock is None:
        raise UserError(f"{stage} of {run.name} is already running ({run.holder(stage)})")
    if run.cancelled_file.exists():
        raise UserError(f"{run.name} was cancelled; to go on: python submit.py resume {run.name}")
    attempt = run.attempts(stage) + 1
    job = place.submitted_as or str(os.getpid())
    size = 1 if place.array else stages.ranks(run, stage)
    if stage == "shard" and in_allocation(os.environ):  # any number will do: the job behind an array has one task
        size = min(size, allocated_tasks(os.environ) or size)
    before = newest_step(run.checkpoints)
    run.event("started", stage, job_id=job, attempt=attempt, ranks=size, host=os.uname().nodename, pid=os.getpid())
    for report in run.stage_folder(stage).glob("error-rank-*.json"):
        report.unlink()
    started = time.monotonic()
    ranks: LocalRanks | SrunRanks
    if in_allocation(os.environ):
        per_node = getattr(getattr(run.config.stages, stage), "tasks_per_node", size)
        ranks = SrunRanks(run, stage, size, per_node, keep_open=[lock])
    else:
        ranks = LocalRanks(run, stage, size, keep_open=[lock])
    try:
        ranks.start()
        code, facts = _one_attempt(run, stage, ranks, flag)
    finally:
        ranks.kill()  # none is left, unless something failed here
        run.stop_file.unlink(missing_ok=True)  # honoured, or too late: what is started next need not stop again
    # a task of an array does its part only; the job behind the array validates the whole
    if code == Exit.DONE and not place.array and (reason := work.missing(run)) is not None:
        code, facts = Exit.CRASHED, {"cause": "outputs", "message": f"all ranks left with 0, but {reason}"}
    facts["seconds"] = round(time.monotonic() - started, 3)
    event = {Exit.DONE: "done", Exit.STOPPED: "stopped"}.get(code, "failed")
    if code == Exit.STOPPED and run.cancelled_file.exists():
        event = "cancelled"
    if event == "failed":
        print(f"{stage} failed: {facts['message']}", file=sys.stderr, flush=True)
    run.event(event, stage, job_id=job, attempt=attempt, exit_code=int(code), **facts)
    os.close(lock)
    if event == "stopped" and facts["cause"] == "signal" and in_allocation(os.environ):
        code = _requeue(run, stage, place, newest_step(run.checkpoints) > before, flag)
    return code


def _requeue(run: Run, stage: str, place: Place, progress: bool, flag: StopFlag) -> Exit:
    """Slurm stopped the ranks (preemption, time limit): put this job back into the queue, and wait for the end.

    A job that ends by itself inside its grace period is not requeued by Slurm, and an exit would fail what waits
    for it. An attempt without a new checkpoint is the last one: it would loop.
    """
    job = place.job_id or ""
    if stage == "train" and not progress:
        run.event("failed", stage, job_id=job, exit_code=int(Exit.STOPPED), cause="no progress", message=NO_PROGRESS)
        return Exit.STOPPED
    state = query([job.split("_")[0]])[job.split("_")[0]].state
    if state in ("CANCELLED", "COMPLETING") or call("scontrol", "requeue", job) is None:
        return Exit.STOPPED
    run.event("requeued", stage, job_id=job)
    deadline, signals = time.monotonic() + REQUEUED_WAIT_S, flag.count
    while flag.count == signals and time.monotonic() < deadline:  # Slurm ends this run of the job with TERM
        time.sleep(POLL_S)
    return Exit.STOPPED


def _one_attempt(run: Run, stage: str, ranks: LocalRanks | SrunRanks, flag: StopFlag) -> tuple[Exit, dict[str, Any]]:
    """Wait for all ranks; the verdict and its facts."""
    gone: list[Left] = []
    deadline: float | None = None
    stop_deadline = math.inf
    asked: str | None = None
    next_look = 0.0
    first: list[Left] = []
    while ranks.running:
        clock = time.monotonic()
        if asked is None and clock >= next_look:
            next_look = clock + REQUEST_POLL_S
            asked = flag.reason or _request(run)
            if asked is not None:
                ranks.send(signal.SIGTERM)
                stop_deadline = clock + STOP_GRACE_S
                print(f"stopping ({asked}): the ranks save at their next step boundary", flush=True)
        gone += (left := ranks.poll())
        bad = [item for item in left if item.code not in (Exit.DONE, Exit.STOPPED)]
        if bad and not first:
            first, deadline = bad, clock + PEERS_LEAVE_S
        if deadline is not None and clock >= deadline:
            ranks.kill()
        if not first and clock >= stop_deadline:
            ranks.kill()
            message = f"the ranks were asked to stop and had not left after {STOP_GRACE_S:.0f} s; they were killed"
            return Exit.HANG, {"cause": "hang", "message": message}
        time.sleep(POLL_S)
    if asked is not None and any(left.code == -signal.SIGTERM for left in first):
        return Exit.STOPPED, {"cause": asked}  # stopped in its first milliseconds, before it could listen
    if first:
        failure = find_failure(run, stage, first)
        facts = {"cause": failure.code.name.lower(), "rank": failure.rank, "host": failure.host}
        return failure.code, {**facts, "message": failure.message}
    if any(left.code == Exit.STOPPED for left in gone):
        return Exit.STOPPED, {"cause": asked or "signal"}
    return Exit.DONE, {}


def _request(run: Run) -> str | None:
    """A person's request in the run directory."""
    if run.cancelled_file.exists():
        return "cancelled"
    return "stop file" if run.stop_file.exists() else None


def find_failure(run: Run, stage: str, first: list[Left]) -> Failure:
    """What failed first, among the ranks that were `first` seen to leave badly (in one look, so maybe several).

    A rank that a signal killed writes no report; its peers report a lost connection (or abort over it): they
    are blamed last. Among reports the earliest counts.
    """
    reports = []
    for path in run.stage_folder(stage).glob("error-rank-*.json"):
        try:
            reports.append(json.loads(path.read_bytes()))
        except (OSError, ValueError):
            continue
    killed = [left for left in first if left.code < 0]
    culprits = [left for left in killed if left.code != -signal.SIGABRT]
    blamed = sorted((r for r in reports if r["code"] != Exit.PEER_LOST), key=lambda r: float(r["time"]))
    if blamed and not culprits:
        report = blamed[0]
        message = f"rank {report['rank']} on {report['host']}:\n{report['message']}"
        return Failure(Exit(report["code"]), report["rank"], report["host"], message)
    culprit = (culprits or killed or first)[0]
    host = culprit.host or os.uname().nodename
    log = run.stage_folder(stage) / f"rank-{culprit.rank}.log"
    hint = " (out of memory, or somebody's kill)" if culprit.code == -signal.SIGKILL else ""
    code = Exit(culprit.code) if culprit.code in set(Exit) else Exit.CRASHED  # it could not even write its report
    return Failure(code, culprit.rank, host, f"rank {culprit.rank} on {host} {culprit}{hint}; its log: {log}")
