"""Write HDF5 shards: files of tokens that any HDF5 tool can read, and that training can memory-map.

    tokens      uint16 or uint32, little-endian, shape (tokens,), contiguous: neither chunked nor compressed
    mask        uint8, same shape, only for prompts, dialogues and `data.packing: best_fit`: the sum of 1 if the token
                is learned and 2 if it begins a document or a piece of a document
    documents   int64, shape (documents + 1,): start of each document in `tokens`; the last is the number of tokens
    attributes  format_version, tokenizer_sha256, source

A document ends with the end-of-text token. If a document does not fit into a file, it continues in the next file of the
work unit. The document is counted only in the file in which it starts. The first tokens of a file may therefore belong
to an earlier document. If no document starts in a file, its `documents` is [number of tokens].

Prompts and dialogues are not split across windows of `data.sequence_length` tokens, so that an answer stays with its
question. If a record does not fit into the rest of a window, this rest is padded with end-of-text tokens that are not
learned. The last window of a file is also padded, and is followed by one more token, the target of its last token. Only
records that are longer than a window are cut.

With `data.packing: best_fit`, the documents of a work unit are packed into windows in another order
(data_prep/packing.py). This also applies to the training documents of text. The first token of a piece is learned only
if the token before it in the file precedes it in the document or ends another text.

Equal tokens give equal files, because the files contain no times and have a fixed version of the HDF5 format.
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
import numpy.typing as npt

from data_prep.packing import BestFitPacker, Piece, Window
from pipeline.base.files import replace_atomically
from pipeline.data.manifest import SHARDS_DIR, FileEntry, ShardEntry

_BLOCK_TOKENS = 1 << 21
"""Number of elements that are copied at once."""


class ShardWriter:
    """Write a stream of documents to `shards/PREFIX-00.h5`, `-01.h5`, … of at most `limit` tokens each.

    HDF5 needs the length of a contiguous dataset in advance, so tokens are collected in an unnamed temporary file. A
    shard gets its name when it is complete.

    Args:
        data_dir: the data folder.
        prefix: beginning of the file names.
        limit: maximum number of tokens per file.
        dtype: element type of the tokens.
        attributes: HDF5 attributes of each file.
        window: size of a window in tokens, for documents with a mask; None for documents without a mask.
        eos_id: id of the end-of-text token, which pads windows.
        packs: whether documents are packed into windows by best fit. Otherwise their order is kept.
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
        *,
        packs: bool = False,
    ) -> None:
        self._data_dir = data_dir
        self._prefix = prefix
        self._dtype = dtype
        self._attributes = attributes
        self._window = window
        self._eos_id = eos_id
        self._packer = BestFitPacker(window) if packs and window is not None else None
        # The piece that ends with the last token of the current file; None if there is none, for example after
        # padding.
        self._last_piece: Piece | None = None
        self._padding_tokens = 0
        # `_write_file` adds one more token to the whole windows of a file, and this token must also fit.
        self._limit = limit if window is None else (limit - 1) // window * window
        types = {"tokens": np.dtype(dtype).newbyteorder("<")}
        if window is not None:
            types["mask"] = np.dtype(np.uint8)
        # For each dataset, the temporary file with its content, and the element type.
        self._buffers = {
            name: (tempfile.TemporaryFile(dir=data_dir / SHARDS_DIR, buffering=1 << 20), element_type)  # noqa: SIM115
            for name, element_type in types.items()
        }
        # State of the current file: number of tokens, start of each document, and bytes of text.
        self._token_count = 0
        self._document_starts = array("q")
        self._text_bytes = 0
        self._entries: list[ShardEntry] = []

    def add(self, tokens: npt.NDArray[Any], text_bytes: int, mask: npt.NDArray[np.uint8] | None = None) -> None:
        """Append a document. If the current file becomes full, write it and continue in the next file.

        Args:
            tokens: tokens of the document with the end-of-text token, shape (n,). A truncated document has no
                end-of-text token.
            text_bytes: size in UTF-8 of the document's text; if there is a mask, of the learned text; 0 if unknown.
            mask: mask of the document, shape (n,); None if the writer has no windows, or for packed text.
        """
        if self._packer is not None:
            for window in self._packer.add(tokens, text_bytes, mask):
                self._append_window(window)
            return
        if self._window is not None:
            remaining = -self._token_count % self._window  # 0 at the start of a window.
            if len(tokens) > remaining:  # The record does not fit into the rest of the window.
                self._append_padding(remaining)
                if self._token_count == self._limit:
                    self._write_file()
        self._document_starts.append(self._token_count)
        self._text_bytes += text_bytes
        while len(tokens):
            fitting_tokens = tokens[: self._limit - self._token_count]
            self._append_tokens(fitting_tokens, mask)
            mask = None if mask is None else mask[len(fitting_tokens) :]
            tokens = tokens[len(fitting_tokens) :]
            if self._token_count == self._limit:
                self._write_file()

    def _append_tokens(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.uint8] | None) -> None:
        """Append tokens to the temporary file of the tokens, and as many values of `mask` to that of the mask."""
        for name, values in (("tokens", tokens), ("mask", mask)):
            if name in self._buffers and values is not None:
                file, dtype = self._buffers[name]
                file.write(values[: len(tokens)].astype(dtype, copy=False).data)
        self._token_count += len(tokens)

    def _append_padding(self, count: int) -> None:
        """Append end-of-text tokens that are not learned."""
        self._padding_tokens += count
        self._append_tokens(np.full(count, self._eos_id), np.zeros(count, np.uint8))

    def _append_window(self, pieces: Window) -> None:
        """Append the pieces of a window, and pad the window. If the current file becomes full, write it."""
        assert self._window is not None
        for piece in pieces:
            if piece.start == 0:
                self._document_starts.append(self._token_count)
            self._text_bytes += piece.text_bytes
            self._append_tokens(piece.tokens, piece.make_mask(self._last_piece, self._eos_id))
            self._last_piece = piece
        if padding := -self._token_count % self._window:
            self._append_padding(padding)
            self._last_piece = None
        if self._token_count == self._limit:
            self._write_file()

    @property
    def packs(self) -> bool:
        """Whether documents are packed into windows by best fit."""
        return self._packer is not None

    @property
    def padding_tokens(self) -> int:
        """Number of tokens in the files that pad windows. Always 0 unless documents are packed by best fit."""
        return self._padding_tokens if self._packer else 0

    @property
    def cut_documents(self) -> int:
        """Number of documents that were cut into several windows. Always 0 unless documents are packed by best fit."""
        return self._packer.cut_documents if self._packer else 0

    def close(self) -> tuple[ShardEntry, ...]:
        """Write the last file if tokens remain, and return the manifest entries of all files."""
        for window in self._packer.close() if self._packer else ():
            self._append_window(window)
        if self._token_count:
            self._write_file()
        for file, _ in self._buffers.values():
            file.close()
        return tuple(self._entries)

    def _write_file(self) -> None:
        """Write the collected tokens to a shard, and empty the temporary files."""
        name = f"{SHARDS_DIR}/{self._prefix}-{len(self._entries):02d}.h5"
        if self._window is not None:
            # Complete the window, and append the target of its last token.
            self._append_padding(-self._token_count % self._window + 1)
        documents = np.array([*self._document_starts, self._token_count], dtype="<i8")
        path = self._data_dir / name
        offset, *mask_offset = write_shard(path, self._buffers, self._token_count, documents, self._attributes)
        entry = ShardEntry(
            **FileEntry.from_path(path).model_dump(),
            file=name,
            tokens=self._token_count,
            documents=len(self._document_starts),
            bytes=self._text_bytes,
            offset=offset,
            dtype=self._dtype,
            mask_offset=mask_offset[0] if mask_offset else None,
        )
        self._entries.append(entry)
        for file, _ in self._buffers.values():
            file.truncate(file.seek(0))  # `seek` returns the new position, 0.
        self._token_count = 0
        self._document_starts = array("q")
        self._text_bytes = 0
        self._last_piece = None


class DeferredErrorFile(io.FileIO):
    """A file that stores its first write error in `error`, and ignores all later writes.

    HDF5 also writes when it closes a file. h5py does not report an error of such a write as OSError. The file then
    stays open inside the library, which tries to write again when the process exits. With this class, HDF5 can close
    the file, and the caller raises `error` afterwards.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, unless an error occurred before, and return the size of `data` in any case.

        One system call writes at most 2 GiB, so several calls may be needed.
        """
        view = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the size of the file, and return the new size. After an error, return the current position."""
        try:
            return self.tell() if self.error else super().truncate(size)
        except OSError as error:
            self.error = error
            return self.tell()


def write_shard(
    path: Path,
    buffers: Mapping[str, tuple[IO[bytes], np.dtype[Any]]],
    count: int,
    documents: npt.NDArray[np.int64],
    attributes: Mapping[str, str | int],
) -> list[int]:
    """Write one shard under a temporary name, flush it to storage and rename it.

    Args:
        path: path of the shard.
        buffers: for each dataset, a file with its content, and the element type.
        count: number of elements of each dataset, greater than 0.
        documents: start of each document, and the number of tokens, shape (documents + 1,).
        attributes: HDF5 attributes of the file.

    Returns: the byte offsets of the datasets in the file.

    Raises OSError if writing fails. There is no file in this case.
    """
    with replace_atomically(path) as temporary, DeferredErrorFile(temporary, "w+") as disk:
        with h5py.File(disk, "w", libver=("earliest", "v108")) as file:
            datasets = []
            for name, (source, dtype) in buffers.items():
                dataset = file.create_dataset(name, (count,), dtype, track_times=False)
                source.seek(0)
                for start in range(0, count, _BLOCK_TOKENS):
                    block = np.frombuffer(source.read(min(_BLOCK_TOKENS, count - start) * dtype.itemsize), dtype)
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
