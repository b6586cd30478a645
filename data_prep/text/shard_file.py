"""One HDF5 shard: a file of tokens that any HDF5 tool reads and that a loader maps like raw memory.

    tokens      uint16 or uint32, little-endian, shape (tokens,), contiguous: neither chunked nor compressed
    documents   int64, shape (documents + 1,): where each document starts in `tokens`; the last is the number of
                tokens
    attributes  format_version, tokenizer_sha256, source

A document ends with the end-of-text token. One that does not fit runs on in the unit's next file: it counts,
and has its offset, in the file where it *starts*, and the next file opens with the rest of it. So a file whose
`documents[0]` is not 0 opens with the rest of an earlier document, and a file that lies within one document
has `documents` = [tokens].

Same tokens, same bytes: HDF5 is told to keep no times and to write one fixed version of its format.
"""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from pipeline.base.files import replacing
from pipeline.data.manifest import SHARDS, FileEntry, ShardEntry


class ShardWriter:
    """Writes a stream of documents to `shards/PREFIX-00.h5`, `-01.h5`, … of at most `limit` tokens each.

    Holds one file's tokens in memory. Each file appears under its name whole, or not at all.
    """

    def __init__(self, data_dir: Path, prefix: str, limit: int, dtype: str, attributes: Mapping[str, str | int]):
        self._data_dir, self._prefix, self._dtype, self._attributes = data_dir, prefix, dtype, attributes
        self._tokens = np.empty(limit, dtype=dtype)  # the system gives memory to the pages that are touched only
        self._filled = 0
        self._starts = array("q")
        self._bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, tokens: np.ndarray, text_bytes: int) -> None:
        """Append a document: its tokens, shape (n,), with the end-of-text token, and its text's UTF-8 bytes."""
        self._starts.append(self._filled)
        self._bytes += text_bytes
        while len(tokens):
            part = tokens[: len(self._tokens) - self._filled]
            self._tokens[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == len(self._tokens):
                self._write()

    def close(self) -> tuple[ShardEntry, ...]:
        """Write what is left (no file where nothing is); the entries of all files."""
        if self._filled:
            self._write()
        return tuple(self._entries)

    def _write(self) -> None:
        name = f"{SHARDS}/{self._prefix}-{len(self._entries):02d}.h5"
        documents = np.array([*self._starts, self._filled], dtype="<i8")
        path = self._data_dir / name
        offset = write_shard(path, self._tokens[: self._filled], documents, self._attributes)
        entry = ShardEntry(
            **FileEntry.of(path).model_dump(),
            file=name,
            tokens=self._filled,
            documents=len(self._starts),
            bytes=self._bytes,
            offset=offset,
            dtype=self._dtype,
        )
        self._entries.append(entry)
        self._filled, self._starts, self._bytes = 0, array("q"), 0


class _File(io.FileIO):
    """A file that swallows the writes after one that failed, and keeps that first error.

    HDF5 writes late, also while it closes a file. An error there is none of h5py's OSErrors, and the file stays
    open inside the library, which tries again at the end of the process. So HDF5 is left to finish, and
    :func:`write_shard` raises the error.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data` (one system call takes 2 GiB at most)."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the file's size."""
        try:
            return self.tell() if self.error else super().truncate(size)
        except OSError as error:
            self.error = error
            return self.tell()


def write_shard(path: Path, tokens: np.ndarray, documents: np.ndarray, attributes: Mapping[str, str | int]) -> int:
    """Write one shard under a temporary name, fsync, rename; the byte offset of `tokens` in the file.

    tokens: uint16 or uint32, shape (n,), n > 0. documents: int64, shape (m + 1,). Raises OSError where the file
    system refuses, and leaves nothing then.
    """
    with replacing(path) as temporary, _File(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            little_endian = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
            dataset = file.create_dataset("tokens", data=little_endian, track_times=False)
            file.create_dataset("documents", data=documents, track_times=False)
            for name, value in attributes.items():
                file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)
            offset = dataset.id.get_offset()
        if disk.error is not None:
            raise disk.error
        os.fsync(disk.fileno())
    return int(offset)
