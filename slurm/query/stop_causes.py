"""Why a stage stopped, and whether it may go on by itself.

The supervisor alone decides this, from the ranks' exit codes, the run directory and what Slurm says of the job. A cause
is one of the exit codes (pipeline/base/errors.py). Each has a budget in the config (`recovery:`), counted over the
attempts since a person last said `resume`; what was used up is read from events.jsonl, so nothing else needs
to be kept. Whatever the cause, a training that makes no new checkpoint stops: it would loop.

How it goes on depends on where it runs:

- in a batch job: back into the queue under the same id, without the nodes that failed: by `scontrol requeue`, or
  merely by its end where Slurm then puts it back (slurm/query/preemption.py);
- where the site forbids that (`site.requeue: false`): the job leaves, and a successor, submitted with `afternotok`
  before, starts. The successor first submits its own, then takes over the jobs that waited for its predecessor;
- inside salloc or on one machine: again in place.
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
"""How much earlier than `--signal` says Slurm may send the signal (sbatch(1): up to 60 seconds)."""


def is_job_ending(run: Run, stage: str, job: JobState) -> bool:
    """Whether a job that Slurm still shows ends for good: a person stopped it, or it has said its last word."""
    spoken = events_since_submission(run.read_events(stage), job.job_id)
    told = attempts.read_stage_state(
        e for e in spoken if f"{e.get('job_id')}_".startswith(f"{job.job_id}_")
    )  # or its tasks
    if job.state == "PENDING" or told.retry_event is not None:
        return False
    return job.state == "COMPLETING" or told.end_event is not None or told.user_request is not None


def read_progress_marker(run: Run, stage: str) -> str:
    """Something that changes when a stage gets ahead.

    For `train` a step that was never saved before, one saved again in the place of a damaged one, or a decision. Not
    the newest checkpoint alone: one that was saved and damaged since was an advance all the same. Not the events alone:
    a rank may die between a checkpoint and its event.
    """
    if not STAGES[stage].is_training:
        return stages.load_stage_module(stage).progress(run).description
    newest, repaired = 0, 0
    damaged: set[int] = set()
    for event in run.read_events(stage):
        if event["event"] == "began_anew":
            newest = 0
        elif event["event"] == "damaged":
            damaged.add(event["step"])
        elif event["event"] == "saved":
            newest = max(newest, event["step"])
            repaired += event["step"] in damaged
            damaged.discard(event["step"])
    newest = max(newest, *list_checkpoint_steps(run.checkpoints_dir), 0)
    return f"step {newest}, {repaired} repaired, {sum(1 for _ in read_jsonl(run.decisions_file))} decisions"


def infer_stop_cause(facts: JobInfo | None, restarts: int, site: SiteConfig) -> ExitCode:
    """Why Slurm stopped a job whose ranks left in good order. `restarts`: the count this job was started with.

    A job that is ending (COMPLETING) before its time limit and without being put back was cancelled. So was one that
    ends so after a preemption, where Slurm puts back what it preempts (`site.requeue`) and accounting does not say.
    """
    if facts is None:
        return ExitCode.STOPPED
    if facts.restarts > restarts:
        return ExitCode.PREEMPTED if facts.is_preempted else ExitCode.REQUEUED
    if facts.state in CAUSE_BY_STATE:
        return CAUSE_BY_STATE[facts.state]
    ending = facts.state == "COMPLETING"
    if facts.is_preempted:
        return ExitCode.CANCELLED if ending and site.requeue else ExitCode.PREEMPTED
    if facts.time_left_s is not None and facts.time_left_s <= (0 if ending else site.signal_s + SIGNAL_EARLY_S):
        return ExitCode.TIME_LIMIT
    return ExitCode.CANCELLED if ending else ExitCode.STOPPED


class NextAction(StrEnum):
    """How a batch job whose stage is to go on leaves."""

    ALREADY_REQUEUED = "it is in the queue again"
    SUCCESSOR = "its successor goes on"
    CANCELLED = "a person cancelled it"
    UNKNOWN = "nobody says whether it was cancelled"
    EXIT = "Slurm puts it back when it has ended"
    REQUEUE = "it asks to be put back"


def choose_next_action(
    facts: JobInfo | None, restarts: int, site: SiteConfig, signalled: bool, exclude: str | None
) -> NextAction:
    """The first of these that holds. `restarts`: the count this job was started with; `signalled`: whether it was told
    to leave, as a job is that is cancelled; `exclude`: what its excluded nodes must become."""
    if facts is not None and facts.restarts > restarts:
        return NextAction.ALREADY_REQUEUED
    if not site.requeue and (facts is None or facts.state != "CANCELLED"):  # the successor sees how the job ended
        return NextAction.SUCCESSOR
    if infer_stop_cause(facts, restarts, site) == ExitCode.CANCELLED:  # since the cause was told
        return NextAction.CANCELLED
    if facts is None and signalled:
        return NextAction.UNKNOWN
    return (
        NextAction.EXIT if facts is not None and preemption.is_requeued_on_exit(facts, exclude) else NextAction.REQUEUE
    )


def refine_stop_cause(
    code: ExitCode,
    facts: JobInfo | None,
    place: RankInfo,
    nodes: str,
    since: str,
    site: SiteConfig,
    *,
    preempted: bool,
) -> tuple[ExitCode, str | None]:
    """The cause behind a code once Slurm was asked, and words where they differ from what the ranks said.

    `nodes`, `since`: the allocation's nodes and start (Slurm forgets both once the job is back in the queue; by then a
    node that failed may be up again). Ranks that lost each other, or were killed, may be victims: of a dead node, or of
    Slurm ending the job. `preempted`: whether there was a sign of a preemption before the job was requeued. Without
    one, only accounting tells a preemption without grace from `scontrol requeue`.
    """
    if facts is None or code not in (ExitCode.STOPPED, ExitCode.CRASHED, ExitCode.PEER_LOST, ExitCode.HANG):
        return code, None
    by_slurm = facts.restarts > place.restart_count
    lost = code in (ExitCode.PEER_LOST, ExitCode.CRASHED) or by_slurm or facts.state in ("COMPLETING", "NODE_FAIL")
    if lost and (dead := find_failed_nodes(nodes, since if by_slurm and not facts.is_preempted else "")):
        return ExitCode.NODE_FAILURE, f"node {', '.join(dead)} is down or was just now"
    cause = infer_stop_cause(facts, place.restart_count, site)
    if cause == ExitCode.STOPPED:
        return code, None
    if cause == ExitCode.REQUEUED:
        state = "PREEMPTED" if preempted else query_accounted_state(place.job_id or "", since)
        cause = CAUSE_BY_STATE[state] if state in ("PREEMPTED", "NODE_FAIL") else cause
    return (
        cause,
        None if code == ExitCode.STOPPED else f"Slurm ended the job ({cause.name.lower()}) before all had left",
    )


def close_open_attempt(run: Run, stage: str, place: RankInfo, task: int | None) -> tuple[ExitCode, str] | None:
    """Write what a supervisor could not that died with its node, or was killed: the end of its attempt, and its budget.

    Where this job goes on by itself (requeued, or as the successor) the same rules hold as if it had lived: returns
    the cause and the reason where they forbid that, or where the stage has ended and Slurm alone puts the job back.
    None where it may start, and where a person asked for it.
    """
    before = attempts.load_stage_state(run, stage, task)
    started, end = before.start_event, before.end_event
    if started is None or before.retry_event is not None:
        return None
    job = started.get("slurm_job")
    same = job is not None and job == place.job_id and started in events_since_submission(run.read_events(stage), job)
    times = place.restart_count - (started.get("restarts") or 0) if same else 0
    requeued = times > 0
    once_more = times == 1 and _preempted(run, stage, started) and preemption.requeues_preempted_jobs()
    if before.is_done:
        return (ExitCode.DONE, "it is done") if once_more else None
    inherited = job is not None and find_predecessor(run, stage, place.job_id or "") == job
    by_itself = (requeued or inherited) and not before.resumed_by_user
    progress = read_progress_marker(run, stage) != started.get("standing")
    if end is None:
        cause = _cause_of_silence(before, None if job is None else read_recorded_job(run, started), requeued)
        message = f"attempt {started.get('attempt')} ended without a word of its supervisor (on {started.get('host')})"
    else:
        cause, message = ExitCode(end["exit_code"]), str(end.get("message", end["event"])).rstrip()
    asked = before.user_request or (cause.name.lower() if cause == ExitCode.CANCELLED else None)
    why_not = None
    if by_itself:
        why_not = "a person stopped it" if asked else explain_no_retry(before, cause, progress, run.config.recovery)
    if why_not is not None and requeued and end is not None:  # it was told so before
        # a person put the job back all the same, or Slurm did so because it was preempted
        return (cause, why_not) if once_more else None
    common = {"job_id": started.get("job_id"), "attempt": started.get("attempt"), "task": task, "noticed_later": True}
    if end is None or (why_not is not None and not end.get("final")):
        message += f"\nnot tried again: {why_not}" if why_not else ""
        facts = {"cause": asked or cause.name.lower(), "exit_code": int(cause), "message": message}
        name = get_end_event(cause, final=why_not is not None and not asked)
        run.event(name, stage, **common, **facts, final=why_not is not None)
    if by_itself and why_not is None:
        how = "requeued" if requeued else "handed_over"
        run.event(how, stage, **common, cause=cause.name.lower(), budget=get_budget_key(cause), progress=progress)
    return None if why_not is None else (cause, why_not)


def _preempted(run: Run, stage: str, started: Mapping[str, Any]) -> bool:
    """Whether an event of the job that an attempt began in tells of a preemption."""
    mine = (started.get("job_id"), started.get("task"))
    spoken = (e for e in run.read_events(stage) if (e.get("job_id"), e.get("task")) == mine)
    return any(e.get("in_grace") or e.get("cause") == "preempted" for e in spoken)


def find_predecessor(run: Run, stage: str, job: str) -> str | None:
    """The job that `job` was submitted to succeed; None where it is no successor."""
    for event in events_since_submission(run.read_events(None, "submitted"), job)[:1]:
        if (event["stage"], str(event["job_id"]), event.get("kind")) == (stage, job, "afternotok"):
            return next(iter(event["after"]), None)
    return None


def _cause_of_silence(before: StageState, job: RecordedJob | None, requeued: bool) -> ExitCode:
    """Why an attempt ended whose supervisor did not say: from its last word of a stop, else from what Slurm says."""
    if before.user_request:
        return ExitCode.CANCELLED if before.user_request == "cancelled" else ExitCode.STOPPED
    word = ExitCode.__members__.get(str(before.last_stop_event.get("cause")).upper())
    if requeued:  # so it was not cancelled, whatever it looked like
        return ExitCode.NODE_FAILURE if word in (None, ExitCode.CANCELLED) else word
    if job is None:
        return word or ExitCode.CRASHED
    shown = query_job_states([job])[job]
    facts = None if shown.state in (UNKNOWN, *CAUSE_BY_STATE) else read_job_info(job.job_id)
    if facts is not None and facts.submit_time != shown.submit_time:  # of another job, which has that id now
        facts = None
    state = shown.state if facts is None else facts.state
    if state in CAUSE_BY_STATE:  # how it ended in the end; the word is from when that began
        return CAUSE_BY_STATE[state]
    left_with = (
        ExitCode(facts.exit_code) if facts and facts.exit_code in set(ExitCode) - {ExitCode.DONE} else ExitCode.CRASHED
    )
    return word or left_with  # a code, but no word: a full disk takes no events
