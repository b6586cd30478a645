"""The numbers of a growing file of JSON lines, by name: each line is read once, and kept as numbers in arrays.

metrics.jsonl of 100,000 steps takes 25 MB so, where its lines as objects would take 300. Who looks again reads what was
appended since; where a restore cut the file, or it is another one, everything is read again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.files import parse_json_or_none, read_complete_lines
from pipeline.run.lines import LineCheck, format_malformed_count, is_number


class LineHistory:
    """One such file, as far as it was read."""

    def __init__(self, path: Path, fits: LineCheck, along: str = "step", keep: Sequence[str] = ()) -> None:
        """`along`: what curves are drawn over; `keep`: what is also kept line by line, in `rows`."""
        self.path, self.is_valid, self.x_key, self.row_keys = path, fits, along, keep
        self._begin((0, 0))

    def _begin(self, file: tuple[int, int]) -> None:
        """Forget everything; `file`: the device and inode of what is read now."""
        self._columns: dict[str, tuple[array[float], array[float]]] = {}
        self._file, self._end = file, 0
        self.rows: list[dict[str, Any]] = []
        self.malformed_count = 0
        """Lines that do not fit."""

    def read_new_lines(self) -> LineHistory:
        """Read what was appended since the last look. Nothing where there is no file."""
        if not self.path.exists():
            return self
        found = self.path.stat()
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._end:
            self._begin((found.st_dev, found.st_ino))
        for text, end in read_complete_lines(self.path, self._end):
            self._end = end
            if self.is_valid(line := parse_json_or_none(text)):
                self._add(line)
            else:
                self.malformed_count += not text.isspace()
        return self

    def _add(self, line: dict[str, Any]) -> None:
        for name, value in _numbers(line):
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = array("d"), array("d")
            column[0].append(line[self.x_key])
            column[1].append(value)
        if self.row_keys:
            self.rows.append({key: line[key] for key in self.row_keys if line.get(key) is not None})

    @property
    def names(self) -> list[str]:
        """All numbers that any line has; those inside a mapping or a list as `profile.compute`, `gpus.0.power_w`."""
        return list(self._columns)

    def values(self, name: str) -> Sequence[float]:
        """The values of one, in the order of the lines."""
        return self._columns[name][1] if name in self._columns else ()

    def curve(self, name: str) -> list[tuple[float, float]]:
        """The values of one over `along`."""
        return list(zip(*self._columns[name], strict=True)) if name in self._columns else []

    @property
    def malformed_description(self) -> str:
        """How many lines were left out, in words; "" for none."""
        return format_malformed_count(self.path, self.malformed_count)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if is_number(one):
            yield f"{name}{key}", one
        elif isinstance(one, dict | list):
            yield from _numbers(one, f"{name}{key}.")
