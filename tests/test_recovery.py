"""Causes and budgets: what Slurm says of a job, what it is charged to, and when a stage may not go on by itself."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config_recovery import RecoveryConfig
from pipeline.errors import Exit
from slurm.job import JobFacts, parse_facts
from slurm.recovery import budget_of, refusal, stop_cause

# what scontrol of Slurm 22.05 printed; the comment was chosen to mislead
SHOWN = """JobId=1 JobName=j.sh
   JobState={state} Reason=None Dependency=(null)
   Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:03 TimeLimit={limit} TimeMin=N/A
   StartTime=2026-11-21T05:42:23 EndTime=2026-11-21T05:42:30 Deadline=N/A
   PreemptEligibleTime=2026-11-21T05:42:23 PreemptTime={preempt}
   NodeList=n[1-4]
   Comment=sluice PreemptTime=2026-01-01T00:00:00 JobState=CANCELLED Restarts=7
"""


def shown(state: str = "RUNNING", restarts: int = 0, limit: str = "00:10:00", preempt: str = "None") -> JobFacts:
    return parse_facts(SHOWN.format(state=state, restarts=restarts, limit=limit, preempt=preempt))


def test_facts_are_read_from_the_first_of_each_key() -> None:
    facts = shown()
    assert (facts.state, facts.restarts, facts.preempted, facts.batch, facts.nodes) == (
        "RUNNING", 0, False, True, "n[1-4]",
    )  # fmt: skip
    assert facts.limit_ends == datetime(2026, 11, 21, 5, 52, 23).timestamp()
    assert shown(limit="UNLIMITED").limit_ends is None


@pytest.mark.parametrize(
    ("facts", "after_start", "cause"),
    [
        (shown(preempt="2026-11-21T05:42:25"), 5, Exit.PREEMPTED),
        (shown(state="PREEMPTED"), 5, Exit.PREEMPTED),
        (shown(state="COMPLETING", restarts=1), 5, Exit.PREEMPTED),
        (shown(), 5, Exit.STOPPED),
        (shown(), 600 - 90 - 60, Exit.TIME_LIMIT),  # the signal may come a minute early
        (shown(), 600 - 90 - 80, Exit.STOPPED),
        (shown(state="COMPLETING"), 601, Exit.TIME_LIMIT),
        (shown(state="COMPLETING"), 5, Exit.CANCELLED),
        (shown(state="CANCELLED"), 5, Exit.CANCELLED),
        (None, 5, Exit.STOPPED),
    ],
)
def test_why_slurm_stopped_a_job(facts: JobFacts | None, after_start: float, cause: Exit) -> None:
    start = datetime(2026, 11, 21, 5, 42, 23).timestamp()
    assert stop_cause(facts, 0, 90, start + after_start) == cause


CAUSES = [Exit.PREEMPTED, Exit.NODE_FAILURE, Exit.TIME_LIMIT, Exit.OUT_OF_MEMORY, Exit.CRASHED, Exit.HANG]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(CAUSES), st.booleans()), max_size=60),
    st.integers(1, 4), st.integers(0, 4), st.integers(0, 9),
)  # fmt: skip
def test_a_stage_goes_on_within_its_budgets_and_never_loops(
    stops: list[tuple[Exit, bool]], fruitless: int, small: int, large: int
) -> None:
    """Against a plain count: what went on so far, by budget, and how many fruitless attempts stand in a row."""
    limits = RecoveryConfig(
        preempted=large, node_failure=large, time_limit=large, out_of_memory=small, crash=small, hang=small,
        fruitless=fruitless,
    )  # fmt: skip
    events: list[dict[str, Any]] = []
    used: dict[str, int] = {}
    row = 0
    for cause, progress in stops:
        key = budget_of(cause)
        row = 0 if progress else row + 1
        blameless = cause in (Exit.PREEMPTED, Exit.NODE_FAILURE)
        may = used.get(key, 0) < getattr(limits, key) and (progress or (blameless and row <= fruitless))
        assert (refusal(events, cause, progress, limits) is None) == may
        events.append({"event": "failed", "cause": cause.name.lower()})
        if not may:
            break
        used[key] = used.get(key, 0) + 1
        events.append({"event": "requeued", "budget": key, "progress": progress})


def test_every_failure_has_a_budget() -> None:
    for code in Exit:
        assert isinstance(getattr(RecoveryConfig(), budget_of(code)), int)
    assert refusal([], Exit.STORAGE, True, RecoveryConfig()) == "", "a person has to mend it"
    assert refusal([], Exit.PREEMPTED, False, RecoveryConfig()) is None
    assert "loop" in (refusal([], Exit.TIME_LIMIT, False, RecoveryConfig()) or "")
