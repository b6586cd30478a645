"""Containers of rows: Arrow's record batches, and the members of a tar; of text, and of tokens (data_prep/tokens)."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from tarfile import HeaderError, ReadError
from typing import Any

from pipeline.base.errors import UserError

MOST_PACKED = 1 << 14
"""Times that arrays may be as large as what is stored of them: deflate comes to 1032 (zlib.net/zlib_tech.html)."""
_LARGEST = 1 << 30  # bytes of one member


def arrow_batches(path: str) -> tuple[Any, Iterator[Any]]:
    """The schema of an Arrow stream or file, and its record batches, one at a time.

    Raises UserError where pyarrow is not there, and for what is no such file.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: Arrow needs the package pyarrow: pip install pyarrow") from None

    def batches() -> Iterator[Any]:
        """The schema first."""
        try:
            file = pyarrow.OSFile(path)
            whole = file.read(6) == b"ARROW1"  # with an index at its end
            file.seek(0)
            reader = (pyarrow.ipc.open_file if whole else pyarrow.ipc.open_stream)(file)
            list(reader.schema.names)  # raises for what is no UTF-8
            yield reader.schema
            for one in map(reader.get_batch, range(reader.num_record_batches)) if whole else reader:
                one.validate(full=True)
                yield one
        except (pyarrow.ArrowException, OSError, ValueError, MemoryError, IndexError) as error:
            raise UserError(f"{path} is damaged, or no Arrow that can be read: {error}") from error

    found = batches()
    return next(found), found


class _Strict(tarfile.TarInfo):
    """A header. (tarfile takes one that is damaged, or missing at the end, for the end of the archive.)"""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        try:
            return super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # two blocks of zeros
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error


def tar_members(path: str, endings: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each ordinary file with such an ending, in order. Raises UserError for a damaged tar."""
    try:
        with tarfile.open(path, "r|*", tarinfo=_Strict) as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(endings):
                    if member.issparse() or member.size > _LARGEST:
                        raise UserError(f"{path}: {member.name} has holes, or {member.size:,} bytes: too many to hold")
                    file = tar.extractfile(member)
                    content = file.read() if file else b""
                    if len(content) < member.size:
                        raise UserError(f"{path} is cut short in {member.name}")
                    yield member.name, content
    except (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is damaged, or no tar that can be read: {error}") from error
