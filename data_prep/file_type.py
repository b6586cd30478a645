"""Detect what a file contains by its first bytes and its name, open compressed files, and suggest conversions.

If a file name has a known ending, the name decides (data_prep/find_inputs.py). Otherwise the content decides. Error
messages also describe the content. The compression is always detected by content, because browsers and download tools
unpack `.gz` files and keep the name.

Python's standard library supports gzip, bzip2 and xz. zstd needs pyarrow. A file may contain several compressed streams
one after another, for example if it was written by `pbzip2` or `cat`.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular_file

HEAD_BYTES = 1 << 16
"""Number of bytes at the start of a file that are used to detect what it contains."""
COMPRESSION_ENDINGS = {"gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}
"""The usual file name ending of each compression."""
COMPRESSIONS = {".gz": 4, ".zst": 4, ".zstd": 4, ".bz2": 5, ".xz": 5}
"""For each file name ending of compressed files, the estimated bytes of text per compressed byte.

The estimates only affect the balance between work units.
"""
_COMPRESSION_SIGNATURES = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00|\x5d\x00\x00[\x00-\xff]{2}(?:\xff{8}|[\x00-\xff]{5}\x00{3})", re.DOTALL),
}
"""The bytes with which a file of each compression begins."""
_FIRST_BYTES = {b"\x1f", b"\x28", b"B", b"\xfd", b"\x5d", *(bytes([value]) for value in range(0x50, 0x60))}
"""The first bytes of these signatures, for a quick check."""
_BLOCK_BYTES = 1 << 20
"""Number of bytes that are read at once."""
_XZ_MEMORY_LIMIT = 1 << 31
"""Memory limit of the xz decompressor in bytes. Files that `xz -9` writes need 65 MiB."""


def detect_compression(head: bytes) -> str | None:
    """Return the name of the compression (a key of `COMPRESSION_ENDINGS`) by the first bytes of a file, or None."""
    if head[:1] not in _FIRST_BYTES:
        return None
    return next((name for name, signature in _COMPRESSION_SIGNATURES.items() if signature.match(head)), None)


@contextmanager
def open_decompressed(path: str) -> Iterator[tuple[BinaryIO, bytes, str | None]]:
    """Open a file that may be compressed.

    Yields: the uncompressed content as a buffered stream, the first bytes of this content (at most `HEAD_BYTES`), and
    the name of the compression. For an uncompressed file the name is None, and the stream is the file itself, which can
    seek.

    Raises UserError with the path for a pipe or device, and for zstd if pyarrow is not installed. Raises OSError or
    EOFError if the compressed data is damaged.
    """
    with open_regular_file(path) as file:
        head = file.read(HEAD_BYTES)
        file.seek(0)
        if (name := detect_compression(head)) is None:
            yield file, head, None
            return
        stream = _open_stream(name, path, file)
        try:
            content = io.BufferedReader(stream, _BLOCK_BYTES)
            head = content.read(HEAD_BYTES)
            # Put the head before the rest of the content, because not every stream can seek back to its start.
            yield cast(BinaryIO, io.BufferedReader(_PrefixedReader(head, content), _BLOCK_BYTES)), head, name
        finally:
            stream.close()


class _PrefixedReader(io.RawIOBase):
    """Reads bytes that were already taken from a stream (`head`), and then the rest of the stream."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes into `buffer`, and return their number; 0 at the end."""
        if not self._head:
            return self._rest.readinto1(buffer)
        content = self._head[: len(buffer)]
        self._head = self._head[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)


class _MultiStreamReader(io.RawIOBase):
    """Reads the content of several bzip2 or xz streams one after another.

    Python's own reader silently ignores damaged data after the first stream. This class raises an error instead.
    """

    def __init__(self, file: BinaryIO, make_decompressor: Callable[[], Any], padding: bytes) -> None:
        """Start at the current position of `file`.

        Args:
            file: the compressed file.
            make_decompressor: function that returns a decompressor for one stream.
            padding: a byte that may be repeated between two streams; empty if no bytes are allowed between them.
        """
        self._file = file
        self._make_decompressor = make_decompressor
        self._padding = padding
        self._decompressor = make_decompressor()
        self._compressed = b""  # bytes that were read from the file, but not yet given to the decompressor

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read uncompressed bytes into `buffer`, and return their number; 0 at the end.

        Raises OSError or EOFError if the compressed data is damaged or incomplete.
        """
        content = b""
        while not content:
            if self._decompressor.eof:
                # Skip the padding after the stream, and start the next stream if there is one.
                rest = self._decompressor.unused_data.lstrip(self._padding)
                while not rest and (block := self._file.read(_BLOCK_BYTES)):
                    rest = block.lstrip(self._padding)
                if not rest:
                    return 0
                self._decompressor = self._make_decompressor()
                self._compressed = rest
            if self._decompressor.needs_input and not self._compressed:
                self._compressed = self._file.read(_BLOCK_BYTES)
                if not self._compressed:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            try:
                content = self._decompressor.decompress(self._compressed, len(buffer))
            except (lzma.LZMAError, ValueError) as error:
                raise OSError(str(error)) from error
            self._compressed = b""  # The decompressor keeps the input that it has not used yet.
        buffer[: len(content)] = content
        return len(content)


def _open_stream(compression: str, path: str, file: BinaryIO) -> Any:
    """Return a stream of the uncompressed content of a file. Raises UserError for zstd if pyarrow is not installed."""
    if compression == "gzip":
        return gzip.GzipFile(fileobj=file)
    if compression == "bzip2":
        return _MultiStreamReader(file, bz2.BZ2Decompressor, b"")
    if compression == "xz":
        return _MultiStreamReader(file, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_LIMIT), b"\0")
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            "data.missing_package", f"{path}: zstd needs the package pyarrow: pip install pyarrow"
        ) from None
    return pyarrow.input_stream(path, compression="zstd")  # pyarrow reads all frames, and reports an incomplete frame.


BOM = codecs.BOM_UTF8
"""The byte order mark at the start of some UTF-8 files."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""The byte order marks at the start of UTF-16 files."""
UTF16_HINT = "text in UTF-16: convert it, iconv -f UTF-16 -t UTF-8 FILE > NEW"

_BINARY_SIGNATURES: list[tuple[str, bytes | re.Pattern[bytes]]] = [
    ("Parquet", re.compile(rb"PAR1[\x00-\x08\x0e-\x1f]")),  # Text may also begin with PAR1, the name of a protein.
    ("Arrow", re.compile(rb"ARROW1\0\0|\xff{4}[\x00-\xff]{2}[\x00-\x0f]\x00", re.DOTALL)),
    ("tar", re.compile(rb"[\x00-\xff]{257}ustar(?:\0|  \0)", re.DOTALL)),
    ("HDF5", b"\x89HDF\r\n\x1a\n"),
    ("NumPy .npy", b"\x93NUMPY"),
    ("zip", re.compile(rb"PK(?:\x03\x04|\x05\x06)")),
    ("LZ4", b"\x04\x22\x4d\x18"),
    ("Snappy", b"\xff\x06\x00\x00sNaPpY"),
    ("7-Zip", b"7z\xbc\xaf\x27\x1c"),
    ("RAR", b"Rar!\x1a\x07"),
    ("ORC", re.compile(rb"ORC[\x00-\x08]")),
    ("Avro", b"Obj\x01"),
    ("SQLite", b"SQLite format 3\0"),
    (
        "pickle",
        re.compile(
            rb"\x80[\x04\x05]\x95[\x00-\xff]{5}\0{3}|\x80[\x02\x03]c[\w.]{3,}\n|\x80\x02\x8a\nl\xfc\x9cF", re.DOTALL
        ),
    ),
    ("PDF", b"%PDF-"),
    ("Megatron index", b"MMIDIDX\0\0"),
    ("safetensors", re.compile(rb"[\x00-\xff]{5}\x00{3}\{[\" ]", re.DOTALL)),
]
"""Names of binary formats, with the bytes with which files of this format begin."""
_MDS_NAME = re.compile(r"\.mds(\.\w+)?$")
"""File name ending of a shard of MDS, also of a compressed one, such as `.mds.zstd`."""
_CONTROL_CHARACTERS = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
"""Control characters that do not occur in text: all except line ends, tabs, form feeds and escape."""

CONVERSIONS = {
    "MosaicML MDS": (
        'with the package mosaicml-streaming: set_ = streaming.StreamingDataset(local="FOLDER", batch_size=1); write '
        'json.dumps({"text": row["text"]}) of each of its rows as a line of a .jsonl file'
    ),
    "TFRecord": (
        "with the package tensorflow: tf.train.Example.FromString(row.numpy()) for row in "
        'tf.data.TFRecordDataset("FILE"); write json.dumps({"text": example.features.feature["text"]'
        ".bytes_list.value[0].decode()}) as a line of a .jsonl file"
    ),
    "bare tokens named .npy": (
        "uint16 tokens, as OLMo writes them: link or rename the file to NAME.bin and set data.records: tokens. uint32: "
        'h5py.File("NAME.h5", "w")["tokens"] = numpy.fromfile("FILE", "<u4")'
    ),
    "NumPy .npy": (
        'tokens: h5py.File("NAME.h5", "w")["tokens"] = numpy.load("FILE").ravel().astype("<u4") and set data.records: '
        "tokens; or put them into a WebDataset .tar"
    ),
    "HDF5": "tokens are read with data.records: tokens, samples with model.target; texts: write them to .jsonl",
    "zip": "unpack it: unzip FILE",
    "7-Zip": "unpack it: 7z x FILE",
    "RAR": "unpack it: unrar x FILE",
    "LZ4": "unpack it: lz4 -d FILE",
    "Snappy": "unpack it, and compress it with zstd",
    "ORC": 'pyarrow.parquet.write_table(pyarrow.orc.read_table("FILE"), "NAME.parquet")',
    "Avro": "with the package fastavro: write json.dumps of each record of fastavro.reader as a line of a .jsonl file",
    "SQLite": "write json.dumps of each row as a line of a .jsonl file",
    "pickle": "load it, and write the texts to .jsonl",
    "PDF": "extract the text, for example pdftotext FILE NAME.txt",
    "web archive": "extract the text with datatrove or trafilatura, to .jsonl",
    "XML or HTML": "extract the text; to use the markup as text, set data.format: text",
    "UTF-16 text": "iconv -f UTF-16 -t UTF-8 FILE > NEW",
}
"""By kind of file: advice on how to convert it, or on how to set the config so that it is read (see docs/data.md)."""


class FileType(NamedTuple):
    """What a file seems to contain."""

    kind: str
    """Kind of the content, such as `JSON Lines`, `JSON`, `Parquet`, `text` or a key of `CONVERSIONS`."""
    compression: str | None = None
    """Name of the compression; None for an uncompressed file."""

    def __str__(self) -> str:
        """Return kind and compression as text."""
        return f"{self.kind}, compressed with {self.compression}" if self.compression else self.kind


def format_conversion_hint(kind: str) -> str:
    """Return a sentence with advice on how to convert files of a kind; "" if there is no advice.

    The sentence begins with a full stop, so that it can be appended to a message.
    """
    return f". To convert it: {CONVERSIONS[kind]}" if kind in CONVERSIONS else ""


def detect_binary_format(head: bytes) -> str | None:
    """Return the name of the binary format of a file by its first bytes; None if the bytes match no known format."""
    for name, signature in _BINARY_SIGNATURES:
        if head.startswith(signature) if isinstance(signature, bytes) else signature.match(head):
            return name
    return "TFRecord" if _is_tfrecord(head) else None


def detect_file_type(path: str) -> FileType:
    """Return what a file seems to contain. If the file cannot be read, return the reason as the kind; never raise."""
    try:
        with open_decompressed(path) as (_, head, compression):
            return FileType(_detect_kind(path, head), compression)
    except UserError as error:
        return FileType(str(error).removeprefix(f"{path}: "))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        return FileType(f"not readable: {getattr(error, 'strerror', None) or error}")


def _detect_kind(path: str, head: bytes) -> str:
    """Return the kind of a file (see `FileType.kind`) by its name and its first uncompressed bytes."""
    if not head:
        return "empty"
    if is_mds(path):
        return "MosaicML MDS"
    if binary_format := detect_binary_format(head):
        return binary_format
    if ".npy" in os.path.basename(path):
        return "bare tokens named .npy"
    if head.startswith(UTF16):
        return "UTF-16 text"
    if not is_text(head):
        return "tokens, perhaps (data.records: tokens)" if path.endswith((".bin", ".ds")) else "binary data"
    start = head.removeprefix(BOM).lstrip()
    if start.startswith(b"WARC/"):
        return "web archive"
    if re.match(rb"<(\?xml|!doctype|html)", start, re.IGNORECASE):
        return "XML or HTML"
    table_kind = {".csv": "CSV", ".tsv": "TSV"}.get(os.path.splitext(path)[1])
    return table_kind or detect_json_kind(head) or "text"


def is_mds(path: str) -> bool:
    """Return True if a file is a shard of MosaicML's MDS format or the index of such shards, by file names alone."""
    folder, name = os.path.split(path)
    if name == "index.json":
        return any(map(_MDS_NAME.search, os.listdir(folder or os.curdir)))
    return _MDS_NAME.search(name) is not None


def is_text(head: bytes) -> bool:
    """Return True if the first bytes of a file are UTF-8 without control characters."""
    try:
        # A head of `HEAD_BYTES` may end within a character. A shorter head is the whole file.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=len(head) < HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return not _CONTROL_CHARACTERS.search(head)


def detect_json_kind(head: bytes) -> str | None:
    """Return the kind of JSON in a file by its first bytes.

    Returns: `JSON Lines`, `JSON` (an array, or objects that span lines), or None if the bytes match neither kind.
    """
    start = head.removeprefix(BOM).decode(errors="ignore").lstrip()
    if not start.startswith(("{", "[")):
        return None
    line, *rest = start.split("\n")
    value = _parse_line(line)
    if isinstance(value, dict):
        return "JSON Lines"
    if isinstance(value, list):
        # Several lines with arrays are JSON Lines, although their records are no objects.
        return "JSON Lines" if "".join(rest).lstrip().startswith("[") else "JSON"
    if start.startswith("["):
        # The array continues after the first line. An array of objects, or an empty array, is JSON.
        return "JSON" if re.match(r"\[\s*([{\]]|$)", start) else None
    if line.strip() == "{":
        return "JSON"
    try:
        # The first line has an object and more text, or the start of an object that spans lines.
        _, end = json.JSONDecoder().raw_decode(start)
        spans_lines = end > len(line)
        has_another_value = line[end:].lstrip().startswith("{")
        return "JSON" if spans_lines or has_another_value else "JSON Lines"
    except (ValueError, RecursionError):
        # The first line is invalid JSON, or longer than `head`.
        is_long = not rest and len(head) >= HEAD_BYTES
        has_object = any(isinstance(_parse_line(line), dict) for line in rest if line[:1] == "{")
        return "JSON Lines" if is_long or has_object else None


def _parse_line(line: str) -> object:
    """Return the JSON value in a line; None if the line is not valid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_tfrecord(head: bytes) -> bool:
    """Return True if the first bytes are those of a TFRecord file.

    The first record of such a file begins with its length and the masked CRC-32C of the length
    (tensorflow/core/lib/io/record_writer.h).
    """
    if len(head) < 16:
        return False
    length: int
    masked_crc: int
    length, masked_crc = struct.unpack_from("<QI", head)
    if length >= 1 << 40:  # No record has 1 TiB.
        return False
    # Compute the CRC-32C of the length. 0x82F63B78 is the bit-reversed polynomial.
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    # TFRecord masks a CRC by rotating it by 15 bits and adding a constant.
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF == masked_crc
