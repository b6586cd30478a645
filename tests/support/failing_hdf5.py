"""A replacement for the reader process of data_prep/hdf5_reader.py that fails in the middle of a dataset.

The environment variable FAIL_BY selects the failure:

    crash     SIGSEGV, as if libhdf5 crashed on a damaged file
    kill      SIGKILL
    loop      an endless loop
    memory    MemoryError
    import    h5py cannot be imported

With `import`, the process fails before it sends a block of rows; with the other values, after the first block. Without
FAIL_BY, the process sends all blocks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from data_prep import hdf5_reader
from pipeline.run.worker import AnswerPart, serve_requests

FAILURE = os.environ.get("FAIL_BY", "")


def read_blocks_and_fail(dataset: Any, rows: int) -> Iterator[AnswerPart]:
    """Yield one block of rows and fail. If FAIL_BY is empty, yield all blocks."""
    blocks = read_blocks(dataset, rows)
    if FAILURE:
        yield next(blocks)
    if FAILURE == "memory":
        raise MemoryError
    if FAILURE in ("crash", "kill"):
        os.kill(os.getpid(), signal.SIGSEGV if FAILURE == "crash" else signal.SIGKILL)
    while FAILURE == "loop":
        pass
    yield from blocks


if __name__ == "__main__":
    if FAILURE == "import":
        sys.modules["h5py"] = None  # type: ignore[assignment]  # makes `import h5py` raise ImportError
    read_blocks = hdf5_reader._read_blocks
    hdf5_reader._read_blocks = read_blocks_and_fail
    serve_requests(hdf5_reader._answer_request)
