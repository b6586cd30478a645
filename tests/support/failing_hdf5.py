"""An HDF5 reading process that fails in the middle of a dataset, as the environment variable FAIL_BY says.

It runs the real reader (data_prep/hdf5_reader.py). FAIL_BY=crash: it dies by SIGSEGV after one block, as libhdf5 does
with a damaged file. FAIL_BY=loop: it never returns after one block. Otherwise it reads all blocks.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from data_prep import hdf5_reader
from pipeline.run.worker import AnswerPart, serve_requests


def read_blocks_and_fail(dataset: Any, rows: int) -> Iterator[AnswerPart]:
    """Yield one block and fail, or yield all blocks if FAIL_BY is empty."""
    blocks = read_blocks(dataset, rows)
    failure = os.environ.get("FAIL_BY", "")
    if failure:
        yield next(blocks)
    if failure == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while failure == "loop":
        pass
    yield from blocks


if __name__ == "__main__":
    read_blocks = hdf5_reader._blocks
    hdf5_reader._blocks = read_blocks_and_fail
    serve_requests(hdf5_reader._answer)
