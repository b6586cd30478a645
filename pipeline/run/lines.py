"""What a line of a run's files must hold, checked where it is read, so that nobody else need ask.

A line of events.jsonl or metrics.jsonl that does not fit (torn by a crash, altered by a person or a disk) is left out,
by everybody alike; `status` and `report` say how many (:func:`odd`). Of `changes.jsonl` and `decisions.jsonl`, which
say what is trained, only a line that a crash tore is left out: one that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.base.errors import ExitCode, InputError
from pipeline.base.files import has_wrong_checksum, open_regular_file, parse_json_or_none, read_jsonl

LineCheck = Callable[[Any], bool]
_EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)
MAX_DURATION_S = 1e10
"""More seconds than this (three hundred years) are none that anything took."""


def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Whether it is a whole number from 0 on, of a size that something can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def is_number(value: Any) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_duration(value: Any) -> bool:
    """Whether it is a number of seconds."""
    return is_number(value) and 0 <= value <= MAX_DURATION_S


def _stamp(value: Any) -> bool:
    """Whether it is a time at which this can have been written; a clock may be a day ahead."""
    try:
        stamp = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return stamp.tzinfo is not None and _EARLIEST <= stamp <= datetime.now(UTC) + timedelta(days=1)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(check: LineCheck) -> LineCheck:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _fits(line: Any, needs: Mapping[str, LineCheck], may: Mapping[str, LineCheck]) -> bool:
    """Whether `line` has what it needs; what it `may` have may be null, too."""
    return (
        isinstance(line, dict)
        and all(key in line and check(line[key]) for key, check in needs.items())
        and all(line.get(key) is None or check(line[key]) for key, check in may.items())
    )


_STEP = {"step": is_count, "step_time_s": is_duration}
_OF_A_STEP = {
    "loss": is_number,
    "tokens_per_s": is_number,
    "samples_per_s": is_number,
    "data_wait_s": is_number,
    "exposed_comm_s": is_number,
    "checkpoint_s": is_number,
    "evaluate_s": is_number,
    "held_out_loss": is_number,
    "skipped": is_text,
    "time": is_number,
    "profile": _mapping,
    "profile_s": is_number,
}


def is_step_line(line: Any) -> bool:
    """Whether it is the line of a step. The loss of one that was left out may be no number."""
    if not _fits(line, _STEP, _OF_A_STEP) or not is_number(line.get("tokens_per_s", line.get("samples_per_s"))):
        return False
    return is_number(line.get("loss")) or (line.get("skipped") is not None and "loss" in line)


_ANY_EVENT = {"time": _stamp, "event": is_text}
_OF_AN_EVENT = {
    "stage": is_text,
    "task": is_count,
    "step": is_count,
    "rank": is_count,
    "ranks": is_count,
    "attempt": is_count,
    "restarts": is_count,
    "host": is_text,
    "seconds": is_duration,
    "job_id": is_text,
    "slurm_job": is_text,
    "cluster": is_text,
    "job_name": is_text,
    "kind": is_text,
    "key": is_text,
    "array_task": is_count,
    "tasks": is_count,
    "after": _list_of(is_text),
    "children": _list_of(is_text),
    "job_submitted": is_number,
    "ratio": is_number,
    "steps": _list_of(is_count),
    "lines": _list_of(is_step_line),
    "message": is_text,
    "cause": is_text,
    "by": is_text,
    "uid": is_count,
    "exit_code": lambda value: is_count(value) and value in set(ExitCode),
}
_NEEDED = {
    "submitting": ("stage", "key"), "submitted": ("stage", "job_id"), "not_submitted": ("stage", "key"),
    "started": ("stage",), "saved": ("step",), "restored": ("step",),
    "ready": ("step",), "held_out": ("step",), "lost_work": ("steps", "lines"), "straggler": ("rank", "host", "ratio"),
    "recovered": ("rank",), "took_over": ("job_id", "children"), "retried": ("job_id", "cause"),
}  # fmt: skip


def is_event(line: Any) -> bool:
    """Whether it says what an event of its name says."""
    if not _fits(line, _ANY_EVENT, _OF_AN_EVENT):
        return False
    needed = (*_NEEDED.get(line["event"], ()), *(("after",) if line.get("kind") is not None else ()))
    return all(line.get(key) is not None for key in needed)


def is_bad_node(line: Any) -> bool:
    """Whether it names a node that failed."""
    return _fits(line, {"time": is_number, "host": is_text}, {})


def is_config_change(line: Any) -> bool:
    """Whether it is a change of the config."""
    return _fits(line, {"set": _mapping}, {"submitted": _mapping})


def is_checkpoint_manifest(manifest: Any) -> bool:
    """Whether it is the manifest of a checkpoint."""
    needs = {"step": is_count, "samples_consumed": is_count, "layout": _mapping, "files": _mapping}
    file = {"size": is_count, "sha256": is_text}
    return _fits(manifest, needs, {}) and all(_fits(entry, file, {}) for entry in manifest["files"].values())


def is_decision(line: Any) -> bool:
    """Whether it says which samples a training leaves out."""
    needs = {"decision": lambda value: value in ("skip", "leave_out"), "position": is_count, "reason": is_text}
    return _fits(line, needs, {"samples": is_count}) and ("samples" in line or line["decision"] == "skip")


def read_valid_lines(path: Path, fits: LineCheck) -> Iterator[dict[str, Any]]:
    """The lines of a file that fit; nothing where there is no file."""
    return filter(fits, read_jsonl(path))


def describe_malformed_lines(path: Path, fits: LineCheck) -> str:
    """How many lines of a file do not fit, in words, but for one at the end that is being written; "" for none."""
    found = 0
    if path.exists():
        with open_regular_file(path) as file:
            found = sum(
                line.endswith(b"\n") and not line.isspace() and not fits(parse_json_or_none(line)) for line in file
            )
    return format_malformed_count(path, found)


def format_malformed_count(path: Path, found: int) -> str:
    """That so many lines of a file were left out, in words; "" for none."""
    return f"{path.name}: {found} line{'s' * (found != 1)} left out, torn or not as Sluice writes them" if found else ""


def read_required_lines(path: Path, fits: LineCheck) -> list[dict[str, Any]]:
    """All lines of a file that nobody may leave out. Raises InputError, naming the line, for one that does not fit.

    What a crash tore, before anything was done by it, has lost its end, and is left out here, too.
    """
    found: list[dict[str, Any]] = []
    if path.exists():
        with open_regular_file(path) as file:
            whole = [(place, line, parse_json_or_none(line)) for place, line in enumerate(file, 1)]
        for place, line, value in whole:
            if value is None and not line.rstrip().endswith(b"}"):
                continue
            if not fits(value) or has_wrong_checksum(value):
                raise InputError(
                    "run.damaged_file", f"{path}, line {place} is damaged: {line[:80]!r}; put the file back as it was"
                )
            found.append(value)
    return found
