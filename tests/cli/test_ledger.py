"""Test the ledger, which divides the time of a run into categories, with simulated runs and with random events."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.html_page import format_page
from pipeline.config.stages import STAGES as PRESET
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

STAGES = {name: PRESET[name] for name in ("shard", "train")}
START_TIME = 1_700_000_000.0
"""Start of each simulated run, in seconds since 1970."""
MEASURED_CATEGORIES = {
    "data": ("data_wait_s", 1 / 4),
    "checkpoint": ("checkpoint_s", 1 / 8),
    "communication": ("exposed_comm_s", 1 / 16),
    "evaluation": ("evaluate_s", 1 / 32),
}
"""Categories of the time of a step, except compute. For each: the key in metrics.jsonl, and its simulated share."""
durations = st.integers(1, 5000).map(lambda n: n / 100)
"""Random durations in seconds."""


def format_time(seconds: float) -> str:
    """Return a time (seconds since 1970) in the format of events.jsonl."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class SimulatedRun:
    """Write the events and metrics of a train stage with a simulated clock, and record the true seconds."""

    def __init__(self) -> None:
        self.clock = START_TIME
        self.events: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        """The lines of metrics.jsonl."""
        self.saved_step = 0
        self.died_silently = False
        """True if the supervisor of the last attempt was killed before it wrote an end event."""
        self.true_seconds: list[dict[str, float]] = []
        """The seconds of each category, for each attempt."""
        self.attempt_of_step: dict[int, int] = {}
        """Index of the attempt that ran a step."""

    def write_event(self, name: str, **fields: Any) -> None:
        """Append an event at the current time."""
        self.events.append({"time": format_time(self.clock), "event": name, "stage": "train", **fields})

    def spend(self, category: str, seconds: float) -> None:
        """Advance the clock and add the seconds to a category of the current attempt."""
        self.clock += seconds
        self.true_seconds[-1][category] += seconds

    def run_attempt(self, plan: dict[str, Any], is_first: bool, is_last: bool) -> None:
        """Simulate an attempt: it waits in the queue, starts, restores a checkpoint, runs steps and ends.

        Args:
            plan: the attempt as a dict. `idle`, `queue`, `startup` and `ending` are the seconds of these phases.
                `steps` has the seconds of each step. If `by_user`, the user submits the job. If `save`, the attempt
                ends with a save. If `silent`, it ends without an event. If `successor`, the job has a successor job.
            is_first: True for the first attempt of the run.
            is_last: True for the last attempt of the run.
        """
        self.true_seconds.append(dict.fromkeys(CATEGORIES, 0.0))
        if is_first or plan["by_user"]:
            if not is_first:
                self.spend("idle", plan["idle"])
            self.write_event("submitted", job_id="7")
        elif not self.died_silently:
            self.write_event("requeued", task=None)
        self.spend("queue", plan["queue"] / 2)
        if plan["successor"]:
            self.write_event("submitted", job_id="8", kind="afternotok", after=["7"])
            if is_first or plan["by_user"] or not self.died_silently:
                # A user runs `resume` while the job is pending. Only after a silent death, no earlier event requests
                # the attempt: the ledger would then count the time before `resumed` as idle.
                self.write_event("resumed")
        self.spend("queue", plan["queue"] / 2)
        if not is_first and self.died_silently:
            self.write_event("failed", task=None, cause="node_failure", noticed_later=True)
        self.write_event("started", task=None, ranks=4, job_id="7", slurm_job="7")
        self.spend("startup", plan["startup"] / 2)
        if plan["successor"]:
            self.write_event("submitted", job_id="9")
        self.spend("startup", plan["startup"] / 2)
        if lost_lines := [line for line in self.lines if line["step"] > self.saved_step]:
            self.write_event("lost_work", steps=[line["step"] for line in lost_lines], lines=lost_lines)
            for line in lost_lines:
                seconds = self.true_seconds[self.attempt_of_step[line["step"]]]
                seconds["lost"] += line["step_time_s"]
                for category, (key, _) in MEASURED_CATEGORIES.items():
                    seconds[category] -= line[key]
                seconds["compute"] -= line["step_time_s"] - sum(line[key] for key, _ in MEASURED_CATEGORIES.values())
            self.lines = self.lines[: self.saved_step]
        if self.saved_step:
            self.write_event("restored", step=self.saved_step)
        self.write_event("ready", step=self.saved_step)
        for duration in plan["steps"]:
            step = len(self.lines) + 1
            self.lines.append(
                {"step": step, "step_time_s": duration, "loss": 1.0, "tokens_per_s": 1.0}
                | {key: duration * share for key, share in MEASURED_CATEGORIES.values()}
            )
            self.attempt_of_step[step] = len(self.true_seconds) - 1
            for category, (_, share) in MEASURED_CATEGORIES.items():
                self.spend(category, duration * share)
            self.spend("compute", duration * (1 - sum(share for _, share in MEASURED_CATEGORIES.values())))
            if step % 3 == 0:
                self.saved_step = step
                self.write_event("saved", step=step)
        self.died_silently = plan["silent"] and not is_last
        if self.died_silently:
            return
        if plan["save"]:
            self.saved_step = len(self.lines)
            self.spend("checkpoint", plan["ending"])
            self.write_event("saved", step=self.saved_step)
        self.spend("ending", plan["ending"])
        event, cause = ("stopped", "preempted") if plan["save"] else ("failed", "crashed")
        self.write_event(event, task=None, cause=cause)


random_plans = st.lists(
    st.fixed_dictionaries(
        {
            "idle": durations, "queue": durations, "startup": durations, "ending": durations,
            "steps": st.lists(durations, max_size=8), "by_user": st.booleans(), "save": st.booleans(),
            "silent": st.booleans(), "successor": st.booleans(),
        }
    ),
    min_size=1,
    max_size=6,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(random_plans)
def test_the_ledger_equals_the_true_seconds_of_a_simulated_run(attempt_plans: list[dict[str, Any]]) -> None:
    """The tolerance allows for times in events.jsonl that are rounded to milliseconds."""
    run = SimulatedRun()
    for number, plan in enumerate(attempt_plans):
        run.run_attempt(plan, is_first=number == 0, is_last=number == len(attempt_plans) - 1)
    ledger = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock)
    assert len(ledger) == len(attempt_plans)
    assert sum(attempt.end_time - attempt.start_time for attempt in ledger) == pytest.approx(
        run.clock - START_TIME, abs=0.01
    )
    for attempt, true_seconds, plan in zip(ledger, run.true_seconds, attempt_plans, strict=True):
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time, abs=1e-6)
        tolerance_s = 0.01 * (2 + len(plan["steps"]))
        assert attempt.seconds == pytest.approx(true_seconds, abs=tolerance_s)


random_events = st.fixed_dictionaries(
    {
        "time": st.integers(0, 100_000).map(lambda n: format_time(START_TIME + n / 10)),
        "event": st.sampled_from(
            ["started", "ready", "failed", "submitted", "resumed", "restored", "saved", "requeued", "done", "stopping"]
        ),
        "stage": st.sampled_from(["train", "train", "train", "shard"]),
        "step": st.integers(0, 30),
        "job_id": st.sampled_from(["7", "8"]),
    },
    optional={"task": st.sampled_from([None, None, 0, 1]), "noticed_later": st.booleans(), "cause": st.just("crashed")},
)
TIME_KEYS = ("step_time_s", *(key for key, _ in MEASURED_CATEGORIES.values()))
metrics_lines = st.lists(st.tuples(*[durations] * len(TIME_KEYS)), max_size=30).map(
    lambda rows: [{"step": i} | dict(zip(TIME_KEYS, row, strict=True)) for i, row in enumerate(rows, 1)]
)
job_runs = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=4).map(
    lambda rows: [JobRun("7", START_TIME + a, START_TIME + a + b) for a, b in rows]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(random_events, min_size=5, max_size=25), metrics_lines, job_runs, st.booleans())
def test_categories_add_up_to_the_wall_time_for_any_events(
    events: list[dict[str, Any]], metrics: list[dict[str, Any]], jobs: list[JobRun], is_running: bool
) -> None:
    """Also, the page with the timeline contains no unescaped text and no "nan"."""
    now = START_TIME + 20_000
    ledger = build_ledger(parse_events(events), metrics, STAGES, now, ["train"] if is_running else [], jobs)
    previous_attempts: dict[tuple[str, int | None], AttemptTimes] = {}
    for attempt in ledger:
        assert set(attempt.seconds) == set(CATEGORIES) and min(attempt.seconds.values()) >= -1e-9
        assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time, abs=1e-5)
        previous = previous_attempts.get((attempt.stage, attempt.task))
        assert previous is None or attempt.start_time == previous.end_time, "there must be no gap between attempts"
        previous_attempts[attempt.stage, attempt.task] = attempt
    ettr, progress = compute_ratios(sum_categories(ledger))
    assert 0 <= ettr <= progress <= 1
    page = format_page("<x>", "run <x>", {"<x>": "<x>"}, {"<x>": [draw_timeline(ledger)]}, ["<x>"], "<x>")
    assert "<x>" not in page and "nan" not in page


def test_compute_ratios_returns_ettr_and_forward_progress() -> None:
    """Of 200 s, 90 s are productive (compute and data), 60 s are in the queue and 20 s are idle.

    The effective training time ratio (ETTR) excludes idle time. Forward progress also excludes the queue.
    """
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {
        "idle": 20,
        "queue": 60,
        "startup": 10,
        "compute": 80,
        "data": 10,
        "lost": 20,
    }
    assert compute_ratios(seconds) == pytest.approx((90 / 180, 90 / 120))


def test_the_times_of_a_job_without_an_end_event_are_taken_from_accounting() -> None:
    """Accounting says that the job ran from second 15 to 60, and again from second 120 to 150."""
    run = SimulatedRun()
    plan = {"idle": 5.0, "startup": 10.0, "ending": 1.0, "by_user": False, "save": True, "successor": False}
    run.run_attempt({**plan, "queue": 20.0, "steps": [1.0] * 4, "silent": True}, is_first=True, is_last=False)
    run.run_attempt({**plan, "queue": 100.0, "steps": [1.0], "silent": False}, is_first=False, is_last=True)
    jobs = [JobRun("7", START_TIME + 15, START_TIME + 60), JobRun("7", START_TIME + 120, START_TIME + 150)]
    first, second = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock, (), jobs)
    assert first.seconds["queue"] == pytest.approx(15) and first.seconds["startup"] == pytest.approx(15)
    # the last step ends at second 20 (queue) + 10 (startup) + 4 (steps)
    assert first.end_time == START_TIME + 60 and first.seconds["ending"] == pytest.approx(60 - 34, abs=0.01)
    assert second.seconds["queue"] == pytest.approx(60) and second.start_time == START_TIME + 60
    assert second.cause == "preempted" and first.seconds["lost"] == pytest.approx(1)


def test_the_last_attempt_of_a_running_stage_lasts_until_now() -> None:
    """The ledger is built 50 s after the last event. If the stage does not run, the attempt ends at that event."""
    run = SimulatedRun()
    plan = {"idle": 1.0, "queue": 2.0, "startup": 3.0, "ending": 1.0, "by_user": False, "save": False}
    run.run_attempt({**plan, "steps": [1.0], "silent": True, "successor": False}, is_first=True, is_last=False)
    (attempt,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock + 50, ["train"])
    assert attempt.cause == "running"
    assert attempt.end_time - attempt.start_time == pytest.approx(2 + 3 + 1 + 50, abs=0.01)
    (attempt,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock + 50)
    assert attempt.cause == "no end recorded" and attempt.end_time - attempt.start_time == pytest.approx(6, abs=0.01)


def test_steps_are_scaled_if_they_take_longer_than_their_attempt() -> None:
    """The clocks of the supervisor and of the host of rank 0 may differ. The sum must equal the wall time.

    Four steps take 4 s, but the end event is only 2 s after the event `ready`.
    """
    run = SimulatedRun()
    plan: dict[str, Any] = {"idle": 1.0, "queue": 2.0, "startup": 3.0, "ending": 0.0, "by_user": False, "save": False}
    plan |= {"steps": [1.0] * 4, "silent": False, "successor": False}
    run.run_attempt(plan, is_first=True, is_last=True)
    run.events[-1]["time"] = format_time(run.clock - 2)
    (attempt,) = build_ledger(parse_events(run.events), run.lines, STAGES, run.clock)
    assert attempt.end_time - attempt.start_time == pytest.approx(7, abs=0.01)
    assert sum(attempt.seconds.values()) == pytest.approx(attempt.end_time - attempt.start_time)
    # in the simulation, 17/32 of the time of a step is computation: 1 - 1/4 - 1/8 - 1/16 - 1/32
    assert attempt.seconds["compute"] == pytest.approx(2 * 17 / 32, abs=0.01) and attempt.seconds["ending"] == 0


def test_the_overhead_of_profiling_does_not_count_as_compute() -> None:
    seconds = split_step_time({"step_time_s": 1.0, "profile_s": 0.4, "data_wait_s": 0.1, "profile": {"compute": 0.5}})
    assert seconds["profiling"] == 0.4 and seconds["compute"] == pytest.approx(0.5)
