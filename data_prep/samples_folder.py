"""The data folder of a run with a custom model. The samples are in HDF5 files of the user, which are used in place.

    data_dir/prepare.json            size, modification time and arrays (offset, type, shape) of each file
    data_dir/shards/unit-00003.json  the same for one file, with its SHA-256; written by the shard stage
    data_dir/manifest.json           all files with their hashes, and the number of held-out samples

Each of these three files is a :class:`SampleManifest`. A sample is one row of each array. Training memory-maps
contiguous datasets in the user's file, and reports a file that was truncated or changed later. If a file has chunked or
compressed arrays, the shard stage copies it to `data_dir/shards/unit-00003.h5` with contiguous arrays.

The samples at the last positions of one fixed permutation of all rows (`SPLIT_SEED`) are held out. The held-out samples
are an exact fraction, are spread over all files, and are the same for every `run.seed`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from data_prep.data_folder import DataFolder, Log
from data_prep.documents import MAX_COMPRESSION_RATIO, Input
from data_prep.find_inputs import find_inputs
from data_prep.hdf5_reader import describe_datasets, read_rows
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import replace_atomically, sha256_file, sha256_json
from pipeline.config.datasets import DataConfig
from pipeline.config.user_model import LENGTHS_ARRAY, UserModel, find_user_model
from pipeline.data.manifest import (
    NOT_MAPPABLE,
    SHARDS_DIR,
    ArrayEntry,
    FileEntry,
    SampleFile,
    SampleManifest,
    write_manifest,
)
from pipeline.run.code import call_in_child_process

MAX_FILES_CHECKED = 100
"""Maximum number of files that are checked before a run exists. `prepare` checks all files."""
_BLOCK_BYTES = 1 << 26
"""Maximum number of bytes of an array that are copied at once."""
_MIN_DAMAGED_BYTES = 1 << 28
"""The size of an array is compared with the size of its stored data only if the array is larger than this."""
# numpy's names of the types that arrays may have.
_SUPPORTED_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class SamplesFolder(DataFolder[SampleManifest, SampleManifest]):
    """The data folder of a run with a custom model. A work unit is one file."""

    prepared_label = "files of samples"
    prepared_kind = manifest_kind = SampleManifest
    endings: ClassVar = {".h5": "hdf5", ".hdf5": "hdf5"}

    def __init__(self, data: DataConfig, path: Path, package: Path, model: UserModel) -> None:
        super().__init__(data, path, package)
        self.model = model

    @property
    def key(self) -> str:
        """Key that `prepare.json` must have: the hash of the config, the arrays that the model needs, and the code."""
        data = self.data
        model = self.model
        content = {"sources": data.sources, "held_out": data.held_out, "arrays": model.arrays, "padded": model.padded}
        return sha256_json({**content, "code": self.code_hash})

    @property
    def inputs(self) -> list[Input]:
        """The files of samples, as `prepare` recorded them."""
        return [Input(entry.file, entry.size, entry.mtime_ns, "hdf5") for entry in self.prepared.train]

    @property
    def unit_count(self) -> int:
        """Number of work units, which is the number of files."""
        return len(self.prepared.train)

    def prepare_inputs(self, log: Log) -> None:
        """Describe all files and write `prepare.json`.

        Raises UserError with file and dataset if the model cannot use an array.
        """
        files = _describe_files(find_inputs(self.data, self.endings), self.model)
        prepared = SampleManifest(key=self.key, train=files)
        write_manifest(self.path / "prepare.json", prepared)
        log(f"prepare: {prepared.samples:,} samples in {len(files)} files: {', '.join(self.model.arrays)}")
        if packed_bytes := [_count_bytes(entry) for entry in files if entry.is_packed]:
            total = sum(packed_bytes) / 1e9
            log(f"prepare: {len(packed_bytes)} files have chunked arrays: the stage shard unpacks {total:,.3f} GB")

    def check_inputs(self) -> list[str]:
        """Return the files that the config names, and check whether the first files have the arrays of the model.

        The check runs in a child process, and covers at most `MAX_FILES_CHECKED` files.
        """
        files = super().check_inputs()
        # A file is the first argument, because the message names this argument if the check takes too long.
        first_file, *others = files[:MAX_FILES_CHECKED]
        call_in_child_process(
            "data_prep.samples_folder",
            "check_sample_files",
            first_file,
            self.model.target,
            str(self.model.root.parent),
            *others,
        )
        return files

    def load_unit(self, number: int) -> SampleManifest | None:
        """Return the manifest of one file with its hash.

        Return None if the manifest is missing or outdated, or if it does not match the file that `prepare` described.
        """
        try:
            manifest = self.load_manifest_with_key(self.unit_path(number), SampleManifest, self.prepared.key)
            prepared = self.prepared.train[number]
            (entry,) = manifest.train
            if prepared.is_packed:
                entry.check(self.path, hashes=False)
                return manifest if entry.unpacked == _hash_entry(prepared) else None
        except InputError:
            return None
        return manifest if entry.model_copy(update={"sha256": ""}) == prepared else None

    def build_unit(self, unit: int) -> bool:
        """Hash or unpack one file and write its manifest. Return False if this was done before."""
        if self.load_unit(unit) is not None:
            return False
        self.remove_leftovers(unit)
        prepared = self.prepared.train[unit]
        self.inputs[unit].check()
        if prepared.is_packed:
            entry = _unpack_file(prepared, self.path, f"{SHARDS_DIR}/unit-{unit:05d}.h5")
        else:
            entry = prepared.model_copy(update={"sha256": sha256_file(prepared.file)})
        self.inputs[unit].check()  # If the file has changed meanwhile, the manifest must not be written.
        write_manifest(self.unit_path(unit), SampleManifest(key=self.prepared.key, train=(entry,)))
        return True

    def combine_units(self, units: Sequence[SampleManifest], log: Log) -> None:
        """Write the manifest of all files. If `data.held_out` is not 0, at least one sample is held out.

        Raises UserError if all samples would be held out.
        """
        samples = self.prepared.samples
        held_out_samples = max(1, round(self.data.held_out * samples)) if self.data.held_out else 0
        if held_out_samples >= samples:
            raise UserError(
                "data.no_training_sample",
                f"data.held_out {self.data.held_out} of {samples} samples leaves none to train on: reduce it",
            )
        files = tuple(entry for unit in units for entry in unit.train)
        manifest = SampleManifest(key=self.prepared.key, train=files, held_out_samples=held_out_samples)
        write_manifest(self.path / "manifest.json", manifest)
        log(f"shard: {samples - held_out_samples:,} samples to train on, {held_out_samples:,} held out")


def check_sample_files(path: str, target: str, folder: str, *others: str) -> None:
    """Raise UserError if a file does not have the arrays that the model `target` in `folder` needs."""
    # Size and modification time are not used.
    sources = [Input(file, size=0, mtime_ns=0, format="hdf5") for file in (path, *others)]
    _describe_files(sources, find_user_model(target, [Path(folder)]))


def _describe_files(sources: Sequence[Input], model: UserModel) -> tuple[SampleFile, ...]:
    """Return the entries of all files. Raises UserError with file and dataset if the model cannot use an array."""
    files = tuple(_describe_file(source, model) for source in sources)
    for entry in files[1:]:
        for name, array in entry.arrays.items():
            expected = files[0].arrays[name]
            if (array.dtype, array.shape[1:]) != (expected.dtype, expected.shape[1:]):
                raise UserError(
                    "data.shape_mismatch",
                    f"{entry.file}: {name} is {array.dtype} {array.shape}, but in {files[0].file} it is "
                    f"{expected.dtype} {expected.shape}: all files need the same type and, except for the number of "
                    "samples, shape",
                )
    return files


def _describe_file(source: Input, model: UserModel) -> SampleFile:
    """Return the entry of one file. Raises UserError with the dataset if the model cannot use an array."""
    path = source.path
    datasets, top_level = describe_datasets(path, [*model.arrays])
    arrays: dict[str, ArrayEntry] = {}
    for name in model.arrays:
        dataset = datasets.get(name)
        if dataset is None or not dataset.shape or not dataset.shape[0]:
            raise UserError(
                "data.no_array",
                f"{path}: {model.target} needs samples in a dataset {name!r}; the file has: "
                f"{', '.join(top_level) or 'none'}",
            )
        if dataset.dtype.name not in _SUPPORTED_TYPES or dataset.dtype.byteorder == ">":
            raise UserError(
                "data.wrong_type",
                f"{path}: {name} is {dataset.dtype}; supported types are, little-endian: {', '.join(_SUPPORTED_TYPES)}",
            )
        # A virtual dataset stores no data itself, so its size is not checked.
        max_bytes = max(_MIN_DAMAGED_BYTES, MAX_COMPRESSION_RATIO * dataset.stored_bytes)
        if not dataset.is_virtual and dataset.nbytes > max_bytes:
            raise UserError(
                "data.damaged_file",
                f"{path}: {name} should have {dataset.nbytes:,} bytes, but only {dataset.stored_bytes:,} are stored: "
                "the file is damaged or nearly empty: write it again",
            )
        offset = NOT_MAPPABLE if dataset.offset is None else dataset.offset
        arrays[name] = ArrayEntry(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
    sample_counts = {array.shape[0] for array in arrays.values()}
    if len(sample_counts) > 1:
        sizes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError("data.shape_mismatch", f"{path}: the arrays have different numbers of samples: {sizes}")
    if model.has_lengths:
        is_integer = datasets[LENGTHS_ARRAY].dtype.kind in "iu"
        if len(arrays[LENGTHS_ARRAY].shape) != 1 or not is_integer:
            raise UserError(
                "data.wrong_type",
                f"{path}: {LENGTHS_ARRAY} must have one integer per sample, not {arrays[LENGTHS_ARRAY]}",
            )
        # The second dimension of a padded array is padded, or counts as 0 if the array has only one dimension.
        _check_lengths(path, min(((*arrays[name].shape, 0)[1] for name in model.padded), default=None))
    return SampleFile(file=path, size=source.size, mtime_ns=source.mtime_ns, samples=sample_counts.pop(), arrays=arrays)


def _check_lengths(path: str, max_length: int | None) -> None:
    """Raise UserError if the length of a sample is not from 1 to `max_length`.

    Args:
        path: the file.
        max_length: size of the shortest padded dimension; None if no array is padded.
    """
    blocks = [(block.min(), block.max()) for block in read_rows(path, LENGTHS_ARRAY, _BLOCK_BYTES // 8)]
    shortest = min(low for low, _ in blocks)
    longest = max(high for _, high in blocks)
    if shortest < 1 or (max_length is not None and longest > max_length):
        raise UserError(
            "data.out_of_range",
            f"{path}: {LENGTHS_ARRAY} must be from 1 to {max_length}, but are from {shortest} to {longest}",
        )


def _hash_entry(entry: SampleFile) -> str:
    """Return the hash of the entry of a file in `prepare.json`."""
    return sha256_json(entry.model_dump())


def _count_bytes(entry: SampleFile) -> int:
    """Return the size in memory of all arrays of a file, in bytes."""
    import numpy as np

    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in entry.arrays.values())


def _unpack_file(entry: SampleFile, data_dir: Path, name: str) -> SampleFile:
    """Write the arrays of a file contiguously to a new file, and return the manifest entry of the new file.

    This needs memory for a row of chunks of an array, or for `_BLOCK_BYTES` if that is more.

    Args:
        entry: entry of the user's file.
        data_dir: the data folder.
        name: path of the new file, relative to the data folder.

    Raises UserError if the user's file cannot be read, for example because an HDF5 filter is not installed. Raises
    OSError if writing fails.
    """
    import h5py

    from data_prep.shard_writer import DeferredErrorFile

    path = data_dir / name
    arrays = {}
    with replace_atomically(path) as temporary, DeferredErrorFile(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            datasets, _ = describe_datasets(entry.file, [*entry.arrays])
            for array_name, array in entry.arrays.items():
                dataset = datasets[array_name]
                output = file.create_dataset(array_name, array.shape, array.dtype, track_times=False)
                # Read whole chunks, so that each chunk is unpacked once, and about `_BLOCK_BYTES` at once.
                rows = (dataset.chunks or (1,))[0]
                row_bytes = max(1, dataset.nbytes // array.shape[0])
                rows *= max(1, _BLOCK_BYTES // (rows * row_bytes))
                start = 0
                for block in read_rows(entry.file, array_name, rows):
                    output[start : start + len(block)] = block
                    start += len(block)
                arrays[array_name] = array.model_copy(update={"offset": output.id.get_offset()})
        if disk.error is not None:
            raise disk.error
        os.fsync(disk.fileno())
    fields = FileEntry.from_path(path).model_dump() | {"mtime_ns": entry.mtime_ns, "samples": entry.samples}
    return SampleFile(file=name, arrays=arrays, unpacked=_hash_entry(entry), **fields)
