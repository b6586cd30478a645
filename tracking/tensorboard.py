"""TensorBoard: event files in the run's folder `tensorboard`, written with its own classes.

A reader forgets what stands behind a session's start, from the step that it names on (tensorboard's
event_accumulator.py, "purge"). So a file begins with such a start: whatever a crash, or a restore, left behind is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.run.directory import Run
from tracking.run_reader import Line, Record
from tracking.tracker import HOST, Memory, Sink, figures


class TensorBoard(Sink):
    """Scalars: `train/NAME` by the names of metrics.jsonl, `evaluation/NAME`."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        self._writer: RecordWriter | None = None

    def _open(self) -> RecordWriter:
        """Begin a file, which a reader takes after all before: they go by their names."""
        folder = self.run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        before = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*.sluice")]
        second = max([int(time.time()), *(number + 1 for number in before)])
        writer = RecordWriter(open(folder / f"events.out.tfevents.{second:010d}.{HOST}.sluice", "xb"))  # noqa: SIM115
        begin = Event(wall_time=time.time(), file_version="brain.Event:2")
        start = Event(wall_time=time.time(), step=self.memory.step + 1, session_log=SessionLog(status=SessionLog.START))
        for event in (begin, start):
            writer.write(event.SerializeToString())
        return writer

    def _write(self, event: Event) -> None:
        self._writer = self._writer or self._open()
        self._writer.write(event.SerializeToString())

    def _scalars(self, line: Line, values: Iterable[tuple[str, float]], group: str) -> None:
        summary = Summary(value=[Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in values])
        self._write(Event(wall_time=line.get("time") or time.time(), step=int(line["step"]), summary=summary))

    def steps(self, found: Sequence[Line]) -> None:
        """Write them."""
        for line in found:
            self._scalars(line, figures(line), "train")

    def evaluation(self, found: Line) -> None:
        """Write it."""
        self._scalars(found, figures(found), "evaluation")

    def rewind(self, step: int) -> None:
        """A new file takes them back."""
        self.memory.step = min(self.memory.step, step)
        self.memory.evaluations = [one for one in self.memory.evaluations if one <= step]
        self.close()

    def flush(self) -> None:
        """Hand it to the file system."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
