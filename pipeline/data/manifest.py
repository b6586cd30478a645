"""The manifest of a run's data. data_prep writes the manifest, and training reads it.

    data_dir/manifest.json       all shards in the order of their work units (:class:`Manifest`), or all files of
                                 samples (:class:`SampleManifest`)
    data_dir/shards/…            the shards of tokens that the manifest lists

The manifest is written after the files that it describes. A crash may leave files without a manifest, but never a
manifest without its files. Login nodes also read manifests, so this module imports neither numpy nor h5py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pipeline.base.command import format_command
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import add_checksum, has_valid_checksum, read_json, sha256_file, sha256_json, write_json
from pipeline.config.sections import Config
from pipeline.config.types import Section

FORMAT_VERSION = 1
"""Version of the format of shards and manifests."""
ORDER_VERSION = 1
"""Version of the order of the tokens: the work units in order, and in each unit the shards by their number."""
RERUN_SHARD_HINT = f"run the shard stage again, e.g. `{format_command('resume', 'RUN')}`"
RUN_PREPARE_HINT = (
    f"run the prepare stage first: `python -m pipeline prepare RUN`, or `{format_command('resume', 'RUN')}` for all "
    "missing stages"
)
PREPARE_FILE = "prepare.json"
"""The last file that the prepare stage writes."""
CHAT_FILE = "chat.json"
"""File with the chat template and its special tokens, written by prepare (data_prep/records.py)."""
SHARDS_DIR = "shards"
MASK_LEARNED = 1
"""Bit of a shard's `mask`: the token contributes to the loss."""
MASK_DOCUMENT_START = 2
"""Bit of a shard's `mask`: the token begins a document."""


class FileEntry(Section):
    """Size in bytes and SHA-256 (64 hex digits) of a file."""

    size: int
    sha256: str
    part: tuple[int, int] | None = None
    """The bytes [start, end) of the file that the hash covers; null: the whole file.

    Large files are split into parts, so that several array tasks and ranks can hash one file.
    """

    @classmethod
    def from_path(cls, path: Path) -> FileEntry:
        """Return an entry with the size and the hash of the file at `path`."""
        return FileEntry(size=path.stat().st_size, sha256=sha256_file(path))

    def find_problem(self, path: Path, hashes: bool = True) -> str | None:
        """Return text that says how `path` differs from this entry; None if there is no difference.

        The file may be missing or have another size. If `hashes`, the content is also compared, by its hash.
        """
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return f"{path} is missing"
        if size != self.size:
            return f"{path} has {size} bytes, not {self.size} as in its manifest"
        actual = sha256_file(path, self.part) if hashes else self.sha256
        return None if actual == self.sha256 else f"{path} is damaged: its sha256 is {actual}, not {self.sha256}"


NOT_MAPPABLE = -1
"""Offset of an array that is stored in chunks and cannot be memory-mapped. The shard stage unpacks such arrays."""


class ArrayEntry(Section):
    """An array in a file, such as an HDF5 dataset."""

    offset: int
    """Byte at which the array's data starts in the file, or :data:`NOT_MAPPABLE`."""
    dtype: str
    """numpy's name of the type. Values are little-endian."""
    shape: tuple[int, ...]
    """The first dimension counts samples or tokens."""


class DataFile(FileEntry):
    """A file, or a part of a file, that training reads."""

    file: str
    """Path relative to the data folder, or the absolute path of a user's file, which is not copied."""

    @property
    def name(self) -> str:
        """Name of this entry: the path of the file and, for a part of a file, the first byte."""
        return self.file if self.part is None else f"{self.file} from byte {self.part[0]}"

    @property
    def is_user_file(self) -> bool:
        """Whether this is a user's file, which Sluice never repairs, moves or removes."""
        return Path(self.file).is_absolute()

    @property
    def remedy(self) -> str:
        """Advice for a file that has changed."""
        return "restore the file, or start a new run on the current data" if self.is_user_file else RERUN_SHARD_HINT

    def check(self, data_dir: Path, hashes: bool) -> None:
        """Raise InputError if the file is missing or its size or, if `hashes`, its sha256 differs from this entry.

        The message has the file, the difference and the remedy. With `hashes`, the whole file or part is read.

        The quick check of the shard stage compares sizes only. A caller that finds a damaged shard must therefore
        rename the shard, so that the shard stage writes it again.
        """
        if problem := self.find_problem(data_dir / self.file, hashes):
            raise InputError("data.damaged_file", f"{problem}: {self.remedy}")


class ShardEntry(DataFile):
    """One HDF5 shard, or a range of a user's token file (data_prep/tokens_folder.py).

    A document is counted in the file in which it starts. `documents` and `bytes` therefore add up to the totals even if
    a document continues in the next file.
    """

    tokens: int
    """Number of tokens; never 0."""
    documents: int
    """Documents that start in this file."""
    bytes: int
    """UTF-8 bytes of the texts of these documents, without end-of-text tokens.

    If there is a mask, only learned text is counted. For training data in a user's file, the bytes are not counted, and
    this field is 0.
    """
    offset: int
    """Byte at which the tokens start in the file. `tokens` values of the type `dtype` follow."""
    dtype: str
    """`uint16` or `uint32`, little-endian."""
    mask_offset: int | None = None
    """Byte at which the mask starts in the file. The mask has one byte per token. null: all tokens are learned."""

    @property
    def arrays(self) -> dict[str, ArrayEntry]:
        """The arrays that training reads."""
        entries = {"tokens": ArrayEntry(offset=self.offset, dtype=self.dtype, shape=(self.tokens,))}
        if self.mask_offset is not None:
            entries["mask"] = ArrayEntry(offset=self.mask_offset, dtype="uint8", shape=(self.tokens,))
        return entries


class KeyedManifest(Section):
    """A manifest of generated files, with a key that says from what they were generated."""

    key: str
    """Hash of the inputs and the config from which the files were generated."""


class MixturePart(Section):
    """A source of a mixture and the number of its shards."""

    name: str
    train: int
    """Number of entries of this source in `Manifest.train`."""
    held_out: int
    """Number of entries of this source in `Manifest.held_out`."""


class Manifest(KeyedManifest):
    """`manifest.json`: all shards of a run, in the order of their work units."""

    format_version: int = FORMAT_VERSION
    order_version: int = ORDER_VERSION
    source: tuple[str, ...]
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    bos_ids: tuple[int, ...] = ()
    """Special tokens before each document and prompt. Empty in data of older versions or with a chat template."""
    dtype: str
    documents: int
    """Number of documents with text, including held-out documents."""
    held_out_documents: int
    rejected_documents: int
    filtered_documents: int = 0
    """Number of documents that `data.filter` excluded."""
    duplicate_documents: int = 0
    """Number of documents that `data.deduplicate` excluded."""
    long_documents: int = 0
    """Number of documents with more tokens than `data.sequence_length`, if documents are packed into samples."""
    long_dialogues: str = ""
    """Value of `data.long_documents`, which says what was done with the long documents.

    The name of this field is part of the file format. Older versions wrote `split` instead of `cut`.
    """
    padding_tokens: int = 0
    """Number of tokens in the training shards that pad samples. Only counted with `data.packing: best_fit`."""
    cut_documents: int = 0
    """Number of training documents that were cut into several samples. Only counted with `data.packing: best_fit`."""
    train_tokens: int
    held_out_tokens: int
    train_bytes: int
    held_out_bytes: int
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]
    stripe: str = ""
    """Options with which `lfs setstripe` striped the folder of the shards; empty if the folder is not on Lustre."""
    parts: tuple[MixturePart, ...] = ()
    """The sources of a mixture, in the order of their shards; empty if there is one source."""

    @property
    def eos_starts_next(self) -> bool:
        """Whether the end-of-text token is also the first token of the next document."""
        return self.bos_ids == (self.eos_id,)

    def __str__(self) -> str:
        """Return a summary: `731 documents, 3,448,616 + 33,321 held-out tokens`, then the numbers of other documents.

        Other documents are rejected, filtered or duplicate documents, and documents that are longer than a sample. With
        `data.packing: best_fit`, the summary also has the fractions of padding and of training documents that were cut.
        """
        summary = f"{self.documents:,} documents, {self.train_tokens:,} + {self.held_out_tokens:,} held-out tokens"
        unused = {
            f"rejected ({'data/*' if self.parts else 'data'}/rejected.jsonl)": self.rejected_documents,
            "filtered": self.filtered_documents,
            "duplicate": self.duplicate_documents,
        }
        summary += "".join(f", {count:,} documents {reason}" for reason, count in unused.items() if count)
        if self.long_documents:
            mode = "cut" if self.long_dialogues == "split" else self.long_dialogues
            summary += f", {self.long_documents:,} longer than a sample (data.long_documents: {mode})"
        if self.padding_tokens:  # Every packed shard has padding, at least the target of its last token.
            padding = self.padding_tokens / self.train_tokens
            cut = self.cut_documents / (self.documents - self.held_out_documents)
            summary += f", packed by best fit: {padding:.1%} padding, {cut:.1%} of the documents cut"
        return summary

    def count_training_samples(self, length: int) -> int:
        """Return the number of training samples of `length` tokens (see `TokenDataset` in pipeline/data/samples.py)."""
        return sum((shard.tokens - 1) // length for shard in self.train)


SPLIT_SEED = 0
"""Seed of the permutation that selects the held-out samples."""


class SampleFile(DataFile):
    """An HDF5 file of samples."""

    mtime_ns: int
    """Modification time in nanoseconds since the epoch."""
    samples: int
    """Number of samples in the file."""
    arrays: dict[str, ArrayEntry]
    sha256: str = ""
    """SHA-256 of the file, as 64 hex digits; empty until the shard stage has read the file."""
    unpacked: str = ""
    """Hash of the manifest entry of the user's file from which this file was unpacked; empty for a user's file."""

    @property
    def is_packed(self) -> bool:
        """Whether the file has an array that must be unpacked before training can map it."""
        return any(array.offset == NOT_MAPPABLE for array in self.arrays.values())


class SampleArray(Section):
    """Shape and type of an array of one sample."""

    dtype: str
    """numpy's name of the type."""
    shape: tuple[int, ...]


class InputStamp(Section):
    """A file that `data.source` names, as it was when `prepare` listed it."""

    path: str
    """Absolute path."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Modification time in nanoseconds since the epoch."""


class DatasetEntry(Section):
    """The dataset of a user's module, as the prepare stage read it."""

    samples: int
    """Number of training samples; 0 for an iterable dataset, whose length is unknown."""
    held_out_samples: int
    is_iterable: bool = False
    """Whether the training samples come from an iterable dataset."""
    version: str = ""
    """The value of DATASET_VERSION in the user's module."""
    arrays: dict[str, SampleArray]
    """The arrays of a sample that the model receives."""
    sources: tuple[str, ...] = ()
    """Absolute paths of the files and folders that `data.source` names."""
    files: tuple[InputStamp, ...] = ()
    """The files among `sources`."""
    fingerprints: dict[str, str]
    """By split: SHA-256 of the first and the last sample; for an iterable dataset, of the first sample."""

    @property
    def sha256(self) -> str:
        """Hash of everything that identifies the samples. Paths and modification times are not part of it."""
        values = self.model_dump(exclude={"sources", "files"})
        return sha256_json({**values, "sizes": [file.size for file in self.files]})

    def check_files(self) -> None:
        """Raise InputError if a file of `data.source` is missing or has another size than `prepare` found."""
        for file in self.files:
            path = Path(file.path)
            size = path.stat().st_size if path.exists() else None
            if size != file.size:
                problem = "is missing" if size is None else f"has {size} bytes, not {file.size}"
                raise InputError(
                    "data.dataset_changed",
                    f"data.source: {path} {problem} as in the prepare stage: restore the file, or start a new run",
                )


class SampleManifest(KeyedManifest):
    """A manifest of files of samples, or of the dataset of a user's module.

    The prepare stage writes a manifest of all files, without hashes. Each array task of the shard stage writes a
    manifest of the files that it has hashed. `manifest.json` lists all files with their hashes.
    """

    train: tuple[SampleFile, ...]
    """The files; () for a dataset."""
    held_out_samples: int = 0
    dataset: DatasetEntry | None = None
    """The dataset of the user's module; None if the samples are read from files."""

    def __str__(self) -> str:
        """Return a summary of training and held-out samples: `9,000 + 1,000 held-out samples`."""
        if self.dataset is not None and self.dataset.is_iterable:
            return f"an iterable dataset + {self.held_out_samples:,} held-out samples"
        # the argument 0 is ignored
        return f"{self.count_training_samples(0):,} + {self.held_out_samples:,} held-out samples"

    @property
    def samples(self) -> int:
        """Number of all samples, including held-out samples."""
        if self.dataset is not None:
            return self.dataset.samples + self.dataset.held_out_samples
        return sum(entry.samples for entry in self.train)

    def count_training_samples(self, length: int) -> int:
        """Return the number of training samples. `length` is ignored; only :class:`Manifest` uses it."""
        return self.samples - self.held_out_samples

    @property
    def held_out(self) -> tuple[SampleFile, ...]:
        """All files if any sample is held out, because held-out samples are spread over all files; otherwise ()."""
        return self.train if self.held_out_samples else ()


def check_has_sample(shards: Sequence[ShardEntry], length: int) -> None:
    """Raise UserError if no shard has enough tokens for one sample of `length`."""
    longest = max((shard.tokens for shard in shards), default=0)
    if longest <= length:
        raise UserError(
            "data.no_training_sample",
            f"no training sample: a sample needs {length + 1} tokens of one shard (data.sequence_length {length}, plus "
            f"1), but there are {sum(shard.tokens for shard in shards)} tokens in {len(shards)} shards, at most "
            f"{longest} in one shard: add text or reduce data.sequence_length",
        )


T = TypeVar("T", bound=Section)


def write_manifest(path: Path, manifest: Section) -> None:
    """Write a manifest with a checksum, so that later changes are detected."""
    write_json(path, add_checksum(manifest.model_dump()))


def read_manifest_file(path: Path, kind: type[T], remedy: str = RERUN_SHARD_HINT) -> T:
    """Read a manifest of the type `kind`.

    Raises InputError with the file and `remedy` if the manifest is missing, incomplete or of another type, or if its
    checksum is missing or wrong. If the manifest is missing and the prepare stage is not done, the message has
    `RUN_PREPARE_HINT` instead of `remedy`.
    """
    try:
        values = read_json(path)
        is_intact = has_valid_checksum(values)
        if isinstance(values, dict):
            values.pop("sha256", None)
        manifest = kind.model_validate(values)
        # This is checked second, so that a manifest of another version is reported as such.
        if not is_intact:
            raise InputError(
                "data.damaged_manifest", f"{path} is damaged: its content does not match its own hash: {remedy}"
            )
        return manifest
    except FileNotFoundError:
        is_prepared = path.with_name(PREPARE_FILE).exists()
        raise InputError(
            "data.missing_manifest", f"{path} is missing: {remedy if is_prepared else RUN_PREPARE_HINT}"
        ) from None
    except ValueError:  # pydantic's ValidationError is a ValueError.
        raise InputError(
            "data.damaged_manifest", f"{path} is incomplete or not a manifest of this version: {remedy}"
        ) from None


def load_manifest(data_dir: Path) -> Manifest:
    """Return the manifest of all shards. Raises InputError if the manifest is missing or damaged."""
    return read_manifest_file(data_dir / "manifest.json", Manifest)


def load_data_manifest(config: Config, data_dir: Path) -> Manifest | SampleManifest:
    """Return the manifest that the shard stage wrote for `config`: of shards, or of files of samples.

    Raises InputError if the manifest is missing or damaged.
    """
    kind: type[Manifest | SampleManifest] = Manifest if config.model.target is None else SampleManifest
    return read_manifest_file(data_dir / "manifest.json", kind)


def list_data_hashes(manifest: Manifest | SampleManifest) -> list[str]:
    """Return the hash of each training shard or file; for a dataset, its hash."""
    if isinstance(manifest, SampleManifest) and manifest.dataset is not None:
        return [manifest.dataset.sha256]
    return [shard.sha256 for shard in manifest.train]


def hash_sources(manifest: Manifest | SampleManifest) -> dict[str, str]:
    """Return the hash of the training shards of each source by its name; the name is "" without a mixture."""
    parts = manifest.parts if isinstance(manifest, Manifest) else ()
    data_hashes = list_data_hashes(manifest)
    hashes: dict[str, str] = {}
    first_shard = 0
    for name, count in [(part.name, part.train) for part in parts] or [("", len(data_hashes))]:
        hashes[name] = sha256_json(data_hashes[first_shard : first_shard + count])
        first_shard += count
    return hashes


def count_training_steps(config: Config, data_dir: Path) -> int | None:
    """Return the number of optimizer steps of the whole run.

    If `train.epochs` is set, the number depends on the manifest. In that case, return None if the manifest is missing
    or damaged.
    """
    train = config.train
    if train.epochs is None:
        return train.steps
    try:
        manifest = load_data_manifest(config, data_dir)
    except InputError:
        return None
    phases = config.length_phases
    steps = 0
    consumed = 0  # number of samples of the current length that the run has read
    for i, phase in enumerate(phases):
        remaining = max(0, train.epochs * manifest.count_training_samples(phase.length) - consumed)
        needed_steps = -(-remaining // train.global_batch)  # rounded up
        if i + 1 == len(phases) or needed_steps <= phases[i + 1].from_step - phase.from_step:
            return steps + needed_steps
        steps = phases[i + 1].from_step - 1
        consumed += train.global_batch * (phases[i + 1].from_step - phase.from_step)
        consumed = -(-consumed * phase.length // phases[i + 1].length)  # as `convert_count` in sample_order.py
    return steps


def format_amount_read(config: Config, data_dir: Path, step: int, start: int = 0) -> str:
    """Return the amount of data read in the steps after `start` up to `step`: `, 819,200 tokens, 0.24 epochs`.

    Return "" if the manifest is missing or damaged. For files of samples, the text has the number of samples instead of
    tokens.
    """
    length = config.length_phases_until(step)[-1].length
    samples = (step - start) * config.train.global_batch
    tokens = config.count_tokens(step) - config.count_tokens(start)
    try:
        samples_per_epoch = load_data_manifest(config, data_dir).count_training_samples(length)
    except InputError:
        return ""
    if config.model.target is not None:
        if not samples_per_epoch:  # The length of an iterable dataset is unknown.
            return f", {samples:,} samples"
        amount, epochs = f"{samples:,} samples", samples / samples_per_epoch
    else:
        amount, epochs = f"{tokens:,} tokens", tokens / (length * samples_per_epoch)
    return f", {amount}, {epochs:.3g} epochs"


def format_training_length(config: Config, data_dir: Path) -> str:
    """Return the length of the run as text: `200 steps`, or `2 epochs (480 steps)` if `train.epochs` is set.

    If `train.epochs` is set but the manifest is missing or damaged, the text is `2 epochs (steps known after shard)`.
    """
    steps = count_training_steps(config, data_dir)
    epochs = config.train.epochs
    if epochs is None:
        return f"{steps} steps"
    step_text = "steps known after shard" if steps is None else f"{steps} steps"
    return f"{epochs} epoch{'s' if epochs > 1 else ''} ({step_text})"
