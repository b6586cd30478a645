"""Samples of a model of the user's own: HDF5 files that are used where they lie, validated and recorded.

    data_dir/prepare.json            each file: its size, time, arrays (offset, type, shape)
    data_dir/shards/unit-00003.json  one file with its sha256, taken by a task of the shard stage
    data_dir/manifest.json           all files, and how many samples are held out

All three are a :class:`SampleManifest`. A sample is one row of each array. Arrays are contiguous datasets, so that the
loader maps them like shards. The files are not copied: one that was truncated or changed since is named, and the way
out is to put it back.

**Held out** are the samples at the last positions of one fixed permutation of all rows (:data:`SPLIT_SEED`): a fraction
to the sample, spread over all files, the same for every seed of a run, with no list of rows to keep.

h5py is imported only where a file is opened: a login node asks the other questions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.manifest import (
    THIS_PACKAGE,
    check_shard,
    code_sha256,
    input_problem,
    unit_path,
    unsealed,
    write_manifest,
)
from data_prep.sources import find_inputs, reading
from pipeline.config import DataConfig
from pipeline.config_types import Section
from pipeline.errors import InputError, UserError
from pipeline.files import sha256_file, sha256_json
from pipeline.user_model import LENGTHS, UserModel

SPLIT_SEED = 0
"""Seed of the permutation that says which samples are held out."""
_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class Array(Section):
    """One dataset of a file."""

    offset: int
    """Where its data starts in the file, in bytes."""
    dtype: str
    """Name of its type, little-endian."""
    shape: tuple[int, ...]
    """Samples first."""


class SampleFile(Section):
    """One HDF5 file."""

    file: str
    """Its absolute path."""
    size: int
    mtime_ns: int
    samples: int
    arrays: dict[str, Array]
    sha256: str = ""
    """SHA-256 of the file, as 64 hex digits; empty until the shard stage has read it."""


class SampleManifest(Section):
    """What `prepare` found, what one task has hashed, or the whole."""

    key: str
    train: tuple[SampleFile, ...]
    held_out_samples: int = 0

    @property
    def samples(self) -> int:
        """All of them, held-out ones included."""
        return sum(entry.samples for entry in self.train)

    @property
    def held_out(self) -> tuple[SampleFile, ...]:
        """The files that held-out samples are in: all of them."""
        return self.train if self.held_out_samples else ()

    def write(self, path: Path) -> None:
        """Write it, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_manifest(path, self)


def load_sample_manifest(path: Path) -> SampleManifest:
    """One of the manifests. Raises InputError, naming the file, when it is missing, torn or altered."""
    try:
        return SampleManifest.model_validate(unsealed(path))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: run the shard stage, e.g. `python submit.py resume RUN`") from None
    except ValueError:
        raise InputError(f"{path} is torn or no manifest of samples: remove it and resume") from None


def check_file(entry: SampleFile, hashes: bool) -> None:
    """Compare a file with its entry, as `check_shard` does. Raises InputError with what differs."""
    check_shard(Path("/"), entry, hashes, "put the file back as it was, or start a new run on what there is now")


def _key(data: DataConfig, model: UserModel, package: Path) -> str:
    wanted = {"sources": data.sources, "held_out": data.held_out, "arrays": model.arrays, "padded": model.padded}
    return sha256_json({**wanted, "code": code_sha256(package)})


def prepare_missing(data: DataConfig, model: UserModel, data_dir: Path, package: Path = THIS_PACKAGE) -> str | None:
    """Why prepare is not done; None when the files that it found are as they were, or all hashed already."""
    try:
        found = load_sample_manifest(data_dir / "prepare.json")
    except InputError as error:
        return str(error)
    if found.key != _key(data, model, package):
        return f"{data_dir / 'prepare.json'} was made with another data config or other code"
    if shard_missing(data, model, data_dir, package) is None:
        return None
    problems = (input_problem(entry.file, entry.size, entry.mtime_ns) for entry in found.train)
    return next(filter(None, problems), None)


def shard_missing(data: DataConfig, model: UserModel, data_dir: Path, package: Path = THIS_PACKAGE) -> str | None:
    """Why the manifest is not done; None when it fits config and code, and each file has its recorded size."""
    try:
        manifest = load_sample_manifest(data_dir / "manifest.json")
        if manifest.key != _key(data, model, package):
            return f"{data_dir / 'manifest.json'} was made with another data config or other code"
        for entry in manifest.train:
            check_file(entry, hashes=False)
    except InputError as error:
        return str(error)
    return None


def progress(data_dir: Path) -> tuple[int, int]:
    """Files that are hashed, and files in all; (0, 0) before `prepare`."""
    try:
        found = load_sample_manifest(data_dir / "prepare.json")
    except InputError:
        return 0, 0
    return sum(_hashed(data_dir, found, unit) is not None for unit in range(len(found.train))), len(found.train)


def prepare(data: DataConfig, model: UserModel, data_dir: Path, log: Callable[[str], None]) -> None:
    """List the files and look at their arrays. Raises UserError naming the file and dataset that will not do."""
    if prepare_missing(data, model, data_dir) is None:
        return
    inputs = find_inputs(data, {".h5": "hdf5", ".hdf5": "hdf5"})
    files = tuple(_look(source.path, source.size, source.mtime_ns, model) for source in inputs)
    for entry in files[1:]:
        for name, array in entry.arrays.items():
            first = files[0].arrays[name]
            if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                raise UserError(
                    f"{entry.file}: {name} is {array.dtype} {array.shape}, in {files[0].file} it is {first.dtype} "
                    f"{first.shape}: all files need the same type and, but for the number of samples, shape"
                )
    found = SampleManifest(key=_key(data, model, THIS_PACKAGE), train=files)
    found.write(data_dir / "prepare.json")
    log(f"prepare: {found.samples:,} samples in {len(files)} files: {', '.join(model.arrays)}")


def _look(path: str, size: int, mtime_ns: int, model: UserModel) -> SampleFile:
    """What stands in one file."""
    import h5py

    with reading(path), h5py.File(path, "r") as file:
        arrays: dict[str, Array] = {}
        for name in model.arrays:
            dataset: Any = file.get(name)
            if not isinstance(dataset, h5py.Dataset) or not dataset.ndim or not len(dataset):
                there = ", ".join(file) or "none"
                raise UserError(f"{path}: {model.target} wants samples in a dataset {name!r}; there are: {there}")
            offset = dataset.id.get_offset()
            if dataset.dtype.name not in _TYPES or dataset.dtype.byteorder == ">":
                raise UserError(f"{path}: {name} is {dataset.dtype}; supported are, little-endian, {', '.join(_TYPES)}")
            if offset is None:
                raise UserError(
                    f"{path}: {name} is not contiguous (but chunked, compressed or virtual), so it cannot be mapped: "
                    "rewrite it, e.g. with `h5repack -l CONTI -f NONE old.h5 new.h5`"
                )
            arrays[name] = Array(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
        counts = {array.shape[0] for array in arrays.values()}
        if len(counts) > 1:
            sizes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            raise UserError(f"{path}: the arrays have different numbers of samples: {sizes}")
        if model.has_lengths:
            longest = min((arrays[name].shape[1:2] or (0,))[0] for name in model.padded) if model.padded else None
            lengths: Any = file[LENGTHS][...]
            if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
                raise UserError(f"{path}: {LENGTHS} should hold one integer per sample, not {arrays[LENGTHS]}")
            if lengths.min() < 1 or (longest is not None and lengths.max() > longest):
                raise UserError(
                    f"{path}: {LENGTHS} go from {lengths.min()} to {lengths.max()}, not from 1 to {longest}"
                )
    return SampleFile(file=path, size=size, mtime_ns=mtime_ns, samples=counts.pop(), arrays=arrays)


def _hashed(data_dir: Path, found: SampleManifest, unit: int) -> SampleFile | None:
    """One file's entry with its hash, None where no task has made it, or the file is another one now."""
    try:
        (entry,) = load_sample_manifest(unit_path(data_dir, unit)).train
    except (InputError, ValueError):
        return None
    return entry if entry == found.train[unit].model_copy(update={"sha256": entry.sha256}) else None


def shard(data_dir: Path, task: int, tasks: int, log: Callable[[str], None]) -> None:
    """Hash the files of one task. Raises InputError naming a file that is not what `prepare` saw."""
    found = load_sample_manifest(data_dir / "prepare.json")
    for unit in range(task, len(found.train), tasks):
        entry = found.train[unit]
        if _hashed(data_dir, found, unit) is None:
            sha256 = sha256_file(entry.file)
            if problem := input_problem(entry.file, entry.size, entry.mtime_ns):
                raise InputError(f"{problem}: run prepare again, e.g. `python submit.py resume RUN`")
            done = entry.model_copy(update={"sha256": sha256})
            SampleManifest(key=found.key, train=(done,)).write(unit_path(data_dir, unit))
            log(f"shard: {entry.file}: {entry.samples:,} samples")


def finalize(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> None:
    """Write the manifest of all files, once each is hashed. Raises UserError where no sample is left to train on."""
    found = load_sample_manifest(data_dir / "prepare.json")
    files = tuple(entry for unit in range(len(found.train)) if (entry := _hashed(data_dir, found, unit)))
    held_out = max(1, round(data.held_out * found.samples)) if data.held_out else 0
    if held_out >= found.samples:
        raise UserError(f"data.held_out {data.held_out} of {found.samples} samples leaves none to train on")
    SampleManifest(key=found.key, train=files, held_out_samples=held_out).write(data_dir / "manifest.json")
    log(f"shard: {found.samples - held_out:,} samples to train on, {held_out:,} held out")
