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
ENDS = ("done", "stopped", "cancelled", "preempted", "failed")
"""Events that end an attempt."""
GOES_ON = ("requeued", "retried", "handed_over")
"""Events that say that the stage goes on by itself."""
REQUESTS = {"cancelled", "stop file"}
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
class Attempts:
    """How a stage stands by its events."""

    started: Event | None = None
    """The start of the newest attempt."""
    stopping: Event | None = None
    """The newest attempt's last word of a stop that was noticed."""
    end: Event | None = None
    """How the newest attempt ended; None while it is open."""
    goes_on: Event | None = None
    """That the stage goes on by itself behind that end."""
    used: Mapping[str, int] = field(default_factory=Counter)
    """How often it went on by itself since a person last said `resume`, by the budgets of `recovery:`."""
    fruitless: int = 0
    """How many attempts in a row, up to the last one that it went on after, brought nothing new."""
    asked_anew: bool = False
    """Whether a person said `resume` since all of that."""

    @property
    def failed(self) -> bool:
        """Whether it ended as failed, and does not go on by itself."""
        return self.end is not None and self.end["event"] == "failed" and self.goes_on is None

    @property
    def done(self) -> bool:
        """Whether the newest attempt said that all is there."""
        return self.end is not None and self.end["event"] == "done"

    @property
    def told(self) -> Event:
        """The newest attempt's last word of why it ends; {} where there is none."""
        return self.end or self.stopping or {}

    @property
    def asked(self) -> str | None:
        """The person's request that the newest attempt ends, or ended, for."""
        who = self.told.get("by" if self.end is None else "cause")
        return str(who) if who in REQUESTS else None


def read(events: Iterable[Event]) -> Attempts:
    """What `events` say, oldest first: those of one stage, or of one task of its array, or of one job."""
    now = Attempts()
    for event in events:
        name = event["event"]
        if name == "started":
            now = replace(now, started=event, stopping=None, end=None, goes_on=None, asked_anew=False)
        elif name == "stopping":
            now = replace(now, stopping=event)
        elif name in ENDS:
            now = replace(now, end=event, goes_on=None, asked_anew=False)
        elif name in GOES_ON:
            fruitless = 0 if event.get("progress", True) else now.fruitless + 1
            used = Counter(now.used) + Counter([str(event.get("budget"))])
            now = replace(now, goes_on=event, used=used, fruitless=fruitless, asked_anew=False)
        elif name == "resumed":
            now = replace(now, used=Counter(), fruitless=0, asked_anew=True)
    return now


def of(run: Run, stage: str, task: int | None) -> Attempts:
    """How a stage of a run stands, or a task of its array."""
    mine = (stage, task)
    return read(e for e in run.read_events() if (e.get("stage"), e.get("task")) == mine or e["event"] == "resumed")


def budget_of(cause: ExitCode) -> str:
    """The key of `recovery:` that a cause is charged to; `user_error` where a person has to mend it."""
    key = _SHARED_BUDGETS.get(cause, cause.name.lower())
    return key if key in RecoveryConfig.model_fields else "user_error"


def ending(cause: ExitCode, *, final: bool) -> str:
    """The event that ends an attempt; `final`: the stage would have gone on by itself, and may not."""
    if final and cause != ExitCode.CANCELLED:
        return "failed"
    name = "stopped" if cause in (ExitCode.TIME_LIMIT, ExitCode.REQUEUED) else cause.name.lower()
    return name if name in ENDS else "failed"


def refusal(before: Attempts, cause: ExitCode, progress: bool, limits: RecoveryConfig) -> str | None:
    """Why a stage that stopped for `cause` may not go on by itself; None where it may, "" where nobody expects it to.

    `progress`: whether this attempt brought something new.
    """
    key = budget_of(cause)
    used, limit = before.used.get(key, 0), getattr(limits, key)
    if limit == 0:
        return ""
    if used >= limit:
        times = f"{used} time{'s' if used != 1 else ''}"
        return f"its budget is used up (recovery.{key}: {limit}; it went on {times} after this before)"
    fruitless = before.fruitless + 1
    allowed = limits.fruitless if cause in _BLAMELESS else 0
    if not progress and fruitless > allowed:
        stage = str((before.started or {}).get("stage"))
        attempts = "this attempt" if fruitless == 1 else f"{fruitless} attempts in a row"
        what = "no new checkpoint" if stage not in STAGES or STAGES[stage].is_training else "nothing new"
        words = f"{attempts} brought {what}; going on would be a loop"
        if cause == ExitCode.TIME_LIMIT:
            words += f". It takes longer to start and to save than stages.{stage}.time allows"
        return words
    return None
