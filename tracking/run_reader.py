"""What a run's files say, read on from where one stopped: steps, events, evaluations.

metrics.jsonl grows by a line a step, and after a restore is cut back to the restored step. The trainer writes the lines
that go as `lost_work` into events.jsonl first, then cuts (pipeline/run/metrics.py); so whoever has read that event and
still finds one of those lines in the file is early, and takes none of them. A look at held-out data that a stop cut
short is made up for after the restore, when the line of its step may have been read: the event `held_out` says so.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from pipeline.base.files import parse, whole_lines
from pipeline.evaluate.result import HELD_OUT_PREFIX, read_all_results
from pipeline.run import lines
from pipeline.run.attempts import ENDS
from pipeline.run.directory import Run
from pipeline.run.ledger import event_timestamp

Line = dict[str, Any]
MOST = 500
"""So many steps are handed over at a time."""


def sha256(line: Mapping[str, Any]) -> str:
    """What tells this line from all others, as 64 hex digits."""
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def late(event: Line) -> bool:
    """Whether it has figures of a step whose line was there before."""
    return event["event"] == "held_out"


class Record:
    """Reads one run; keeps in mind how far it has read metrics.jsonl, and which lines are lost."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._offset, self._file = 0, 0
        self._lost: dict[str, int] = {}
        self._starts: list[tuple[float, Line]] = []
        self._late: dict[int, Line] = {}
        self.going: Line | None = None
        """The start of the training's attempt that runs, as far as events say, and is not about to end."""
        for event, _ in self.events(0):
            self.note(event)

    def note(self, event: Line) -> None:
        """Take in an event: it says which lines are lost, or change, or how attempts of the training begin and end."""
        if event["event"] == "lost_work":
            self._lost, self._offset = {sha256(line): line["step"] for line in event["lines"]}, 0
            self._late = {step: more for step, more in self._late.items() if step not in event["steps"]}
        elif late(event):
            self._late[event["step"]] = {key: value for key, value in event.items() if key.startswith(HELD_OUT_PREFIX)}
            self._offset = 0
        elif event.get("stage") == "train" and event["event"] == "started":
            self._starts.append((event_timestamp(event), event))
            self.going = event
        elif event.get("stage") == "train" and event["event"] in (*ENDS, "stopping", "stop_requested"):
            self.going = None

    def events(self, offset: int) -> Iterator[tuple[Line, int]]:
        """The events from byte `offset` of events.jsonl on, each with the offset behind it."""
        for text, end in whole_lines(self.run.events, offset):
            if lines.event(event := parse(text)):
                yield event, end

    def steps(self, after: int) -> list[Line]:
        """The next steps behind step `after`, `MOST` at most, in order."""
        try:
            file = self.run.metrics.stat()
        except FileNotFoundError:
            return []
        if file.st_ino != self._file or file.st_size < self._offset:
            self._file, self._offset = file.st_ino, 0
        found: list[Line] = []
        for text, end in whole_lines(self.run.metrics, self._offset):
            line = parse(text)
            if lines.metric(line) and line["step"] > after:
                if self._lost and sha256(line) in self._lost:  # not cut yet
                    self._offset = 0
                    return [one for one in found if one["step"] < min(self._lost.values())]
                if self._lost and line["step"] >= min(self._lost.values()):
                    self._lost = {}  # it was cut, and what comes is new
                found.append(self._late.get(line["step"], {}) | line)
            self._offset = end
            if len(found) == MOST:
                break
        return found

    def evaluations(self, told: list[int]) -> list[Line]:
        """The evaluations of steps that are not among those `told`, without what only says whose they are."""
        names = {int(path.stem.removeprefix("step-")) for path in self.run.evaluation.glob("step-*[0-9].json")}
        if names <= set(told):
            return []
        fresh = [result for result in read_all_results(self.run)[0] if result["step"] not in told]
        return [{key: value for key, value in one.items() if lines.number(value)} for one in islice(fresh, MOST)]

    def start_of(self, line: Line) -> Line:
        """The `started` event of the attempt that wrote the line of a step; {} where nobody can tell."""
        at = bisect_right(self._starts, line.get("time") or 0.0, key=lambda start: start[0])
        return self._starts[at - 1][1] if at else {}
