"""llm.c's .bin: 256 int32 of header, then the tokens (llm.c, dev/data/data_common.py).

Of the header: a magic number that tells the type, its version, and how many tokens follow. Documents *begin* with the
end-of-text token there, so each document's token stands at the end of the one before.
"""

from __future__ import annotations

import struct

from data_prep.tokens.token_file import TokenFile, size_of
from pipeline.base.errors import UserError

_HEADER = 1024
_TYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}


def fits(path: str, head: bytes) -> bool:
    """Whether a header stands there."""
    return len(head) >= 12 and struct.unpack_from("<i", head)[0] in {magic for magic, _ in _TYPES}


def look(path: str) -> TokenFile:
    """Read the header. Raises UserError where the file is not of the length that it says."""
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12))
    if (dtype := _TYPES.get((magic, version))) is None:
        raise UserError(f"{path}: version {version} of llm.c's format {magic} is not known")
    size, wanted = size_of(path), _HEADER + tokens * int(dtype[4:]) // 8
    if tokens < 0 or size != wanted:
        raise UserError(f"{path} has {size} bytes, but a header and {tokens} tokens take {wanted}")
    return TokenFile(path, "llm.c .bin", dtype, tokens, _HEADER)
