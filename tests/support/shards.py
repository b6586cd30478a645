"""Write token shards in the format that the data loader reads, without the prepare and shard stages."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.data.manifest import ShardEntry


def make_shard_entry(path: Path, tokens: int, offset: int, dtype: str) -> ShardEntry:
    """Return the manifest entry of a shard with only the fields that the data loader reads."""
    return ShardEntry.model_construct(file=str(path), tokens=tokens, offset=offset, dtype=dtype)


def write_shards(folder: Path, sizes: list[tuple[int, int]], dtype: str) -> tuple[list[ShardEntry], list[np.ndarray]]:
    """Write a shard for each (token count, byte offset) in `sizes`.

    The tokens are random values over the whole range of `dtype`. Other bytes precede and follow them in the file.

    Returns:
        The manifest entries and the tokens of each shard.
    """
    random = np.random.default_rng(len(sizes))
    entries = []
    contents = []
    for i, (tokens, offset) in enumerate(sizes):
        content = random.integers(0, np.iinfo(dtype).max, tokens, dtype=dtype, endpoint=True)
        path = folder / f"{i}.h5"
        path.write_bytes(b"x" * offset + content.tobytes() + b"y" * 5)
        entries.append(make_shard_entry(path, tokens, offset, dtype))
        contents.append(content)
    return entries, contents
