"""Read samples from the `dataset` function of a user's module, one at a time.

Before each training sample, the global generators of random, numpy and torch get a seed that depends only on the seed
of the run and on the position of the sample in the order of the run. The augmentation of a sample is therefore the same
after a restart, on other layouts, and for any number of workers. Before a held-out sample, the seed depends only on
the number of the sample.

The prepare stage reads a few samples in its own process. Training and evaluation read samples in worker processes
(pipeline/data/dataset_worker.py), because these seeds must not change the random numbers of the model.
"""

from __future__ import annotations

import hashlib
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from pipeline.base.errors import UserError, find_storage_error, make_printable
from pipeline.config.user_model import UserModel
from pipeline.data.manifest import DatasetEntry, SampleArray
from pipeline.data.samples import TORCH_TYPES, Arrays, make_transform_generator

TRAIN_SPLIT = "train"
HELD_OUT_SPLIT = "held_out"
_PACKAGES_OF_SLUICE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class DatasetRequest:
    """What a process needs in order to open a dataset and to read its samples."""

    model: UserModel
    """The user's module."""
    code_dir: Path
    """The folder that contains the module."""
    options: Mapping[str, Any]
    """The first argument of `dataset`."""
    split: str
    """The second argument of `dataset`: `TRAIN_SPLIT` or `HELD_OUT_SPLIT`."""
    seed: int = 0
    """The seed of the run."""
    entry: DatasetEntry | None = None
    """What the prepare stage found; None in the prepare stage."""
    checks_samples: bool = False
    """Whether to compare the first and the last sample with those that the prepare stage found."""
    stream: tuple[int, int] = (0, 1)
    """For an iterable dataset: the data-parallel rank and size."""
    workers: int = 1
    """Number of worker processes of each rank."""
    states: Sequence[bytes] = field(default=())
    """For an iterable dataset: the saved state of each worker of this rank; (): start at the beginning."""


def make_dataset_options(options: Mapping[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """Return the options of `dataset`: those of `build` and, with `data.source`, its paths as `source`."""
    return {**options, "source": list(sources)} if sources else dict(options)


def seed_generators(text: str) -> None:
    """Seed the global generators of random, numpy and torch with the hash of a text."""
    digest = hashlib.sha256(text.encode()).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(np.frombuffer(digest[8:24], "<u4"))
    # torch.manual_seed would also seed the generators of GPUs, which datasets do not use.
    torch.default_generator.manual_seed(int.from_bytes(digest[24:32], "little") >> 1)


class SampleReader:
    """Opens the dataset of a split, and reads its samples.

    Args:
        request: the dataset.

    Raises UserError if the module has no usable dataset, or StorageError if a file cannot be read.
    """

    def __init__(self, request: DatasetRequest) -> None:
        self.request = request
        self.module = request.model.load(request.code_dir)
        self.dataset = self._open()
        self.is_iterable = isinstance(self.dataset, IterableDataset)
        self._transform = getattr(self.module, "transform", None)
        self.arrays: dict[str, tuple[tuple[int, ...], str]] | None = None
        """Shape and type of each array of a sample; None before the first sample in the prepare stage."""
        if request.entry is not None:
            self.arrays = {name: (array.shape, array.dtype) for name, array in request.entry.arrays.items()}

    def __len__(self) -> int:
        """Return the number of samples. Raises UserError if the dataset has no usable length."""
        try:
            return len(self.dataset)
        except Exception as error:
            raise self.explain(error, f'dataset of the split "{self.request.split}" has no length') from error

    def _open(self) -> Any:
        """Return what the function `dataset` returns for the split."""
        request = self.request
        name = f'dataset(options, "{request.split}")'
        try:
            seed_generators(f"sluice dataset {request.split}")
            dataset = self.module.dataset(dict(request.options), request.split)
        except Exception as error:
            raise self.explain(error, f"{name} fails") from error
        if isinstance(dataset, IterableDataset):
            if request.split == HELD_OUT_SPLIT:
                raise self._make_error(
                    f"{name} returns an IterableDataset, but held-out samples are read by their numbers: return a "
                    "Dataset with __len__ and __getitem__"
                )
            if missing := [key for key in ("state_dict", "load_state_dict") if not hasattr(dataset, key)]:
                raise self._make_error(
                    f"{name} returns an IterableDataset without {' and '.join(missing)}: without its state, a run "
                    "cannot resume with the same samples. Define both methods, as torchdata's StatefulDataLoader "
                    "expects, or return a Dataset with __len__ and __getitem__"
                )
        elif not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise self._make_error(
                f"{name} returns {type(dataset).__name__}: return a torch.utils.data.Dataset with __len__ and "
                "__getitem__"
            )
        return dataset

    def read(self, index: int, position: int | None) -> Arrays:
        """Return a sample of a map-style dataset.

        Args:
            index: number of the sample in the dataset.
            position: position of the sample in the order of the run; None for a sample without randomness.

        Raises UserError if the dataset fails or returns other arrays than it should, or StorageError.
        """
        what = f"sample {index} of the split {self.request.split}"
        self.seed(index, position)
        try:
            sample = self.dataset[index]
        except Exception as error:
            raise self.explain(error, f"{what} cannot be read") from error
        return self._finish(sample, what, position)

    def iterate(self, positions: Iterator[int]) -> Iterator[Arrays]:
        """Yield the samples of an iterable dataset, again from its beginning after its end.

        Args:
            positions: yields the position in the order of the run of each sample, counted over all ranks.
        """
        samples = iter(self.dataset)
        ends_in_a_row = 0
        for position in positions:
            what = f"sample {position} of the run"
            sample = None
            while sample is None:
                self.seed(0, position)
                try:
                    sample = next(samples)
                except StopIteration:
                    ends_in_a_row += 1
                    # A restored state may be at the end of the dataset, so only the second end is an error.
                    if ends_in_a_row > 1:
                        raise self._make_error("the iterable dataset has no samples for this rank") from None
                    samples = iter(self.dataset)
                except Exception as error:
                    raise self.explain(error, f"{what} cannot be read") from error
            ends_in_a_row = 0
            yield self._finish(sample, what, position)

    def seed(self, index: int, position: int | None) -> None:
        """Seed the global generators for a sample."""
        is_training = position is not None
        seed_generators(f"sluice sample {self.request.seed} {position}" if is_training else f"sluice held out {index}")

    def _finish(self, sample: Any, what: str, position: int | None) -> Arrays:
        """Return the arrays of a sample, transformed if the module has a `transform`, after checking them."""
        if not isinstance(sample, dict):
            raise self._make_error(f"{what} is {type(sample).__name__}, not a dict of arrays")
        try:
            arrays = {name: to_array(value) for name, value in sample.items()}
            if self._transform is not None:
                generator = None if position is None else make_transform_generator(self.request.seed, position)
                arrays = {name: to_array(value) for name, value in self._transform(arrays, generator).items()}
        except Exception as error:
            raise self.explain(error, f"{what} cannot be used") from error
        self._check(arrays, what)
        return arrays

    def _check(self, arrays: Arrays, what: str) -> None:
        """Raise UserError if a sample does not have the expected arrays, with the expected shapes and types."""
        actual = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        if actual == self.arrays:
            return
        expected_names = self.request.model.arrays
        if actual.keys() != set(expected_names):
            raise self._make_error(
                f"{what} has the arrays {', '.join(map(str, actual)) or 'none'}, but ARRAYS names "
                f"{', '.join(expected_names)}"
            )
        for name, (shape, dtype) in actual.items():
            if dtype not in TORCH_TYPES:
                raise self._make_error(
                    f"{what}: {name} has the type {dtype}; supported types are {', '.join(sorted(TORCH_TYPES))}"
                )
            if self.arrays is not None and (shape, dtype) != self.arrays[name]:
                raise self._make_error(
                    f"{what}: {name} is {dtype} {shape}, but in the first sample it was {self.arrays[name][1]} "
                    f"{self.arrays[name][0]}: all samples must have the same shapes and types"
                )
        self.arrays = {name: actual[name] for name in expected_names}

    def hash_samples(self) -> str:
        """Return the SHA-256 of the first and the last sample; of the first one if the dataset is iterable."""
        samples = (
            [next(self.iterate(iter([0, 1])))]
            if self.is_iterable
            else [self.read(index, None) for index in dict.fromkeys((0, len(self) - 1))]
        )
        digest = hashlib.sha256()
        for sample in samples:
            for name in self.request.model.arrays:
                array = np.ascontiguousarray(sample[name])
                digest.update(f"{name} {array.dtype.name} {sample[name].shape}\n".encode())
                digest.update(array.data)
        return digest.hexdigest()

    def check_entry(self) -> None:
        """Raise UserError if the dataset is not the one that the prepare stage found."""
        request = self.request
        entry = request.entry
        assert entry is not None
        remedy = "restore the data and the module, or start a new run"
        if not self.is_iterable:
            expected = entry.samples if request.split == TRAIN_SPLIT else entry.held_out_samples
            if len(self) != expected:
                raise UserError(
                    "data.dataset_changed",
                    f"dataset of {request.model.target}: the split {request.split} has {len(self)} samples, but it had "
                    f"{expected} in the prepare stage: {remedy}",
                )
        if request.checks_samples and self.hash_samples() != entry.fingerprints[request.split]:
            raise UserError(
                "data.dataset_changed",
                f"dataset of {request.model.target}: the first or the last sample of the split {request.split} differs "
                f"from the one in the prepare stage: {remedy}. If only rounding differs, because the nodes have other "
                "processors, set data.verify=sizes",
            )

    def explain(self, error: Exception, problem: str) -> Exception:
        """Return the error to report for an exception of the user's code.

        An error of storage or a lack of memory keeps its meaning, so that the stage is retried. The traceback, from the
        first line of the user's module on, is printed to the log.

        Args:
            error: the exception.
            problem: what failed.
        """
        if isinstance(error, MemoryError):
            return error
        if (storage_error := find_storage_error(error)) is not None and not isinstance(error, FileNotFoundError):
            return storage_error
        location, user_traceback = _find_user_frames(error, self.request.code_dir)
        print(user_traceback, file=sys.stderr, flush=True)
        description = f"{type(error).__name__}: {error}".rstrip(":. ")
        return self._make_error(f"{problem}{location}: {description}", "data.dataset_failed")

    def _make_error(self, problem: str, code: str = "data.invalid_dataset") -> UserError:
        """Return a UserError about the dataset of the module."""
        return UserError(code, make_printable(f"dataset of {self.request.model.target}: {problem}"))


def to_array(value: Any) -> np.ndarray:
    """Return a numpy array of a tensor, an array or a number. Raises TypeError if this is not possible."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise TypeError(f"a tensor is on {value.device}; datasets return tensors on the CPU")
        return value.detach().numpy()
    return np.asarray(value)


def _find_user_frames(error: BaseException, code_dir: Path) -> tuple[str, str]:
    """Return where an exception of the user's code was raised, and its traceback from the first frame in this code.

    Returns:
        ` at FILE:LINE`, relative to `code_dir`, or "" if no frame is in the user's code; and the formatted traceback.
    """
    folder = code_dir.resolve()
    summary = traceback.TracebackException.from_exception(error)
    user_frames = [
        i
        for i, frame in enumerate(summary.stack)
        if folder in (path := Path(frame.filename).resolve()).parents
        and _PACKAGES_OF_SLUICE not in path.parents
        and folder / "pipeline" not in path.parents
        and not {"site-packages", "dist-packages"} & {*path.parts}
    ]
    location = ""
    if user_frames:
        frame = summary.stack[user_frames[-1]]
        location = f" at {Path(frame.filename).resolve().relative_to(folder)}:{frame.lineno}"
        summary.stack = traceback.StackSummary.from_list(summary.stack[user_frames[0] :])
    return location, "".join(summary.format(chain=False))


def describe_dataset(
    model: UserModel, code_dir: Path, options: Mapping[str, Any], *, has_held_out: bool
) -> dict[str, Any]:
    """Open the dataset of a module, read its first and last samples, and return the fields of its `DatasetEntry`.

    Args:
        model: the user's module.
        code_dir: the folder that contains the module.
        options: the options of `dataset`.
        has_held_out: whether samples are held out.

    Raises UserError if the dataset cannot be used.
    """
    train = SampleReader(DatasetRequest(model, code_dir, options, TRAIN_SPLIT))
    counts = {TRAIN_SPLIT: 0 if train.is_iterable else len(train), HELD_OUT_SPLIT: 0}
    _check_not_empty(train)
    fingerprints = {TRAIN_SPLIT: train.hash_samples()}
    if has_held_out:
        held_out = SampleReader(DatasetRequest(model, code_dir, options, HELD_OUT_SPLIT))
        held_out.arrays = train.arrays
        _check_not_empty(held_out)
        counts[HELD_OUT_SPLIT] = len(held_out)
        fingerprints[HELD_OUT_SPLIT] = held_out.hash_samples()
    assert train.arrays is not None
    return {
        "samples": counts[TRAIN_SPLIT],
        "held_out_samples": counts[HELD_OUT_SPLIT],
        "is_iterable": train.is_iterable,
        "version": read_version(train.module),
        "arrays": {name: SampleArray(dtype=dtype, shape=shape) for name, (shape, dtype) in train.arrays.items()},
        "fingerprints": fingerprints,
    }


def _check_not_empty(reader: SampleReader) -> None:
    """Raise UserError if a map-style dataset has no sample."""
    if not reader.is_iterable and not len(reader):
        split = reader.request.split
        hint = "; if nothing should be held out, set data.held_out=0" if split == HELD_OUT_SPLIT else ""
        raise UserError(
            "data.invalid_dataset",
            f"dataset of {reader.request.model.target}: the split {split} has no samples: check the paths{hint}",
        )


def read_version(module: ModuleType) -> str:
    """Return DATASET_VERSION of the user's module as text; "" if it is not set."""
    return str(getattr(module, "DATASET_VERSION", ""))
