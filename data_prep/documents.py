"""Read the documents of input files. `data_prep/find_inputs.py` decides which files are inputs.

:func:`read_documents` reads an input range: a part of one file that belongs to one work unit.

    kind        files                         a document is                              a range is
    text        .txt, Python's own .py files  the whole file                             the whole file
    lines       .txt, `text_documents: line`  a line without its line end                bytes [start, end)
    jsonl       .jsonl, .ndjson               the object of a line: its `text_field`,    bytes [start, end)
                                              or as `data.records` describes
    json        .json                         an object of the array, or of the file     bytes [start, end)
    csv, tsv    .csv, .tsv                    the column `text_field` of a row           the whole file
    parquet     .parquet                      the column `text_field` of a row           row groups [start, end)
    arrow       .arrow (Hugging Face)         the column `text_field` of a row           the whole file
    tar         .tar, .tar.gz (WebDataset)    a .txt member, or the field of a .json     the whole file

The file name decides how a file is split into ranges. The content decides how the file is read. For example, a file
with several ranges may be compressed, or may be one JSON array. The range that starts at byte 0 then yields all
documents, and the other ranges yield none.

Text is strict UTF-8 and used unchanged, except that a byte order mark at the start of a file is removed.
"""

from __future__ import annotations

import ast
import codecs
import csv
import importlib.util
import json
import lzma
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from pathlib import Path
from tarfile import HeaderError, ReadError
from textwrap import shorten
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from data_prep.file_type import (
    BOM,
    COMPRESSIONS,
    HEAD_BYTES,
    UTF16,
    UTF16_HINT,
    FileType,
    detect_binary_format,
    detect_json_kind,
    is_text,
    open_decompressed,
)
from pipeline.base.command import format_command
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import translate_read_errors

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

MAX_DOCUMENT_BYTES = 1 << 26
"""Maximum size of a document or line in bytes.

Tokenizing takes about 140 bytes of memory per byte of text (measured up to 32 MB).
"""
MAX_JSON_VALUES = 1 << 22
"""Maximum number of names and values in one JSON object. Each of them takes up to 240 bytes of memory."""
MAX_JSON_DEPTH = 100
"""Maximum nesting of arrays and objects in a JSON object. Python's own limit depends on the depth of the call stack."""
MAX_COMPRESSION_RATIO = 1 << 14
"""An array that is more than this many times larger than its stored bytes is considered damaged.

Deflate reaches a ratio of 1032 (zlib.net/zlib_tech.html).
"""
_BLOCK_BYTES = 1 << 20
"""Number of bytes that are read at once."""


# -- inputs ----------------------------------------------------------------------------------------------


class InputFormat(NamedTuple):
    """The format of a file by its name, and how the file is split into ranges."""

    kind: str
    """How the file is read; see the table at the start of this module."""
    splits: bool = False
    """Whether an input range is a range of bytes. Otherwise it is the whole file or, for Parquet, some row groups."""
    expansion: int = 1
    """Estimated bytes of text per byte of the file, to balance the work units. Above 1 only for compressed files."""


def compressed_format(kind: str, ending: str) -> str:
    """Return the name of the format for compressed files of a kind, such as `csv.gz`."""
    # Two formats keep the names that they have in older data folders.
    return {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(kind + ending, kind + ending)


_KIND_ENDINGS = {
    "text": [".txt"],
    "jsonl": [".jsonl", ".ndjson"],
    "json": [".json"],
    "csv": [".csv"],
    "tsv": [".tsv"],
}
"""File name endings of the kinds whose files may be compressed."""
FORMATS = {kind: InputFormat(kind, splits=kind in ("lines", "jsonl", "json")) for kind in (*_KIND_ENDINGS, "lines")}
FORMATS |= {
    compressed_format(kind, ending): InputFormat(kind, expansion=expansion)
    for kind in (*_KIND_ENDINGS, "lines")
    for ending, expansion in COMPRESSIONS.items()
}
FORMATS |= {kind: InputFormat(kind) for kind in ("parquet", "arrow", "tar")}
"""The formats by their names in `units.json`."""
ENDINGS = {ending: kind for kind, endings in _KIND_ENDINGS.items() for ending in endings}
ENDINGS |= {
    ending + compression: compressed_format(kind, compression)
    for kind, endings in _KIND_ENDINGS.items()
    for ending in endings
    for compression in COMPRESSIONS
}
ENDINGS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".tgz": "tar"}
ENDINGS |= {f".tar{ending}": "tar" for ending in ("", *COMPRESSIONS)}
"""The format of each file name ending. A .txt file may also have the format `lines`."""


class Input(NamedTuple):
    """An input file as it was when `prepare` listed it."""

    path: str
    """Absolute path."""
    size: int
    """Size in bytes."""
    mtime_ns: int
    """Modification time in nanoseconds."""
    format: str
    """A name in `FORMATS`, or the format of a file of tokens or samples."""
    index_files: Sequence[Sequence[Any]] = []
    """Path, size and modification time of each file that is read together with this file, such as an index."""

    @property
    def splits(self) -> bool:
        """Whether an input range is a range of bytes (see `InputFormat.splits`)."""
        return FORMATS[self.format].splits

    @property
    def text_bytes(self) -> int:
        """Estimated bytes of text in the file."""
        return self.size * FORMATS[self.format].expansion

    def find_problem(self) -> str | None:
        """Return how the file or one of its index files has changed, and what to do; None if all are unchanged.

        Sizes and modification times are compared.
        """
        advice = (
            f"restore the file, or prepare the data again from the present files: {format_command('resume', 'RUN')}"
        )
        for path, *recorded in ((self.path, self.size, self.mtime_ns), *self.index_files):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                return f"input {path} has been removed since it was prepared: {advice}"
            if [status.st_size, status.st_mtime_ns] != recorded:
                return f"input {path} has changed since it was prepared: {advice}"
        return None

    def check(self) -> None:
        """Raise InputError with the name of the file if the file or one of its index files has changed."""
        if problem := self.find_problem():
            raise InputError("data.input_changed", problem)


# -- documents -------------------------------------------------------------------------------------------

Spans = tuple[tuple[int, int], ...]
"""Spans [start, end) of characters in a text."""


class Document(NamedTuple):
    """A line, row or whole file: its text, or the reason why it is rejected."""

    line: int
    """Number of the line (for a table: row) within the input range, from 1.

    If the document is a whole file: 1, or the line of the first invalid byte.
    """
    text: str
    """The text; empty for a blank line and for a rejected document."""
    reason: str | None = None
    """Why the document is rejected; None if it is accepted."""
    learned: Spans = ()
    """For a record (`data.records`): the spans of the text that contribute to the loss. For plain text: unused."""


FILTERED = "left out by data.filter"
"""The `reason` of a document that the user's filter excluded. Such a document does not count as unreadable."""

Record = tuple[str, Spans]
"""The text of a record such as a dialogue, and the spans of this text that contribute to the loss."""
RecordReader = Callable[[dict[str, Any]], Record]
"""Function that converts the object of a line to a record. Raises RejectedError if the object has another form."""


class RejectedError(ValueError):
    """Error for a line or row that contains no usable document. The message is the reason."""


def read_documents(
    source: Input,
    start: int,
    end: int,
    text_field: str,
    record_reader: RecordReader | None = None,
    document_filter: DocumentFilter | None = None,
) -> Iterator[Document]:
    """Yield a :class:`Document` for each line, row or file of an input range, in order. Blank lines have empty text.

    Args:
        source: the file.
        start, end: the range, in bytes or row groups. A range of bytes contains the lines that start in [start, end),
            so each line is yielded once, no matter how a file is split.
        text_field: `data.text_field`.
        record_reader: function that converts an object to a record; None for plain text.
        document_filter: the user's filter. Documents that it excludes are yielded with the reason `FILTERED`.

    Raises UserError with the name of the file if the file cannot be read at all, or if `document_filter` fails.
    """
    line = 0
    with translate_read_errors(source.path):
        try:
            for document in _read_by_format(source, start, end, text_field, record_reader, document_filter):
                line = document.line
                yield document
        except FilterError as error:
            position = f"record {line + 1}" + (f" after byte {start:,}" if start else "")
            raise UserError("data.filter_failed", f"data.filter: {source.path}, {position}: {error}") from error


OBJECT_KINDS = ("jsonl", "json", "csv", "tsv")
"""The kinds of files that contain objects."""


def _read_by_format(
    source: Input,
    start: int,
    end: int,
    field: str,
    record_reader: RecordReader | None,
    document_filter: DocumentFilter | None,
) -> Iterator[Document]:
    """Yield the documents of an input range. The arguments are those of `read_documents`, which translates errors."""
    kind = FORMATS[source.format].kind
    has_compressed_name = FORMATS[source.format].expansion > 1
    if kind in OBJECT_KINDS:

        def make_record(value: dict[str, Any]) -> Record:
            """Return the record of an object. Raises RejectedError if it has none or the user's filter excludes it."""
            record = record_reader(value) if record_reader else (get_text_field(value, field), ())
            if document_filter is not None and record[0] and not document_filter(value):
                raise RejectedError(FILTERED)
            return record

        required_column = field if record_reader is None else None
        for line, result in read_objects(source.path, start, end, kind, required_column, has_compressed_name):
            yield Document(line, "") if result is None else _make_document(line, result, make_record)
        return
    if kind == "text":
        documents = _read_text_file(source.path, has_compressed_name)
    elif kind == "lines":
        documents = _read_text_lines(source.path, start, end, has_compressed_name)
    elif kind == "parquet":
        documents = _read_parquet(source.path, start, end, field)
    elif kind == "arrow":
        documents = _read_arrow(source.path, field)
    else:
        documents = _read_tar(source.path, field)
    for document in documents:
        is_filtered = document_filter is not None and document.text and not document_filter({field: document.text})
        yield document._replace(text="", reason=FILTERED) if is_filtered else document


def _make_document(line: int, content: Any, extract: Callable[[Any], str | Record]) -> Document:
    """Return the document of a line or row.

    Args:
        line: number of the line or row.
        content: the line or row, or an exception if it could not be read.
        extract: function that returns the text or the record of `content`, or raises RejectedError or
            UnicodeDecodeError if `content` has no text.
    """
    try:
        if isinstance(content, Exception):
            raise content
        extracted = extract(content)
        text, learned = (extracted, ()) if isinstance(extracted, str) else extracted
        return Document(line, text, learned=learned)
    except UnicodeDecodeError as error:
        return Document(line, "", _describe_invalid_byte(error))
    except RejectedError as error:
        return Document(line, "", str(error))


def _number_documents(contents: Iterable[Any], extract: Callable[[Any], str | Record]) -> Iterator[Document]:
    """Yield the document of each line or row, numbered from 1. The arguments are those of `_make_document`."""
    return (_make_document(number, content, extract) for number, content in enumerate(contents, 1))


def _describe_invalid_byte(error: UnicodeDecodeError) -> str:
    """Return the reason to reject text that is not UTF-8, with the first invalid byte and its position."""
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start}"


def describe_too_long() -> str:
    """Return the reason to reject a document or line that is too long."""
    return f"longer than {MAX_DOCUMENT_BYTES:,} bytes, the most that a document may have"


def get_field(value: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field of an object. Raises RejectedError if the object does not have the field.

    `a.b` names the field `a.b` if the object has this field, otherwise field `b` of the object in field `a`.
    """
    current: Any = value
    for name in [field] if field in value else field.split("."):
        if not isinstance(current, Mapping) or name not in current:
            raise RejectedError(f"no field {field!r}; there are {shorten(', '.join(map(repr, value)), 200) or 'none'}")
        current = current[name]
    return current


def get_text_field(value: Mapping[str, Any], field: str) -> str:
    """Return the text in a field of an object.

    Raises RejectedError if the object does not have the field, or the field is not a string of valid Unicode.
    """
    text = get_field(value, field)
    if not isinstance(text, str):
        raise RejectedError(f"field {field!r} is not a string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # For example, JSON's \ud800 is only half of a character.
        raise RejectedError(f"field {field!r} contains a lone surrogate") from None
    return text


# -- text files ------------------------------------------------------------------------------------------


def _read_text_file(path: str, has_compressed_name: bool) -> Iterator[Document]:
    """Yield the document of a text file, which is the whole file."""
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, has_compressed_name)
        # A shorter head is the whole content. Otherwise the stream is read, which begins with the head again.
        content = head if len(head) < HEAD_BYTES else stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        yield Document(1, "", f"{describe_too_long()}: set data.text_documents: line, or split it into files")
        return
    content = content.removeprefix(BOM)
    try:
        yield Document(1, content.decode())
    except UnicodeDecodeError as error:
        reason = _describe_invalid_byte(error)
        if binary_format := detect_binary_format(head):
            reason = f"not text; it seems to be {FileType(binary_format, compression)}"
        if head.startswith(UTF16):
            reason = UTF16_HINT
        yield Document(content.count(b"\n", 0, error.start) + 1, "", reason)


def _read_text_lines(path: str, start: int, end: int, has_compressed_name: bool) -> Iterator[Document]:
    """Yield a document for each line that starts at bytes [start, end) of a text file."""
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, has_compressed_name)
        check_text(path, head, compression)
        yield from _number_documents(read_lines(stream, start, end, compression), _decode_line)


def _decode_line(line: bytes | None) -> str:
    """Return the text of a line without its line end. Raises RejectedError if the line is too long (None)."""
    if line is None:
        raise RejectedError(describe_too_long())
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def check_compression(path: str, head: bytes, compression: str | None, has_compressed_name: bool) -> None:
    """Raise UserError if a file has the name of a compressed file, but its content is neither compressed nor text.

    Args:
        path: the file.
        head: its first bytes, uncompressed.
        compression: name of the compression that was detected; None if the content is not compressed.
        has_compressed_name: whether the file name has an ending of compressed files.
    """
    if has_compressed_name and compression is None and not is_text(head):
        raise UserError(
            "data.damaged_file",
            f"cannot read {path}: its name is that of a compressed file, but the content is neither compressed nor "
            "text. Restore the file, or correct its name",
        )


def check_text(path: str, head: bytes, compression: str | None) -> None:
    """Raise UserError if the first bytes of a file are those of a binary format or of UTF-16."""
    if head.startswith(UTF16):
        raise UserError("data.wrong_encoding", f"cannot read {path}: it is {UTF16_HINT}")
    if binary_format := detect_binary_format(head):
        file_type = FileType(binary_format, compression)
        raise UserError(
            "data.wrong_format",
            f"cannot read {path}: it seems to be {file_type}, not text: rename it, or set data.format",
        )


def read_lines(stream: BinaryIO, start: int, end: int, compression: str | None) -> Iterator[bytes | None]:
    """Yield the lines that start at bytes [start, end) of an uncompressed file, with their line ends.

    A line that is longer than `MAX_DOCUMENT_BYTES` is yielded as None. A byte order mark at the start of the file is
    removed. If the stream was compressed (`compression`), all lines are yielded if `start` is 0, otherwise none.
    """
    if compression:
        if start > 0:
            return
        end = sys.maxsize
    elif start > 0:
        # Skip the rest of a line that started before `start`. If a line starts at `start`, this skips only the "\n"
        # before it.
        stream.seek(start - 1)
        start += _skip_line(stream) - 1
    while start < end and (line := stream.readline(MAX_DOCUMENT_BYTES + 1)):
        length = len(line)
        if length > MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
            length += _skip_line(stream)
            yield None
        else:
            yield line.removeprefix(BOM) if start == 0 else line
        start += length


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the current line, and return the number of bytes read."""
    length = 0
    while part := stream.readline(_BLOCK_BYTES):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


# -- files of objects: JSON Lines, JSON, CSV and TSV -----------------------------------------------------
#
# These files are read in blocks, so that the memory depends on the longest record and not on the size of the file.

ParseResult = dict[str, Any] | Exception | None
"""An object; an exception with the reason why a record is not an object; or None for a blank line."""


class ObjectRecord(NamedTuple):
    """A record of a file of objects."""

    line: int
    """Number of the line in which the record begins, from 1. For JSON: the number of the value."""
    result: ParseResult


_DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}
"""The delimiters that a file of each kind may have."""


def read_objects(
    path: str, start: int, end: int, kind: str, required_column: str | None, has_compressed_name: bool = False
) -> Iterator[ObjectRecord]:
    """Yield the records of an input range.

    Args:
        path: the file.
        start, end: the range in bytes. Only uncompressed JSON Lines files are split into ranges. For any other file,
            the range that starts at byte 0 yields all records, and every other range yields none.
        kind: `jsonl`, `json`, `csv` or `tsv`.
        required_column: a column that a CSV or TSV file must have; None: no column is required.
        has_compressed_name: whether the file name has an ending of compressed files.

    Raises UserError with the path if the content is of another kind, a record is too long, or the file ends within a
    record.
    """
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, has_compressed_name)
        check_text(path, head, compression)
        is_json = kind in ("jsonl", "json")
        if has_compressed_name and compression is None and head and is_json and detect_json_kind(head) is None:
            raise UserError(
                "data.damaged_file",
                f"cannot read {path}: its name is that of a compressed file, but the content is neither compressed nor "
                "JSON. Restore the file, or correct its name",
            )
        if kind in _DELIMITERS:
            if start == 0:
                yield from _read_csv_rows(path, stream, _DELIMITERS[kind], required_column)
        elif is_json_lines(head, kind):
            for number, line in enumerate(read_lines(stream, start, end, compression), 1):
                yield ObjectRecord(number, parse_object(line))
        elif start == 0:
            yield from _read_json_values(path, stream)


def is_json_lines(head: bytes, kind: str) -> bool:
    """Return True if a file has one JSON object per line.

    Args:
        head: the first bytes of the file, uncompressed, which usually decide.
        kind: `jsonl` or `json`, from the file name, which decides if the first bytes match neither kind.
    """
    return detect_json_kind(head) == "JSON Lines" if kind == "json" else detect_json_kind(head) != "JSON"


_JSON_SPACE = " \t\r\n"  # RFC 8259, section 2
_TOO_DEEP = f"JSON that nests more than {MAX_JSON_DEPTH} deep"


def parse_object(line: bytes | None) -> ParseResult:
    """Return the JSON object in a line or in a member of an archive.

    Return None for a blank line, and an exception with the reason if there is no valid object. The argument is None for
    a line or member that is too long.
    """
    if line is None:
        return RejectedError(describe_too_long())
    try:
        source = line.strip(_JSON_SPACE.encode()).decode()
        if not source:
            return None
        if len(source) > MAX_JSON_VALUES and _estimate_value_count(source) > MAX_JSON_VALUES:
            return RejectedError(f"JSON with more than {MAX_JSON_VALUES:,} values")
        return _check_object(json.loads(source))
    except UnicodeDecodeError as error:
        return error
    except (ValueError, RecursionError) as error:
        return RejectedError(_describe_invalid_json(error))


def _describe_invalid_json(error: ValueError | RecursionError) -> str:
    """Return the reason to reject text that Python's JSON parser rejects."""
    return _TOO_DEEP if isinstance(error, RecursionError) else f"broken JSON: {getattr(error, 'msg', error)}"


def _check_object(value: Any) -> ParseResult:
    """Return a parsed value if it is an object that is not nested too deeply, otherwise the reason to reject it."""
    if not isinstance(value, dict):
        return RejectedError(f"not a JSON object but {type(value).__name__}")
    return RejectedError(_TOO_DEEP) if _is_too_deep(value) else value


_STRING = re.compile('"[^"]*"')
"""A JSON string without escaped quotes."""


def _estimate_value_count(source: str) -> int:
    """Return the approximate number of names and values in a JSON text; 0 if it is at most `MAX_JSON_VALUES`.

    If the text is not valid JSON, the result has no meaning.
    """
    delimiters = "[{,:"
    # This sum is an upper bound, because strings may also contain delimiters.
    if sum(map(source.count, delimiters)) <= MAX_JSON_VALUES:
        return 0
    # Remove the strings. If the text ends within a string, also remove this string.
    without_strings = _STRING.sub("", source.replace("\\\\", "").replace('\\"', ""))
    return sum(map(without_strings.partition('"')[0].count, delimiters))


def _is_too_deep(value: dict[str, Any]) -> bool:
    """Return True if an object is nested deeper than `MAX_JSON_DEPTH`."""
    containers = (dict, list)
    level = [child for child in value.values() if isinstance(child, containers)]
    for _ in range(MAX_JSON_DEPTH - 1):
        if not level:
            return False
        children = (child for parent in level for child in (parent.values() if isinstance(parent, dict) else parent))
        level = [child for child in children if isinstance(child, containers)]
    return bool(level)


_DECODER = json.JSONDecoder()
_SPACES = re.compile(f"[{_JSON_SPACE}]*")


class _JsonReader:
    """Reads JSON values one after another from a stream of any length.

    `text` is the part of the stream that is in memory. `position` is the index in `text` of the next character to read.
    """

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path = path
        self.text = ""
        self.position = 0
        self.is_at_end = False
        self.has_invalid_utf8 = False
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def read_more(self, min_bytes: int = 0) -> bool:
        """Read another block of at least `min_bytes` bytes, and drop the text before `position`.

        Returns: False if the stream had already ended, otherwise True.
        """
        if self.is_at_end:
            return False
        block_bytes = max(_BLOCK_BYTES, min_bytes)
        block = self._stream.read(block_bytes)
        self.is_at_end = len(block) < block_bytes
        text = self._decoder.decode(block, final=self.is_at_end)
        self.has_invalid_utf8 = self.has_invalid_utf8 or not (text.isascii() or _is_encodable(text))
        self.text = self.text[self.position :] + text
        self.position = 0
        return True

    def skip_spaces(self) -> str:
        """Move to the next character that is not a space, and return it; "" at the end of the stream."""
        while True:
            if (spaces := _SPACES.match(self.text, self.position)) is not None:
                self.position = spaces.end()
            if self.position < len(self.text):
                return self.text[self.position]
            if not self.read_more():
                return ""

    def read_value(self) -> tuple[Any, str]:
        """Read the JSON value at `position`, and move `position` behind it.

        Returns: the value, and its JSON text if the stream has invalid UTF-8, otherwise "".

        Raises ValueError or RecursionError if the value is invalid, and UserError if the value is too large.
        """
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.position)
                # A number at the end of the text may continue in the next block.
                if end < len(self.text) or self.is_at_end:
                    source = self.text[self.position : end] if self.has_invalid_utf8 else ""
                    self.position = end
                    return value, source
            except json.JSONDecodeError as error:
                # The end of a block may cut a string. It may also cut a word such as `false`, or an escape in a string.
                # A word or an escape has fewer than 16 characters.
                is_incomplete = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if self.is_at_end or not is_incomplete:
                    raise
            pending = len(self.text) - self.position
            if pending > MAX_DOCUMENT_BYTES:
                raise UserError("data.too_large", f"cannot read {self.path}: a value is {describe_too_long()}")
            if pending > MAX_JSON_VALUES and _estimate_value_count(self.text[self.position :]) > MAX_JSON_VALUES:
                raise UserError(
                    "data.too_large", f"cannot read {self.path}: a value has more than {MAX_JSON_VALUES:,} values"
                )
            self.read_more(pending)


def _is_encodable(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8. Text from invalid bytes (`surrogateescape`) cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_json_values(path: str, stream: BinaryIO) -> Iterator[ObjectRecord]:
    """Yield the values of a JSON file: the elements of its array, or values that are separated by white space only."""
    reader = _JsonReader(path, stream)
    value_number = 0
    is_array = reader.skip_spaces() == "["
    reader.position += is_array  # Move behind the "[".
    if is_array and reader.skip_spaces() == "]":  # The array is empty.
        reader.position += 1
        _check_end_of_file(reader)
        return
    while reader.skip_spaces():
        value_number += 1
        try:
            value, source = reader.read_value()
        except (ValueError, RecursionError) as error:
            problem = _describe_invalid_json(error)
            # A small file with a single invalid value is one rejected record. Otherwise it is unclear where the next
            # value would begin.
            if is_array or value_number > 1 or not reader.is_at_end:
                raise UserError(
                    "data.damaged_file",
                    f"cannot read {path}: value {value_number:,} is {problem}: repair the file. If it has one object "
                    "per line, set data.format: jsonl",
                ) from error
            yield ObjectRecord(1, RejectedError(problem))
            return
        yield ObjectRecord(value_number, _find_utf8_error(source) or _check_object(value))
        if is_array:
            separator = reader.skip_spaces()
            reader.position += 1
            if separator == "]":
                _check_end_of_file(reader)
                return
            if separator != ",":
                finding = f"{separator!r} follows" if separator else "it ends after"
                raise UserError(
                    "data.damaged_file",
                    f"cannot read {path}: {finding} value {value_number:,} of the array instead of ',' or ']': repair "
                    "the file",
                )
    if is_array:
        raise UserError(
            "data.damaged_file",
            f"cannot read {path}: it ends within the array, after value {value_number:,}: repair the file",
        )


def _check_end_of_file(reader: _JsonReader) -> None:
    """Raise UserError if any text follows the end of the array."""
    if following := reader.skip_spaces():
        raise UserError(
            "data.damaged_file",
            f"cannot read {reader.path}: {following!r} follows the end of the array: a file must have one array of "
            "objects, or one object per line",
        )


def _find_utf8_error(source: str) -> UnicodeDecodeError | None:
    """Return the first UTF-8 error in text that was decoded with `surrogateescape`; None if the text is valid."""
    try:
        source.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return error
    return None


class _CsvLines:
    """Iterates over the lines of a CSV file, counts the lines, and limits the size of a row.

    A row has several lines if a quoted field contains line ends. The caller sets `row_bytes` to 0 before each row.
    """

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path = path
        self.count = 0
        self.row_bytes = 0
        self._lines = read_lines(stream, 0, sys.maxsize, None)

    def __iter__(self) -> Iterator[str]:
        """Yield the lines as text. Raises UserError if a line or row is too long."""
        for line in self._lines:
            self.count += 1
            if line is None:
                raise UserError(
                    "data.too_large", f"cannot read {self.path}: line {self.count:,} is {describe_too_long()}"
                )
            self.row_bytes += len(line)
            if self.row_bytes > MAX_DOCUMENT_BYTES + 1:  # The line end has one byte.
                raise UserError(
                    "data.too_large",
                    f"cannot read {self.path}: the row that continues in line {self.count:,} is {describe_too_long()}",
                )
            yield line.decode(errors="surrogateescape")


def _read_csv_rows(path: str, stream: BinaryIO, delimiters: str, required_column: str | None) -> Iterator[ObjectRecord]:
    """Yield the rows of a CSV file as objects. The first row has the names of the fields.

    The delimiter is the first of `delimiters` for which the first row contains the required column. If there is none,
    it is the first of `delimiters`. Raises UserError if the required column is missing or a row is too long.
    """
    counter = _CsvLines(path, stream)
    lines = iter(counter)
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    first_line = next(lines, "")
    matching = (
        delimiter
        for delimiter in delimiters
        if required_column in _read_header(csv.reader([first_line], delimiter=delimiter))
    )
    rows = csv.reader(chain([first_line], lines), delimiter=next(matching, delimiters[0]), strict=True)
    header = _read_header(rows)
    if required_column is not None and header.count(required_column) != 1:
        problem = "no column" if required_column not in header else "more than one column"
        names = shorten(", ".join(map(repr, header)), 200)
        raise UserError(
            "data.no_column",
            f"{path}: {problem} {required_column!r} (data.text_field) in the first line, which has "
            f"{names or 'nothing'}",
        )
    while True:
        line = counter.count + 1
        counter.row_bytes = 0
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "field limit" in str(error):
                raise UserError(
                    "data.too_large",
                    f"cannot read {path}: a field of the row in line {line:,} is {describe_too_long()}",
                ) from None
            if "unexpected end of data" in str(error):
                raise UserError(
                    "data.damaged_file", f"cannot read {path}: the row in line {line:,} has an unclosed quote"
                ) from None
            yield ObjectRecord(line, RejectedError(f"broken CSV: {error}"))
            continue
        if row is None:
            return
        yield ObjectRecord(line, _make_row_object(header, row))


def _read_header(rows: Iterable[list[str]]) -> list[str]:
    """Return the first row; an empty list if there is no row or the first row is invalid."""
    try:
        return next(iter(rows), [])
    except csv.Error:
        return []


def _make_row_object(header: list[str], row: list[str]) -> ParseResult:
    """Return a row of a CSV file as an object; None for a blank row; an exception for an invalid row."""
    if not row:
        return None
    if len(row) != len(header):
        return RejectedError(f"{len(row)} fields, but the header has {len(header)}")
    for field in row:
        if not field.isascii() and (error := _find_utf8_error(field)):
            return error
    return dict(zip(header, row, strict=True))


# -- tables: Parquet and Arrow ---------------------------------------------------------------------------

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of text. Binary types are included, because Arrow does not check that strings are UTF-8."""


def _open_parquet(path: str, column: str) -> pyarrow.parquet.ParquetFile:
    """Open a Parquet file.

    Raises UserError with the path if pyarrow is not installed, or if the file is damaged or has no text column
    `column`.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "data.missing_package", f"{path}: .parquet needs the package pyarrow: pip install pyarrow"
        ) from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError("data.damaged_file", f"cannot read {path}: {error}") from error
    _find_text_column(path, file.schema_arrow, column)
    return file


def _find_text_column(path: str, schema: pyarrow.Schema, column: str) -> list[str]:
    """Return the path to a column of text: its name, or the names of a struct and of the fields inside.

    `a.b` is the column `a.b` if the schema has it, otherwise field `b` of the struct `a`. Raises UserError with the
    name of the file if there is no such column, or if its type is not text.
    """
    from pyarrow import types

    names = [column] if column in schema.names else column.split(".")
    arrow_type: Any = None
    for depth, name in enumerate(names):
        fields = {field.name: field.type for field in (schema if depth == 0 else arrow_type)}
        if name not in fields:
            outer = ".".join(names[:depth])
            raise UserError(
                "data.no_column",
                f"{path}: no column {column!r} (data.text_field); there are {', '.join(fields)}"
                + (f" in {outer}" if outer else ""),
            )
        arrow_type = fields[name]
        if depth + 1 < len(names) and not types.is_struct(arrow_type):
            outer = ".".join(names[: depth + 1])
            raise UserError(
                "data.wrong_column_type",
                f"{path}: column {outer!r} has type {arrow_type}, which has no fields (data.text_field: {column})",
            )
    value_type = arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type
    if str(value_type) not in _TEXT_TYPES:
        has_fields = types.is_struct(arrow_type) and arrow_type.num_fields
        advice = f": use one of its fields, such as {column}.{arrow_type[0].name}" if has_fields else ""
        raise UserError(
            "data.wrong_column_type",
            f"{path}: column {column!r} (data.text_field) has type {arrow_type}, not text{advice}",
        )
    return names


def read_row_group_sizes(path: str, column: str) -> list[int]:
    """Return the uncompressed bytes of the text column in each row group of a Parquet file.

    If the table has nested columns, return the bytes of all columns. Raises UserError if the file cannot be read or
    does not have the column.
    """
    with translate_read_errors(path), _open_parquet(path, column) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        # If a column is nested, `num_columns` is larger than the number of names, because it counts the innermost
        # fields.
        if file.metadata.num_columns != len(file.schema_arrow.names):
            return [group.total_byte_size for group in groups]
        index = file.schema_arrow.names.index(_find_text_column(path, file.schema_arrow, column)[0])
        return [group.column(index).total_uncompressed_size for group in groups]


def _read_parquet(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    """Yield a document for each row of the row groups [start, end) of a Parquet file."""
    import pyarrow

    with _open_parquet(path, column) as file:
        names = _find_text_column(path, file.schema_arrow, column)
        batches = file.iter_batches(batch_size=1024, row_groups=list(range(start, end)), columns=[column])
        try:
            yield from _read_rows(batches, names)
        except pyarrow.ArrowException as error:
            raise UserError("data.damaged_file", f"cannot read {path}: {error}") from error


def _read_arrow(path: str, column: str) -> Iterator[Document]:
    """Yield a document for each row of an Arrow file."""
    schema, batches = read_arrow_batches(path)
    yield from _read_rows(batches, _find_text_column(path, schema, column))


def _read_rows(batches: Iterable[pyarrow.RecordBatch], names: Sequence[str]) -> Iterator[Document]:
    """Yield a document for each row of a column. `names` is the path that `_find_text_column` returned."""
    null_error = RejectedError(f"field {'.'.join(names)!r} is null")
    rows = (null_error if row is None else row for batch in batches for row in _read_column_bytes(batch, names))
    return _number_documents(rows, _decode_content)


def _read_column_bytes(batch: pyarrow.RecordBatch, names: Sequence[str]) -> list[bytes | None]:
    """Return the values of a column as bytes; None for null.

    The values are not decoded here, because one row with invalid UTF-8 would make decoding fail for the whole batch.
    """
    import pyarrow
    import pyarrow.compute

    column = batch.column(batch.schema.names.index(names[0]))
    if len(names) > 1:
        column = pyarrow.compute.struct_field(column, names[1:])
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    rows: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return rows


def _decode_content(content: bytes | None) -> str:
    """Return the text of a row or of a tar member. Raises RejectedError if it is too long.

    `content` is None for a member that `read_tar_members` has not read, because it is too long.
    """
    if content is None or len(content) > MAX_DOCUMENT_BYTES:
        raise RejectedError(describe_too_long())
    return content.decode()


def read_arrow_batches(path: str) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    """Return the schema of an Arrow stream or file, and an iterator over its record batches.

    Raises UserError if pyarrow is not installed or the file cannot be read.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            "data.missing_package", f"{path}: Arrow needs the package pyarrow: pip install pyarrow"
        ) from None

    def read_schema_and_batches() -> Iterator[Any]:
        """Yield the schema, then the record batches."""
        try:
            file = pyarrow.OSFile(path)
            # Arrow has a file format, which begins with this magic number, and a streaming format.
            is_random_access = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = (pyarrow.ipc.open_file if is_random_access else pyarrow.ipc.open_stream)(file)
            list(reader.schema.names)  # This raises an error if a name is not UTF-8.
            yield reader.schema
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_random_access else reader
            for batch in batches:
                batch.validate(full=True)
                yield batch
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, IndexError) as error:
            # A damaged file may state any size of its buffers, which leads to a MemoryError.
            raise UserError(
                "data.damaged_file", f"{path} is damaged, or not an Arrow file that can be read: {error}"
            ) from error

    iterator = read_schema_and_batches()
    return next(iterator), iterator


# -- tar -------------------------------------------------------------------------------------------------

_MAX_SAMPLE_BYTES = 1 << 28
"""Maximum size of all members of one WebDataset sample, in bytes."""
_MAX_MEMBER_BYTES = 1 << 30
"""Default for the maximum size of a member that is read, in bytes."""
_MAX_HEADER_BYTES = 1 << 16
"""Maximum size of an extended header (pax, GNU long names), and of all global headers of an archive, in bytes.

A long path has 4 KiB. An extended attribute of a file has at most 64 KiB.
"""
_MAX_EXTENDED_HEADERS = 16
"""Maximum number of extended headers before one member. There are usually at most two."""
_EXTENDED_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _read_tar(path: str, field: str) -> Iterator[Document]:
    """Yield the documents of a WebDataset tar.

    Members with the same key form a sample. Each .txt member of a sample is a document. If a sample has no .txt member,
    the text in `field` of each .json member is a document.
    """
    document_number = 0
    members = read_tar_members(path, (".txt", ".json"), MAX_DOCUMENT_BYTES)
    for key, sample in groupby(members, lambda member: _get_sample_key(member[0])):
        texts: list[bytes | None] = []
        objects: list[bytes | None] = []
        size = 0
        for name, content in sample:
            (texts if name.endswith(".txt") else objects).append(content and content.removeprefix(BOM))
            size += len(content or b"")
            if size > _MAX_SAMPLE_BYTES:
                raise UserError(
                    "data.too_large",
                    f"{path}: the members of sample {key!r} have more than {_MAX_SAMPLE_BYTES:,} bytes: give samples "
                    "different names, or fewer members",
                )
        if texts:
            documents = _number_documents(texts, _decode_content)
        else:
            documents = _number_documents(
                map(parse_object, objects), lambda value: "" if value is None else get_text_field(value, field)
            )
        for document in documents:
            document_number += 1
            yield document._replace(line=document_number)


def _get_sample_key(name: str) -> str:
    """Return the key of a WebDataset sample: the path of a member up to the first dot of the file name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


class _StrictTarInfo(tarfile.TarInfo):
    """A tar header that limits sizes and reports damage.

    Python's tarfile treats a damaged or missing header as the end of the archive, and reads extended headers of any
    length into memory. This class raises ReadError in both cases.
    """

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        """Read the next header. Raises ReadError if it is damaged, missing or too large."""
        # After an extended header, the inherited method calls this method again for the header that follows.
        header_count = getattr(tarfile, "extended_headers", 0)
        if header_count > _MAX_EXTENDED_HEADERS:
            raise ReadError(f"more than {_MAX_EXTENDED_HEADERS} extended headers before one member")
        tarfile.extended_headers = header_count + 1
        try:
            header = super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # This is the regular end of an archive: two blocks of zeros.
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error
        finally:
            tarfile.extended_headers = header_count
        if sum(map(len, (*tarfile.pax_headers, *tarfile.pax_headers.values()))) > _MAX_HEADER_BYTES:
            raise ReadError(f"global headers of more than {_MAX_HEADER_BYTES:,} bytes")
        return header

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        """Parse a header block. Raises ReadError if it is an extended header with an invalid size."""
        header = super().frombuf(buf, encoding, errors)
        if header.type in _EXTENDED_TYPES and not 0 <= header.size <= _MAX_HEADER_BYTES:
            raise ReadError(
                f"an extended header has a size of {header.size:,} bytes; allowed are 0 to {_MAX_HEADER_BYTES:,}"
            )
        return header

    def _proc_sparse(self, tarfile: Any) -> Any:
        """Raise ReadError, because sparse members are not supported."""
        raise ReadError(f"{self.name} has holes (GNU's sparse format): write the archive without --sparse")

    def _proc_gnusparse_10(self, next: Any, *_: Any) -> Any:
        """Raise ReadError, because sparse members are not supported."""
        raise ReadError(f"{next.name} has holes (GNU's sparse format): write the archive without --sparse")


def read_tar_members(
    path: str, endings: tuple[str, ...], max_bytes: int = _MAX_MEMBER_BYTES
) -> Iterator[tuple[str, bytes | None]]:
    """Yield name and content of each regular file with one of these name endings, in the order of the archive.

    The content of a file of more than `max_bytes` is None. Raises UserError if the archive is damaged or a file is
    stored with holes.
    """
    try:
        with (
            open_decompressed(path) as (stream, _, _),
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictTarInfo) as tar,
        ):
            while (member := tar.next()) is not None:
                cast(Any, tar).members = []  # Free the headers, because tarfile would keep all of them in memory.
                if not member.isfile() or not member.name.endswith(endings):
                    continue
                if member.issparse():
                    raise UserError(
                        "data.unsupported_file",
                        f"{path}: {member.name} has holes: write the archive without --sparse",
                    )
                if member.size > max_bytes:
                    yield member.name, None
                    continue
                file = tar.extractfile(member)
                content = file.read() if file else b""
                if len(content) < member.size:
                    raise UserError("data.damaged_file", f"{path} ends within its member {member.name}")
                yield member.name, content
    except (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError) as error:
        raise UserError("data.damaged_file", f"{path} is damaged, or not a tar that can be read: {error}") from error


# -- the user's filter -----------------------------------------------------------------------------------
#
# `data.filter: MODULE:FUNCTION` names a Python function. It returns True if a document is used:
#
#     def keep(document: dict) -> bool:      # an object of a .jsonl file; for other formats {data.text_field: text}
#         return len(document["text"]) > 200
#
# The function may be called more than once for a document, and must return the same result each time. The module is one
# file, in the folder of the config or on Python's path. `prepare` copies this file to `data/filter.py`. The array tasks
# run the copy, and its hash is part of the key of the shards.

FILTER_FILE = "filter.py"
"""Name of the copy of the filter's module in the data folder."""
DocumentFilter = Callable[[Mapping[str, Any]], bool]
"""Function that returns True if a document is used."""


class FilterError(Exception):
    """Error for a user's filter that raised an exception, or returned neither True nor False."""


def find_filter_file(target: str) -> Path:
    """Return the file of a filter that is given as `FOLDER/MODULE:FUNCTION`.

    If FOLDER does not contain the module, the folders of Python's path are searched.

    Raises UserError if there is no such file, the file is not valid Python, or it does not define the function.
    """
    module, _, function = target.rpartition(":")
    folder, name = os.path.split(module)
    relative_path = name.removesuffix(".py").replace(".", os.sep) + ".py"
    file = next((path for parent in (folder, *sys.path) if (path := Path(parent, relative_path)).is_file()), None)
    if file is None:
        raise UserError(
            "data.no_filter", f"data.filter: there is no {relative_path} in {folder} or in a folder of PYTHONPATH"
        )
    try:
        with translate_read_errors(str(file)):
            body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise UserError("data.invalid_filter", f"data.filter: {file} is not valid Python: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        raise UserError("data.invalid_filter", f"data.filter: {file} has no function {function!r} at its top level")
    return file


def load_filter(file: Path, target: str) -> DocumentFilter:
    """Return the filter function of a module, wrapped so that it raises FilterError.

    Args:
        file: the copy of the module.
        target: the value of `data.filter`, which names the function.

    Raises UserError if the module cannot be imported.
    """
    function_name = target.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location("sluice_filter", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # The decorator `dataclass` looks for the module in `sys.modules`.
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # The user's code may raise any exception.
        raise UserError(
            "data.invalid_filter", f"data.filter: {target} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name)

    def keeps_document(document: Mapping[str, Any]) -> bool:
        """Return the result of the user's function. Raises FilterError if the function fails."""
        try:
            result = function(document)
        except Exception as error:
            raise FilterError(f"it raised {type(error).__name__}: {shorten(str(error), 300)}") from error
        if type(result).__name__ not in ("bool", "bool_"):  # Python and NumPy have types with these names.
            raise FilterError(f"it returned {shorten(repr(result), 100)}, neither True nor False")
        return bool(result)

    return keeps_document
