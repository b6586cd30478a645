"""Test the format of events in events.jsonl, and the state of a stage that follows from its events."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import ExitCode
from pipeline.run.directory import Run
from pipeline.run.events import (
    EVENT_CLASSES,
    USER_REQUESTS,
    EndEvent,
    Event,
    Requeued,
    Resumed,
    RetryEvent,
    Started,
    StepLines,
    StopInfo,
    Stopping,
    SubmissionEvent,
    UnknownEvent,
    parse_event,
    read_stage_state,
    split_into_attempts,
)
from tests.support.events import make_event, parse_events

E = TypeVar("E", bound=Event)
METRICS_LINE = {"step": 3, "loss": 5.0, "step_time_s": 0.1, "tokens_per_s": 10.0}

# -- format ------------------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
nonnegative_integers = st.integers(0, 2**47)
STRATEGY_BY_TYPE: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(),
    int: nonnegative_integers,
    float: st.floats(0, 1e9),
    bool: st.booleans(),
    list[str]: st.lists(st.text(), max_size=3),
    list[int]: st.lists(nonnegative_integers, max_size=3),
    Mapping[str, Any]: st.dictionaries(st.text(), json_values, max_size=3),
    list[dict[str, Any]]: st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=3),
    StepLines: st.lists(st.just(METRICS_LINE), max_size=2),
}


def make_value_strategy(name: str, hint: object) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of the field `name`, which has the type hint `hint`."""
    if name == "exit_code":
        return st.none() | st.sampled_from([int(code) for code in ExitCode])
    if hint in STRATEGY_BY_TYPE:
        return STRATEGY_BY_TYPE[hint]
    if typing.get_origin(hint) is Annotated:
        return make_value_strategy(name, typing.get_args(hint)[0])
    assert typing.get_origin(hint) in (typing.Union, types.UnionType), (name, hint)
    value_type = next(member for member in typing.get_args(hint) if member is not types.NoneType)
    return st.none() | make_value_strategy(name, value_type)


def make_event_strategy(event_class: type[Event]) -> st.SearchStrategy[Event]:
    """Return a strategy for events of a class, with random values of its fields and with fields of a newer version."""
    hints = typing.get_type_hints(event_class, include_extras=True)
    names = [field.name for field in dataclasses.fields(event_class)]
    fields = {name: make_value_strategy(name, hints[name]) for name in names}
    fields["time"] = st.just("2026-01-01T00:00:00.000Z")
    fields["extra"] = st.dictionaries(st.text().map("newer_{}".format), json_values, max_size=2)
    if issubclass(event_class, SubmissionEvent):
        fields["after"] = st.lists(st.text(), max_size=3)
    if event_class is UnknownEvent:
        fields["unknown_name"] = st.text().map("newer_{}".format)
    return st.builds(event_class, **fields)


@pytest.mark.parametrize(
    "event_class", [*EVENT_CLASSES.values(), UnknownEvent], ids=lambda event_class: event_class.__name__
)
def test_an_event_is_the_same_after_it_is_written_and_read(event_class: type[Event]) -> None:
    @settings(deadline=None, max_examples=30)
    @given(make_event_strategy(event_class))
    def check(event: Event) -> None:
        assert parse_event(json.loads(json.dumps(event.to_line()))) == event

    check()


def test_a_run_reads_the_events_that_it_appended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    events = [make_event("started", attempt=1), make_event("saved", step=7), Resumed()]
    for event in events:
        run.append_event(event)
    assert run.read_events() == events
    assert run.read_events("train", Started) == events[:1]


def test_the_line_of_an_event_omits_unset_values_except_required_nulls() -> None:
    """`task`, `slurm_job` and `stage` are not set here, but the lines must have these keys."""
    started = Started(time="2026-01-01T00:00:00.000Z", stage="train", job_id="7", attempt=1, ranks=4, restarts=0)
    assert started.to_line() == {
        "time": "2026-01-01T00:00:00.000Z",
        "event": "started",
        "stage": "train",
        "job_id": "7",
        "task": None,
        "attempt": 1,
        "ranks": 4,
        "slurm_job": None,
        "restarts": 0,
    }
    assert Resumed(time="2026-01-01T00:00:00.000Z").to_line() == {
        "time": "2026-01-01T00:00:00.000Z",
        "event": "resumed",
        "stage": None,
    }


@pytest.mark.parametrize(
    "line",
    [
        {"event": "moved_to_another_planet", "stage": "train", "planet": {"name": "Mars"}},
        {"event": "saved", "stage": "train", "step": 7, "planet": ["Mars"]},
        {"event": "started", "stage": "train"},  # older versions wrote neither ranks nor job
    ],
)
def test_events_and_fields_of_other_versions_are_read(line: dict[str, Any]) -> None:
    line = {"time": "2026-01-01T00:00:00.000Z", **line}
    event = parse_event(line)
    assert event is not None and event.name == line["event"]
    assert event.to_line().items() >= line.items()


# -- state of a stage --------------------------------------------------------------------------------------------------


def parse_history(text: str) -> list[Event]:
    """Return the events of a history such as `started stopping:preempted requeued/preempted!`.

    The words are the names of the events. A cause follows `:`, and a budget follows `/`. `!` marks a retry after an
    attempt without progress. Each event that has a step gets step 7.
    """
    lines: list[dict[str, Any]] = []
    for word in text.split():
        name, _, budget = word.rstrip("!").partition("/")
        name, _, cause = name.partition(":")
        cause = cause.replace("_", " ") if cause == "stop_file" else cause
        line: dict[str, Any] = {"event": name}
        if cause:
            line["by" if name == "stopping" and cause in USER_REQUESTS else "cause"] = cause
        if budget:
            line |= {"budget": budget, "progress": not word.endswith("!"), "job_id": "1", "cause": "crashed"}
        if name == "submitted":
            line |= {"job_id": "1"}
        if name in ("saved", "restored", "ready", "stop_requested"):
            line |= {"step": 7}
        lines.append(line)
    return parse_events(lines)


@pytest.mark.parametrize(
    ("history", "expected_conditions"),
    [
        ("", set()),
        ("submitted", set()),
        ("submitted started", {"open", "training steps"}),
        ("submitted started saved ready", {"open", "training steps"}),
        ("started stopping:preempted", {"open"}),
        ("started ready stop_requested", {"open"}),
        ("started ready stopped_early", {"open"}),
        ("started stopping:stop_file", {"open", "user request"}),
        ("started stopping:cancelled", {"open", "user request"}),
        ("started done", {"done"}),
        ("started failed:crashed", {"failed"}),
        ("started failed:crashed resumed", {"failed", "resumed"}),
        ("started failed:crashed retried/crash", {"retried"}),
        ("started failed:crashed retried/crash started", {"open", "training steps"}),
        ("started preempted:preempted requeued/preempted", {"retried"}),
        ("started preempted:preempted requeued/preempted started", {"open", "training steps"}),
        ("started preempted:preempted requeued/preempted started done", {"done"}),
        ("started preempted:preempted failed:preempted", {"failed"}),  # Slurm refused to requeue the job
        # the successor job found that its predecessor was cancelled, and wrote the event `cancelled`
        ("started preempted:preempted handed_over/preempted cancelled:cancelled", {"user request"}),
        ("started stopping:stop_file stopped:stop_file", {"user request"}),
        ("started stopping:cancelled cancelled:cancelled", {"user request"}),
        ("started stopping:cancelled cancelled:cancelled resumed", {"user request", "resumed"}),
        ("started stopping:cancelled cancelled:cancelled resumed started", {"open", "training steps"}),
        ("started stopping stopped:time_limit", set()),
    ],
)
def test_the_state_follows_from_the_events(history: str, expected_conditions: set[str]) -> None:
    """`expected_conditions` has the names of the conditions in the test body that must be true."""
    state = read_stage_state(parse_history(history))
    conditions = {
        "open": state.is_open,
        "training steps": state.is_training,
        "user request": state.user_request is not None,
        "done": state.is_done,
        "failed": state.has_failed,
        "retried": state.retry_event is not None,
        "resumed": state.resumed_by_user,
    }
    assert {name for name, is_true in conditions.items() if is_true} == expected_conditions


@pytest.mark.parametrize(
    ("history", "used_budgets", "restarts_without_progress"),
    [
        ("started failed:crashed retried/crash started failed:crashed retried/crash!", {"crash": 2}, 1),
        (
            "requeued/preempted! requeued/preempted! requeued/node_failure requeued/preempted!",
            {"preempted": 3, "node_failure": 1},
            1,
        ),
        ("requeued/preempted! requeued/preempted! resumed requeued/hang!", {"hang": 1}, 1),
        ("requeued/preempted! resumed", {}, 0),
    ],
)
def test_retries_are_counted_by_budget_since_resume(
    history: str, used_budgets: dict[str, int], restarts_without_progress: int
) -> None:
    state = read_stage_state(parse_history(history))
    assert state.used_budgets == used_budgets
    assert state.restarts_without_progress == restarts_without_progress


def test_the_last_stop_has_its_cause_its_step_and_the_retry_that_followed() -> None:
    """The events of `parse_history` have step 7. An attempt that exits after a stop request stops gracefully."""
    state = read_stage_state(parse_history("submitted started saved stop_requested preempted:preempted"))
    assert state.last_stop == StopInfo("preempted", step=7, is_graceful=True)
    state = read_stage_state(parse_history("started saved failed requeued/crash started submitted"))
    assert state.last_stop == StopInfo(None, step=7, is_graceful=False, retry=Requeued)
    assert state.submitted_again and state.attempt_count == 2
    assert read_stage_state(parse_history("started saved failed started done")).last_stop is None


def test_a_history_is_split_at_the_starts_of_attempts() -> None:
    events = parse_history("submitted resumed started saved failed requeued/crash started done")
    events_before_first_start, attempts = split_into_attempts(events)
    assert events_before_first_start == events[:2] and attempts == [events[2:6], events[6:]]


EVENT_NAMES = [
    *("submitted", "started", "stopping", "saved", "resumed"),
    *("done", "stopped", "cancelled", "preempted", "failed"),
    *("requeued", "retried", "handed_over"),
]


def make_full_event(name: str, cause: str, budget: str, progress: bool) -> Event:
    """Return an event with all fields on which the state of a stage can depend."""
    fields: dict[str, Any] = {"cause": cause, "by": cause, "budget": budget, "progress": progress}
    return make_event(name, job_id="1", step=1, **fields)


histories = st.lists(
    st.builds(
        make_full_event,
        st.sampled_from(EVENT_NAMES),
        st.sampled_from(["preempted", "cancelled", "stop file", "crashed"]),
        st.sampled_from(["preempted", "crash"]),
        st.booleans(),
    ),
    max_size=30,
)


def find_last(events: list[Event], *classes: type[E]) -> E | None:
    """Return the last event of these classes; None if there is none."""
    return next((event for event in reversed(events) if isinstance(event, classes)), None)


@settings(deadline=None, max_examples=500)
@given(histories)
def test_the_state_of_random_histories_equals_that_of_a_search_from_the_end(events: list[Event]) -> None:
    """`read_stage_state` reads the events forwards. This test computes the same values with searches backwards."""
    state = read_stage_state(events)
    last_start_or_end = find_last(events, Started, EndEvent)
    last_of_attempt = find_last(events, Started, EndEvent, RetryEvent)
    assert state.start_event is find_last(events, Started)
    assert state.end_event is (last_start_or_end if isinstance(last_start_or_end, EndEvent) else None)
    assert state.retry_event is (last_of_attempt if isinstance(last_of_attempt, RetryEvent) else None)
    starts = [index for index, event in enumerate(events) if isinstance(event, Started)]
    assert state.attempt_count == len(starts)
    assert state.stopping_event is find_last(events[starts[-1] if starts else 0 :], Stopping)
    resumes = [index for index, event in enumerate(events) if isinstance(event, Resumed)]
    retries = [event for event in events[resumes[-1] if resumes else 0 :] if isinstance(event, RetryEvent)]
    assert state.used_budgets == Counter(event.budget for event in retries)
    indices_with_progress = [index for index, event in enumerate(retries) if event.progress]
    first_index = indices_with_progress[-1] + 1 if indices_with_progress else 0
    assert state.restarts_without_progress == len(retries) - first_index
    assert state.resumed_by_user == isinstance(find_last(events, Resumed, Started, EndEvent, RetryEvent), Resumed)


@settings(deadline=None, max_examples=200)
@given(histories, histories)
def test_resume_resets_all_budgets(events_before: list[Event], events_after: list[Event]) -> None:
    state = read_stage_state([*events_before, Resumed(), *events_after])
    state_without_earlier_events = read_stage_state(events_after)
    assert state.used_budgets == state_without_earlier_events.used_budgets
    assert state.restarts_without_progress == state_without_earlier_events.restarts_without_progress
