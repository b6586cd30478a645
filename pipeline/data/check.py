"""Are the shards what the manifest says? Asked by all ranks together before anything reads them.

A shard that fails is set aside under another name. So the shard stage counts as not done, and the next `resume`
writes that one shard again, the same bytes as before. A file of the user's own samples is left where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from pipeline.base.errors import InputError
from pipeline.comm.groups import agree
from pipeline.data.manifest import (
    Manifest,
    SampleFile,
    SampleManifest,
    ShardEntry,
    check_file,
    check_shard,
    load_manifest,
    load_sample_manifest,
)
from pipeline.run.directory import Run


def manifest_of(run: Run) -> Manifest | SampleManifest:
    """What the shard stage left. Raises InputError, naming the file, when it is missing or torn."""
    return (
        load_manifest(run.data) if run.config.model.target is None else load_sample_manifest(run.data / "manifest.json")
    )


def verify_shards(
    run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, hashes: bool
) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        for entry in shards[rank::size]:
            if isinstance(entry, SampleFile):
                check_file(entry, hashes)
                continue
            try:
                check_shard(run.data, entry, hashes)
            except InputError as error:
                path = run.data / entry.file
                with suppress(OSError):  # missing already, or not ours to rename: the error below says enough
                    path.rename(path.with_name(f"{path.name}.damaged"))
                run.event("damaged", file=str(path), reason=str(error))
                raise

    agree(group, check)
