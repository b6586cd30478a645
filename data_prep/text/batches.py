"""Documents on their way to the tokenizer: which are left out, how many go at once, and what is done meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from data_prep.inputs.sources import Document
from pipeline.base.errors import UserError

Encoded = TypeVar("Encoded")
_BATCH = 1 << 18  # characters for each core: enough to keep the tokenizer busy, little enough for its caches
_MOST_CORES = 16
"""For so many a batch is made, so that memory does not grow with cores: 32 to 43 bytes a character of short documents.
100 MB in documents of 4,000 characters peaked at 83 MB for 2 cores, 248 MB for 16, 1,502 MB for 128 without this bound
(pretended ones: the machine had 2; the speed on more than 16 was not measured)."""


def first(documents: Iterator[Document], kept: Sequence[bool]) -> Iterator[Document]:
    """Those that are kept. Raises UserError where there are more, or fewer, than when they were hashed."""
    number = 0
    for number, document in enumerate(documents, 1):
        if number <= len(kept) and kept[number - 1]:
            yield document
    if number != len(kept):
        raise UserError(f"{len(kept)} documents were hashed, {number} read again: data.filter must say the same again")


def ahead(
    encode: Callable[[list[Document]], Encoded], documents: Iterator[list[Document]]
) -> Iterator[tuple[list[Document], Encoded]]:
    """Each batch with its tokens. One is tokenised, on all cores, while the next is read and the last one written."""
    with ThreadPoolExecutor(1) as pool:
        under_way = None
        for batch in documents:
            before, under_way = under_way, (batch, pool.submit(encode, batch))
            if before is not None:
                yield before[0], before[1].result()
        if under_way is not None:
            yield under_way[0], under_way[1].result()


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Batches for the tokenizer."""
    batch: list[Document] = []
    size, enough = 0, _BATCH * min(len(os.sched_getaffinity(0)), _MOST_CORES)
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= enough:
            yield batch
            batch, size = [], 0
    yield batch
