"""Writes and reads events.jsonl as JSON objects, so that tests state the names and values that the file has."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.base.files import append_line, read_jsonl
from pipeline.run.directory import Run
from pipeline.run.events import Event, is_event, parse_event, utc_timestamp


def write_event(run: Run, name: str, stage: str | None = None, **fields: Any) -> None:
    """Append an event with exactly these fields to the file of a run."""
    line = {"time": utc_timestamp(), "event": name, "stage": stage, **fields}
    append_line(run.events_file, json.dumps(line, default=str))


def read_event_lines(run: Run, stage: str | None = None, *names: str) -> list[dict[str, Any]]:
    """Return the valid lines of a run's file: of one stage and with these names, if given."""
    return [
        line
        for line in filter(is_event, read_jsonl(run.events_file))
        if (stage is None or line.get("stage") == stage) and (not names or line["event"] in names)
    ]


def make_event(name: str, stage: str | None = "train", **fields: Any) -> Event:
    """Return the event of a line with these fields; `time` is now, if it is not given."""
    event = parse_event({"time": utc_timestamp(), "event": name, "stage": stage, **fields})
    assert event is not None, (name, fields)
    return event


def parse_events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events of these lines; stage and time are added where a line has none."""
    return [
        make_event(line["event"], **{key: value for key, value in line.items() if key != "event"}) for line in lines
    ]
