"""Write and read the lines of events.jsonl as JSON objects, so that tests state the names and values of the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.base.files import append_line, read_jsonl
from pipeline.run.directory import Run
from pipeline.run.events import Event, is_event, parse_event, utc_timestamp


def write_event(run: Run, name: str, stage: str | None = None, **fields: Any) -> None:
    """Append an event with these fields and the current time to events.jsonl of a run."""
    line = {"time": utc_timestamp(), "event": name, "stage": stage, **fields}
    append_line(run.events_file, json.dumps(line, default=str))


def read_event_lines(run: Run, stage: str | None = None, *names: str) -> list[dict[str, Any]]:
    """Return the valid lines of events.jsonl.

    Args:
        run: the run.
        stage: return only events of this stage; None for all stages.
        names: return only events with these names; empty for all names.
    """
    return [
        line
        for line in filter(is_event, read_jsonl(run.events_file))
        if (stage is None or line.get("stage") == stage) and (not names or line["event"] in names)
    ]


def make_event(name: str, stage: str | None = "train", **fields: Any) -> Event:
    """Parse an event line with these fields and return the event. The default of `time` is the current time."""
    event = parse_event({"time": utc_timestamp(), "event": name, "stage": stage, **fields})
    assert event is not None, (name, fields)
    return event


def parse_events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events of these lines. If a line lacks `stage` or `time`, use "train" and the current time."""
    return [
        make_event(line["event"], **{key: value for key, value in line.items() if key != "event"}) for line in lines
    ]
