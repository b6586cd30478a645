"""Work units: the inputs are split once, so that any number of tasks writes the same bytes.

Imagine all inputs concatenated, with a total length L. Of n units, unit i has the range [i * L / n, (i + 1) * L / n):

- A format that can be split (plain .jsonl, .txt by lines) is split just before these boundaries, at multiples of a
  power of two that is about a hundredth of a unit. If a file grows by a few bytes, the splits of other files hardly
  ever move.
- A file that cannot be split, or a row group of parquet, belongs to the unit in which it starts.

Many small files therefore share a unit, and a large file is spread over many units. `units.json` contains the inputs
and the units.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_prep.documents import Input, read_row_group_sizes
from pipeline.base.files import write_atomic

MIN_UNITS = 4
"""Minimum number of units, so that several tasks can share small data."""
MIN_UNIT_BYTES = 1 << 16
"""Minimum size of a unit, which has priority over `MIN_UNITS`."""
_FILL = 0.9
"""Planned fraction of a full shard. It is below 1 because some texts have more tokens per byte than the sample."""


Weights = Sequence[Sequence[int]]
"""For each input, the bytes of text of its parts that are not split further: row groups of parquet, or one part."""


class InputRange(NamedTuple):
    """A range [start, end) of an input: of its bytes, of the row groups of parquet, or of the tokens of a file."""

    input: int
    """Index in the plan's inputs."""
    start: int
    end: int


class WorkPlan(NamedTuple):
    """The inputs and the work units. A unit is a list of ranges in the order of the inputs."""

    inputs: tuple[Input, ...]
    units: tuple[tuple[InputRange, ...], ...]


def is_held_out(text: bytes, fraction: float) -> bool:
    """Return True if a document is held out: if the SHA-256 of its UTF-8 bytes, scaled to [0, 1), is below `fraction`.

    The result depends on the text only. Duplicates are therefore either all held out or all in the training data.
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2**64


def count_units(total_bytes: int, shard_tokens: int, bytes_per_token: float) -> int:
    """Return the number of units. A unit fills about one shard, but there are at least `MIN_UNITS` if possible."""
    full_shards = total_bytes / (shard_tokens * bytes_per_token * _FILL)
    return max(1, int(full_shards) + 1, min(MIN_UNITS, total_bytes // MIN_UNIT_BYTES))


def measure_inputs(inputs: Sequence[Input], text_field: str) -> Weights:
    """Estimate the bytes of text in each input, or in each row group of parquet. Raises UserError as reading does."""
    return [
        read_row_group_sizes(source.path, text_field) if source.format == "parquet" else [source.text_bytes]
        for source in inputs
    ]


def split_into_units(inputs: Sequence[Input], weights: Weights, count: int) -> tuple[tuple[InputRange, ...], ...]:
    """Split the inputs into at most `count` units. Units without a range are omitted.

    The ranges of an input are disjoint and cover it. Empty inputs have no range.
    """
    total = sum(map(sum, weights))
    boundaries = [total * unit // count for unit in range(count + 1)]
    grid = 1 << max(0, (total // count).bit_length() - 7)
    units: list[list[InputRange]] = [[] for _ in range(count)]
    position = 0  # in the concatenation of all inputs
    for index, source in enumerate(inputs):
        for number, weight in enumerate(weights[index]):
            first_unit = bisect_right(boundaries, position) - 1
            if source.splits:
                stop = position + weight
                for unit in range(first_unit, count):
                    low = max(boundaries[unit], position)
                    high = min(boundaries[unit + 1], stop)
                    start = (low - position) // grid * grid
                    end = weight if high == stop else (high - position) // grid * grid
                    if start < end:
                        units[unit].append(InputRange(index, start, end))
                    if high == stop:
                        break
            elif source.format == "parquet":
                # A row group without text still has rows to count, even at the end of the inputs.
                ranges = units[min(first_unit, count - 1)]
                extends_last = bool(ranges) and (ranges[-1].input, ranges[-1].end) == (index, number)
                start = ranges.pop().start if extends_last else number
                ranges.append(InputRange(index, start, number + 1))
            elif weight:
                units[first_unit].append(InputRange(index, 0, source.size))
            position += weight
    return tuple(tuple(unit) for unit in units if unit)


def write_plan(path: Path, plan: WorkPlan) -> None:
    """Write `units.json` atomically, with one line per input and unit. The same plan gives the same bytes."""
    inputs, units = (",\n".join(map(json.dumps, rows)) for rows in plan)
    write_atomic(path, f'{{"inputs": [\n{inputs}\n],\n"units": [\n{units}\n]}}\n')


def read_plan(path: Path) -> WorkPlan:
    """Return the plan in `units.json`. The caller must have checked its hash."""
    content = json.loads(path.read_bytes())
    units = tuple(tuple(InputRange(*values) for values in unit) for unit in content["units"])
    return WorkPlan(tuple(Input(*values) for values in content["inputs"]), units)
