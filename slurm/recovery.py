"""Why a stage stopped, and whether it may go on by itself.

The supervisor alone decides this, from the ranks' exit codes, the run directory and what Slurm says of the job. A cause
is one of the exit codes (pipeline/errors.py). Each has a budget in the config (`recovery:`), counted over the
attempts since a person last said `resume`; what was used up is read from events.jsonl, so nothing else needs
to be kept. Whatever the cause, a training that makes no new checkpoint stops: it would loop.

How it goes on depends on where it runs:

- in a batch job: back into the queue under the same id, without the nodes that failed: by `scontrol requeue`, or
  merely by its end where Slurm then puts it back (slurm/preemption.py);
- where the site forbids that (`site.requeue: false`): the job leaves, and a successor, submitted with `afternotok`
  before, starts. The successor first submits its own, then takes over the jobs that waited for its predecessor;
- inside salloc or on one machine: again in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import stages
from pipeline.checkpoint_files import saved_steps
from pipeline.config_recovery import RecoveryConfig
from pipeline.config_site import SiteConfig
from pipeline.errors import Exit
from pipeline.files import read_jsonl
from pipeline.run import Run
from slurm import preemption
from slurm.environment import Place
from slurm.job import JobFacts, dead_nodes, job_facts
from slurm.states import Claim, JobState, claim, query, since_submitted

ENDS = ("done", "stopped", "cancelled", "preempted", "failed")
"""Events that end an attempt."""
GOES_ON = ("requeued", "retried", "handed_over")
"""Events that say that the stage goes on by itself."""
EARLY_S = 70.0
"""How much earlier than `--signal` says Slurm may send the signal (sbatch(1): up to 60 seconds)."""

_BUDGETS = {
    Exit.PREEMPTED: "preempted",
    Exit.STOPPED: "preempted",
    Exit.NODE_FAILURE: "node_failure",
    Exit.TIME_LIMIT: "time_limit",
    Exit.BAD_NODE: "bad_node",
    Exit.OUT_OF_MEMORY: "out_of_memory",
    Exit.CRASHED: "crash",
    Exit.PEER_LOST: "crash",
    Exit.HANG: "hang",
    Exit.NON_FINITE: "non_finite",
}
REQUESTS = {"cancelled", "stop file"}
"""Who asked for a stop, where it was a person."""
_STATES = {
    "PREEMPTED": Exit.PREEMPTED,
    "TIMEOUT": Exit.TIME_LIMIT,
    "DEADLINE": Exit.TIME_LIMIT,
    "NODE_FAIL": Exit.NODE_FAILURE,
    "CANCELLED": Exit.CANCELLED,
    "OUT_OF_MEMORY": Exit.OUT_OF_MEMORY,
}
_BLAMELESS = (Exit.PREEMPTED, Exit.STOPPED, Exit.NODE_FAILURE, Exit.BAD_NODE)


def newest(events: Sequence[Mapping[str, Any]], *names: str) -> Mapping[str, Any] | None:
    """The last event with one of these names."""
    return next((e for e in reversed(events) if e["event"] in names), None)


def budget_of(cause: Exit) -> str:
    """The key of `recovery:` that a cause is charged to."""
    return _BUDGETS.get(cause, "user_error")


def ending(cause: Exit, *, final: bool) -> str:
    """The event that ends an attempt; `final`: the stage would have gone on by itself, and may not."""
    names = {Exit.DONE: "done", Exit.PREEMPTED: "preempted", Exit.STOPPED: "stopped", Exit.TIME_LIMIT: "stopped"}
    return "cancelled" if cause == Exit.CANCELLED else "failed" if final else names.get(cause, "failed")


def history(run: Run, stage: str, task: int | None) -> list[dict[str, Any]]:
    """The events of a stage (of one task of an array) since a person last said `resume`, oldest first."""
    found: list[dict[str, Any]] = []
    for event in run.read_events():
        if event["event"] == "resumed":
            found = []
        elif event.get("stage") == stage and event.get("task") == task:
            found.append(event)
    return found


def leaving(run: Run, stage: str, job: JobState) -> bool:
    """Whether a job that Slurm still shows ends for good: a person stopped it, or it has said its last word."""
    told_of = since_submitted(run.read_events(stage), job.job_id)
    events = [e for e in told_of if f"{e.get('job_id')}_".startswith(f"{job.job_id}_")]  # or its tasks
    told = newest(events, "started", "stopping", *ENDS, *GOES_ON) or {}
    if job.state == "PENDING" or told.get("event") in GOES_ON:
        return False
    return job.state == "COMPLETING" or told.get("event") in ENDS or told.get("by") in REQUESTS


def refusal(events: Sequence[Mapping[str, Any]], cause: Exit, progress: bool, limits: RecoveryConfig) -> str | None:
    """Why a stage that stopped for `cause` may not go on by itself; None where it may, "" where nobody expects it to.

    `events`: its :func:`history`; `progress`: whether this attempt brought something new.
    """
    before = [e for e in events if e["event"] in GOES_ON]
    key = budget_of(cause)
    used, limit = sum(e.get("budget") == key for e in before), getattr(limits, key)
    if limit == 0:
        return ""
    if used >= limit:
        times = f"{used} time{'s' if used != 1 else ''}"
        return f"its budget is used up (recovery.{key}: {limit}; it went on {times} after this before)"
    fruitless = 1
    for event in reversed(before):
        if event.get("progress", True):
            break
        fruitless += 1
    allowed = limits.fruitless if cause in _BLAMELESS else 0
    if not progress and fruitless > allowed:
        attempts = "this attempt" if fruitless == 1 else f"{fruitless} attempts in a row"
        return f"{attempts} brought no new checkpoint; going on would be a loop"
    return None


def standing(run: Run, stage: str) -> str:
    """Something that changes when a stage gets ahead.

    For `train` a step that was never saved before, one saved again in the place of a damaged one, or a decision. Not
    the newest checkpoint alone: one that was saved and damaged since was an advance all the same. Not the events alone:
    a rank may die between a checkpoint and its event.
    """
    if stage != "train":
        return stages.load(stage).progress(run)
    newest, repaired = max(saved_steps(run.checkpoints), default=0), 0
    damaged: set[int] = set()
    for event in run.read_events("train"):
        if event["event"] == "damaged":
            damaged.add(event["step"])
        elif event["event"] == "saved":
            newest = max(newest, event["step"])
            repaired += event["step"] in damaged
            damaged.discard(event["step"])
    return f"step {newest}, {repaired} repaired, {sum(1 for _ in read_jsonl(run.decisions))} decisions"


def stop_cause(facts: JobFacts | None, restarts: int, site: SiteConfig) -> Exit:
    """Why Slurm stopped a job whose ranks left in good order. `restarts`: the count this job was started with.

    A job that is ending (COMPLETING) before its time limit and without being put back was cancelled. So was one that
    ends so after a preemption, where Slurm puts back what it preempts (`site.requeue`) and accounting does not say.
    """
    if facts is None:
        return Exit.STOPPED
    if facts.restarts > restarts:
        return Exit.PREEMPTED
    ending = facts.state == "COMPLETING"
    if facts.state in _STATES:
        return _STATES[facts.state]
    if ending and facts.preempted and site.requeue:
        return Exit.CANCELLED
    if facts.preempted:
        return Exit.PREEMPTED
    if facts.left_s is not None and facts.left_s <= (0 if ending else site.signal_s + EARLY_S):
        return Exit.TIME_LIMIT
    return Exit.CANCELLED if ending else Exit.STOPPED


def cause_in_slurm(
    code: Exit, facts: JobFacts | None, place: Place, nodes: str, since: str, site: SiteConfig
) -> tuple[Exit, str | None]:
    """The cause behind a code once Slurm was asked, and words where they differ from what the ranks said.

    `nodes`, `since`: the allocation's nodes and start (Slurm forgets both once the job is back in the queue; by then a
    node that failed may be up again). Ranks that lost each other, or were killed, may be victims: of a dead node, or of
    Slurm ending the job.
    """
    if facts is None or code not in (Exit.STOPPED, Exit.CRASHED, Exit.PEER_LOST, Exit.HANG):
        return code, None
    by_slurm = facts.restarts > place.restart_count
    lost = code in (Exit.PEER_LOST, Exit.CRASHED) or by_slurm or facts.state in ("COMPLETING", "NODE_FAIL")
    if lost and (dead := dead_nodes(nodes, since if by_slurm and not facts.preempted else "")):
        return Exit.NODE_FAILURE, f"node {', '.join(dead)} is down or was just now"
    cause = stop_cause(facts, place.restart_count, site)
    if cause == Exit.STOPPED:
        return code, None
    return cause, None if code == Exit.STOPPED else f"Slurm ended the job ({cause.name.lower()}) before all had left"


def close_open_attempt(run: Run, stage: str, place: Place, task: int | None) -> tuple[Exit, str] | None:
    """Write what a supervisor could not that died with its node, or was killed: the end of its attempt, and its budget.

    Where this job goes on by itself (requeued, or as the successor) the same rules hold as if it had lived: returns
    the cause and the reason where they forbid that, or where the stage has ended and Slurm alone puts the job back.
    None where it may start, and where a person asked for it.
    """
    events = [e for e in run.read_events(stage) if e.get("task") == task]
    started, last = newest(events, "started"), newest(events, "started", *ENDS, *GOES_ON)
    if started is None or last is None or last["event"] in GOES_ON:
        return None
    job = started.get("slurm_job")
    same = job is not None and job == place.job_id and started in since_submitted(run.read_events(stage), job)
    times = place.restart_count - started.get("restarts", 0) if same else 0
    requeued = times > 0
    of_this_job = (e for e in events if e.get("job_id") == started.get("job_id"))
    preempted = times == 1 and any(e.get("in_grace") or e.get("cause") == "preempted" for e in of_this_job)
    if last["event"] == "done":
        return (Exit.DONE, "it is done") if preempted and preemption.puts_back() else None
    before = history(run, stage, task)
    inherited = job is not None and predecessor_of(run, stage, place.job_id or "") == job
    by_itself = (requeued or inherited) and last in before
    progress = standing(run, stage) != started.get("standing")
    common = {"job_id": started.get("job_id"), "attempt": started["attempt"], "task": task, "noticed_later": True}
    if last is started:
        told = newest(events, "started", "stopping") or {}
        cause = _cause_of_silence(told, None if job is None else claim(run, started), requeued)
        message = f"attempt {started['attempt']} ended without a word of its supervisor (on {started.get('host')})"
    else:
        told, message = last, str(last.get("message", last["event"])).rstrip()
        cause = Exit(last.get("exit_code", Exit.CANCELLED if last["event"] == "cancelled" else Exit.CRASHED))
    asked = REQUESTS & {str(told.get("by" if last is started else "cause")), cause.name.lower()}
    why_not = None
    if by_itself:
        why_not = "a person stopped it" if asked else refusal(before, cause, progress, run.config.recovery)
    if why_not is not None and requeued and last is not started:  # it was told so before
        # a person put the job back all the same, or Slurm did so because it was preempted
        return (cause, why_not) if preempted and preemption.puts_back() else None
    if last is started or (why_not is not None and "not tried again" not in message):
        name = ending(cause, final=why_not is not None and not asked)
        message += f"\nnot tried again: {why_not}" if why_not else ""
        words = max(asked, default=cause.name.lower())
        run.event(name, stage, **common, cause=words, exit_code=int(cause), message=message)
    if by_itself and why_not is None:
        how = "requeued" if requeued else "handed_over"
        run.event(how, stage, **common, cause=cause.name.lower(), budget=budget_of(cause), progress=progress)
    return None if why_not is None else (cause, why_not)


def predecessor_of(run: Run, stage: str, job: str) -> str | None:
    """The job that `job` was submitted to succeed; None where it is no successor."""
    for event in since_submitted(run.read_events(None, "submitted"), job)[:1]:
        if (event["stage"], str(event["job_id"]), event.get("kind")) == (stage, job, "afternotok"):
            return str(event["after"][0])
    return None


def _cause_of_silence(told: Mapping[str, Any], job: Claim | None, requeued: bool) -> Exit:
    """Why an attempt ended whose supervisor did not say: from its last word of a stop, else from what Slurm says."""
    if told.get("by") in REQUESTS:
        return Exit.CANCELLED if told["by"] == "cancelled" else Exit.STOPPED
    word = Exit[told["cause"].upper()] if "cause" in told else None
    if requeued:  # so it was not cancelled, whatever it looked like
        return Exit.NODE_FAILURE if word in (None, Exit.CANCELLED) else word
    if job is None:
        return word or Exit.CRASHED
    facts = job_facts(job.job_id, job)
    state = facts.state if facts is not None else query([job])[job].state
    if state in _STATES:  # how it ended in the end; the word is from when that began
        return _STATES[state]
    left_with = Exit(facts.exit_code) if facts and facts.exit_code in set(Exit) - {Exit.DONE} else Exit.CRASHED
    return word or left_with  # a code, but no word: a full disk takes no events
