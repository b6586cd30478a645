"""One file of tokens as its header or index describes it, and reading it block by block.

Where `offset` is known, tokens lie one after another from there on, little-endian, so that a loader maps them; else
`rows` reads them. Documents are known by an index (`ends`), by the rows, or by the end-of-text tokens between them.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.base.errors import UserError
from pipeline.base.files import open_regular

Ids = npt.NDArray[np.integer]
BLOCK = _BLOCK = 1 << 22
BARE = "nanoGPT .bin"
LONGEST = 1 << 28
"""Tokens of one document: beyond that its end was missed."""
MAPPED = {"uint16": "uint16", "uint32": "uint32", "int32": "uint32"}
"""Types that a loader takes, and as what; ids are checked to be no negative ones."""


class DocumentEnds:
    """Where documents end, in tokens from the file's start, by an index beside it that may be larger than the memory.

    It is read at the places that are asked for: what lies in a part is found by halving, some hundred small reads. It
    is not mapped: a file that is cut off meanwhile would end the process.
    """

    def __init__(self, path: str, documents: int) -> None:
        self.path, self._documents, self._file = path, documents, open_regular(path)

    def __len__(self) -> int:
        """How many documents there are."""
        return self._documents

    def __getitem__(self, document: int) -> int:
        """Where one ends."""
        return int(self.ends(document, document + 1)[0])

    def ends(self, start: int, stop: int) -> Ids:
        """Where documents [start, stop) end: shape (stop - start,)."""
        return self.numbers(0, start, stop)

    def check(self) -> None:
        """Read all. Raises UserError where the index is damaged, or not that of the file."""
        last = 0
        for start in range(0, len(self), BLOCK):
            last = self.ordered(self.ends(start, min(start + BLOCK, len(self))), last, sys.maxsize)[-1]

    def within(self, start: int, stop: int) -> Ids:
        """The ends in (start, stop]: shape (documents,). Raises UserError as `ordered` does."""
        first = bisect_right(self, start)
        return self.ordered(self.ends(first, bisect_right(self, stop, first)), start + 1, stop)

    def ordered(self, found: Ids, least: int, most: int) -> Ids:
        """What was found. Raises UserError where one is less than the one before, or beyond the bounds."""
        if len(found) and (found[0] < least or found[-1] > most or (found[1:] < found[:-1]).any()):
            raise UserError(f"{self.path} is damaged: documents end one after another, and not beyond the file")
        return found

    def numbers(self, at: int, start: int, stop: int, kind: str = "<i8") -> Ids:
        """Those at the places [start, stop), counted from byte `at`. Raises UserError where the index ends before."""
        size = np.dtype(kind).itemsize
        found = os.pread(self._file.fileno(), (stop - start) * size, at + start * size)
        if len(found) < (stop - start) * size:
            raise UserError(f"{self.path} is cut short: it ends before byte {at + stop * size:,}")
        return np.frombuffer(found, kind)


class TokenFile(NamedTuple):
    """What is known of a file before its tokens are read."""

    path: str
    """Of the file that holds the tokens, absolute."""
    format: str
    dtype: str
    """Name of their type, little-endian."""
    tokens: int | None = None
    """How many; None where only reading tells."""
    offset: int | None = None
    """Where they start, in bytes; None where they do not lie in one piece."""
    ends: DocumentEnds | None = None
    """Where each document of the file ends, by its index."""
    rows: Callable[[], Iterator[Ids]] | None = None
    """The tokens of a file without an `offset`, in parts."""
    row_is_document: bool = True
    """Whether each of these parts is a document."""
    before: int = 0
    """Tokens of the file in front of these."""
    note: str = ""
    """What a person should know besides, behind a semicolon."""

    @property
    def why_not(self) -> str | None:
        """Why no loader can map it; None where one can."""
        if self.offset is None:
            return f"{self.format} does not hold them in one piece"
        return None if self.dtype in MAPPED else f"they are {self.dtype}"

    def part(self, start: int, stop: int) -> TokenFile:
        """Tokens [start, stop) of what lies in one piece, as if they were all; a document counts where it ends."""
        assert self.offset is not None
        offset = self.offset + start * np.dtype(self.dtype).itemsize
        return self._replace(offset=offset, tokens=stop - start, before=self.before + start)

    def ends_in(self, start: int, stop: int) -> Ids | None:
        """How many tokens behind `start` the documents end that end in (start, stop], by the index, shape (documents,);
        None without one."""
        start, stop = self.before + start, self.before + stop
        return None if self.ends is None else self.ends.within(start, stop) - start

    def read(self, start: int, stop: int) -> Ids:
        """Tokens [start, stop) of what lies in one piece. Raises UserError where the file is too short for that."""
        assert self.offset is not None
        kind = np.dtype(self.dtype).newbyteorder("<")
        with open_regular(self.path) as file:
            found = np.fromfile(file, kind, stop - start, offset=self.offset + start * kind.itemsize)
        if len(found) < stop - start:
            raise UserError(f"{self.path} is cut short: it ends before token {stop:,} of {self.tokens:,}")
        return found

    def blocks(self) -> Iterator[Ids]:
        """All tokens, a few million at a time, or a document."""
        if self.rows is not None:
            yield from self.rows()
            return
        assert self.tokens is not None
        for start in range(0, self.tokens, _BLOCK):
            yield self.read(start, min(start + _BLOCK, self.tokens))

    def documents(self, eos_id: int) -> Iterator[Ids]:
        """The documents; without an index each ends with a token `eos_id`, the last perhaps without one.

        Raises UserError where one does not end.
        """
        if self.rows is not None and self.row_is_document:
            yield from self.rows()
            return
        parts: list[Ids] = []
        before = waiting = 0
        for block in self.blocks():
            borders = self.ends_in(before, before + len(block))
            if borders is None:
                borders = np.flatnonzero(block == eos_id) + 1
            start = 0
            for end in borders.tolist():
                yield np.concatenate([*parts, block[start:end]])
                parts, waiting, start = [], 0, end
            if start < len(block):
                parts, waiting = [*parts, block[start:]], waiting + len(block) - start
            if waiting > LONGEST:
                raise UserError(f"{self.path}: no token {eos_id} within {waiting:,} tokens: name their own tokenizer")
            before += len(block)
        if parts:
            yield np.concatenate(parts)


class Seen(NamedTuple):
    """What reading all tokens told."""

    tokens: int
    largest: int
    ended: int
    """End-of-text tokens."""
    unended: int
    """Documents of the index that do not end with one."""


def scan(file: TokenFile, eos_id: int, vocab_size: int) -> Seen:
    """Read all tokens. Raises UserError naming the place of the first id outside
    [0, vocab_size), for no token, and for bare uint16 where the tokenizer (below 2**32 ids) has more.
    """
    if file.format == BARE and 1 << 16 < vocab_size < 1 << 32:
        raise UserError(
            f"{file.path}: a bare .bin is read as uint16, and the tokenizer has {vocab_size:,} ids: put Megatron's "
            ".idx beside it, or write the tokens to HDF5, as a dataset `tokens` of uint32"
        )
    tokens = largest = ended = unended = 0
    for block in file.blocks():
        if len(block) and (int(block.min()) < 0 or int(block.max()) >= vocab_size):
            bad = int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
            place = file.before + tokens + bad
            raise UserError(
                f"{file.path}: token {place:,} is {block[bad]}, and the tokenizer has the ids 0 to "
                f"{vocab_size - 1}: the file is damaged, no {file.format}, or of another tokenizer"
            )
        largest = max(largest, int(block.max())) if len(block) else largest
        ended += int(np.count_nonzero(block == eos_id))
        if file.rows is not None and file.row_is_document:
            unended += int(len(block) > 0 and block[-1] != eos_id)
        elif (ends := file.ends_in(tokens, tokens + len(block))) is not None:
            unended += int(np.count_nonzero(block[np.unique(ends) - 1] != eos_id))  # no empty ones
        tokens += len(block)
    if not tokens:
        raise UserError(f"{file.path} holds no tokens: leave it out")
    return Seen(tokens, largest, ended, unended)


def size_of(path: str) -> int:
    """Bytes of a file. Raises UserError for a pipe or a device."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def head_of(path: str, count: int) -> bytes:
    """The first bytes of a file; b"" where there is none. Raises UserError for a pipe or a device."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except (FileNotFoundError, IsADirectoryError):
        return b""
