"""metrics.jsonl: one line per optimizer step, each step exactly once, through any number of crashes.

The line of a step is written before a checkpoint of that step begins: a checkpoint never knows more than the file.
After a restore the lines beyond the restored step are moved to events.jsonl as lost work, and a torn last line
is dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.base.files import read_json, write_atomic, write_line
from pipeline.run import lines
from pipeline.run.directory import Run


class MetricsFile:
    """Writes the lines, on rank 0 (`path` is None elsewhere)."""

    def __init__(self, path: Path | None) -> None:
        # kept open: on a parallel file system an open costs milliseconds, and this happens every step
        self._file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        """Append the line of a step; what is not finite becomes null, which JSON can hold."""
        if self._file is not None:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            write_line(self._file.fileno(), json.dumps(finite), self._file.name)

    def sync(self) -> None:
        """Make what was written durable: before a checkpoint, so that it never knows more steps than the file."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def format_loss(line: Mapping[str, Any]) -> str:
    """A step's loss, for people; that of a bad step may be no number."""
    return "left out" if "skipped" in line else f"loss {line['loss']:.4f}"


def format_speed(line: Mapping[str, Any]) -> str:
    """How fast a step was: what its line counts per second."""
    unit = "tokens" if "tokens_per_s" in line else "samples"
    return f"{line[f'{unit}_per_s']:,.0f} {unit}/s"


def list_lost_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """The lines beyond `step`: work that a restore of `step` loses."""
    return [line for line in lines.read_valid_lines(path, lines.is_step_line) if line["step"] > step]


def rewind_metrics(path: Path, step: int, more: Mapping[str, Any] | None = None) -> None:
    """Cut metrics.jsonl after `step`, whose line gets `more`; mend a torn tail; lines that fit no step go, too."""
    kept = {line["step"]: line for line in lines.read_valid_lines(path, lines.is_step_line) if line["step"] <= step}
    kept.get(step, {}).update(more or {})
    text = "".join(json.dumps(kept[s]) + "\n" for s in sorted(kept))
    if path.exists() and path.read_text(errors="replace") != text:
        write_atomic(path, text)


def get_compute_times_file(run: Run) -> Path:
    """For each host of the newest attempt its ranks' own time, divided by their peers'
    (pipeline/resilience/stragglers.py)."""
    return run.jobs_dir / "train/own-times.json"  # whoever only reads makes no folder


def read_compute_times(run: Run) -> dict[str, float]:
    """What stands there; nothing where there is no such file, or another one."""
    file = get_compute_times_file(run)
    found = read_json(file) if file.exists() else {}
    return found if isinstance(found, dict) and all(map(lines.is_number, found.values())) else {}
