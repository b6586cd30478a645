"""HDF5 with a dataset `tokens` or `input_ids` of integers: our own shards (data_prep/text/shard_file.py), and others'.

Of shape (tokens,), or (rows, T), which is read as one row behind the other. A contiguous dataset is mapped where it
lies; chunked and compressed ones are read by whole blocks of rows. What leads elsewhere (links, external and virtual
data) is not followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import h5py
import numpy as np

from data_prep.inputs.row_files import MOST_PACKED
from data_prep.tokens.token_file import Ids, TokenFile, size_of
from pipeline.base.errors import UserError
from pipeline.base.files import reading

NAMES = ("tokens", "input_ids")
_BLOCK = 1 << 22


def fits(path: str, head: bytes) -> bool:
    """Whether it has the mark of HDF5."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


def look(path: str) -> TokenFile:
    """Find the dataset. Raises UserError where there is none that holds tokens."""
    with reading(path, Exception), h5py.File(path, "r", locking=False) as file:
        return _look(path, file)


def _look(path: str, file: Any) -> TokenFile:
    name = next((name for name in NAMES if isinstance(file.get(name, getlink=True), h5py.HardLink)), None)
    dataset: Any = file[name] if name else None
    if name is None or not isinstance(dataset, h5py.Dataset):
        raise UserError(f"{path}: no dataset {' or '.join(NAMES)}; there are {', '.join(file) or 'none'}")
    kind = dataset.dtype
    if kind.kind not in "iu" or dataset.ndim not in (1, 2) or dataset.is_virtual or dataset.external:
        raise UserError(f"{path}: {name} is {kind} of shape {dataset.shape}; tokens are integers in one or two axes")
    tokens, offset, stored = int(dataset.size), dataset.id.get_offset(), dataset.id.get_storage_size()
    if offset is not None and offset + tokens * kind.itemsize > size_of(path):
        raise UserError(f"{path} is cut short: {name} should go to byte {offset + tokens * kind.itemsize:,}")
    grid = [-(-size // step) for size, step in zip(dataset.shape, dataset.chunks or (), strict=False)]
    # A chunk that was never written would be read as zeros.
    unwritten = dataset.chunks and dataset.id.get_num_chunks() < np.prod(grid)
    if unwritten or tokens * kind.itemsize > MOST_PACKED * stored:
        raise UserError(f"{path}: {name} claims {tokens:,} tokens, and {stored:,} bytes are stored: it is not whole")
    mapped = offset if kind.byteorder != ">" else None
    if dataset.chunks and np.prod(dataset.chunks) > 8 * _BLOCK:
        raise UserError(f"{path}: {name} has chunks of {dataset.chunks}, too large to be read one by one: repack it")
    rows = None if mapped is not None else partial(_rows, path, name)
    return TokenFile(path, "HDF5", kind.name, tokens, mapped, rows=rows, row_is_document=False)


def _rows(path: str, name: str) -> Iterator[Ids]:
    """What is not mapped, block by block."""
    with reading(path, Exception), h5py.File(path, "r", locking=False) as file:
        dataset: Any = file[name]
        step = max(1, _BLOCK // int(np.prod(dataset.shape[1:])))
        for start in range(0, len(dataset), step):
            yield dataset[start : start + step].ravel()
