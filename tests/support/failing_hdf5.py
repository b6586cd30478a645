"""A worker that reads HDF5 as the real one does, and fails in the middle of the datasets that a test names."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from data_prep import hdf5_reader
from pipeline.run.worker import AnswerPart, serve_requests


def blocks(dataset: Any, rows: int) -> Iterator[AnswerPart]:
    """One block, and what a damaged file does to libhdf5; all blocks of another dataset."""
    found = read_blocks(dataset, rows)
    failure = os.environ.get("FAIL_BY", "")
    if failure:
        yield next(found)
    if failure == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    while failure == "loop":
        pass
    yield from found


if __name__ == "__main__":
    read_blocks = hdf5_reader._blocks
    hdf5_reader._blocks = blocks
    serve_requests(hdf5_reader._answer)
