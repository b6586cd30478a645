"""What every tracker shares: the base class, its saved state, and the reader of a run's files.

A tracker keeps the first value that it received for a step, unless it can take values back (:meth:`Tracker.rewind`).
The follower saves its state after each hand-over (tracking/follower.py). If the follower dies in between, the same data
is handed over again. A tracker that must receive each step exactly once corrects its state when it is constructed, from
what the service already has.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, cast

from pipeline.base.errors import UserError
from pipeline.base.files import parse_json_or_none, read_complete_lines, read_json
from pipeline.config.masking import mask_secrets
from pipeline.config.read import dump_values
from pipeline.config.sections import TRACKERS, Config
from pipeline.evaluate.result import HELD_OUT_PREFIX, read_all_results
from pipeline.run import lines, stages
from pipeline.run.changes import flatten_keys
from pipeline.run.directory import Run
from pipeline.run.events import HeldOut, LostWork, StageState, Started, is_event, parse_event
from pipeline.run.metrics import is_step_line

Line = dict[str, Any]
MAX_STEPS = 500
"""Maximum number of steps or evaluations in one hand-over."""
HOST = os.uname().nodename


def sha256_line(line: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a line's JSON as 64 hex digits; it identifies the line."""
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def is_late_held_out(event: Line) -> bool:
    """Return True if an event has the held-out results of a step whose line was written before."""
    return bool(event["event"] == HeldOut.NAME)


class RunReader:
    """Reads the new steps, events and evaluations of one run.

    metrics.jsonl grows by one line per step. After a restore, the trainer removes the lines after the restored step.
    Before, it writes these lines into the event `lost_work` (pipeline/run/metrics.py). If a reader has read this event
    but still finds one of the lines in the file, the trainer has not removed the lines yet. The reader then returns
    none of them.

    If a stop interrupted a held-out evaluation, the evaluation is repeated after the restore. The line of its step may
    already have been read. The event `held_out` therefore contains the results.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._offset = 0
        """The offset in metrics.jsonl of the first line that was not read."""
        self._inode = 0
        self._lost_steps: dict[str, int] = {}
        """SHA-256 of each lost line that may still be in metrics.jsonl → its step."""
        self._starts: list[tuple[float, Line]] = []
        """Time and event of the start of each attempt of the train stage, oldest first."""
        self._late_figures: dict[int, Line] = {}
        """Step → results of `held_out` events, which are added to the line of the step."""
        self._training = StageState()
        """The state of the train stage according to the events so far."""
        for event, _ in self.events(0):
            self.note_event(event)

    @property
    def running_attempt(self) -> Started | None:
        """The start of the running attempt of the train stage.

        None if no attempt is running, or if the attempt is stopping or completing early.
        """
        return self._training.start_event if self._training.is_training_steps else None

    def note_event(self, event: Line) -> None:
        """Update this reader from an event: lost lines, late results on held-out data, or the state of the train stage.

        Other events are ignored.
        """
        if event["event"] == LostWork.NAME:
            self._lost_steps = {sha256_line(line): line["step"] for line in event["lines"]}
            self._offset = 0
            self._late_figures = {
                step: figures for step, figures in self._late_figures.items() if step not in event["steps"]
            }
        elif is_late_held_out(event):
            self._late_figures[event["step"]] = {
                key: value for key, value in event.items() if key.startswith(HELD_OUT_PREFIX)
            }
            self._offset = 0
        parsed = parse_event(event)
        if parsed is None or parsed.stage != "train":
            return
        self._training = self._training.advance(parsed)
        if isinstance(parsed, Started):
            self._starts.append((parsed.timestamp, event))

    def events(self, offset: int) -> Iterator[tuple[Line, int]]:
        """Yield the events from byte `offset` of events.jsonl, each with the offset of the next event."""
        for text, end in read_complete_lines(self.run.events_file, offset):
            if is_event(event := parse_json_or_none(text)):
                yield event, end

    def steps(self, after: int) -> list[Line]:
        """Return the lines of the next steps after step `after`, at most `MAX_STEPS`, in order."""
        try:
            status = self.run.metrics_file.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode = status.st_ino
            self._offset = 0
        new_lines: list[Line] = []
        for text, end in read_complete_lines(self.run.metrics_file, self._offset):
            line = parse_json_or_none(text)
            if is_step_line(line) and line["step"] > after:
                if self._lost_steps and sha256_line(line) in self._lost_steps:  # the trainer has not removed it yet
                    self._offset = 0
                    return [earlier for earlier in new_lines if earlier["step"] < min(self._lost_steps.values())]
                if self._lost_steps and line["step"] >= min(self._lost_steps.values()):
                    self._lost_steps = {}  # the trainer has removed the lost lines, and this line is new
                new_lines.append(self._late_figures.get(line["step"], {}) | line)
            self._offset = end
            if len(new_lines) == MAX_STEPS:
                break
        return new_lines

    def evaluations(self, known_steps: list[int]) -> list[Line]:
        """Return the results (name → number) of evaluations of steps not in `known_steps`, at most `MAX_STEPS`."""
        steps = {int(path.stem.removeprefix("step-")) for path in self.run.evaluation_dir.glob("step-*[0-9].json")}
        if steps <= set(known_steps):
            return []
        new = [result for result in read_all_results(self.run)[0] if result["step"] not in known_steps]
        return [
            {key: value for key, value in result.items() if lines.is_number(value)} for result in islice(new, MAX_STEPS)
        ]

    def find_start_event(self, line: Line) -> Line:
        """Return the `started` event of the attempt that wrote the line of a step; {} if the attempt is unknown."""
        start_count = bisect_right(self._starts, line.get("time") or 0.0, key=lambda start: start[0])
        return self._starts[start_count - 1][1] if start_count else {}


class TrackerState:
    """What a tracker has received so far, saved as `track/TRACKER.json`."""

    def __init__(self) -> None:
        self.step = 0
        """The last step that was handed over; steps are handed over in order."""
        self.events = 0
        """Number of bytes of events.jsonl that were handed over."""
        self.evaluations: list[int] = []
        """Steps of the checkpoints whose evaluations were handed over."""
        self.heard = 0.0
        """Time of the last hand-over, in seconds since 1970."""
        self.stall = ""
        """Identifier of the last stall that the tracker reported."""
        self.evaluate_s = 0.0
        """Duration of the longest held-out evaluation so far; used by trackers that report stalls."""

    @classmethod
    def load(cls, file: Path) -> TrackerState:
        """Load a saved state; a missing or invalid file counts as a state in which nothing was handed over."""
        state = cls()
        saved = read_json(file) if file.exists() else None
        values = vars(state)
        if isinstance(saved, dict) and all(cls._is_valid(key, saved.get(key, old)) for key, old in values.items()):
            values.update((key, saved[key]) for key in values.keys() & saved.keys())
        return state

    @staticmethod
    def _is_valid(key: str, value: Any) -> bool:
        """Return True if `value` is valid for the attribute `key`."""
        if key in ("step", "events"):
            return lines.is_count(value)
        if key == "evaluations":
            return isinstance(value, list) and all(map(lines.is_count, value))
        if key == "stall":
            return lines.is_text(value)
        return lines.is_duration(value)


class Tracker:
    """A service or file that receives a run's metrics and events.

    The constructor connects to the service. Any method may raise; the follower then constructs the tracker again later.

    Args:
        run: the run.
        state: what the tracker has received so far. A tracker may correct the state by what the service already has.
        reader: the reader of the run's files.
    """

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        self.run = run
        self.state = state
        self.reader = reader

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Receive lines of metrics.jsonl, in the order of their steps."""

    def on_event(self, event: Line) -> None:
        """Receive an event."""

    def on_evaluation(self, result: Line) -> None:
        """Receive the results of an evaluation, by name."""

    def on_poll(self) -> bool:
        """Do the periodic work of the tracker; called after each hand-over, even an empty one.

        Returns:
            Whether the tracker reported something on its own.
        """
        return False

    def rewind(self, step: int) -> None:
        """Remove what came after `step`, and set `state.step` to `step`. By default, the tracker keeps all values."""

    def flush(self) -> None:
        """Make durable what the tracker has received. From now on, it counts as handed over."""

    def close(self) -> None:
        """Disconnect, because the follower exits. The run may continue."""


def check_tracker_packages(config: Config) -> None:
    """Check that the packages of all enabled trackers are installed.

    Raises:
        UserError: A package is missing.
    """
    packages = {name: package for name in config.track.enabled if (package := TRACKERS[name].package)}
    if config.track.telemetry_s is not None:
        packages["telemetry"] = "psutil"
    for name, package in packages.items():
        if find_spec(package) is None:
            raise UserError(
                "track.missing_package",
                f"track.{name}: the package {package} is not installed; run `pip install 'sluice[{name}]'`",
            )


def create_tracker(name: str, run: Run, state: TrackerState, reader: RunReader) -> Tracker:
    """Construct the tracker with this name, such as `tensorboard`. The tracker connects to its service."""
    entry = TRACKERS[name]
    return cast(Tracker, getattr(import_module(entry.module), entry.class_name)(run, state, reader))


def flatten_numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the names and values of a line's numbers, except `step` and `time`; nested names as `profile/idle`."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, f"{prefix}{key}/")
        elif lines.is_number(value) and key not in ("step", "time"):
            yield prefix + key, float(value)


def tracker_run_id(run: Run) -> str:
    """Return 16 hex digits that distinguish this run from other runs of the same name, also from removed ones."""
    first = next(iter(RunReader(run).events(0)), ({}, 0))[0]
    return sha256_line({"path": str(run.path), "made": first.get("time")})[:16]


def last_stage(run: Run) -> str:
    """Return the last stage of the run, or of a point of a sweep."""
    return (stages.list_run_stages(run) if run.sweep_or_self is run else stages.list_point_stages())[-1]


def display_names(run: Run) -> tuple[str, str | None]:
    """Return the name of the run in trackers, and the name of its sweep if it is a sweep point."""
    sweep = run.sweep_or_self
    return (run.config.run.name, None) if sweep is run else (f"{sweep.path.name}-{run.path.name}", sweep.path.name)


def flat_config(run: Run) -> dict[str, Any]:
    """Return the config by dotted keys, with secrets masked."""
    config: dict[str, Any] = mask_secrets(flatten_keys(dump_values(run.config)))
    return config
