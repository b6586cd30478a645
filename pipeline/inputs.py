"""Are the shards what the manifest says, and is what it says so? Asked by all ranks before anything reads them.

A shard that fails is set aside under another name. So the shard stage counts as not done, and the next `resume`
writes that one shard again, the same bytes as before. A file of the user's own samples is left where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data_prep.manifest import Manifest, ShardEntry, check_shard, load_manifest
from data_prep.samples import Array, SampleFile, SampleManifest, check_file, load_sample_manifest
from data_prep.sources import reading
from pipeline.errors import InputError
from pipeline.groups import agree
from pipeline.run import Run


def manifest_of(run: Run) -> Manifest | SampleManifest:
    """What the shard stage left. Raises InputError, naming the file, when it is missing or torn."""
    return (
        load_manifest(run.data) if run.config.model.target is None else load_sample_manifest(run.data / "manifest.json")
    )


def verify_shards(
    run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, hashes: bool
) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file.

    Type, place and length of its arrays are compared with the manifest, too: they are read as they stand there.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> None:
        for entry in shards[rank::size]:
            if isinstance(entry, SampleFile):
                check_file(entry, hashes)
                _check_arrays(run, Path(entry.file), entry.arrays)
                continue
            try:
                check_shard(run.data, entry, hashes)
            except InputError as error:
                path = run.data / entry.file
                with suppress(OSError):  # missing already, or not ours to rename: the error below says enough
                    path.rename(path.with_name(f"{path.name}.damaged"))
                run.event("damaged", file=str(path), reason=str(error))
                raise
            tokens = Array(offset=entry.offset, dtype=entry.dtype, shape=(entry.tokens,))
            _check_arrays(run, run.data / entry.file, {"tokens": tokens})

    agree(group, check)


def _check_arrays(run: Run, path: Path, told: Mapping[str, Array]) -> None:
    """Raise InputError where an array is not what and where the manifest tells."""
    import h5py

    with reading(str(path)), h5py.File(path, "r", locking=False) as file:
        for name, array in told.items():
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
