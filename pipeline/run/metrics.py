"""Read and write metrics.jsonl: one line for each optimizer step. Each step appears once, even after crashes.

The line of a step is written before the checkpoint of this step. A checkpoint therefore never contains more steps than
the file. When a checkpoint is restored, the lines of later steps are moved to events.jsonl (`lost_work`). A last line
that a crash truncated is removed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.base.files import write_atomic, write_line
from pipeline.run.lines import (
    has_fields,
    is_count,
    is_duration,
    is_mapping,
    is_number,
    is_text,
    read_valid_lines,
)

MAX_LOSSES = 100
"""Maximum number of recent losses with which the bad-step guard compares a loss (pipeline/resilience/guard.py)."""
_REQUIRED_FIELDS = {"step": is_count, "step_time_s": is_duration}
_OPTIONAL_FIELDS = {
    "loss": is_number,
    "tokens_per_s": is_number,
    "samples_per_s": is_number,
    "steps_per_s": is_number,
    "data_wait_s": is_number,
    "exposed_comm_s": is_number,
    "checkpoint_s": is_number,
    "evaluate_s": is_number,
    "held_out_loss": is_number,
    "held_out_ema_loss": is_number,
    "skipped": is_text,
    "time": is_number,
    "profile": is_mapping,
    "profile_s": is_number,
}


def is_step_line(line: Any) -> bool:
    """Return True if a JSON value is a valid line of a step. The loss of a skipped step may be null.

    Lines with `steps_per_s` come from a command (pipeline/command/monitor.py). They need not contain a loss.
    """
    if not has_fields(line, _REQUIRED_FIELDS, _OPTIONAL_FIELDS):
        return False
    if "steps_per_s" in line:
        return True
    if not is_number(line.get("tokens_per_s", line.get("samples_per_s"))):
        return False
    return is_number(line.get("loss")) or (line.get("skipped") is not None and "loss" in line)


def select_recent_metrics(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the last lines of metrics.jsonl, which the bad-step guard needs.

    These are the lines from the `MAX_LOSSES`-th last good step on. If there are fewer good steps, return all lines.
    """
    all_lines = list(metrics)
    good_indices = [index for index, line in enumerate(all_lines) if "skipped" not in line]
    return all_lines[good_indices[-MAX_LOSSES] :] if len(good_indices) > MAX_LOSSES else all_lines


class MetricsFile:
    """Appends lines to metrics.jsonl.

    Args:
        path: the file; None on ranks other than rank 0, which write nothing.
    """

    def __init__(self, path: Path | None) -> None:
        # the file stays open, because opening a file takes milliseconds on a parallel file system
        self._file = None if path is None else open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, line: Mapping[str, Any]) -> None:
        """Append the line of a step. Infinity and NaN become null, because JSON cannot represent them."""
        if self._file is not None:
            json_line = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in line.items()
            }
            write_line(self._file.fileno(), json.dumps(json_line), self._file.name)

    def sync(self) -> None:
        """Make the lines durable. Call this before a save, because the file must contain all steps of a checkpoint."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def format_loss(line: Mapping[str, Any]) -> str:
    """Return the loss of a step as text; `left out` if the update was skipped, because its loss may not be a number."""
    if "skipped" in line:
        return "left out"
    return "" if line.get("loss") is None else f"loss {line['loss']:.4f}"


def format_speed(line: Mapping[str, Any]) -> str:
    """Return the tokens, samples or steps per second of a step as text."""
    unit = next(unit for unit in ("tokens", "samples", "steps") if f"{unit}_per_s" in line)
    return f"{line[f'{unit}_per_s']:,.{2 if unit == 'steps' else 0}f} {unit}/s"


def list_lost_lines(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the lines of steps after `step`: the work that is lost if `step` is restored."""
    return [line for line in read_valid_lines(path, is_step_line) if line["step"] > step]


def rewind_metrics(path: Path, step: int, extra_values: Mapping[str, Any] | None = None) -> None:
    """Remove the lines of steps after `step`, malformed lines, and a truncated last line. Sort the other lines by step.

    Args:
        path: metrics.jsonl.
        step: the last step to keep.
        extra_values: values to add to the line of `step`, if this line exists.
    """
    kept = {line["step"]: line for line in read_valid_lines(path, is_step_line) if line["step"] <= step}
    kept.get(step, {}).update(extra_values or {})
    text = "".join(json.dumps(kept[kept_step]) + "\n" for kept_step in sorted(kept))
    if path.exists() and path.read_text(errors="replace") != text:
        write_atomic(path, text)
