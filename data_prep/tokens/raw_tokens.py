"""A .bin of bare uint16 tokens, as nanoGPT writes it (data/*/prepare.py: `arr.tofile`), documents ended by their token.

There is nothing in it to tell it by, so it comes last: what has another format's mark is not taken for it, and ids that
the tokenizer does not have betray what was no such file.
"""

from __future__ import annotations

import os

from data_prep.tokens.token_file import TokenFile, size_of
from pipeline.base.errors import UserError


def fits(path: str, head: bytes) -> bool:
    """Whether it is called so."""
    return path.endswith(".bin")


def look(path: str) -> TokenFile:
    """Count them. Raises UserError for an odd number of bytes, and for an index beside it that is none."""
    size, index = size_of(path), f"{path.removesuffix('.bin')}.idx"
    if os.path.exists(index):
        raise UserError(f"{path}: {index} beside it is damaged, or no index of Megatron's")
    if size % 2:
        raise UserError(f"{path} has {size} bytes, an odd number: it is cut short, or no uint16 tokens")
    return TokenFile(path, "nanoGPT .bin", "uint16", size // 2, 0)
