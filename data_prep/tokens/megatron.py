"""Megatron-LM's NAME.bin with NAME.idx: all tokens behind one another, and an index of sequences and documents.

The index (megatron/core/datasets/indexed_dataset.py, `_IndexWriter`), little-endian: `MMIDIDX\\0\\0`, uint64 version 1,
uint8 type, uint64 sequences n, uint64 d, then int32 lengths (n,), int64 byte offsets (n,), int64 documents (d,), the
sequences at which they begin with n at the end; of multimodal sets uint8 modes (n,) besides.
"""

from __future__ import annotations

import struct

import numpy as np

from data_prep.tokens.token_file import TokenFile, head_of, size_of
from pipeline.base.errors import UserError
from pipeline.base.files import open_regular

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def _index(path: str) -> str:
    return path if path.endswith(".idx") else f"{path.removesuffix('.bin')}.idx"


def fits(path: str, head: bytes) -> bool:
    """Whether it is one of the two files."""
    return path.endswith((".bin", ".idx")) and head_of(_index(path), len(_MAGIC)) == _MAGIC


def look(path: str) -> TokenFile:
    """Read the index. Raises UserError where it is not whole, or not of the file beside it."""
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
    if size not in (wanted, wanted + count):
        raise UserError(f"{index} has {size} bytes, but {count} sequences and {documents} borders take {wanted}")
    starts, width = np.zeros(count + 1, np.int64), np.dtype(_TYPES[code]).itemsize
    with open_regular(index) as file:
        file.seek(_HEADER.size)
        lengths, offsets = np.fromfile(file, "<i4", count), np.fromfile(file, "<i8", count)
        np.cumsum(lengths, out=starts[1:])
        if (lengths < 0).any() or not np.array_equal(offsets, starts[:-1] * width) or starts[-1] * width != whole:
            raise UserError(f"{index} is damaged, or not that of {data}: its sequences are not what {whole} bytes hold")
        del lengths, offsets  # an index may have 10**9 of them
        firsts = np.fromfile(file, "<i8", documents)
    if not documents or firsts[0] != 0 or firsts[-1] != count or (firsts[1:] < firsts[:-1]).any():
        raise UserError(f"{index} is damaged: its documents do not go from sequence 0 to {count}")
    ends = starts.take(firsts, out=firsts, mode="clip")[1:]
    return TokenFile(data, "Megatron .bin", _TYPES[code], int(starts[-1]), 0, ends)
