"""A file of JSON lines, of this and other runs, for log collectors: each step and event, with whose it is.

A line may stand twice where a follower was killed; `id` tells that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.base.files import append_line
from tracking.run_reader import Line, sha256
from tracking.tracker import Sink, names


class LinesFile(Sink):
    """Appends, under a lock: several runs may share the file."""

    def _write(self, kind: str, line: Line, attempt: Line) -> None:
        file = self.run.config.track.jsonl
        assert file is not None
        whose = {
            "kind": kind, "run": names(self.run)[0], "job": attempt.get("slurm_job") or attempt.get("job_id"),
            "attempt": attempt.get("attempt"), "host": attempt.get("host"), "id": sha256(line)[:16],
        }  # fmt: skip
        file.parent.mkdir(parents=True, exist_ok=True)
        append_line(file, json.dumps({**whose, **line}))

    def steps(self, found: Sequence[Line]) -> None:
        """Append them; the loss of a step is rank 0's word for all."""
        for line in found:
            self._write("step", {"rank": 0, **line}, self.record.start_of(line))

    def event(self, event: Line) -> None:
        """Append it."""
        self._write("event", event, event)

    def evaluation(self, found: Line) -> None:
        """Append it."""
        self._write("evaluation", found, {})
