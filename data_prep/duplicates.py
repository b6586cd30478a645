"""`data.deduplicate`: which documents stand in the inputs before, found without anybody holding all of them.

    shards/unit-00003-KEY.hashes     of each document of a unit the first 16 bytes of its text's SHA-256, and its place;
                                     sorted by hash, with 257 offsets in front: where each first byte begins
    shards/unit-KEY-002-of-007.twice  of one range of hashes, over all units, those documents whose hash stood before;
                                     by unit, with an offset for each unit in front

Tasks need not wait for one another: each hashes its own units, then what others have not yet, then finds the doubles of
ranges that are missing. What two do at once comes out the same. So inputs are tokenised once, and read twice, or more
often: who is done early also hashes what another has begun. There are as many ranges as tasks, and so many that one
holds some four million hashes (214 MB of memory), but 256 at most: more memory beyond 10⁹ documents. Hashing takes 65
bytes a document of a unit.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from pipeline.base.files import replace_atomically, sha256_json

_ROW = np.dtype([("hash", "S16"), ("place", "<i8")])
_PLACE = np.dtype("<i8")
_MOST = 1 << 22  # hashes of a range


class Duplicates:
    """Those of a data folder's units."""

    def __init__(
        self, folder: Path, keys: Sequence[str], texts: Callable[[int], Iterable[bytes]], task: int, tasks: int
    ) -> None:
        """keys: of each unit, what it is made from. texts: the documents of a unit, in order."""
        self._folder, self._texts, self._task, self._tasks = folder, texts, task, tasks
        self._hashes = [folder / f"unit-{unit:05d}-{key[:16]}.hashes" for unit, key in enumerate(keys)]
        self._key = sha256_json(list(keys))[:16]

    def kept(self, unit: int) -> np.ndarray:
        """Of each document of a unit, whether it is the first of its text: bool, shape (documents,)."""
        kept = np.ones(self._totals[unit], bool)
        for path in self._ranges:
            start, stop = _offsets(path, 2, unit)
            kept[_rows(path, _PLACE, len(self._hashes) + 1, start, stop)] = False
        return kept

    @cached_property
    def _totals(self) -> list[int]:
        """Documents of each unit; all are hashed then."""
        for unit in self._order(range(self._task, len(self._hashes), self._tasks), len(self._hashes)):
            if not _is_whole(self._hashes[unit], 257, _ROW):
                self._hash(unit)
        return [int(_offsets(path, 1, 256)[0]) for path in self._hashes]

    @cached_property
    def _ranges(self) -> list[Path]:
        """The doubles of each range; all are found then."""
        count = min(256, max(self._tasks, -(-sum(self._totals) // _MOST)))
        paths = [self._folder / f"unit-{self._key}-{number:03d}-of-{count:03d}.twice" for number in range(count)]
        own = range(count * self._task // self._tasks, count * (self._task + 1) // self._tasks)
        for number in self._order(own, count):
            if not _is_whole(paths[number], len(self._hashes) + 1, _PLACE):
                self._find(paths[number], 256 * number // count, 256 * (number + 1) // count)
        return paths

    def _order(self, own: range, count: int) -> list[int]:
        """A task's own, then those of others, each task in another order: so few do the same."""
        others = sorted({*range(count)} - {*own})
        random.Random(self._task).shuffle(others)
        return [*own, *others]

    def _hash(self, unit: int) -> None:
        found = bytearray()
        for text in self._texts(unit):
            found += hashlib.sha256(text).digest()[:16]
        hashes = np.frombuffer(found, "S16")
        order = np.argsort(hashes, kind="stable")
        rows = np.empty(len(hashes), _ROW)
        rows["hash"], rows["place"] = hashes[order], order
        _write(self._hashes[unit], np.searchsorted(rows.view(np.uint8)[::24], np.arange(257)), rows)

    def _find(self, path: Path, low: int, high: int) -> None:
        parts = []
        for hashes in self._hashes:
            offsets = _offsets(hashes, 257, 0)
            parts.append(_rows(hashes, _ROW, 257, offsets[low], offsets[high]))
        borders, rows = np.cumsum([0, *map(len, parts)]), np.concatenate(parts)
        parts.clear()
        order = np.argsort(rows["hash"], kind="stable")  # of one hash, in the order of units
        ordered = rows["hash"][order]
        twice = np.zeros(len(rows), bool)
        twice[order[1:][ordered[1:] == ordered[:-1]]] = True
        places = np.flatnonzero(twice)
        _write(path, np.searchsorted(places, borders), rows["place"][places])


def _write(path: Path, offsets: np.ndarray, rows: np.ndarray) -> None:
    with replace_atomically(path) as temporary, open(temporary, "wb") as file:
        file.write(offsets.astype("<i8").tobytes())
        file.write(rows.data)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(path: Path, header: int, kind: np.dtype) -> bool:
    """Whether a file is there and as long as its last offset says: it may have been cut, or be holes, after a crash."""
    size = path.stat().st_size if path.exists() else 0
    return size >= 8 * header and size == 8 * header + kind.itemsize * int(_offsets(path, 1, header - 1)[0])


def _offsets(path: Path, count: int, first: int) -> np.ndarray:
    return np.fromfile(path, "<i8", count, offset=8 * first)


def _rows(path: Path, kind: np.dtype, header: int, start: int, stop: int) -> np.ndarray:
    return np.fromfile(path, kind, int(stop - start), offset=8 * header + int(start) * kind.itemsize)
