"""How an attempt at a stage ended: from the exits and reports of its ranks, or afterwards if its supervisor died.

Ranks write reports about errors and hangs into the run directory. A rank that was killed by a signal or for its memory
writes none, and its peers report a lost connection. Therefore:

- If a rank was killed, it is to blame; otherwise the rank with the earliest report that is not about a lost peer.
- Ranks that hang report the step and phase that they are in. The one that is furthest behind is to blame. A rank
  without any report counts as even further behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.config.stages import STAGES
from pipeline.run import attempts, stages
from pipeline.run.attempts import explain_no_retry, get_budget_key, get_end_event
from pipeline.run.directory import Run
from pipeline.run.events import (
    AttemptEvent,
    Damaged,
    EndEvent,
    HandedOver,
    Requeued,
    RestartedFromScratch,
    RetryEvent,
    Saved,
    StageState,
    Started,
    Stopping,
)
from pipeline.run.failure import GPU_FAILURE_PATTERN
from slurm.query import preemption
from slurm.query.current_job import CAUSE_BY_STATE, read_job_info
from slurm.query.job_states import UNKNOWN, RecordedJob, query_job_states
from slurm.query.run_jobs import events_since_submission, read_recorded_job
from slurm.supervise.launch import RankExit
from slurm.supervise.succession import find_predecessor


@dataclass
class AttemptEnd:
    """How an attempt ended."""

    cause: ExitCode
    stop_reason: str | None = None
    """The request or the signal that stopped it; None if nothing did."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Further fields of its end event."""


# ---- reports and logs of the ranks


def list_reports(run: Run, stage: str, kind: str, task: int | None = None) -> list[Path]:
    """Return the reports of the ranks.

    Args:
        run: the run.
        stage: the stage.
        kind: `error`, `hang` or `*`.
        task: the index of a task of the stage's job array, to leave out the reports of the other tasks.
    """
    return list(run.stage_dir(stage).glob(f"{kind}-rank-{'*' if task is None else task}.json"))


def _read_reports(run: Run, stage: str, kind: str, task: int | None = None) -> list[dict[str, Any]]:
    reports = []
    for path in list_reports(run, stage, kind, task):
        with suppress(OSError, ValueError):
            reports.append(json.loads(path.read_bytes()))
    return reports


def get_rank_log(run: Run, stage: str, rank: int) -> Path:
    """Return the file with a rank's output of all attempts. `rank`: its number, or that of its task of a job array."""
    return run.stage_dir(stage) / f"rank-{rank}.log"


def measure_log_sizes(run: Run, stage: str) -> dict[Path, int]:
    """Return the sizes of the ranks' logs in bytes. The output of the next attempt starts there."""
    return {path: path.stat().st_size for path in run.stage_dir(stage).glob("rank-*.log")}


def _find_gpu_failure(log: Path, start: int) -> str | None:
    """Return the first line after byte `start` that reports a failed GPU. NCCL's thread aborts without a report."""
    with suppress(OSError), open(log, "rb") as file:
        file.seek(start)
        for line in file:
            if GPU_FAILURE_PATTERN.search(text := line.decode(errors="replace")):
                return text.strip()
    return None


def keep_user_frames(run: Run, message: str) -> str:
    """Remove all frames of a traceback except those of the user's own module, if it has any. Logs keep all frames."""
    module = f"{run.code_dir}/{str(run.config.model.target).partition('.')[0]}"
    other_frames = rf'^  File "(?!{re.escape(module)}\b).*\n(?: {{4}}.*\n)*'
    shortened = re.sub(other_frames, "", message, flags=re.M)
    return shortened if '  File "' in shortened else message


def find_failure(
    run: Run,
    stage: str,
    first_exits: list[RankExit],
    task: int | None = None,
    log_sizes: Mapping[Path, int] | None = None,
) -> AttemptEnd:
    """Return which rank failed first, and why.

    Args:
        run: the run.
        stage: the stage.
        first_exits: the ranks that were the first to exit with an error. One poll may find several.
        task: the index of this task if the stage is a job array.
        log_sizes: the sizes of the ranks' logs before the attempt (:func:`measure_log_sizes`).
    """
    errors = _read_reports(run, stage, "error", task)
    reporting_ranks = {report["rank"] for report in errors}
    killed = [
        rank_exit
        for rank_exit in first_exits
        if rank_exit.code < 0 or (rank_exit.code == ExitCode.OUT_OF_MEMORY and rank_exit.rank not in reporting_ranks)
    ]
    culprits = [rank_exit for rank_exit in killed if rank_exit.code != -signal.SIGABRT]
    for rank_exit in first_exits:
        if rank_exit.code != -signal.SIGABRT or rank_exit.rank in reporting_ranks:
            continue
        log = get_rank_log(run, stage, rank_exit.rank if task is None else task)
        if line := _find_gpu_failure(log, (log_sizes or {}).get(log, 0)):
            host = rank_exit.host or os.uname().nodename
            message = f"rank {rank_exit.rank} on {host}:\n{line}"
            return AttemptEnd(ExitCode.BAD_NODE, fields={"rank": rank_exit.rank, "host": host, "message": message})
    causal_reports = [report for report in errors if report["code"] != ExitCode.PEER_LOST]
    if causal_reports and not culprits:
        report = min(causal_reports, key=lambda report: float(report["time"]))
        code = ExitCode(report["code"])
        rank = report["rank"]
        host = report["host"]
        message = f"rank {rank} on {host}:\n{keep_user_frames(run, report['message'])}"
    else:
        rank_exit = (culprits or killed or first_exits)[0]
        # an exit code of ours without a report: the rank could not write it
        code = ExitCode(rank_exit.code) if rank_exit.code in set(ExitCode) else ExitCode.CRASHED
        rank = rank_exit.rank
        host = rank_exit.host or os.uname().nodename
        log = get_rank_log(run, stage, rank if task is None else task)
        hints = {
            -signal.SIGKILL: " (out of memory, or another process killed it)",
            ExitCode.OUT_OF_MEMORY: " (out of memory)",
        }
        description = f"rank {rank} on {host} {rank_exit}{hints.get(rank_exit.code, '')}; its log: {log}"
        message = rank_exit.description or description
    if code in (ExitCode.CRASHED, ExitCode.PEER_LOST) and (reason := run.describe_write_error()) is not None:
        code = ExitCode.STORAGE  # ranks cannot report a full disk in files on it
        message = f"{reason}\n{message}"
    return AttemptEnd(code, fields={"rank": rank, "host": host, "message": message})


def find_hung_rank(run: Run, stage: str, hosts: Sequence[str]) -> dict[str, Any] | None:
    """Return rank, host and message of the rank that hangs; None if there is no report about a hang."""
    hangs = _read_reports(run, stage, "hang")
    if not hangs:
        return None
    return describe_hung_rank(hangs, hosts, {report["rank"] for report in _read_reports(run, stage, "error")})


def describe_hung_rank(
    hangs: Iterable[Mapping[str, Any]], hosts: Sequence[str], reporting_ranks: Container[int]
) -> dict[str, Any]:
    """Return rank, host and message of the rank that did not arrive where the others wait.

    Args:
        hangs: the ranks' reports about the hang.
        hosts: the host of each rank.
        reporting_ranks: the ranks that wrote other reports.
    """
    order = sorted(hangs, key=lambda hang: (hang["step"], hang["number"], hang["rank"]))
    last = order[0]
    front = order[-1]
    hanging_ranks = {hang["rank"] for hang in order}
    others = f"the others were in phase '{front['phase']}' of step {front['step']}"
    unreported = [rank for rank in range(len(hosts)) if rank not in hanging_ranks and rank not in reporting_ranks]
    if unreported:
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in unreported)
        message = f"{names} gave no sign of life; {others}"
        return {"rank": unreported[0], "host": hosts[unreported[0]], "message": message}
    name = f"rank {last['rank']} on {last['host']}"
    if (last["step"], last["number"]) == (front["step"], front["number"]):
        message = f"all ranks were stuck in phase '{last['phase']}' of step {last['step']}; {name}"
    else:
        message = f"{name} did not arrive: it was in phase '{last['phase']}' of step {last['step']}; {others}"
    if collectives := last["collectives"]:
        message += f"; its last collective was {collectives[-1]['operation']} number {collectives[-1]['number']}"
    return {"rank": last["rank"], "host": last["host"], "message": f"{message}\n{last['stacks']}"}


# ---- progress, and attempts whose supervisor died


def read_progress_marker(run: Run, stage: str) -> str:
    """Return a text that changes when the stage makes progress.

    For a training, progress is a step that was never saved before, a new save of a damaged step, or a decision (a line
    of `decisions.jsonl`). The newest checkpoint alone does not tell, because it may have been damaged after an advance.
    The events alone do not tell either, because a rank may die between a checkpoint and its event.
    """
    if not STAGES[stage].is_training:
        return stages.load_stage_module(stage).progress(run).description
    newest_step = 0
    repaired_count = 0
    damaged_steps: set[int] = set()
    for event in run.read_events(stage):
        if isinstance(event, RestartedFromScratch):
            newest_step = 0
        elif isinstance(event, Damaged) and event.step is not None:
            damaged_steps.add(event.step)
        elif isinstance(event, Saved):
            newest_step = max(newest_step, event.step)
            repaired_count += event.step in damaged_steps
            damaged_steps.discard(event.step)
    newest_step = max(newest_step, *list_checkpoint_steps(run.checkpoints_dir), 0)
    decision_count = sum(1 for _ in read_jsonl(run.decisions_file))
    return f"step {newest_step}, {repaired_count} repaired, {decision_count} decisions"


def close_open_attempt(run: Run, stage: str, rank_info: RankInfo, task: int | None) -> tuple[ExitCode, str] | None:
    """Write the end of the previous attempt if its supervisor could not, and charge its budget.

    A supervisor that was killed, or died with its node, leaves its attempt open. If this job continues that attempt by
    itself (it was requeued, or it is the successor), the same rules apply as if the supervisor had lived.

    Args:
        run: the run.
        stage: the stage.
        rank_info: identifies this job and the number of its restarts.
        task: the task of an array; None for a whole job.

    Returns:
        The cause and the reason if the stage must not start. None if it may start, also because the user resumed it.
    """
    before = attempts.load_stage_state(run, stage, task)
    started = before.start_event
    end = before.end_event
    if started is None or before.retry_event is not None:
        return None
    job = started.slurm_job
    is_same_job = (
        job is not None and job == rank_info.job_id and started in events_since_submission(run.read_events(stage), job)
    )
    new_restarts = rank_info.restart_count - (started.restarts or 0) if is_same_job else 0
    was_requeued = new_restarts > 0
    # since 24.05, Slurm requeues a preempted job once more than requested (slurm/query/preemption.py)
    may_be_surplus_requeue = (
        new_restarts == 1 and _was_preempted(run, stage, started) and preemption.requeues_preempted_jobs()
    )
    if before.is_done:
        return (ExitCode.DONE, "it is done") if may_be_surplus_requeue else None
    is_successor = job is not None and find_predecessor(run, stage, rank_info.job_id or "") == job
    is_automatic = (was_requeued or is_successor) and not before.resumed_by_user
    has_progress = read_progress_marker(run, stage) != started.standing
    if end is None:
        recorded_job = None if job is None else read_recorded_job(run, started)
        cause = _infer_unreported_cause(before, recorded_job, was_requeued)
        message = f"attempt {started.attempt} ended without a report of its supervisor"
        message += f" (on {started.host})"
    else:
        cause = end.code
        message = str(end.message or end.name).rstrip()
    request = before.user_request or (cause.name.lower() if cause == ExitCode.CANCELLED else None)
    reason = None
    if is_automatic:
        reason = "a user stopped it" if request else explain_no_retry(before, cause, has_progress, run.config.recovery)
    if reason is not None and was_requeued and end is not None:
        # the end is already written; either the user requeued the job, or Slurm did because it was preempted
        return (cause, reason) if may_be_surplus_requeue else None
    if end is None or (reason is not None and not end.final):
        message += f"\nnot tried again: {reason}" if reason else ""
        end_class = get_end_event(cause, final=reason is not None and not request)
        run.append_event(
            end_class(
                stage=stage,
                job_id=started.job_id,
                task=task,
                attempt=started.attempt,
                exit_code=int(cause),
                cause=request or cause.name.lower(),
                message=message,
                final=reason is not None,
                noticed_later=True,
            )
        )
    if is_automatic and reason is None:
        retry_class: type[RetryEvent] = Requeued if was_requeued else HandedOver
        run.append_event(
            retry_class(
                stage=stage,
                job_id=started.job_id,
                task=task,
                attempt=started.attempt,
                cause=cause.name.lower(),
                budget=get_budget_key(cause),
                progress=has_progress,
                noticed_later=True,
            )
        )
    return None if reason is None else (cause, reason)


def _was_preempted(run: Run, stage: str, started: Started) -> bool:
    """Return True if an event of the job in which an attempt started reports a preemption."""
    return any(
        (isinstance(event, EndEvent) and event.in_grace)
        or (isinstance(event, Stopping | EndEvent | RetryEvent) and event.cause == "preempted")
        for event in run.read_events(stage, AttemptEvent)
        if (event.job_id, event.task) == (started.job_id, started.task)
    )


def _infer_unreported_cause(before: StageState, job: RecordedJob | None, was_requeued: bool) -> ExitCode:
    """Return why an attempt ended that has no end event: from its last event about a stop, otherwise from Slurm."""
    if before.user_request:
        return ExitCode.CANCELLED if before.user_request == "cancelled" else ExitCode.STOPPED
    reported = ExitCode.__members__.get(str(before.last_cause).upper())
    if was_requeued:  # so it was not cancelled, even if it looked like it
        return ExitCode.NODE_FAILURE if reported in (None, ExitCode.CANCELLED) else reported
    if job is None:
        return reported or ExitCode.CRASHED
    shown = query_job_states([job])[job]
    info = None if shown.state in (UNKNOWN, *CAUSE_BY_STATE) else read_job_info(job.job_id)
    if info is not None and info.submit_time != shown.submit_time:  # another job has this id now
        info = None
    state = shown.state if info is None else info.state
    if state in CAUSE_BY_STATE:  # the final state is more precise than the event, which was written when the stop began
        return CAUSE_BY_STATE[state]
    if reported is not None:
        return reported
    # there may be an exit code without an event, for example if the disk was full
    if info is not None and info.exit_code in set(ExitCode) - {ExitCode.DONE}:
        return ExitCode(info.exit_code)
    return ExitCode.CRASHED
