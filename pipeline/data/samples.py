"""Samples of a model of the user's own, in memory: mapped arrays for the loader, and their held-out part.

A sample's number counts through the files; training and evaluation see two parts of one fixed permutation of these
numbers (data_prep/arrays.py says why), so neither keeps a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipeline.base.errors import InputError
from pipeline.config.user_model import LENGTHS
from pipeline.data.manifest import SPLIT_SEED, SampleManifest
from pipeline.data.order import Int64Array, perm

Arrays = dict[str, Any]
"""numpy arrays by name, of shape (B, …)."""


class SampleDataset(Dataset[Arrays]):
    """The training samples of `manifest`, or with `held_out` the others, as dicts of arrays."""

    def __init__(self, manifest: SampleManifest, *, held_out: bool = False) -> None:
        """Map every file. Raises InputError for one that is missing or too short."""
        self._all = manifest.samples
        self._first = manifest.samples - manifest.held_out_samples if held_out else 0
        self._size = manifest.held_out_samples if held_out else manifest.samples - manifest.held_out_samples
        self._starts = np.cumsum([0] + [entry.samples for entry in manifest.train])  # first sample of each file
        self._maps: list[Arrays] = []
        for entry in manifest.train:
            try:
                self._maps.append(
                    {
                        name: np.memmap(entry.file, array.dtype, "r", array.offset, array.shape).view(np.ndarray)
                        for name, array in entry.arrays.items()
                    }
                )
            except (OSError, ValueError) as error:
                raise InputError(f"cannot map {entry.file}: {error}; put the file back as it was") from error

        self.lengths: Callable[[Int64Array], Int64Array] | None = self._lengths if LENGTHS in self._maps[0] else None
        """How long samples are, by their indices; None where none of them has a length of its own."""

    def __len__(self) -> int:
        """Number of samples."""
        return self._size

    def __getitem__(self, index: int) -> Arrays:
        """Sample `index`, for code that expects a map-style dataset."""
        return {name: array[0] for name, array in self.read(np.array([index])).items()}

    def buffer(self, rows: int, pin: bool) -> dict[str, Tensor]:
        """Host memory for so many samples, page-locked with `pin`."""
        return {
            name: torch.empty((rows, *array.shape[1:]), dtype=getattr(torch, array.dtype.name), pin_memory=pin)
            for name, array in self._maps[0].items()
        }

    def read(self, indices: Int64Array, out: Arrays | None = None) -> Arrays:
        """The samples `indices` (int64, shape (B,)), written into `out` where it is given."""
        out = {name: array.numpy() for name, array in self.buffer(len(indices), False).items()} if out is None else out
        for i, (file, row) in enumerate(self._places(indices)):
            for name, array in self._maps[file].items():
                out[name][i] = array[row]
        return out

    def _lengths(self, indices: Int64Array) -> Int64Array:
        """How long these samples are: int64 of the same shape."""
        return np.array([self._maps[file][LENGTHS][row] for file, row in self._places(indices)], dtype=np.int64)

    def _places(self, indices: Int64Array) -> list[tuple[int, int]]:
        """File and row of each sample. Raises IndexError for an index outside [0, len(self))."""
        if len(indices) and (indices.min() < 0 or indices.max() >= self._size):
            raise IndexError(f"samples {indices.min()} to {indices.max()} asked for; there are {self._size}")
        numbers = perm(SPLIT_SEED, -1, indices + self._first, self._all)  # a run's own orders are epochs from 0 on
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        return list(zip(files.tolist(), (numbers - self._starts[files]).tolist(), strict=True))
