"""The manifest of a run's data: the contract between data_prep, which writes it, and training, which reads it.

    data_dir/manifest.json       all shards in unit order (:class:`Manifest`), or all files of samples
                                 (:class:`SampleManifest`)
    data_dir/shards/…            the shards of tokens that it names

It is written after the files that it describes, so it vouches for them: a crash leaves files without a manifest, never
the reverse. A login node reads it too, so nothing here imports numpy or h5py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pipeline.base.command import format_command
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import add_checksum, has_valid_checksum, read_json, sha256_file, write_json
from pipeline.config.sections import Config
from pipeline.config.types import Section

FORMAT_VERSION = 1
"""Version of the layout of shards and manifests."""
ORDER_VERSION = 1
"""Version of the rule that puts tokens in order: shards in unit order, a unit's files by their number."""
RERUN_SHARD_HINT = f"run the shard stage again, e.g. `{format_command('resume', 'RUN')}`"
RUN_PREPARE_HINT = (
    f"run the prepare stage first: `python -m pipeline prepare RUN`, or `{format_command('resume', 'RUN')}` for all "
    "that is missing"
)
PREPARE_FILE = "prepare.json"
"""What the prepare stage writes, last."""
CHAT_FILE = "chat.json"
"""What prepare keeps of a chat template (data_prep/records.py)."""
SHARDS_DIR = "shards"
MASK_LEARNED, MASK_DOCUMENT_START = 1, 2
"""Bits of a shard's `mask`: this token carries loss; it begins a document."""


class FileEntry(Section):
    """One file: its size in bytes and its sha256 (64 hex digits)."""

    size: int
    sha256: str
    part: tuple[int, int] | None = None
    """The bytes [start, end) that the hash is of: what of a large file one task, or rank, reads; null: all."""

    @classmethod
    def from_path(cls, path: Path) -> FileEntry:
        """What stands at `path` now."""
        return FileEntry(size=path.stat().st_size, sha256=sha256_file(path))

    def find_problem(self, path: Path, hashes: bool = True) -> str | None:
        """How a file differs from its entry: by its size or, with `hashes`, by its content; None where it does not."""
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing"
        if size != self.size:
            return f"{path} has {size} bytes, its manifest says {self.size}"
        found = sha256_file(path, self.part) if hashes else self.sha256
        return None if found == self.sha256 else f"{path} is damaged: its sha256 is {found}, not {self.sha256}"


NOT_MAPPABLE = -1


class ArrayEntry(Section):
    """One dataset of a file."""

    offset: int
    """Where its data starts in the file, in bytes: map it from here. :data:`PACKED`: in chunks, unpacked by shard."""
    dtype: str
    """Name of its type, little-endian."""
    shape: tuple[int, ...]
    """Samples (or tokens) first."""


class DataFile(FileEntry):
    """One file that training reads."""

    file: str
    """Path relative to the data folder, or absolute: then it is the user's own, used where it lies."""

    @property
    def name(self) -> str:
        """The file, and from which byte on."""
        return self.file if self.part is None else f"{self.file} from byte {self.part[0]}"

    @property
    def is_user_file(self) -> bool:
        """Whether the user made it: nobody else mends, moves or removes it."""
        return Path(self.file).is_absolute()

    @property
    def remedy(self) -> str:
        """What to do if the file has changed."""
        return "restore the file, or start a new run on the current data" if self.is_user_file else RERUN_SHARD_HINT

    def check(self, data_dir: Path, hashes: bool) -> None:
        """Compare the file with this: its size, and with `hashes` its sha256 too (which reads all of it).

        Raises InputError naming the file, what differs and the way out. A shard of the right size counts as
        written for the stage's quick look: a caller that finds a damaged one sets it aside under another name.
        """
        if problem := self.find_problem(data_dir / self.file, hashes):
            raise InputError("data.damaged_file", f"{problem}: {self.remedy}")


class ShardEntry(DataFile):
    """One HDF5 shard, or a part of a file of tokens that the user has (data_prep/tokens).

    A document counts in the file where it starts, so `documents` and `bytes` add up over files to the totals
    also where a document runs on into the next file.
    """

    tokens: int
    """Length of the dataset `tokens`; never 0."""
    documents: int
    """Documents that start in this file."""
    bytes: int
    """UTF-8 bytes of the texts of these documents, with a mask of what is learned of them (the end-of-text token is no
    text). Of a file of the user's that is trained on nobody counts them: 0."""
    offset: int
    """Where the data of `tokens` starts in the file, in bytes: map `tokens` items of `dtype` from here."""
    dtype: str
    """`uint16` or `uint32`, little-endian."""
    mask_offset: int | None = None
    """Where the data of `mask` starts in the file, a byte for each token; null: all tokens are learned."""

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """What is read of it."""
        found = {"tokens": ArrayEntry(offset=self.offset, dtype=self.dtype, shape=(self.tokens,))}
        if self.mask_offset is not None:
            found["mask"] = ArrayEntry(offset=self.mask_offset, dtype="uint8", shape=(self.tokens,))
        return found


class KeyedManifest(Section):
    """A manifest of what was made."""

    key: str
    """Hash of all that it was made from."""


class MixturePart(Section):
    """One source of a mixture."""

    name: str
    train: int
    """How many entries of the manifest's `train` are its own."""
    held_out: int


class Manifest(KeyedManifest):
    """`manifest.json`: all shards of a run, in unit order."""

    format_version: int = FORMAT_VERSION
    order_version: int = ORDER_VERSION
    source: tuple[str, ...]
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    bos_ids: tuple[int, ...] = ()
    """Special tokens before each document and each prompt; older data has none. A chat template writes its own."""
    dtype: str
    documents: int
    """Documents with text, held-out ones included."""
    held_out_documents: int
    rejected_documents: int
    filtered_documents: int = 0
    """Documents that `data.filter` left out."""
    duplicate_documents: int = 0
    """Documents that `data.deduplicate` left out."""
    long_documents: int = 0
    """Prompts and dialogues with more tokens than `data.sequence_length`."""
    long_dialogues: str = ""
    """What became of them: `data.long_dialogues`."""
    train_tokens: int
    held_out_tokens: int
    train_bytes: int
    held_out_bytes: int
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]
    stripe: str = ""
    """Options by which `lfs setstripe` striped the folder of the shards; empty where it is not on Lustre."""
    parts: tuple[MixturePart, ...] = ()
    """The sources of a mixture, in the order in which their shards stand; none where there is one source."""

    def __str__(self) -> str:
        """`731 documents, 3,448,616 + 33,321 held-out tokens`, and how many documents were not taken."""
        told = f"{self.documents:,} documents, {self.train_tokens:,} + {self.held_out_tokens:,} held-out tokens"
        counts = self.rejected_documents, self.filtered_documents, self.duplicate_documents
        ways = f"rejected ({'data/*' if self.parts else 'data'}/rejected.jsonl)", "filtered", "that stood before"
        told += "".join(f", {count:,} documents {way}" for count, way in zip(counts, ways, strict=True) if count)
        if self.long_documents:
            told += f", {self.long_documents:,} longer than a sample (data.long_dialogues: {self.long_dialogues})"
        return told

    def count_training_samples(self, length: int) -> int:
        """How many samples of `length` tokens there are to train on (pipeline/data/samples.py says which)."""
        return sum((shard.tokens - 1) // length for shard in self.train)


SPLIT_SEED = 0
"""Seed of the permutation that says which samples are held out."""


class SampleFile(DataFile):
    """One HDF5 file of samples, by its absolute path."""

    mtime_ns: int
    samples: int
    arrays: dict[str, ArrayEntry]
    sha256: str = ""
    """SHA-256 of the file, as 64 hex digits; empty until the shard stage has read it."""
    unpacked: str = ""
    """Hash of the entry of the user's file that this one was unpacked from."""

    @property
    def is_packed(self) -> bool:
        """Whether it cannot be mapped."""
        return any(array.offset == NOT_MAPPABLE for array in self.arrays.values())


class SampleManifest(KeyedManifest):
    """What `prepare` found, what one task has hashed, or the whole."""

    train: tuple[SampleFile, ...]
    held_out_samples: int = 0

    def __str__(self) -> str:
        """`9,000 + 1,000 held-out samples`."""
        return f"{self.count_training_samples(0):,} + {self.held_out_samples:,} held-out samples"

    @property
    def samples(self) -> int:
        """All of them, held-out ones included."""
        return sum(entry.samples for entry in self.train)

    def count_training_samples(self, length: int) -> int:
        """How many samples there are to train on, whatever the `length` of a text's."""
        return self.samples - self.held_out_samples

    @property
    def held_out(self) -> tuple[SampleFile, ...]:
        """The files that held-out samples are in: all of them."""
        return self.train if self.held_out_samples else ()


def check_has_sample(shards: Sequence[ShardEntry], length: int) -> None:
    """Raise UserError where no shard has the tokens of one sample of `length`."""
    longest = max((one.tokens for one in shards), default=0)
    if longest <= length:
        raise UserError(
            "data.no_training_sample",
            f"no training sample: one takes {length + 1} tokens of one shard (data.sequence_length {length}, and one "
            f"more), but there are {sum(one.tokens for one in shards)} tokens in {len(shards)} shards, at most "
            f"{longest} in one; add text or lower data.sequence_length",
        )


T = TypeVar("T", bound=Section)


def write_manifest(path: Path, manifest: Section) -> None:
    """Write one of the manifests, sealed: a number that changes later is noticed."""
    write_json(path, add_checksum(manifest.model_dump()))


def read_manifest_file(path: Path, kind: type[T], way_out: str = RERUN_SHARD_HINT) -> T:
    """Read one manifest. Raises InputError, naming the file, when it is missing, torn, altered or of another shape.

    One without its seal counts as altered: every manifest is written with one.
    """
    try:
        values = read_json(path)
        sealed = has_valid_checksum(values)
        if isinstance(values, dict):
            values.pop("sha256", None)
        manifest = kind.model_validate(values)
        if not sealed:
            raise InputError(
                "data.damaged_manifest", f"{path} is damaged: its content does not fit its own hash: {way_out}"
            )
        return manifest
    except FileNotFoundError:
        before = path.with_name(PREPARE_FILE).exists()
        raise InputError(
            "data.missing_manifest", f"{path} is missing: {way_out if before else RUN_PREPARE_HINT}"
        ) from None
    except ValueError:  # pydantic's, too
        raise InputError("data.damaged_manifest", f"{path} is torn or no manifest of this version: {way_out}") from None


def load_manifest(data_dir: Path) -> Manifest:
    """The manifest of all shards. Raises InputError, naming the file, when it is missing or torn."""
    return read_manifest_file(data_dir / "manifest.json", Manifest)


def load_data_manifest(config: Config, data_dir: Path) -> Manifest | SampleManifest:
    """What the shard stage left for this config. Raises InputError, naming the file, when it is missing or torn."""
    kind: type[Manifest | SampleManifest] = Manifest if config.model.target is None else SampleManifest
    return read_manifest_file(data_dir / "manifest.json", kind)


def count_training_steps(config: Config, data_dir: Path) -> int | None:
    """Optimizer steps of the whole training; None where `train.epochs` counts them and there are no shards yet."""
    train = config.train
    if train.epochs is None:
        return train.steps
    try:
        samples = load_data_manifest(config, data_dir).count_training_samples(config.data.sequence_length)
    except InputError:
        return None
    return -(-train.epochs * samples // train.global_batch)


def format_amount_read(config: Config, data_dir: Path, step: int) -> str:
    """What a training has read after so many steps: `, 819,200 tokens, 0.24 epochs`; "" where there are no shards."""
    samples, length = step * config.train.global_batch, config.data.sequence_length
    try:
        epochs = samples / load_data_manifest(config, data_dir).count_training_samples(length)
    except InputError:
        return ""
    what = f"{samples * length:,} tokens" if config.model.target is None else f"{samples:,} samples"
    return f", {what}, {epochs:.3g} epochs"


def format_training_length(config: Config, data_dir: Path) -> str:
    """How long the training is: `200 steps`, or epochs and what they come to."""
    steps, epochs = count_training_steps(config, data_dir), config.train.epochs
    if epochs is None:
        return f"{steps} steps"
    return f"{epochs} epoch{'s'[: epochs - 1]} ({'steps known after shard' if steps is None else f'{steps} steps'})"
