"""Find documents with a text that occurs earlier in the inputs (`data.deduplicate`). No process holds all hashes.

    shards/unit-00003-KEY.hashes       hashes of the documents of one work unit. The file has 257 offsets, then one row
                                       per document, sorted by hash. A row has the first 16 bytes of the SHA-256 of the
                                       text, and the index of the document in the unit. The offsets give the first row
                                       for each value of the first byte of a hash, and the number of rows.
    shards/unit-KEY-002-of-007.twice   duplicates in one range of hashes. The file has an offset for each unit and the
                                       number of rows. The rows, sorted by unit, are the indices of duplicates.

Array tasks need not wait for each other. Each task hashes its own units, then units that other tasks have not hashed
yet. In the same way, it then finds the duplicates of its own hash ranges and of other ranges. Two tasks that do the
same work get the same result. Each input is tokenized once and read at least twice.

The number of hash ranges is at least the number of tasks, and at most 256. There are enough ranges that a range has
about four million hashes (214 MB of memory). Beyond 10⁹ documents, a range needs more memory. Hashing needs 65 bytes
per document of a unit.
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

_HASH_ROW = np.dtype([("hash", "S16"), ("index", "<i8")])
"""Row of a file of hashes: the hash of a document, and the index of the document in its work unit."""
_INDEX = np.dtype("<i8")
"""Row of a file of duplicates: the index of a document in its work unit."""
_MAX_RANGE_HASHES = 1 << 22
"""Desired maximum number of hashes in a range."""
_BUCKETS = 256
"""Number of values of the first byte of a hash. A hash range consists of whole buckets."""


class Duplicates:
    """The duplicate documents of a data folder's work units.

    Args:
        folder: folder for the files of hashes and duplicates.
        keys: for each work unit, a hash of everything on which its documents depend.
        read_texts: function that returns the UTF-8 texts of the documents of a unit, in order.
        task: index of this array task, from 0.
        tasks: number of array tasks.
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
        """Return which documents of a work unit have a text that does not occur earlier: bool, shape (documents,)."""
        is_first = np.ones(self._document_counts[unit], bool)
        for path in self._duplicate_files:
            start, stop = _read_offsets(path, 2, unit)
            is_first[_read_rows(path, _INDEX, len(self._hash_files) + 1, start, stop)] = False
        return is_first

    @cached_property
    def _document_counts(self) -> list[int]:
        """Number of documents of each work unit. Units that are not hashed yet are hashed first."""
        unit_count = len(self._hash_files)
        for unit in self._order_work(range(self._task, unit_count, self._tasks), unit_count):
            if not _is_complete(self._hash_files[unit], _BUCKETS + 1, _HASH_ROW):
                self._hash_unit(unit)
        return [int(_read_offsets(path, 1, _BUCKETS)[0]) for path in self._hash_files]

    @cached_property
    def _duplicate_files(self) -> list[Path]:
        """Path of the file of duplicates of each hash range. Missing files are written first."""
        ranges = min(_BUCKETS, max(self._tasks, -(-sum(self._document_counts) // _MAX_RANGE_HASHES)))
        paths = [self._folder / f"unit-{self._key}-{number:03d}-of-{ranges:03d}.twice" for number in range(ranges)]
        assigned_ranges = range(ranges * self._task // self._tasks, ranges * (self._task + 1) // self._tasks)
        for number in self._order_work(assigned_ranges, ranges):
            if not _is_complete(paths[number], len(self._hash_files) + 1, _INDEX):
                self._find_duplicates(paths[number], _BUCKETS * number // ranges, _BUCKETS * (number + 1) // ranges)
        return paths

    def _order_work(self, assigned_numbers: range, count: int) -> list[int]:
        """Return the numbers 0 to count - 1: first the numbers assigned to this task, then the other numbers.

        Each task shuffles the other numbers differently, so that two tasks rarely do the same work.
        """
        other_numbers = sorted({*range(count)} - {*assigned_numbers})
        random.Random(self._task).shuffle(other_numbers)
        return [*assigned_numbers, *other_numbers]

    def _hash_unit(self, unit: int) -> None:
        """Write the file of hashes of a work unit."""
        digests = bytearray()
        for text in self._read_texts(unit):
            digests += hashlib.sha256(text).digest()[:16]
        hashes = np.frombuffer(digests, "S16")
        order = np.argsort(hashes, kind="stable")
        rows = np.empty(len(hashes), _HASH_ROW)
        rows["hash"] = hashes[order]
        rows["index"] = order
        # A row begins with its hash, so the first byte of the row is the first byte of the hash.
        first_bytes = rows.view(np.uint8)[:: _HASH_ROW.itemsize]
        _write_file(self._hash_files[unit], np.searchsorted(first_bytes, np.arange(_BUCKETS + 1)), rows)

    def _find_duplicates(self, path: Path, low: int, high: int) -> None:
        """Write the file of duplicates `path` for the hashes with a first byte in [low, high)."""
        rows_by_unit = []
        for hash_file in self._hash_files:
            offsets = _read_offsets(hash_file, _BUCKETS + 1, 0)
            rows_by_unit.append(_read_rows(hash_file, _HASH_ROW, _BUCKETS + 1, offsets[low], offsets[high]))
        unit_starts = np.cumsum([0, *map(len, rows_by_unit)])
        rows = np.concatenate(rows_by_unit)
        rows_by_unit.clear()  # Free the memory.
        # The sort is stable, so equal hashes stay in the order of the documents. All but the first are duplicates.
        order = np.argsort(rows["hash"], kind="stable")
        sorted_hashes = rows["hash"][order]
        is_duplicate = np.zeros(len(rows), bool)
        is_duplicate[order[1:][sorted_hashes[1:] == sorted_hashes[:-1]]] = True
        duplicates = np.flatnonzero(is_duplicate)
        _write_file(path, np.searchsorted(duplicates, unit_starts), rows["index"][duplicates])


def _write_file(path: Path, offsets: npt.NDArray[Any], rows: npt.NDArray[Any]) -> None:
    """Write a file atomically: int64 offsets, then rows."""
    with replace_atomically(path) as temporary, open(temporary, "wb") as file:
        file.write(offsets.astype("<i8").tobytes())
        file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())


def _is_complete(path: Path, offset_count: int, row_type: np.dtype[Any]) -> bool:
    """Return True if a file exists and has the size that follows from its last offset, the number of rows.

    After a crash of the file system, a file may be truncated or full of zeros.
    """
    size = path.stat().st_size if path.exists() else 0
    header_bytes = 8 * offset_count
    if size < header_bytes:
        return False
    return size == header_bytes + row_type.itemsize * int(_read_offsets(path, 1, offset_count - 1)[0])


def _read_offsets(path: Path, count: int, first: int) -> npt.NDArray[np.int64]:
    """Return `count` offsets of a file, starting with the offset of index `first`."""
    return np.fromfile(path, "<i8", count, offset=8 * first)


def _read_rows(path: Path, row_type: np.dtype[Any], offset_count: int, start: int, stop: int) -> npt.NDArray[Any]:
    """Return rows [start, stop) of a file that begins with `offset_count` offsets."""
    return np.fromfile(path, row_type, int(stop - start), offset=8 * offset_count + int(start) * row_type.itemsize)
