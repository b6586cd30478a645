"""Work units: how the inputs are cut, once, so that any number of tasks writes the same bytes.

All inputs are laid end to end on one line, each as long as its size. With n units, unit i owns the stretch
[i·L/n, (i+1)·L/n) of a line of length L:

    - a format that splits (plain .jsonl, .txt by lines) is cut just before the borders, at multiples of about a
      hundredth of a unit (a power of two) from the file's start;
    - a whole file, or a parquet row group, belongs to the unit where it starts.

So many small files share a unit, one large file is spread over many, and nothing depends on the number of
tasks. And a file that is mended, and a few bytes longer then, moves hardly any cut in the others. What a unit owns of
one input is a :class:`Piece`. `units.json` holds the inputs and the units.
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

MIN_UNITS = 4  # so that a few tasks have something to share on small data
MIN_UNIT_BYTES = 1 << 16
_FILL = 0.9  # of a shard; the rest is room for texts that need more tokens than the sample did


Weights = Sequence[Sequence[int]]
"""Bytes of text of each part of each input that is not cut further (a row group of parquet; else all of it)."""


class InputRange(NamedTuple):
    """A stretch of an input: bytes [start, end); of parquet row groups, of files of tokens these."""

    input: int
    """Place in the plan's inputs."""
    start: int
    end: int


class WorkPlan(NamedTuple):
    """The inputs and the work units, each a list of pieces in the order of the inputs."""

    inputs: tuple[Input, ...]
    units: tuple[tuple[InputRange, ...], ...]


def is_held_out(text: bytes, fraction: float) -> bool:
    """Whether a document (its UTF-8 bytes) is held out: its SHA-256, as a fraction of all hashes, is below `fraction`.

    Only the text decides, so duplicates fall on one side, whatever their file or place.
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2**64


def count_units(total_bytes: int, shard_tokens: int, bytes_per_token: float) -> int:
    """How many units: each about one shard, but a few at least when there is enough for them."""
    full = total_bytes / (shard_tokens * bytes_per_token * _FILL)
    return max(1, int(full) + 1, min(MIN_UNITS, total_bytes // MIN_UNIT_BYTES))


def measure_inputs(inputs: Sequence[Input], text_field: str) -> Weights:
    """About how many bytes of text each input holds; of parquet, each row group. Raises UserError as reading does."""
    return [
        read_row_group_sizes(one.path, text_field) if one.format == "parquet" else [one.text_bytes] for one in inputs
    ]


def split_into_units(inputs: Sequence[Input], weights: Weights, count: int) -> tuple[tuple[InputRange, ...], ...]:
    """Cut the inputs into at most `count` units; units that own nothing are left out.

    The pieces of one input never overlap and cover it; empty inputs have none.
    """
    total = sum(map(sum, weights))
    borders = [total * unit // count for unit in range(count + 1)]
    grid = 1 << max(0, (total // count).bit_length() - 7)
    units: list[list[InputRange]] = [[] for _ in range(count)]
    position = 0
    for index, source in enumerate(inputs):
        for number, weight in enumerate(weights[index]):
            first = bisect_right(borders, position) - 1
            if source.splits:
                stop = position + weight
                for unit in range(first, count):
                    low, high = max(borders[unit], position), min(borders[unit + 1], stop)
                    start = (low - position) // grid * grid
                    end = weight if high == stop else (high - position) // grid * grid
                    if start < end:
                        units[unit].append(InputRange(index, start, end))
                    if high == stop:
                        break
            elif source.format == "parquet":
                # A row group of no bytes still has rows to count, at the end of the line too.
                pieces = units[min(first, count - 1)]
                goes_on = bool(pieces) and (pieces[-1].input, pieces[-1].end) == (index, number)
                start = pieces.pop().start if goes_on else number
                pieces.append(InputRange(index, start, number + 1))
            elif weight:
                units[first].append(InputRange(index, 0, source.size))
            position += weight
    return tuple(tuple(unit) for unit in units if unit)


def write_plan(path: Path, plan: WorkPlan) -> None:
    """Write `units.json`, atomically and the same bytes for the same plan: a line for each input and unit."""
    inputs, units = (",\n".join(map(json.dumps, rows)) for rows in plan)
    write_atomic(path, f'{{"inputs": [\n{inputs}\n],\n"units": [\n{units}\n]}}\n')


def read_plan(path: Path) -> WorkPlan:
    """Read `units.json` (whose hash the caller has checked)."""
    value = json.loads(path.read_bytes())
    units = tuple(tuple(InputRange(*piece) for piece in unit) for unit in value["units"])
    return WorkPlan(tuple(Input(*row) for row in value["inputs"]), units)
