"""Are the shards what the manifest says? Asked by all ranks together before anything reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from data_prep.manifest import ShardEntry, check_shard
from pipeline.groups import agree
from pipeline.run import Run


def verify_shards(run: Run, shards: Sequence[ShardEntry], group: dist.ProcessGroup, *, hashes: bool) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        for entry in shards[rank::size]:
            check_shard(run.data, entry, hashes)

    agree(group, check)
