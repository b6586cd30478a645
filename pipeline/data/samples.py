"""Datasets of samples in memory-mapped files.

    TokenDataset    samples of text, from shards of tokens
    SampleDataset   samples of the user's arrays, optionally transformed

A contiguous HDF5 dataset is a plain array at a known offset in its file. The dataset is therefore mapped without HDF5,
and each process opens the file only once. The file and row of all samples of a batch are computed at once. Then the
samples are copied one by one into the buffer of the batch (measured in `benchmarks/results/loader.md`).

A file must not be truncated while it is mapped, because the operating system then kills the reader with SIGBUS. Shards
are therefore renamed into place and never changed. Each mapped file needs a file descriptor (`ulimit -n`).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator, Philox
from torch import Tensor

from pipeline.base.errors import InputError, UserError, raise_if_too_many_open_files
from pipeline.config.user_model import LENGTHS_ARRAY
from pipeline.data.manifest import (
    MASK_DOCUMENT_START,
    SPLIT_SEED,
    SampleFile,
    SampleManifest,
    ShardEntry,
    check_has_sample,
)
from pipeline.data.sample_order import IndexedDataset, Int64Array, permute

Arrays = dict[str, Any]
"""numpy arrays by name: of one sample, or of several samples along the first dimension."""
Transform = Callable[[Arrays, Generator | None], Arrays]
"""Function that computes a sample from its arrays in the file (pipeline/config/user_model.py).

The second argument is a random generator, or None if the sample must not be random.
"""
TORCH_TYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}


def map_whole_file(path: Path) -> mmap.mmap:
    """Return a read-only memory map of a whole file."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_arrays(
    entry: ShardEntry | SampleFile, path: Path, map_file: Callable[[Path], mmap.mmap] = map_whole_file
) -> dict[str, np.ndarray]:
    """Return the arrays that a manifest entry describes, by name, as views of the memory-mapped file `path`.

    Args:
        entry: the entry of the manifest, with offset, type and shape of each array.
        path: the file that the entry names, or a copy of this file.
        map_file: function that maps a file; it may return the same map for several entries of a large file.

    Raises InputError with the path if the file is missing or too short, and StorageError if too many files are open.
    """
    try:
        mapped_file = map_file(path)
        return {
            name: np.frombuffer(mapped_file, array.dtype, math.prod(array.shape), array.offset).reshape(array.shape)
            for name, array in entry.arrays.items()
        }
    except (OSError, ValueError) as error:
        raise_if_too_many_open_files(error)
        raise InputError("data.damaged_file", f"cannot map {path}: {error}; {entry.remedy}") from error


_MAX_COPIED_WITH_GIL = 500
"""numpy holds the GIL while it copies up to this many elements, even if a page must first be read from storage.

See NPY_BEGIN_THREADS_THRESHOLDED in numpy/core/include/numpy/ndarraytypes.h. `take` always releases the GIL.
"""


def _select_row(array: np.ndarray, row: int) -> np.ndarray:
    """Return a row of `array`: a view if the row is long, otherwise a copy that is made without holding the GIL."""
    selected: np.ndarray = array[row] if array[:1].size > _MAX_COPIED_WITH_GIL else array[row : row + 1].take(0, axis=0)
    return selected


def make_transform_generator(seed: int, position: int) -> Generator:
    """Return the generator that `transform` receives for the sample at a position in the order of the run.

    Each sample has its own key, and so its own sequence of random numbers (Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011).
    """
    return Generator(Philox(key=np.array([seed % 2**64, position], np.uint64)))


class MappedDataset(IndexedDataset):
    """Samples of several files with the same arrays. Each file is opened once and stays mapped.

    A sample is a dict of arrays. The samples of all files are numbered consecutively, in the order of `entries`.

    Args:
        entries: manifest entries, each of a file or of a part of a file.
        data_dir: folder to which relative paths in the entries refer.

    Raises InputError as `map_arrays` does.
    """

    def __init__(self, entries: Sequence[ShardEntry | SampleFile], data_dir: Path = Path()) -> None:
        self.entries = entries
        map_file = cache(map_whole_file)
        files = [self._map_samples(entry, data_dir / entry.file, map_file) for entry in entries]
        # Files may differ in the type of their tokens. A batch has the widest of these types.
        self._dtypes = {name: np.result_type(*{arrays[name].dtype for arrays in files}) for name in files[0]}
        self._examples = files[0]  # An array without its first dimension has the shape of a sample.
        self._arrays = {name: [arrays[name] for arrays in files] for name in files[0]}
        self._first_samples = np.cumsum([0] + [len(next(iter(arrays.values()))) for arrays in files])

    def _map_samples(self, entry: ShardEntry | SampleFile, *location: Any) -> Arrays:
        """Map the arrays of an entry, with samples along the first dimension.

        `location` has the further arguments of `map_arrays`: the path and, optionally, the function that maps a file.
        """
        return map_arrays(entry, *location)

    def remap_file(self, entry_index: int, path: Path) -> None:
        """Map the file `path` for the entry with this index, so that its samples are read from this file from now on.

        Other threads may read samples during this call.
        """
        for name, array in self._map_samples(self.entries[entry_index], path).items():
            self._arrays[name][entry_index] = array

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._first_samples[-1])

    def allocate_batch(self, rows: int, pin: bool = False) -> dict[str, Tensor]:
        """Return uninitialized host tensors for `rows` samples, in the types of the files; page-locked if `pin`."""
        return {
            name: torch.empty((rows, *array.shape[1:]), dtype=getattr(torch, self._dtypes[name].name), pin_memory=pin)
            for name, array in self._examples.items()
        }

    def read(self, indices: Int64Array, out: Arrays | None = None) -> Arrays:
        """Return samples in the types of the files, with samples along the first dimension.

        Args:
            indices: numbers of the samples, int64, shape (B,).
            out: arrays to which the samples are written; None: new arrays.

        Raises IndexError if an index is outside [0, len(self)).
        """
        if out is None:
            out = {
                name: np.empty((len(indices), *example.shape[1:]), self._dtypes[name])
                for name, example in self._examples.items()
            }
        locations = self._locate(indices)
        # Rows are copied one by one, because a shuffled batch has few rows of each file. This takes a third to a
        # half of the time that one numpy index operation per file would take.
        for name, rows in out.items():
            arrays = self._arrays[name]
            if rows[:1].size > _MAX_COPIED_WITH_GIL:
                for i, (file, row) in enumerate(locations):
                    rows[i] = arrays[file][row]
            else:
                for i, (file, row) in enumerate(locations):
                    # `take` copies the whole array if it is not contiguous, so it is called on a slice of one row.
                    rows[i] = arrays[file][row : row + 1].take(0, axis=0)
        return out

    def _locate(self, indices: Int64Array) -> list[tuple[int, int]]:
        """Return the location of each sample: the index of its entry, and the row in the arrays of this entry.

        Raises IndexError if an index is outside [0, len(self)).
        """
        if len(indices) and (indices.min() < 0 or indices.max() >= len(self)):
            raise IndexError(f"samples {indices.min()} to {indices.max()} are out of range: there are {len(self)}")
        numbers = self._row_numbers(indices)
        files = np.searchsorted(self._first_samples, numbers, side="right") - 1
        return list(zip(files.tolist(), (numbers - self._first_samples[files]).tolist(), strict=True))

    def _row_numbers(self, indices: Int64Array) -> Int64Array:
        """Return the row number of each sample, counted over all files: int64, the shape of `indices`."""
        return indices


@dataclass(frozen=True)
class DocumentEnds:
    """How the documents of a sample are found: by the mask, if there is one, otherwise by the end-of-text token."""

    eos_id: int
    eos_starts_next: bool
    """Whether this token is also the first token of the next document."""
    windows: tuple[tuple[int, int], ...] = ()
    """For each window of the model, its length in tokens and the number of blocks that have it; (): no windows."""

    def measure_work(self, arrays: Arrays) -> Int64Array:
        """Return a number for each sample that is proportional to its time in attention: int64, shape (B,).

        Without windows, the number is the sum of the squared lengths of the documents. With windows, a document that is
        longer than a window counts less, because fewer pairs of its tokens are computed.

        Args:
            arrays: `tokens` and, optionally, `mask`, both of shape (B, T + 1).
        """
        if "mask" in arrays:
            is_start_BT = arrays["mask"][:, :-1] & MASK_DOCUMENT_START != 0
        elif self.eos_starts_next:
            is_start_BT = arrays["tokens"][:, :-1] == self.eos_id
        else:
            is_start_BT = np.roll(arrays["tokens"][:, :-1], 1, axis=1) == self.eos_id
        is_start_BT[:, 0] = True  # A sample begins with a document, or with the rest of one.
        starts = np.flatnonzero(is_start_BT)
        lengths = np.diff(starts, append=is_start_BT.size).astype(np.int64)
        work = np.zeros_like(lengths) if self.windows else lengths**2
        for window, blocks in self.windows:
            # The first w tokens of a document of n tokens read 1 to w tokens, the others w: half of w (2 n - w) pairs.
            read_lengths = np.minimum(lengths, window)
            work += blocks * read_lengths * (2 * lengths - read_lengths)
        return np.add.reduceat(work, np.searchsorted(starts, np.arange(len(is_start_BT)) * is_start_BT.shape[1]))


class TokenDataset(MappedDataset):
    """Samples of text: `tokens` and, if the shards have a mask, `mask`. Both arrays have the shape (B, T + 1).

    T is `sequence_length`. The first T tokens of a sample are inputs, the last T are targets. Sample j of a shard has
    the tokens from j*T to j*T + T, inclusive. Neighbouring samples share one token, so each token of a sample except
    the first token of a shard is a target exactly once. A shard of n tokens has (n - 1) // T samples. Samples never
    cross shards. Therefore the last (n - 1) % T tokens of a shard are dropped.

    Args:
        shards: manifest entries.
        sequence_length: T.
        data_dir: folder to which relative paths in the entries refer.
        balanced_by: how documents are found, to balance the work of attention between ranks; None: samples are not
            balanced. To balance a global batch, each rank reads the tokens of all its samples.

    Raises InputError if a shard is missing, too short or of an unknown type, and UserError if there is no sample.
    """

    def __init__(
        self,
        shards: Sequence[ShardEntry],
        sequence_length: int,
        data_dir: Path = Path(),
        balanced_by: DocumentEnds | None = None,
    ) -> None:
        check_has_sample(shards, sequence_length)
        usable_shards = [shard for shard in shards if shard.tokens > sequence_length]
        dtypes = {shard.dtype: shard.file for shard in usable_shards}
        if not dtypes.keys() <= {"uint16", "uint32"}:
            files = ", ".join(f"{dtype} ({file})" for dtype, file in dtypes.items())
            raise InputError(
                "data.wrong_type", f"tokens of shards are uint16 or uint32, but these shards have {files}: shard again"
            )
        self._length = sequence_length
        super().__init__(usable_shards, data_dir)
        if balanced_by is not None:
            # Documents are found by the mask or by the tokens; the other array is not read.
            names = ["mask"] if "mask" in self._arrays else ["tokens"]

            def compute_costs(indices: Int64Array) -> Int64Array:
                """Return the work of attention for these samples, relative to each other."""
                out = {
                    name: np.empty((len(indices), *self._examples[name].shape[1:]), self._dtypes[name])
                    for name in names
                }
                return balanced_by.measure_work(self.read(indices, out))

            self.lengths = compute_costs

    def _map_samples(self, entry: ShardEntry | SampleFile, *location: Any) -> Arrays:
        # Each result is a view of the shard's bytes, of shape (samples, T + 1). Neighbouring rows share one token.
        windows = partial(np.lib.stride_tricks.sliding_window_view, window_shape=self._length + 1)
        return {name: windows(array)[:: self._length] for name, array in map_arrays(entry, *location).items()}


class SampleDataset(MappedDataset):
    """Samples of the user's arrays: one row of each array, optionally transformed.

    Training and held-out samples are two ranges of one fixed permutation of the rows, so that no list of the held-out
    samples is needed (see data_prep/samples_folder.py).

    Args:
        manifest: describes the files.
        data_dir: folder to which relative paths in the manifest refer.
        held_out: whether to read the held-out samples instead of the training samples.
        transform: the user's function that computes a sample from its arrays; None: samples are the arrays.
        seed: seed of the transform's random numbers, which also depend on the sample's position in the order of the
            run.

    Raises UserError if the transform does not return a dict of the expected arrays for the first sample.
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
        self._transform = transform
        self._seed = seed
        self.needs_positions = transform is not None and not held_out
        if transform is not None:
            first_sample = self._apply_transform(transform, file=0, row=0, position=None, index=0)
            self._examples = {name: np.asarray(array)[None] for name, array in first_sample.items()}
            self._dtypes = {name: array.dtype for name, array in self._examples.items()}
            self._check_arrays(first_sample, 0, manifest.train[0].arrays)
        self._total_samples = manifest.samples
        training_samples = manifest.samples - manifest.held_out_samples
        self._range = range(training_samples, self._total_samples) if held_out else range(training_samples)
        if LENGTHS_ARRAY in self._arrays:
            self.lengths = self._read_lengths

    def __len__(self) -> int:
        """Return the number of training samples, or of held-out samples."""
        return len(self._range)

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of each array of a sample."""
        return {name: (array.shape[1:], self._dtypes[name].name) for name, array in self._examples.items()}

    def read(self, indices: Int64Array, out: Arrays | None = None) -> Arrays:
        """Return samples as :meth:`MappedDataset.read` does, transformed if there is a transform.

        Args:
            indices: numbers of the samples, int64, shape (B,). If `needs_positions`, the shape is (2, B): numbers of
                the samples, then their positions in the order of the run.
            out: arrays to which the samples are written; None: new arrays.

        Raises UserError if the names, shapes or types of the transformed arrays differ from those of the first sample.
        """
        if self._transform is None:
            return super().read(indices, out)
        indices, positions = indices if self.needs_positions else (indices, None)
        out = out or {name: array.numpy() for name, array in self.allocate_batch(len(indices)).items()}
        for i, (file, row) in enumerate(self._locate(indices)):
            position = None if positions is None else int(positions[i])
            index = int(indices[i])
            sample = self._apply_transform(self._transform, file, row, position, index=index)
            self._check_arrays(sample, index, self._examples)
            for name, array in sample.items():
                out[name][i] = array
        return out

    def _apply_transform(
        self, transform: Transform, file: int, row: int, position: int | None, *, index: int
    ) -> Arrays:
        """Return a transformed sample.

        Args:
            transform: the user's function.
            file: index of the entry that contains the sample.
            row: row of the sample in the arrays of this entry.
            position: position of the sample in the order of the run; None: the transform gets no random generator.
            index: number of the sample, for error messages.
        """
        generator = None if position is None else make_transform_generator(self._seed, position)
        sample = transform({name: _select_row(arrays[file], row) for name, arrays in self._arrays.items()}, generator)
        if not isinstance(sample, dict):
            raise UserError(
                "data.invalid_transform",
                f"transform returned {type(sample).__name__} for sample {index}, not a dict of arrays",
            )
        return sample

    def _check_arrays(self, sample: Arrays, index: int, names: Iterable[str]) -> None:
        """Raise UserError if a transformed sample does not have the arrays `names`, or differs from the first sample.

        Samples may differ in the values of their arrays only. The arrays must have types that torch supports.
        """
        shapes = {name: (np.shape(array), np.asarray(array).dtype.name) for name, array in sample.items()}
        dtypes = {dtype for _, dtype in shapes.values()}
        if shapes.keys() != set(names) or shapes != self.shapes or not dtypes <= TORCH_TYPES:
            raise UserError(
                "data.invalid_transform",
                f"transform returned {shapes} for sample {index} and {self.shapes} for the first one: it must return "
                f"{', '.join(names)}, with the same shapes and types for all samples "
                f"({', '.join(sorted(TORCH_TYPES))})",
            )

    def _read_lengths(self, indices: Int64Array) -> Int64Array:
        """Return the lengths of samples, which the user's files contain: int64, the shape of `indices`."""
        lengths = self._arrays[LENGTHS_ARRAY]
        return np.array([_select_row(lengths[file], row) for file, row in self._locate(indices)], dtype=np.int64)

    def _row_numbers(self, indices: Int64Array) -> Int64Array:
        # The order of training uses the epochs from 0 on, so epoch -1 gives a different permutation.
        return permute(SPLIT_SEED, -1, indices + self._range.start, self._total_samples)
