"""Megatron-LM's NAME.bin with NAME.idx: all tokens behind one another, and an index of sequences and documents.

The index (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`), little-endian: `MMIDIDX\\0\\0`, uint64 version 1,
uint8 type, uint64 sequences n, uint64 d, then int32 lengths (n,), int64 byte offsets (n,), int64 documents (d,), the
sequences at which they begin with n at the end; of multimodal sets uint8 modes (n,) besides.
"""

from __future__ import annotations

import struct

import numpy as np

from data_prep.tokens.token_file import BLOCK, DocumentEnds, Ids, TokenFile, head_of, size_of
from pipeline.base.errors import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def _index(path: str) -> str:
    return path if path.endswith(".idx") else f"{path.removesuffix('.bin')}.idx"


def fits(path: str, head: bytes) -> bool:
    """Whether it is one of the two files."""
    return path.endswith((".bin", ".idx")) and head_of(_index(path), len(_MAGIC)) == _MAGIC


def look(path: str) -> TokenFile:
    """Read the index's header. Raises UserError where the index is not as long as that says."""
    index = _index(path)
    data = f"{index.removesuffix('.idx')}.bin"
    size, whole = size_of(index), size_of(data)
    head = head_of(index, _HEADER.size)
    if len(head) < _HEADER.size:
        raise UserError(f"{index} is cut short: it has {size} bytes, its header {_HEADER.size}")
    _, version, code, count, documents = _HEADER.unpack(head)
    if version != 1 or code not in _TYPES:
        raise UserError(f"{index}: version {version} with tokens of type {code} is no index that is known")
    wanted = _HEADER.size + 12 * count + 8 * documents
    if not documents or size not in (wanted, wanted + count):
        raise UserError(f"{index} has {size} bytes, but {count} sequences and {documents} borders take {wanted}")
    width = np.dtype(_TYPES[code]).itemsize
    ends = _Ends(index, documents - 1, data, whole, count, width)
    return TokenFile(data, "Megatron .bin", _TYPES[code], whole // width, 0, ends)


class _Ends(DocumentEnds):
    def __init__(self, index: str, documents: int, data: str, whole: int, count: int, width: int) -> None:
        """`count` sequences of the `whole` bytes of `data`, `width` bytes a token."""
        super().__init__(index, documents)
        self._data, self._whole, self._count, self._width = data, whole, count, width
        self._offsets, self._firsts = _HEADER.size + 4 * count, _HEADER.size + 12 * count

    def ends(self, start: int, stop: int) -> Ids:
        firsts = self.ordered(self.numbers(self._firsts, start + 1, stop + 1), 0, self._count)
        low, high = firsts[[0, -1]].tolist() if len(firsts) else (0, 0)
        offsets = np.append(self.numbers(self._offsets, low, min(high + 1, self._count)), self._whole)
        return offsets[firsts - low] // self._width

    def check(self) -> None:
        what = f"its sequences are not what {self._whole} bytes hold"
        damaged, end = UserError(f"{self.path} is damaged, or not that of {self._data}: {what}"), 0
        for start in range(0, self._count, BLOCK):
            stop = min(start + BLOCK, self._count)
            lengths, starts = self.numbers(_HEADER.size, start, stop, "<i4"), self.numbers(self._offsets, start, stop)
            ends = end + np.cumsum(lengths, dtype=np.int64) * self._width
            if (lengths < 0).any() or starts[0] != end or (starts[1:] != ends[:-1]).any():
                raise damaged
            end = int(ends[-1])
        if end != self._whole:
            raise damaged
        if [self.numbers(self._firsts, place, place + 1)[0] for place in (0, len(self))] != [0, self._count]:
            raise UserError(f"{self.path} is damaged: its documents do not go from sequence 0 to {self._count}")
        super().check()
