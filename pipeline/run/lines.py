"""Read files of JSON lines, and check the fields of each line.

In events.jsonl, metrics.jsonl and telemetry, malformed lines are left out, for example a line that a crash truncated or
a user edited. `status` and `report` print their number. In changes.jsonl and decisions.jsonl, a malformed line is an
error, because these files determine what is trained. Only a line that a crash truncated is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.base.errors import ExitCode, InputError
from pipeline.base.files import (
    has_wrong_checksum,
    open_regular_file,
    parse_json_or_none,
    read_complete_lines,
    read_jsonl,
)

LineCheck = Callable[[Any], bool]
_EARLIEST = datetime(2020, 1, 1, tzinfo=UTC)
"""The earliest plausible time of an event."""
MAX_DURATION_S = 1e10
"""Upper limit of a plausible duration, about three hundred years."""


# -- checks of values --------------------------------------------------------------------------------------------------


def is_text(value: Any) -> bool:
    """Return True for a string."""
    return isinstance(value, str)


def is_count(value: Any) -> bool:
    """Return True for an integer from 0 to 2**48 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48


def is_number(value: Any) -> bool:
    """Return True for a finite number with an absolute value below 1e300."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def is_duration(value: Any) -> bool:
    """Return True for a plausible duration in seconds, from 0 to `MAX_DURATION_S`."""
    return is_number(value) and 0 <= value <= MAX_DURATION_S


def is_timestamp(value: Any) -> bool:
    """Return True for an ISO 8601 time with a time zone, from 2020 to a day in the future (clocks may differ)."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return time.tzinfo is not None and _EARLIEST <= time <= datetime.now(UTC) + timedelta(days=1)


def is_exit_code(value: Any) -> bool:
    """Return True for a value of `ExitCode`."""
    return is_count(value) and value in set(ExitCode)


def is_mapping(value: Any) -> bool:
    """Return True for a JSON object."""
    return isinstance(value, dict)


def is_list_of(check: LineCheck) -> LineCheck:
    """Return a function that checks if a value is a list and `check` accepts each item."""
    return lambda value: isinstance(value, list) and all(map(check, value))


def has_fields(line: Any, required: Mapping[str, LineCheck], optional: Mapping[str, LineCheck]) -> bool:
    """Return True if `line` is a JSON object with valid fields.

    Args:
        line: a JSON value.
        required: name of a field → function that checks its value.
        optional: the same for fields that may be missing or null. Other fields are not checked.
    """
    return (
        isinstance(line, dict)
        and all(key in line and check(line[key]) for key, check in required.items())
        and all(line.get(key) is None or check(line[key]) for key, check in optional.items())
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def read_valid_lines(path: Path, is_valid: LineCheck) -> Iterator[dict[str, Any]]:
    """Return the valid lines of a file, in order; nothing if the file does not exist."""
    return filter(is_valid, read_jsonl(path))


def describe_malformed_lines(path: Path, is_valid: LineCheck) -> str:
    """Return a message with the number of malformed lines of a file; "" if no line is malformed.

    Empty lines do not count. An incomplete last line does not count either, because another process may be writing it.
    """
    count = 0
    if path.exists():
        with open_regular_file(path) as file:
            count = sum(
                line.endswith(b"\n") and not line.isspace() and not is_valid(parse_json_or_none(line)) for line in file
            )
    return format_malformed_count(path, count)


def format_malformed_count(path: Path, count: int) -> str:
    """Return a message about `count` malformed lines of a file; "" if `count` is 0."""
    return f"{path.name}: {count} malformed line{'s' * (count != 1)} left out" if count else ""


def read_required_lines(path: Path, is_valid: LineCheck) -> list[dict[str, Any]]:
    """Return the lines of a file in which a malformed line is an error; [] if the file does not exist.

    Only a line that is not valid JSON and does not end with `}` is left out. A crash truncated this line before
    anything depended on it.

    Raises:
        InputError: if a line is malformed or its checksum is wrong.
    """
    values: list[dict[str, Any]] = []
    if not path.exists():
        return values
    with open_regular_file(path) as file:
        lines = [(number, line, parse_json_or_none(line)) for number, line in enumerate(file, 1)]
    for number, line, value in lines:
        if value is None and not line.rstrip().endswith(b"}"):
            continue
        if not is_valid(value) or has_wrong_checksum(value):
            raise InputError(
                "run.damaged_file", f"{path}, line {number} is damaged: {line[:80]!r}; restore the original line"
            )
        values.append(value)
    return values


class LineHistory:
    """The numbers of a growing file of JSON lines, by key. Each line is read once.

    The numbers are kept in arrays: for 100,000 steps of metrics.jsonl they take 25 MB, and a list of objects would take
    300 MB. If the file was replaced or truncated, it is read again from the start.

    Args:
        path: the file.
        is_valid: returns True for a valid line.
        x_key: the key with the x values of :meth:`curve`.
        row_keys: keys whose values are kept line by line in `rows`, even if they are not numbers.
    """

    def __init__(self, path: Path, is_valid: LineCheck, x_key: str = "step", row_keys: Sequence[str] = ()) -> None:
        self.path = path
        self.is_valid = is_valid
        self.x_key = x_key
        self.row_keys = row_keys
        self._clear((0, 0))

    def _clear(self, file_id: tuple[int, int]) -> None:
        """Forget all lines. `file_id`: the device and inode of the file to read."""
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        """Key → the x values and the values of the lines that have this key."""
        self._file_id = file_id
        self._end = 0
        """The offset of the first byte that was not read yet."""
        self.rows: list[dict[str, Any]] = []
        """For each line, the values of `row_keys` that are not null."""
        self.malformed_count = 0
        """Number of malformed lines."""

    def read_new_lines(self) -> LineHistory:
        """Read the lines that were appended since the last call. Return this object."""
        if not self.path.exists():
            return self
        status = self.path.stat()
        file_id = (status.st_dev, status.st_ino)
        if file_id != self._file_id or status.st_size < self._end:
            self._clear(file_id)
        for text, end in read_complete_lines(self.path, self._end):
            self._end = end
            line = parse_json_or_none(text)
            if self.is_valid(line):
                self._add_line(line)
            else:
                self.malformed_count += not text.isspace()
        return self

    def _add_line(self, line: dict[str, Any]) -> None:
        """Add the numbers of a line to the columns, and the values of `row_keys` to `rows`."""
        for name, value in _iterate_numbers(line):
            column = self._columns.get(name)
            if column is None:
                column = (array("d"), array("d"))
                self._columns[name] = column
            x_values, values = column
            x_values.append(line[self.x_key])
            values.append(value)
        if self.row_keys:
            self.rows.append({key: line[key] for key in self.row_keys if line.get(key) is not None})

    @property
    def names(self) -> list[str]:
        """The keys of all numbers. Nested numbers have dotted keys such as `profile.compute` or `gpus.0.power_w`."""
        return list(self._columns)

    def values(self, name: str) -> Sequence[float]:
        """Return the numbers of the key `name`, in the order of the lines; empty if no line has this key."""
        return self._columns[name][1] if name in self._columns else ()

    def curve(self, name: str) -> list[tuple[float, float]]:
        """Return the points of a curve: pairs of the value of `x_key` and the value of the key `name`."""
        return list(zip(*self._columns[name], strict=True)) if name in self._columns else []

    @property
    def malformed_description(self) -> str:
        """A message with the number of malformed lines; "" if no line is malformed."""
        return format_malformed_count(self.path, self.malformed_count)


def _iterate_numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted key and the value of each number in a JSON object or list, also of nested numbers."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if is_number(item):
            yield f"{prefix}{key}", item
        elif isinstance(item, dict | list):
            yield from _iterate_numbers(item, f"{prefix}{key}.")
