"""HDF5 files of the user's, read in a child process: a damaged one can crash libhdf5, and with it whoever called it.

A contiguous dataset is described here and mapped elsewhere; chunked and compressed ones are read here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.base.errors import UserError
from pipeline.base.files import translate_read_errors
from pipeline.run.worker import AnswerPart, WorkerDiedError, WorkerPool, serve_requests

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CPU_S = 600
"""Seconds of processor time for what a file holds, and for each block of rows: damaged metadata can be a circle."""
_READER = WorkerPool(__name__, _CPU_S)


class Dataset(NamedTuple):
    """A dataset as the file describes it."""

    path: str
    """Of the file."""
    name: str
    kind: str
    """Its type as numpy's `dtype.str`, such as `<u2`; `|O` for what numpy has no type for."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...] | None
    """The shape of a chunk; None for a dataset in one piece."""
    stored_chunks: int
    """How many chunks were written."""
    offset: int | None
    """Where it lies in the file, in bytes; None unless it lies there in one piece."""
    stored: int
    """Bytes that are stored of it, compressed ones as they are."""
    is_virtual: bool
    is_external: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its type."""
        import numpy as np

        return np.dtype(self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes that type and shape come to."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def grid(self) -> int:
        """How many chunks the shape comes to; 0 for a dataset in one piece."""
        if self.chunks is None:
            return 0
        return math.prod(-(-size // step) for size, step in zip(self.shape, self.chunks, strict=True))

    def check(self) -> None:
        """Raise UserError if type and shape are not what is stored."""
        if self.is_virtual or self.is_external:
            return
        what = f"{self.path}: {self.name} is {self.dtype} of shape {self.shape}"
        out = "it is damaged or was not written to its end: write the file again"
        if self.chunks is None and self.stored not in (0, self.nbytes):  # 0: never written, it is read as zeros
            raise UserError(
                "data.damaged_file",
                f"{what}, which is {self.nbytes:,} bytes, and {self.stored:,} bytes are stored: {out}",
            )
        if self.offset is not None and self.offset + self.nbytes > (size := os.stat(self.path).st_size):
            raise UserError(
                "data.damaged_file", f"{what} and goes to byte {self.offset + self.nbytes:,} of {size:,}: {out}"
            )
        if self.stored_chunks > self.grid:
            raise UserError(
                "data.damaged_file",
                f"{what}, which is {self.grid:,} chunks, and {self.stored_chunks:,} are stored: {out}",
            )


def describe_datasets(
    path: str, names: Sequence[str], follow_links: bool = True
) -> tuple[dict[str, Dataset], list[str]]:
    """The datasets of these names that a file has, checked, and the names of all that is at its top level.

    follow_links: whether a name may be a soft or external link. Raises UserError, naming the file, if it cannot be
    read, and for a dataset that is not whole.
    """
    request = {"path": path, "names": [*names], "follow_links": follow_links}
    answer = _ask(path, f"dataset {' or '.join(names)}", request)
    found = {}
    for values in answer["datasets"]:
        values["shape"] = tuple(values["shape"])
        values["chunks"] = values["chunks"] and tuple(values["chunks"])
        found[values["name"]] = Dataset(path=path, **values)
    for dataset in found.values():
        dataset.check()
    return found, answer["there"]


def read_rows(path: str, name: str, rows: int) -> Iterator[npt.NDArray[Any]]:
    """The rows of a dataset, so many at once. Raises UserError naming file and dataset if it cannot be read."""
    import numpy as np

    try:
        for value, content in _READER.stream({"path": path, "name": name, "rows": rows}):
            if "error" in value:
                raise UserError("data.damaged_file", value["error"])
            yield np.frombuffer(content, value["kind"]).reshape(value["shape"])
    except WorkerDiedError as error:
        raise _crashed(path, f"dataset {name}", error) from None


def _ask(path: str, what: str, request: Any) -> Any:
    try:
        answer = _READER.request(request)
    except WorkerDiedError as error:
        raise _crashed(path, what, error) from None
    if "error" in answer:
        raise UserError("data.damaged_file", answer["error"])
    return answer


def _crashed(path: str, what: str, error: WorkerDiedError) -> UserError:
    return UserError(
        "data.damaged_file",
        f"cannot read {path}: the process that read its {what} by the HDF5 library failed: {error}. The file is "
        "probably damaged: write it again",
    )


def _answer(request: Any) -> Iterable[AnswerPart]:
    """What the worker answers."""
    import h5py

    path = request["path"]
    try:
        with translate_read_errors(path, Exception), h5py.File(path, "r", locking=False) as file:
            if "name" in request:
                yield from _blocks(file[request["name"]], request["rows"])
                return
            found = [_described(file, name, request["follow_links"]) for name in request["names"]]
            yield AnswerPart({"datasets": [one for one in found if one is not None], "there": [*file]})
    except UserError as error:
        yield AnswerPart({"error": str(error)})


def _blocks(dataset: Any, rows: int) -> Iterator[AnswerPart]:
    import numpy as np

    for start in range(0, max(1, len(dataset)), rows):
        block = np.ascontiguousarray(dataset[start : start + rows])
        yield AnswerPart({"kind": block.dtype.str, "shape": block.shape}, block.tobytes())


def _described(file: Any, name: str, follow_links: bool) -> dict[str, Any] | None:
    """The values of a :class:`Dataset`, but for its path; None if there is no dataset of this name."""
    import h5py

    if not follow_links and not isinstance(file.get(name, getlink=True), h5py.HardLink):
        return None
    if name not in file:
        return None
    dataset = file[name]  # not `get`, which takes one that is damaged for none
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        return None
    return {
        "name": name,
        "kind": dataset.dtype.str,
        "shape": dataset.shape,
        "chunks": dataset.chunks,
        "stored_chunks": dataset.id.get_num_chunks() if dataset.chunks else 0,
        "offset": dataset.id.get_offset(),
        "stored": dataset.id.get_storage_size(),
        "is_virtual": dataset.is_virtual,
        "is_external": bool(dataset.external),
    }


if __name__ == "__main__":
    serve_requests(_answer)
