"""One HDF5 shard: a file of tokens that any HDF5 tool reads and that a loader maps like raw memory.

    tokens      uint16 or uint32, little-endian, shape (tokens,), contiguous: neither chunked nor compressed
    mask        uint8, the same shape, of prompts and dialogues alone: whether a token is learned (bit 1), whether it
                begins a document (bit 2)
    documents   int64, shape (documents + 1,): where each document starts in `tokens`; the last is the number of
                tokens
    attributes  format_version, tokenizer_sha256, source

A document ends with the end-of-text token. One that does not fit runs on in the unit's next file: it counts,
and has its offset, in the file where it *starts*, and the next file opens with the rest of it. So a file whose
`documents[0]` is not 0 opens with the rest of an earlier document, and a file that lies within one document
has `documents` = [tokens].

Prompts and dialogues are laid into windows of `data.sequence_length` tokens whole, so that no answer is parted from
what it answers: where one does not fit into the rest of a window, end-of-text tokens that nobody learns fill it up (so
they do a file's last window, and one more is its last target). Only what is longer than a window goes on in the next.

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

    def __init__(
        self,
        data_dir: Path,
        prefix: str,
        limit: int,
        dtype: str,
        attributes: Mapping[str, str | int],
        window: int | None = None,
        eos_id: int = 0,
    ) -> None:
        """`window`: of so many tokens, for documents with a mask, filled up with `eos_id`."""
        self._data_dir, self._prefix, self._dtype, self._attributes = data_dir, prefix, dtype, attributes
        self._window, self._eos_id = window, eos_id
        self._limit = limit if window is None else (limit - 1) // window * window
        # the system gives memory to the pages that are touched only
        self._tokens, self._mask = np.empty(self._limit + 1, dtype=dtype), np.empty(self._limit + 1, np.uint8)
        self._filled = 0
        self._starts = array("q")
        self._bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, tokens: np.ndarray, text_bytes: int, mask: np.ndarray | None = None) -> None:
        """Append a document: its tokens, shape (n,), with the end-of-text token, its text's UTF-8 bytes, its mask."""
        if self._window is not None and len(tokens) > (room := -self._filled % self._window):
            self._fill(room)
            if self._filled == self._limit:
                self._write()
        self._starts.append(self._filled)
        self._bytes += text_bytes
        while len(tokens):
            part = tokens[: self._limit - self._filled]
            self._tokens[self._filled : self._filled + len(part)] = part
            if mask is not None:
                self._mask[self._filled : self._filled + len(part)] = mask[: len(part)]
                mask = mask[len(part) :]
            self._filled += len(part)
            tokens = tokens[len(part) :]
            if self._filled == self._limit:
                self._write()

    def _fill(self, count: int) -> None:
        self._tokens[self._filled : self._filled + count] = self._eos_id
        self._mask[self._filled : self._filled + count] = 0
        self._filled += count

    def close(self) -> tuple[ShardEntry, ...]:
        """Write what is left (no file where nothing is); the entries of all files."""
        if self._filled:
            self._write()
        return tuple(self._entries)

    def _write(self) -> None:
        name = f"{SHARDS}/{self._prefix}-{len(self._entries):02d}.h5"
        if self._window is not None:
            self._fill(-self._filled % self._window + 1)
        documents = np.array([*self._starts, self._filled], dtype="<i8")
        path, mask = self._data_dir / name, None if self._window is None else self._mask[: self._filled]
        offset, mask_offset = write_shard(path, self._tokens[: self._filled], documents, self._attributes, mask)
        entry = ShardEntry(
            **FileEntry.of(path).model_dump(),
            file=name,
            tokens=self._filled,
            documents=len(self._starts),
            bytes=self._bytes,
            offset=offset,
            dtype=self._dtype,
            mask_offset=mask_offset,
        )
        self._entries.append(entry)
        self._filled, self._starts, self._bytes = 0, array("q"), 0


class SafeFile(io.FileIO):
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


def write_shard(
    path: Path,
    tokens: np.ndarray,
    documents: np.ndarray,
    attributes: Mapping[str, str | int],
    mask: np.ndarray | None = None,
) -> tuple[int, int | None]:
    """Write one shard under a temporary name, fsync, rename; the byte offsets of `tokens` and `mask` in the file.

    tokens: uint16 or uint32, shape (n,), n > 0. documents: int64, shape (m + 1,). mask: uint8, shape (n,). Raises
    OSError where the file system refuses, and leaves nothing then.
    """
    with replacing(path) as temporary, SafeFile(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            little_endian = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False)
            dataset = file.create_dataset("tokens", data=little_endian, track_times=False)
            masks = [] if mask is None else [file.create_dataset("mask", data=mask, track_times=False)]
            file.create_dataset("documents", data=documents, track_times=False)
            for name, value in attributes.items():
                file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)
            offset, *mask_offset = (int(each.id.get_offset()) for each in (dataset, *masks))
        if disk.error is not None:
            raise disk.error
        os.fsync(disk.fileno())
    return offset, mask_offset[0] if mask_offset else None
