"""Read decisions.jsonl: the bad steps that a run skipped, and the samples that it excludes.

pipeline/resilience/guard.py writes the file and describes its lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.run.lines import has_fields, is_count, is_text


def is_decision(line: Any) -> bool:
    """Return True if the JSON value `line` is a valid line of decisions.jsonl."""
    required = {
        "decision": lambda value: value in ("skip", "leave_out"),
        "position": is_count,
        "reason": is_text,
    }
    if not has_fields(line, required, {"samples": is_count, "update": is_count}):
        return False
    return "samples" in line or line["decision"] == "skip"


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ranges that overlap or touch. Return the merged ranges in ascending order.

    Args:
        ranges: the position of the first sample, and the number of samples, of each range.
    """
    merged: list[tuple[int, int]] = []
    for start, count in sorted(ranges):
        if merged:
            previous_start, previous_count = merged[-1]
            if start <= previous_start + previous_count:
                merged[-1] = (previous_start, max(previous_count, start + count - previous_start))
                continue
        merged.append((start, count))
    return merged


def select_decisions_until(
    decisions: Sequence[Mapping[str, Any]], samples_consumed: int
) -> tuple[list[Mapping[str, Any]], int]:
    """Return the decisions about the first samples of a run, and the position of the next sample.

    Args:
        decisions: the lines of decisions.jsonl.
        samples_consumed: the number of consumed samples, without excluded ones.
    """
    excluded = [(int(line["position"]), int(line["samples"])) for line in decisions if line["decision"] != "skip"]
    position = samples_consumed
    for start, count in merge_ranges(excluded):
        if start < position:
            position += count
    return [line for line in decisions if line["position"] < position], position
