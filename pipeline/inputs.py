"""Are the shards what the manifest says? Asked by all ranks together before anything reads them.

A shard that fails is set aside under another name. So the shard stage counts as not done, and the next `resume`
writes that one shard again, the same bytes as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from data_prep.manifest import ShardEntry, check_shard
from pipeline.errors import InputError
from pipeline.groups import agree
from pipeline.run import Run


def verify_shards(run: Run, shards: Sequence[ShardEntry], group: dist.ProcessGroup, *, hashes: bool) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        for entry in shards[rank::size]:
            try:
                check_shard(run.data, entry, hashes)
            except InputError as error:
                path = run.data / entry.file
                with suppress(OSError):  # missing already, or not ours to rename: the error below says enough
                    path.rename(path.with_name(f"{path.name}.damaged"))
                run.event("damaged", file=str(path), reason=str(error))
                raise

    agree(group, check)
