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
_OTHERS = {
    20240522: "an evaluation file (as for HellaSwag or MMLU): questions with answers",
    20240326: "a model",
    20240327: "a model's state for debugging",
    20240328: "a tokenizer",
    20240527: "a training's state",
}


def fits(path: str, head: bytes) -> bool:
    """Whether a header of llm.c's is there, of tokens or of something else."""
    if len(head) < 12:
        return False
    magic, version = struct.unpack_from("<2i", head)
    is_dated = 20230101 <= magic <= 20391231 and 0 < version < 100 and len(head) >= 512 and not any(head[64:512])
    return magic in {known for known, _ in _TYPES} or is_dated


def look(path: str) -> TokenFile:
    """Read the header. Raises UserError where the file is not of the length that it says."""
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12))
    if magic not in {known for known, _ in _TYPES}:
        what = _OTHERS.get(magic, f"a file with the number {magic}")
        raise UserError(f"{path} is {what} of llm.c's, and no tokens to train on: leave it out")
    if (dtype := _TYPES.get((magic, version))) is None:
        raise UserError(f"{path}: version {version} of llm.c's format {magic} is not known")
    size, wanted = size_of(path), _HEADER + tokens * int(dtype[4:]) // 8
    if tokens < 0 or size != wanted:
        raise UserError(f"{path} has {size} bytes, but a header and {tokens} tokens take {wanted}")
    return TokenFile(path, "llm.c .bin", dtype, tokens, _HEADER)
