"""Samples of a model of the user's own: HDF5 files that are used where they lie, validated and recorded.

    data_dir/prepare.json            each file: its size, time, arrays (offset, type, shape)
    data_dir/shards/unit-00003.json  one file with its sha256, taken by a task of the shard stage
    data_dir/manifest.json           all files, and how many samples are held out

All three are a :class:`SampleManifest`. A sample is one row of each array. Contiguous datasets are mapped by the loader
like shards, where they lie: a file that was truncated or changed since is named, and the way out is to put it back. A
file with arrays in chunks, compressed or not, is unpacked by the shard stage, chunk after chunk, each once:

    data_dir/shards/unit-00003.h5    its arrays, contiguous

**Held out** are the samples at the last positions of one fixed permutation of all rows (:data:`SPLIT_SEED`): a fraction
to the sample, spread over all files, the same for every seed of a run, with no list of rows to keep.
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

MOST_LOOKED_AT = 100
"""So many files are looked at before a run is made; `prepare` looks at all."""
_AT_ONCE = 1 << 26
"""Bytes of an array that are unpacked at once."""
_FEW = 1 << 28
"""So many bytes an array may claim whatever is stored."""
_TYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class SamplesFolder(DataFolder[SampleManifest, SampleManifest]):
    """The data folder of a run with a model of its own."""

    words = "files of samples"
    prepared_kind = manifest_kind = SampleManifest
    endings: ClassVar = {".h5": "hdf5", ".hdf5": "hdf5"}

    def __init__(self, data: DataConfig, path: Path, package: Path, model: UserModel) -> None:
        super().__init__(data, path, package)
        self.model = model

    @property
    def key(self) -> str:
        """Config, what the model takes, and code."""
        data, model = self.data, self.model
        wanted = {"sources": data.sources, "held_out": data.held_out, "arrays": model.arrays, "padded": model.padded}
        return sha256_json({**wanted, "code": self.code})

    @property
    def inputs(self) -> list[Input]:
        """The files."""
        return [Input(entry.file, entry.size, entry.mtime_ns, "hdf5") for entry in self.prepared.train]

    @property
    def count(self) -> int:
        """A unit is a file."""
        return len(self.prepared.train)

    def prepare_inputs(self, log: Log) -> None:
        """List the files and look at their arrays. Raises UserError naming the file and dataset that will not do."""
        files = _look(find_inputs(self.data, self.endings), self.model)
        found = SampleManifest(key=self.key, train=files)
        write_manifest(self.path / "prepare.json", found)
        log(f"prepare: {found.samples:,} samples in {len(files)} files: {', '.join(self.model.arrays)}")
        if packed := [_bytes_of(entry) for entry in files if entry.is_packed]:
            log(f"prepare: {len(packed)} of them in chunks: the shard stage unpacks {sum(packed) / 1e9:,.3f} GB")

    def look(self) -> list[str]:
        """And whether the first files have the arrays, asked of h5py, elsewhere."""
        files = super().look()
        first, *more = files[:MOST_LOOKED_AT]
        call_in_child_process(
            "data_prep.samples_folder",
            "check_sample_files",
            first,
            self.model.target,
            str(self.model.root.parent),
            *more,
        )
        return files

    def unit(self, number: int) -> SampleManifest | None:
        """One file's entry with its hash, None where no task has made it, or the file is another one now."""
        try:
            made = self.load_matching(self.unit_path(number), SampleManifest, self.prepared.key)
            seen, (entry,) = self.prepared.train[number], made.train
            if seen.is_packed:
                entry.check(self.path, hashes=False)
                return made if entry.unpacked == _identity(seen) else None
        except InputError:
            return None
        return made if entry.model_copy(update={"sha256": ""}) == seen else None

    def build_unit(self, unit: int) -> bool:
        """Hash one file, or unpack it."""
        if self.unit(unit) is not None:
            return False
        self.remove_leftovers(unit)
        seen = self.prepared.train[unit]
        self.inputs[unit].check()
        if seen.is_packed:
            entry = _unpacked(seen, self.path, f"{SHARDS_DIR}/unit-{unit:05d}.h5")
        else:
            entry = seen.model_copy(update={"sha256": sha256_file(seen.file)})
        self.inputs[unit].check()
        write_manifest(self.unit_path(unit), SampleManifest(key=self.prepared.key, train=(entry,)))
        return True

    def combine_units(self, units: Sequence[SampleManifest], log: Log) -> None:
        """Put all files into one manifest. Raises UserError where no sample is left to train on."""
        samples = self.prepared.samples
        held_out = max(1, round(self.data.held_out * samples)) if self.data.held_out else 0
        if held_out >= samples:
            raise UserError(
                "data.no_training_sample",
                f"data.held_out {self.data.held_out} of {samples} samples leaves none to train on",
            )
        files = tuple(entry for unit in units for entry in unit.train)
        whole = SampleManifest(key=self.prepared.key, train=files, held_out_samples=held_out)
        write_manifest(self.path / "manifest.json", whole)
        log(f"shard: {samples - held_out:,} samples to train on, {held_out:,} held out")


def check_sample_files(path: str, target: str, folder: str, *more: str) -> None:
    """Raise UserError where a file does not have what the module `target` in `folder` takes."""
    _look([Input(one, 0, 0, "hdf5") for one in (path, *more)], find_user_model(target, [Path(folder)]))


def _look(sources: Sequence[Input], model: UserModel) -> tuple[SampleFile, ...]:
    """What stands in the files. Raises UserError naming the file and dataset that will not do."""
    files = tuple(_look_into(source, model) for source in sources)
    for entry in files[1:]:
        for name, array in entry.arrays.items():
            first = files[0].arrays[name]
            if (array.dtype, array.shape[1:]) != (first.dtype, first.shape[1:]):
                raise UserError(
                    "data.shape_mismatch",
                    f"{entry.file}: {name} is {array.dtype} {array.shape}, in {files[0].file} it is {first.dtype} "
                    f"{first.shape}: all files need the same type and, but for the number of samples, shape",
                )
    return files


def _look_into(source: Input, model: UserModel) -> SampleFile:
    """What stands in one file. Raises UserError naming the dataset that will not do."""
    path = source.path
    found, there = describe_datasets(path, [*model.arrays])
    arrays: dict[str, ArrayEntry] = {}
    for name in model.arrays:
        dataset = found.get(name)
        if dataset is None or not dataset.shape or not dataset.shape[0]:
            raise UserError(
                "data.no_array",
                f"{path}: {model.target} wants samples in a dataset {name!r}; there are: {', '.join(there) or 'none'}",
            )
        if dataset.dtype.name not in _TYPES or dataset.dtype.byteorder == ">":
            raise UserError(
                "data.wrong_type",
                f"{path}: {name} is {dataset.dtype}; supported are, little-endian, {', '.join(_TYPES)}",
            )
        if not dataset.is_virtual and dataset.nbytes > max(_FEW, MAX_COMPRESSION_RATIO * dataset.stored):
            raise UserError(
                "data.damaged_file",
                f"{path}: {name} claims {dataset.nbytes:,} bytes, and {dataset.stored:,} are stored: it is damaged, "
                "or nearly empty: write it anew",
            )
        offset = NOT_MAPPABLE if dataset.offset is None else dataset.offset
        arrays[name] = ArrayEntry(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
    counts = {array.shape[0] for array in arrays.values()}
    if len(counts) > 1:
        sizes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise UserError("data.shape_mismatch", f"{path}: the arrays have different numbers of samples: {sizes}")
    if model.has_lengths:
        longest = min(((*arrays[name].shape, 0)[1] for name in model.padded), default=None)
        if len(arrays[LENGTHS_ARRAY].shape) != 1 or found[LENGTHS_ARRAY].dtype.kind not in "iu":
            raise UserError(
                "data.wrong_type",
                f"{path}: {LENGTHS_ARRAY} should hold one integer per sample, not {arrays[LENGTHS_ARRAY]}",
            )
        blocks = [(block.min(), block.max()) for block in read_rows(path, LENGTHS_ARRAY, _AT_ONCE // 8)]
        least, most = min(least for least, _ in blocks), max(most for _, most in blocks)
        if least < 1 or (longest is not None and most > longest):
            raise UserError(
                "data.out_of_range", f"{path}: {LENGTHS_ARRAY} go from {least} to {most}, not from 1 to {longest}"
            )
    return SampleFile(file=path, size=source.size, mtime_ns=source.mtime_ns, samples=counts.pop(), arrays=arrays)


def _identity(entry: SampleFile) -> str:
    return sha256_json(entry.model_dump())


def _bytes_of(entry: SampleFile) -> int:
    import numpy as np

    return sum(math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in entry.arrays.values())


def _unpacked(entry: SampleFile, data_dir: Path, name: str) -> SampleFile:
    """Write the arrays of a file contiguously to `name`; what that is.

    Memory: one chunk of the file, or `_AT_ONCE`. Raises UserError for a file that cannot be read (a filter that is not
    installed), OSError where the file system refuses.
    """
    import h5py

    from data_prep.shard_writer import DeferredErrorFile

    path, arrays = data_dir / name, {}
    with replace_atomically(path) as temporary, DeferredErrorFile(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            found, _ = describe_datasets(entry.file, [*entry.arrays])
            for key, array in entry.arrays.items():
                made = file.create_dataset(key, array.shape, array.dtype, track_times=False)
                rows, row_bytes = (found[key].chunks or (1,))[0], max(1, found[key].nbytes // array.shape[0])
                rows *= max(1, _AT_ONCE // (rows * row_bytes))
                start = 0
                for block in read_rows(entry.file, key, rows):
                    made[start : start + len(block)] = block
                    start += len(block)
                arrays[key] = array.model_copy(update={"offset": made.id.get_offset()})
        if disk.error is not None:
            raise disk.error
        os.fsync(disk.fileno())
    told = FileEntry.from_path(path).model_dump() | {"mtime_ns": entry.mtime_ns, "samples": entry.samples}
    return SampleFile(file=name, arrays=arrays, unpacked=_identity(entry), **told)
