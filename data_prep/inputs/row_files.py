"""Containers of rows: Arrow's record batches, and the members of a tar; of text, and of tokens (data_prep/tokens)."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from tarfile import HeaderError, ReadError
from typing import Any

from pipeline.base.errors import UserError

_LARGEST = 1 << 30  # bytes of one member


class arrow_batches:
    """The record batches of an Arrow stream or file, one at a time, and their `schema`.

    Raises UserError where pyarrow is not there, and for what is no such file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            import pyarrow
        except ImportError:
            raise UserError(f"{path}: Arrow needs the package pyarrow: pip install pyarrow") from None
        self._errors = (pyarrow.ArrowException, OSError, ValueError, MemoryError, IndexError)
        try:
            file = pyarrow.OSFile(path)
            random = file.read(6) == b"ARROW1"
            file.seek(0)
            self._reader = (pyarrow.ipc.open_file if random else pyarrow.ipc.open_stream)(file)
            self._count = self._reader.num_record_batches if random else None
        except self._errors as error:
            raise self._damaged(error) from error
        self.schema: Any = self._reader.schema

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"{self._path} is damaged, or no Arrow that can be read: {error}")

    def __iter__(self) -> Iterator[Any]:
        number = 0
        while self._count is None or number < self._count:
            try:
                one = self._reader.read_next_batch() if self._count is None else self._reader.get_batch(number)
                one.validate(full=True)
            except StopIteration:
                return
            except self._errors as error:
                raise self._damaged(error) from error
            yield one
            number += 1


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
