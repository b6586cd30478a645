"""Read HDF5 files of the user in a child process, because a damaged file can crash libhdf5 and the calling process.

The child process returns the descriptions of datasets. The caller memory-maps contiguous datasets. The child process
also reads the rows of chunked and compressed datasets. An error that may have another cause than the file is not
reported as a damaged file. Examples are a missing h5py, too little memory and a killed process.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.base.errors import StorageError, UserError
from pipeline.base.files import translate_read_errors
from pipeline.run.worker import AnswerPart, WorkerDiedError, WorkerPool, serve_requests

if TYPE_CHECKING:
    import h5py
    import numpy as np
    import numpy.typing as npt

_CPU_LIMIT_S = 600
"""Maximum processor time, in seconds, to describe a file or to read one block of rows.

Damaged metadata can make libhdf5 loop forever.
"""
_READER = WorkerPool(__name__, _CPU_LIMIT_S)
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGPROF)
"""Signals that end the child process because of a damaged file: libhdf5 crashes or exceeds its time limit (SIGPROF)."""


class Dataset(NamedTuple):
    """Description of an HDF5 dataset, from the metadata of the file."""

    path: str
    """Path of the file."""
    name: str
    """Name of the dataset at the top level of the file."""
    kind: str
    """Element type as numpy's `dtype.str`, such as `<u2`; `|O` if numpy has no such type."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    """Shape of a chunk; None if the dataset is contiguous."""
    stored_chunks: int
    """Number of chunks in the file."""
    offset: int | None
    """Byte at which the data begins in the file; None if the data is not contiguous."""
    stored_bytes: int
    """Size of the data in the file in bytes, after compression."""
    is_virtual: bool
    """Whether the data is mapped from other datasets."""
    is_external: bool
    """Whether the data is in another file."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type."""
        import numpy as np

        return np.dtype(self.kind)

    @property
    def nbytes(self) -> int:
        """Size in memory in bytes, which follows from element type and shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def expected_chunks(self) -> int:
        """Number of chunks that the shape needs; 0 if the dataset is contiguous."""
        if self.chunks is None:
            return 0
        return math.prod(-(-size // step) for size, step in zip(self.shape, self.chunks, strict=True))

    def check(self) -> None:
        """Raise UserError if the file stores more or less data than type and shape require.

        Virtual and external datasets are not checked. Missing chunks are allowed.
        """
        if self.is_virtual or self.is_external:
            return
        description = f"{self.path}: {self.name} is {self.dtype} of shape {self.shape}"
        advice = "it is damaged or incomplete: write the file again"
        # A dataset that was never written has no stored bytes. HDF5 reads it as zeros.
        if self.chunks is None and self.stored_bytes not in (0, self.nbytes):
            raise UserError(
                "data.damaged_file",
                f"{description}, which needs {self.nbytes:,} bytes, but {self.stored_bytes:,} bytes are stored: "
                f"{advice}",
            )
        if self.offset is not None:
            end = self.offset + self.nbytes
            size = os.stat(self.path).st_size
            if end > size:
                raise UserError(
                    "data.damaged_file", f"{description} and ends at byte {end:,}, but the file has {size:,}: {advice}"
                )
        if self.stored_chunks > self.expected_chunks:
            raise UserError(
                "data.damaged_file",
                f"{description}, which needs {self.expected_chunks:,} chunks, but {self.stored_chunks:,} are stored: "
                f"{advice}",
            )


def describe_datasets(
    path: str, names: Sequence[str], follow_links: bool = True
) -> tuple[dict[str, Dataset], list[str]]:
    """Describe datasets at the top level of a file, and check that they are complete.

    Args:
        path: the HDF5 file.
        names: names of the datasets to describe. If the file has no dataset of a name, the name is ignored.
        follow_links: whether a name may be a soft or external link.

    Returns: the descriptions by name, and the names of all groups and datasets at the top level.

    Raises UserError with the path if the file cannot be read or a dataset is incomplete.
    """
    request = {"path": path, "names": [*names], "follow_links": follow_links}
    try:
        answer = _READER.request(request)
    except WorkerDiedError as error:
        raise _explain_worker_death(path, f"dataset {' or '.join(names)}", error) from None
    _raise_reported_error(answer)
    datasets = {}
    for fields in answer["datasets"]:
        fields["shape"] = tuple(fields["shape"])
        fields["chunks"] = fields["chunks"] and tuple(fields["chunks"])
        datasets[fields["name"]] = Dataset(path=path, **fields)
    for dataset in datasets.values():
        dataset.check()
    return datasets, answer["top_level"]


def read_rows(path: str, name: str, rows: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the content of a dataset in blocks of `rows` rows.

    Raises UserError with the path if the dataset cannot be read.
    """
    import numpy as np

    try:
        for value, content in _READER.stream({"path": path, "name": name, "rows": rows}):
            _raise_reported_error(value)
            yield np.frombuffer(content, value["kind"]).reshape(value["shape"])
    except WorkerDiedError as error:
        raise _explain_worker_death(path, f"dataset {name}", error) from None


def _raise_reported_error(answer: dict[str, Any]) -> None:
    """Raise an error if the answer of the child process reports one."""
    if "error" in answer:
        raise (StorageError if answer["is_storage_error"] else UserError)(answer["code"], answer["error"])


def _explain_worker_death(path: str, content: str, error: WorkerDiedError) -> UserError:
    """Return the error for a child process that died while it read `content`, such as `dataset tokens`.

    The file is reported as damaged only if the child process ended by one of `_CRASH_SIGNALS`.
    """
    message = f"cannot read {path}: the process that read its {content} with the HDF5 library failed: {error}"
    if error.signal in _CRASH_SIGNALS:
        return UserError("data.damaged_file", f"{message}. The file is probably damaged: write it again")
    return UserError("data.reader_failed", f"{message}. This says nothing about the file: try again")


# -- in the child process --------------------------------------------------------------------------------


def _answer_request(request: Any) -> Iterable[AnswerPart]:
    """Yield the answer to a request of `describe_datasets` or `read_rows`. A request with a `name` asks for rows."""
    path = request["path"]
    try:
        import h5py

        # `Exception`, because h5py raises many kinds of exceptions for a damaged file.
        with translate_read_errors(path, Exception), h5py.File(path, "r", locking=False) as file:
            if "name" in request:
                yield from _read_blocks(file[request["name"]], request["rows"])
                return
            described = [_describe_dataset(file, name, request["follow_links"]) for name in request["names"]]
            datasets = [fields for fields in described if fields is not None]
            yield AnswerPart({"datasets": datasets, "top_level": [*file]})
    except ImportError as error:
        message = f"cannot read {path}: h5py cannot be imported: {error}: install Sluice's requirements again"
        yield _report_error("data.missing_package", message)
    except MemoryError as error:
        advice = "request more memory for this stage, or write the file with smaller chunks"
        yield _report_error("data.out_of_memory", f"cannot read {path}: no memory is left: {error}: {advice}")
    except UserError as error:
        yield _report_error(error.code, str(error), isinstance(error, StorageError))


def _report_error(code: str, message: str, is_storage_error: bool = False) -> AnswerPart:
    """Return an answer that makes the calling process raise an error with this code and message."""
    return AnswerPart({"code": code, "error": message, "is_storage_error": is_storage_error})


def _read_blocks(dataset: h5py.Dataset, rows: int) -> Iterator[AnswerPart]:
    """Yield the content of a dataset in blocks of `rows` rows. An empty dataset is yielded as one empty block."""
    import numpy as np

    for start in range(0, max(1, len(dataset)), rows):
        block = np.ascontiguousarray(dataset[start : start + rows])
        yield AnswerPart({"kind": block.dtype.str, "shape": block.shape}, block.tobytes())


def _describe_dataset(file: h5py.File, name: str, follow_links: bool) -> dict[str, Any] | None:
    """Return the fields of a :class:`Dataset` except its path; None if the file has no dataset of this name."""
    import h5py

    if not follow_links and not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return None
    if name not in file:
        return None
    dataset = file[name]  # `file.get` would return None for a damaged dataset instead of raising an error.
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        return None
    return {
        "name": name,
        "kind": dataset.dtype.str,
        "shape": dataset.shape,
        "chunks": dataset.chunks,
        "stored_chunks": dataset.id.get_num_chunks() if dataset.chunks else 0,
        "offset": dataset.id.get_offset(),
        "stored_bytes": dataset.id.get_storage_size(),
        "is_virtual": dataset.is_virtual,
        "is_external": bool(dataset.external),
    }


if __name__ == "__main__":
    serve_requests(_answer_request)
