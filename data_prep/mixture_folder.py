"""The data folder of a mixture: a folder for each source, filled as one of its own, and one manifest over them.

data_dir/NAME/…              what data_prep/text or data_prep/tokens make of a source
data_dir/tokenizer.json      the one that they share
data_dir/manifest.json       the shards of all, source after source, and which are whose
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.data_folder import PACKAGE, DataFolder, Log
from data_prep.find_inputs import find_inputs
from data_prep.text_folder import TextFolder
from data_prep.tokens_folder import TokensFolder
from pipeline.base.errors import UserError
from pipeline.base.files import sha256_json, write_atomic
from pipeline.config.datasets import DataConfig
from pipeline.config.site import StripeConfig
from pipeline.data.manifest import Manifest, MixturePart, ShardEntry, load_manifest, write_manifest


def open_source_folder(data: DataConfig, path: Path, package: Path = PACKAGE) -> TextFolder:
    """The data folder of one source."""
    return (TokensFolder if data.records == "tokens" else TextFolder)(data, path, package)


class MixtureFolder(DataFolder[Any, Any]):
    """The same, of several sources; a unit is one of theirs."""

    words = "tokenizer and units of all sources"
    manifest_kind = Manifest

    def __init__(self, data: DataConfig, path: Path, package: Path = PACKAGE) -> None:
        super().__init__(data, path, package)
        names = data.mixture.sources if data.mixture else ()
        self.sources = {name: open_source_folder(data.for_source(name), path / name, package) for name in names}

    @property
    def key(self) -> str:
        """Those of the sources."""
        return sha256_json({name: folder.key for name, folder in self.sources.items()})

    @property
    def manifest_key(self) -> str:
        """Those of what the sources' shards are made from. Raises InputError as `inputs` does."""
        return sha256_json({name: folder.manifest_key for name, folder in self.sources.items()})

    @property
    def inputs(self) -> list[Any]:
        """All files."""
        return [one for folder in self.sources.values() for one in folder.inputs]

    @cached_property
    def _where(self) -> list[tuple[TextFolder, int]]:
        """The folder of each unit, and its number there."""
        return [(folder, number) for folder in self.sources.values() for number in range(folder.count)]

    @property
    def count(self) -> int:
        """Units of all sources."""
        return len(self._where)

    @property
    def total(self) -> int:
        """Without reading all of them."""
        return sum(folder.total for folder in self.sources.values())

    def unit(self, number: int) -> Any:
        """That of its source."""
        folder, own = self._where[number]
        return folder.unit(own)

    def build_unit(self, unit: int) -> bool:
        """Make it in the folder of its source."""
        folder, own = self._where[unit]
        return folder.build_unit(own)

    def prepare_inputs(self, log: Log) -> None:
        """Prepare each source. Raises UserError for a file of two: what one holds out the other would train on."""
        seen: dict[str, str] = {}
        for name, folder in self.sources.items():
            for source in find_inputs(folder.data, folder.endings):
                if seen.setdefault(path := os.path.realpath(source.path), name) != name:
                    raise UserError(
                        "data.duplicate_source",
                        f"data.mixture.sources: {path} is in {seen[path]} and in {name}: leave it out of one",
                    )
        for name, folder in self.sources.items():
            folder.prepare(lambda text, name=name: log(f"{name}: {text}"))  # type: ignore[misc]

    def has_same_inputs(self) -> bool:
        """Those of each source."""
        return all(folder.has_same_inputs() for folder in self.sources.values())

    def look(self) -> list[str]:
        """The files of each source."""
        return [path for folder in self.sources.values() for path in folder.look()]

    def list_named_files(self) -> list[str]:
        """Those of each source."""
        return [path for folder in self.sources.values() for path in folder.list_named_files()]

    def shard(self, task: int, tasks: int, log: Log, striping: StripeConfig = StripeConfig()) -> None:
        """The units of all sources are dealt out as those of one."""
        for folder in self.sources.values():
            folder.create_shards_dir(log, striping)
            folder.task_of_tasks = task, tasks
        super().shard(task, tasks, log, striping)

    def combine_units(self, units: Sequence[Any], log: Log) -> None:
        """Write each source's manifest, then that of all. Raises UserError for tokenizers that are not the same."""
        parts, train, held_out, manifests = [], [], [], []
        for name, folder in self.sources.items():
            folder.stripe_options = self.stripe_options
            mine = [unit for unit, (other, _) in zip(units, self._where, strict=True) if other is folder]
            folder.combine_units(mine, lambda text, name=name: log(f"{name}: {text}"))  # type: ignore[misc]
            manifests.append(one := load_manifest(folder.path))
            parts.append(MixturePart(name=name, train=len(one.train), held_out=len(one.held_out)))
            train += [_inside(name, entry) for entry in one.train]
            held_out += [_inside(name, entry) for entry in one.held_out]
        first = manifests[0]
        if any(one.tokenizer_sha256 != first.tokenizer_sha256 for one in manifests):
            raise UserError(
                "data.tokenizer_changed",
                "data.mixture: the tokenizer changed while its sources were prepared: start a new run",
            )
        if len({one.bos_ids for one in manifests}) > 1:
            log(
                "warning: data.mixture: documents of some sources begin with the tokens that the tokenizer adds, those "
                f"of others do not. Prompts of tasks and of `generate` are given as in {parts[0].name}: set "
                "data.add_special_tokens"
            )
        sums = {
            key: sum(getattr(one, key) for one in manifests)
            for key, field in Manifest.model_fields.items()
            if field.annotation is int and key.endswith(("documents", "tokens", "bytes"))
        }
        lists = {"source": tuple(self.data.sources), "train": tuple(train), "held_out": tuple(held_out)}
        whole = first.model_copy(update={**sums, **lists, "parts": tuple(parts), "key": self.manifest_key})
        self.check_usable(train)
        write_atomic(self.path / "tokenizer.json", (self.path / parts[0].name / "tokenizer.json").read_bytes())
        write_manifest(self.path / "manifest.json", whole)


def _inside(name: str, entry: ShardEntry) -> ShardEntry:
    """The entry of a source's shard in the manifest of all."""
    return entry if entry.is_user_file else entry.model_copy(update={"file": f"{name}/{entry.file}"})
