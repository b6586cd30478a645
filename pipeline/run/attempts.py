"""What the events of a stage mean: one pure function from them to a small record, used by everybody who asks.

    started ──────────► open ── stopping ──► open, with a word of why
                         │
                         ├─ done · stopped · cancelled · preempted · failed ──► ended
                         │                                                       │
                         └──────────── requeued · retried · handed_over ◄────────┘   it goes on by itself
                                                     │
                                                  started …

An attempt that stays open ended without a word of its supervisor, unless somebody holds the stage's lock or Slurm shows
its job: :func:`read` does not ask them, its callers do (slurm/query/status.py, slurm/query/stop_causes.py). A person's
`resumed` gives every budget back; what went on by itself since is charged to them.
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
"""Events that say that the stage goes on by itself."""
USER_REQUESTS = {"cancelled", "stop file"}
"""Who asked for a stop, where it was a person."""
_SHARED_BUDGETS = {
    ExitCode.STOPPED: "preempted",
    ExitCode.REQUEUED: "preempted",
    ExitCode.CRASHED: "crash",
    ExitCode.PEER_LOST: "crash",
}
"""Of causes that have none of their own name."""
_BLAMELESS = (ExitCode.PREEMPTED, ExitCode.REQUEUED, ExitCode.STOPPED, ExitCode.NODE_FAILURE, ExitCode.BAD_NODE)


@dataclass(frozen=True)
class StageState:
    """How a stage stands by its events."""

    start_event: Event | None = None
    """The start of the newest attempt."""
    stopping_event: Event | None = None
    """The newest attempt's last word of a stop that was noticed."""
    end_event: Event | None = None
    """How the newest attempt ended; None while it is open."""
    retry_event: Event | None = None
    """That the stage goes on by itself behind that end."""
    used_budgets: Mapping[str, int] = field(default_factory=Counter)
    """How often it went on by itself since a person last said `resume`, by the budgets of `recovery:`."""
    restarts_without_progress: int = 0
    """How many attempts in a row, up to the last one that it went on after, brought nothing new."""
    resumed_by_user: bool = False
    """Whether a person said `resume` since all of that."""

    @property
    def has_failed(self) -> bool:
        """Whether it ended as failed, and does not go on by itself."""
        return self.end_event is not None and self.end_event["event"] == "failed" and self.retry_event is None

    @property
    def is_done(self) -> bool:
        """Whether the newest attempt said that all is there."""
        return self.end_event is not None and self.end_event["event"] == "done"

    @property
    def last_stop_event(self) -> Event:
        """The newest attempt's last word of why it ends; {} where there is none."""
        return self.end_event or self.stopping_event or {}

    @property
    def user_request(self) -> str | None:
        """The person's request that the newest attempt ends, or ended, for."""
        who = self.last_stop_event.get("by" if self.end_event is None else "cause")
        return str(who) if who in USER_REQUESTS else None


def read_stage_state(events: Iterable[Event]) -> StageState:
    """What `events` say, oldest first: those of one stage, or of one task of its array, or of one job."""
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
    """How a stage of a run stands, or a task of its array."""
    mine = (stage, task)
    return read_stage_state(
        e for e in run.read_events() if (e.get("stage"), e.get("task")) == mine or e["event"] == "resumed"
    )


def get_budget_key(cause: ExitCode) -> str:
    """The key of `recovery:` that a cause is charged to; `user_error` where a person has to mend it."""
    key = _SHARED_BUDGETS.get(cause, cause.name.lower())
    return key if key in RecoveryConfig.model_fields else "user_error"


def get_end_event(cause: ExitCode, *, final: bool) -> str:
    """The event that ends an attempt; `final`: the stage would have gone on by itself, and may not."""
    if final and cause != ExitCode.CANCELLED:
        return "failed"
    name = "stopped" if cause in (ExitCode.TIME_LIMIT, ExitCode.REQUEUED) else cause.name.lower()
    return name if name in END_EVENTS else "failed"


def explain_no_retry(before: StageState, cause: ExitCode, progress: bool, limits: RecoveryConfig) -> str | None:
    """Why a stage that stopped for `cause` may not go on by itself; None where it may, "" where nobody expects it to.

    `progress`: whether this attempt brought something new.
    """
    key = get_budget_key(cause)
    used, limit = before.used_budgets.get(key, 0), getattr(limits, key)
    if limit == 0:
        return ""
    if used >= limit:
        times = f"{used} time{'s' if used != 1 else ''}"
        return f"its budget is used up (recovery.{key}: {limit}; it went on {times} after this before)"
    fruitless = before.restarts_without_progress + 1
    allowed = limits.fruitless if cause in _BLAMELESS else 0
    if not progress and fruitless > allowed:
        stage = str((before.start_event or {}).get("stage"))
        attempts = "this attempt" if fruitless == 1 else f"{fruitless} attempts in a row"
        what = "no new checkpoint" if stage not in STAGES or STAGES[stage].is_training else "nothing new"
        words = f"{attempts} brought {what}; going on would be a loop"
        if cause == ExitCode.TIME_LIMIT:
            words += f". It takes longer to start and to save than stages.{stage}.time allows"
        return words
    return None
