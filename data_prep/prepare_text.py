"""The prepare stage for text: choose the tokenizer and the work units in one process, before the shard stage starts.

    1. Find the inputs.
    2. Take a sample of documents that are spread evenly over the inputs and not held out.
    3. Train a byte-level BPE on the sample, or copy the given `tokenizer.json`. For dialogues, also copy the chat
       template.
    4. Split the inputs into work units of about one shard each, based on the bytes per token of the sample.

Each step depends only on config and inputs, so the stage writes the same bytes on every node.
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

_SAMPLE_POINTS = 256
"""Number of ranges of the inputs that contribute to the sample."""
_MAX_FILTERED_RATIO = 64
"""Limit of the bytes that the user's filter checks in a range, as a multiple of the range's share of the sample.

After this limit, sampling continues with the next range. Before the first document of the sample is found, there is no
limit.
"""
_ESTIMATE_BYTES = 1 << 20
"""Approximate bytes of text from which the bytes per token are estimated."""
_MAX_UNKNOWN_FRACTION = 0.01
"""Maximum fraction of unknown tokens, which replace text that the given tokenizer cannot encode."""


def prepare_tokenizer_and_units(
    data: DataConfig, folder: Path, log: Callable[[str], None], document_filter: DocumentFilter | None
) -> tuple[Encoder, int, str]:
    """Write `tokenizer.json`, `units.json` and, for dialogues, `chat.json` to a data folder.

    Args:
        data: the section `data` of the config.
        folder: the data folder.
        log: function that writes a message.
        document_filter: the user's filter; None if no filter is set.

    Returns: the encoder, the number of work units, and a summary of the inputs and their problems.

    Raises UserError if the inputs or the tokenizer cannot be used.
    """
    inputs = find_inputs(data)
    weights = measure_inputs(inputs, data.text_field)
    total_bytes = sum(map(sum, weights))
    if total_bytes == 0:
        raise UserError(
            "data.no_text", f"data.source: the {len(inputs)} files of {', '.join(data.sources)} contain no text"
        )
    summary = f"{len(inputs):,} file{'s' * (len(inputs) != 1)}, an estimated {total_bytes:,} bytes of text"
    summary += _describe_ignored_files(data, inputs)

    chat = None
    if data.records == "messages" and data.tokenizer.path is not None:
        chat = build_chat_json(data.tokenizer.path, data.tokenizer.eos_token, str(data.chat_template or ""))
        write_atomic(folder / CHAT_FILE, chat)
    record_reader = make_record_reader(data, chat)
    sample_bytes = data.tokenizer.train_bytes if data.tokenizer.path is None else _ESTIMATE_BYTES
    sample = take_sample(data, inputs, weights, sample_bytes, record_reader, document_filter)
    if not sample:
        raise _make_no_documents_error(data, inputs, weights, record_reader, document_filter)
    encoder = _write_tokenizer(data, folder, sample, log)
    if chat is not None:
        _log_end_of_turn(encoder, json.loads(chat), log)

    bytes_per_token, unknown_fraction = _measure_tokens(encoder, sample)
    if unknown_fraction:
        path = data.tokenizer.path
        problem = f"{unknown_fraction:.2%} of the tokens are unknown tokens: {path} cannot encode their text"
        if unknown_fraction > _MAX_UNKNOWN_FRACTION:
            raise UserError(
                "data.unknown_text",
                f"data.tokenizer.path: {problem}, so bits per byte would be meaningless. Use a tokenizer that can "
                "encode this text, or set data.tokenizer: {kind: byte_bpe}, which can encode any text",
            )
        summary += f"; {problem}, so bits per byte are too low"
    unit_count = count_units(total_bytes, data.shard_tokens, bytes_per_token)
    plan = WorkPlan(tuple(inputs), split_into_units(inputs, weights, unit_count))
    write_plan(folder / "units.json", plan)
    log(f"prepare: {summary}; {encoder.vocab_size} ids, {bytes_per_token:.2f} bytes per token, {len(plan.units)} units")
    return encoder, len(plan.units), summary


def _describe_ignored_files(data: DataConfig, inputs: Sequence[Input]) -> str:
    """Return text about files in the configured folders that are not inputs; empty if there are no such files."""
    folders = filter(os.path.isdir, map(os.path.expanduser, data.sources))
    paths = {os.path.abspath(path) for folder in folders for path in list_files(folder, [""])}
    ignored = paths - {source.path for source in inputs}
    if not ignored:
        return ""
    endings = sorted({os.path.splitext(path)[1] or "no ending" for path in ignored})
    return f"; left out {len(ignored):,} of other kinds: {', '.join(endings[:5])}" + ", …" * (len(endings) > 5)


def _write_tokenizer(data: DataConfig, folder: Path, sample: Sequence[str], log: Callable[[str], None]) -> Encoder:
    """Write `tokenizer.json`, and return an encoder with this tokenizer.

    The tokenizer is copied from `data.tokenizer.path`. Without this key, it is trained on the texts of the sample.
    Raises UserError if the file cannot be used.
    """
    config = data.tokenizer
    if config.path is None:
        content = train_bpe(sample, config.vocab_size, config.eos_token).encode()
    else:
        # Load the user's file, not the copy, so that errors name the user's file.
        load_encoder(config.path, config.eos_token, data.add_special_tokens)
        content = config.path.read_bytes()
    write_atomic(folder / "tokenizer.json", content)
    encoder = load_encoder(folder / "tokenizer.json", config.eos_token, data.add_special_tokens)
    if config.path is None and encoder.vocab_size < config.vocab_size:
        log(f"prepare: the text is only enough for {encoder.vocab_size} tokens, not {config.vocab_size}")
    return encoder


def _log_end_of_turn(encoder: Encoder, chat: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Log the token that ends the answers of dialogues, or a warning if the model cannot learn to end an answer."""
    turn = find_end_of_turn(ChatTemplate(chat["template"], chat["tokens"]), encoder.tokenizer)
    if turn.problem:
        log(
            f"warning: {turn.problem}. The model does not learn to end an answer: let the chat template write one "
            "special token after each answer"
        )
    else:
        names = [str(encoder.tokenizer.id_to_token(token_id)) for token_id in turn.ids]
        log(f"prepare: answers end with {' or '.join(names)}")


def take_sample(
    data: DataConfig,
    inputs: Sequence[Input],
    weights: Weights,
    limit: int,
    record_reader: RecordReader | None = None,
    document_filter: DocumentFilter | None = None,
) -> list[str]:
    """Return texts of at most `limit` bytes in total, spread evenly over the inputs, without held-out documents.

    If the inputs have at most `limit` bytes, all documents are returned. Otherwise the inputs are split into ranges,
    and each range contributes its first documents. If a range has too little text, later ranges contribute more. If the
    filter excludes nearly everything, the sample is smaller than `limit`.

    Args:
        data: the section `data` of the config.
        inputs: the input files.
        weights: the result of `measure_inputs`.
        limit: maximum bytes of text.
        record_reader: function that converts an object to a record; None for plain text.
        document_filter: the user's filter; None if no filter is set.
    """
    filtered_bytes = 0  # approximate size of the documents of the current range that the filter has checked

    def count_and_filter(document: Mapping[str, Any]) -> bool:
        """Return the result of the user's filter, and add the size of the document to `filtered_bytes`."""
        nonlocal filtered_bytes
        filtered_bytes += len(str(document))
        return document_filter is not None and document_filter(document)

    sampled_units = split_into_units(inputs, weights, 1 if sum(map(sum, weights)) <= limit else _SAMPLE_POINTS)
    max_filtered_bytes = _MAX_FILTERED_RATIO * limit // len(sampled_units)
    sample: list[str] = []
    remaining = limit
    for index, ranges in enumerate(sampled_units):
        share = remaining // (len(sampled_units) - index)
        filtered_bytes = 0
        documents = _read_ranges(data, inputs, ranges, record_reader, count_and_filter if document_filter else None)
        texts = (document.text.encode() for _, document in documents)
        while share > 0 and (filtered_bytes < max_filtered_bytes or not sample):
            if (text := next(texts, None)) is None:
                break
            if text and not is_held_out(text, data.held_out):
                used_text = text[:share]
                sample.append(used_text.decode(errors="ignore"))
                share -= len(used_text)
                remaining -= len(used_text)
    return sample


def _read_ranges(
    data: DataConfig,
    inputs: Sequence[Input],
    ranges: Sequence[InputRange],
    record_reader: RecordReader | None,
    document_filter: DocumentFilter | None,
) -> Iterator[tuple[Input, Document]]:
    """Yield the documents of input ranges in order, each with the input that contains it."""
    for index, start, end in ranges:
        for document in read_documents(inputs[index], start, end, data.text_field, record_reader, document_filter):
            yield inputs[index], document


def _make_no_documents_error(
    data: DataConfig,
    inputs: Sequence[Input],
    weights: Weights,
    record_reader: RecordReader | None,
    document_filter: DocumentFilter | None,
) -> UserError:
    """Return the error for inputs without any training document.

    The message names the first unreadable document. If all documents can be read, it says that they are empty, held out
    or excluded by the filter.
    """
    ranges = split_into_units(inputs, weights, 1)[0]
    for source, document in _read_ranges(data, inputs, ranges, record_reader, document_filter):
        if document.reason and document.reason != FILTERED:
            key = f"data.text_field ({data.text_field!r})"
            if record_reader is not None:
                key = f"data.records ({data.records})"
            advice = f"Repair the files, or set {key}"
            if "JSON" in document.reason:
                advice = 'A .jsonl file has a JSON object in each line, such as {"text": …}; plain text is .txt'
            if "data.chat_template" in document.reason:
                advice = "Or use files without such dialogues"
            return UserError(
                "data.no_documents",
                f"data.source: there is no document to train on. {source.path} line {document.line}: "
                f"{document.reason}. {advice}",
            )
    filter_text = f" or excluded by {data.filter}" if data.filter else ""
    return UserError(
        "data.no_documents",
        f"data.source: all documents of {', '.join(data.sources)} are empty or held out{filter_text}: add files, or "
        f"reduce data.held_out ({data.held_out})",
    )


def _measure_tokens(encoder: Encoder, sample: Sequence[str]) -> tuple[float, float]:
    """Return the bytes of text per token and the fraction of unknown tokens, measured on some texts of the sample.

    If the texts have no token, the result is (1.0, 0.0).
    """
    step = sum(len(text) for text in sample) // _ESTIMATE_BYTES + 1
    texts = list(sample[::step])
    token_count = 0
    unknown_count = 0
    for tokens in encoder.encode(texts):
        token_count += len(tokens)
        # The last token of each text is the end-of-text token, so it is not checked.
        if encoder.unknown_id is not None:
            unknown_count += int((tokens[:-1] == encoder.unknown_id).sum())
    if not token_count:
        return 1.0, 0.0
    return sum(len(text.encode()) for text in texts) / token_count, unknown_count / token_count
