"""What the events of a stage mean: its state, and whether it may be retried.

    started ──────────► open ── stopping ──► open, with the reason of the stop
                         │
                         ├─ done · stopped · cancelled · preempted · failed ──► ended
                         │                                                       │
                         └──────────── requeued · retried · handed_over ◄────────┘   Sluice retries the stage
                                                     │
                                                  started …

An attempt without an end event is either running or its supervisor died. :func:`read_stage_state` cannot tell which.
Its callers check the lock of the stage and the job in Slurm (slurm/query/status.py, slurm/supervise/attempt_end.py).
The event `resumed` (a user ran `resume`) resets every retry budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipeline.base.errors import ExitCode
from pipeline.config.recovery import RecoveryConfig
from pipeline.config.stages import STAGES
from pipeline.run.directory import Run

Event = Mapping[str, Any]
END_EVENTS = ("done", "stopped", "cancelled", "preempted", "failed")
"""Events that end an attempt."""
RETRY_EVENTS = ("requeued", "retried", "handed_over")
"""Events that announce a retry without a user."""
USER_REQUESTS = {"cancelled", "stop file"}
"""Reasons of a stop that a user requested."""
_SHARED_BUDGETS = {
    ExitCode.STOPPED: "preempted",
    ExitCode.REQUEUED: "preempted",
    ExitCode.CRASHED: "crash",
    ExitCode.PEER_LOST: "crash",
}
"""Keys of `recovery:` for causes without a budget of the same name."""
_NOT_CAUSED_BY_RUN = (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.STOPPED, ExitCode.NODE_FAILURE, ExitCode.BAD_NODE)


@dataclass(frozen=True)
class StageState:
    """The state of a stage according to its events."""

    start_event: Event | None = None
    """The `started` event of the newest attempt."""
    stopping_event: Event | None = None
    """The newest attempt's last `stopping` event: the supervisor noticed a stop."""
    end_event: Event | None = None
    """The end event of the newest attempt; None while it is open."""
    retry_event: Event | None = None
    """The event that announces a retry after that end."""
    used_budgets: Mapping[str, int] = field(default_factory=Counter)
    """Number of retries since the last `resume`, by key of `recovery:`."""
    restarts_without_progress: int = 0
    """Number of consecutive retried attempts that made no progress."""
    resumed_by_user: bool = False
    """Whether the user ran `resume` after the newest attempt."""

    @property
    def has_failed(self) -> bool:
        """Whether the newest attempt failed and is not retried."""
        return self.end_event is not None and self.end_event["event"] == "failed" and self.retry_event is None

    @property
    def is_done(self) -> bool:
        """Whether the newest attempt ended with the event `done`."""
        return self.end_event is not None and self.end_event["event"] == "done"

    @property
    def last_stop_event(self) -> Event:
        """The newest attempt's last event about its end; an empty mapping if there is none."""
        return self.end_event or self.stopping_event or {}

    @property
    def user_request(self) -> str | None:
        """The user's request that stopped, or is stopping, the newest attempt; None if no user stopped it."""
        reason = self.last_stop_event.get("by" if self.end_event is None else "cause")
        return str(reason) if reason in USER_REQUESTS else None


def read_stage_state(events: Iterable[Event]) -> StageState:
    """Return the state that follows from `events`, oldest first: those of one stage, array task or job."""
    state = StageState()
    for event in events:
        name = event["event"]
        if name == "started":
            state = replace(
                state, start_event=event, stopping_event=None, end_event=None, retry_event=None, resumed_by_user=False
            )
        elif name == "stopping":
            state = replace(state, stopping_event=event)
        elif name in END_EVENTS:
            state = replace(state, end_event=event, retry_event=None, resumed_by_user=False)
        elif name in RETRY_EVENTS:
            has_progress = event.get("progress", True)
            state = replace(
                state,
                retry_event=event,
                used_budgets=Counter(state.used_budgets) + Counter([str(event.get("budget"))]),
                restarts_without_progress=0 if has_progress else state.restarts_without_progress + 1,
                resumed_by_user=False,
            )
        elif name == "resumed":
            state = replace(state, used_budgets=Counter(), restarts_without_progress=0, resumed_by_user=True)
    return state


def load_stage_state(run: Run, stage: str, task: int | None) -> StageState:
    """Return the state of a stage, or of one task of its job array."""
    key = (stage, task)
    return read_stage_state(
        e for e in run.read_events() if (e.get("stage"), e.get("task")) == key or e["event"] == "resumed"
    )


def get_budget_key(cause: ExitCode) -> str:
    """Return the key of `recovery:` that limits retries after a cause; `user_error` if only a user can repair it."""
    key = _SHARED_BUDGETS.get(cause, cause.name.lower())
    return key if key in RecoveryConfig.model_fields else "user_error"


def get_end_event(cause: ExitCode, *, final: bool) -> str:
    """Return the name of the event that ends an attempt.

    Args:
        cause: Why the attempt ended.
        final: Whether the stage would have been retried but its budget or its lack of progress forbids it.
    """
    if final and cause != ExitCode.CANCELLED:
        return "failed"
    name = "stopped" if cause in (ExitCode.TIME_LIMIT, ExitCode.REQUEUED) else cause.name.lower()
    return name if name in END_EVENTS else "failed"


def explain_no_retry(before: StageState, cause: ExitCode, has_progress: bool, limits: RecoveryConfig) -> str | None:
    """Return why a stopped stage is not retried; None if it is, "" if its cause is never retried.

    Args:
        before: The state of the stage before this attempt ended.
        cause: Why the attempt ended.
        has_progress: Whether the attempt made progress, such as a new checkpoint.
        limits: The budgets of the run.
    """
    key = get_budget_key(cause)
    used = before.used_budgets.get(key, 0)
    limit = getattr(limits, key)
    if limit == 0:
        return ""
    if used >= limit:
        times = f"{used} time{'s' if used != 1 else ''}"
        return (
            f"its budget is used up (recovery.{key}: {limit}; the stage was already retried {times} after this cause)"
        )
    count = before.restarts_without_progress + 1
    max_count = limits.fruitless if cause in _NOT_CAUSED_BY_RUN else 0
    if has_progress or count <= max_count:
        return None
    stage = str((before.start_event or {}).get("stage"))
    attempts = "this attempt" if count == 1 else f"{count} attempts in a row"
    missing = "no new checkpoint" if stage not in STAGES or STAGES[stage].is_training else "nothing new"
    reason = f"{attempts} brought {missing}; another attempt would be a loop"
    if cause == ExitCode.TIME_LIMIT:
        reason += f". It takes longer to start and to save than stages.{stage}.time allows"
    return reason
