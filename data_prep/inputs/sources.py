"""Sources: the documents that stand in files (data_prep/inputs/listing.py says in which).

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

A line, row or member has a bound, and so has a JSON object (data_prep/inputs/objects.py). What exceeds it is rejected
as a document, without holding it in memory: a small compressed file may have lines of any length.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from textwrap import shorten
from typing import Any, NamedTuple

from data_prep.inputs import objects
from data_prep.inputs.compression import COMPRESSIONS, HEAD, open_decompressed
from data_prep.inputs.content import BOM, UTF16, UTF16_ADVICE, Seems, binary_kind
from data_prep.inputs.filters import FilterError, Keep
from data_prep.inputs.objects import Rejected, check_packed, check_text, lines_of, object_in, read_objects
from data_prep.inputs.row_files import arrow_batches, tar_members
from pipeline.base.command import command
from pipeline.base.errors import InputError, UserError
from pipeline.base.files import reading

_LARGEST_SAMPLE = 1 << 28  # bytes of the members of one sample in a tar


class Format(NamedTuple):
    """What a file is by its name, and how it is planned."""

    kind: str
    """How it is read, see above."""
    splits: bool = False
    """Whether any byte range of a file is a piece; else the whole file is one."""
    expansion: int = 1
    """Bytes of text for each byte of a file: rough, but only the balance between units depends on it."""


def compressed(kind: str, ending: str) -> str:
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
FORMATS = {kind: Format(kind, splits=kind in ("lines", "jsonl", "json")) for kind in (*_KINDS, "lines")}
FORMATS |= {
    compressed(kind, ending): Format(kind, expansion=expansion)
    for kind in (*_KINDS, "lines")
    for ending, expansion in COMPRESSIONS.items()
}
FORMATS |= {kind: Format(kind) for kind in ("parquet", "arrow", "tar")}
"""The formats of inputs, by the names that `units.json` has for them."""
ENDINGS = {ending: kind for kind, endings in _KINDS.items() for ending in endings}
ENDINGS |= {
    ending + packed: compressed(kind, packed)
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
    kind, packed = FORMATS[source.format].kind, FORMATS[source.format].expansion > 1
    if kind in OBJECTS:
        plain = read or (lambda value: (text_in(value, field), ()))

        def kept(value: dict[str, Any]) -> Record:
            found = plain(value)
            if keep is not None and found[0] and not keep(value):
                raise Rejected(FILTERED)
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


OBJECTS = ("jsonl", "json", "csv", "tsv")
"""Kinds whose records are objects (data_prep/inputs/objects.py)."""


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
    except Rejected as error:
        return Document(line, "", str(error))


def _documents(contents: Iterable[Any], text_of: Callable[[Any], str | Record]) -> Iterator[Document]:
    """A document for each line or row; `text_of` raises Rejected or UnicodeDecodeError where there is none."""
    return (_document(number, content, text_of) for number, content in enumerate(contents, 1))


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at byte {error.start}"


def _text_documents(path: str, start: int, end: int, packed: bool) -> Iterator[Document]:
    with open_decompressed(path) as (stream, head, compression):
        check_packed(path, head, compression, packed)
        content = head if len(head) < HEAD else stream.read(objects.LONGEST + 1)
    if len(content) > objects.LONGEST:
        yield Document(1, "", f"{objects.too_long()}: set data.text_documents: line, or cut it into files")
        return
    content = content.removeprefix(BOM)
    try:
        yield Document(1, content.decode())
    except UnicodeDecodeError as error:
        reason = _bad_byte(error)
        if known := binary_kind(head):
            reason = f"no text, but what seems to be {Seems(known, compression)}"
        if head.startswith(UTF16):
            reason = UTF16_ADVICE
        yield Document(content.count(b"\n", 0, error.start) + 1, "", reason)


def _line_documents(path: str, start: int, end: int, packed: bool) -> Iterator[Document]:
    with open_decompressed(path) as (stream, head, compression):
        check_packed(path, head, compression, packed)
        check_text(path, head, compression)
        yield from _documents(lines_of(stream, start, end, compression), _line_text)


def _line_text(line: bytes | None) -> str:
    if line is None:
        raise Rejected(objects.too_long())
    return line.removesuffix(b"\n").removesuffix(b"\r").decode()


def value_in(value: Mapping[str, Any], field: str) -> Any:
    """Return what is in a field of an object; `a.b` is field `b` of the object in field `a`, unless there is a field
    `a.b`. Raises Rejected if there is no such field."""
    found: Any = value
    for name in [field] if field in value else field.split("."):
        if not isinstance(found, Mapping) or name not in found:
            raise Rejected(f"no field {field!r}; there are {shorten(', '.join(map(repr, value)), 200) or 'none'}")
        found = found[name]
    return found


def text_in(value: Mapping[str, Any], field: str) -> str:
    """Return the text in a field of an object. Raises Rejected if there is none."""
    text = value_in(value, field)
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
                f"{path}: no column {column!r} (data.text_field); there are {there}" + (f" in {part}" if part else "")
            )
        kind = inside[name]
        if number + 1 < len(names) and not types.is_struct(kind):
            outer = ".".join(names[: number + 1])
            raise UserError(f"{path}: column {outer!r} holds {kind}, which has no fields (data.text_field: {column})")
    value = kind.value_type if types.is_dictionary(kind) else kind
    if str(value) not in _TEXTS:
        has_fields = types.is_struct(kind) and kind.num_fields
        out = f": name one of its fields, such as {column}.{kind[0].name}" if has_fields else ""
        raise UserError(f"{path}: column {column!r} (data.text_field) holds {kind}, not text{out}")
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


def parquet_groups(path: str, column: str) -> list[int]:
    """Bytes of text in each row group, uncompressed. Raises UserError for what is no parquet file with the column."""
    with reading(path), _parquet(path, column) as file:
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
            raise UserError(f"cannot read {path}: {error}") from error


def _row_documents(batches: Iterable[Any], names: Sequence[str]) -> Iterator[Document]:
    """The documents of the column with these names, batch by batch."""
    null = Rejected(f"field {'.'.join(names)!r} is null")
    rows = (null if row is None else row for batch in batches for row in _as_bytes(batch, names))
    return _documents(rows, _text_of)


def _text_of(content: bytes | None) -> str:
    """The text of a row, or of a tar's member that is None if it is too long."""
    if content is None or len(content) > objects.LONGEST:
        raise Rejected(objects.too_long())
    return content.decode()


def _arrow_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    schema, batches = arrow_batches(path)
    yield from _row_documents(batches, _column(path, schema, column))


def _tar_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    number = 0
    members = tar_members(path, (".txt", ".json"), objects.LONGEST)
    for key, same in groupby(members, lambda member: _sample_of(member[0])):
        texts: list[bytes | None] = []
        values: list[bytes | None] = []
        size = 0
        for name, content in same:
            (texts if name.endswith(".txt") else values).append(content and content.removeprefix(BOM))
            if (size := size + len(content or b"")) > _LARGEST_SAMPLE:
                raise UserError(
                    f"{path}: the members of sample {key!r} have more than {_LARGEST_SAMPLE:,} bytes: give samples "
                    "different names, or fewer members"
                )
        if texts:
            documents = _documents(texts, _text_of)
        else:
            documents = _documents(map(object_in, values), lambda value: "" if value is None else text_in(value, field))
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
