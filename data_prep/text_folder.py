"""Documents to shards: what `prepare` fixes, what tasks make of each work unit, and the manifest of all.

    data_dir/tokenizer.json, units.json           what `prepare` fixes; for dialogues, chat.json
    data_dir/prepare.json                         their sizes and hashes, written last   (:class:`TextPrepared`)
    data_dir/shards/unit-00003-train-00.h5, ...   the shards of one work unit
    data_dir/shards/unit-00003.json               their sizes and hashes, written last   (:class:`UnitManifest`)
    data_dir/manifest.json                        all shards in unit order               (:class:`Manifest`)
    data_dir/rejected.jsonl                       documents that could not be read

`prepare.json` is keyed by the config that shapes the bytes and by the sources of this package; the manifest of all by
that key, the tokenizer and `units.json` (which holds path, size and time of each input); that of a unit by the same,
but of the inputs only by those that it has a part of. So an input that was mended costs its own units, the others stay
as they are (unless the tokenizer is trained, and comes out differently).

Unit u belongs to task u mod tasks. A unit's shards follow from its pieces, the tokenizer and the config alone,
so the number of tasks leaves no trace, and a repeated run writes the same bytes over what a killed one left. Only what
is missing is done again.

Within a unit the documents keep their order; held-out documents (by a hash of their text) go to files of their
own. A document that cannot be read is listed in its unit's manifest. Line numbers there count from the start of
the piece, because no task knows how many lines stand before it; the last task knows, from the line counts of all
pieces, and writes `rejected.jsonl` with the numbers that an editor shows.


Documents on their way to the tokenizer: which are left out, how many go at once, and what is done meanwhile.

`rejected.jsonl`: the documents that could not be read, by file and line, as an editor counts them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from data_prep.data_folder import AGAIN, DataFolder, Log
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
from pipeline.config.datasets import DataConfig
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
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar


class UnitManifest(KeyedManifest):
    """`shards/unit-NNNNN.json`: what one work unit became."""

    unit: int
    documents: int
    """Documents with text, held-out ones included."""
    held_out_documents: int
    lines: tuple[int, ...]
    """Lines (parquet: rows) that start in each piece of the unit: what line numbers of later pieces build on."""
    filtered: int = 0
    """Documents that the user's filter left out."""
    duplicates: int = 0
    """Documents whose text stands before."""
    long: int = 0
    """Prompts and dialogues of more tokens than a sample has, whatever `data.long_dialogues` does with them."""
    long_left_out: int = 0
    """Those of them that are in no shard."""
    rejected: tuple[tuple[int, int, str], ...]
    """Piece, line within the piece (from 1) and reason of each document that could not be read."""
    train: tuple[ShardEntry, ...]
    held_out: tuple[ShardEntry, ...]


class TextPrepared(KeyedManifest):
    """`prepare.json`: what `prepare` fixed."""

    tokenizer: FileEntry
    units: FileEntry
    unit_count: int
    told: str = ""
    """What a person should know of the inputs."""
    vocab_size: int
    eos_id: int
    bos_ids: tuple[int, ...] = ()
    dtype: str
    chat: FileEntry | None = None
    filter: FileEntry | None = None


_LATER = ("records", "deduplicate", "filter", "chat_template", "long_dialogues", "format")
"""Keys of `data` that older folders do not have in their key: with their defaults they are left out of it."""


class TextFolder(DataFolder[TextPrepared, UnitManifest]):
    """The data folder of a run on text."""

    words = "tokenizer and work units"
    prepared_kind = TextPrepared
    manifest_kind = Manifest

    # -- what prepare fixed ------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The config that shapes the bytes, and the code."""
        left = {key.removeprefix("data.") for key in list_keys_with(Policy.KEEPS_SHARDS)}
        if self.data.has_loss_mask:
            left.remove("sequence_length")
        later = {key: DataConfig.model_fields[key].default for key in _LATER}
        later["add_special_tokens"] = False  # with these values not there, as for folders from before them
        left = left | {key for key, value in later.items() if getattr(self.data, key) == value}
        config = {**self.data.model_dump(mode="json", exclude=left), "source": self.data.sources}
        return sha256_json({"format": FORMAT_VERSION, "config": config, "code": self.code})

    @property
    def manifest_key(self) -> str:
        """Everything that is made from this tokenizer and these units."""
        fixed = self.prepared
        known = {"prepare": fixed.key, "tokenizer": fixed.tokenizer.sha256, "units": fixed.units.sha256}
        more = {"chat": fixed.chat, "filter": fixed.filter}
        return sha256_json(known | {name: entry.sha256 for name, entry in more.items() if entry})

    @cached_property
    def plan(self) -> WorkPlan:
        """The work units. Raises InputError where they, or the tokenizer, are missing or damaged."""
        fixed = self.prepared
        named = {
            "tokenizer.json": fixed.tokenizer,
            "units.json": fixed.units,
            CHAT_FILE: fixed.chat,
            FILTER_FILE: fixed.filter,
        }
        for name, entry in named.items():
            if entry is not None and (problem := entry.find_problem(self.path / name)):
                raise InputError("data.damaged_file", f"{problem}: {AGAIN}")
        return read_plan(self.path / "units.json")

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The files of documents."""
        return self.plan.inputs

    @property
    def count(self) -> int:
        """A unit is about one shard."""
        return len(self.plan.units)

    @property
    def total(self) -> int:
        """Without reading all of them."""
        return self.prepared.unit_count

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer."""
        from data_prep.tokenizer import load_encoder

        data = self.data
        return load_encoder(self.path / "tokenizer.json", data.tokenizer.eos_token, data.add_special_tokens)

    @cached_property
    def read(self) -> RecordReader | None:
        """What makes records of lines."""
        from data_prep.records import make_record_reader

        return make_record_reader(self.data, (self.path / CHAT_FILE).read_bytes() if self.prepared.chat else None)

    @cached_property
    def keep(self) -> DocumentFilter | None:
        """The user's filter."""
        return load_filter(self.path / FILTER_FILE, self.data.filter) if self.data.filter else None

    @property
    def _chat_template(self) -> str:
        """`data.chat_template` as text; empty if the tokenizer's own is used."""
        return str(self.data.chat_template or "")

    def look(self) -> list[str]:
        """And whether the filter is there, and the given tokenizer can be used, asked of its package, elsewhere."""
        if self.data.filter:
            find_filter_file(self.data.filter)
        if self.data.tokenizer.path is not None:
            given = (str(self.data.tokenizer.path), self.data.tokenizer.eos_token)
            adds = json.dumps(self.data.add_special_tokens)
            call_in_child_process("data_prep.tokenizer", "check_tokenizer", *given, adds)
            if self.data.records == "messages":
                call_in_child_process("data_prep.records", "build_chat_json", *given, self._chat_template)
        return super().look()

    @property
    def fixed(self) -> str:
        """Of what."""
        return self.prepared.told or super().fixed

    def has_same_inputs(self) -> bool:
        """And the given tokenizer and filter are still the same."""
        was = self.prepared.filter
        if self.data.filter and was and was.find_problem(find_filter_file(self.data.filter)):
            return False
        given = self.data.tokenizer.path
        if given is not None:
            with translate_read_errors(str(given)):
                if sha256_file(given) != self.prepared.tokenizer.sha256:
                    return False
            if self.prepared.chat is not None:
                from data_prep.records import build_chat_json

                chat = build_chat_json(given, self.data.tokenizer.eos_token, self._chat_template)
                if chat != (self.path / CHAT_FILE).read_bytes():
                    return False
        return super().has_same_inputs()

    def prepare_inputs(self, log: Log) -> None:
        """Write `tokenizer.json`, `units.json` and, last, `prepare.json` with their sizes and hashes."""
        from data_prep.prepare_text import prepare_tokenizer_and_units

        keep = None
        if self.data.filter:
            write_atomic(self.path / FILTER_FILE, find_filter_file(self.data.filter).read_bytes())
            keep = load_filter(self.path / FILTER_FILE, self.data.filter)
        self.write_prepared(*prepare_tokenizer_and_units(self.data, self.path, log, keep))

    def write_prepared(self, encoder: Encoder, units: int, told: str) -> None:
        """Write `prepare.json`, of what is beside it."""
        prepared = TextPrepared(
            key=self.key,
            tokenizer=FileEntry.from_path(self.path / "tokenizer.json"),
            units=FileEntry.from_path(self.path / "units.json"),
            unit_count=units,
            told=told,
            vocab_size=encoder.vocab_size,
            eos_id=encoder.eos_id,
            bos_ids=encoder.bos_ids,
            dtype=encoder.dtype,
            chat=FileEntry.from_path(self.path / CHAT_FILE) if self.data.records == "messages" else None,
            filter=FileEntry.from_path(self.path / FILTER_FILE) if self.data.filter else None,
        )
        write_manifest(self.path / "prepare.json", prepared)

    # -- units -------------------------------------------------------------------------------------------

    def _unit_key(self, number: int) -> str:
        """Config and code, tokenizer and filter, and the unit's pieces, each with its input as it was listed. Which
        documents stand before, all inputs say."""
        fixed = self.prepared
        pieces = ([self.inputs[index], *piece] for index, *piece in self.plan.units[number])
        more = [entry.sha256 for entry in (fixed.chat, fixed.filter) if entry]
        more += [fixed.units.sha256] if self.data.deduplicate else []
        return sha256_json([fixed.key, fixed.tokenizer.sha256, *more, *pieces])

    def unit(self, number: int, hashes: bool = False) -> UnitManifest | None:
        """The manifest of a unit whose shards are whole (sizes; with `hashes` their sha256 too), else None."""
        try:
            made = self.load_matching(self.unit_path(number), UnitManifest, self._unit_key(number))
            for entry in (*made.train, *made.held_out):
                entry.check(self.path, hashes)
        except InputError:
            return None
        return made

    def build_unit(self, unit: int) -> bool:
        """Write the shards of one unit and, last, its manifest."""
        from data_prep.shard_writer import ShardWriter
        from data_prep.tokenizer import EncodedRecord

        if self.unit(unit, hashes=True) is not None:
            return False
        pieces = self.plan.units[unit]
        self.remove_leftovers(unit)
        self._check_inputs(pieces)
        attributes: dict[str, str | int] = {
            "format_version": FORMAT_VERSION,
            "tokenizer_sha256": self.prepared.tokenizer.sha256,
            "source": ", ".join(self.data.sources)[:1000],  # HDF5 takes 64 KB of attributes
        }
        window = self.data.sequence_length if self.data.has_loss_mask else None
        how = (self.data.shard_tokens, self.encoder.dtype, attributes, window, self.encoder.eos_id)
        writers = [ShardWriter(self.path, f"unit-{unit:05d}-{split}", *how) for split in ("train", "held_out")]
        lines, filtered, twice = [0] * len(pieces), [0] * len(pieces), 0
        rejected: list[tuple[int, int, str]] = []
        documents = self._documents(pieces, lines, filtered, rejected)
        if self._duplicates is not None:
            kept = self._duplicates.kept(unit)
            twice = int(len(kept) - kept.sum())
            documents = select_kept(documents, kept.tolist())
        long = left_out = 0
        for batch, encoded in encode_ahead(self._encoded, make_batches(documents)):
            for document, record in zip(batch, encoded, strict=True):
                utf8 = document.text.encode()
                writer = writers[is_held_out(utf8, self.data.held_out)]
                if not isinstance(record, EncodedRecord):
                    writer.add(record, len(utf8))
                    continue
                if record.length > self.data.sequence_length:
                    long += 1
                    cut = self.data.long_dialogues == "truncate" and not (record.mask & MASK_LEARNED).any()
                    if cut or self.data.long_dialogues == "drop":
                        left_out += 1
                        continue
                learned = (document.text[start : min(end, record.covered)] for start, end in document.learned)
                writer.add(record.tokens, sum(len(text.encode()) for text in learned), record.mask)
        train, held_out = (writer.close() for writer in writers)
        self._check_inputs(pieces)  # one that changed while it was read fits no manifest
        self._write_unit_manifest(
            unit,
            train,
            held_out,
            lines=tuple(lines),
            filtered=sum(filtered),
            duplicates=twice,
            long=long,
            long_left_out=left_out,
            rejected=tuple(rejected),
        )
        return True

    def _write_unit_manifest(
        self,
        unit: int,
        train: Sequence[ShardEntry],
        held_out: Sequence[ShardEntry],
        *,
        lines: tuple[int, ...],
        filtered: int = 0,
        duplicates: int = 0,
        long: int = 0,
        long_left_out: int = 0,
        rejected: tuple[tuple[int, int, str], ...] = (),
    ) -> None:
        """Write the manifest of a unit whose shards are complete. The arguments are the fields of `UnitManifest`."""
        manifest = UnitManifest(
            key=self._unit_key(unit),
            unit=unit,
            documents=sum(entry.documents for entry in (*train, *held_out)),
            held_out_documents=sum(entry.documents for entry in held_out),
            lines=lines,
            filtered=filtered,
            duplicates=duplicates,
            long=long,
            long_left_out=long_left_out,
            rejected=rejected,
            train=tuple(train),
            held_out=tuple(held_out),
        )
        write_manifest(self.unit_path(unit), manifest)

    def _encoded(self, batch: Sequence[Document]) -> Sequence[np.ndarray | EncodedRecord]:
        """Tokens of each document; of records, with their mask."""
        if not self.data.has_loss_mask:
            return self.encoder.encode([document.text for document in batch])
        most = self.data.sequence_length if self.data.long_dialogues == "truncate" else None
        return self.encoder.encode_records(batch, chat=self.data.records == "messages", most=most)

    @cached_property
    def _duplicates(self) -> Duplicates | None:
        """Which documents stand before; None where nobody asks."""
        if not self.data.deduplicate:
            return None
        from data_prep.duplicates import Duplicates

        keys = [self._unit_key(number) for number in range(self.count)]
        return Duplicates(self.path / SHARDS_DIR, keys, self._texts, *self.task_of_tasks)

    def _texts(self, unit: int) -> Iterator[bytes]:
        """The documents of a unit, each by its UTF-8 bytes. Raises InputError where an input changes meanwhile."""
        pieces = self.plan.units[unit]
        yield from (one.text.encode() for one in self._documents(pieces, [0] * len(pieces), [0] * len(pieces), []))
        self._check_inputs(pieces)

    def _check_inputs(self, pieces: tuple[InputRange, ...]) -> None:
        for index in {piece.input for piece in pieces}:
            self.inputs[index].check()

    def _documents(
        self,
        pieces: tuple[InputRange, ...],
        lines: list[int],
        filtered: list[int],
        rejected: list[tuple[int, int, str]],
    ) -> Iterator[Document]:
        """The documents of these pieces in order; on the way counts lines, and what the filter left out, by piece, and
        lists rejected documents."""
        for place, piece in enumerate(pieces):
            input, start, end = self.inputs[piece.input], piece.start, piece.end
            for document in read_documents(input, start, end, self.data.text_field, self.read, self.keep):
                lines[place] = document.line
                if document.reason == FILTERED:
                    filtered[place] += 1
                elif document.reason is not None:
                    rejected.append((place, document.line, document.reason))
                elif document.text:
                    yield document

    def combine_units(self, units: Sequence[UnitManifest], log: Log) -> None:
        """Write `rejected.jsonl` and `manifest.json`, and remove files that no unit lists.

        Raises UserError when more documents are unreadable than `data.max_rejected` allows, none is held out, or
        nothing can be trained on.
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
            long_dialogues=self.data.long_dialogues if self.data.has_loss_mask else "",
            train_tokens=sum(entry.tokens for entry in train),
            held_out_tokens=sum(entry.tokens for entry in held_out),
            train_bytes=sum(entry.bytes for entry in train),
            held_out_bytes=sum(entry.bytes for entry in held_out),
            train=train,
            held_out=held_out,
            stripe=self.stripe_options,
        )
        told = [(unit.lines, unit.rejected) for unit in units]
        readable = manifest.documents + sum(unit.long_left_out for unit in units)
        list_rejected(self.path / "rejected.jsonl", self.plan, told, readable, self.data.max_rejected)
        if not manifest.documents and manifest.long_documents:
            raise UserError(
                "data.all_too_long",
                f"data.long_dialogues: {self.data.long_dialogues}: nothing is left of all {manifest.long_documents:,} "
                f"documents, which have more than data.sequence_length ({self.data.sequence_length}) tokens: set a "
                "larger sequence_length, or long_dialogues: split",
            )
        if self.data.held_out and not held_out:
            raise UserError(
                "data.no_held_out",
                f"data.held_out: none of {manifest.documents} documents falls into the held-out fraction "
                f"{self.data.held_out}, so nothing could be evaluated: set a larger fraction, add documents, "
                "or set 0",
            )
        self.check_usable(train)
        write_manifest(self.path / "manifest.json", manifest)
        listed = {self.path / entry.file for entry in (*train, *held_out)}
        listed |= {self.unit_path(number) for number in range(self.count)}
        folder = self.path / SHARDS_DIR
        hashed = (path for ending in ("hashes", "twice") for path in folder.glob(f".unit-*.{ending}.*.tmp"))
        for path in {*folder.glob("unit-*"), *hashed} - listed:
            path.unlink(missing_ok=True)
        log(f"shard: {manifest}")


Encoded = TypeVar("Encoded")
_BATCH = 1 << 18  # characters for each core: enough to keep the tokenizer busy, little enough for its caches
_MOST_CORES = 16
"""For so many a batch is made, so that memory does not grow with cores: 32 to 43 bytes a character of short documents.
100 MB in documents of 4,000 characters peaked at 83 MB for 2 cores, 248 MB for 16, 1,502 MB for 128 without this bound
(pretended ones: the machine had 2; the speed on more than 16 was not measured)."""


def select_kept(documents: Iterator[Document], kept: Sequence[bool]) -> Iterator[Document]:
    """Those that are kept. Raises UserError where there are more, or fewer, than when they were hashed."""
    number = 0
    for number, document in enumerate(documents, 1):
        if number <= len(kept) and kept[number - 1]:
            yield document
    if number != len(kept):
        raise UserError(
            "data.filter_not_repeatable",
            f"{len(kept)} documents were hashed, {number} read again: data.filter must say the same again",
        )


def encode_ahead(
    encode: Callable[[list[Document]], Encoded], documents: Iterator[list[Document]]
) -> Iterator[tuple[list[Document], Encoded]]:
    """Each batch with its tokens. One is tokenised, on all cores, while the next is read and the last one written."""
    with ThreadPoolExecutor(1) as pool:
        under_way = None
        for batch in documents:
            before, under_way = under_way, (batch, pool.submit(encode, batch))
            if before is not None:
                yield before[0], before[1].result()
        if under_way is not None:
            yield under_way[0], under_way[1].result()


def make_batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Batches for the tokenizer."""
    batch: list[Document] = []
    size, enough = 0, _BATCH * min(len(os.sched_getaffinity(0)), _MOST_CORES)
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= enough:
            yield batch
            batch, size = [], 0
    yield batch


Unit = tuple[Sequence[int], Sequence[tuple[int, int, str]]]
"""Lines that start in each of its pieces; of each document that could not be read piece, line within it and reason."""
_ALWAYS_ALLOWED = 5
"""As many unreadable documents are accepted on small inputs, if at least half of all documents can be read."""


def allowed_rejections(limit: float, total: int) -> float:
    """Return how many of `total` documents may be unreadable: the fraction `limit`, and on small inputs a few.

    `limit` 0 allows none.
    """
    return max(limit * total, min(_ALWAYS_ALLOWED, total / 2)) if limit else 0


def list_rejected(listing: Path, plan: WorkPlan, units: Sequence[Unit], documents: int, limit: float) -> None:
    """Write `rejected.jsonl`: file, line (from 1; parquet: row) and reason.

    documents: those that can be read. Raises UserError if more than `allowed_rejections` cannot.
    """
    before = [0] * len(plan.inputs)  # lines of each input in the pieces so far: units and pieces are in its order
    rows: list[dict[str, str | int]] = []
    for (lines, rejected), pieces in zip(units, plan.units, strict=True):
        starts = []
        for piece, count in zip(pieces, lines, strict=True):
            starts.append(before[piece.input])
            before[piece.input] += count
        for place, line, reason in rejected:
            path = plan.inputs[pieces[place].input].path
            rows.append({"file": path, "line": starts[place] + line, "reason": reason})
    write_atomic(listing, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    total = documents + len(rows)
    if len(rows) > allowed_rejections(limit, total):
        first = rows[0]
        raise UserError(
            "data.too_many_rejected",
            f"{len(rows)} of {total} documents ({len(rows) / total:.2%}) cannot be read, more than "
            f"data.max_rejected ({limit:.2%}) allows; the first is {first['file']} line "
            f"{first['line']}: {first['reason']}; all are in {listing}. Mend or remove them, or raise "
            "data.max_rejected",
        )
