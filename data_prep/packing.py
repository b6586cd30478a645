"""Pack documents into windows of a fixed number of tokens by best fit (`data.packing: best_fit`).

A document that fits goes whole into the open window with the smallest sufficient free space, or into a new window. A
longer document is cut into whole windows and a remainder, which is packed like a short document. One pass over the
documents is enough, because only a limited number of windows is open. The result depends only on the documents and
their order.

Ding et al. (arXiv 2404.10830) pack all documents of a corpus by best fit. Here each work unit is packed on its own.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.data.manifest import MASK_DOCUMENT_START, MASK_LEARNED

MAX_OPEN_WINDOWS = 256
"""Maximum number of open windows.

Tokens and mask of the open windows take at most 5 bytes per token: 10 MB for windows of 8,192 tokens, and 168 MB for
windows of 131,072 tokens. With more windows, the padding was the same (benchmarks/results/packing.md).
"""


class Piece(NamedTuple):
    """Consecutive tokens of a document that are in the same window."""

    document: int
    """Number of the document, counted from 0 in the order of packing."""
    start: int
    """Index in the document of the first token of the piece."""
    tokens: npt.NDArray[Any]
    """Shape (n,)."""
    mask: npt.NDArray[np.uint8] | None
    """Mask of the tokens as the encoder returns it, shape (n,); None if all tokens are learned, as in text."""
    text_bytes: int
    """Size in UTF-8 of the learned text of the whole document if this piece is the first; otherwise 0."""

    def make_mask(self, previous: Piece | None, eos_id: int) -> npt.NDArray[np.uint8]:
        """Return the mask of the piece in a shard, shape (n,).

        The first token of the piece is learned only if it is predicted from a context that also occurs outside of
        shards. In a text, this is the previous token of the document or, for the first token of the document, the token
        that ends another document.

        Args:
            previous: the piece that ends directly before this piece in the file; None after padding and at the start of
                a file.
            eos_id: id of the end-of-text token. It only occurs at the end of a text.
        """
        mask = np.full(len(self.tokens), MASK_LEARNED, np.uint8) if self.mask is None else self.mask.copy()
        continues = previous is not None and previous.document == self.document and previous.end == self.start
        # The first token of a record is not learned in any case, because the encoder excludes it.
        follows_end = previous is not None and self.start == 0 and previous.tokens[-1] == eos_id
        if not continues and not follows_end:
            mask[0] &= ~np.uint8(MASK_LEARNED)
        mask[0] |= MASK_DOCUMENT_START
        return mask

    @property
    def end(self) -> int:
        """Index in the document after the last token of the piece."""
        return self.start + len(self.tokens)


Window = list[Piece]
"""The pieces of a window in order. Padding fills the rest of the window."""


class BestFitPacker:
    """Pack documents into windows, and return each window when it is complete.

    A window is complete when it is full. If more than `max_open` windows are open, the window with the least free space
    is also completed.

    Args:
        length: number of tokens of a window.
        max_open: maximum number of open windows.
    """

    def __init__(self, length: int, max_open: int = MAX_OPEN_WINDOWS) -> None:
        self._length = length
        self._max_open = max_open
        # The open windows by their numbers, in the order in which they were opened.
        self._windows: dict[int, Window] = {}
        # The free space and the number of each open window, sorted. Of equal spaces, the oldest window is the first.
        self._spaces: list[tuple[int, int]] = []
        self._opened_windows = 0
        self._documents = 0
        self.cut_documents = 0
        """Number of documents that were longer than a window, and therefore cut."""

    @property
    def open_windows(self) -> int:
        """Number of open windows."""
        return len(self._windows)

    def add(
        self, tokens: npt.NDArray[Any], text_bytes: int, mask: npt.NDArray[np.uint8] | None = None
    ) -> Sequence[Window]:
        """Pack a document, and return the windows that are complete now, in order.

        Args:
            tokens: tokens of the document, shape (n,), n > 0.
            text_bytes: size in UTF-8 of the learned text.
            mask: mask of the document, shape (n,); None if all tokens are learned.
        """
        number = self._documents
        self._documents += 1
        self.cut_documents += len(tokens) > self._length
        complete: list[Window] = []
        for start in range(0, len(tokens), self._length):
            end = start + self._length
            piece_mask = None if mask is None else mask[start:end]
            piece = Piece(number, start, tokens[start:end], piece_mask, 0 if start else text_bytes)
            if len(piece.tokens) == self._length:
                complete.append([piece])
            else:
                if start:  # Without a copy, the tokens of the whole document would stay in memory.
                    piece = piece._replace(
                        tokens=piece.tokens.copy(), mask=None if piece_mask is None else piece_mask.copy()
                    )
                complete += self._pack_piece(piece)
        return complete

    def _pack_piece(self, piece: Piece) -> Sequence[Window]:
        """Put a piece that is shorter than a window into a window. Return this window, or another one, if complete."""
        size = len(piece.tokens)
        index = bisect_left(self._spaces, (size, 0))
        if index < len(self._spaces):
            space, number = self._spaces.pop(index)
        else:
            space, number = self._length, self._opened_windows
            self._opened_windows += 1
            self._windows[number] = []
        self._windows[number].append(piece)
        if space == size:
            return [self._windows.pop(number)]
        insort(self._spaces, (space - size, number))
        if len(self._spaces) <= self._max_open:
            return []
        _, number = self._spaces.pop(0)
        return [self._windows.pop(number)]

    def close(self) -> Sequence[Window]:
        """Return the open windows, in the order in which they were opened."""
        windows = list(self._windows.values())
        self._windows.clear()
        self._spaces.clear()
        return windows
