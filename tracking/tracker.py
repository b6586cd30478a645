"""Code that all trackers share: the base class, its saved state, and the reader of a run's files.

The follower reads new data and sends it to the tracker (tracking/follower.py). A tracker keeps the first value that it
received for a step, unless it can remove values again (:meth:`Tracker.rewind`). After each batch of data, the follower
saves the state of the tracker. If the follower dies before that, the tracker receives the same data again. A tracker
that must receive each step exactly once therefore corrects its state in its constructor: it asks the service which
steps the service already has.
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
"""A parsed line of metrics.jsonl or events.jsonl, or the results of an evaluation."""
MAX_STEPS = 500
"""Maximum number of steps or evaluations that a tracker receives in one call."""
HOST = os.uname().nodename


def sha256_line(line: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a line's JSON as 64 hex digits, which identify the line."""
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def is_late_held_out(event: Line) -> bool:
    """Return True if an event has results on held-out data for a step whose line was written earlier."""
    return bool(event["event"] == HeldOut.NAME)


class RunReader:
    """Reads the new steps, events and evaluations of one run.

    metrics.jsonl grows by one line per step. After a restore, the trainer first writes the lines after the restored
    step into the event `lost_work`, and then removes these lines (pipeline/run/metrics.py). If a reader has read the
    event but still finds one of the lines in the file, the trainer has not removed the lines yet. The reader then
    returns none of the lost lines.

    If a stop interrupted a held-out evaluation, the evaluation is repeated after the restore. The line of its step may
    already have been read. The event `held_out` therefore contains the results.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._offset = 0
        """The offset in metrics.jsonl of the first line that was not read."""
        self._inode = 0
        """The inode of metrics.jsonl. A new inode means that the file was replaced."""
        self._lost_steps: dict[str, int] = {}
        """The steps of lost lines that may still be in metrics.jsonl, by SHA-256 of the line."""
        self._starts: list[tuple[float, Line]] = []
        """Time and event of the start of each attempt of the train stage, oldest first."""
        self._late_figures: dict[int, Line] = {}
        """The results of `held_out` events by step. They are added to the line of the step."""
        self._training = StageState()
        """The state of the train stage according to the events so far."""
        for event, _ in self.read_events(0):
            self.note_event(event)

    @property
    def running_attempt(self) -> Started | None:
        """The `started` event of the running attempt of the train stage.

        None if no attempt is running, or if the attempt is stopping or completing early.
        """
        return self._training.start_event if self._training.is_training else None

    def note_event(self, event: Line) -> None:
        """Update what this reader knows about lost lines, late held-out results and the state of the train stage.

        Other events are ignored.
        """
        if event["event"] == LostWork.NAME:
            self._lost_steps = {sha256_line(line): line["step"] for line in event["lines"]}
            self._offset = 0  # the trainer removes the lost lines from the file, so the offset is no longer valid
            self._late_figures = {
                step: figures for step, figures in self._late_figures.items() if step not in event["steps"]
            }
        elif is_late_held_out(event):
            self._late_figures[event["step"]] = {
                key: value for key, value in event.items() if key.startswith(HELD_OUT_PREFIX)
            }
            self._offset = 0  # the line of this step may have been read already, and is read again
        parsed_event = parse_event(event)
        if parsed_event is None or parsed_event.stage != self.run.config.metrics_stage:
            return
        self._training = self._training.advance(parsed_event)
        if isinstance(parsed_event, Started):
            self._starts.append((parsed_event.timestamp, event))

    def read_events(self, offset: int) -> Iterator[tuple[Line, int]]:
        """Yield the events from byte `offset` of events.jsonl, each with the offset of the end of its line."""
        for text, end in read_complete_lines(self.run.events_file, offset):
            if is_event(event := parse_json_or_none(text)):
                yield event, end

    def read_steps(self, after: int) -> list[Line]:
        """Return the next lines of metrics.jsonl whose step is greater than `after`, at most `MAX_STEPS`, in order.

        Lost lines are left out. The results of late held-out evaluations are added to the lines of their steps.
        """
        try:
            status = self.run.metrics_file.stat()
        except FileNotFoundError:
            return []
        if status.st_ino != self._inode or status.st_size < self._offset:  # the file was replaced or truncated
            self._inode = status.st_ino
            self._offset = 0
        new_lines: list[Line] = []
        for text, end in read_complete_lines(self.run.metrics_file, self._offset):
            line = parse_json_or_none(text)
            if is_step_line(line) and line["step"] > after:
                # the trainer has not removed the lost lines yet
                if self._lost_steps and sha256_line(line) in self._lost_steps:
                    self._offset = 0
                    first_lost_step = min(self._lost_steps.values())
                    return [new_line for new_line in new_lines if new_line["step"] < first_lost_step]
                if self._lost_steps and line["step"] >= min(self._lost_steps.values()):
                    self._lost_steps = {}  # the trainer has removed the lost lines, and this line is new
                new_lines.append(self._late_figures.get(line["step"], {}) | line)
            self._offset = end
            if len(new_lines) == MAX_STEPS:
                break
        return new_lines

    def read_evaluations(self, known_steps: list[int]) -> list[Line]:
        """Return the results of new evaluations, at most `MAX_STEPS`. Values that are not numbers are left out.

        Args:
            known_steps: the steps of the checkpoints whose evaluations are not new.
        """
        steps = {int(path.stem.removeprefix("step-")) for path in self.run.evaluation_dir.glob("step-*[0-9].json")}
        if steps <= set(known_steps):  # there are no new files, so no file is read
            return []
        new_results = [result for result in read_all_results(self.run)[0] if result["step"] not in known_steps]
        return [
            {key: value for key, value in result.items() if lines.is_number(value)}
            for result in islice(new_results, MAX_STEPS)
        ]

    def find_start_event(self, line: Line) -> Line:
        """Return the `started` event of the attempt that wrote the line of a step; {} if the attempt is unknown."""
        start_count = bisect_right(self._starts, line.get("time") or 0.0, key=lambda start: start[0])
        return self._starts[start_count - 1][1] if start_count else {}


class TrackerState:
    """What a tracker has received so far, saved as `track/TRACKER.json`."""

    def __init__(self) -> None:
        self.step = 0
        """The last step that the tracker has received; steps are sent in order."""
        self.events = 0
        """Number of bytes of events.jsonl whose events the tracker has received."""
        self.evaluations: list[int] = []
        """Steps of the checkpoints whose evaluations the tracker has received."""
        self.heard = 0.0
        """When the tracker last received data or reported a stall, in seconds since 1970."""
        self.stall = ""
        """Identifier of the last stall that the tracker reported."""
        self.evaluate_s = 0.0
        """Duration of the longest held-out evaluation so far; used by trackers that report stalls."""

    @classmethod
    def load(cls, file: Path) -> TrackerState:
        """Load a saved state. If the file is missing or invalid, return the state of a tracker without any data."""
        state = cls()
        saved = read_json(file) if file.exists() else None
        values = vars(state)
        if isinstance(saved, dict) and all(cls._is_valid(key, saved.get(key, old)) for key, old in values.items()):
            values.update((key, saved[key]) for key in values.keys() & saved.keys())  # sets the attributes of `state`
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
    """Base class of the trackers. A tracker sends a run's metrics and events to a service or file.

    The constructor connects to the service. Any method may raise an exception. The follower then constructs the tracker
    again later.

    Args:
        run: the run.
        state: what the tracker has received so far. A tracker may correct this state if the service has other data.
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
        """Do the periodic work of the tracker. The follower calls this method at each poll, even without new data.

        Returns:
            Whether the tracker sent a message, so that its state must be saved.
        """
        return False

    def rewind(self, step: int) -> None:
        """Remove the values after `step`, and set `state.step` to `step`. By default, a tracker keeps all values."""

    def flush(self) -> None:
        """Store all data that the tracker has received, so that the follower need not send the data again."""

    def close(self) -> None:
        """Disconnect from the service. The run may continue."""


def check_tracker_packages(config: Config) -> None:
    """Check that the packages of all enabled trackers are installed.

    Raises:
        UserError: if a package is missing.
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
    definition = TRACKERS[name]
    tracker_class = getattr(import_module(definition.module), definition.class_name)
    return cast(Tracker, tracker_class(run, state, reader))


def flatten_numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the names and values of the numbers in a line, except `step` and `time`.

    The name of a number in a nested mapping contains the outer key: `profile/idle`.
    """
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from flatten_numbers(value, f"{prefix}{key}/")
        elif lines.is_number(value) and key not in ("step", "time"):
            yield prefix + key, float(value)


def tracker_run_id(run: Run) -> str:
    """Return 16 hex digits that identify this run in a tracker.

    If this run is removed, and a new run is created in the same directory, the new run has other digits, because its
    first event has another time.
    """
    first_event = next(iter(RunReader(run).read_events(0)), ({}, 0))[0]
    return sha256_line({"path": str(run.path), "made": first_event.get("time")})[:16]


def last_stage(run: Run) -> str:
    """Return the last stage of a run or of a sweep point, even if a trial of a search pauses before this stage."""
    if run.sweep_or_self is run:
        return list(stages.list_run_stages(run))[-1]
    return [stage for stage, definition in run.config.active_stages.items() if definition.is_per_point][-1]


def display_names(run: Run) -> tuple[str, str | None]:
    """Return the name of a run in trackers, and the name of its sweep; None if the run is not a sweep point."""
    sweep = run.sweep_or_self
    return (run.config.run.name, None) if sweep is run else (f"{sweep.path.name}-{run.path.name}", sweep.path.name)


def flat_config(run: Run) -> dict[str, Any]:
    """Return the values of a run's config by dotted key, such as `train.steps`, with secrets masked."""
    config: dict[str, Any] = mask_secrets(flatten_keys(dump_values(run.config)))
    return config
