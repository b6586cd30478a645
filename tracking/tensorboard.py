"""TensorBoard: event files in the run's folder `tensorboard`, written with TensorBoard's own classes.

If an event file starts with a session start at step N, readers drop all earlier events from step N on (tensorboard's
event_accumulator.py, "purge"). Each file of ours starts with one, which removes what a crash or a restore left behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.run.directory import Run
from tracking.tracker import HOST, Line, RunReader, Tracker, TrackerState, flatten_numbers


class TensorBoard(Tracker):
    """Scalars `train/NAME`, with the names of metrics.jsonl, and `evaluation/NAME`."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        self._writer: RecordWriter | None = None

    def _open_file(self) -> RecordWriter:
        """Start a file that readers sort after all existing ones, because they sort by name."""
        folder = self.run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        used = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*.sluice")]
        second = max([int(time.time()), *(number + 1 for number in used)])
        writer = RecordWriter(open(folder / f"events.out.tfevents.{second:010d}.{HOST}.sluice", "xb"))  # noqa: SIM115
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        start = Event(wall_time=time.time(), step=self.state.step + 1, session_log=SessionLog(status=SessionLog.START))
        for event in (version, start):
            writer.write(event.SerializeToString())
        return writer

    def _write_scalars(self, line: Line, values: Iterable[tuple[str, float]], group: str) -> None:
        self._writer = self._writer or self._open_file()
        summary = Summary(value=[Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values])
        event = Event(wall_time=line.get("time") or time.time(), step=int(line["step"]), summary=summary)
        self._writer.write(event.SerializeToString())

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Write the steps' scalars."""
        for line in steps:
            self._write_scalars(line, flatten_numbers(line), "train")

    def on_evaluation(self, result: Line) -> None:
        """Write the evaluation's scalars."""
        self._write_scalars(result, flatten_numbers(result), "evaluation")

    def rewind(self, step: int) -> None:
        """Close the file; the next one removes what came after `step`."""
        self.state.step = min(self.state.step, step)
        self.state.evaluations = [evaluated for evaluated in self.state.evaluations if evaluated <= step]
        self.close()

    def flush(self) -> None:
        """Flush the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
