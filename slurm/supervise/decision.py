"""Decide why a stage stopped and what its job does next. Nothing here reads or writes anything.

The supervisor gathers the facts and carries out the decision (slurm/supervise/supervisor.py). A cause is an exit code
(pipeline/base/errors.py). Each cause has a budget in the config (`recovery.budgets`), counted over the attempts since
the user last ran `resume` (pipeline/run/attempts.py). A stage that may be retried continues in one of these ways:

- In a batch job: the job is requeued under the same id, by itself or by Slurm (slurm/query/preemption.py).
- If the site forbids requeueing (`site.requeue: false`): the next job, submitted with `afternotok`, continues.
- In an salloc allocation or on one machine: the ranks restart in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.base.errors import ExitCode
from pipeline.base.signals import LOCAL_DEADLINE
from pipeline.config.sections import RecoveryConfig
from pipeline.config.site import SiteConfig
from pipeline.run.attempts import explain_no_retry
from pipeline.run.events import USER_REQUESTS, StageState
from slurm.query.current_job import CAUSE_BY_STATE, JobInfo

SIGNAL_EARLY_S = 70.0
"""How much earlier than `--signal` requests Slurm may send the signal (sbatch(1): up to 60 seconds), plus a margin."""
_MAY_BE_CAUSED_BY_SLURM = (ExitCode.STOPPED, ExitCode.CRASHED, ExitCode.PEER_LOST, ExitCode.HANG)
"""Exit codes of ranks that may be the result of a dead node, or of Slurm ending the job."""


@dataclass(frozen=True)
class JobFacts:
    """What is known about the Slurm job in which a stage stopped."""

    site: SiteConfig
    info: JobInfo | None = None
    """The job as the controller shows it; None if it does not respond, or the stage does not run in a job."""
    restart_count: int = 0
    """The number of restarts when this process started."""
    failed_nodes: Sequence[str] = ()
    """Its nodes that are down or were down recently."""
    accounted_state: str | None = None
    """If the job was requeued: the state of this run of the job in accounting, such as PREEMPTED."""
    saw_preemption: bool = False
    """Whether a preemption was seen before Slurm requeued the job and forgot it."""
    is_requeued_on_exit: bool = False
    """Whether Slurm requeues the job when it exits."""

    @property
    def was_requeued(self) -> bool:
        """Whether Slurm has requeued the job since this process started."""
        return self.info is not None and self.info.restarts > self.restart_count


@dataclass(frozen=True)
class StopFacts:
    """What is known when an attempt at a stage has stopped."""

    cause: ExitCode
    """Why it stopped (:func:`determine_cause`)."""
    stop_reason: str | None
    """The request or the signal that stopped it; None if nothing did."""
    has_progress: bool
    """Whether it made progress, such as a new checkpoint."""
    state: StageState
    """The state of the stage before the end of the attempt is recorded."""
    limits: RecoveryConfig
    is_batch: bool
    """Whether this is a batch job. Only batch jobs can be requeued or have successors."""
    was_signalled: bool
    """Whether this process received a termination signal. A cancelled job does."""
    job: JobFacts


class NextAction(StrEnum):
    """What the supervisor does after an attempt."""

    END = "the stage ends: it is done, or it was stopped"
    FAIL = "the stage ends: it may not be retried"
    RESTART_IN_PLACE = "the ranks restart in this job"
    REQUEUE = "the job requests to be requeued"
    EXIT = "the job exits, and Slurm requeues it"
    AWAIT_REQUEUE = "Slurm has already requeued the job and ends this run of it"
    HAND_OVER = "the successor job continues"
    CANCEL = "the stage ends: the job was cancelled"
    QUERY_JOB = "the controller must first report whether the job was cancelled"


@dataclass(frozen=True)
class Decision:
    """The next action, and for FAIL why the stage is not retried ("" if its cause is never retried)."""

    action: NextAction
    reason: str | None = None


def may_have_lost_node(exit_code: ExitCode, job: JobFacts) -> bool:
    """Return True if a dead node may be the reason for the exit code of the ranks."""
    if job.info is None or exit_code not in _MAY_BE_CAUSED_BY_SLURM:
        return False
    is_likely = exit_code in (ExitCode.PEER_LOST, ExitCode.CRASHED) or job.info.state in ("COMPLETING", "NODE_FAIL")
    return is_likely or job.was_requeued


def infer_stop_cause(job: JobFacts) -> ExitCode:
    """Return why Slurm stopped a job whose ranks exited in good order; STOPPED if Slurm reports no cause.

    A job that is COMPLETING before its time limit and was not requeued was cancelled. This also holds after the start
    of a preemption, if Slurm requeues preempted jobs (`site.requeue`) and accounting does not report the cause.
    """
    info = job.info
    if info is None:
        return ExitCode.STOPPED
    if job.was_requeued:
        return ExitCode.PREEMPTED if info.is_preempted else ExitCode.REQUEUED
    if info.state in CAUSE_BY_STATE:
        return CAUSE_BY_STATE[info.state]
    is_completing = info.state == "COMPLETING"
    if info.is_preempted:
        return ExitCode.CANCELLED if is_completing and job.site.requeue else ExitCode.PREEMPTED
    signal_lead_s = 0 if is_completing else job.site.signal_s + SIGNAL_EARLY_S
    if info.time_left_s is not None and info.time_left_s <= signal_lead_s:
        return ExitCode.TIME_LIMIT
    return ExitCode.CANCELLED if is_completing else ExitCode.STOPPED


def determine_cause(
    exit_code: ExitCode, job: JobFacts, *, reported_reason: str | None = None
) -> tuple[ExitCode, str | None]:
    """Combine the exit code of the ranks with what Slurm reports about the job.

    Ranks that lost a peer or were killed may be victims of a dead node, or of Slurm ending the job.

    Args:
        exit_code: the exit code that the ranks agreed on.
        job: what Slurm reports.
        reported_reason: the reason of the stop according to the ranks.

    Returns:
        The cause, and a message if it differs from what the ranks reported.
    """
    cause, message = _determine_slurm_cause(exit_code, job)
    if cause == ExitCode.STOPPED and reported_reason == LOCAL_DEADLINE:
        cause = ExitCode.TIME_LIMIT
    return cause, message


def _determine_slurm_cause(exit_code: ExitCode, job: JobFacts) -> tuple[ExitCode, str | None]:
    if job.info is None or exit_code not in _MAY_BE_CAUSED_BY_SLURM:
        return exit_code, None
    if job.failed_nodes and may_have_lost_node(exit_code, job):
        return ExitCode.NODE_FAILURE, f"node {', '.join(job.failed_nodes)} is down or was down recently"
    cause = infer_stop_cause(job)
    if cause == ExitCode.STOPPED:
        return exit_code, None
    if cause == ExitCode.REQUEUED:
        # only accounting tells a preemption without a grace period from `scontrol requeue`
        state = "PREEMPTED" if job.saw_preemption else job.accounted_state
        cause = CAUSE_BY_STATE[state] if state in ("PREEMPTED", "NODE_FAIL") else cause
    if exit_code == ExitCode.STOPPED:
        return cause, None
    return cause, f"Slurm ended the job ({cause.name.lower()}) before all ranks had exited"


def choose_next_action(facts: StopFacts) -> Decision:
    """Return what the supervisor does after an attempt.

    The supervisor calls this when the ranks have exited. It calls it again just before a batch job exits to be retried,
    because Slurm may have cancelled or requeued the job in the meantime.
    """
    if facts.cause in (ExitCode.DONE, ExitCode.CANCELLED) or facts.stop_reason in USER_REQUESTS:
        return Decision(NextAction.END)
    if not facts.is_batch:
        # an allocation or a session that ends has no second attempt
        is_ending = facts.cause in (ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.TIME_LIMIT)
        if is_ending or facts.was_signalled:
            return Decision(NextAction.END)
    if (reason := explain_no_retry(facts.state, facts.cause, facts.has_progress, facts.limits)) is not None:
        return Decision(NextAction.FAIL, reason)
    if not facts.is_batch:
        return Decision(NextAction.RESTART_IN_PLACE)
    return Decision(_choose_batch_action(facts.job, facts.was_signalled))


def _choose_batch_action(job: JobFacts, was_signalled: bool) -> NextAction:
    """Return how a batch job exits if its stage may be retried."""
    info = job.info
    if job.was_requeued:
        return NextAction.AWAIT_REQUEUE
    # if the job was cancelled while it was COMPLETING, the successor sees that
    if not job.site.requeue and (info is None or info.state != "CANCELLED"):
        return NextAction.HAND_OVER
    if infer_stop_cause(job) == ExitCode.CANCELLED:  # cancelled since the cause was determined
        return NextAction.CANCEL
    if info is None and was_signalled:
        return NextAction.QUERY_JOB
    return NextAction.EXIT if job.is_requeued_on_exit else NextAction.REQUEUE
