"""Write event files for TensorBoard into the run's folder `tensorboard`, with TensorBoard's own classes.

An event file may begin with a session start at step N. Readers then drop the events of earlier files from step N on
(tensorboard's event_accumulator.py, "purge"). Each file of this module begins with a session start. Readers therefore
drop the old events of steps that are repeated after a crash or a restore.
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
    """Writes scalars: `train/NAME`, with the names of metrics.jsonl, and `evaluation/NAME`."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        self._writer: RecordWriter | None = None

    def _open_file(self) -> RecordWriter:
        """Create an event file whose name sorts after all existing files, because readers read the files by name."""
        folder = self.run.path / "tensorboard"
        folder.mkdir(exist_ok=True)
        # the fourth part of the name is the time
        used_times = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*.sluice")]
        time_s = max([int(time.time()), *(used_time + 1 for used_time in used_times)])
        writer = RecordWriter(open(folder / f"events.out.tfevents.{time_s:010d}.{HOST}.sluice", "xb"))  # noqa: SIM115
        version = Event(wall_time=time.time(), file_version="brain.Event:2")
        start = Event(wall_time=time.time(), step=self.state.step + 1, session_log=SessionLog(status=SessionLog.START))
        for event in (version, start):
            writer.write(event.SerializeToString())
        return writer

    def _write_scalars(self, line: Line, values: Iterable[tuple[str, float]], group: str) -> None:
        """Write scalars with the step and time of a line.

        Args:
            line: a line of metrics.jsonl, or the results of an evaluation.
            values: names and values of the scalars.
            group: the prefix of the names, such as `train`.
        """
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
        """Forget the steps and evaluations after `step`, and close the file.

        The session start of the next file removes the events of these steps.
        """
        self.state.step = min(self.state.step, step)
        self.state.evaluations = [evaluated for evaluated in self.state.evaluations if evaluated <= step]
        self.close()

    def flush(self) -> None:
        """Write buffered events to the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
