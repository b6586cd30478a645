"""Decide why a stage stopped and what its job does next. The functions of this module are pure: they do no I/O.

The supervisor (slurm/supervise/supervisor.py) gathers the facts and carries out the decision. A cause is an exit code
(pipeline/base/errors.py). Each cause has a budget (`recovery.budgets`): the maximum number of retries since the user
last ran `resume` (pipeline/run/attempts.py). If a stage may be retried:

- In a batch job, the ranks restart in place if the node agents can fork them again, the cause is one of
  `RESTARTED_IN_PLACE`, enough nodes have not failed, and enough time is left.
- Otherwise, a batch job is requeued under the same id. The supervisor requests the requeue, unless Slurm requeues the
  job automatically (slurm/query/preemption.py).
- If the site forbids requeueing (`site.requeue: false`), a successor job continues the stage.
- In an salloc allocation or on one machine, the ranks restart in place.
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
"""How much earlier than requested Slurm may send the signal of `--signal`: 60 seconds (sbatch(1)), plus a margin of 10
seconds."""
RESTARTED_IN_PLACE = (
    ExitCode.CRASHED, ExitCode.HANG, ExitCode.PEER_LOST, ExitCode.NON_FINITE, ExitCode.NODE_FAILURE, ExitCode.BAD_NODE,
)  # fmt: skip
"""Causes after which the ranks of a batch job are restarted in the same job."""
MIN_USEFUL_S = 60.0
"""A batch job restarts its ranks in place only if so many seconds are left before Slurm may signal the time limit."""
_MAY_BE_CAUSED_BY_SLURM = (ExitCode.STOPPED, ExitCode.CRASHED, ExitCode.PEER_LOST, ExitCode.HANG)
"""Exit codes with which ranks may exit if a node fails, or if Slurm ends the job."""


@dataclass(frozen=True)
class JobFacts:
    """What is known about the Slurm job in which a stage stopped."""

    site: SiteConfig
    """The config section `site`."""
    info: JobInfo | None = None
    """The job as the controller shows it. None if the controller does not respond, or the stage runs without a job."""
    restart_count: int = 0
    """The job's number of restarts (`SLURM_RESTART_COUNT`) when this supervisor started."""
    failed_nodes: Sequence[str] = ()
    """The nodes of the job that are down or were down recently."""
    accounted_state: str | None = None
    """The state that accounting (sacct) shows for this attempt of the job, such as PREEMPTED.

    Accounting is queried only if the job was requeued for an unknown reason. None if accounting was not queried, or if
    it shows no such state.
    """
    saw_preemption: bool = False
    """Whether the supervisor noticed that this attempt was preempted.

    This is needed because Slurm no longer shows a preemption when it has requeued the job.
    """
    is_requeued_on_exit: bool = False
    """Whether Slurm will requeue the job automatically when it exits."""

    @property
    def was_requeued(self) -> bool:
        """True if Slurm has requeued the job since this supervisor started, according to `info`."""
        return self.info is not None and self.info.restarts > self.restart_count


@dataclass(frozen=True)
class StopFacts:
    """What is known about an attempt at a stage that has stopped."""

    cause: ExitCode
    """Why the attempt stopped (:func:`determine_cause`)."""
    stop_reason: str | None
    """The user's request or the signal that stopped the attempt; None if there was none."""
    has_progress: bool
    """Whether the attempt made progress, such as a new checkpoint."""
    state: StageState
    """The state of the stage according to all events except the end of this attempt, which is not written yet."""
    limits: RecoveryConfig
    """The config section `recovery`."""
    is_batch: bool
    """Whether this is a batch job. Only batch jobs can be requeued or have successors."""
    was_signalled: bool
    """Whether the supervisor received a signal to stop. Slurm signals a job that it cancels."""
    job: JobFacts
    """What is known about the Slurm job."""
    can_restart_in_place: bool = False
    """Whether the node agents can fork the ranks of a batch job again on the nodes that have not failed, and enough of
    the job's time is left."""


class NextAction(StrEnum):
    """What the supervisor does after an attempt."""

    END = "end the stage, because it is done or was stopped"
    FAIL = "end the stage, because it may not be retried"
    RESTART_IN_PLACE = "restart the ranks in this job"
    REQUEUE = "request that Slurm requeues the job"
    EXIT_FOR_REQUEUE = "exit, so that Slurm requeues the job automatically"
    AWAIT_REQUEUE = "wait for Slurm, which has already requeued the job, to end this process"
    HAND_OVER = "exit, so that the successor job continues"
    CANCEL = "end the stage, because the job was cancelled"
    END_UNKNOWN_CANCELLATION = "end the stage, because it is unknown whether the user cancelled the job"


@dataclass(frozen=True)
class Decision:
    """What the supervisor does after an attempt, and why."""

    action: NextAction
    reason: str | None = None
    """For the action FAIL: why the stage is not retried; "" if a stage is never retried after the cause. None for other
    actions."""


def may_have_lost_node(exit_code: ExitCode, job: JobFacts) -> bool:
    """Return True if a failed node may have caused the exit code of the ranks.

    Return False if nothing is known about the job.
    """
    if job.info is None or exit_code not in _MAY_BE_CAUSED_BY_SLURM:
        return False
    is_ending = job.info.state in ("COMPLETING", "NODE_FAIL")
    # Ranks hang if a node loses its network.
    return exit_code in (ExitCode.PEER_LOST, ExitCode.CRASHED, ExitCode.HANG) or is_ending or job.was_requeued


def infer_stop_cause(job: JobFacts) -> ExitCode:
    """Return why Slurm stopped the job; STOPPED if Slurm reports no cause.

    Return STOPPED also if nothing is known about the job.

    If a job is COMPLETING before its time limit and was not requeued, it was cancelled. If the site allows requeueing
    (`site.requeue`), a preempted job in this state was cancelled as well, because Slurm would have requeued it.
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
    # while a job is running, Slurm may already have sent the signal that announces the time limit
    signal_lead_s = 0 if is_completing else job.site.signal_s + SIGNAL_EARLY_S
    if info.time_left_s is not None and info.time_left_s <= signal_lead_s:
        return ExitCode.TIME_LIMIT
    return ExitCode.CANCELLED if is_completing else ExitCode.STOPPED


def determine_cause(
    exit_code: ExitCode, job: JobFacts, *, reported_reason: str | None = None
) -> tuple[ExitCode, str | None]:
    """Determine why an attempt ended, from the exit code of its ranks and from what Slurm reports about the job.

    If a rank was killed or lost its connection to another rank, the reason may be a failed node, or that Slurm ended
    the job. In these cases, the report of Slurm is more precise than the exit code.

    Args:
        exit_code: why the attempt ended according to its ranks.
        job: what Slurm reports about the job.
        reported_reason: the reason to stop that the ranks reported, such as `LOCAL_DEADLINE`; None if there is none.

    Returns:
        The cause, and a message that explains the cause. The message is None if the cause needs no explanation.
    """
    cause, message = _determine_slurm_cause(exit_code, job)
    if cause == ExitCode.STOPPED and reported_reason == LOCAL_DEADLINE:
        cause = ExitCode.TIME_LIMIT
    return cause, message


def _determine_slurm_cause(exit_code: ExitCode, job: JobFacts) -> tuple[ExitCode, str | None]:
    """Return the result of `determine_cause` for ranks that reported no reason to stop."""
    if job.info is None or exit_code not in _MAY_BE_CAUSED_BY_SLURM:
        return exit_code, None
    if job.failed_nodes and may_have_lost_node(exit_code, job):
        return ExitCode.NODE_FAILURE, f"node {', '.join(job.failed_nodes)} is down or was down recently"
    cause = infer_stop_cause(job)
    if cause == ExitCode.STOPPED:
        return exit_code, None
    if cause == ExitCode.REQUEUED:
        # The controller shows the same for `scontrol requeue` and for a preemption without a grace period. Whether it
        # was a preemption may be known from the supervisor (`saw_preemption`) or from accounting.
        state = "PREEMPTED" if job.saw_preemption else job.accounted_state
        cause = CAUSE_BY_STATE[state] if state in ("PREEMPTED", "NODE_FAIL") else cause
    if exit_code == ExitCode.STOPPED:
        return cause, None
    return cause, f"Slurm ended the job ({cause.name.lower()}) before all ranks had exited"


def choose_next_action(facts: StopFacts) -> Decision:
    """Return what the supervisor does after an attempt.

    The supervisor calls this function when the ranks have exited. If a batch job is to be retried, the supervisor calls
    this function again before the job exits, because Slurm may have cancelled or requeued the job in the meantime.
    """
    if facts.cause in (ExitCode.DONE, ExitCode.CANCELLED) or facts.stop_reason in USER_REQUESTS:
        return Decision(NextAction.END)
    if not facts.is_batch:
        # A restart is useless in an allocation or a login session that is about to end.
        is_ending = facts.cause in (ExitCode.STOPPED, ExitCode.PREEMPTED, ExitCode.TIME_LIMIT)
        if is_ending or facts.was_signalled:
            return Decision(NextAction.END)
    if (reason := explain_no_retry(facts.state, facts.cause, facts.has_progress, facts.limits)) is not None:
        return Decision(NextAction.FAIL, reason)
    if not facts.is_batch or _is_restarted_in_place(facts):
        return Decision(NextAction.RESTART_IN_PLACE)
    return Decision(_choose_batch_action(facts.job, facts.was_signalled))


def has_time_to_restart(time_left_s: float, site: SiteConfig) -> bool:
    """Return True if a batch job has enough time left to restart its ranks in place."""
    return time_left_s > site.signal_s + SIGNAL_EARLY_S + MIN_USEFUL_S


def _is_restarted_in_place(facts: StopFacts) -> bool:
    """Return True if the ranks of a batch job are restarted in the same job, and not by a requeue.

    A signal means that Slurm ends the job, or will do so soon.
    """
    is_ending = facts.was_signalled or facts.job.was_requeued
    return facts.can_restart_in_place and facts.cause in RESTARTED_IN_PLACE and not is_ending


def _choose_batch_action(job: JobFacts, was_signalled: bool) -> NextAction:
    """Return the next action of a batch job, if the stage may be retried.

    Args:
        job: what Slurm reports about the job.
        was_signalled: whether the supervisor received a signal to stop.
    """
    info = job.info
    if job.was_requeued:
        return NextAction.AWAIT_REQUEUE
    # Only the state CANCELLED prevents the handover here. A job in the state COMPLETING may also have been cancelled,
    # but only its final state shows that. Therefore the successor job checks this final state when it starts.
    if not job.site.requeue and (info is None or info.state != "CANCELLED"):
        return NextAction.HAND_OVER
    # The job may have been cancelled after the supervisor had determined why the attempt ended.
    if infer_stop_cause(job) == ExitCode.CANCELLED:
        return NextAction.CANCEL
    # The signal may have come from scancel or from a requeue. Only the controller could tell the difference.
    if info is None and was_signalled:
        return NextAction.END_UNKNOWN_CANCELLATION
    return NextAction.EXIT_FOR_REQUEUE if job.is_requeued_on_exit else NextAction.REQUEUE
