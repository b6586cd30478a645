"""Are the shards what the manifest says, and is what it says so? Asked by all ranks before anything reads them.

A shard that fails is set aside under another name. So the shard stage counts as not done, and the next `resume`
writes that one shard again, the same bytes as before. A file of the user's own samples is left where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.base.errors import InputError
from pipeline.base.files import reading
from pipeline.comm.groups import agree
from pipeline.data.manifest import Array, Manifest, SampleFile, SampleManifest, ShardEntry, manifest_for
from pipeline.run.directory import Run


def manifest_of(run: Run) -> Manifest | SampleManifest:
    """What the shard stage left. Raises InputError, naming the file, when it is missing or torn."""
    return manifest_for(run.config, run.data)


def verify_shards(
    run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, hashes: bool
) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file.

    Type, place and length of its arrays are compared with the manifest, too: they are read as they stand there.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        for entry in shards[rank::size]:
            path = run.data / entry.file
            try:
                entry.check(run.data, hashes)
            except InputError as error:
                if not entry.own:
                    with suppress(OSError):  # missing already, or not ours to rename: the error below says enough
                        path.rename(path.with_name(f"{path.name}.damaged"))
                    run.event("damaged", file=str(path), reason=str(error))
                raise
            if not entry.own or isinstance(entry, SampleFile):  # of the user's tokens the hash says enough
                _check_arrays(run, path, entry)

    agree(group, check)


def _check_arrays(run: Run, path: Path, entry: ShardEntry | SampleFile) -> None:
    """Raise InputError where an array is not what and where the manifest tells."""
    import h5py

    with reading(str(path)), h5py.File(path, "r", locking=False) as file:
        for name, array in entry.arrays.items():
            dataset: Any = file.get(name)
            found = None
            if isinstance(dataset, h5py.Dataset) and (offset := dataset.id.get_offset()) is not None:
                found = Array(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
            if found != array:
                manifest = run.data / "manifest.json"
                raise InputError(
                    f"{manifest} says of {name} in {path}: {array}; there is: {found or 'no such array'}. Remove "
                    f"{manifest} and run the shard stage again, e.g. `{run.resume_command}`"
                )
