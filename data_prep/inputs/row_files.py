"""Containers of rows: Arrow's record batches, and the members of a tar; of text, and of tokens (data_prep/tokens)."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from collections.abc import Iterator
from tarfile import HeaderError, ReadError
from typing import Any, cast

from data_prep.inputs.compression import open_decompressed
from pipeline.base.errors import UserError

MOST_PACKED = 1 << 14
"""Times that arrays may be as large as what is stored of them: deflate comes to 1032 (zlib.net/zlib_tech.html)."""
_LARGEST = 1 << 30  # bytes of one member
_LONGEST_HEADER = 1 << 16
"""Bytes of one of tar's extended headers (pax, GNU's long names), and of the global ones of an archive together: a long
path is 4 KiB, an attribute of a file 64 KiB at most."""
_MOST_HEADERS = 16
"""Extended headers in front of one member: two as a rule."""
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


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
    """A header. (tarfile takes one that is damaged, or missing at the end, for the end of the archive, and reads one of
    any length into memory.)"""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        before = getattr(tarfile, "headers_before", 0)  # it calls itself for what follows an extended header
        if before > _MOST_HEADERS:
            raise ReadError(f"more than {_MOST_HEADERS} extended headers before one member")
        tarfile.headers_before = before + 1
        try:
            found = super().fromtarfile(tarfile)
        except HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # two blocks of zeros
                raise
            raise ReadError(f"after {tarfile.offset:,} bytes: {error}") from error
        finally:
            tarfile.headers_before = before
        if sum(map(len, (*tarfile.pax_headers, *tarfile.pax_headers.values()))) > _LONGEST_HEADER:
            raise ReadError(f"global headers of more than {_LONGEST_HEADER:,} bytes")
        return found

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _EXTENDED and not 0 <= found.size <= _LONGEST_HEADER:
            raise ReadError(f"an extended header of {found.size:,} bytes, more than {_LONGEST_HEADER:,}")
        return found

    def _proc_sparse(self, tarfile: Any) -> Any:
        raise ReadError(f"{self.name} has holes (GNU's sparse format): write the archive without --sparse")

    def _proc_gnusparse_10(self, next: Any, *_: Any) -> Any:
        raise ReadError(f"{next.name} has holes (GNU's sparse format): write the archive without --sparse")


def tar_members(path: str, endings: tuple[str, ...], most: int = _LARGEST) -> Iterator[tuple[str, bytes | None]]:
    """Name and content of each ordinary file with such an ending, in order; no content of one with more than `most`
    bytes. Raises UserError for a damaged tar."""
    try:
        with open_decompressed(path) as (stream, _, _), tarfile.open(fileobj=stream, mode="r|", tarinfo=_Strict) as tar:
            while (member := tar.next()) is not None:
                cast(Any, tar).members = []  # it keeps the headers of all that it has read
                if member.isfile() and member.name.endswith(endings):
                    if member.issparse():
                        raise UserError(f"{path}: {member.name} has holes: write the archive without --sparse")
                    if member.size > most:
                        yield member.name, None
                        continue
                    file = tar.extractfile(member)
                    content = file.read() if file else b""
                    if len(content) < member.size:
                        raise UserError(f"{path} is cut short in {member.name}")
                    yield member.name, content
    except (tarfile.TarError, EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is damaged, or no tar that can be read: {error}") from error
