"""HDF5 with a dataset `tokens` or `input_ids` of integers: our own shards (data_prep/text/shard_file.py), and others'.

Of shape (tokens,), or (rows, T), which is read as one row behind the other. A contiguous dataset is mapped where it
lies; chunked and compressed ones are read by whole blocks of rows. What leads elsewhere (links, external and virtual
data) is not followed. The file is read in a child process (data_prep/inputs/hdf5.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from data_prep.inputs.hdf5 import Dataset, describe, read_rows
from data_prep.inputs.row_files import MOST_PACKED
from data_prep.tokens.token_file import Ids, TokenFile
from pipeline.base.errors import UserError

NAMES = ("tokens", "input_ids")
_BLOCK = 1 << 22


def fits(path: str, head: bytes) -> bool:
    """Whether it has the mark of HDF5."""
    return head.startswith(b"\x89HDF\r\n\x1a\n")


def look(path: str) -> TokenFile:
    """Find the dataset. Raises UserError where there is none that holds tokens."""
    found, there = describe(path, NAMES, follow_links=False)
    dataset = next((found[name] for name in NAMES if name in found), None)
    if dataset is None:
        raise UserError(f"{path}: no dataset {' or '.join(NAMES)}; there are {', '.join(there) or 'none'}")
    name, kind, shape = dataset.name, dataset.dtype, dataset.shape
    if kind.kind not in "iu" or len(shape) not in (1, 2) or dataset.is_virtual or dataset.is_external:
        raise UserError(f"{path}: {name} is {kind} of shape {shape}; tokens are integers in one or two axes")
    tokens, stored = dataset.nbytes // kind.itemsize, dataset.stored
    # A chunk that was never written would be read as zeros.
    if dataset.stored_chunks < dataset.grid or dataset.nbytes > MOST_PACKED * stored:
        raise UserError(f"{path}: {name} claims {tokens:,} tokens, and {stored:,} bytes are stored: it is not whole")
    mapped = dataset.offset if kind.byteorder != ">" else None
    if dataset.chunks and np.prod(dataset.chunks) > 8 * _BLOCK:
        raise UserError(f"{path}: {name} has chunks of {dataset.chunks}, too large to be read one by one: repack it")
    rows = None if mapped is not None else partial(_rows, dataset)
    return TokenFile(path, "HDF5", kind.name, tokens, mapped, rows=rows, row_is_document=False)


def _rows(dataset: Dataset) -> Iterator[Ids]:
    """What is not mapped, block by block."""
    step = max(1, _BLOCK // max(1, int(np.prod(dataset.shape[1:]))))
    for block in read_rows(dataset.path, dataset.name, step):
        yield block.ravel()
