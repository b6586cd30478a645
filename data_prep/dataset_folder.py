"""The data folder of a run whose module has a function `dataset` (pipeline/config/user_model.py).

    data_dir/prepare.json    number of samples, shapes and types of the arrays, hashes of the first and last samples
    data_dir/manifest.json   the same, written by the shard stage

Both files are a :class:`SampleManifest` without files. Training reads the samples from the dataset itself. The manifest
identifies the dataset, so that a run does not continue with other samples.

`data.source` may name the files that the dataset reads. The dataset receives their absolute paths, and Sluice notices
if a file is missing or its size has changed.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.data_folder import DataFolder, Log, hash_code
from data_prep.documents import Input
from data_prep.find_inputs import PYTHON_STDLIB
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import sha256_file, sha256_json
from pipeline.config.datasets import DataConfig
from pipeline.config.user_model import UserModel, find_user_model
from pipeline.data.manifest import DatasetEntry, InputStamp, SampleManifest, write_manifest
from pipeline.run.code import call_in_child_process

_INPUT_FORMAT = "dataset"


class DatasetFolder(DataFolder[SampleManifest, SampleManifest]):
    """The data folder of a run with a dataset of the user's module. There is one work unit, the dataset.

    Args:
        data: the section `data` of the config.
        path: the data folder.
        package: folder of the code of `data_prep`.
        model: the user's module.
        options: `model.options` and `model.layers`.
        has_epochs: whether the length of the run is `train.epochs`.
        tries_dataset: whether the dataset can be opened on this machine, before the run exists.
    """

    prepared_kind = manifest_kind = SampleManifest

    def __init__(
        self,
        data: DataConfig,
        path: Path,
        package: Path,
        model: UserModel,
        options: Mapping[str, Any],
        *,
        has_epochs: bool,
        tries_dataset: bool,
    ) -> None:
        super().__init__(data, path, package)
        self.model = model
        self.options = options
        self.has_epochs = has_epochs
        self.tries_dataset = tries_dataset

    @property
    def key(self) -> str:
        """Key that `prepare.json` must have: the hash of the config, the options of the dataset, and the code."""
        root = self.model.root
        content = {
            "sources": self.data.sources,
            "has_held_out": self.data.held_out > 0,
            "arrays": self.model.arrays,
            "options": dict(self.options),
            "module": hash_code(root) if root.is_dir() else sha256_file(root),
        }
        return sha256_json({**content, "code": self.code_hash})

    @property
    def inputs(self) -> list[Input]:
        """The files that `data.source` names, as `prepare` recorded them."""
        return [Input(file.path, file.size, file.mtime_ns, _INPUT_FORMAT) for file in self._entry.files]

    @property
    def _entry(self) -> DatasetEntry:
        """The dataset, as `prepare` recorded it. Raises InputError as `prepared` does."""
        assert self.prepared.dataset is not None
        return self.prepared.dataset

    @property
    def unit_count(self) -> int:
        """Return 1. Raises InputError if the prepare stage is not done."""
        return len([self.prepared])

    def describe_prepared(self) -> str:
        """Return a description of the output of `prepare`."""
        return f"the dataset has {self.prepared}"

    def prepare_inputs(self, log: Log) -> None:
        """Read the first and last samples of the dataset, and write `prepare.json`.

        Raises UserError if the dataset cannot be used.
        """
        from pipeline.data.dataset import describe_dataset, make_dataset_options

        sources = self._list_sources()
        fields = describe_dataset(
            self.model,
            self.model.root.parent,
            make_dataset_options(self.options, sources),
            has_held_out=self.data.held_out > 0,
        )
        files = tuple(_stamp(path) for path in sources if not os.path.isdir(path))
        entry = DatasetEntry(sources=tuple(sources), files=files, **fields)
        if entry.is_iterable and self.has_epochs:
            raise UserError(
                "config.conflict",
                f"train.epochs: the dataset of {self.model.target} is iterable, so its length is unknown: set "
                "train.epochs=null and train.steps",
            )
        prepared = SampleManifest(key=self.key, train=(), held_out_samples=entry.held_out_samples, dataset=entry)
        write_manifest(self.path / "prepare.json", prepared)
        arrays = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in entry.arrays.items())
        log(f"prepare: {prepared}: {arrays}")

    def load_unit(self, number: int) -> SampleManifest | None:
        """Return the manifest of the dataset, which the prepare stage has written."""
        return self.prepared

    def build_unit(self, unit: int) -> bool:
        """Check that the files of `data.source` are those of the prepare stage. There is nothing to build."""
        for source in self.inputs:
            source.check()
        return False

    def combine_units(self, units: Sequence[SampleManifest], log: Log) -> None:
        """Write `manifest.json`."""
        write_manifest(self.path / "manifest.json", self.prepared)
        log(f"shard: {self.prepared}")

    def check_inputs(self) -> list[str]:
        """Return the files that the config names. Open the dataset in a child process and read its first samples.

        If the jobs use another Python or a container, the dataset is not opened.

        Raises UserError if the dataset cannot be used.
        """
        sources = self._list_sources()
        if self.tries_dataset:
            options = json.dumps({**self.options, "source": sources} if sources else dict(self.options))
            has_held_out = "held_out" if self.data.held_out > 0 else ""
            call_in_child_process(
                "data_prep.dataset_folder",
                "try_dataset",
                self.model.target,
                str(self.model.root.parent),
                options,
                has_held_out,
            )
        return [path for path in sources if not os.path.isdir(path)]

    def list_named_files(self) -> list[str]:
        """Return the files that `data.source` names. Raises UserError if a path does not exist."""
        return [path for path in self._list_sources() if not os.path.isdir(path)]

    def has_same_inputs(self) -> bool:
        """Return True if `data.source` still names the same files, and these have not changed."""
        sources = self._list_sources()
        files = [_stamp(path) for path in sources if not os.path.isdir(path)]
        return (tuple(sources), tuple(files)) == (self._entry.sources, self._entry.files)

    def find_shard_problem(self, *, check_user_files: bool = True) -> str | None:
        """Return why the shard stage is not done; None if its output is valid, and the files have the same sizes."""
        problem = super().find_shard_problem(check_user_files=check_user_files)
        if problem is None and check_user_files:
            try:
                self._entry.check_files()
            except InputError as error:
                return str(error)
        return problem

    def _list_sources(self) -> list[str]:
        """Return the absolute paths of the files and folders that `data.source` names; [] if the key is not set.

        Raises UserError if there is no such file.
        """
        paths: dict[str, None] = {}
        for source in self.data.sources:
            if source == PYTHON_STDLIB:  # the default
                continue
            pattern = os.path.abspath(os.path.expanduser(source))
            matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
            if not matches:
                raise UserError("data.no_files", f"data.source: there is no file {source}")
            paths |= dict.fromkeys(matches)
        return list(paths)


def _stamp(path: str) -> InputStamp:
    """Return path, size and modification time of a file."""
    status = os.stat(path)
    return InputStamp(path=path, size=status.st_size, mtime_ns=status.st_mtime_ns)


def try_dataset(target: str, folder: str, options: str, has_held_out: str) -> None:
    """Raise UserError if the dataset of a module cannot be opened, or its first and last samples cannot be read.

    Args:
        target: `model.target`.
        folder: the folder that contains the module.
        options: the options of `dataset`, as JSON.
        has_held_out: "" if no samples are held out.
    """
    from pipeline.data.dataset import describe_dataset

    model = find_user_model(target, [Path(folder)])
    describe_dataset(model, Path(folder), json.loads(options), has_held_out=bool(has_held_out))
