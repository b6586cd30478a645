"""A .bin of bare uint16 tokens, as nanoGPT writes it (data/*/prepare.py: `arr.tofile`), documents ended by their token.

There is nothing in it to tell it by, so it comes last: what has another format's mark is not taken for it, and ids that
the tokenizer does not have betray what was no such file.
"""

from __future__ import annotations

import os

import numpy as np

from data_prep.inputs.compression import compression_of
from data_prep.inputs.content import advice, binary_kind, is_text
from data_prep.tokens.token_file import BARE, TokenFile, head_of, size_of
from pipeline.base.errors import UserError


def fits(path: str, head: bytes) -> bool:
    """Whether it is called so."""
    return path.endswith(".bin")


def look(path: str) -> TokenFile:
    """Count them. Raises UserError for an odd number of bytes, for an index beside it that is none, for text, for what
    has another format's mark, or where every other word of the first megabyte is next to nothing: the upper half of a
    wider id."""
    size, index = size_of(path), f"{path.removesuffix('.bin')}.idx"
    if os.path.exists(index):
        raise UserError(f"{path}: {index} beside it is damaged, or no index of Megatron's")
    head = head_of(path, 1 << 20)
    packed = compression_of(head) if not head.startswith(b"\x5d") else None  # xz's old mark is two likely tokens
    if known := binary_kind(head) or packed or ("text" if len(head) >= 64 and is_text(head[:1024]) else None):
        raise UserError(f"{path} seems to be {known}, and no uint16 tokens: leave it out{advice(known)}")
    if size % 2:
        raise UserError(f"{path} has {size} bytes, an odd number: it is cut short, or no uint16 tokens")
    words = np.frombuffer(head[: len(head) // 2 * 2], "<u2")
    low, high = words[: len(words) // 2 * 2].reshape(-1, 2).T
    if len(high) >= 32 and np.mean(high < 16) >= 0.99 and low.mean() > 8 * high.mean():
        raise UserError(
            f"{path}: every other uint16 is (nearly) 0, as in ids of 4 or 8 bytes, and nothing beside it says so: put "
            "Megatron's .idx beside it, or write them to HDF5, as a dataset `tokens` of uint32"
        )
    return TokenFile(path, BARE, "uint16", size // 2, 0)
