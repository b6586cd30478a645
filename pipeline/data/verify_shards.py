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
from pipeline.base.files import add_checksum, has_valid_checksum, read_json, translate_read_errors, write_json
from pipeline.comm.groups import all_gather_results
from pipeline.data.manifest import ArrayEntry, Manifest, SampleFile, SampleManifest, ShardEntry, load_data_manifest
from pipeline.run.directory import Run
from pipeline.run.events import Damaged

VERIFIED_FILE = "verified.json"
"""In the data folder: what each file was when its hash was last found right."""


def load_run_manifest(run: Run) -> Manifest | SampleManifest:
    """What the shard stage left. Raises InputError, naming the file, when it is missing or torn."""
    return load_data_manifest(run.config, run.data_dir)


def verify_shards(run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, how: str) -> None:
    """Check every shard once, split over the ranks. Raises InputError, on all ranks, naming the file.

    Type, place and length of its arrays are compared with the manifest, too: they are read as they stand there.
    `how`: as `data.verify`. With `cached`, what was hashed and found right is noted with size, time and inode, and not
    read again as long as it has them.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    notes = run.data_dir / VERIFIED_FILE
    known: dict[str, Any] = {}

    def check() -> dict[str, Any]:
        with suppress(OSError):  # notes that cannot be read are none
            if how == "cached" and has_valid_checksum(read := read_json(notes)):
                known.update(read)
        seen: dict[str, Any] = {}
        for entry in shards[rank::size]:
            path = run.data_dir / entry.file
            try:
                found = path.stat() if path.exists() else None
                stamp = found and [found.st_size, found.st_mtime_ns, found.st_ino, entry.sha256]
                again = stamp is None or known.get(entry.name) != stamp
                entry.check(run.data_dir, how != "sizes" and again)
                seen[entry.name] = stamp
            except InputError as error:
                if not entry.is_user_file:
                    with suppress(OSError):  # missing already, or not ours to rename: the error below says enough
                        path.rename(path.with_name(f"{path.name}.damaged"))
                    run.append_event(Damaged(file=str(path), reason=str(error)))
                raise
            if not entry.is_user_file or isinstance(entry, SampleFile):  # of the user's tokens the hash says enough
                _check_arrays(run, path, entry)

        return seen

    found = all_gather_results(group, check)
    if how == "cached" and rank == 0:
        with suppress(OSError):  # somebody else's data: they are hashed the next time, too
            write_json(notes, add_checksum(known | {name: stamp for part in found for name, stamp in part.items()}))


def _check_arrays(run: Run, path: Path, entry: ShardEntry | SampleFile) -> None:
    """Raise InputError where an array is not what and where the manifest tells."""
    import h5py

    with translate_read_errors(str(path)), h5py.File(path, "r", locking=False) as file:
        for name, array in entry.arrays.items():
            dataset: Any = file.get(name)
            found = None
            if isinstance(dataset, h5py.Dataset) and (offset := dataset.id.get_offset()) is not None:
                found = ArrayEntry(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
            if found != array:
                manifest = run.data_dir / "manifest.json"
                raise InputError(
                    "data.array_mismatch",
                    f"{manifest} says of {name} in {path}: {array}; there is: {found or 'no such array'}. Remove "
                    f"{manifest} and run the shard stage again, e.g. `{run.resume_command}`",
                )
