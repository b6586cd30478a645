"""Determine how an attempt at a stage ended: from the exit codes and reports of its ranks, or later from its events.

Ranks write reports about errors and hangs to the run directory. A rank that is killed, for example because it uses too
much memory, writes no report. But the other ranks then report a lost connection. Therefore:

- If a rank was killed, this rank failed first. Otherwise the rank with the earliest report failed first. Reports about
  a lost connection do not count.
- In a hang, each rank reports its step and phase. If a rank wrote no report, this rank caused the hang. Otherwise the
  rank in the earliest phase caused the hang.

If the supervisor of an attempt was killed, the next supervisor writes the end event (:func:`end_unfinished_attempt`).
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
    """The user's request or the signal that stopped the attempt; None if there was none."""
    fields: dict[str, Any] = field(default_factory=dict)
    """More fields of the event that ends the attempt, such as `rank`, `host` and `message`."""


# ---- reports and logs of the ranks


def list_reports(run: Run, stage: str, kind: str, task: int | None = None) -> list[Path]:
    """Return the report files of the ranks. In a job array, the index of the array task replaces the rank in the names.

    Args:
        run: the run.
        stage: the stage.
        kind: `error`, `hang`, or `*` for both.
        task: the index of a Slurm array task, to list only the reports of this task; None to list all reports.
    """
    return list(run.stage_dir(stage).glob(f"{kind}-rank-{'*' if task is None else task}.json"))


def _read_reports(
    run: Run, stage: str, kind: str, task: int | None = None, ignored_hosts: Container[str] = ()
) -> list[dict[str, Any]]:
    """Return the contents of the report files that `list_reports` returns. Skip unreadable and malformed files.

    Reports from `ignored_hosts` are skipped. A rank on a node without a network may write its report of an earlier
    attempt late.
    """
    reports = []
    for path in list_reports(run, stage, kind, task):
        with suppress(OSError, ValueError):
            report = json.loads(path.read_bytes())
            if str(report["host"]).partition(".")[0] not in ignored_hosts and report["host"] not in ignored_hosts:
                reports.append(report)
    return reports


def get_rank_log(run: Run, stage: str, rank: int) -> Path:
    """Return the file with a rank's output of all attempts. In a job array, `rank` is the index of the array task."""
    return run.stage_dir(stage) / f"rank-{rank}.log"


def measure_log_sizes(run: Run, stage: str) -> dict[Path, int]:
    """Return the size of each rank's log in bytes, which is the position at which the next attempt's output begins."""
    return {path: path.stat().st_size for path in run.stage_dir(stage).glob("rank-*.log")}


def _find_gpu_failure(log: Path, start: int) -> str | None:
    """Return the first line of a rank's log that reports a failed GPU; None if there is none.

    NCCL's watchdog thread aborts the process after such a failure, so the rank cannot write a report.

    Args:
        log: the rank's log.
        start: the byte at which the output of the attempt begins.
    """
    with suppress(OSError), open(log, "rb") as file:
        file.seek(start)
        for line in file:
            if GPU_FAILURE_PATTERN.search(text := line.decode(errors="replace")):
                return text.strip()
    return None


def keep_user_frames(run: Run, message: str) -> str:
    """Shorten a traceback to the frames of the user's modules (`model.target` and `train.callbacks`).

    If the traceback has no such frame, or the run has no module of the user, return the message unchanged.

    Args:
        run: the run.
        message: a message that contains a traceback.
    """
    packages = "|".join(re.escape(name.partition(".")[0]) for name in run.config.user_targets)
    if not packages:
        return message
    # A frame is a line `  File "PATH", line N, in NAME`, followed by indented lines with source code.
    other_frames = rf'^  File "(?!{re.escape(str(run.code_dir))}/(?:{packages})\b).*\n(?: {{4}}.*\n)*'
    shortened = re.sub(other_frames, "", message, flags=re.M)
    has_user_frame = '  File "' in shortened
    return shortened if has_user_frame else message


def find_failure(
    run: Run,
    stage: str,
    first_exits: list[RankExit],
    task: int | None = None,
    log_sizes: Mapping[Path, int] | None = None,
    ignored_hosts: Container[str] = (),
) -> AttemptEnd:
    """Determine which rank of an attempt failed first, and why. Return this as the end of the attempt.

    Args:
        run: the run.
        stage: the stage.
        first_exits: the exits of the ranks that were the first to exit with an error; at least one. There are several
            if the supervisor noticed them in the same poll.
        task: the index of this Slurm array task; None if the job is not part of an array.
        log_sizes: the sizes of the ranks' logs before the attempt (:func:`measure_log_sizes`).
        ignored_hosts: hosts that the attempt does not use.
    """
    errors = _read_reports(run, stage, "error", task, ignored_hosts)
    reporting_ranks = {report["rank"] for report in errors}
    # If a rank exited with OUT_OF_MEMORY and wrote no report, the kernel killed the rank.
    killed_exits = [
        rank_exit
        for rank_exit in first_exits
        if rank_exit.code < 0 or (rank_exit.code == ExitCode.OUT_OF_MEMORY and rank_exit.rank not in reporting_ranks)
    ]
    # A rank that was killed by SIGABRT may not have failed first, because NCCL aborts a rank if another rank fails.
    first_killed_exits = [rank_exit for rank_exit in killed_exits if rank_exit.code != -signal.SIGABRT]
    # If the GPU of a rank fails, NCCL aborts the rank before it can write a report, so only the log shows the reason.
    for rank_exit in first_exits:
        if rank_exit.code != -signal.SIGABRT or rank_exit.rank in reporting_ranks:
            continue
        log = get_rank_log(run, stage, rank_exit.rank if task is None else task)
        attempt_start_byte = (log_sizes or {}).get(log, 0)
        if line := _find_gpu_failure(log, attempt_start_byte):
            host = rank_exit.host or os.uname().nodename
            message = f"rank {rank_exit.rank} on {host}:\n{line}"
            return AttemptEnd(ExitCode.BAD_NODE, fields={"rank": rank_exit.rank, "host": host, "message": message})
    direct_errors = [report for report in errors if report["code"] != ExitCode.PEER_LOST]
    if direct_errors and not first_killed_exits:
        report = min(direct_errors, key=lambda report: float(report["time"]))
        code = ExitCode(report["code"])
        rank = report["rank"]
        host = report["host"]
        message = f"rank {rank} on {host}:\n{keep_user_frames(run, report['message'])}"
    else:
        rank_exit = (first_killed_exits or killed_exits or first_exits)[0]
        # Even if a rank could not write its report, its exit code shows the cause.
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
        # The ranks could not report the full disk, because they would have to write the report to this disk.
        code = ExitCode.STORAGE
        message = f"{reason}\n{message}"
    return AttemptEnd(code, fields={"rank": rank, "host": host, "message": message})


def find_hung_rank(
    run: Run, stage: str, hosts: Sequence[str], ignored_hosts: Container[str] = ()
) -> dict[str, Any] | None:
    """Return `rank`, `host` and `message` of the rank that caused a hang; None if no rank reported a hang.

    Args:
        run: the run.
        stage: the stage.
        hosts: the host of each rank.
        ignored_hosts: hosts that the attempt does not use.
    """
    hangs = _read_reports(run, stage, "hang", None, ignored_hosts)
    if not hangs:
        return None
    return describe_hung_rank(hangs, hosts, {report["rank"] for report in _read_reports(run, stage, "error")})


def describe_hung_rank(
    hangs: Iterable[Mapping[str, Any]], hosts: Sequence[str], reporting_ranks: Container[int]
) -> dict[str, Any]:
    """Return `rank`, `host` and `message` of the rank that caused a hang.

    If a rank wrote neither a hang report nor an error report, this rank caused the hang. If each rank wrote a report,
    the rank whose hang report has the earliest phase caused the hang.

    Args:
        hangs: the hang reports of the ranks (pipeline/resilience/watchdog.py); at least one.
        hosts: the host of each rank.
        reporting_ranks: the ranks that wrote a report about another error. These ranks did not cause the hang.
    """
    # `number` is the number of the phase within the step.
    ordered_hangs = sorted(hangs, key=lambda hang: (hang["step"], hang["number"], hang["rank"]))
    earliest = ordered_hangs[0]
    latest = ordered_hangs[-1]
    hanging_ranks = {hang["rank"] for hang in ordered_hangs}
    others_message = f"the other ranks were in phase '{latest['phase']}' of step {latest['step']}"
    ranks_without_report = [
        rank for rank in range(len(hosts)) if rank not in hanging_ranks and rank not in reporting_ranks
    ]
    if ranks_without_report:
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks_without_report)
        message = f"{names} did not respond; {others_message}"
        return {"rank": ranks_without_report[0], "host": hosts[ranks_without_report[0]], "message": message}
    name = f"rank {earliest['rank']} on {earliest['host']}"
    all_in_same_phase = (earliest["step"], earliest["number"]) == (latest["step"], latest["number"])
    if all_in_same_phase:
        message = f"all ranks were stuck in phase '{earliest['phase']}' of step {earliest['step']}; {name}"
    else:
        message = f"{name} was stuck in phase '{earliest['phase']}' of step {earliest['step']}; {others_message}"
    if collectives := earliest["collectives"]:
        message += f"; its last collective was {collectives[-1]['operation']} number {collectives[-1]['number']}"
    return {"rank": earliest["rank"], "host": earliest["host"], "message": f"{message}\n{earliest['stacks']}"}


# ---- progress, and attempts whose supervisor was killed


def read_progress_marker(run: Run, stage: str) -> str:
    """Return a string that changes whenever the stage makes progress.

    For stages other than train, the string is the description of the stage's progress. The train stage makes progress
    with each of these:

    - a checkpoint of a step that is higher than all steps saved so far, since the run last started from scratch;
    - a new checkpoint of a step, if the previous checkpoint of this step was damaged;
    - a new line in `decisions.jsonl`.

    The string also changes if the run starts from scratch again.

    Both events and checkpoints are needed. The checkpoints alone are not enough: a checkpoint that was found to be
    damaged is renamed and no longer listed, although its save was progress. The events alone are not enough: a rank may
    be killed after it committed a checkpoint and before it wrote the event.
    """
    if not run.config.get_stage(stage).is_training:
        module = stages.load_stage_module(run, stage)
        describe = getattr(module, "describe_saved_progress", None)
        return str(describe(run) if describe is not None else module.progress(run).description)
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
    # With a single number, `max` would expect an iterable. The 0 is a second number if there are no checkpoints.
    newest_step = max(newest_step, *list_checkpoint_steps(run.checkpoints_dir), 0)
    decision_count = sum(1 for _ in read_jsonl(run.decisions_file))
    return f"step {newest_step}, {repaired_count} repaired, {decision_count} decisions"


def end_unfinished_attempt(run: Run, stage: str, rank_info: RankInfo, task: int | None) -> tuple[ExitCode, str] | None:
    """Decide whether this job may start the stage, and write the missing end event of the previous attempt.

    A supervisor that is killed, for example because its node fails, cannot write the end event of its attempt. In this
    case, this function writes the end event.

    The start of this job is an automatic retry in two cases: Slurm requeued the job, or the job is the successor of the
    previous attempt's job. After the user ran `resume`, the start is no automatic retry. For an automatic retry, this
    function also applies the rules for retries: it writes the event of the retry, which counts in the budget of the
    cause. If no retry is left, the stage fails permanently.

    After a preemption, Slurm may requeue a job whose stage has ended (slurm/query/preemption.py). Such a requeue does
    not start the stage again.

    Args:
        run: the run.
        stage: the stage.
        rank_info: has the id of this job and the number of its restarts.
        task: the index of this Slurm array task; None if the job is not part of an array.

    Returns:
        The exit code for this job and the reason if the stage must not start; None if it may start.
    """
    state = attempts.load_stage_state(run, stage, task)
    started = state.start_event
    end = state.end_event
    if started is None or state.retry_event is not None:
        return None  # The stage never started, or the previous supervisor has already decided to retry it.
    slurm_job_id = started.slurm_job
    # If the ids are equal, Slurm may still have reused the id of the previous attempt's job for this job.
    is_same_job = (
        slurm_job_id is not None
        and slurm_job_id == rank_info.job_id
        and started in events_since_submission(run.read_events(stage), slurm_job_id)
    )
    new_restarts = rank_info.restart_count - (started.restarts or 0) if is_same_job else 0
    was_requeued = new_restarts > 0
    # Since version 24.05, Slurm may requeue a preempted job once more than requested (slurm/query/preemption.py).
    may_be_surplus_requeue = (
        new_restarts == 1 and _was_preempted(run, stage, started) and preemption.requeues_preempted_jobs()
    )
    if state.is_done:
        return (ExitCode.DONE, "the stage is done") if may_be_surplus_requeue else None
    is_successor = slurm_job_id is not None and find_predecessor(run, stage, rank_info.job_id or "") == slurm_job_id
    is_automatic_retry = (was_requeued or is_successor) and not state.resumed_by_user
    has_progress = read_progress_marker(run, stage) != started.standing
    if end is None:
        recorded_job = None if slurm_job_id is None else read_recorded_job(run, started)
        cause = _infer_unreported_cause(state, recorded_job, was_requeued)
        message = f"the supervisor of attempt {started.attempt} on {started.host} ended without writing an event"
    else:
        cause = end.code
        message = str(end.message or end.name).rstrip()
    request = state.user_request or (cause.name.lower() if cause == ExitCode.CANCELLED else None)
    no_retry_reason = None
    if is_automatic_retry and request:
        no_retry_reason = "a user stopped the stage"
    elif is_automatic_retry:
        no_retry_reason = explain_no_retry(state, cause, has_progress, run.config.recovery)
    if no_retry_reason is not None and was_requeued and end is not None:
        # The previous supervisor wrote the end event and did not request a requeue. So either Slurm requeued the job
        # because of the preemption, or the user requeued the job, which is a request to run the stage again.
        return (cause, no_retry_reason) if may_be_surplus_requeue else None
    # If no retry is left, an event with `final` is written, unless the previous supervisor has written one.
    if end is None or (no_retry_reason is not None and not end.final):
        message += f"\nnot retried: {no_retry_reason}" if no_retry_reason else ""
        end_class = get_end_event(cause, final=no_retry_reason is not None and not request)
        run.append_event(
            end_class(
                stage=stage,
                job_id=started.job_id,
                task=task,
                attempt=started.attempt,
                exit_code=int(cause),
                cause=request or cause.name.lower(),
                message=message,
                final=no_retry_reason is not None,
                noticed_later=True,
            )
        )
    if is_automatic_retry and no_retry_reason is None:
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
    return None if no_retry_reason is None else (cause, no_retry_reason)


def _was_preempted(run: Run, stage: str, started: Started) -> bool:
    """Return True if an event reports that the job of the attempt `started` was preempted."""
    return any(
        (isinstance(event, EndEvent) and event.in_grace)  # the grace period of a preemption
        or (isinstance(event, Stopping | EndEvent | RetryEvent) and event.cause == "preempted")
        for event in run.read_events(stage, AttemptEvent)
        if (event.job_id, event.task) == (started.job_id, started.task)
    )


def _infer_unreported_cause(stage_state: StageState, job: RecordedJob | None, was_requeued: bool) -> ExitCode:
    """Return why an attempt without an end event ended, according to its other events and to Slurm.

    If neither the events nor Slurm show a cause, return NODE_FAILURE if Slurm requeued the job, and CRASHED otherwise.

    Args:
        stage_state: the state of the stage when the attempt ended.
        job: the job of the attempt; None if the attempt did not run in a job.
        was_requeued: whether Slurm requeued the job after the attempt.
    """
    if stage_state.user_request:
        return ExitCode.CANCELLED if stage_state.user_request == "cancelled" else ExitCode.STOPPED
    recorded_cause = ExitCode.__members__.get(str(stage_state.last_cause).upper())
    if was_requeued:  # Slurm does not requeue a cancelled job, so the recorded cause cannot be CANCELLED.
        return ExitCode.NODE_FAILURE if recorded_cause in (None, ExitCode.CANCELLED) else recorded_cause
    if job is None:
        return recorded_cause or ExitCode.CRASHED
    job_state = query_job_states([job])[job]
    info = None if job_state.state in (UNKNOWN, *CAUSE_BY_STATE) else read_job_info(job.job_id)
    if info is not None and info.submit_time != job_state.submit_time:  # Slurm has reused the id for another job.
        info = None
    slurm_state = job_state.state if info is None else info.state
    # The job's final state is more precise than an event from the beginning of the stop.
    if slurm_state in CAUSE_BY_STATE:
        return CAUSE_BY_STATE[slurm_state]
    if recorded_cause is not None:
        return recorded_cause
    # The supervisor may have exited without writing an event, for example because the disk was full.
    if info is not None and info.exit_code in set(ExitCode) - {ExitCode.DONE}:
        return ExitCode(info.exit_code)
    return ExitCode.CRASHED
