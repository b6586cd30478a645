"""Shards of tokens as a loader finds them, written without a stage."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.manifest import ShardEntry


def make_shard_entry(path: Path, tokens: int, offset: int, dtype: str) -> ShardEntry:
    """What a loader needs to know of a shard."""
    return ShardEntry.model_construct(file=str(path), tokens=tokens, offset=offset, dtype=dtype)


def write_shards(folder: Path, sizes: list[tuple[int, int]], dtype: str) -> tuple[list[ShardEntry], list[np.ndarray]]:
    """Shards of (tokens, byte offset) as raw files, with tokens over the whole range of the type."""
    random = np.random.default_rng(len(sizes))
    spans, contents = [], []
    for i, (tokens, offset) in enumerate(sizes):
        content = random.integers(0, np.iinfo(dtype).max, tokens, dtype=dtype, endpoint=True)
        path = folder / f"{i}.h5"
        path.write_bytes(b"x" * offset + content.tobytes() + b"y" * 5)
        spans.append(make_shard_entry(path, tokens, offset, dtype))
        contents.append(content)
    return spans, contents
