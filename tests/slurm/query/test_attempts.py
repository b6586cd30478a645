"""What a stage's events mean: a table of histories by hand, and random ones against a reading from the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.attempts import END_EVENTS, RETRY_EVENTS, USER_REQUESTS, Event, read_stage_state

Events = list[dict[str, Any]]


def history(words: str) -> Events:
    """`started stopping:preempted requeued/preempted!`: a cause behind `:`, a budget behind `/`, fruitless with `!`."""
    found = []
    for word in words.split():
        name, _, budget = word.rstrip("!").partition("/")
        name, _, cause = name.partition(":")
        key = "by" if name == "stopping" and cause.replace("_", " ") in USER_REQUESTS else "cause"
        more: dict[str, Any] = {key: cause.replace("_", " ")} if cause else {}
        found.append(
            {"event": name, **more, **({"budget": budget, "progress": not word.endswith("!")} if budget else {})}
        )
    return found


@pytest.mark.parametrize(
    ("words", "means"),
    [
        ("", ""),
        ("submitted", ""),
        ("submitted started", "open"),
        ("submitted started saved ready", "open"),
        ("started stopping:preempted", "open"),
        ("started stopping:stop_file", "open asked"),
        ("started stopping:cancelled", "open asked"),
        ("started done", "done"),
        ("started failed:crashed", "failed"),
        ("started failed:crashed resumed", "failed anew"),
        ("started failed:crashed retried/crash", "goes on"),
        ("started failed:crashed retried/crash started", "open"),
        ("started preempted:preempted requeued/preempted", "goes on"),
        ("started preempted:preempted requeued/preempted started", "open"),
        ("started preempted:preempted requeued/preempted started done", "done"),
        ("started preempted:preempted failed:preempted", "failed"),  # Slurm refused to requeue it
        (
            "started preempted:preempted handed_over/preempted cancelled:cancelled",
            "ended asked",
        ),  # its heir: not needed
        ("started stopping:stop_file stopped:stop_file", "ended asked"),
        ("started stopping:cancelled cancelled:cancelled", "ended asked"),
        ("started stopping:cancelled cancelled:cancelled resumed", "ended asked anew"),
        ("started stopping:cancelled cancelled:cancelled resumed started", "open"),
        ("started stopping stopped:time_limit", "ended"),
    ],
)
def test_by_hand(words: str, means: str) -> None:
    told = read_stage_state(history(words))
    said = {
        "open": told.start_event is not None and told.end_event is None,
        "asked": told.user_request is not None, "done": told.is_done,
        "failed": told.has_failed, "goes on": told.retry_event is not None, "anew": told.resumed_by_user,
        "ended": told.end_event is not None and not (told.is_done or told.has_failed or told.retry_event),
    }  # fmt: skip
    assert (
        " ".join(word for word in ("open", "done", "failed", "goes on", "ended", "asked", "anew") if said[word])
        == means
    )


def test_budgets_by_hand() -> None:
    told = read_stage_state(history("started failed:crashed retried/crash started failed:crashed retried/crash!"))
    assert told.used_budgets == {"crash": 2} and told.restarts_without_progress == 1
    told = read_stage_state(
        history("requeued/preempted! requeued/preempted! requeued/node_failure requeued/preempted!")
    )
    assert told.used_budgets == {"preempted": 3, "node_failure": 1} and told.restarts_without_progress == 1
    told = read_stage_state(history("requeued/preempted! requeued/preempted! resumed requeued/hang!"))
    assert told.used_budgets == {"hang": 1} and told.restarts_without_progress == 1
    told = read_stage_state(history("requeued/preempted! resumed"))
    assert not told.used_budgets and told.restarts_without_progress == 0 and told.resumed_by_user


events = st.lists(
    st.builds(
        lambda name, cause, budget, progress: {
            "event": name, "cause": cause, "by": cause, "budget": budget, "progress": progress,
        },
        st.sampled_from(["submitted", "started", "stopping", "saved", "resumed", *END_EVENTS, *RETRY_EVENTS]),
        st.sampled_from(["preempted", "cancelled", "stop file", "crashed"]),
        st.sampled_from(["preempted", "crash"]),
        st.booleans(),
    ),
    max_size=30,
)  # fmt: skip


def newest(of: Events, *names: str) -> Event | None:
    return next((event for event in reversed(of) if event["event"] in names), None)


@settings(deadline=None, max_examples=500)
@given(events)
def test_random_histories_read_from_the_end(of: Events) -> None:
    """The reference looks for the newest event of a kind, as a person would who reads the file from its end."""
    told = read_stage_state(of)
    last = newest(of, "started", *END_EVENTS, *RETRY_EVENTS)
    ended = newest(of, "started", *END_EVENTS)
    assert told.start_event is newest(of, "started")
    assert told.end_event is (None if ended is None or ended["event"] == "started" else ended)
    assert told.retry_event is (last if last is not None and last["event"] in RETRY_EVENTS else None)
    attempt = of[max((i for i, e in enumerate(of) if e["event"] == "started"), default=0) :]
    assert told.stopping_event is newest(attempt, "stopping")
    since = of[max((i + 1 for i, e in enumerate(of) if e["event"] == "resumed"), default=0) :]
    went_on = [e for e in since if e["event"] in RETRY_EVENTS]
    assert told.used_budgets == Counter(e["budget"] for e in went_on)
    fruitful = [i for i, e in enumerate(went_on) if e["progress"]]
    assert told.restarts_without_progress == len(went_on) - (fruitful[-1] + 1 if fruitful else 0)
    word = newest(of, "resumed", "started", *END_EVENTS, *RETRY_EVENTS)
    assert told.resumed_by_user == (word is not None and word["event"] == "resumed")


@settings(deadline=None, max_examples=200)
@given(events, events)
def test_a_person_who_resumes_gives_all_budgets_back(before: Events, after: Events) -> None:
    told, fresh = read_stage_state([*before, {"event": "resumed"}, *after]), read_stage_state(after)
    assert (told.used_budgets, told.restarts_without_progress) == (fresh.used_budgets, fresh.restarts_without_progress)
