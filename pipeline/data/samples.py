"""Samples on disk, mapped into memory: of text, cut from shards of tokens, or a user's own arrays, as they lie.

A sample is a dict of arrays. Samples are numbered through the files in order.

**A sample of text** is `tokens`: T + 1 consecutive tokens of one shard, T = `sequence_length`: inputs are its first T
tokens, targets its last T. Sample j of a shard covers tokens [j*T, j*T + T], so neighbours share one token and every
token but a shard's first is a target once. A shard of n tokens has (n - 1) // T samples. Samples never cross
shards: the (n - 1) % T tokens left at a shard's end are dropped.

**A sample of a user's own arrays** is one row of each. Training and evaluation see two parts of one fixed permutation
of the rows (data_prep/samples_folder.py says why), so neither keeps a list.

**Why it is built so** (figures in `benchmarks/results/loader.md`): a contiguous HDF5 dataset is a plain array at a
known offset, so it is mapped without HDF5 and opened once per process; a whole batch is looked up at once and copied
row by row straight into its buffer.

**What must hold:** a file must not be truncated while it is mapped (the operating system kills the reader with
SIGBUS): shards are written under another name, renamed, and never changed afterwards. Python keeps one file descriptor
open per mapped file, so `ulimit -n` must exceed their number (a rank raises its own as far as it may).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from pipeline.base.errors import InputError, UserError, raise_if_too_many_open_files
from pipeline.config.user_model import LENGTHS_ARRAY
from pipeline.data.manifest import SPLIT_SEED, SampleFile, SampleManifest, ShardEntry, check_has_sample
from pipeline.data.sample_order import IndexedDataset, Int64Array, permute

Arrays = dict[str, Any]
"""numpy arrays by name, of shape (B, …)."""
Transform = Callable[[Arrays, Generator | None], Arrays]
"""A sample's arrays of its arrays in the file (pipeline/config/user_model.py)."""
_TORCH_TYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}


def map_whole_file(path: Path) -> mmap.mmap:
    """All bytes of a file."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_arrays(
    entry: ShardEntry | SampleFile, path: Path, whole: Callable[[Path], mmap.mmap] = map_whole_file
) -> dict[str, np.ndarray]:
    """The arrays as they lie in the file `path`. Raises InputError, naming it, where it is missing or too short.

    `whole` may know files that are mapped already: of a large one there are many entries.
    """
    try:
        file = whole(path)
        return {
            name: np.frombuffer(file, array.dtype, math.prod(array.shape), array.offset).reshape(array.shape)
            for name, array in entry.arrays.items()
        }
    except (OSError, ValueError) as error:
        raise_if_too_many_open_files(error)
        raise InputError("data.damaged_file", f"cannot map {path}: {error}; {entry.remedy}") from error


_LOCKED = 500
"""Numbers that numpy copies without letting Python's other threads run, however long a page takes to come
(NPY_BEGIN_THREADS_THRESHOLDED in numpy/core/include/numpy/ndarraytypes.h); `take` lets them."""


def _row(array: np.ndarray, row: int) -> np.ndarray:
    """A row; a short one is copied already, so that other threads run while its page comes."""
    values: np.ndarray = array[row] if array[:1].size > _LOCKED else array[row : row + 1].take(0, axis=0)
    return values


class MappedDataset(IndexedDataset):
    """Samples of several files of the same arrays; every file is opened once, here, and stays mapped.

    Raises InputError as `map_file` does.
    """

    def __init__(self, entries: Sequence[ShardEntry | SampleFile], data_dir: Path = Path()) -> None:
        self.entries = entries
        whole = cache(map_whole_file)
        files = [self._map(entry, data_dir / entry.file, whole) for entry in entries]
        # files may differ in the width of their tokens: a batch has the widest
        self._kinds = {name: np.result_type(*{arrays[name].dtype for arrays in files}) for name in files[0]}
        self._first = files[0]
        self._arrays = {name: [arrays[name] for arrays in files] for name in files[0]}
        self._starts = np.cumsum([0] + [len(next(iter(arrays.values()))) for arrays in files])  # first sample of each

    def _map(self, entry: ShardEntry | SampleFile, *place: Any) -> Arrays:
        """The file's arrays, samples along the first dimension; `place` as map_file has it."""
        return map_arrays(entry, *place)

    def remap_file(self, number: int, path: Path) -> None:
        """Read the file of entry `number` at `path` from now on; another thread may be reading."""
        for name, array in self._map(self.entries[number], path).items():
            self._arrays[name][number] = array

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._starts[-1])

    def allocate_batch(self, rows: int, pin: bool = False) -> dict[str, Tensor]:
        """Host memory for so many samples in the files' types, page-locked with `pin`."""
        return {
            name: torch.empty((rows, *array.shape[1:]), dtype=getattr(torch, self._kinds[name].name), pin_memory=pin)
            for name, array in self._first.items()
        }

    def read(self, indices: Int64Array, out: Arrays | None = None) -> Arrays:
        """The samples `indices` (int64, shape (B,)) in the files' types, written into `out` where it is given.

        Raises IndexError for an index outside [0, len(self)).
        """
        if out is None:
            out = {
                name: np.empty((len(indices), *one.shape[1:]), self._kinds[name]) for name, one in self._first.items()
            }
        places = self._places(indices)
        # The lookup is vectorised, the copy is not: a shuffled batch has few rows of any one file, and then one
        # plain copy per row costs half to a third of one index operation per file.
        for name, rows in out.items():
            arrays = self._arrays[name]
            if rows[:1].size > _LOCKED:
                for i, (file, row) in enumerate(places):
                    rows[i] = arrays[file][row]
            else:
                for i, (file, row) in enumerate(places):
                    rows[i] = arrays[file][row : row + 1].take(0, axis=0)  # of a cut array `take` copies all of it
        return out

    def _places(self, indices: Int64Array) -> list[tuple[int, int]]:
        """File and row of each sample."""
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()} to {indices.max()} asked for; there are {len(self)}")
        numbers = self._numbers(indices)
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        return list(zip(files.tolist(), (numbers - self._starts[files]).tolist(), strict=True))

    def _numbers(self, indices: Int64Array) -> Int64Array:
        """Where samples stand in the files, counted through them."""
        return indices


class TokenDataset(MappedDataset):
    """Samples of `sequence_length` + 1 tokens over a list of shards: arrays `tokens` and, where the shards have one,
    `mask` of shape (B, T + 1).

    Raises InputError for a shard that is missing or too short and for token types that are unknown; UserError
    if there is not a single sample.
    """

    def __init__(self, shards: Sequence[ShardEntry], sequence_length: int, data_dir: Path = Path()) -> None:
        check_has_sample(shards, sequence_length)
        usable = [shard for shard in shards if shard.tokens > sequence_length]
        kinds = {shard.dtype: shard.file for shard in usable}
        if not kinds.keys() <= {"uint16", "uint32"}:
            found = ", ".join(f"{dtype} ({file})" for dtype, file in kinds.items())
            raise InputError("data.wrong_type", f"shards hold uint16 or uint32 tokens; found {found}: shard again")
        self._length = sequence_length
        super().__init__(usable, data_dir)

    def _map(self, entry: ShardEntry | SampleFile, *place: Any) -> Arrays:
        # a view of shape (samples, T + 1) on each shard's bytes; rows overlap by one token
        cut = partial(np.lib.stride_tricks.sliding_window_view, window_shape=self._length + 1)
        return {name: cut(array)[:: self._length] for name, array in map_arrays(entry, *place).items()}


class SampleDataset(MappedDataset):
    """The training samples of `manifest`, or with `held_out` the others; as the user's `transform` makes them of those.

    What a transform draws is a function of `seed` and of the sample's position in the run's order alone. Raises
    UserError where it does not give all samples the same arrays.
    """

    def __init__(
        self,
        manifest: SampleManifest,
        data_dir: Path = Path(),
        *,
        held_out: bool = False,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(manifest.train, data_dir)
        self._transform, self._seed, self.needs_positions = transform, seed, transform is not None and not held_out
        if transform is not None:
            first = self._transformed(transform, 0, 0, None, index=0)
            self._first = {name: np.asarray(array)[None] for name, array in first.items()}
            self._kinds = {name: array.dtype for name, array in self._first.items()}
            self._refuse_other(first, 0, manifest.train[0].arrays)
        self._all, trained = manifest.samples, manifest.samples - manifest.held_out_samples
        self._range = range(trained, self._all) if held_out else range(trained)
        if LENGTHS_ARRAY in self._arrays:
            self.lengths = self._lengths

    def __len__(self) -> int:
        return len(self._range)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of a sample's arrays."""
        return {name: (array.shape[1:], self._kinds[name].name) for name, array in self._first.items()}

    def read(self, indices: Int64Array, out: Arrays | None = None) -> Arrays:
        """As MappedDataset's, or transformed. Raises UserError where the transform gives other arrays than before."""
        if self._transform is None:
            return super().read(indices, out)
        indices, numbers = indices if self.needs_positions else (indices, None)
        out = out or {name: array.numpy() for name, array in self.allocate_batch(len(indices)).items()}
        for i, (file, row) in enumerate(self._places(indices)):
            number, index = None if numbers is None else int(numbers[i]), int(indices[i])
            found = self._transformed(self._transform, file, row, number, index=index)
            self._refuse_other(found, index, self._first)
            for name, array in found.items():
                out[name][i] = array
        return out

    def _transformed(self, transform: Transform, file: int, row: int, number: int | None, *, index: int) -> Arrays:
        """What the transform makes of one sample, at position `number` of the run's order; None: it draws nothing."""
        random = None
        if number is not None:
            # one key for each sample (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)
            random = Generator(Philox(key=np.array([self._seed % 2**64, number], np.uint64)))
        found = transform({name: _row(arrays[file], row) for name, arrays in self._arrays.items()}, random)
        if not isinstance(found, dict):
            raise UserError(
                "data.invalid_transform", f"transform of sample {index} gives {type(found).__name__}, no dict of arrays"
            )
        return found

    def _refuse_other(self, found: Arrays, index: int, names: Iterable[str]) -> None:
        """Raise UserError where a transformed sample has other arrays than the first one."""
        told = {name: (np.shape(array), np.asarray(array).dtype.name) for name, array in found.items()}
        if told.keys() != set(names) or told != self.shapes or not {kind for _, kind in told.values()} <= _TORCH_TYPES:
            raise UserError(
                "data.invalid_transform",
                f"transform of sample {index} gives {told}, of the first one {self.shapes}: it should give "
                f"{', '.join(names)}, for all samples in the same shapes and types ({', '.join(sorted(_TORCH_TYPES))})",
            )

    def _lengths(self, indices: Int64Array) -> Int64Array:
        lengths = self._arrays[LENGTHS_ARRAY]
        return np.array([_row(lengths[file], row) for file, row in self._places(indices)], dtype=np.int64)

    def _numbers(self, indices: Int64Array) -> Int64Array:
        # a run's own orders are epochs from 0 on
        return permute(SPLIT_SEED, -1, indices + self._range.start, self._all)
