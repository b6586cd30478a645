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
import tempfile
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np

from pipeline.base.files import replace_atomically
from pipeline.data.manifest import SHARDS_DIR, FileEntry, ShardEntry

_BLOCK = 1 << 21  # tokens


class ShardWriter:
    """Writes a stream of documents to `shards/PREFIX-00.h5`, `-01.h5`, … of at most `limit` tokens each.

    HDF5 wants to know the length of what it writes in one piece, so tokens wait in a file without a name, not in
    memory. Each file appears under its name whole, or not at all.
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
        kinds = {"tokens": np.dtype(dtype).newbyteorder("<")} | ({} if window is None else {"mask": np.dtype(np.uint8)})
        self._waiting = {
            name: (tempfile.TemporaryFile(dir=data_dir / SHARDS_DIR, buffering=1 << 20), kind)  # noqa: SIM115
            for name, kind in kinds.items()
        }
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
            self._append(part, mask)
            mask = None if mask is None else mask[len(part) :]
            tokens = tokens[len(part) :]
            if self._filled == self._limit:
                self._write()

    def _append(self, tokens: np.ndarray, mask: np.ndarray | None) -> None:
        for name, found in (("tokens", tokens), ("mask", mask)):
            if name in self._waiting and found is not None:
                file, kind = self._waiting[name]
                file.write(found[: len(tokens)].astype(kind, copy=False).data)
        self._filled += len(tokens)

    def _fill(self, count: int) -> None:
        self._append(np.full(count, self._eos_id), np.zeros(count, np.uint8))

    def close(self) -> tuple[ShardEntry, ...]:
        """Write what is left (no file where nothing is); the entries of all files."""
        if self._filled:
            self._write()
        for file, _ in self._waiting.values():
            file.close()
        return tuple(self._entries)

    def _write(self) -> None:
        name = f"{SHARDS_DIR}/{self._prefix}-{len(self._entries):02d}.h5"
        if self._window is not None:
            self._fill(-self._filled % self._window + 1)
        documents = np.array([*self._starts, self._filled], dtype="<i8")
        path = self._data_dir / name
        offset, *mask_offset = write_shard(path, self._waiting, self._filled, documents, self._attributes)
        entry = ShardEntry(
            **FileEntry.from_path(path).model_dump(),
            file=name,
            tokens=self._filled,
            documents=len(self._starts),
            bytes=self._bytes,
            offset=offset,
            dtype=self._dtype,
            mask_offset=mask_offset[0] if mask_offset else None,
        )
        self._entries.append(entry)
        for file, _ in self._waiting.values():
            file.truncate(file.seek(0))
        self._filled, self._starts, self._bytes = 0, array("q"), 0


class DeferredErrorFile(io.FileIO):
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
    waiting: Mapping[str, tuple[IO[bytes], np.dtype]],
    count: int,
    documents: np.ndarray,
    attributes: Mapping[str, str | int],
) -> list[int]:
    """Write one shard under a temporary name, fsync, rename; the byte offsets of `tokens` and `mask` in the file.

    waiting: by dataset, a file of `count` > 0 items of a type. documents: int64, shape (m + 1,). Raises OSError where
    the file system refuses, and leaves nothing then.
    """
    with replace_atomically(path) as temporary, DeferredErrorFile(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            datasets = []
            for name, (source, kind) in waiting.items():
                dataset = file.create_dataset(name, (count,), kind, track_times=False)
                source.seek(0)
                for start in range(0, count, _BLOCK):
                    block = np.frombuffer(source.read(min(_BLOCK, count - start) * kind.itemsize), kind)
                    dataset[start : start + len(block)] = block
                datasets.append(dataset)
            file.create_dataset("documents", data=documents, track_times=False)
            for name, value in attributes.items():
                file.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else np.int64(value)
            offsets = [int(dataset.id.get_offset()) for dataset in datasets]
        if disk.error is not None:
            raise disk.error
        os.fsync(disk.fileno())
    return offsets
