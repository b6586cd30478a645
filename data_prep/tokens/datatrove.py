"""datatrove's NAME.ds: raw tokens, with NAME.ds.index and NAME.ds.metadata beside them.

The index is uint64, shape (documents,): where each document ends. The metadata's first line ends with `|2` or `|4`, the
bytes of a token, and its second says how many there are (datatrove, pipeline/tokens/tokenizer.py, `TokenizedFile`). Old
versions left the width out, and shuffled files may have no index: then the sizes tell.
"""

from __future__ import annotations

import os
import re

from data_prep.tokens.token_file import DocumentEnds, TokenFile, head_of, size_of
from pipeline.base.errors import UserError

_METADATA = re.compile(rb"[^\n]*?(?:\|([24]))?\r?\n(\d{1,18})(?:\r?\n.*)?", re.DOTALL)


def fits(path: str, head: bytes) -> bool:
    """Whether it is a .ds with index or metadata."""
    return path.endswith(".ds") and (os.path.exists(f"{path}.index") or os.path.exists(f"{path}.metadata"))


def look(path: str) -> TokenFile:
    """Read what stands beside it. Raises UserError where that does not fit the file."""
    size, ends = size_of(path), None
    if os.path.exists(f"{path}.index"):
        if (held := size_of(f"{path}.index")) % 8:
            raise UserError(f"{path}.index is cut short: it is no row of 8-byte numbers")
        ends = DocumentEnds(f"{path}.index", held // 8)
    told = _METADATA.fullmatch(head_of(f"{path}.metadata", 1 << 16))
    if told is None and os.path.exists(f"{path}.metadata"):
        raise UserError(f"{path}.metadata is damaged: its second line should be the number of tokens")
    last = ends[len(ends) - 1] if ends else 0
    tokens = int(told[2]) if told else last
    width = int(told[1]) if told and told[1] else size // max(1, tokens)
    if width not in (2, 4) or tokens * width != size or (ends and last != tokens):
        raise UserError(f"{path} has {size} bytes, which its index and metadata do not fit: {tokens} tokens")
    note = f"; {path}.loss is not used: all tokens are learned" if os.path.exists(f"{path}.loss") else ""
    return TokenFile(path, "datatrove .ds", f"uint{8 * width}", tokens, 0, ends, note=note)
