"""Rules for retrying a stage: the state of its attempts, the budget of each cause, and progress since the last attempt.

The supervisor decides (slurm/supervise/supervisor.py). It combines these rules with the cause of the stop, which
slurm/supervise/decision.py determines.
"""

from __future__ import annotations

from pipeline.base.errors import ExitCode
from pipeline.config.sections import RecoveryConfig, RetryBudgets
from pipeline.config.stages import STAGES
from pipeline.run.directory import Run
from pipeline.run.events import END_EVENTS, EndEvent, Failed, StageState, Stopped, read_stage_state, select_task_events

_SHARED_BUDGETS = {
    ExitCode.STOPPED: "preempted",
    ExitCode.REQUEUED: "preempted",
    ExitCode.CRASHED: "crash",
    ExitCode.PEER_LOST: "crash",
}
"""Keys of `recovery.budgets` for causes without a budget of the same name."""
_NOT_CAUSED_BY_RUN = (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.STOPPED, ExitCode.NODE_FAILURE, ExitCode.BAD_NODE)


def load_stage_state(run: Run, stage: str, task: int | None) -> StageState:
    """Return the state of a stage, or of one task of its job array."""
    return read_stage_state(select_task_events(run.read_events(), stage, task))


def get_budget_key(cause: ExitCode) -> str:
    """Return the key of `recovery.budgets` that limits retries after a cause.

    The key is `user_error` if only a user can repair the cause.
    """
    key = _SHARED_BUDGETS.get(cause, cause.name.lower())
    return key if key in RetryBudgets.model_fields else "user_error"


def get_end_event(cause: ExitCode, *, final: bool) -> type[EndEvent]:
    """Return the class of the event that ends an attempt.

    Args:
        cause: Why the attempt ended.
        final: Whether the stage is not retried only because its budget is used up or the attempt made no progress.
    """
    if final and cause != ExitCode.CANCELLED:
        return Failed
    if cause in (ExitCode.TIME_LIMIT, ExitCode.REQUEUED):
        return Stopped
    return next((each for each in END_EVENTS if cause.name.lower() == each.NAME), Failed)


def explain_no_retry(before: StageState, cause: ExitCode, has_progress: bool, limits: RecoveryConfig) -> str | None:
    """Return why a stopped stage is not retried. None: it is retried. "": its cause is never retried.

    Args:
        before: The state of the stage before this attempt ended.
        cause: Why the attempt ended.
        has_progress: Whether the attempt made progress, such as a new checkpoint.
        limits: The budgets of the run.
    """
    key = get_budget_key(cause)
    used = before.used_budgets.get(key, 0)
    limit = getattr(limits.budgets, key)
    if limit == 0:
        return ""
    if used >= limit:
        times = f"{used} time{'s' if used != 1 else ''}"
        return (
            f"its budget is used up (recovery.budgets.{key}: {limit}; the stage was already retried {times} after this "
            "cause)"
        )
    count = before.restarts_without_progress + 1
    max_count = limits.max_restarts_without_progress if cause in _NOT_CAUSED_BY_RUN else 0
    if has_progress or count <= max_count:
        return None
    stage = str(before.start_event and before.start_event.stage)
    attempts = "this attempt" if count == 1 else f"{count} attempts in a row"
    trains = stage not in STAGES or STAGES[stage].is_training
    result = "saved no new checkpoint" if trains else "completed nothing new"
    reason = f"{attempts} {result}, so another attempt would probably do the same"
    if cause == ExitCode.TIME_LIMIT:
        reason += f". Starting and saving take longer than stages.{stage}.time allows"
    return reason
