"""Why a stage stopped, and whether it may be retried.

Only the supervisor decides this. It combines the exit codes of the ranks, the run directory, and what Slurm says about
the job. A cause is an exit code (pipeline/base/errors.py). Each cause has a budget in the config (`recovery:`), counted
over the attempts since the user last ran `resume`. The count is read from events.jsonl.

A retry depends on where the stage runs:

- In a batch job: the job is requeued under the same id, without the nodes that failed (slurm/query/preemption.py).
- If the site forbids requeueing (`site.requeue: false`): a successor that was submitted with `afternotok` starts.
- In an salloc allocation or on one machine: the ranks restart in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.config.site import SiteConfig
from pipeline.config.stages import STAGES
from pipeline.run import attempts, stages
from pipeline.run.attempts import StageState, explain_no_retry, get_budget_key, get_end_event
from pipeline.run.directory import Run
from slurm.query import preemption
from slurm.query.current_job import CAUSE_BY_STATE, JobInfo, find_failed_nodes, query_accounted_state, read_job_info
from slurm.query.job_states import (
    UNKNOWN,
    JobState,
    RecordedJob,
    events_since_submission,
    query_job_states,
    read_recorded_job,
)

SIGNAL_EARLY_S = 70.0
"""How much earlier than `--signal` requests Slurm may send the signal (sbatch(1): up to 60 seconds), plus a margin."""
_COULD_HAVE_SLURM_CAUSE = (ExitCode.STOPPED, ExitCode.CRASHED, ExitCode.PEER_LOST, ExitCode.HANG)
"""Exit codes of ranks that may be the result of a dead node, or of Slurm ending the job."""


class NextAction(StrEnum):
    """What a batch job does when it exits and its stage may be retried."""

    ALREADY_REQUEUED = "Slurm has already requeued the job"
    SUCCESSOR = "the successor job continues"
    CANCELLED = "the job was cancelled"
    UNKNOWN = "it is not known whether the job was cancelled"
    EXIT = "Slurm requeues the job when it exits"
    REQUEUE = "the job requests to be requeued"


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
        if event["event"] == "began_anew":
            newest_step = 0
        elif event["event"] == "damaged":
            damaged_steps.add(event["step"])
        elif event["event"] == "saved":
            newest_step = max(newest_step, event["step"])
            repaired_count += event["step"] in damaged_steps
            damaged_steps.discard(event["step"])
    newest_step = max(newest_step, *list_checkpoint_steps(run.checkpoints_dir), 0)
    decision_count = sum(1 for _ in read_jsonl(run.decisions_file))
    return f"step {newest_step}, {repaired_count} repaired, {decision_count} decisions"


def infer_stop_cause(info: JobInfo | None, restart_count: int, site: SiteConfig) -> ExitCode:
    """Return why Slurm stopped a job whose ranks exited in good order; STOPPED if Slurm gives no cause.

    A job that is COMPLETING before its time limit and was not requeued was cancelled. This also holds after the start
    of a preemption, if Slurm requeues preempted jobs (`site.requeue`) and accounting does not name the cause.

    Args:
        info: the job as the controller shows it; None if it does not respond.
        restart_count: the number of restarts when this process started.
        site: the site's config.
    """
    if info is None:
        return ExitCode.STOPPED
    if info.restarts > restart_count:
        return ExitCode.PREEMPTED if info.is_preempted else ExitCode.REQUEUED
    if info.state in CAUSE_BY_STATE:
        return CAUSE_BY_STATE[info.state]
    is_completing = info.state == "COMPLETING"
    if info.is_preempted:
        return ExitCode.CANCELLED if is_completing and site.requeue else ExitCode.PREEMPTED
    signal_lead_s = 0 if is_completing else site.signal_s + SIGNAL_EARLY_S
    if info.time_left_s is not None and info.time_left_s <= signal_lead_s:
        return ExitCode.TIME_LIMIT
    return ExitCode.CANCELLED if is_completing else ExitCode.STOPPED


def refine_stop_cause(
    code: ExitCode,
    info: JobInfo | None,
    rank_info: RankInfo,
    nodes: str,
    start_time: str,
    site: SiteConfig,
    *,
    preempted: bool,
) -> tuple[ExitCode, str | None]:
    """Combine the exit code of the ranks with what Slurm says about the job.

    Ranks that lost a peer or were killed may be victims of a dead node, or of Slurm ending the job.

    Args:
        code: the exit code that the ranks agreed on.
        info: the job as the controller shows it; None if it does not respond.
        rank_info: identifies this job and the number of its restarts.
        nodes: the nodes of the allocation. Slurm forgets them and the start time once the job is requeued.
        start_time: the start of the allocation. A node whose slurmd started later had failed, even if it is up again.
        site: the site's config.
        preempted: whether a preemption was seen before the job was requeued. Without it, only accounting tells a
            preemption without a grace period from `scontrol requeue`.

    Returns:
        The cause, and a message if it differs from what the ranks reported.
    """
    if info is None or code not in _COULD_HAVE_SLURM_CAUSE:
        return code, None
    was_requeued = info.restarts > rank_info.restart_count
    may_have_lost_node = code in (ExitCode.PEER_LOST, ExitCode.CRASHED) or was_requeued
    may_have_lost_node |= info.state in ("COMPLETING", "NODE_FAIL")
    if may_have_lost_node:
        failed_nodes = find_failed_nodes(nodes, start_time if was_requeued and not info.is_preempted else "")
        if failed_nodes:
            return ExitCode.NODE_FAILURE, f"node {', '.join(failed_nodes)} is down or was down recently"
    cause = infer_stop_cause(info, rank_info.restart_count, site)
    if cause == ExitCode.STOPPED:
        return code, None
    if cause == ExitCode.REQUEUED:
        state = "PREEMPTED" if preempted else query_accounted_state(rank_info.job_id or "", start_time)
        cause = CAUSE_BY_STATE[state] if state in ("PREEMPTED", "NODE_FAIL") else cause
    if code == ExitCode.STOPPED:
        return cause, None
    return cause, f"Slurm ended the job ({cause.name.lower()}) before all ranks had exited"


def choose_next_action(
    info: JobInfo | None, restart_count: int, site: SiteConfig, signalled: bool, exclude: str | None
) -> NextAction:
    """Return what this batch job does now that its stage may be retried.

    Args:
        info: the job as the controller shows it; None if it does not respond.
        restart_count: the number of restarts when this process started.
        site: the site's config.
        signalled: whether the job received a termination signal. A cancelled job does.
        exclude: the new list of excluded nodes; None if the list does not change.
    """
    if info is not None and info.restarts > restart_count:
        return NextAction.ALREADY_REQUEUED
    # if the job was cancelled while it was COMPLETING, the successor sees that
    if not site.requeue and (info is None or info.state != "CANCELLED"):
        return NextAction.SUCCESSOR
    if infer_stop_cause(info, restart_count, site) == ExitCode.CANCELLED:  # cancelled since the cause was determined
        return NextAction.CANCELLED
    if info is None and signalled:
        return NextAction.UNKNOWN
    if info is not None and preemption.is_requeued_on_exit(info, exclude):
        return NextAction.EXIT
    return NextAction.REQUEUE


def is_job_ending(run: Run, stage: str, job: JobState) -> bool:
    """Return True if a job that Slurm still lists will end without a retry, by a request or after its final event."""
    events = events_since_submission(run.read_events(stage), job.job_id)
    # an event of the job itself, or of a task of this array
    job_events = (e for e in events if f"{e.get('job_id')}_".startswith(f"{job.job_id}_"))
    state = attempts.read_stage_state(job_events)
    if job.state == "PENDING" or state.retry_event is not None:
        return False
    return job.state == "COMPLETING" or state.end_event is not None or state.user_request is not None


def find_predecessor(run: Run, stage: str, job: str) -> str | None:
    """Return the job whose successor `job` is; None if it is not a successor."""
    for event in events_since_submission(run.read_events(None, "submitted"), job)[:1]:
        if (event["stage"], str(event["job_id"]), event.get("kind")) == (stage, job, "afternotok"):
            return next(iter(event["after"]), None)
    return None


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
    job = started.get("slurm_job")
    is_same_job = (
        job is not None and job == rank_info.job_id and started in events_since_submission(run.read_events(stage), job)
    )
    new_restarts = rank_info.restart_count - (started.get("restarts") or 0) if is_same_job else 0
    was_requeued = new_restarts > 0
    # since 24.05, Slurm requeues a preempted job once more than requested (slurm/query/preemption.py)
    may_be_surplus_requeue = (
        new_restarts == 1 and _was_preempted(run, stage, started) and preemption.requeues_preempted_jobs()
    )
    if before.is_done:
        return (ExitCode.DONE, "it is done") if may_be_surplus_requeue else None
    is_successor = job is not None and find_predecessor(run, stage, rank_info.job_id or "") == job
    is_automatic = (was_requeued or is_successor) and not before.resumed_by_user
    has_progress = read_progress_marker(run, stage) != started.get("standing")
    if end is None:
        recorded_job = None if job is None else read_recorded_job(run, started)
        cause = _infer_unreported_cause(before, recorded_job, was_requeued)
        message = f"attempt {started.get('attempt')} ended without a report of its supervisor"
        message += f" (on {started.get('host')})"
    else:
        cause = ExitCode(end["exit_code"])
        message = str(end.get("message", end["event"])).rstrip()
    request = before.user_request or (cause.name.lower() if cause == ExitCode.CANCELLED else None)
    reason = None
    if is_automatic:
        reason = "a user stopped it" if request else explain_no_retry(before, cause, has_progress, run.config.recovery)
    if reason is not None and was_requeued and end is not None:
        # the end is already written; either the user requeued the job, or Slurm did because it was preempted
        return (cause, reason) if may_be_surplus_requeue else None
    common = {"job_id": started.get("job_id"), "attempt": started.get("attempt"), "task": task, "noticed_later": True}
    if end is None or (reason is not None and not end.get("final")):
        message += f"\nnot tried again: {reason}" if reason else ""
        facts = {"cause": request or cause.name.lower(), "exit_code": int(cause), "message": message}
        event_name = get_end_event(cause, final=reason is not None and not request)
        run.event(event_name, stage, **common, **facts, final=reason is not None)
    if is_automatic and reason is None:
        event_name = "requeued" if was_requeued else "handed_over"
        run.event(
            event_name, stage, **common, cause=cause.name.lower(), budget=get_budget_key(cause), progress=has_progress
        )
    return None if reason is None else (cause, reason)


def _was_preempted(run: Run, stage: str, started: Mapping[str, Any]) -> bool:
    """Return True if an event of the job in which an attempt started reports a preemption."""
    job_and_task = (started.get("job_id"), started.get("task"))
    events = (e for e in run.read_events(stage) if (e.get("job_id"), e.get("task")) == job_and_task)
    return any(e.get("in_grace") or e.get("cause") == "preempted" for e in events)


def _infer_unreported_cause(before: StageState, job: RecordedJob | None, was_requeued: bool) -> ExitCode:
    """Return why an attempt ended that has no end event: from its last event about a stop, otherwise from Slurm."""
    if before.user_request:
        return ExitCode.CANCELLED if before.user_request == "cancelled" else ExitCode.STOPPED
    reported = ExitCode.__members__.get(str(before.last_stop_event.get("cause")).upper())
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
