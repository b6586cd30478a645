"""Write checkpoints with torch's distributed checkpoint (DCP): write, hash and commit.

1. write: `dcp.save` writes to a new `.tmp-` directory; each rank writes its share of the tensors.
2. hash: each rank hashes the files that it wrote.
3. commit: rank 0 gathers the hashes, writes `manifest.json`, syncs and renames the directory.

A rank writes its checkpoints itself, or its saver process does (pipeline/checkpoint/saver.py).
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner

from pipeline.base.errors import StorageError, find_storage_error
from pipeline.base.files import add_checksum, fsync, sha256_file, write_json
from pipeline.checkpoint import catalog
from pipeline.checkpoint.memory_snapshot import StateDict
from pipeline.checkpoint.retention import Retention
from pipeline.comm.groups import all_gather_results, broadcast_from_rank0
from pipeline.config.sections import KeepConfig
from pipeline.run.directory import Run
from pipeline.run.events import Saved


class SaveError(RuntimeError):
    """A save failed, but not because of the disk or the file system."""


class CheckpointWriter:
    """Writes the checkpoints of a run. All ranks must make the same calls in the same order.

    Args:
        folder: the directory of all checkpoints.
        group: a Gloo group of all ranks. Nothing else may use it while a checkpoint is written.
        keep: which checkpoints to keep (`checkpoint.keep`).
        metrics_file: metrics.jsonl, which has the held-out losses; None if no rule of `keep` needs them.
        on_committed: called on rank 0 after each commit, with the step and the duration of the save in seconds.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        *,
        keep: int | KeepConfig,
        metrics_file: Path | None = None,
        on_committed: Callable[[int, float], None],
    ) -> None:
        self._folder = folder
        self._group = group
        self._rank = dist.get_rank(group)
        self._retention = Retention(folder, keep, metrics_file)
        self._on_committed = on_committed

    def write(
        self,
        state: StateDict,
        manifest: dict[str, Any],
        start_time: float,
        *,
        planner: SavePlanner | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> float:
        """Write, hash and commit a checkpoint. An error on any rank is raised on all ranks.

        Args:
            state: this rank's tensors, in host memory.
            manifest: the manifest without the list of files.
            start_time: when the save began, by `time.monotonic`.
            planner: which part of each tensor this rank has; None if the tensors themselves show it.
            check: called before the commit. It raises an error if the tensors have changed.

        Returns:
            The duration of the save in seconds.
        """
        step = manifest["step"]
        target = self._folder / catalog.checkpoint_name(step)
        # With a random name, a process of an earlier attempt that still runs somewhere cannot disturb this save.
        token = broadcast_from_rank0(self._group, secrets.token_hex(4))
        temporary = self._folder / f".tmp-{target.name}-{token}"

        def check_and_hash() -> dict[str, dict[str, Any]]:
            check()
            return _hash_files_of_rank(temporary, self._rank)

        try:
            # The tensors are in host memory already. A positive `per_thread_copy_ahead` would make DCP wait for a GPU.
            storage_writer = dcp.FileSystemWriter(
                temporary, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
            )
            dcp.save(state, storage_writer=storage_writer, planner=planner, process_group=self._group)
            files_by_rank = all_gather_results(self._group, check_and_hash)
            if self._rank == 0:
                manifest["files"] = {name: entry for files in files_by_rank for name, entry in files.items()}
            all_gather_results(
                self._group, lambda: self._commit(temporary, target, manifest) if self._rank == 0 else None
            )
        except BaseException:  # DCP's CheckpointException does not derive from Exception.
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        seconds = time.monotonic() - start_time
        if self._rank == 0:
            self._on_committed(step, seconds)
            self._retention.remove_old_checkpoints()
        return seconds

    def _commit(self, temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
        """Write the manifest and rename the directory `temporary` to `target`."""
        write_json(temporary / catalog.MANIFEST_FILE, add_checksum(manifest))
        fsync(temporary)
        os.rename(temporary, target)
        fsync(self._folder)


def append_saved_event(run: Run, step: int, seconds: float) -> None:
    """Append the event `saved` to the events of the train stage.

    Args:
        run: the run.
        step: the step of the checkpoint.
        seconds: the duration of the save in seconds.
    """
    run.append_event(Saved(stage="train", step=step, seconds=round(seconds, 3)))


def _hash_files_of_rank(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    """Sync the files that a rank wrote, and return the size in bytes and the SHA-256 of each file by name."""
    files = sorted(folder.glob(f"__{rank}_*.distcp"))  # DCP's names of a rank's files.
    if rank == 0:  # Rank 0 also writes DCP's metadata.
        files.append(folder / catalog.METADATA_FILE)
    for path in files:
        fsync(path)
    return {path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in files}


def explain_save_error(error: BaseException, folder: Path) -> BaseException:
    """Return the error to raise for a failed save: a StorageError if the disk caused it, otherwise a SaveError."""
    if isinstance(error, SaveError | StorageError):
        return error
    causes = [error]
    if isinstance(error, CheckpointException):  # Each value of `failures` is a pair of an exception and its traceback.
        causes = [failure[0] for failure in error.failures.values()]
    for cause in causes:
        if (storage_error := find_storage_error(cause, folder)) is not None:
            return storage_error
        if "inline_container" in str(cause):  # torch's zip writer raises this error without an errno.
            free_bytes = shutil.disk_usage(folder).free
            message = f"cannot write {folder}: probably no space is left ({free_bytes:,} bytes are free)"
            return StorageError("storage.full", message)
    return SaveError(f"saving failed: {causes[0]!r}")
