"""WebDataset: a tar (or .tar.gz) whose members `KEY.npy`, `KEY.tokens.npy` or `KEY.input_ids.npy` are arrays of ids.

An array is a document. Nothing is unpickled, and nothing unpacked to disk. Tars of texts are a format of
data_prep/inputs/sources.py.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np

from data_prep.inputs.row_files import tar_members
from data_prep.tokens.token_file import Ids, TokenFile
from pipeline.base.errors import UserError


def fits(path: str, head: bytes) -> bool:
    """Whether it is a tar, or compressed and called one."""
    return head[257:262] == b"ustar" or path.endswith((".tar", ".tar.gz", ".tgz"))


def look(path: str) -> TokenFile:
    """Read up to the first array. Raises UserError where there is none."""
    first = next(_rows(path), None)
    if first is None:
        raise UserError(f"{path}: no member .npy with ids; where it holds texts, name it in data.source of a run")
    return TokenFile(path, "WebDataset tar", first.dtype.name, rows=lambda: _rows(path))


def _rows(path: str) -> Iterator[Ids]:
    for name, content in tar_members(path, (".npy",)):
        if name.endswith((".tokens.npy", ".input_ids.npy")) or name.rpartition("/")[2].count(".") == 1:
            if content is None:
                raise UserError(f"{path}: {name} is too large to be read at once: write smaller arrays")
            yield _array(f"{path}: {name}", content)


def _array(where: str, content: bytes) -> Ids:
    """The array of a .npy. (numpy's own reader would make room for what the header claims.)"""
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, columns, kind = read(file)
        if (
            kind.kind not in "iu"
            or len(shape) > 2
            or np.prod(shape, dtype=object) * kind.itemsize != len(rest := content[file.tell() :])
        ):
            raise UserError(f"{where} claims {kind} of shape {shape}, and is no array of so many ids")
        return np.frombuffer(rest, kind).reshape(shape, order="F" if columns else "C").ravel()
    except UserError:
        raise
    except Exception as error:  # numpy reads the header as Python, and has all kinds for what is none
        raise UserError(f"{where} is no .npy that can be read: {error}") from error
