"""The data folder of a run on text: the files of `prepare`, the shards of each work unit, and the manifest.

    data_dir/tokenizer.json, units.json           written by `prepare`; for dialogues also chat.json
    data_dir/prepare.json                         sizes and hashes of these files (:class:`TextPrepared`), written last
    data_dir/shards/unit-00003-train-00.h5, …     the shards of one work unit
    data_dir/shards/unit-00003.json               their sizes and hashes (:class:`UnitManifest`), written last
    data_dir/manifest.json                        all shards in the order of their work units (:class:`Manifest`)
    data_dir/rejected.jsonl                       documents that could not be read, by file and line

Work unit u belongs to Slurm array task u mod tasks. The shards of a unit depend only on its input ranges, the tokenizer
and the config. Any number of tasks therefore writes the same bytes, and a rerun overwrites the files of a killed task.
Only missing units are built.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from data_prep.data_folder import RUN_PREPARE_AGAIN, DataFolder, Log
from data_prep.documents import (
    FILTER_FILE,
    FILTERED,
    Document,
    DocumentFilter,
    Input,
    RecordReader,
    find_filter_file,
    load_filter,
    read_documents,
)
from data_prep.work_units import InputRange, WorkPlan, is_held_out, read_plan
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import sha256_file, sha256_json, translate_read_errors, write_atomic
from pipeline.config.datasets import DataConfig, restore_hashed_names
from pipeline.config.sections import list_keys_with
from pipeline.config.types import Policy
from pipeline.data.manifest import (
    CHAT_FILE,
    FORMAT_VERSION,
    MASK_LEARNED,
    SHARDS_DIR,
    FileEntry,
    KeyedManifest,
    Manifest,
    ShardEntry,
    write_manifest,
)
from pipeline.run.code import call_in_child_process

if TYPE_CHECKING:
    import numpy as np

    from data_prep.duplicates import Duplicates
    from data_prep.tokenizer import EncodedRecord, Encoder


class UnitManifest(KeyedManifest):
    """`shards/unit-NNNNN.json`: the shards of one work unit."""

    unit: int
    documents: int
    """Number of documents with text in the shards, including held-out documents."""
    held_out_documents: int
    lines: tuple[int, ...]
    """Number of lines (for tables: rows) that start in each input range, to compute line numbers in the whole file."""
    filtered: int = 0
    """Number of documents that the user's filter excluded."""
    duplicates: int = 0
    """Number of documents that were left out because the same text occurs earlier in the inputs."""
    long: int = 0
    """Number of documents with more tokens than a sample, for any value of `data.long_documents`.

    Only documents that are packed into samples are counted.
    """
    long_left_out: int = 0
    """Number of these long documents that are in no shard."""
    padding_tokens: int = 0
    """Number of tokens in the training shards that pad samples. Only counted with `data.packing: best_fit`."""
    cut_documents: int = 0
    """Number of training documents that were cut into several samples. Only counted with `data.packing: best_fit`."""
    rejected: tuple[tuple[int, int, str], ...]
    """For each unreadable document: index of the input range, number of the line in this range (from 1), and reason."""
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]


class UnitShards(NamedTuple):
    """The shards of one work unit, and counts of their documents. The members are fields of `UnitManifest`."""

    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]
    long: int = 0
    long_left_out: int = 0
    padding_tokens: int = 0
    cut_documents: int = 0


class TextPrepared(KeyedManifest):
    """`prepare.json`: the files that `prepare` has written, and facts about the tokenizer and the work units."""

    tokenizer: FileEntry
    units: FileEntry
    unit_count: int
    told: str = ""
    """Summary of the inputs and their problems, for `status`. The name of this field is part of the file format."""
    vocab_size: int
    eos_id: int
    bos_ids: tuple[int, ...] = ()
    dtype: str
    chat: FileEntry | None = None
    filter: FileEntry | None = None


_NEWER_KEYS = ("records", "deduplicate", "filter", "chat_template", "packing", "long_documents", "format")
"""Keys of `data` that older versions did not have.

A key that has its default value is not part of `TextFolder.key`, so that data folders of older versions stay valid.
"""


class TextFolder(DataFolder[TextPrepared, UnitManifest]):
    """The data folder of a run on text."""

    prepared_label = "tokenizer and work units"
    prepared_kind = TextPrepared
    manifest_kind = Manifest

    # -- the stage prepare -------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Key that `prepare.json` must have: the hash of the code and of the config keys that affect the shards."""
        excluded_keys = {key.removeprefix("data.") for key in list_keys_with(Policy.KEEPS_SHARDS)}
        if self.data.has_training_mask:
            excluded_keys.remove("sequence_length")  # The windows of the shards depend on this key.
        older_values = {key: DataConfig.model_fields[key].default for key in _NEWER_KEYS}
        older_values["add_special_tokens"] = False  # The default is `auto`, but older versions added no special tokens.
        excluded_keys |= {key for key, value in older_values.items() if getattr(self.data, key) == value}
        config = {**self.data.model_dump(mode="json", exclude=excluded_keys), "source": self.data.sources}
        restore_hashed_names(config)
        return sha256_json({"format": FORMAT_VERSION, "config": config, "code": self.code_hash})

    @property
    def manifest_key(self) -> str:
        """Hash of everything from which the shards are made.

        The hash covers the path, size and modification time of each input, because these values are in `units.json`.
        """
        prepared = self.prepared
        hashes = {"prepare": prepared.key, "tokenizer": prepared.tokenizer.sha256, "units": prepared.units.sha256}
        optional = {"chat": prepared.chat, "filter": prepared.filter}
        return sha256_json(hashes | {name: entry.sha256 for name, entry in optional.items() if entry})

    @cached_property
    def plan(self) -> WorkPlan:
        """The inputs and the work units. Raises InputError if a file of `prepare` is missing or damaged."""
        prepared = self.prepared
        entries = {
            "tokenizer.json": prepared.tokenizer,
            "units.json": prepared.units,
            CHAT_FILE: prepared.chat,
            FILTER_FILE: prepared.filter,
        }
        for name, entry in entries.items():
            if entry is not None and (problem := entry.find_problem(self.path / name)):
                raise InputError("data.damaged_file", f"{problem}: {RUN_PREPARE_AGAIN}")
        return read_plan(self.path / "units.json")

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The files with the documents, as `prepare` recorded them."""
        return self.plan.inputs

    @property
    def unit_count(self) -> int:
        """Number of work units. Each fills about one shard."""
        return len(self.plan.units)

    @property
    def quick_unit_count(self) -> int:
        """Number of work units, without reading `units.json`."""
        return self.prepared.unit_count

    @cached_property
    def encoder(self) -> Encoder:
        """Encoder with the tokenizer of the data folder."""
        from data_prep.tokenizer import load_encoder

        data = self.data
        return load_encoder(self.path / "tokenizer.json", data.tokenizer.eos_token, data.add_special_tokens)

    @cached_property
    def record_reader(self) -> RecordReader | None:
        """Function that converts objects to records such as dialogues; None for plain text."""
        from data_prep.records import make_record_reader

        return make_record_reader(self.data, (self.path / CHAT_FILE).read_bytes() if self.prepared.chat else None)

    @cached_property
    def document_filter(self) -> DocumentFilter | None:
        """The user's filter (`data.filter`); None if no filter is set."""
        return load_filter(self.path / FILTER_FILE, self.data.filter) if self.data.filter else None

    @property
    def _chat_template(self) -> str:
        """Value of `data.chat_template`; empty if the template beside the tokenizer is used."""
        return str(self.data.chat_template or "")

    def check_inputs(self) -> list[str]:
        """Check the filter, the tokenizer, the chat template and the inputs. Return the files that the config names.

        The tokenizer is loaded in a child process, so that this process does not import the package tokenizers.
        """
        if self.data.filter:
            find_filter_file(self.data.filter)
        if self.data.tokenizer.path is not None:
            tokenizer = (str(self.data.tokenizer.path), self.data.tokenizer.eos_token)
            add_special_tokens = json.dumps(self.data.add_special_tokens)
            call_in_child_process("data_prep.tokenizer", "check_tokenizer", *tokenizer, add_special_tokens)
            if self.data.records == "messages":
                call_in_child_process("data_prep.records", "build_chat_json", *tokenizer, self._chat_template)
        return super().check_inputs()

    def describe_prepared(self) -> str:
        """Return a summary of the inputs."""
        return self.prepared.told or super().describe_prepared()

    def has_same_inputs(self) -> bool:
        """Return True if inputs, tokenizer file, filter and chat template are those that `prepare` used."""
        prepared_filter = self.prepared.filter
        if self.data.filter and prepared_filter and prepared_filter.find_problem(find_filter_file(self.data.filter)):
            return False
        tokenizer = self.data.tokenizer.path
        if tokenizer is not None:
            with translate_read_errors(str(tokenizer)):
                if sha256_file(tokenizer) != self.prepared.tokenizer.sha256:
                    return False
            if self.prepared.chat is not None:
                from data_prep.records import build_chat_json

                chat = build_chat_json(tokenizer, self.data.tokenizer.eos_token, self._chat_template)
                if chat != (self.path / CHAT_FILE).read_bytes():
                    return False
        return super().has_same_inputs()

    def prepare_inputs(self, log: Log) -> None:
        """Write all files of `prepare`. The last is `prepare.json`, with the sizes and hashes of the other files."""
        from data_prep.prepare_text import prepare_tokenizer_and_units

        document_filter = None
        if self.data.filter:
            write_atomic(self.path / FILTER_FILE, find_filter_file(self.data.filter).read_bytes())
            document_filter = load_filter(self.path / FILTER_FILE, self.data.filter)
        self.write_prepared(*prepare_tokenizer_and_units(self.data, self.path, log, document_filter))

    def write_prepared(self, encoder: Encoder, units: int, summary: str) -> None:
        """Write `prepare.json` with the sizes and hashes of the other files of `prepare`.

        Args:
            encoder: encoder with the tokenizer.
            units: number of work units.
            summary: description of the inputs, for `status`.
        """
        prepared = TextPrepared(
            key=self.key,
            tokenizer=FileEntry.from_path(self.path / "tokenizer.json"),
            units=FileEntry.from_path(self.path / "units.json"),
            unit_count=units,
            told=summary,
            vocab_size=encoder.vocab_size,
            eos_id=encoder.eos_id,
            bos_ids=encoder.bos_ids,
            dtype=encoder.dtype,
            chat=FileEntry.from_path(self.path / CHAT_FILE) if self.data.records == "messages" else None,
            filter=FileEntry.from_path(self.path / FILTER_FILE) if self.data.filter else None,
        )
        write_manifest(self.path / "prepare.json", prepared)

    # -- work units --------------------------------------------------------------------------------------

    def _unit_key(self, number: int) -> str:
        """Return the hash of everything from which the shards of a work unit are made.

        The hash covers only the inputs of this unit, so a repaired input invalidates only the units that contain parts
        of this input. If documents are deduplicated, each unit depends on all inputs.
        """
        prepared = self.prepared
        ranges = ([self.inputs[input_index], *span] for input_index, *span in self.plan.units[number])
        optional_hashes = [entry.sha256 for entry in (prepared.chat, prepared.filter) if entry]
        optional_hashes += [prepared.units.sha256] if self.data.deduplicate else []
        return sha256_json([prepared.key, prepared.tokenizer.sha256, *optional_hashes, *ranges])

    def load_unit(self, number: int, hashes: bool = False) -> UnitManifest | None:
        """Return the manifest of a work unit.

        Return None if the manifest is missing, damaged or outdated, or if a shard is missing or differs from it. Sizes
        are compared and, if `hashes`, also hashes.
        """
        try:
            manifest = self.load_manifest_with_key(self.unit_path(number), UnitManifest, self._unit_key(number))
            for entry in (*manifest.train, *manifest.held_out):
                entry.check(self.path, hashes)
        except InputError:
            return None
        return manifest

    def build_unit(self, unit: int) -> bool:
        """Write the shards of one work unit and, last, its manifest. Return False if these files exist already."""
        if self.load_unit(unit, hashes=True) is not None:
            return False
        ranges = self.plan.units[unit]
        self.remove_leftovers(unit)
        self._check_inputs(ranges)
        lines = [0] * len(ranges)
        filtered = [0] * len(ranges)
        rejected: list[tuple[int, int, str]] = []
        documents = self._read_documents(ranges, lines, filtered, rejected)
        duplicates = 0
        if self._duplicates is not None:
            is_first = self._duplicates.find_first_occurrences(unit)
            duplicates = int(len(is_first) - is_first.sum())
            documents = select_first_occurrences(documents, is_first.tolist())
        shards = self._write_shards(unit, documents)
        self._check_inputs(ranges)  # If an input has changed meanwhile, the manifest must not be written.
        self._write_unit_manifest(
            unit,
            shards,
            lines=tuple(lines),
            filtered=sum(filtered),
            duplicates=duplicates,
            rejected=tuple(rejected),
        )
        return True

    def _write_shards(self, unit: int, documents: Iterator[Document]) -> UnitShards:
        """Tokenize the documents of a work unit and write them to shards.

        Held-out documents have separate shards. Held-out text is neither packed nor truncated, so that results of
        evaluations can be compared between all values of `data.packing`.
        """
        from data_prep.shard_writer import ShardWriter
        from data_prep.tokenizer import EncodedRecord

        attributes: dict[str, str | int] = {
            "format_version": FORMAT_VERSION,
            "tokenizer_sha256": self.prepared.tokenizer.sha256,
            "source": ", ".join(self.data.sources)[:1000],  # HDF5 allows 64 KB of attributes.
        }
        length = self.data.sequence_length
        mode = self.data.long_documents
        writers = []
        for split, has_mask in (("train", self.data.has_training_mask), ("held_out", self.data.has_loss_mask)):
            writer = ShardWriter(
                self.path,
                f"unit-{unit:05d}-{split}",
                self.data.shard_tokens,
                self.encoder.dtype,
                attributes,
                length if has_mask else None,
                self.encoder.eos_id,
                packs=self.data.packing == "best_fit",
            )
            writers.append(writer)
        long = left_out = 0
        for batch, encoded in encode_ahead(self._encode_batch, make_batches(documents)):
            for document, record in zip(batch, encoded, strict=True):
                utf8 = document.text.encode()
                writer = writers[is_held_out(utf8, self.data.held_out)]  # False selects `train`, True `held_out`.
                if not isinstance(record, EncodedRecord):
                    text_bytes = len(utf8)
                    if len(record) > length and writer.packs:
                        long += 1
                        if mode == "drop":
                            left_out += 1
                            continue
                        if mode == "truncate":
                            record = record[:length]
                            text_bytes = self.encoder.count_covered_bytes(document.text, length)
                    writer.add(record, text_bytes)
                    continue
                if record.full_length > length:
                    long += 1
                    # A truncated record may have no learned token.
                    has_no_target = mode == "truncate" and not (record.mask & MASK_LEARNED).any()
                    if has_no_target or mode == "drop":
                        left_out += 1
                        continue
                learned = (
                    document.text[start : min(end, record.covered_characters)] for start, end in document.learned
                )
                writer.add(record.tokens, sum(len(text.encode()) for text in learned), record.mask)
        train, held_out = (writer.close() for writer in writers)
        return UnitShards(train, held_out, long, left_out, writers[0].padding_tokens, writers[0].cut_documents)

    def _write_unit_manifest(
        self,
        unit: int,
        shards: UnitShards,
        *,
        lines: tuple[int, ...],
        filtered: int = 0,
        duplicates: int = 0,
        rejected: tuple[tuple[int, int, str], ...] = (),
    ) -> None:
        """Write the manifest of a work unit after its shards. The other arguments are fields of `UnitManifest`."""
        manifest = UnitManifest(
            key=self._unit_key(unit),
            unit=unit,
            documents=sum(entry.documents for entry in (*shards.train, *shards.held_out)),
            held_out_documents=sum(entry.documents for entry in shards.held_out),
            lines=lines,
            filtered=filtered,
            duplicates=duplicates,
            rejected=rejected,
            **shards._asdict(),
        )
        write_manifest(self.unit_path(unit), manifest)

    def _encode_batch(self, batch: Sequence[Document]) -> Sequence[np.ndarray | EncodedRecord]:
        """Return the tokens of each document; for records, the tokens with their mask."""
        if not self.data.has_loss_mask:
            return self.encoder.encode([document.text for document in batch])
        max_tokens = self.data.sequence_length if self.data.long_documents == "truncate" else None
        return self.encoder.encode_records(batch, chat=self.data.records == "messages", max_tokens=max_tokens)

    @cached_property
    def _duplicates(self) -> Duplicates | None:
        """Finds the duplicate documents of all work units; None if `data.deduplicate` is off."""
        if not self.data.deduplicate:
            return None
        from data_prep.duplicates import Duplicates

        keys = [self._unit_key(number) for number in range(self.unit_count)]
        return Duplicates(self.path / SHARDS_DIR, keys, self._iterate_texts, *self.array_task)

    def _iterate_texts(self, unit: int) -> Iterator[bytes]:
        """Yield the UTF-8 bytes of each document of a work unit. Raises InputError if an input changes meanwhile."""
        ranges = self.plan.units[unit]
        for document in self._read_documents(ranges, [0] * len(ranges), [0] * len(ranges), []):
            yield document.text.encode()
        self._check_inputs(ranges)

    def _check_inputs(self, ranges: tuple[InputRange, ...]) -> None:
        """Raise InputError if an input of these ranges has changed since `prepare`."""
        for index in {input_range.input for input_range in ranges}:
            self.inputs[index].check()

    def _read_documents(
        self,
        ranges: tuple[InputRange, ...],
        lines: list[int],
        filtered: list[int],
        rejected: list[tuple[int, int, str]],
    ) -> Iterator[Document]:
        """Yield each document of input ranges that has text, in order. Also fill the lists that are marked as output.

        Args:
            ranges: the input ranges.
            lines: output: the number of lines (for tables: rows) of each range.
            filtered: output: the number of documents of each range that the filter excludes is added to this list.
            rejected: output: index of the range, line and reason of each unreadable document are appended.
        """
        for range_index, (input_index, start, end) in enumerate(ranges):
            for document in read_documents(
                self.inputs[input_index], start, end, self.data.text_field, self.record_reader, self.document_filter
            ):
                lines[range_index] = document.line
                if document.reason == FILTERED:
                    filtered[range_index] += 1
                elif document.reason is not None:
                    rejected.append((range_index, document.line, document.reason))
                elif document.text:
                    yield document

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """Write `rejected.jsonl` and `manifest.json`, and remove shards that belong to no work unit.

        Raises UserError in these cases:
        - More documents are unreadable than `data.max_rejected` allows.
        - No training document is left, because all are longer than a sample.
        - No document is held out, although `data.held_out` is not 0.
        - There is no training sample.
        """
        train = tuple(entry for unit in units for entry in unit.train)
        held_out = tuple(entry for unit in units for entry in unit.held_out)
        manifest = Manifest(
            key=self.manifest_key,
            source=tuple(self.data.sources),
            tokenizer_sha256=self.prepared.tokenizer.sha256,
            vocab_size=self.prepared.vocab_size,
            eos_id=self.prepared.eos_id,
            bos_ids=self.prepared.bos_ids,
            dtype=self.prepared.dtype,
            documents=sum(unit.documents for unit in units),
            held_out_documents=sum(unit.held_out_documents for unit in units),
            rejected_documents=sum(len(unit.rejected) for unit in units),
            filtered_documents=sum(unit.filtered for unit in units),
            duplicate_documents=sum(unit.duplicates for unit in units),
            long_documents=sum(unit.long for unit in units),
            long_dialogues=self.data.long_documents if self.data.has_training_mask else "",
            padding_tokens=sum(unit.padding_tokens for unit in units),
            cut_documents=sum(unit.cut_documents for unit in units),
            train_tokens=sum(entry.tokens for entry in train),
            held_out_tokens=sum(entry.tokens for entry in held_out),
            train_bytes=sum(entry.bytes for entry in train),
            held_out_bytes=sum(entry.bytes for entry in held_out),
            train=train,
            held_out=held_out,
            stripe=self.stripe_options,
        )
        readable = manifest.documents + sum(unit.long_left_out for unit in units)
        list_rejected(self.path / "rejected.jsonl", self.plan, units, readable, self.data.max_rejected)
        if not train and manifest.long_documents and self.data.long_documents != "cut":
            raise UserError(
                "data.all_too_long",
                f"data.long_documents: {self.data.long_documents} leaves nothing to train on: "
                f"{manifest.long_documents:,} documents have more than data.sequence_length "
                f"({self.data.sequence_length}) tokens: increase it, or set data.long_documents: cut",
            )
        if self.data.held_out and not held_out:
            raise UserError(
                "data.no_held_out",
                f"data.held_out: none of {manifest.documents} documents is in the held-out fraction "
                f"{self.data.held_out}, so there is nothing to evaluate: increase it, add documents, or set it to 0",
            )
        self.check_has_training_sample(train)
        write_manifest(self.path / "manifest.json", manifest)
        needed_files = {self.path / entry.file for entry in (*train, *held_out)}
        needed_files |= {self.unit_path(number) for number in range(self.unit_count)}
        folder = self.path / SHARDS_DIR
        unfinished = (path for ending in ("hashes", "twice") for path in folder.glob(f".unit-*.{ending}.*.tmp"))
        for path in {*folder.glob("unit-*"), *unfinished} - needed_files:
            path.unlink(missing_ok=True)
        log(f"shard: {manifest}")


# -- batches of documents for the tokenizer --------------------------------------------------------------

Encoded = TypeVar("Encoded")
_BATCH_CHARACTERS = 1 << 18
"""Characters of a batch per core: enough to keep the tokenizer busy, and few enough for the cache of a core."""
_MAX_CORES = 16
"""Number of cores above which batches do not become larger.

The memory grows with the batch: 32 to 43 bytes per character of short documents. With 100 MB of documents of 4,000
characters, the peak was 83 MB for 2 cores and 248 MB for 16 cores. Without this limit, the peak was 1,502 MB for 128
cores. (The numbers of cores were simulated on a machine with 2 cores. The speed on more than 16 cores was not
measured.)
"""


def select_first_occurrences(documents: Iterator[Document], is_first: Sequence[bool]) -> Iterator[Document]:
    """Yield each document for which the element of `is_first` is True.

    `is_first` was computed when the documents were read before. Raises UserError if their number has changed.
    """
    number = 0
    for number, document in enumerate(documents, 1):
        if number <= len(is_first) and is_first[number - 1]:
            yield document
    if number != len(is_first):
        raise UserError(
            "data.filter_not_repeatable",
            f"the inputs had {len(is_first)} documents when they were hashed and {number} when they were read again: "
            "data.filter must return the same result for the same document",
        )


def encode_ahead(
    encode: Callable[[list[Document]], Encoded], documents: Iterator[list[Document]]
) -> Iterator[tuple[list[Document], Encoded]]:
    """Yield each batch of documents with the result of `encode`.

    A batch is encoded in another thread while the next batch is read and the caller writes the previous batch.
    """
    with ThreadPoolExecutor(1) as pool:
        current = None
        for batch in documents:
            previous = current
            current = (batch, pool.submit(encode, batch))
            if previous is not None:
                yield previous[0], previous[1].result()
        if current is not None:
            yield current[0], current[1].result()


def make_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents into batches for the tokenizer. The last batch may be small or empty."""
    batch: list[Document] = []
    characters = 0
    max_characters = _BATCH_CHARACTERS * min(len(os.sched_getaffinity(0)), _MAX_CORES)
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= max_characters:
            yield batch
            batch = []
            characters = 0
    yield batch


# -- documents that could not be read --------------------------------------------------------------------

_ALWAYS_ALLOWED = 5
"""Small inputs may have this many unreadable documents, as long as at least half of all documents can be read."""


def allowed_rejections(limit: float, total: int) -> float:
    """Return how many of `total` documents may be unreadable.

    The result is the fraction `limit` (`data.max_rejected`) of the documents. For small inputs, the result is larger:
    `_ALWAYS_ALLOWED` documents, but at most half of all documents. If `limit` is 0, no document may be unreadable.
    """
    return max(limit * total, min(_ALWAYS_ALLOWED, total / 2)) if limit else 0


def list_rejected(listing: Path, plan: WorkPlan, units: Sequence[UnitManifest], documents: int, limit: float) -> None:
    """Write `rejected.jsonl`: file, line (for tables: row) from 1, and reason of each unreadable document.

    A Slurm array task cannot know how many lines of a file precede an input range. Therefore the line numbers are
    computed here, from the line counts of all work units.

    Args:
        listing: path of `rejected.jsonl`.
        plan: the work units.
        units: manifests of all units, in order.
        documents: number of documents that can be read.
        limit: `data.max_rejected`.

    Raises UserError if there are more unreadable documents than `allowed_rejections`.
    """
    # For each input, the number of lines before the current range. Ranges are in the order of the file.
    lines_before = [0] * len(plan.inputs)
    rows: list[dict[str, str | int]] = []
    for unit, ranges in zip(units, plan.units, strict=True):
        first_lines = []
        for input_range, count in zip(ranges, unit.lines, strict=True):
            first_lines.append(lines_before[input_range.input])
            lines_before[input_range.input] += count
        for range_index, line, reason in unit.rejected:
            path = plan.inputs[ranges[range_index].input].path
            rows.append({"file": path, "line": first_lines[range_index] + line, "reason": reason})
    write_atomic(listing, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    total = documents + len(rows)
    if len(rows) > allowed_rejections(limit, total):
        first_row = rows[0]
        raise UserError(
            "data.too_many_rejected",
            f"{len(rows)} of {total} documents ({len(rows) / total:.2%}) cannot be read, more than "
            f"data.max_rejected ({limit:.2%}) allows. The first is {first_row['file']} line {first_row['line']}: "
            f"{first_row['reason']}. All are in {listing}. Repair or remove them, or increase data.max_rejected",
        )
