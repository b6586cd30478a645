"""Compressed files: which compression a file has, by its first bytes, and the bytes that are in it.

A name is not trusted for this: browsers and download tools unpack `.gz` files and keep the name. gzip, bzip2 and xz are
Python's own; zstd needs pyarrow. A file may have several streams one after another, as `pbzip2` and `cat` write them.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular

HEAD = 1 << 16
"""Bytes that tell what a file is."""
COMPRESSION_ENDINGS = {"gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}
COMPRESSIONS = {".gz": 4, ".zst": 4, ".zstd": 4, ".bz2": 5, ".xz": 5}
"""Endings of compressed files, and about how many bytes of text a byte holds: rough, to balance the work."""
_MARKS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    "bzip2": re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\x00|\x5d\x00\x00[\x00-\xff]{2}(?:\xff{8}|[\x00-\xff]{5}\x00{3})", re.DOTALL),
}
_FIRST = {b"\x1f", b"\x28", b"B", b"\xfd", b"\x5d", *(bytes([one]) for one in range(0x50, 0x60))}
_BLOCK = 1 << 20
_MOST_MEMORY = 1 << 31  # of a decompressor of xz: `xz -9` needs 65 MiB


def compression_of(head: bytes) -> str | None:
    """Return `gzip`, `zstd`, `bzip2` or `xz` for the first bytes of a file, None if it is not compressed by these."""
    if head[:1] not in _FIRST:
        return None
    return next((name for name, mark in _MARKS.items() if mark.match(head)), None)


@contextmanager
def open_decompressed(path: str) -> Iterator[tuple[BinaryIO, bytes, str | None]]:
    """Open a file that may be compressed.

    Yields its content as a buffered stream from its first byte on, the first bytes of that content (`HEAD` at most),
    and the name of the compression, None for a plain file (then the stream is the file itself, which can be sought).

    Raises UserError naming the file for a pipe or a device, or if pyarrow is missing for zstd; OSError or EOFError for
    damaged content.
    """
    with open_regular(path) as file:
        head = file.read(HEAD)
        file.seek(0)
        if (name := compression_of(head)) is None:
            yield file, head, None
            return
        stream = _OPEN[name](path, file)
        try:
            content = io.BufferedReader(stream, _BLOCK)
            head = content.read(HEAD)
            yield cast(BinaryIO, io.BufferedReader(_Prefixed(head, content), _BLOCK)), head, name
        finally:
            stream.close()


class _Prefixed(io.RawIOBase):
    """Bytes that were read ahead, then the rest of a stream."""

    def __init__(self, head: bytes, rest: io.BufferedReader) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._head:
            return self._rest.readinto1(buffer)
        part, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


class _Streams(io.RawIOBase):
    """The content of streams of bzip2 or xz, one after another. (Python's own reader ignores a damaged second one.)"""

    def __init__(self, file: BinaryIO, decompressor: Callable[[], Any], padding: bytes) -> None:
        """`padding`: what may follow a stream."""
        self._file, self._new, self._padding = file, decompressor, padding
        self._decompressor = decompressor()
        self._waiting = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = b""
        while not found:
            if self._decompressor.eof:
                rest = self._decompressor.unused_data.lstrip(self._padding)
                while not rest and (block := self._file.read(_BLOCK)):
                    rest = block.lstrip(self._padding)
                if not rest:
                    return 0
                self._decompressor, self._waiting = self._new(), rest
            if self._decompressor.needs_input and not self._waiting:
                self._waiting = self._file.read(_BLOCK)
                if not self._waiting:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            try:
                found = self._decompressor.decompress(self._waiting, len(buffer))
            except (lzma.LZMAError, ValueError) as error:
                raise OSError(str(error)) from error
            self._waiting = b""
        buffer[: len(found)] = found
        return len(found)


def _open_bzip2(path: str, file: BinaryIO) -> Any:
    return _Streams(file, bz2.BZ2Decompressor, b"")


def _open_xz(path: str, file: BinaryIO) -> Any:
    return _Streams(file, lambda: lzma.LZMADecompressor(memlimit=_MOST_MEMORY), b"\0")


def _open_gzip(path: str, file: BinaryIO) -> Any:
    return gzip.GzipFile(fileobj=file)


def _open_zstd(path: str, file: BinaryIO) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: zstd needs the package pyarrow: pip install pyarrow") from None
    return pyarrow.input_stream(path, compression="zstd")  # all frames; one that is cut short is an error


_OPEN = {"gzip": _open_gzip, "zstd": _open_zstd, "bzip2": _open_bzip2, "xz": _open_xz}
