"""Sources: which files a config names, and the documents that stand in them.

A source is `python-stdlib` or a glob. :func:`find_inputs` turns the config's list into inputs, each with its
format; :func:`read_documents` reads one piece of one input:

    format      files                           a document is                        a piece is
    text        .txt, the library's .py files   the whole file                       the whole file
    lines       .txt, `text_documents: line`    a line without its line end          bytes [start, end)
    jsonl       .jsonl                          `text_field` of a line's object      bytes [start, end)
    gzip, zstd  .jsonl.gz, .jsonl.zst           the same                             the whole file
    parquet     .parquet                        a row of column `text_field`         row groups [start, end)

A byte range stands for the lines that *start* in it, so that any cut of a file gives each line once.

Text is taken as it stands: strict UTF-8, no translation of line ends, nothing stripped, a byte order mark is
text. Empty documents and blank lines are no documents: they are neither used nor counted.
"""

from __future__ import annotations

import dataclasses
import glob
import gzip
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from pipeline.base.errors import UserError
from pipeline.base.files import reading
from pipeline.config.sections import DataConfig

PYTHON_STDLIB = "python-stdlib"
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
ENDINGS = {".txt": "text", ".jsonl": "jsonl", ".jsonl.gz": "gzip", ".jsonl.zst": "zstd", ".parquet": "parquet"}
"""What the files of an ending are; a .txt file may also be `lines`."""
_BLOCK = 1 << 20
_JSON_SPACE = b" \t\r\n"  # RFC 8259, section 2


@dataclasses.dataclass(frozen=True)
class Input:
    """One input file as it was when it was listed: absolute path, size in bytes, time in ns, format (see above)."""

    path: str
    size: int
    mtime_ns: int
    format: str

    @property
    def splits(self) -> bool:
        """Whether any byte range of the file is a piece."""
        return FORMATS[self.format].splits

    @property
    def text_bytes(self) -> int:
        """About how many bytes of text it holds."""
        return self.size * FORMATS[self.format].expansion


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One line, row or whole file: its text, or the reason why there is none."""

    line: int
    """Line (parquet: row) within the piece, from 1. Of an unreadable whole file: where the bad byte stands."""
    text: str
    """The text; empty for a blank line or a rejected document."""
    reason: str | None = None
    """Why the document is rejected."""


def find_inputs(data: DataConfig, formats: Mapping[str, str] | None = None) -> list[Input]:
    """All inputs of the config, in the order of `data.source` and sorted by path within each of its items.

    `formats`: the endings that may stand there and what they are; without it, those of texts.
    A file that two items name counts once, at its first place. Raises UserError naming the item for a glob
    without a match, and naming the file for an ending that no format has or a file that cannot be read.
    """
    found: dict[str, Input] = {}
    for source in data.sources:
        if source == PYTHON_STDLIB:
            paths = _stdlib_files(sysconfig.get_path("stdlib"))
        else:
            pattern = os.path.expanduser(source)
            matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
            paths = sorted(os.path.abspath(path) for path in matches if not os.path.isdir(path))
            if not paths:
                raise UserError(
                    f"data.source: {source!r} matches no file (looked from {os.getcwd()}); name "
                    f"{', '.join(formats or ENDINGS)} files" + ("" if formats else f", or {PYTHON_STDLIB}")
                )
        for path in paths:
            file_format = "text" if source == PYTHON_STDLIB else _format(path, data, formats or ENDINGS)
            with reading(path):
                stat = os.stat(path)
            found.setdefault(path, Input(path, stat.st_size, stat.st_mtime_ns, file_format))
    return list(found.values())


def _stdlib_files(root: str) -> list[str]:
    """The library's own modules under `root`, without its tests and what was installed, by relative path."""
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _NO_LIBRARY]
        paths += [os.path.relpath(os.path.join(folder, name), root) for name in files if name.endswith(".py")]
    if not paths:
        raise UserError(f"data.source: {PYTHON_STDLIB}: no .py file under {root}; name other files")
    return [os.path.join(root, path) for path in sorted(paths)]


def _format(path: str, data: DataConfig, formats: Mapping[str, str]) -> str:
    for ending, file_format in formats.items():
        if path.endswith(ending):
            return "lines" if file_format == "text" and data.text_documents == "line" else file_format
    raise UserError(f"data.source: {path}: no supported ending; there are {', '.join(formats)}")


def read_documents(source: Input, start: int, end: int, text_field: str) -> Iterator[Document]:
    """One :class:`Document` for each line, row or file of the piece, in order; blank ones too (text "").

    Raises UserError naming the file when it cannot be read at all.
    """
    with reading(source.path):
        yield from FORMATS[source.format].read(source.path, start, end, text_field)


def _text_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        yield _whole_file(file.read())


def _line_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        yield from (_text_line(number, line) for number, line in enumerate(_lines_from(file, start, end), 1))


def _jsonl_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        yield from _json_lines(_lines_from(file, start, end), field)


def _gzip_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with gzip.open(path) as file:
        yield from _json_lines(file, field)


def _zstd_documents(path: str, start: int, end: int, field: str) -> Iterator[Document]:
    with open(path, "rb") as file:
        yield from _json_lines(_split_lines(_zstd_blocks(file, path)), field)


def _lines_from(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    """The lines that start at bytes [start, end), each with its line end."""
    if start > 0:
        file.seek(start - 1)
        start += len(file.readline()) - 1  # the rest of a line that started before; just its "\n" if none did
    while start < end and (line := file.readline()):
        start += len(line)
        yield line


def _zstd_blocks(file: BinaryIO, path: str) -> Iterator[bytes]:
    """The decompressed blocks of all zstd frames. (`stream_reader` would take a truncated frame for the end.)"""
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: .zst needs the package zstandard: pip install zstandard") from None
    frame: Any = None
    try:
        while block := file.read(_BLOCK):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                block = b""
                if frame.eof:
                    frame, block = None, frame.unused_data
    except zstandard.ZstdError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if frame is not None:
        raise UserError(f"cannot read {path}: the compressed file ends before its end-of-stream marker")


def _split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    parts: list[bytes] = []  # of the line under way; joined once, so that a line of many blocks stays linear
    for block in blocks:
        *full, rest = block.split(b"\n")
        for line in full:
            yield b"".join((*parts, line))
            parts = []
        parts.append(rest)
    if last := b"".join(parts):
        yield last


def _decode(data: bytes) -> tuple[str, str | None]:
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        return "", f"invalid UTF-8: byte 0x{data[error.start]:02x} at byte {error.start}"


def _whole_file(data: bytes) -> Document:
    try:
        return Document(1, data.decode())
    except UnicodeDecodeError as error:
        return Document(data.count(b"\n", 0, error.start) + 1, "", _decode(data)[1])


def _text_line(number: int, line: bytes) -> Document:
    text, reason = _decode(line.removesuffix(b"\n").removesuffix(b"\r"))
    return Document(number, text, reason)


def _json_lines(lines: Iterable[bytes], field: str) -> Iterator[Document]:
    return (_json_line(number, line, field) for number, line in enumerate(lines, 1))


def _json_line(number: int, line: bytes, field: str) -> Document:
    source, reason = _decode(line.strip(_JSON_SPACE))
    if not source:  # blank or not UTF-8
        return Document(number, "", reason)
    try:
        value = json.loads(source)
    except (ValueError, RecursionError) as error:
        return Document(number, "", f"broken JSON: {getattr(error, 'msg', error)}")
    if not isinstance(value, dict):
        return Document(number, "", f"not a JSON object but {type(value).__name__}")
    if field not in value:
        return Document(number, "", f"no field {field!r}")
    text = value[field]
    if not isinstance(text, str):
        return Document(number, "", f"field {field!r} is no string but {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON's \ud800 can name half a character
        return Document(number, "", f"field {field!r} holds a lone surrogate")
    return Document(number, text)


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
        place = file.schema_arrow.names.index(column)
        if file.metadata.num_columns != len(file.schema_arrow.names):  # nested columns: leaves are not columns
            return [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        return [group.column(place).total_uncompressed_size for group in groups]


def _parquet_documents(path: str, start: int, end: int, column: str) -> Iterator[Document]:
    import pyarrow

    number = 0
    with _parquet(path, column) as file:
        try:
            for batch in file.iter_batches(batch_size=1024, row_groups=list(range(start, end)), columns=[column]):
                # As bytes: Arrow does not check that a string column holds UTF-8, and one bad row must not
                # take its whole batch along.
                for data in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                    number += 1
                    text, reason = ("", f"field {column!r} is null") if data is None else _decode(data)
                    yield Document(number, text, reason)
        except pyarrow.ArrowException as error:
            raise UserError(f"cannot read {path}: {error}") from error


@dataclasses.dataclass(frozen=True)
class Format:
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
    "jsonl": Format(_jsonl_documents, splits=True),
    "gzip": Format(_gzip_documents, expansion=4),
    "zstd": Format(_zstd_documents, expansion=4),
    "parquet": Format(_parquet_documents),
}
