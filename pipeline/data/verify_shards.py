"""Compare shards with the manifest, on all ranks, before anything reads them.

A damaged shard is renamed. The shard stage then counts as not done, so the next `resume` writes this shard again, with
the same bytes as before. A damaged file of the user's is left in place.
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
"""In the data folder: size, time and inode of each file when its hash was last compared successfully."""


def load_run_manifest(run: Run) -> Manifest | SampleManifest:
    """Return the manifest that the shard stage wrote. Raises InputError if it is missing or damaged."""
    return load_data_manifest(run.config, run.data_dir)


def verify_shards(run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, how: str) -> None:
    """Check each shard once, distributed over the ranks of `group`. Also compares the arrays in it with the manifest.

    Args:
        how: `data.verify`. With `cached`, a file that was hashed successfully is not hashed again while its size, time
            and inode stay the same.

    Raises InputError, on all ranks, naming the file.
    """
    rank = dist.get_rank(group)
    ranks = dist.get_world_size(group)
    cache_file = run.data_dir / VERIFIED_FILE
    verified_before: dict[str, Any] = {}

    def check_own_shards() -> dict[str, Any]:
        with suppress(OSError):  # an unreadable cache counts as empty
            if how == "cached" and has_valid_checksum(cached := read_json(cache_file)):
                verified_before.update(cached)
        verified: dict[str, Any] = {}
        for entry in shards[rank::ranks]:
            path = run.data_dir / entry.file
            try:
                status = path.stat() if path.exists() else None
                stamp = status and [status.st_size, status.st_mtime_ns, status.st_ino, entry.sha256]
                has_changed = stamp is None or verified_before.get(entry.name) != stamp
                entry.check(run.data_dir, how != "sizes" and has_changed)
                verified[entry.name] = stamp
            except InputError as error:
                if not entry.is_user_file:
                    with suppress(OSError):  # missing, or in a folder of another user: the error below is enough
                        path.rename(path.with_name(f"{path.name}.damaged"))
                    run.append_event(Damaged(file=str(path), reason=str(error)))
                raise
            # A range of the user's tokens is no HDF5 dataset of the file's, so its hash must be enough.
            if not entry.is_user_file or isinstance(entry, SampleFile):
                _check_arrays(run, path, entry)

        return verified

    results = all_gather_results(group, check_own_shards)
    if how == "cached" and rank == 0:
        verified = {name: stamp for part in results for name, stamp in part.items()}
        with suppress(OSError):  # the data of another user: these files are hashed again the next time
            write_json(cache_file, add_checksum(verified_before | verified))


def _check_arrays(run: Run, path: Path, entry: ShardEntry | SampleFile) -> None:
    """Raise InputError if type, shape or position of an array differs from the manifest."""
    import h5py

    with translate_read_errors(str(path)), h5py.File(path, "r", locking=False) as file:
        for name, array in entry.arrays.items():
            dataset: Any = file.get(name)
            actual = None
            if isinstance(dataset, h5py.Dataset) and (offset := dataset.id.get_offset()) is not None:
                actual = ArrayEntry(offset=offset, dtype=dataset.dtype.name, shape=dataset.shape)
            if actual != array:
                manifest = run.data_dir / "manifest.json"
                raise InputError(
                    "data.array_mismatch",
                    f"array {name} in {path} is {actual or 'missing'}, but {manifest} has {array}. Remove {manifest} "
                    f"and run the shard stage again, e.g. `{run.resume_command}`",
                )
