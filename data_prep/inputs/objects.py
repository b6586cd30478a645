"""Files whose records are objects: JSON Lines, JSON (an array of objects, or objects one after another), CSV and TSV.

Each reader gives, record by record, the line where it begins (of JSON: the number of the value) and the object, or the
reason why there is none. Files are read in blocks: memory depends on the longest record, not on the file.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from textwrap import shorten
from typing import Any, BinaryIO, NamedTuple

from data_prep.inputs.compression import open_decompressed
from data_prep.inputs.content import BOM, UTF16, UTF16_ADVICE, Seems, binary_kind, is_text, json_kind
from pipeline.base.errors import UserError

LONGEST = 1 << 26
"""Bytes of one document: each takes some 140 of memory to tokenise (measured up to 32 MB). Also of one line."""
MOST_VALUES = 1 << 22
"""Names and values in one JSON object: each takes up to 240 bytes of memory."""
DEEPEST = 100
"""Arrays and objects within each other in one JSON object. Python's own limit depends on who calls."""
_TOO_DEEP = f"JSON that nests more than {DEEPEST} deep"
_NESTS = (dict, list)
_STRING = re.compile('"[^"]*"')
_BLOCK = 1 << 20
_JSON_SPACE = " \t\r\n"  # RFC 8259, section 2
_DECODER = json.JSONDecoder()
_SPACES = re.compile(r"[ \t\r\n]*")
_DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}
Found = dict[str, Any] | Exception | None
"""An object; the exception that says why there is none; None for a blank line."""


class Rejected(ValueError):
    """Why there is no document in a line or row."""


class Record(NamedTuple):
    """One line, value or row."""

    line: int
    found: Found


def read_objects(
    path: str, start: int, end: int, kind: str, field: str | None, packed: bool = False
) -> Iterator[Record]:
    """Yield the records of a piece [start, end) of a file.

    kind: `jsonl`, `json`, `csv` or `tsv`. A plain file of JSON Lines has a piece for any range of bytes; of every other
    file the piece from byte 0 on has all records, and other pieces have none. field: a column that a CSV must have.
    packed: the name says that the file is compressed.

    Raises UserError naming the file for content of another kind, for a record that is too long, and for a file that
    ends within a record.
    """
    with open_decompressed(path) as (stream, head, compression):
        check_packed(path, head, compression, packed)
        check_text(path, head, compression)
        if packed and compression is None and head and kind in ("jsonl", "json") and json_kind(head) is None:
            raise UserError(f"cannot read {path}: it is not compressed, as its name says, and no JSON")
        if kind in _DELIMITERS:
            if start == 0:
                yield from _rows(path, stream, _DELIMITERS[kind], field)
        elif is_json_lines(head, kind):
            for number, line in enumerate(lines_of(stream, start, end, compression), 1):
                yield Record(number, object_in(line))
        elif start == 0:
            yield from _values(path, stream)


def check_packed(path: str, head: bytes, compression: str | None, packed: bool) -> None:
    """Raise UserError if a file that is called compressed (`packed`) is not, and no text either: it may be damaged."""
    if packed and compression is None and not is_text(head):
        raise UserError(f"cannot read {path}: it is damaged, or not compressed as its name says")


def check_text(path: str, head: bytes, compression: str | None) -> None:
    """Raise UserError if these first bytes are of a binary format, or of UTF-16."""
    if head.startswith(UTF16):
        raise UserError(f"cannot read {path}: it is {UTF16_ADVICE}")
    if known := binary_kind(head):
        found = Seems(known, compression)
        raise UserError(f"cannot read {path}: it seems to be {found}, not text: rename it, or set data.format")


def is_json_lines(head: bytes, kind: str) -> bool:
    """Return whether a file that is named like JSON Lines (kind `jsonl`) or JSON (`json`) holds an object a line."""
    return json_kind(head) == "JSON Lines" if kind == "json" else json_kind(head) != "JSON"


def too_long() -> str:
    """Return the reason to reject what is longer than a document may be."""
    return f"longer than {LONGEST:,} bytes, the most that a document may have"


def lines_of(stream: BinaryIO, start: int, end: int, compression: str | None) -> Iterator[bytes | None]:
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
    while start < end and (line := stream.readline(LONGEST + 1)):
        length = len(line)
        if length > LONGEST and not line.endswith(b"\n"):
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


def object_in(line: bytes | None) -> Found:
    """Return the JSON object in a line, or in a whole small file; None for a line that is too long."""
    if line is None:
        return Rejected(too_long())
    try:
        source = line.strip(_JSON_SPACE.encode()).decode()
        if not source:
            return None
        if len(source) > MOST_VALUES and _value_count(source) > MOST_VALUES:
            return Rejected(f"JSON with more than {MOST_VALUES:,} values")
        return _checked(json.loads(source))
    except UnicodeDecodeError as error:
        return error
    except (ValueError, RecursionError) as error:
        return Rejected(_broken(error))


def _broken(error: ValueError | RecursionError) -> str:
    return _TOO_DEEP if isinstance(error, RecursionError) else f"broken JSON: {getattr(error, 'msg', error)}"


def _checked(value: Any) -> Found:
    if not isinstance(value, dict):
        return Rejected(f"not a JSON object but {type(value).__name__}")
    return Rejected(_TOO_DEEP) if _is_too_deep(value) else value


def _value_count(source: str) -> int:
    """About how many names and values there are in a JSON text, or in its beginning; any number if it is no JSON."""
    marks = "[{,:"
    if sum(map(source.count, marks)) <= MOST_VALUES:  # those in strings count, too
        return 0
    plain = _STRING.sub("", source.replace("\\\\", "").replace('\\"', ""))
    return sum(map(plain.partition('"')[0].count, marks))


def _is_too_deep(value: dict[str, Any]) -> bool:
    level = [one for one in value.values() if isinstance(one, _NESTS)]
    for _ in range(DEEPEST - 1):
        if not level:
            return False
        children = (child for one in level for child in (one.values() if isinstance(one, dict) else one))
        level = [child for child in children if isinstance(child, _NESTS)]
    return bool(level)


class _Text:
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
            if waiting > LONGEST:
                raise UserError(f"cannot read {self.path}: a value is {too_long()}")
            if waiting > MOST_VALUES and _value_count(self.text[self.at :]) > MOST_VALUES:
                raise UserError(f"cannot read {self.path}: a value has more than {MOST_VALUES:,} values")
            self.more(waiting)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _values(path: str, stream: BinaryIO) -> Iterator[Record]:
    """The values of an array, or those of a file that are parted by space alone."""
    text, number = _Text(path, stream), 0
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
            broken = _broken(error)
            if is_array or number > 1 or not text.ended:
                raise UserError(
                    f"cannot read {path}: value {number:,} is {broken}: repair the file. If it has an object in each "
                    "line, set data.format: jsonl"
                ) from error
            yield Record(1, Rejected(broken))
            return
        yield Record(number, _valid(source) or _checked(value))
        if is_array:
            after = text.next()
            text.at += 1
            if after == "]":
                _check_end(text, "the array")
                return
            if after != ",":
                what = f"{after!r} follows value {number:,}" if after else f"it ends after value {number:,}"
                raise UserError(f"cannot read {path}: {what} of the array, where ',' or ']' should be: repair the file")
    if is_array:
        raise UserError(f"cannot read {path}: it ends within the array, after value {number:,}: repair the file")


def _check_end(text: _Text, what: str) -> None:
    if after := text.next():
        raise UserError(
            f"cannot read {text.path}: {after!r} follows the end of {what}: a file is one array of objects, or has an "
            "object in each line"
        )


def _valid(source: str) -> UnicodeDecodeError | None:
    """The error in the source of a value that is no UTF-8."""
    try:
        source.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        return error
    return None


def _rows(path: str, stream: BinaryIO, delimiters: str, field: str | None) -> Iterator[Record]:
    """The rows of a CSV as objects by its header. Quoted fields may hold line ends."""
    read = size = 0

    def lines() -> Iterator[str]:
        nonlocal read, size
        for line in lines_of(stream, 0, sys.maxsize, None):
            read += 1
            if line is None:
                raise UserError(f"cannot read {path}: line {read:,} is {too_long()}")
            if (size := size + len(line)) > LONGEST + 1:  # with its line end
                raise UserError(f"cannot read {path}: the row that goes on in line {read:,} is {too_long()}")
            yield line.decode(errors="surrogateescape")

    csv.field_size_limit(LONGEST)
    first = next(source := lines(), "")
    delimiter = next((one for one in delimiters if field in _fields(csv.reader([first], delimiter=one))), delimiters[0])
    rows = csv.reader(chain([first], source), delimiter=delimiter, strict=True)
    header = _fields(rows)
    if field is not None and header.count(field) != 1:
        what = "no column" if field not in header else "more than one column"
        names = shorten(", ".join(map(repr, header)), 200)
        raise UserError(f"{path}: {what} {field!r} (data.text_field) in the first line, which has {names or 'nothing'}")
    while True:
        line, size = read + 1, 0
        try:
            row = next(rows, None)
        except csv.Error as error:
            if "field limit" in str(error):
                raise UserError(f"cannot read {path}: a field of the row in line {line:,} is {too_long()}") from None
            if "unexpected end of data" in str(error):
                raise UserError(f"cannot read {path}: the row in line {line:,} has an unclosed quote") from None
            yield Record(line, Rejected(f"broken CSV: {error}"))
            continue
        if row is None:
            return
        yield Record(line, _row(header, row))


def _fields(rows: Iterable[list[str]]) -> list[str]:
    """The names of the columns, by the first row; none if it is broken."""
    try:
        return next(iter(rows), [])
    except csv.Error:
        return []


def _row(header: list[str], row: list[str]) -> Found:
    if not row:
        return None
    if len(row) != len(header):
        return Rejected(f"{len(row)} fields, where the header has {len(header)}")
    for field in row:
        if not field.isascii() and (error := _valid(field)):
            return error
    return dict(zip(header, row, strict=True))
