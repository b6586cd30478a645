"""`data.deduplicate`: find documents whose text occurs earlier in the inputs, without one process holding all of them.

    shards/unit-00003-KEY.hashes       one unit: the first 16 bytes of each text's SHA-256 and the document's index in
                                       the unit, sorted by hash. Before them 257 offsets: where each first byte begins.
    shards/unit-KEY-002-of-007.twice   one range of hashes over all units: the indices of duplicates, sorted by unit.
                                       Before them one offset per unit.

Tasks need not wait for each other. Each task hashes its own units, then units that others have not hashed yet, and then
finds the duplicates of hash ranges in the same order. Work that two tasks do at once has the same result. Each input is
tokenized once and read at least twice.

There are as many hash ranges as tasks, or more, so that a range has about four million hashes (214 MB of memory), up to
256 ranges. Beyond 10⁹ documents a range needs more memory. Hashing needs 65 bytes per document of a unit.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.base.files import replace_atomically, sha256_json

_ROW = np.dtype([("hash", "S16"), ("place", "<i8")])
_INDEX = np.dtype("<i8")
_MAX_RANGE_HASHES = 1 << 22
"""Number of hashes that a range should not exceed."""
_BUCKETS = 256
"""Number of values of the first byte of a hash. A hash range consists of whole buckets."""


class Duplicates:
    """The duplicate documents of a data folder's work units.

    Args:
        folder: folder for the files of hashes and duplicates.
        keys: for each unit, a key of everything on which its documents depend.
        read_texts: function that returns the UTF-8 texts of a unit, in order.
        task: number of this task, from 0.
        tasks: number of tasks.
    """

    def __init__(
        self, folder: Path, keys: Sequence[str], read_texts: Callable[[int], Iterable[bytes]], task: int, tasks: int
    ) -> None:
        self._folder = folder
        self._read_texts = read_texts
        self._task = task
        self._tasks = tasks
        self._hash_files = [folder / f"unit-{unit:05d}-{key[:16]}.hashes" for unit, key in enumerate(keys)]
        self._key = sha256_json(list(keys))[:16]

    def find_first_occurrences(self, unit: int) -> npt.NDArray[np.bool_]:
        """Return an array of shape (documents,): True for each document of a unit whose text does not occur earlier."""
        is_first = np.ones(self._document_counts[unit], bool)
        for path in self._duplicate_files:
            start, stop = _read_offsets(path, 2, unit)
            is_first[_read_rows(path, _INDEX, len(self._hash_files) + 1, start, stop)] = False
        return is_first

    @cached_property
    def _document_counts(self) -> list[int]:
        """Number of documents of each unit. All units that are not hashed yet are hashed first."""
        unit_count = len(self._hash_files)
        for unit in self._order_work(range(self._task, unit_count, self._tasks), unit_count):
            if not _is_complete(self._hash_files[unit], _BUCKETS + 1, _ROW):
                self._hash_unit(unit)
        return [int(_read_offsets(path, 1, _BUCKETS)[0]) for path in self._hash_files]

    @cached_property
    def _duplicate_files(self) -> list[Path]:
        """File of duplicates of each hash range. Missing files are written first."""
        count = min(_BUCKETS, max(self._tasks, -(-sum(self._document_counts) // _MAX_RANGE_HASHES)))
        paths = [self._folder / f"unit-{self._key}-{number:03d}-of-{count:03d}.twice" for number in range(count)]
        assigned = range(count * self._task // self._tasks, count * (self._task + 1) // self._tasks)
        for number in self._order_work(assigned, count):
            if not _is_complete(paths[number], len(self._hash_files) + 1, _INDEX):
                self._find_duplicates(paths[number], _BUCKETS * number // count, _BUCKETS * (number + 1) // count)
        return paths

    def _order_work(self, assigned: range, count: int) -> list[int]:
        """Return the numbers 0 to count - 1: first those assigned to this task, then the others.

        The others are in a different order in each task, so that two tasks rarely do the same work.
        """
        others = sorted({*range(count)} - {*assigned})
        random.Random(self._task).shuffle(others)
        return [*assigned, *others]

    def _hash_unit(self, unit: int) -> None:
        """Write the file of hashes of a unit."""
        digests = bytearray()
        for text in self._read_texts(unit):
            digests += hashlib.sha256(text).digest()[:16]
        hashes = np.frombuffer(digests, "S16")
        order = np.argsort(hashes, kind="stable")
        rows = np.empty(len(hashes), _ROW)
        rows["hash"] = hashes[order]
        rows["place"] = order
        first_bytes = rows.view(np.uint8)[:: _ROW.itemsize]
        _write_file(self._hash_files[unit], np.searchsorted(first_bytes, np.arange(_BUCKETS + 1)), rows)

    def _find_duplicates(self, path: Path, low: int, high: int) -> None:
        """Write the file of duplicates of the hashes whose first byte is in [low, high)."""
        parts = []
        for hash_file in self._hash_files:
            offsets = _read_offsets(hash_file, _BUCKETS + 1, 0)
            parts.append(_read_rows(hash_file, _ROW, _BUCKETS + 1, offsets[low], offsets[high]))
        unit_starts = np.cumsum([0, *map(len, parts)])
        rows = np.concatenate(parts)
        parts.clear()
        order = np.argsort(rows["hash"], kind="stable")  # Equal hashes stay in the order of units.
        sorted_hashes = rows["hash"][order]
        is_duplicate = np.zeros(len(rows), bool)
        is_duplicate[order[1:][sorted_hashes[1:] == sorted_hashes[:-1]]] = True
        duplicates = np.flatnonzero(is_duplicate)
        _write_file(path, np.searchsorted(duplicates, unit_starts), rows["place"][duplicates])


def _write_file(path: Path, offsets: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Write offsets and rows to a file, atomically."""
    with replace_atomically(path) as temporary, open(temporary, "wb") as file:
        file.write(offsets.astype("<i8").tobytes())
        file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())


def _is_complete(path: Path, offset_count: int, row_type: np.dtype[Any]) -> bool:
    """Return True if a file exists and has the size that follows from its last offset.

    After a crash of the file system, a file may be truncated or full of zeros.
    """
    size = path.stat().st_size if path.exists() else 0
    header_bytes = 8 * offset_count
    if size < header_bytes:
        return False
    return size == header_bytes + row_type.itemsize * int(_read_offsets(path, 1, offset_count - 1)[0])


def _read_offsets(path: Path, count: int, first: int) -> npt.NDArray[np.int64]:
    """Return `count` offsets of a file, beginning with number `first`."""
    return np.fromfile(path, "<i8", count, offset=8 * first)


def _read_rows(path: Path, row_type: np.dtype[Any], offset_count: int, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows [start, stop) of a file that begins with `offset_count` offsets."""
    return np.fromfile(path, row_type, int(stop - start), offset=8 * offset_count + int(start) * row_type.itemsize)
