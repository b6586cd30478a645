"""Sources: the documents that stand in files (data_prep/find_inputs.py says in which).

:func:`read_documents` reads one piece of one input:

    kind        files                           a document is                        a piece is
    text        .txt, the library's .py files   the whole file                       the whole file
    lines       .txt, `text_documents: line`    a line without its line end          bytes [start, end)
    jsonl       .jsonl, .ndjson                 a line's object: its `text_field`,   bytes [start, end)
                                                or what `data.records` says
    json        .json                           an object of the array, or of the    bytes [start, end)
                                                file; JSON Lines are read as above
    csv, tsv    .csv, .tsv                      a row: its column `text_field`       the whole file
    parquet     .parquet                        a row of column `text_field`         row groups [start, end)
    arrow       .arrow, of Hugging Face         a row of column `text_field`         the whole file
    tar         .tar, .tar.gz, … (WebDataset)   a member .txt; of a sample (KEY.*)   the whole file
                                                without one, .json's field

All but Parquet and Arrow may be compressed (.gz, .zst, .bz2, .xz); then a piece is the whole file. The name tells how a
file is planned, its content how it is read: if a file with pieces turns out to be compressed, or to be one JSON array,
the piece from byte 0 on has all of its documents and the other pieces have none.

A byte range stands for the lines that *start* in it, so that any cut of a file gives each line once.

Text is taken as it stands: strict UTF-8, no translation of line ends, nothing stripped but a byte order mark at the
beginning of a file. Empty documents and blank lines are no documents: they are neither used nor counted.

A line, row or member has a bound, and so has a JSON object (data_prep/documents.py). What exceeds it is rejected
as a document, without holding it in memory: a small compressed file may have lines of any length.


Files whose records are objects: JSON Lines, JSON (an array of objects, or objects one after another), CSV and TSV.

Each reader gives, record by record, the line where it begins (of JSON: the number of the value) and the object, or the
reason why there is none. Files are read in blocks: memory depends on the longest record, not on the file.


Containers of rows: Arrow's record batches, and the members of a tar; of text, and of tokens (data_prep/tokens).

`data.filter: MODULE:FUNCTION`: a Python function of the user's own that says which documents are taken.

    def keep(document: dict) -> bool:      the object of a line of .jsonl; of other formats {data.text_field: text}
        return len(document["text"]) > 200

It is called with each document that has text, maybe more than once, so it must say the same again. The module is one
file, beside the config file or on Python's path. `prepare` copies it to `data/filter.py`, which the tasks run, and
whose hash is part of what the shards are made from: a function that changed gives new shards, never mixed ones.
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
from typing import Any, BinaryIO, NamedTuple, cast

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

_LARGEST_SAMPLE = 1 << 28  # bytes of the members of one sample in a tar


class InputFormat(NamedTuple):
    """What a file is by its name, and how it is planned."""

    kind: str
    """How it is read, see above."""
    splits: bool = False
    """Whether any byte range of a file is a piece; else the whole file is one."""
    expansion: int = 1
    """Bytes of text for each byte of a file: rough, but only the balance between units depends on it."""


def compressed_format(kind: str, ending: str) -> str:
    """Return the name of the format of a kind's compressed files, such as `csv.gz`."""
    return {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}.get(kind + ending, kind + ending)  # as old folders name them


_KINDS = {
    "text": [".txt"],
    "jsonl": [".jsonl", ".ndjson"],
    "json": [".json"],
    "csv": [".csv"],
    "tsv": [".tsv"],
}
"""The kinds whose files may be compressed, and their endings."""
FORMATS = {kind: InputFormat(kind, splits=kind in ("lines", "jsonl", "json")) for kind in (*_KINDS, "lines")}
FORMATS |= {
    compressed_format(kind, ending): InputFormat(kind, expansion=expansion)
    for kind in (*_KINDS, "lines")
    for ending, expansion in COMPRESSIONS.items()
}
FORMATS |= {kind: InputFormat(kind) for kind in ("parquet", "arrow", "tar")}
"""The formats of inputs, by the names that `units.json` has for them."""
ENDINGS = {ending: kind for kind, endings in _KINDS.items() for ending in endings}
ENDINGS |= {
    ending + packed: compressed_format(kind, packed)
    for kind, endings in _KINDS.items()
    for ending in endings
    for packed in COMPRESSIONS
}
ENDINGS |= {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".tgz": "tar"}
ENDINGS |= {f".tar{ending}": "tar" for ending in ("", *COMPRESSIONS)}
"""What the files of an ending are; a .txt file may also be `lines`."""


class Input(NamedTuple):
    """One input file as it was when it was listed: absolute path, size in bytes, time in ns, format (see above), and
    path, size and time of what else is read with it: an index."""

    path: str
    size: int
    mtime_ns: int
    format: str
    beside: Sequence[Sequence[Any]] = []

    @property
    def splits(self) -> bool:
        """Whether any byte range of the file is a piece."""
        return FORMATS[self.format].splits

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        return self.size * FORMATS[self.format].expansion

    def problem(self) -> str | None:
        """How the file, or what is beside it, differs from what was seen, and the way out; None when it does not."""
        out = f"put it back, or go on with what there is now: `{format_command('resume', 'RUN')}`"
        for path, *was in ((self.path, self.size, self.mtime_ns), *self.beside):
            try:
                found = os.stat(path)
            except FileNotFoundError:
                return f"input {path} is gone since it was prepared: {out}"
            if [found.st_size, found.st_mtime_ns] != was:
                return f"input {path} has changed since it was prepared: {out}"
        return None

    def check(self) -> None:
        """Raise InputError, naming the file, when it is not what was seen."""
        if problem := self.problem():
            raise InputError("data.input_changed", problem)


Spans = tuple[tuple[int, int], ...]


class Document(NamedTuple):
    """One line, row or whole file: its text, or the reason why there is none."""

    line: int
    """Line (parquet: row) within the piece, from 1. Of an unreadable whole file: where the bad byte stands."""
    text: str
    """The text; empty for a blank line or a rejected document."""
    reason: str | None = None
    """Why the document is rejected."""
    learned: Spans = ()
    """Of a record, the characters [start, end) that are learned; of a text, all are."""


FILTERED = "left out by data.filter"
"""The reason that is no fault of the document's."""


Record = tuple[str, Spans]
"""The text that a line's object comes to, and what is learned of it."""
RecordReader = Callable[[dict[str, Any]], Record]
"""From a line's object; raises Rejected for one that is no such record."""


def read_documents(
    source: Input,
    start: int,
    end: int,
    text_field: str,
    read: RecordReader | None = None,
    keep: DocumentFilter | None = None,
) -> Iterator[Document]:
    """One :class:`Document` for each line, row or file of the piece, in order; blank ones too (text "").

    read: makes a record of a line's object, where lines hold more than text. keep: the user's filter; what it leaves
    out has the reason FILTERED. Raises UserError naming the file when it cannot be read at all, and where `keep` fails.
    """
    line = 0
    with translate_read_errors(source.path):
        try:
            for document in _read(source, start, end, text_field, read, keep):
                line = document.line
                yield document
        except FilterError as error:
            place = f"record {line + 1}" + (f" of those from {start:,} on" if start else "")
            raise UserError("data.filter_failed", f"data.filter: {source.path}, {place}: {error}") from error


def _read(
    source: Input, start: int, end: int, field: str, read: RecordReader | None, keep: DocumentFilter | None
) -> Iterator[Document]:
    kind, packed = FORMATS[source.format].kind, FORMATS[source.format].expansion > 1
    if kind in OBJECT_KINDS:
        plain = read or (lambda value: (get_text_field(value, field), ()))

        def kept(value: dict[str, Any]) -> Record:
            found = plain(value)
            if keep is not None and found[0] and not keep(value):
                raise RejectedError(FILTERED)
            return found

        records = read_objects(source.path, start, end, kind, field if read is None else None, packed)
        yield from (Document(line, "") if found is None else _document(line, found, kept) for line, found in records)
        return
    if kind in ("text", "lines"):
        documents = (_text_documents if kind == "text" else _line_documents)(source.path, start, end, packed)
    else:
        documents = _READERS[kind](source.path, start, end, field)
    for document in documents:
        left_out = keep is not None and document.text and not keep({field: document.text})
        yield document._replace(text="", reason=FILTERED) if left_out else document


OBJECT_KINDS = ("jsonl", "json", "csv", "tsv")
"""Kinds whose records are objects (data_prep/documents.py)."""


def _document(line: int, found: Any, text_of: Callable[[Any], str | Record]) -> Document:
    """The document in what stands in a line; `text_of` and `found` say why there is none."""
    try:
        if isinstance(found, Exception):
            raise found
        made = text_of(found)
        text, learned = (made, ()) if isinstance(made, str) else made
        return Document(line, text, learned=learned)
    except UnicodeDecodeError as error:
        return Document(line, "", _bad_byte(error))
    except RejectedError as error:
        return Document(line, "", str(error))


def _documents(contents: Iterable[Any], text_of: Callable[[Any], str | Record]) -> Iterator[Document]:
    """A document for each line or row; `text_of` raises Rejected or UnicodeDecodeError where there is none."""
    return (_document(number, content, text_of) for number, content in enumerate(contents, 1))


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start}"


def _text_documents(path: str, start: int, end: int, packed: bool) -> Iterator[Document]:
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, packed)
        content = head if len(head) < HEAD_BYTES else stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        yield Document(1, "", f"{describe_too_long()}: set data.text_documents: line, or cut it into files")
        return
    content = content.removeprefix(BOM)
    try:
        yield Document(1, content.decode())
    except UnicodeDecodeError as error:
        reason = _bad_byte(error)
        if known := detect_binary_format(head):
            reason = f"no text, but what seems to be {FileType(known, compression)}"
        if head.startswith(UTF16):
            reason = UTF16_HINT
        yield Document(content.count(b"\n", 0, error.start) + 1, "", reason)


def _line_documents(path: str, start: int, end: int, packed: bool) -> Iterator[Document]:
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, packed)
        check_text(path, head, compression)
        yield from _documents(read_lines(stream, start, end, compression), _line_text)


def _line_text(line: bytes | None) -> str:
    if line is None:
        raise RejectedError(describe_too_long())
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def get_field(value: Mapping[str, Any], field: str) -> Any:
    """Return what is in a field of an object; `a.b` is field `b` of the object in field `a`, unless there is a field
    `a.b`. Raises Rejected if there is no such field."""
    found: Any = value
    for name in [field] if field in value else field.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise RejectedError(f"no field {field!r}; there are {shorten(', '.join(map(repr, value)), 200) or 'none'}")
        found = found[name]
    return found


def get_text_field(value: Mapping[str, Any], field: str) -> str:
    """Return the text in a field of an object. Raises Rejected if there is none."""
    text = get_field(value, field)
    if not isinstance(text, str):
        raise RejectedError(f"field {field!r} is no string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON's \ud800 can name half a character
        raise RejectedError(f"field {field!r} holds a lone surrogate") from None
    return text


def _parquet(path: str, column: str) -> Any:
    """An open parquet file that has the text column. Raises UserError naming the file otherwise."""
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
    _column(path, file.schema_arrow, column)
    return file


def _column(path: str, schema: Any, column: str) -> list[str]:
    """Return the names that lead to a column of text, from the outer to the inner one: `a.b` is `b` in the struct `a`.

    Raises UserError naming the file if there is no such column, or it holds no text.
    """
    from pyarrow import types

    names = [column] if column in schema.names else column.split(".")
    kind: Any = None
    for number, name in enumerate(names):
        inside = {one.name: one.type for one in (schema if number == 0 else kind)}
        if name not in inside:
            there = ", ".join(inside)
            part = ".".join(names[:number])
            raise UserError(
                "data.no_column",
                f"{path}: no column {column!r} (data.text_field); there are {there}" + (f" in {part}" if part else ""),
            )
        kind = inside[name]
        if number + 1 < len(names) and not types.is_struct(kind):
            outer = ".".join(names[: number + 1])
            raise UserError(
                "data.wrong_column_type",
                f"{path}: column {outer!r} holds {kind}, which has no fields (data.text_field: {column})",
            )
    value = kind.value_type if types.is_dictionary(kind) else kind
    if str(value) not in _TEXTS:
        has_fields = types.is_struct(kind) and kind.num_fields
        out = f": name one of its fields, such as {column}.{kind[0].name}" if has_fields else ""
        raise UserError(
            "data.wrong_column_type", f"{path}: column {column!r} (data.text_field) holds {kind}, not text{out}"
        )
    return names


_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of text. Binary ones: Arrow does not check that a column of strings holds UTF-8."""


def _as_bytes(batch: Any, names: Sequence[str]) -> list[bytes | None]:
    """The texts of a batch's column, as bytes: one bad row must not take its whole batch along."""
    import pyarrow
    import pyarrow.compute

    column = batch.column(batch.schema.names.index(names[0]))
    if len(names) > 1:
        column = pyarrow.compute.struct_field(column, names[1:])
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    found: list[bytes | None] = column.cast(pyarrow.large_binary()).to_pylist()
    return found


def read_row_group_sizes(path: str, column: str) -> list[int]:
    """Bytes of text in each row group, uncompressed. Raises UserError for what is no parquet file with the column."""
    with translate_read_errors(path), _parquet(path, column) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        if file.metadata.num_columns != len(file.schema_arrow.names):  # nested columns: leaves are not columns
            return [group.total_byte_size for group in groups]
        place = file.schema_arrow.names.index(_column(path, file.schema_arrow, column)[0])
        return [group.column(place).total_uncompressed_size for group in groups]


def _parquet_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    import pyarrow

    with _parquet(path, column) as file:
        names = _column(path, file.schema_arrow, column)
        batches = file.iter_batches(batch_size=1024, row_groups=list(range(start, end)), columns=[column])
        try:
            yield from _row_documents(batches, names)
        except pyarrow.ArrowException as error:
            raise UserError("data.damaged_file", f"cannot read {path}: {error}") from error


def _row_documents(batches: Iterable[Any], names: Sequence[str]) -> Iterator[Document]:
    """The documents of the column with these names, batch by batch."""
    null = RejectedError(f"field {'.'.join(names)!r} is null")
    rows = (null if row is None else row for batch in batches for row in _as_bytes(batch, names))
    return _documents(rows, _text_of)


def _text_of(content: bytes | None) -> str:
    """The text of a row, or of a tar's member that is None if it is too long."""
    if content is None or len(content) > MAX_DOCUMENT_BYTES:
        raise RejectedError(describe_too_long())
    return content.decode()


def _arrow_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    schema, batches = read_arrow_batches(path)
    yield from _row_documents(batches, _column(path, schema, column))


def _tar_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    number = 0
    members = read_tar_members(path, (".txt", ".json"), MAX_DOCUMENT_BYTES)
    for key, same in groupby(members, lambda member: _sample_of(member[0])):
        texts: list[bytes | None] = []
        values: list[bytes | None] = []
        size = 0
        for name, content in same:
            (texts if name.endswith(".txt") else values).append(content and content.removeprefix(BOM))
            if (size := size + len(content or b"")) > _LARGEST_SAMPLE:
                raise UserError(
                    "data.too_large",
                    f"{path}: the members of sample {key!r} have more than {_LARGEST_SAMPLE:,} bytes: give samples "
                    "different names, or fewer members",
                )
        if texts:
            documents = _documents(texts, _text_of)
        else:
            documents = _documents(
                map(parse_object, values), lambda value: "" if value is None else get_text_field(value, field)
            )
        for one in documents:
            yield one._replace(line=(number := number + 1))


def _sample_of(name: str) -> str:
    """The key of a WebDataset's sample: a member's name up to the first dot behind its folder."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


_READERS: dict[str, Callable[[str, int, int, str], Iterator[Document]]] = {
    "parquet": _parquet_documents,
    "arrow": _arrow_documents,
    "tar": _tar_documents,
}
"""The documents of a piece [start, end) of the file at a path, by `text_field`."""


MAX_DOCUMENT_BYTES = 1 << 26
"""Bytes of one document: each takes some 140 of memory to tokenise (measured up to 32 MB). Also of one line."""
MAX_JSON_VALUES = 1 << 22
"""Names and values in one JSON object: each takes up to 240 bytes of memory."""
MAX_JSON_DEPTH = 100
"""Arrays and objects within each other in one JSON object. Python's own limit depends on who calls."""
_TOO_DEEP = f"JSON that nests more than {MAX_JSON_DEPTH} deep"
_NESTS = (dict, list)
_STRING = re.compile('"[^"]*"')
_BLOCK = 1 << 20
_JSON_SPACE = " \t\r\n"  # RFC 8259, section 2
_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}
Found = dict[str, Any] | Exception | None
"""An object; the exception that says why there is none; None for a blank line."""


class RejectedError(ValueError):
    """Why there is no document in a line or row."""


class ObjectRecord(NamedTuple):
    """One line, value or row."""

    line: int
    found: Found


def read_objects(
    path: str, start: int, end: int, kind: str, field: str | None, packed: bool = False
) -> Iterator[ObjectRecord]:
    """Yield the records of a piece [start, end) of a file.

    kind: `jsonl`, `json`, `csv` or `tsv`. A plain file of JSON Lines has a piece for any range of bytes; of every other
    file the piece from byte 0 on has all records, and other pieces have none. field: a column that a CSV must have.
    packed: the name says that the file is compressed.

    Raises UserError naming the file for content of another kind, for a record that is too long, and for a file that
    ends within a record.
    """
    with open_decompressed(path) as (stream, head, compression):
        check_compression(path, head, compression, packed)
        check_text(path, head, compression)
        if packed and compression is None and head and kind in ("jsonl", "json") and detect_json_kind(head) is None:
            raise UserError(
                "data.damaged_file", f"cannot read {path}: it is not compressed, as its name says, and no JSON"
            )
        if kind in _DELIMITERS:
            if start == 0:
                yield from _csv_rows(path, stream, _DELIMITERS[kind], field)
        elif is_json_lines(head, kind):
            for number, line in enumerate(read_lines(stream, start, end, compression), 1):
                yield ObjectRecord(number, parse_object(line))
        elif start == 0:
            yield from _json_values(path, stream)


def check_compression(path: str, head: bytes, compression: str | None, packed: bool) -> None:
    """Raise UserError if a file that is called compressed (`packed`) is not, and no text either: it may be damaged."""
    if packed and compression is None and not is_text(head):
        raise UserError("data.damaged_file", f"cannot read {path}: it is damaged, or not compressed as its name says")


def check_text(path: str, head: bytes, compression: str | None) -> None:
    """Raise UserError if these first bytes are of a binary format, or of UTF-16."""
    if head.startswith(UTF16):
        raise UserError("data.wrong_encoding", f"cannot read {path}: it is {UTF16_HINT}")
    if known := detect_binary_format(head):
        found = FileType(known, compression)
        raise UserError(
            "data.wrong_format", f"cannot read {path}: it seems to be {found}, not text: rename it, or set data.format"
        )


def is_json_lines(head: bytes, kind: str) -> bool:
    """Return whether a file that is named like JSON Lines (kind `jsonl`) or JSON (`json`) holds an object a line."""
    return detect_json_kind(head) == "JSON Lines" if kind == "json" else detect_json_kind(head) != "JSON"


def describe_too_long() -> str:
    """Return the reason to reject what is longer than a document may be."""
    return f"longer than {MAX_DOCUMENT_BYTES:,} bytes, the most that a document may have"


def read_lines(stream: BinaryIO, start: int, end: int, compression: str | None) -> Iterator[bytes | None]:
    """Yield the lines that start at bytes [start, end) of a plain file, each with its line end; None for a long one.

    A byte order mark is left out. Of a compressed stream yield all lines if `start` is 0, otherwise none.
    """
    if compression:
        if start > 0:
            return
        end = sys.maxsize
    elif start > 0:
        stream.seek(start - 1)
        start += _skip_line(stream) - 1  # the rest of a line that started before; just its "\n" if none did
    while start < end and (line := stream.readline(MAX_DOCUMENT_BYTES + 1)):
        length = len(line)
        if length > MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
            length += _skip_line(stream)
            yield None
        else:
            yield line.removeprefix(BOM) if start == 0 else line
        start += length


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of a line; how many bytes that were."""
    length = 0
    while part := stream.readline(_BLOCK):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def parse_object(line: bytes | None) -> Found:
    """Return the JSON object in a line, or in a whole small file; None for a line that is too long."""
    if line is None:
        return RejectedError(describe_too_long())
    try:
        source = line.strip(_JSON_SPACE.encode()).decode()
        if not source:
            return None
        if len(source) > MAX_JSON_VALUES and _count_values(source) > MAX_JSON_VALUES:
            return RejectedError(f"JSON with more than {MAX_JSON_VALUES:,} values")
        return _check_object(json.loads(source))
    except UnicodeDecodeError as error:
        return error
    except (ValueError, RecursionError) as error:
        return RejectedError(_describe_broken_json(error))


def _describe_broken_json(error: ValueError | RecursionError) -> str:
    return _TOO_DEEP if isinstance(error, RecursionError) else f"broken JSON: {getattr(error, 'msg', error)}"


def _check_object(value: Any) -> Found:
    if not isinstance(value, dict):
        return RejectedError(f"not a JSON object but {type(value).__name__}")
    return RejectedError(_TOO_DEEP) if _is_too_deep(value) else value


def _count_values(source: str) -> int:
    """About how many names and values there are in a JSON text, or in its beginning; any number if it is no JSON."""
    marks = "[{,:"
    if sum(map(source.count, marks)) <= MAX_JSON_VALUES:  # those in strings count, too
        return 0
    plain = _STRING.sub("", source.replace("\\\\", "").replace('\\"', ""))
    return sum(map(plain.partition('"')[0].count, marks))


def _is_too_deep(value: dict[str, Any]) -> bool:
    level = [one for one in value.values() if isinstance(one, _NESTS)]
    for _ in range(MAX_JSON_DEPTH - 1):
        if not level:
            return False
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, _NESTS)]
    return bool(level)


class _JsonText:
    """The text of a stream from a place on, of which more is read as it is needed."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self.path, self.text, self.at, self.ended, self.invalid = path, "", 0, False, False
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")

    def more(self, least: int = 0) -> bool:
        """Read a block more, or `least` bytes, and forget what lies before `at`; False at the end of the stream."""
        if self.ended:
            return False
        count = max(_BLOCK, least)
        block = self._stream.read(count)
        self.ended = len(block) < count
        text = self._decoder.decode(block, final=self.ended)
        self.invalid = self.invalid or not (text.isascii() or _is_unicode(text))
        self.text, self.at = self.text[self.at :] + text, 0
        return True

    def next(self) -> str:
        """The next character that is no space, "" at the end; `at` is its place."""
        while True:
            if (place := _SPACES.match(self.text, self.at)) is not None:
                self.at = place.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> tuple[Any, str]:
        """The JSON value at `at`, and its source. Raises ValueError or RecursionError if it is broken."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # a number might go on
                    source, self.at = self.text[self.at : end] if self.invalid else "", end
                    return value, source
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - 16
                if self.ended or not cut:
                    raise
            waiting = len(self.text) - self.at
            if waiting > MAX_DOCUMENT_BYTES:
                raise UserError("data.too_large", f"cannot read {self.path}: a value is {describe_too_long()}")
            if waiting > MAX_JSON_VALUES and _count_values(self.text[self.at :]) > MAX_JSON_VALUES:
                raise UserError(
                    "data.too_large", f"cannot read {self.path}: a value has more than {MAX_JSON_VALUES:,} values"
                )
            self.more(waiting)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_values(path: str, stream: BinaryIO) -> Iterator[ObjectRecord]:
    """The values of an array, or those of a file that are parted by space alone."""
    text, number = _JsonText(path, stream), 0
    is_array = text.next() == "["
    text.at += is_array
    if is_array and text.next() == "]":
        text.at += 1
        _check_end(text, "the array")
        return
    while text.next():
        number += 1
        try:
            value, source = text.value()
        except (ValueError, RecursionError) as error:
            broken = _describe_broken_json(error)
            if is_array or number > 1 or not text.ended:
                raise UserError(
                    "data.damaged_file",
                    f"cannot read {path}: value {number:,} is {broken}: repair the file. If it has an object in each "
                    "line, set data.format: jsonl",
                ) from error
            yield ObjectRecord(1, RejectedError(broken))
            return
        yield ObjectRecord(number, _utf8_error(source) or _check_object(value))
        if is_array:
            after = text.next()
            text.at += 1
            if after == "]":
                _check_end(text, "the array")
                return
            if after != ",":
                what = f"{after!r} follows value {number:,}" if after else f"it ends after value {number:,}"
                raise UserError(
                    "data.damaged_file",
                    f"cannot read {path}: {what} of the array, where ',' or ']' should be: repair the file",
                )
    if is_array:
        raise UserError(
            "data.damaged_file",
            f"cannot read {path}: it ends within the array, after value {number:,}: repair the file",
        )


def _check_end(text: _JsonText, what: str) -> None:
    if after := text.next():
        raise UserError(
            "data.damaged_file",
            f"cannot read {text.path}: {after!r} follows the end of {what}: a file is one array of objects, or has an "
            "object in each line",
        )


def _utf8_error(source: str) -> UnicodeDecodeError | None:
    """The error in the source of a value that is no UTF-8."""
    try:
        source.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return error
    return None


def _csv_rows(path: str, stream: BinaryIO, delimiters: str, field: str | None) -> Iterator[ObjectRecord]:
    """The rows of a CSV as objects by its header. Quoted fields may hold line ends."""
    read = size = 0

    def lines() -> Iterator[str]:
        nonlocal read, size
        for line in read_lines(stream, 0, sys.maxsize, None):
            read += 1
            if line is None:
                raise UserError("data.too_large", f"cannot read {path}: line {read:,} is {describe_too_long()}")
            if (size := size + len(line)) > MAX_DOCUMENT_BYTES + 1:  # with its line end
                raise UserError(
                    "data.too_large",
                    f"cannot read {path}: the row that goes on in line {read:,} is {describe_too_long()}",
                )
            yield line.decode(errors="surrogateescape")

    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    first = next(source := lines(), "")
    delimiter = next(
        (one for one in delimiters if field in _csv_header(csv.reader([first], delimiter=one))), delimiters[0]
    )
    rows = csv.reader(chain([first], source), delimiter=delimiter, strict=True)
    header = _csv_header(rows)
    if field is not None and header.count(field) != 1:
        what = "no column" if field not in header else "more than one column"
        names = shorten(", ".join(map(repr, header)), 200)
        raise UserError(
            "data.no_column",
            f"{path}: {what} {field!r} (data.text_field) in the first line, which has {names or 'nothing'}",
        )
    while True:
        line, size = read + 1, 0
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
        yield ObjectRecord(line, _csv_object(header, row))


def _csv_header(rows: Iterable[list[str]]) -> list[str]:
    """The names of the columns, by the first row; none if it is broken."""
    try:
        return next(iter(rows), [])
    except csv.Error:
        return []


def _csv_object(header: list[str], row: list[str]) -> Found:
    if not row:
        return None
    if len(row) != len(header):
        return RejectedError(f"{len(row)} fields, where the header has {len(header)}")
    for field in row:
        if not field.isascii() and (error := _utf8_error(field)):
            return error
    return dict(zip(header, row, strict=True))


MAX_COMPRESSION_RATIO = 1 << 14
"""Times that arrays may be as large as what is stored of them: deflate comes to 1032 (zlib.net/zlib_tech.html)."""
_MAX_MEMBER_BYTES = 1 << 30  # bytes of one member
_LONGEST_HEADER = 1 << 16
"""Bytes of one of tar's extended headers (pax, GNU's long names), and of the global ones of an archive together: a long
path is 4 KiB, an attribute of a file 64 KiB at most."""
_MOST_HEADERS = 16
"""Extended headers in front of one member: two as a rule."""
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def read_arrow_batches(path: str) -> tuple[Any, Iterator[Any]]:
    """The schema of an Arrow stream or file, and its record batches, one at a time.

    Raises UserError where pyarrow is not there, and for what is no such file.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            "data.missing_package", f"{path}: Arrow needs the package pyarrow: pip install pyarrow"
        ) from None

    def batches() -> Iterator[Any]:
        """The schema first."""
        try:
            file = pyarrow.OSFile(path)
            whole = file.read(6) == b"ARROW1"  # with an index at its end
            file.seek(0)
            reader = (pyarrow.ipc.open_file if whole else pyarrow.ipc.open_stream)(file)
            list(reader.schema.names)  # raises for what is no UTF-8
            yield reader.schema
            for one in map(reader.get_batch, range(reader.num_record_batches)) if whole else reader:
                one.validate(full=True)
                yield one
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, IndexError) as error:
            raise UserError("data.damaged_file", f"{path} is damaged, or no Arrow that can be read: {error}") from error

    found = batches()
    return next(found), found


class _StrictTarInfo(tarfile.TarInfo):
    """A header. (tarfile takes one that is damaged, or missing at the end, for the end of the archive, and reads one of
    any length into memory.)"""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        before = getattr(tarfile, "headers_before", 0)  # it calls itself for what follows an extended header
        if before > _MOST_HEADERS:
            raise ReadError(f"more than {_MOST_HEADERS} extended headers before one member")
        tarfile.headers_before = before + 1
        try:
            found = super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # two blocks of zeros
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error
        finally:
            tarfile.headers_before = before
        if sum(map(len, (*tarfile.pax_headers, *tarfile.pax_headers.values()))) > _LONGEST_HEADER:
            raise ReadError(f"global headers of more than {_LONGEST_HEADER:,} bytes")
        return found

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _EXTENDED and not 0 <= found.size <= _LONGEST_HEADER:
            raise ReadError(f"an extended header of {found.size:,} bytes, more than {_LONGEST_HEADER:,}")
        return found

    def _proc_sparse(self, tarfile: Any) -> Any:
        raise ReadError(f"{self.name} has holes (GNU's sparse format): write the archive without --sparse")

    def _proc_gnusparse_10(self, next: Any, *_: Any) -> Any:
        raise ReadError(f"{next.name} has holes (GNU's sparse format): write the archive without --sparse")


def read_tar_members(
    path: str, endings: tuple[str, ...], most: int = _MAX_MEMBER_BYTES
) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of each ordinary file with such an ending, in order; no content of one with more than `most`
    bytes. Raises UserError for a damaged tar."""
    try:
        with (
            open_decompressed(path) as (stream, _, _),
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_StrictTarInfo) as tar,
        ):
            while (member := tar.next()) is not None:
                cast(Any, tar).members = []  # it keeps the headers of all that it has read
                if member.isfile() and member.name.endswith(endings):
                    if member.issparse():
                        raise UserError(
                            "data.unsupported_file",
                            f"{path}: {member.name} has holes: write the archive without --sparse",
                        )
                    if member.size > most:
                        yield member.name, None
                        continue
                    file = tar.extractfile(member)
                    content = file.read() if file else b""
                    if len(content) < member.size:
                        raise UserError("data.damaged_file", f"{path} is cut short in {member.name}")
                    yield member.name, content
    except (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError) as error:
        raise UserError("data.damaged_file", f"{path} is damaged, or no tar that can be read: {error}") from error


FILTER_FILE = "filter.py"
DocumentFilter = Callable[[Mapping[str, Any]], bool]


class FilterError(Exception):
    """What a filter raised, or gave that is neither True nor False."""


def find_filter_file(target: str) -> Path:
    """The file of a filter `FOLDER/MODULE:FUNCTION`. Raises UserError where it is missing or lacks the function."""
    module, _, function = target.rpartition(":")
    folder, name = os.path.split(module)
    relative = name.removesuffix(".py").replace(".", os.sep) + ".py"
    file = next((path for place in (folder, *sys.path) if (path := Path(place, relative)).is_file()), None)
    if file is None:
        raise UserError(
            "data.no_filter", f"data.filter: there is no {relative} in {folder}, nor in a folder of PYTHONPATH"
        )
    try:
        with translate_read_errors(str(file)):
            body = ast.parse(file.read_bytes(), str(file)).body
    except (SyntaxError, ValueError) as error:
        raise UserError("data.invalid_filter", f"data.filter: {file} is no Python that can be read: {error}") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == function for node in body):
        raise UserError("data.invalid_filter", f"data.filter: {file} has no function {function!r} at its top level")
    return file


def load_filter(file: Path, target: str) -> DocumentFilter:
    """The function, of a copy of its file. It raises FilterError; this raises UserError where the file does."""
    function = target.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location("sluice_filter", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a program of others raises
        raise UserError(
            "data.invalid_filter", f"data.filter: {target} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    called = getattr(module, function)

    def keep(document: Mapping[str, Any]) -> bool:
        try:
            found = called(document)
        except Exception as error:
            raise FilterError(f"it raised {type(error).__name__}: {shorten(str(error), 300)}") from error
        if type(found).__name__ not in ("bool", "bool_"):  # Python's, or NumPy's
            raise FilterError(f"it returned {shorten(repr(found), 100)}, neither True nor False")
        return bool(found)

    return keep
