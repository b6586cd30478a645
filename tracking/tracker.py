"""What all sinks share: what they are given, what they remember, and how a run is called there.

A sink keeps the first value of a step that it was sent, unless it can take values back (:meth:`Sink.rewind`). What it
remembers is written after each hand-over (tracking/follower.py); a crash in between hands over again, so a sink that
must have each step once looks where it stands when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.files import read_json
from pipeline.config.masking import masked
from pipeline.run import lines, stages
from pipeline.run.changes import flatten
from pipeline.run.directory import Run
from tracking.run_reader import Line, Record, sha256


class Memory:
    """What a sink has been told, as it stands in `track/SINK.json`."""

    def __init__(self) -> None:
        self.step = 0
        """The last step; steps come in order."""
        self.events = 0
        """How many bytes of events.jsonl."""
        self.evaluations: list[int] = []
        """The steps whose evaluations it was told."""
        self.heard = 0.0
        """When it was last told anything, in seconds since 1970."""
        self.stall = ""
        """The last stall that it told of itself."""
        self.evaluate_s = 0.0
        """The longest look at held-out data so far; kept by those that tell stalls."""

    @classmethod
    def read(cls, file: Path) -> Memory:
        """What stands in a file; of what is not there, or another's, nothing was told."""
        memory, found = cls(), read_json(file) if file.exists() else None
        before = vars(memory)
        if isinstance(found, dict) and all(cls._is_valid(key, found.get(key, old)) for key, old in before.items()):
            before.update((key, found[key]) for key in before.keys() & found.keys())
        return memory

    @staticmethod
    def _is_valid(key: str, value: Any) -> bool:
        """Whether `value` is one that this attribute can have had."""
        if key in ("step", "events"):
            return lines.count(value)
        if key == "evaluations":
            return isinstance(value, list) and all(map(lines.count, value))
        if key == "stall":
            return lines.text(value)
        return lines.duration(value)


class Sink:
    """Somebody who is told. Constructing connects; any method may raise, and is then called again later."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        """`memory`: what it was told before; it may correct that by what it finds."""
        self.run, self.memory, self.record = run, memory, record

    def steps(self, found: Sequence[Line]) -> None:
        """Take lines of metrics.jsonl, each of a step behind all before."""

    def event(self, event: Line) -> None:
        """Take an event."""

    def evaluation(self, found: Line) -> None:
        """Take the figures of an evaluation."""

    def look(self) -> bool:
        """After all that is new was handed over, be that nothing: whether it told something by itself."""
        return False

    def rewind(self, step: int) -> None:
        """Take back what is behind `step`, and set `memory.step` to it; else it keeps what it has."""

    def flush(self) -> None:
        """Make what was taken last: it counts as told from now on."""

    def close(self) -> None:
        """The follower ends; the run may go on."""


def figures(line: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line with their names, those inside of others as `profile/idle`."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from figures(value, f"{before}{key}/")
        elif lines.number(value) and key not in ("step", "time"):
            yield before + key, float(value)


def identity(run: Run) -> str:
    """What tells this run from another one that has, or had, its name: 16 hex digits."""
    first = next(iter(Record(run).events(0)), ({}, 0))[0]
    return sha256({"path": str(run.path), "made": first.get("time")})[:16]


def last_stage(run: Run) -> str:
    """The stage that ends the run, or a point of a sweep."""
    return (stages.own_stages(run) if run.whole is run else stages.point_stages())[-1]


def names(run: Run) -> tuple[str, str | None]:
    """What to call the run, and the sweep that it is a point of."""
    sweep = run.whole
    return (run.config.run.name, None) if sweep is run else (f"{sweep.path.name}-{run.path.name}", sweep.path.name)


def shown_config(run: Run) -> dict[str, Any]:
    """The config by dotted keys, without secrets."""
    return masked(flatten(run.config.model_dump(mode="json")))


HOST = os.uname().nodename
