"""Write the steps, events and evaluations of runs to a file of JSON lines for log collectors.

Several runs may share the file. Each line therefore contains the run, job, attempt and host from which it comes. If a
follower is killed, a line may appear twice. Both copies have the same `id`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.base.files import append_line
from tracking.tracker import Line, Tracker, display_names, sha256_line


class JsonlFile(Tracker):
    """Appends lines to the file `track.jsonl`, under a lock."""

    def _append(self, kind: str, line: Line, attempt_event: Line) -> None:
        """Append a line, together with the run, job, attempt and host from which it comes.

        Args:
            kind: `step`, `event` or `evaluation`.
            line: the line of metrics.jsonl or events.jsonl, or the results of an evaluation.
            attempt_event: an event of the attempt in which the line was written; {} if the attempt is unknown.
        """
        file = self.run.config.track.jsonl
        assert file is not None
        # A `started` event has the id of the Slurm job, if there is one, as `slurm_job`. In all events of an attempt,
        # `job_id` is the id under which submit.py recorded the job.
        origin = {
            "kind": kind, "run": display_names(self.run)[0],
            "job": attempt_event.get("slurm_job") or attempt_event.get("job_id"),
            "attempt": attempt_event.get("attempt"), "host": attempt_event.get("host"), "id": sha256_line(line)[:16],
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        append_line(file, json.dumps({**origin, **line}))

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Append the steps. Their rank is 0, because rank 0 writes the metrics of all ranks."""
        for line in steps:
            self._append("step", {"rank": 0, **line}, self.reader.find_start_event(line))

    def on_event(self, event: Line) -> None:
        """Append the event."""
        self._append("event", event, event)

    def on_evaluation(self, result: Line) -> None:
        """Append the evaluation."""
        self._append("evaluation", result, {})
