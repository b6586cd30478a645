"""Compare shards with the manifest before training or evaluation reads them. All ranks share the work.

A damaged shard is renamed. The shard stage then counts as not done, so the next `resume` writes this shard again, with
the same bytes as before. A damaged file of the user is not changed.
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
"""File in the data folder with the size, modification time, inode and hash of each file that had a correct hash."""


def load_run_manifest(run: Run) -> Manifest | SampleManifest:
    """Return the manifest that the shard stage wrote. Raises InputError if the manifest is missing or damaged."""
    return load_data_manifest(run.config, run.data_dir)


def verify_shards(run: Run, shards: Sequence[ShardEntry | SampleFile], group: dist.ProcessGroup, *, mode: str) -> None:
    """Compare files with their manifest entries. Each rank of `group` checks different files.

    Sizes and, depending on `mode`, hashes are compared. For HDF5 files, the arrays are also compared. A shard with the
    wrong size or hash is renamed to `NAME.damaged`.

    Args:
        run: the run, which gets an event if a shard is damaged.
        shards: entries of the shards or files of samples to check.
        group: process group of all ranks that call this.
        mode: value of `data.verify`. With `sizes`, no hashes are compared. With `cached`, a file with a correct hash is
            not hashed again while its size, modification time and inode stay the same.

    Raises InputError with the file on all ranks if a file is damaged or has other arrays than its entry.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    cache_file = run.data_dir / VERIFIED_FILE
    verified_before: dict[str, Any] = {}

    def check_shards_of_rank() -> dict[str, Any]:
        """Check this rank's share of the files. Return size, time, inode and hash of each file, by the entry's name."""
        with suppress(OSError):  # An unreadable cache counts as empty.
            if mode == "cached" and has_valid_checksum(cached := read_json(cache_file)):
                verified_before.update(cached)
        verified: dict[str, Any] = {}
        for entry in shards[rank::world_size]:
            path = run.data_dir / entry.file
            try:
                status = path.stat() if path.exists() else None
                # If all these values are the same as at an earlier check, the file has not changed since then.
                stamp = status and [status.st_size, status.st_mtime_ns, status.st_ino, entry.sha256]
                has_changed = stamp is None or verified_before.get(entry.name) != stamp
                entry.check(run.data_dir, hashes=mode != "sizes" and has_changed)
                verified[entry.name] = stamp
            except InputError as error:
                if not entry.is_user_file:
                    # Renaming fails if the file is missing or in a folder of another user. The error that is raised
                    # below is then sufficient.
                    with suppress(OSError):
                        path.rename(path.with_name(f"{path.name}.damaged"))
                    run.append_event(Damaged(file=str(path), reason=str(error)))
                raise
            # A range of a user's token file is not an HDF5 dataset, so only its hash is checked.
            if not entry.is_user_file or isinstance(entry, SampleFile):
                _check_arrays(run, path, entry)

        return verified

    results = all_gather_results(group, check_shards_of_rank)
    if mode == "cached" and rank == 0:
        verified = {name: stamp for verified_by_rank in results for name, stamp in verified_by_rank.items()}
        # If the data folder belongs to another user, the cache cannot be written. The files are then hashed again the
        # next time.
        with suppress(OSError):
            write_json(cache_file, add_checksum(verified_before | verified))


def verify_dataset_files(manifest: Manifest | SampleManifest, group: dist.ProcessGroup) -> None:
    """Raise InputError on all ranks of `group` if a file that a user's dataset reads is missing or has another size.

    Only the files of `data.source` are checked.
    """
    if isinstance(manifest, SampleManifest) and (dataset := manifest.dataset) is not None:
        rank = dist.get_rank(group)
        all_gather_results(group, lambda: dataset.check_files() if rank == 0 else None)


def _check_arrays(run: Run, path: Path, entry: ShardEntry | SampleFile) -> None:
    """Raise InputError if an array is missing from the HDF5 file, or its type, shape or offset differs from `entry`."""
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
