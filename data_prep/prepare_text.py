"""Prepare: fix the tokenizer and the work units before any task starts, in one process.

    1. list the inputs;
    2. take a sample of documents, spread evenly over the inputs, without the held-out ones;
    3. train the byte-level BPE on it, or copy the given `tokenizer.json` (for dialogues, the chat template too);
    4. cut the inputs into units of about one shard each, from the sample's bytes per token.

Each step is a function of config and inputs, so a second run on another node gives the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.documents import FILTERED, Document, DocumentFilter, Input, RecordReader, read_documents
from data_prep.find_inputs import find_inputs, list_files
from data_prep.records import build_chat_json, make_record_reader
from data_prep.tokenizer import Encoder, load_encoder, train_bpe
from data_prep.work_units import (
    InputRange,
    Weights,
    WorkPlan,
    count_units,
    is_held_out,
    measure_inputs,
    split_into_units,
    write_plan,
)
from pipeline.base.errors import UserError
from pipeline.base.files import write_atomic
from pipeline.config.datasets import DataConfig
from pipeline.data.chat_template import ChatTemplate
from pipeline.data.manifest import CHAT_FILE
from pipeline.data.special_tokens import find_end_of_turn

_SLICES = 256  # places of the source where a sample is taken
_LOOKED_AT = 64  # times what places are to give: so much is read for what a filter takes
_ESTIMATE_BYTES = 1 << 20  # what bytes per token are estimated on
_MOST_UNKNOWN = 0.01  # of the tokens


def prepare_tokenizer_and_units(
    data: DataConfig, folder: Path, log: Callable[[str], None], keep: DocumentFilter | None
) -> tuple[Encoder, int, str]:
    """Write `tokenizer.json`, `units.json` and, for dialogues, `chat.json`; the tokenizer, the number of units, and
    what a person should know of the inputs.

    Raises UserError for a source or tokenizer that cannot be used.
    """
    inputs = find_inputs(data)
    weights = measure_inputs(inputs, data.text_field)
    total = sum(map(sum, weights))
    if total == 0:
        raise UserError(
            "data.no_text", f"data.source: the {len(inputs)} files of {', '.join(data.sources)} hold no text"
        )
    told = f"{len(inputs):,} file{'s' * (len(inputs) != 1)}, about {total:,} bytes"
    folders = filter(os.path.isdir, map(os.path.expanduser, data.sources))
    if others := {os.path.abspath(path) for one in folders for path in list_files(one, [""])} - {
        i.path for i in inputs
    }:
        kinds = sorted({os.path.splitext(path)[1] or "no ending" for path in others})
        told += f"; left out {len(others):,} of other kinds: {', '.join(kinds[:5])}" + ", …" * (len(kinds) > 5)

    wanted, chat = data.tokenizer, None
    if data.records == "messages" and wanted.path is not None:
        chat = build_chat_json(wanted.path, wanted.eos_token, str(data.chat_template or ""))
        write_atomic(folder / CHAT_FILE, chat)
    read = make_record_reader(data, chat)
    sample = take_sample(
        data, inputs, weights, wanted.train_bytes if wanted.path is None else _ESTIMATE_BYTES, read, keep
    )
    if not sample:
        raise UserError("data.no_documents", _why_nothing(data, inputs, weights, read, keep))
    if wanted.path is None:
        content = train_bpe(sample, wanted.vocab_size, wanted.eos_token).encode()
    else:
        # complains about the file that the user named
        load_encoder(wanted.path, wanted.eos_token, data.add_special_tokens)
        content = wanted.path.read_bytes()
    write_atomic(folder / "tokenizer.json", content)
    encoder = load_encoder(folder / "tokenizer.json", wanted.eos_token, data.add_special_tokens)
    if chat is not None:
        _log_end_of_turn(encoder, json.loads(chat), log)
    if wanted.path is None and encoder.vocab_size < wanted.vocab_size:
        log(f"prepare: the text gives {encoder.vocab_size} tokens, not {wanted.vocab_size}")

    bytes_per_token, unknown = _estimates(encoder, sample)
    if unknown:
        lost = f"{unknown:.2%} of the tokens stand for text that {wanted.path} does not know, and which is lost"
        if unknown > _MOST_UNKNOWN:
            raise UserError(
                "data.unknown_text",
                f"data.tokenizer.path: {lost}: bits per byte would say nothing. Name one that knows this text, or "
                "write data.tokenizer: {kind: byte_bpe}, which knows any",
            )
        told += f"; {lost}, so bits per byte are too low"
    plan = WorkPlan(
        tuple(inputs), split_into_units(inputs, weights, count_units(total, data.shard_tokens, bytes_per_token))
    )
    write_plan(folder / "units.json", plan)
    log(f"prepare: {told}; {encoder.vocab_size} ids, {bytes_per_token:.2f} bytes per token, {len(plan.units)} units")
    return encoder, len(plan.units), told


def _log_end_of_turn(encoder: Encoder, chat: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Say which token a model that learns these dialogues ends its answers with, or why it will not end them."""
    turn = find_end_of_turn(ChatTemplate(chat["template"], chat["tokens"]), encoder.tokenizer)
    if turn.problem:
        log(
            f"warning: {turn.problem}. The model does not learn to end an answer: let the chat template write one "
            "special token behind it"
        )
    else:
        log(f"prepare: answers end with {' or '.join(str(encoder.tokenizer.id_to_token(one)) for one in turn.ids)}")


def take_sample(
    data: DataConfig,
    inputs: Sequence[Input],
    weights: Weights,
    limit: int,
    read: RecordReader | None = None,
    keep: DocumentFilter | None = None,
) -> list[str]:
    """Texts of at most `limit` bytes in all, from places spread evenly over the inputs, without held-out ones.

    All of them where the inputs are no larger than `limit`. Each place gives its share from its first documents
    on; what one place lacks, the later ones may take. Where the filter leaves out nearly all, the sample stays smaller.
    """
    asked = 0  # about how many bytes the filter was asked about

    def counted(document: Mapping[str, Any]) -> bool:
        nonlocal asked
        asked += len(str(document))
        return keep is not None and keep(document)

    slices = split_into_units(inputs, weights, 1 if sum(map(sum, weights)) <= limit else _SLICES)
    sample: list[str] = []
    left = limit
    for index, pieces in enumerate(slices):
        share = left // (len(slices) - index)
        most, asked = _LOOKED_AT * limit // len(slices), 0
        documents = _read(data, inputs, pieces, read, counted if keep else None)
        texts = (document.text.encode() for _, document in documents)
        while share > 0 and (asked < most or not sample) and (text := next(texts, None)) is not None:
            if text and not is_held_out(text, data.held_out):
                part = text[:share]
                sample.append(part.decode(errors="ignore"))
                share -= len(part)
                left -= len(part)
    return sample


def _read(
    data: DataConfig,
    inputs: Sequence[Input],
    pieces: Sequence[InputRange],
    read: RecordReader | None,
    keep: DocumentFilter | None,
) -> Iterator[tuple[Input, Document]]:
    """The documents of some pieces, in order, each with its input."""
    for index, start, end in pieces:
        for document in read_documents(inputs[index], start, end, data.text_field, read, keep):
            yield inputs[index], document


def _why_nothing(
    data: DataConfig, inputs: Sequence[Input], weights: Weights, read: RecordReader | None, keep: DocumentFilter | None
) -> str:
    """Words for a source without one document to train on, from its first unreadable document, if any."""
    for source, document in _read(data, inputs, split_into_units(inputs, weights, 1)[0], read, keep):
        if document.reason and document.reason != FILTERED:
            key = f"data.text_field ({data.text_field!r})" if read is None else f"data.records ({data.records})"
            out = f"Mend the files, or set {key}"
            if "JSON" in document.reason:
                out = 'A file .jsonl has a JSON object in each line, such as {"text": …}; plain text is .txt'
            if "data.chat_template" in document.reason:
                out = "Or name files without such dialogues"
            return (
                f"data.source: there is no document to train on. {source.path} line {document.line}: "
                f"{document.reason}. {out}"
            )
    or_filtered = f" or left out by {data.filter}" if data.filter else ""
    return (
        f"data.source: all documents of {', '.join(data.sources)} are empty or held out{or_filtered}: name more files, "
        f"or lower data.held_out ({data.held_out})"
    )


def _estimates(encoder: Encoder, sample: Sequence[str]) -> tuple[float, float]:
    """Bytes of text per token, and the fraction of tokens that are unknown, on documents spread over the sample."""
    every = sum(len(text) for text in sample) // _ESTIMATE_BYTES + 1
    texts = list(sample[::every])
    tokens = unknown = 0
    for found in encoder.encode(texts):
        tokens += len(found)
        if encoder.unknown_id is not None:  # the last one ends the document
            unknown += int((found[:-1] == encoder.unknown_id).sum())
    return (sum(len(text.encode()) for text in texts) / tokens, unknown / tokens) if tokens else (1.0, 0.0)
