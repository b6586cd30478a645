"""What the data folder holds and whether it is whole: the manifests, light enough for a login node.

    data_dir/tokenizer.json, units.json           what `prepare` fixes
    data_dir/prepare.json                         their sizes and hashes, written last   (:class:`Prepared`)
    data_dir/shards/unit-00003-train-00.h5, ...   the shards of one work unit
    data_dir/shards/unit-00003.json               their sizes and hashes, written last   (:class:`UnitManifest`)
    data_dir/manifest.json                        all shards in unit order               (:class:`Manifest`)
    data_dir/rejected.jsonl                       documents that could not be read

A manifest is written after the files that it describes, so it vouches for them: a crash leaves files without
a manifest, never the reverse. Each one carries a hash of the rest of it (a number that changed is noticed), and a key.
`prepare.json` is keyed by the config that shapes the bytes and by the sources of this package; the manifest of all by
that key, the tokenizer and `units.json` (which holds path, size and time of each input); that of a unit by the same,
but of the inputs only by those that it has a part of. When anything of it changes, the key no longer fits and the file
counts as missing. So an input that was mended costs its own units, the others stay as they are (unless the tokenizer is
trained, and comes out differently).

Once all shards are written the inputs may go (scratch file systems purge): they are compared with the disk
only while there are shards to write.

A login node asks these questions, so nothing here imports numpy or h5py: that takes seconds there.
"""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.inputs.seen import PACKAGE, code_sha256, input_problem, unit_path
from pipeline.base.errors import InputError
from pipeline.base.files import sha256_json
from pipeline.config.sections import DataConfig
from pipeline.config.types import Section
from pipeline.data.manifest import (
    FORMAT_VERSION,
    FileEntry,
    ShardEntry,
    check_shard,
    file_problem,
    load,
    load_manifest,
)

_NOT_IN_KEY = {"sequence_length", "verify", "max_rejected"}  # they leave the shards' bytes as they are


class UnitManifest(Section):
    """`shards/unit-NNNNN.json`: what one work unit became."""

    key: str
    unit: int
    documents: int
    """Documents with text, held-out ones included."""
    held_out_documents: int
    lines: tuple[int, ...]
    """Lines (parquet: rows) that start in each piece of the unit: what line numbers of later pieces build on."""
    rejected: tuple[tuple[int, int, str], ...]
    """Piece, line within the piece (from 1) and reason of each document that could not be read."""
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]


class Prepared(Section):
    """`prepare.json`: what `prepare` fixed."""

    key: str
    tokenizer: FileEntry
    units: FileEntry
    unit_count: int
    vocab_size: int
    eos_id: int
    dtype: str

    @property
    def shards_key(self) -> str:
        """Key of the manifest of all: of everything made from this tokenizer and these units."""
        return sha256_json({"prepare": self.key, "tokenizer": self.tokenizer.sha256, "units": self.units.sha256})


def prepare_key(data: DataConfig, package: Path = PACKAGE) -> str:
    """Key of `prepare.json`: the config that shapes the bytes, and the code (64 hex digits).

    `package` is the copy of this package that does the work: a run's own, where another copy asks about it.
    """
    config = {**data.model_dump(mode="json", exclude=_NOT_IN_KEY), "source": data.sources}
    return sha256_json({"format": FORMAT_VERSION, "config": config, "code": code_sha256(package)})


def load_prepared(data_dir: Path) -> Prepared:
    """What `prepare` fixed. Raises InputError, naming the file, when it is missing or torn."""
    return load(data_dir / "prepare.json", Prepared)


def load_unit(data_dir: Path, unit: int, key: str, hashes: bool) -> UnitManifest | None:
    """The manifest of a unit whose shards are whole (sizes; with `hashes` their sha256 too), else None."""
    try:
        manifest = load(unit_path(data_dir, unit), UnitManifest)
        if manifest.key != key or manifest.unit != unit:
            return None
        for entry in (*manifest.train, *manifest.held_out):
            check_shard(data_dir, entry, hashes)
    except InputError:
        return None
    return manifest


def _changed_input(data_dir: Path) -> str | None:
    """The first input that is no longer what `prepare` saw, as a phrase."""
    for path, size, mtime_ns, _ in json.loads((data_dir / "units.json").read_bytes())["inputs"]:
        if problem := input_problem(path, size, mtime_ns):
            return problem
    return None


def prepare_missing(data: DataConfig, data_dir: Path, package: Path = PACKAGE) -> str | None:
    """Why prepare is not done; None when tokenizer and units are there, whole, and made for this config and code.

    While shards are still to be written, the inputs must also be what `prepare` saw.
    """
    try:
        prepared = load_prepared(data_dir)
    except InputError as error:
        return str(error)
    if prepared.key != prepare_key(data, package):
        return f"{data_dir / 'prepare.json'} was made with another data config or other code"
    for name, entry in (("tokenizer.json", prepared.tokenizer), ("units.json", prepared.units)):
        if problem := file_problem(data_dir / name, entry):
            return problem
    return None if shard_missing(data, data_dir, package) is None else _changed_input(data_dir)


def shard_missing(data: DataConfig, data_dir: Path, package: Path = PACKAGE) -> str | None:
    """Why the shards are not done; None when all are there with their recorded sizes, for this config and code."""
    try:
        prepared = load_prepared(data_dir)
        if prepared.key != prepare_key(data, package):
            return f"{data_dir / 'prepare.json'} was made with another data config or other code"
        manifest = load_manifest(data_dir)
        if manifest.key != prepared.shards_key:
            return f"{data_dir / 'manifest.json'} belongs to another tokenizer, other units or other code"
        for entry in (*manifest.train, *manifest.held_out):
            check_shard(data_dir, entry, hashes=False)
    except InputError as error:
        return str(error)
    return None


def unit_keys(data_dir: Path, prepared: Prepared) -> list[str]:
    """The key of each unit: config and code, the tokenizer, and its pieces, each with its input as it was listed.

    Raises InputError, naming the file, when `units.json` is missing or damaged.
    """
    path = data_dir / "units.json"
    if problem := file_problem(path, prepared.units):
        raise InputError(f"{problem}: run the prepare stage again, e.g. `python submit.py resume RUN`")
    plan, common = json.loads(path.read_bytes()), [prepared.key, prepared.tokenizer.sha256]
    return [sha256_json([*common, *([plan["inputs"][i], *piece] for i, *piece in unit)]) for unit in plan["units"]]


def shard_progress(data_dir: Path) -> tuple[int, int]:
    """Units whose manifest and shards are there, and units in all; (0, 0) before `prepare`."""
    try:
        keys = unit_keys(data_dir, load_prepared(data_dir))
    except InputError:
        return 0, 0
    return sum(load_unit(data_dir, unit, key, hashes=False) is not None for unit, key in enumerate(keys)), len(keys)
