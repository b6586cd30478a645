"""Prepare: fix the tokenizer and the work units before any task starts, in one process.

    1. list the inputs;
    2. take a sample of documents, spread evenly over the inputs, without the held-out ones;
    3. train the byte-level BPE on it, or copy the given `tokenizer.json`;
    4. cut the inputs into units of about one shard each, from the sample's bytes per token;
    5. write `tokenizer.json`, `units.json` and, last, `prepare.json` with their sizes and hashes.

Each step is a function of config and inputs, so a second run on another node gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data_prep.manifest import (
    FileEntry,
    Prepared,
    load_prepared,
    prepare_key,
    prepare_missing,
    shard_missing,
    write_manifest,
)
from data_prep.sources import Input, find_inputs, parquet_groups, read_documents, reading
from data_prep.tokenizer import Encoder, load_encoder, train_bpe
from data_prep.units import Plan, cut, read_plan, total_bytes, unit_count, write_plan
from pipeline.config import DataConfig
from pipeline.errors import UserError
from pipeline.files import sha256_file, write_atomic

_SLICES = 256  # places of the source where a sample is taken
_ESTIMATE_BYTES = 1 << 20  # what bytes per token are estimated on


def is_held_out(text: bytes, fraction: float) -> bool:
    """Whether a document (its UTF-8 bytes) is held out: its SHA-256, as a fraction of all hashes, is below `fraction`.

    Only the text decides, so duplicates fall on one side, whatever their file or place.
    """
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") < fraction * 2**64


def prepare(data: DataConfig, data_dir: Path, log: Callable[[str], None]) -> None:
    """Write `tokenizer.json`, `units.json` and `prepare.json`; returns at once when they are there and valid.

    Lists the inputs again as long as shards are to be written, and starts over when they have changed. Raises
    UserError for a source or tokenizer that cannot be used.
    """
    done = prepare_missing(data, data_dir) is None
    if done and (shard_missing(data, data_dir) is None or _same_inputs(data, data_dir)):
        return
    data_dir.mkdir(parents=True, exist_ok=True)
    inputs = find_inputs(data)
    groups = {i: parquet_groups(s.path, data.text_field) for i, s in enumerate(inputs) if s.format == "parquet"}
    total = total_bytes(inputs, groups)
    if total == 0:
        raise UserError(f"data.source: the {len(inputs)} files of {', '.join(data.sources)} hold no text")
    log(f"prepare: {len(inputs)} files, about {total:,} bytes")

    trained = data.tokenizer.kind == "byte_bpe"
    sample = take_sample(data, inputs, groups, data.tokenizer.train_bytes if trained else _ESTIMATE_BYTES)
    if not sample:
        raise UserError(_why_nothing(data, inputs, groups))
    tokenizer_path = data_dir / "tokenizer.json"
    if trained:
        content = train_bpe(sample, data.tokenizer.vocab_size, data.tokenizer.eos_token).encode()
    else:
        assert data.tokenizer.path is not None  # the config's validator
        load_encoder(data.tokenizer.path, data.tokenizer.eos_token)  # complains about the file that the user named
        content = data.tokenizer.path.read_bytes()
    write_atomic(tokenizer_path, content)
    encoder = load_encoder(tokenizer_path, data.tokenizer.eos_token)
    if trained and encoder.vocab_size < data.tokenizer.vocab_size:
        log(f"prepare: the text gives {encoder.vocab_size} tokens, not {data.tokenizer.vocab_size}")

    bytes_per_token = _bytes_per_token(encoder, sample)
    plan = Plan(tuple(inputs), cut(inputs, groups, unit_count(total, data.shard_tokens, bytes_per_token)))
    write_plan(data_dir / "units.json", plan)
    prepared = Prepared(
        key=prepare_key(data),
        tokenizer=_entry(tokenizer_path),
        units=_entry(data_dir / "units.json"),
        unit_count=len(plan.units),
        vocab_size=encoder.vocab_size,
        eos_id=encoder.eos_id,
        dtype=encoder.dtype,
    )
    write_manifest(data_dir / "prepare.json", prepared)
    log(f"prepare: {encoder.vocab_size} token ids, {bytes_per_token:.2f} bytes per token, {len(plan.units)} units")


def take_sample(
    data: DataConfig, inputs: Sequence[Input], groups: Mapping[int, Sequence[int]], limit: int
) -> list[str]:
    """Texts of at most `limit` bytes in all, from places spread evenly over the inputs, without held-out ones.

    All of them where the inputs are no larger than `limit`. Each place gives its share from its first documents
    on; what one place lacks, the later ones may take.
    """
    small = total_bytes(inputs, groups) <= limit
    slices = cut(inputs, groups, 1 if small else _SLICES)
    sample: list[str] = []
    left = limit
    for index, pieces in enumerate(slices):
        share = left // (len(slices) - index)
        documents = (
            document.text.encode()
            for number, start, end in pieces
            for document in read_documents(inputs[number], start, end, data.text_field)
        )
        while share > 0 and (text := next(documents, None)) is not None:
            if text and not is_held_out(text, data.held_out):
                part = text[:share]
                sample.append(part.decode(errors="ignore"))
                share -= len(part)
                left -= len(part)
    return sample


def _why_nothing(data: DataConfig, inputs: Sequence[Input], groups: Mapping[int, Sequence[int]]) -> str:
    """Words for a source without one document to train on, from its first unreadable document, if any."""
    for number, start, end in cut(inputs, groups, 1)[0]:
        for document in read_documents(inputs[number], start, end, data.text_field):
            if document.reason is not None:
                return (
                    f"data.source: there is no document to train on. {inputs[number].path} line {document.line}: "
                    f"{document.reason}. Mend the files, or set data.text_field ({data.text_field!r})"
                )
    return (
        f"data.source: all documents of {', '.join(data.sources)} are empty or held out: name more files, or lower "
        f"data.held_out ({data.held_out})"
    )


def _bytes_per_token(encoder: Encoder, sample: Sequence[str]) -> float:
    """Bytes of text per token, on documents spread over the sample."""
    every = sum(len(text) for text in sample) // _ESTIMATE_BYTES + 1
    texts = list(sample[::every])
    tokens = sum(len(tokens) for tokens in encoder.encode(texts))
    return sum(len(text.encode()) for text in texts) / tokens if tokens else 1.0


def _entry(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=sha256_file(path))


def _same_inputs(data: DataConfig, data_dir: Path) -> bool:
    """Whether the source names the same unchanged files as before, and the given tokenizer is still the same."""
    given = data.tokenizer.path
    if given is not None:
        with reading(str(given)):
            if sha256_file(given) != load_prepared(data_dir).tokenizer.sha256:
                return False
    return tuple(find_inputs(data)) == read_plan(data_dir / "units.json").inputs
