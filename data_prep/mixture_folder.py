"""The data folder of a mixture, with a complete data folder for each source and one manifest of all shards.

data_dir/NAME/…           the data folder of one source (data_prep/text_folder.py, data_prep/tokens_folder.py)
data_dir/tokenizer.json   the tokenizer that all sources share
data_dir/manifest.json    the shards of all sources in order, and the number of shards of each source
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.data_folder import PACKAGE, DataFolder, Log
from data_prep.documents import Input
from data_prep.find_inputs import find_inputs
from data_prep.text_folder import TextFolder, UnitManifest
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import UserError
from pipeline.base.files import sha256_json, write_atomic
from pipeline.config.datasets import DataConfig
from pipeline.config.site import StripeConfig
from pipeline.data.manifest import Manifest, MixturePart, ShardEntry, load_manifest, write_manifest


def open_source_folder(data: DataConfig, path: Path, package: Path = PACKAGE) -> TextFolder:
    """Return the data folder of a source of text or tokens."""
    return (TokensFolder if data.records == "tokens" else TextFolder)(data, path, package)


class MixtureFolder(DataFolder[Any, UnitManifest]):
    """The data folder of a mixture. The work units of the mixture are the work units of all sources."""

    prepared_label = "tokenizer and units of all sources"
    manifest_kind = Manifest

    def __init__(self, data: DataConfig, path: Path, package: Path = PACKAGE) -> None:
        super().__init__(data, path, package)
        names = data.mixture.sources if data.mixture else ()
        self.sources = {name: open_source_folder(data.for_source(name), path / name, package) for name in names}

    @property
    def key(self) -> str:
        """Hash of the keys of all sources."""
        return sha256_json({name: folder.key for name, folder in self.sources.items()})

    @property
    def manifest_key(self) -> str:
        """Key that `manifest.json` must have: the hash of the keys of the sources' manifests.

        Raises InputError as `inputs` does.
        """
        return sha256_json({name: folder.manifest_key for name, folder in self.sources.items()})

    @property
    def inputs(self) -> list[Input]:
        """Inputs of all sources."""
        return [source for folder in self.sources.values() for source in folder.inputs]

    @cached_property
    def _source_units(self) -> list[tuple[TextFolder, int]]:
        """For each work unit of the mixture, the data folder of its source and its number in this folder."""
        return [(folder, number) for folder in self.sources.values() for number in range(folder.unit_count)]

    @property
    def unit_count(self) -> int:
        """Number of work units of all sources."""
        return len(self._source_units)

    @property
    def quick_unit_count(self) -> int:
        """Number of work units, without reading the plans of the sources."""
        return sum(folder.quick_unit_count for folder in self.sources.values())

    def load_unit(self, number: int) -> UnitManifest | None:
        """Return the manifest of a work unit; None if it is missing or outdated, or a file of it has another size."""
        folder, source_unit = self._source_units[number]
        return folder.load_unit(source_unit)

    def build_unit(self, unit: int) -> bool:
        """Build one work unit in the folder of its source. Return False if its files exist already."""
        folder, source_unit = self._source_units[unit]
        return folder.build_unit(source_unit)

    def prepare_inputs(self, log: Log) -> None:
        """Prepare each source.

        Raises UserError if two sources contain the same file. Otherwise the run might train on documents of one source
        that are held out in the other source.
        """
        source_names: dict[str, str] = {}  # name of the source by the resolved path of a file
        for name, folder in self.sources.items():
            for source in find_inputs(folder.data, folder.endings):
                path = os.path.realpath(source.path)
                if source_names.setdefault(path, name) != name:
                    raise UserError(
                        "data.duplicate_source",
                        f"data.mixture.sources: {path} is in {source_names[path]} and in {name}: remove it from one",
                    )
        for name, folder in self.sources.items():
            folder.prepare(_prefix_log(log, name))

    def has_same_inputs(self) -> bool:
        """Return True if the inputs of all sources are unchanged."""
        return all(folder.has_same_inputs() for folder in self.sources.values())

    def check_inputs(self) -> list[str]:
        """Return the files that the config names for all sources, after a quick check of each source."""
        return [path for folder in self.sources.values() for path in folder.check_inputs()]

    def list_named_files(self) -> list[str]:
        """Return the files that the config names for all sources."""
        return [path for folder in self.sources.values() for path in folder.list_named_files()]

    def shard(self, task: int, tasks: int, log: Log, striping: StripeConfig = StripeConfig()) -> None:
        """Build the missing work units of an array task. These units may belong to any source."""
        for folder in self.sources.values():
            folder.create_shards_dir(log, striping)
            folder.array_task = task, tasks  # The folder divides the search for duplicates among the tasks.
        super().shard(task, tasks, log, striping)

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """Write the manifest of each source, and then the manifest of the mixture.

        Raises UserError if the tokenizers of the sources differ, or if the mixture has no training sample.
        """
        parts: list[MixturePart] = []
        train: list[ShardEntry] = []
        held_out: list[ShardEntry] = []
        manifests: list[Manifest] = []
        for name, folder in self.sources.items():
            folder.stripe_options = self.stripe_options
            source_units = [unit for unit, (owner, _) in zip(units, self._source_units, strict=True) if owner is folder]
            # This does not check for a training sample, because `sequence_length` is only set for the mixture.
            folder.combine_units(source_units, _prefix_log(log, name))
            manifest = load_manifest(folder.path)
            manifests.append(manifest)
            parts.append(MixturePart(name=name, train=len(manifest.train), held_out=len(manifest.held_out)))
            train += [_relocate_entry(name, entry) for entry in manifest.train]
            held_out += [_relocate_entry(name, entry) for entry in manifest.held_out]
        first_manifest = manifests[0]
        if any(manifest.tokenizer_sha256 != first_manifest.tokenizer_sha256 for manifest in manifests):
            raise UserError(
                "data.tokenizer_changed",
                "data.mixture: the tokenizer changed while the sources were prepared: start a new run",
            )
        if len({manifest.bos_ids for manifest in manifests}) > 1:
            log(
                "warning: data.mixture: documents of some sources begin with the special tokens that the tokenizer "
                "adds, and documents of other sources do not. Prompts of evaluation tasks and of `generate` are "
                f"encoded like the documents of {parts[0].name}: set data.add_special_tokens"
            )
        # The sums of all counts of documents, tokens and bytes.
        totals = {
            key: sum(getattr(manifest, key) for manifest in manifests)
            for key, field in Manifest.model_fields.items()
            if field.annotation is int and key.endswith(("documents", "tokens", "bytes"))
        }
        lists = {"source": tuple(self.data.sources), "train": tuple(train), "held_out": tuple(held_out)}
        # The other fields, such as those of the tokenizer, are those of the first source.
        combined = first_manifest.model_copy(
            update={**totals, **lists, "parts": tuple(parts), "key": self.manifest_key}
        )
        self.check_has_training_sample(train)
        write_atomic(self.path / "tokenizer.json", (self.path / parts[0].name / "tokenizer.json").read_bytes())
        write_manifest(self.path / "manifest.json", combined)


def _prefix_log(log: Log, name: str) -> Log:
    """Return a log function that puts the name of a source before each message."""
    return lambda text: log(f"{name}: {text}")


def _relocate_entry(name: str, entry: ShardEntry) -> ShardEntry:
    """Return the entry of a source's shard with its path relative to the folder of the mixture."""
    return entry if entry.is_user_file else entry.model_copy(update={"file": f"{name}/{entry.file}"})
