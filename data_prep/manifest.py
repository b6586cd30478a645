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

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.config import DataConfig
from pipeline.config_types import Section
from pipeline.errors import InputError
from pipeline.files import intact, seal, sha256_file, sha256_json, write_json

if TYPE_CHECKING:
    from data_prep.samples import SampleFile

FORMAT_VERSION = 1
"""Version of the layout of shards and manifests."""
ORDER_VERSION = 1
"""Version of the rule that puts tokens in order: shards in unit order, a unit's files by their number."""
WAY_OUT = "run the shard stage again, e.g. `python submit.py resume RUN`"
SHARDS = "shards"
THIS_PACKAGE = Path(__file__).parent

_NOT_IN_KEY = {"sequence_length", "verify", "max_rejected"}  # they leave the shards' bytes as they are


class FileEntry(Section):
    """One small file: its size in bytes and its sha256 (64 hex digits)."""

    size: int
    sha256: str


class ShardEntry(Section):
    """One HDF5 shard.

    A document counts in the file where it starts, so `documents` and `bytes` add up over files to the totals
    also where a document runs on into the next file.
    """

    file: str
    """Path relative to the data folder."""
    tokens: int
    """Length of the dataset `tokens`; never 0."""
    documents: int
    """Documents that start in this file."""
    bytes: int
    """UTF-8 bytes of the texts of these documents (the end-of-text token is no text)."""
    offset: int
    """Where the data of `tokens` starts in the file, in bytes: map `tokens` items of `dtype` from here."""
    dtype: str
    """`uint16` or `uint32`, little-endian."""
    size: int
    """Bytes of the file."""
    sha256: str
    """SHA-256 of the file, as 64 hex digits."""


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


class Manifest(Section):
    """`manifest.json`: all shards of a run, in unit order."""

    format_version: int
    order_version: int
    key: str
    source: tuple[str, ...]
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    dtype: str
    documents: int
    """Documents with text, held-out ones included."""
    held_out_documents: int
    rejected_documents: int
    train_tokens: int
    held_out_tokens: int
    train_bytes: int
    held_out_bytes: int
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]


def unit_path(data_dir: Path, unit: int) -> Path:
    """The manifest of a work unit."""
    return data_dir / SHARDS / f"unit-{unit:05d}.json"


def code_sha256(package: Path) -> str:
    """SHA-256 over names and contents of the sources in folder `package`, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(package.glob("*.py")):
        digest.update(f"{path.name}\n{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def prepare_key(data: DataConfig, package: Path = THIS_PACKAGE) -> str:
    """Key of `prepare.json`: the config that shapes the bytes, and the code (64 hex digits).

    `package` is the copy of this package that does the work: a run's own, where another copy asks about it.
    """
    config = {**data.model_dump(mode="json", exclude=_NOT_IN_KEY), "source": data.sources}
    return sha256_json({"format": FORMAT_VERSION, "config": config, "code": code_sha256(package)})


T = TypeVar("T", Prepared, UnitManifest, Manifest)


def write_manifest(path: Path, manifest: Section) -> None:
    """Write one of the manifests, sealed: a number that changes later is noticed."""
    write_json(path, seal(manifest.model_dump()))


def unsealed(path: Path) -> Any:
    """What a manifest says. Raises InputError where it does not fit its seal, ValueError where it is torn.

    Runs that were made before manifests had seals go on: `pipeline/inputs.py` compares the numbers with the shards.
    """
    values = json.loads(path.read_bytes())
    if isinstance(values, dict) and "sha256" in values:
        if not intact(values):
            raise InputError(f"{path} is damaged: its content does not fit its own hash: {WAY_OUT}")
        del values["sha256"]
    return values


def _load(path: Path, kind: type[T]) -> T:
    """Read one manifest. Raises InputError, naming the file, when it is missing, torn, altered or of another shape."""
    try:
        return kind.model_validate(unsealed(path))
    except FileNotFoundError:
        raise InputError(f"{path} is missing: {WAY_OUT}") from None
    except ValueError:  # pydantic's, too
        raise InputError(f"{path} is torn or no manifest of this version: {WAY_OUT}") from None


def load_manifest(data_dir: Path) -> Manifest:
    """The manifest of all shards. Raises InputError, naming the file, when it is missing or torn."""
    return _load(data_dir / "manifest.json", Manifest)


def load_prepared(data_dir: Path) -> Prepared:
    """What `prepare` fixed. Raises InputError, naming the file, when it is missing or torn."""
    return _load(data_dir / "prepare.json", Prepared)


def file_problem(path: Path, entry: FileEntry | ShardEntry | SampleFile, hashes: bool = True) -> str | None:
    """How a file differs from its entry: by its size or, with `hashes`, by its content; None where it does not."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    if size != entry.size:
        return f"{path} has {size} bytes, its manifest says {entry.size}"
    found = sha256_file(path) if hashes else entry.sha256
    return None if found == entry.sha256 else f"{path} is damaged: its sha256 is {found}, not {entry.sha256}"


def check_shard(data_dir: Path, entry: ShardEntry | SampleFile, hashes: bool, way_out: str = WAY_OUT) -> None:
    """Compare a shard with its entry: its size, and with `hashes` its sha256 too (which reads all of it).

    Raises InputError naming the file, what differs and the way out. A shard of the right size counts as
    written for the stage's quick look: a caller that finds a damaged one sets it aside under another name.
    """
    if problem := file_problem(data_dir / entry.file, entry, hashes):
        raise InputError(f"{problem}: {way_out}")


def load_unit(data_dir: Path, unit: int, key: str, hashes: bool) -> UnitManifest | None:
    """The manifest of a unit whose shards are whole (sizes; with `hashes` their sha256 too), else None."""
    try:
        manifest = _load(unit_path(data_dir, unit), UnitManifest)
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


def input_problem(path: str, size: int, mtime_ns: int) -> str | None:
    """How an input differs from what `prepare` saw (its size, its time in ns), None when it does not."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"input {path} is gone since it was prepared"
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        return f"input {path} has changed since it was prepared"
    return None


def prepare_missing(data: DataConfig, data_dir: Path, package: Path = THIS_PACKAGE) -> str | None:
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


def shard_missing(data: DataConfig, data_dir: Path, package: Path = THIS_PACKAGE) -> str | None:
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
