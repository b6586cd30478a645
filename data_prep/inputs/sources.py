"""Sources: the documents that stand in files (data_prep/inputs/listing.py says in which).

:func:`read_documents` reads one piece of one input:

    format      files                           a document is                        a piece is
    text        .txt, the library's .py files   the whole file                       the whole file
    lines       .txt, `text_documents: line`    a line without its line end          bytes [start, end)
    jsonl       .jsonl                          a line's object: its `text_field`,   bytes [start, end)
                                                or what `data.records` says
    gzip, zstd  .jsonl.gz, .jsonl.zst           the same                             the whole file
    parquet     .parquet                        a row of column `text_field`         row groups [start, end)
    arrow       .arrow, of Hugging Face         a row of column `text_field`         the whole file
    tar         .tar, .tar.gz (WebDataset)      a member .txt; of a sample (KEY.*)   the whole file
                                                without one, .json's field

A byte range stands for the lines that *start* in it, so that any cut of a file gives each line once.

Text is taken as it stands: strict UTF-8, no translation of line ends, nothing stripped, a byte order mark is
text. Empty documents and blank lines are no documents: they are neither used nor counted.

A line, row or member has at most `LONGEST` bytes, and a JSON object at most `MOST_VALUES` values, nested at most
`DEEPEST` deep. What exceeds that is rejected as a document, without holding it in memory: a small compressed file may
have lines of any length.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple, TypeVar

from data_prep.inputs.filters import FilterError, Keep
from data_prep.inputs.row_files import arrow_batches, tar_members
from pipeline.base.command import command
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import reading

ENDINGS = {".txt": "text", ".jsonl": "jsonl", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd", ".parquet": "parquet"}
"""What the files of an ending are; a .txt file may also be `lines`."""
ENDINGS |= {".arrow": "arrow", ".tar": "tar", ".tar.gz": "tar"}
LONGEST = 1 << 26
"""Bytes of one document: each takes some 140 of memory to tokenise (measured up to 32 MB)."""
MOST_VALUES = 1 << 22
"""Names and values in one line of JSON: each takes up to 240 bytes of memory."""
DEEPEST = 100
"""Arrays and objects within each other in one line of JSON. Python's own limit depends on who calls."""
_LARGEST_SAMPLE = 1 << 28  # bytes of the members of one sample in a tar
_TOO_LONG = f"longer than {LONGEST:,} bytes, the most that a document may have"
_TOO_DEEP = f"JSON that nests more than {DEEPEST} deep"
_NESTS = (dict, list)
_STRING = re.compile('"[^"]*"')
_BLOCK = 1 << 20
_JSON_SPACE = b" \t\r\n"  # RFC 8259, section 2


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
        out = f"put it back, or go on with what there is now: `{command('resume', 'RUN')}`"
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
            raise InputError(problem)


Content = TypeVar("Content", bound=bytes | None)
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


class Rejected(ValueError):
    """Why there is no document in a line or row."""


Record = tuple[str, Spans]
"""The text that a line's object comes to, and what is learned of it."""
Read = Callable[[dict[str, Any]], Record]
"""From a line's object; raises Rejected for one that is no such record."""


def read_documents(
    source: Input, start: int, end: int, text_field: str, read: Read | None = None, keep: Keep | None = None
) -> Iterator[Document]:
    """One :class:`Document` for each line, row or file of the piece, in order; blank ones too (text "").

    read: makes a record of a line's object, where lines hold more than text. keep: the user's filter; what it leaves
    out has the reason FILTERED. Raises UserError naming the file when it cannot be read at all, and where `keep` fails.
    """
    line = 0
    with reading(source.path):
        try:
            for document in _read(source, start, end, text_field, read, keep):
                line = document.line
                yield document
        except FilterError as error:
            place = f"record {line + 1}" + (f" of those from {start:,} on" if start else "")
            raise UserError(f"data.filter: {source.path}, {place}: {error}") from error


def _read(source: Input, start: int, end: int, field: str, read: Read | None, keep: Keep | None) -> Iterator[Document]:
    if source.format in JSON_LINES and (read or keep):
        plain = read or (lambda value: (text_in(value, field), ()))

        def kept(value: dict[str, Any]) -> Record:
            found = plain(value)
            if keep is not None and found[0] and not keep(value):
                raise Rejected(FILTERED)
            return found

        yield from _records(source.format, source.path, start, end, kept)
        return
    for document in FORMATS[source.format].read(source.path, start, end, field):
        left_out = keep is not None and document.text and not keep({field: document.text})
        yield document._replace(text="", reason=FILTERED) if left_out else document


def _text_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        content = file.read()
    try:
        yield Document(1, content.decode())
    except UnicodeDecodeError as error:
        yield Document(content.count(b"\n", 0, error.start) + 1, "", _bad_byte(error))


def _line_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        yield from _documents(_lines_from(file, start, end), _line_text)


def _line_text(line: bytes | None) -> str:
    if line is None:
        raise Rejected(_TOO_LONG)
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def _plain_lines(path: str, start: int, end: int) -> Iterator[bytes | None]:
    with open(path, "rb") as file:
        yield from _lines_from(file, start, end)


def _gzip_lines(path: str, start: int, end: int) -> Iterator[bytes | None]:
    with gzip.open(path) as file:
        yield from (line for line, _ in _bounded_lines(file))


def _zstd_lines(path: str, start: int, end: int) -> Iterator[bytes | None]:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: .zst needs the package pyarrow: pip install pyarrow") from None
    with pyarrow.input_stream(path, compression="zstd") as stream:  # all frames; one that is cut short is an error
        yield from (line for line, _ in _bounded_lines(io.BufferedReader(stream, _BLOCK)))


JSON_LINES = {"jsonl": _plain_lines, "gzip": _gzip_lines, "zstd": _zstd_lines}
"""Formats whose lines are JSON objects, and the lines of a piece of a file."""


def _json_documents(file_format: str, path: str, start: int, end: int, field: str) -> Iterator[Document]:
    yield from _records(file_format, path, start, end, lambda value: (text_in(value, field), ()))


def _records(file_format: str, path: str, start: int, end: int, read: Read) -> Iterator[Document]:
    yield from _documents(JSON_LINES[file_format](path, start, end), partial(_json_record, read))


def _documents(contents: Iterable[Content], text_of: Callable[[Content], str | Record]) -> Iterator[Document]:
    """A document for each line or row; `text_of` raises Rejected or UnicodeDecodeError where there is none."""
    for number, content in enumerate(contents, 1):
        try:
            found = text_of(content)
            text, learned = (found, ()) if isinstance(found, str) else found
            yield Document(number, text, learned=learned)
        except UnicodeDecodeError as error:
            yield Document(number, "", _bad_byte(error))
        except Rejected as error:
            yield Document(number, "", str(error))


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start}"


def _lines_from(file: BinaryIO, start: int, end: int) -> Iterator[bytes | None]:
    """The lines that start at bytes [start, end), each with its line end; None for one that is too long."""
    if start > 0:
        file.seek(start - 1)
        start += _skip_line(file) - 1  # the rest of a line that started before; just its "\n" if none did
    lines = _bounded_lines(file)
    while start < end and (found := next(lines, None)):
        line, length = found
        start += length
        yield line


def _bounded_lines(file: BinaryIO | gzip.GzipFile) -> Iterator[tuple[bytes | None, int]]:
    """Each line with its line end, and its length; None for the content of one that is too long."""
    while line := file.readline(LONGEST + 1):
        if len(line) > LONGEST and not line.endswith(b"\n"):
            yield None, len(line) + _skip_line(file)
        else:
            yield line, len(line)


def _skip_line(file: BinaryIO | gzip.GzipFile) -> int:
    """Read to the end of a line; how many bytes that were."""
    length = 0
    while part := file.readline(_BLOCK):
        length += len(part)
        if part.endswith(b"\n"):
            break
    return length


def _json_record(read: Read, line: bytes | None) -> str | Record:
    if line is None:
        raise Rejected(_TOO_LONG)
    source = line.strip(_JSON_SPACE).decode()
    if not source:
        return ""
    if len(source) > MOST_VALUES and _value_count(source) > MOST_VALUES:
        raise Rejected(f"JSON with more than {MOST_VALUES:,} values")
    try:
        value = json.loads(source)
    except RecursionError:
        raise Rejected(_TOO_DEEP) from None
    except ValueError as error:
        raise Rejected(f"broken JSON: {getattr(error, 'msg', error)}") from None
    if not isinstance(value, dict):
        raise Rejected(f"not a JSON object but {type(value).__name__}")
    if _is_too_deep(value):
        raise Rejected(_TOO_DEEP)
    return read(value)


def _value_count(source: str) -> int:
    """About how many names and values there are in a JSON text; of one that is none, any number."""
    marks = "[{,:"
    if sum(map(source.count, marks)) <= MOST_VALUES:  # those in strings count, too
        return 0
    plain = source.replace("\\\\", "").replace('\\"', "")
    return sum(map(_STRING.sub("", plain).count, marks))


def _is_too_deep(value: dict[str, Any]) -> bool:
    level = [one for one in value.values() if isinstance(one, _NESTS)]
    for _ in range(DEEPEST - 1):
        if not level:
            return False
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, _NESTS)]
    return bool(level)


def text_in(value: Mapping[str, Any], field: str) -> str:
    """The text in a field of an object. Raises Rejected where there is none."""
    if field not in value:
        raise Rejected(f"no field {field!r}; there are {shorten(', '.join(map(repr, value)), 200) or 'none'}")
    text = value[field]
    if not isinstance(text, str):
        raise Rejected(f"field {field!r} is no string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON's \ud800 can name half a character
        raise Rejected(f"field {field!r} holds a lone surrogate") from None
    return text


def _parquet(path: str, column: str) -> Any:
    """An open parquet file that has the text column. Raises UserError naming the file otherwise."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: .parquet needs the package pyarrow: pip install pyarrow") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"cannot read {path}: {error}") from error
    schema = file.schema_arrow
    if column not in schema.names:
        raise UserError(f"{path}: no column {column!r} (data.text_field); there are {', '.join(schema.names)}")
    kind, types = schema.field(column).type, pyarrow.types
    if not any(test(kind) for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)):
        raise UserError(f"{path}: column {column!r} (data.text_field) holds {kind}, not text")
    return file


def parquet_groups(path: str, column: str) -> list[int]:
    """Bytes of text in each row group, uncompressed. Raises UserError for what is no parquet file with the column."""
    with reading(path), _parquet(path, column) as file:
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        if file.metadata.num_columns != len(file.schema_arrow.names):  # nested columns: leaves are not columns
            return [group.total_byte_size for group in groups]
        place = file.schema_arrow.names.index(column)
        return [group.column(place).total_uncompressed_size for group in groups]


def _parquet_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    import pyarrow

    with _parquet(path, column) as file:
        batches = file.iter_batches(batch_size=1024, row_groups=list(range(start, end)), columns=[column])
        # As bytes: Arrow does not check that a string column holds UTF-8, and one bad row must not take its whole
        # batch along.
        rows = (row for batch in batches for row in batch.column(0).cast(pyarrow.large_binary()).to_pylist())
        try:
            yield from _documents(rows, partial(_text_of, column))
        except pyarrow.ArrowException as error:
            raise UserError(f"cannot read {path}: {error}") from error


def _text_of(column: str, row: bytes | None) -> str:
    if row is None:
        raise Rejected(f"field {column!r} is null")
    if len(row) > LONGEST:
        raise Rejected(_TOO_LONG)
    return row.decode()


def _arrow_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    schema, batches = arrow_batches(path)
    kind = schema.field(column).type if column in schema.names else "no such column"
    if str(kind) not in ("string", "large_string", "binary", "large_binary"):
        raise UserError(f"{path}: column {column!r} (data.text_field) should hold text: {kind}; {schema.names}")
    rows = (row for batch in batches for row in batch[column].cast("large_binary").to_pylist())
    yield from _documents(rows, partial(_text_of, column))


def _tar_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    number = 0
    members = tar_members(path, (".txt", ".json"), LONGEST)
    for key, same in groupby(members, lambda member: _sample_of(member[0])):
        texts: list[bytes | None] = []
        objects: list[bytes | None] = []
        size = 0
        for name, content in same:
            (texts if name.endswith(".txt") else objects).append(content)
            if (size := size + len(content or b"")) > _LARGEST_SAMPLE:
                raise UserError(
                    f"{path}: the members of sample {key!r} have more than {_LARGEST_SAMPLE:,} bytes: give samples "
                    "different names, or fewer members"
                )
        documents = _documents(texts, _member_text) if texts else _documents(
            objects, partial(_json_record, lambda value: (text_in(value, field), ()))
        )  # fmt: skip
        for one in documents:
            yield one._replace(line=(number := number + 1))


def _member_text(content: bytes | None) -> str:
    if content is None:
        raise Rejected(_TOO_LONG)
    return content.decode()


def _sample_of(name: str) -> str:
    """The key of a WebDataset's sample: a member's name up to the first dot behind its folder."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


class Format(NamedTuple):
    """How the files of a format are read."""

    read: Callable[[str, int, int, str], Iterator[Document]]
    """The documents of a piece [start, end) of the file at a path, by `text_field`."""
    splits: bool = False
    """Whether any byte range of a file is a piece; else the whole file is one."""
    expansion: int = 1
    """Bytes of text for each byte of a file: rough, but only the balance between units depends on it."""


FORMATS = {
    "text": Format(_text_documents),
    "lines": Format(_line_documents, splits=True),
    "jsonl": Format(partial(_json_documents, "jsonl"), splits=True),
    "gzip": Format(partial(_json_documents, "gzip"), expansion=4),
    "zstd": Format(partial(_json_documents, "zstd"), expansion=4),
    "parquet": Format(_parquet_documents),
    "arrow": Format(_arrow_documents),
    "tar": Format(_tar_documents),
}
