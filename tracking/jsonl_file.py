"""A file of JSON lines for log collectors, shared by several runs: each step and event with the run it belongs to.

If a follower is killed, a line may appear twice. Both copies have the same `id`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.base.files import append_line
from tracking.tracker import Line, Tracker, display_names, sha256_line


class JsonlFile(Tracker):
    """Appends lines under a lock, because several runs may share the file."""

    def _append(self, kind: str, line: Line, attempt: Line) -> None:
        """Append a line with its source.

        Args:
            kind: `step`, `event` or `evaluation`.
            line: the line.
            attempt: an event of the attempt to which the line belongs; {} if it belongs to none.
        """
        file = self.run.config.track.jsonl
        assert file is not None
        source = {
            "kind": kind, "run": display_names(self.run)[0],
            "job": attempt.get("slurm_job") or attempt.get("job_id"), "attempt": attempt.get("attempt"),
            "host": attempt.get("host"), "id": sha256_line(line)[:16],
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        append_line(file, json.dumps({**source, **line}))

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Append the steps; rank 0 writes their metrics for all ranks."""
        for line in steps:
            self._append("step", {"rank": 0, **line}, self.reader.find_start_event(line))

    def on_event(self, event: Line) -> None:
        """Append the event."""
        self._append("event", event, event)

    def on_evaluation(self, result: Line) -> None:
        """Append the evaluation."""
        self._append("evaluation", result, {})
