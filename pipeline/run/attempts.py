"""Rules for retrying a stage: the state of its attempts, the budget of each cause, and progress since the last attempt.

The supervisor applies these rules (slurm/supervise/supervisor.py). slurm/supervise/decision.py determines the cause of
a stop.
"""

from __future__ import annotations

from pipeline.base.errors import ExitCode
from pipeline.config.sections import RecoveryConfig, RetryBudgets
from pipeline.run.directory import Run
from pipeline.run.events import END_EVENTS, EndEvent, Failed, StageState, Stopped, read_stage_state, select_task_events

_SHARED_BUDGETS = {
    ExitCode.STOPPED: "preempted",
    ExitCode.REQUEUED: "preempted",
    ExitCode.CRASHED: "crash",
    ExitCode.PEER_LOST: "crash",
}
"""Cause → key of `recovery.budgets`, for causes without a budget of the same name."""
_EXTERNAL_CAUSES = (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.STOPPED, ExitCode.NODE_FAILURE, ExitCode.BAD_NODE)
"""Causes from outside the run. After these causes, a stage is also retried without progress, but only
`recovery.max_restarts_without_progress` times in a row."""


def load_stage_state(run: Run, stage: str, task: int | None) -> StageState:
    """Return the state of a stage, or of one task of its job array."""
    return read_stage_state(select_task_events(run.read_events(), stage, task))


def get_budget_key(cause: ExitCode) -> str:
    """Return the key of `recovery.budgets` that limits retries after a cause.

    The key is `user_error` for causes without their own budget, such as damaged input or a cancelled job. The default
    of this budget is 0, so by default only a user can continue the stage after these causes.
    """
    key = _SHARED_BUDGETS.get(cause, cause.name.lower())
    return key if key in RetryBudgets.model_fields else "user_error"


def get_end_event(cause: ExitCode, *, final: bool) -> type[EndEvent]:
    """Return the class of the event to write at the end of an attempt.

    The class is `Failed` if no other end event belongs to the cause. It is also `Failed` if `final` is true, except for
    the cause CANCELLED. The causes TIME_LIMIT and REQUEUED belong to `Stopped`.

    Args:
        cause: Why the attempt ended.
        final: Whether the cause allows a retry, but the budget is used up or the attempt made no progress.
    """
    if final and cause != ExitCode.CANCELLED:
        return Failed
    if cause in (ExitCode.TIME_LIMIT, ExitCode.REQUEUED):  # no end event has the name of one of these causes
        return Stopped
    return next((event_class for event_class in END_EVENTS if cause.name.lower() == event_class.NAME), Failed)


def explain_no_retry(state: StageState, cause: ExitCode, has_progress: bool, limits: RecoveryConfig) -> str | None:
    """Return why a stopped stage is not retried.

    A stage is not retried if the budget of the cause is used up, or if too many attempts in a row made no progress.
    After most causes, a single attempt without progress is too many.

    Args:
        state: The state of the stage before the end event of this attempt.
        cause: Why the attempt ended.
        has_progress: Whether the attempt made progress, such as a new checkpoint.
        limits: The section `recovery` of the config.

    Returns:
        The reason; None if the stage is retried; "" if the budget of the cause is 0, so the cause is never retried.
    """
    key = get_budget_key(cause)
    retry_count = state.used_budgets.get(key, 0)
    max_retries = getattr(limits.budgets, key)
    if max_retries == 0:
        return ""
    if retry_count >= max_retries:
        times = f"{retry_count} time{'s' if retry_count != 1 else ''}"
        return (
            f"its budget is used up (recovery.budgets.{key}: {max_retries}; the stage was already retried {times} "
            "after this cause)"
        )
    attempts_without_progress = state.restarts_without_progress + 1
    max_attempts = limits.max_restarts_without_progress if cause in _EXTERNAL_CAUSES else 0
    if has_progress or attempts_without_progress <= max_attempts:
        return None
    attempts = "this attempt" if attempts_without_progress == 1 else f"{attempts_without_progress} attempts in a row"
    reason = f"{attempts} saved or completed nothing new, so another attempt would probably do the same"
    if cause == ExitCode.TIME_LIMIT:
        stage = str(state.start_event and state.start_event.stage)
        reason += f". Starting and saving take longer than stages.{stage}.time allows"
    return reason
