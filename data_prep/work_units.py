"""Split the inputs into work units, once, so that any number of array tasks writes the same bytes.

Imagine all inputs concatenated, with a total length L. Of n work units, unit i has the range
[i * L / n, (i + 1) * L / n):

- A file in a format that can be split (plain .jsonl, .txt by lines) is split at or just before these boundaries. Each
  split is at a multiple of a power of two, which is about a hundredth of a unit. Therefore the splits of other files
  hardly ever move if a file grows by a few bytes.
- A file that cannot be split, or a row group of a Parquet file, belongs to the unit in which it starts.

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
"""Minimum number of work units, so that several array tasks can share small data."""
MIN_UNIT_BYTES = 1 << 16
"""Minimum size of a work unit in bytes of text, which has priority over `MIN_UNITS`."""
_PLANNED_SHARD_FRACTION = 0.9
"""Planned size of a shard, as a fraction of `data.shard_tokens`.

The fraction is below 1, because some texts have more tokens per byte than the sample for the estimate.
"""


Weights = Sequence[Sequence[int]]
"""For each input, the estimated bytes of text of each row group (Parquet), or of the whole file as the only element."""


class InputRange(NamedTuple):
    """A range [start, end) of an input: of the bytes of a file, of row groups (Parquet), or of the tokens of a file."""

    input: int
    """Index in the plan's inputs."""
    start: int
    end: int


class WorkPlan(NamedTuple):
    """The inputs and the work units. A unit is a list of ranges in the order of the inputs."""

    inputs: tuple[Input, ...]
    units: tuple[tuple[InputRange, ...], ...]


def is_held_out(text: bytes, fraction: float) -> bool:
    """Return True if the document with the UTF-8 bytes `text` is held out.

    A document is held out if the first 8 bytes of the SHA-256 of its text, scaled to [0, 1), are below `fraction`. The
    result depends on the text only. Duplicates are therefore either all held out or all in the training data.
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2**64


def count_units(total_bytes: int, shard_tokens: int, bytes_per_token: float) -> int:
    """Return the number of work units. Each fills about one shard.

    There are at least `MIN_UNITS` units, unless they would be smaller than `MIN_UNIT_BYTES`.

    Args:
        total_bytes: estimated bytes of text of all inputs.
        shard_tokens: maximum number of tokens of a shard.
        bytes_per_token: bytes of text per token, estimated from a sample.
    """
    full_shards = total_bytes / (shard_tokens * bytes_per_token * _PLANNED_SHARD_FRACTION)
    return max(1, int(full_shards) + 1, min(MIN_UNITS, total_bytes // MIN_UNIT_BYTES))


def measure_inputs(inputs: Sequence[Input], text_field: str) -> Weights:
    """Return the estimated bytes of text of each input, or of each row group of a Parquet file.

    Raises UserError if a Parquet file cannot be read or does not have the column `text_field`.
    """
    return [
        read_row_group_sizes(source.path, text_field) if source.format == "parquet" else [source.text_bytes]
        for source in inputs
    ]


def split_into_units(inputs: Sequence[Input], weights: Weights, count: int) -> tuple[tuple[InputRange, ...], ...]:
    """Split the inputs into at most `count` work units. Units without a range are omitted.

    The ranges of an input are disjoint and cover the whole input. Inputs without text have no range, except row groups
    of Parquet files.
    """
    total = sum(map(sum, weights))
    boundaries = [total * unit // count for unit in range(count + 1)]
    # Files are split at multiples of `grid`, which is 1/64 to 1/128 of a unit.
    grid = 1 << max(0, (total // count).bit_length() - 7)
    units: list[list[InputRange]] = [[] for _ in range(count)]
    position = 0  # start of the current input or row group in the concatenation of all inputs
    for index, source in enumerate(inputs):
        for row_group, weight in enumerate(weights[index]):  # Other formats have one weight for the whole file.
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
                # A row group without text still has rows to count. At the end of the inputs, it belongs to the last
                # unit.
                ranges = units[min(first_unit, count - 1)]
                continues_last_range = bool(ranges) and (ranges[-1].input, ranges[-1].end) == (index, row_group)
                start = ranges.pop().start if continues_last_range else row_group
                ranges.append(InputRange(index, start, row_group + 1))
            elif weight:
                units[first_unit].append(InputRange(index, 0, source.size))
            position += weight
    return tuple(tuple(unit) for unit in units if unit)


def write_plan(path: Path, plan: WorkPlan) -> None:
    """Write `units.json` atomically, with one line per input and unit. The same plan gives the same bytes."""
    inputs, units = (",\n".join(map(json.dumps, rows)) for rows in plan)
    write_atomic(path, f'{{"inputs": [\n{inputs}\n],\n"units": [\n{units}\n]}}\n')


def read_plan(path: Path) -> WorkPlan:
    """Return the plan in `units.json`. The caller must have checked the hash of the file."""
    content = json.loads(path.read_bytes())
    units = tuple(tuple(InputRange(*values) for values in unit) for unit in content["units"])
    return WorkPlan(tuple(Input(*values) for values in content["inputs"]), units)
