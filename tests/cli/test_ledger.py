"""The ledger's parts: against a simulated run whose hours are known, and against events that make no sense."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.html_page import format_page
from pipeline.run.ledger import (
    CATEGORIES,
    AttemptTimes,
    JobRun,
    build_ledger,
    compute_ratios,
    split_step_time,
    sum_categories,
)
from tests.support.events import parse_events
from tracking.report import draw_timeline

STAGES = ("shard", "train")
T0 = 1_700_000_000.0
MEASURED = {
    "data": ("data_wait_s", 1 / 4),
    "checkpoint": ("checkpoint_s", 1 / 8),
    "communication": ("exposed_comm_s", 1 / 16),
    "evaluation": ("evaluate_s", 1 / 32),
}
"""What of a step is not compute: its part, its key in a line of metrics, and its share in the simulation."""
span = st.integers(1, 5000).map(lambda n: n / 100)


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Simulated:
    """A training as the supervisor and rank 0 write it down, with the true hours beside it."""

    def __init__(self) -> None:
        self.clock, self.events, self.lines = T0, [], []  # type: float, list[dict[str, Any]], list[dict[str, Any]]
        self.saved, self.silent = 0, False
        self.truth: list[dict[str, float]] = []
        self.owner: dict[int, int] = {}

    def event(self, name: str, **more: Any) -> None:
        self.events.append({"time": stamp(self.clock), "event": name, "stage": "train", **more})

    def spend(self, part: str, seconds: float) -> None:
        self.clock += seconds
        self.truth[-1][part] += seconds

    def attempt(self, plan: dict[str, Any], first: bool, last: bool) -> None:
        """Queue, start, restore, train `plan["steps"]`, and end as planned."""
        self.truth.append(dict.fromkeys(CATEGORIES, 0.0))
        if first or plan["by_hand"]:
            if not first:
                self.spend("idle", plan["idle"])
            self.event("submitted", job_id="7")
        elif not self.silent:
            self.event("requeued", task=None)
        self.spend("queue", plan["queue"] / 2)
        if plan["successor"]:
            self.event("submitted", job_id="8", kind="afternotok", after=["7"])
            if first or plan["by_hand"] or not self.silent:  # a person types `resume` while it waits anyhow
                self.event("resumed")
        self.spend("queue", plan["queue"] / 2)
        if not first and self.silent:
            self.event("failed", task=None, cause="node_failure", noticed_later=True)
        self.event("started", task=None, ranks=4, job_id="7", slurm_job="7")
        self.spend("startup", plan["startup"] / 2)
        if plan["successor"]:
            self.event("submitted", job_id="9")
        self.spend("startup", plan["startup"] / 2)
        if lost := [line for line in self.lines if line["step"] > self.saved]:
            self.event("lost_work", steps=[line["step"] for line in lost], lines=lost)
            for line in lost:
                account = self.truth[self.owner[line["step"]]]
                account["lost"] += line["step_time_s"]
                for part, (key, _) in MEASURED.items():
                    account[part] -= line[key]
                account["compute"] -= line["step_time_s"] - sum(line[key] for key, _ in MEASURED.values())
            self.lines = self.lines[: self.saved]
        if self.saved:
            self.event("restored", step=self.saved)
        self.event("ready", step=self.saved)
        for length in plan["steps"]:
            step = len(self.lines) + 1
            self.lines.append(
                {"step": step, "step_time_s": length, "loss": 1.0, "tokens_per_s": 1.0}
                | {key: length * share for key, share in MEASURED.values()}
            )
            self.owner[step] = len(self.truth) - 1
            for part, (_, share) in MEASURED.items():
                self.spend(part, length * share)
            self.spend("compute", length * (1 - sum(share for _, share in MEASURED.values())))
            if step % 3 == 0:
                self.saved = step
                self.event("saved", step=step)
        self.silent = plan["silent"] and not last
        if self.silent:
            return
        if plan["save"]:
            self.saved = len(self.lines)
            self.spend("checkpoint", plan["ending"])
            self.event("saved", step=self.saved)
        self.spend("ending", plan["ending"])
        self.event("stopped" if plan["save"] else "failed", task=None, cause="preempted" if plan["save"] else "crashed")


plans = st.lists(
    st.fixed_dictionaries(
        {
            "idle": span, "queue": span, "startup": span, "ending": span, "steps": st.lists(span, max_size=8),
            "by_hand": st.booleans(), "save": st.booleans(), "silent": st.booleans(),
            "successor": st.booleans(),
        }
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(plans)
def test_every_second_is_where_it_was_spent(plan: list[dict[str, Any]]) -> None:
    run = Simulated()
    for number, part in enumerate(plan):
        run.attempt(part, number == 0, number == len(plan) - 1)
    found = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock)
    assert len(found) == len(plan)
    assert sum(a.end_time - a.start_time for a in found) == pytest.approx(run.clock - T0, abs=0.01)
    for attempt, truth, part in zip(found, run.truth, plan, strict=True):
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time, abs=1e-6)
        slack = 0.01 * (2 + len(part["steps"]))
        expected = dict(truth)
        if not part["steps"] and part["save"] and attempt.seconds["ending"] < expected["ending"] - slack:
            raise AssertionError("an attempt without steps lost its ending")
        assert attempt.seconds == pytest.approx(expected, abs=slack)


anything = st.fixed_dictionaries(
    {
        "time": st.integers(0, 100_000).map(lambda n: stamp(T0 + n / 10)),
        "event": st.sampled_from(
            ["started", "ready", "failed", "submitted", "resumed", "restored", "saved", "requeued", "done", "stopping"]
        ),
        "stage": st.sampled_from(["train", "train", "train", "shard"]),
        "step": st.integers(0, 30),
        "job_id": st.sampled_from(["7", "8"]),
    },
    optional={"task": st.sampled_from([None, None, 0, 1]), "noticed_later": st.booleans(), "cause": st.just("crashed")},
)
KEYS = ("step_time_s", *(key for key, _ in MEASURED.values()))
lines = st.lists(st.tuples(*[span] * len(KEYS)), max_size=30).map(
    lambda rows: [{"step": i} | dict(zip(KEYS, row, strict=True)) for i, row in enumerate(rows, 1)]
)
job_runs = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=4).map(
    lambda rows: [JobRun("7", T0 + a, T0 + a + b) for a, b in rows]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(anything, min_size=5, max_size=25), lines, job_runs, st.booleans())
def test_parts_add_up_whatever_the_events(
    events: list[dict[str, Any]], metrics: list[dict[str, Any]], jobs: list[JobRun], running: bool
) -> None:
    found = build_ledger(parse_events(events), metrics, STAGES, T0 + 20_000, ["train"] if running else [], jobs)
    before: dict[tuple[str, int | None], AttemptTimes] = {}
    for attempt in found:
        assert set(attempt.seconds) == set(CATEGORIES) and min(attempt.seconds.values()) >= -1e-9
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time, abs=1e-5)
        last = before.get((attempt.stage, attempt.task))
        assert last is None or attempt.start_time == last.end_time, "accounts follow each other without a gap"
        before[attempt.stage, attempt.task] = attempt
    ettr, progress = compute_ratios(sum_categories(found))
    assert 0 <= ettr <= progress <= 1
    shown = format_page("<x>", "run <x>", {"<x>": "<x>"}, {"<x>": [draw_timeline(found)]}, ["<x>"], "<x>")
    assert "<x>" not in shown and "nan" not in shown


def test_two_figures_of_a_known_run() -> None:
    """90 s of steps that count in 200 s, of which 60 s in the queue and 20 s idle."""
    parts = dict.fromkeys(CATEGORIES, 0.0) | {
        "idle": 20,
        "queue": 60,
        "startup": 10,
        "compute": 80,
        "data": 10,
        "lost": 20,
    }
    assert compute_ratios(parts) == pytest.approx((90 / 180, 90 / 120))


def test_accounting_says_when_a_dead_job_began_and_ended() -> None:
    run = Simulated()
    common = {"idle": 5.0, "startup": 10.0, "ending": 1.0, "by_hand": False, "save": True, "successor": False}
    run.attempt({**common, "queue": 20.0, "steps": [1.0] * 4, "silent": True}, True, False)
    run.attempt({**common, "queue": 100.0, "steps": [1.0], "silent": False}, False, True)
    jobs = [JobRun("7", T0 + 15, T0 + 60), JobRun("7", T0 + 120, T0 + 150)]
    first, second = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock, (), jobs)
    assert first.seconds["queue"] == pytest.approx(15) and first.seconds["startup"] == pytest.approx(15)
    assert first.end_time == T0 + 60 and first.seconds["ending"] == pytest.approx(60 - 34, abs=0.01)
    assert second.seconds["queue"] == pytest.approx(60) and second.start_time == T0 + 60
    assert second.cause == "preempted" and first.seconds["lost"] == pytest.approx(1)


def test_the_last_attempt_goes_on_until_now() -> None:
    run = Simulated()
    plan = {"idle": 1.0, "queue": 2.0, "startup": 3.0, "ending": 1.0, "by_hand": False, "save": False}
    run.attempt({**plan, "steps": [1.0], "silent": True, "successor": False}, True, False)
    (attempt,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock + 50, ["train"])
    assert attempt.cause == "running" and attempt.end_time - attempt.start_time == pytest.approx(
        2 + 3 + 1 + 50, abs=0.01
    )
    (silent,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock + 50)
    assert silent.cause == "no end recorded" and silent.end_time - silent.start_time == pytest.approx(6, abs=0.01)


def test_steps_cannot_take_longer_than_there_was_time() -> None:
    """The clock of rank 0's host is behind the supervisor's: its steps are scaled, and nothing is lost or invented."""
    run = Simulated()
    plan = {"idle": 1.0, "queue": 2.0, "startup": 3.0, "ending": 0.0, "by_hand": False, "save": False}
    run.attempt({**plan, "steps": [1.0] * 4, "silent": False, "successor": False}, True, True)
    run.events[-1]["time"] = stamp(run.clock - 2)
    (attempt,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock)
    assert attempt.end_time - attempt.start_time == pytest.approx(7, abs=0.01)
    assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time)
    assert attempt.seconds["compute"] == pytest.approx(2 * 17 / 32, abs=0.01) and attempt.seconds["ending"] == 0


def test_what_profiling_took_is_no_computing() -> None:
    found = split_step_time({"step_time_s": 1.0, "profile_s": 0.4, "data_wait_s": 0.1, "profile": {"compute": 0.5}})
    assert found["profiling"] == 0.4 and found["compute"] == pytest.approx(0.5)
