"""Save and restore checkpoints: torch's distributed checkpoint (DCP) with verification and an atomic commit.

A save runs on every rank, between the same two steps:

1. *stage*: copy the state to cached host buffers. On a GPU this uses a stream of its own, which waits for the
   optimizer's last kernel. Call `wait_until_staged` before the optimizer changes the weights again.
2. *write*: `dcp.save` into a new `.tmp-` directory; each rank writes its share of the tensors.
3. *hash*: each rank hashes the files that it wrote.
4. *commit*: rank 0 gathers the hashes, writes `manifest.json`, syncs and renames. Only then is it saved.

With `checkpoint.mode: async` all of this runs in a background thread during the next steps, on a Gloo group of its own,
so that it does not interfere with the training's collectives. Only one save is in progress at a time. If a save fails
(full disk), the next `save` or `wait_until_saved` raises, and earlier checkpoints remain.

A restore uses the newest checkpoint whose files match their hashes. Every file is read once in total, split over the
ranks, and all ranks agree on the result. A damaged checkpoint is set aside, and the previous one is tried. If there are
checkpoints and none is intact, or they have disappeared, that is an error: a run never silently starts from scratch.

The state is a flat dict of tensors with names that do not depend on the layout: `model.<parameter>` and
`optimizer.<parameter>.<state>`. State of replicas has other names and is not part of the digest. DCP itself hashes
nothing. Its `CheckpointException` does not derive from `Exception`. Its `.metadata` is a pickle (`CheckpointReader`).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pipeline.base.device_thread import device_thread
from pipeline.base.errors import CheckpointError, StorageError, find_storage_error
from pipeline.base.files import add_checksum, fsync, sha256_file, write_json
from pipeline.checkpoint import catalog
from pipeline.checkpoint.catalog import METADATA_FILE
from pipeline.comm.groups import all_gather_results, broadcast_from_rank0
from pipeline.run.directory import Run

StateDict = dict[str, torch.Tensor]


class Checkpointer:
    """Saves and restores the state of a training. All ranks make the same calls in the same order.

    Args:
        group: a Gloo group of all ranks that nothing else uses.
        keep: the number of checkpoints to keep.
        background: whether saves are written in a background thread.
        describe: entries of each manifest.
        on_saved: called on rank 0 after each commit with the step and the duration of the save in seconds.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        *,
        keep: int,
        background: bool,
        describe: Mapping[str, Any],
        on_saved: Callable[[int, float], None],
    ) -> None:
        self.folder = folder
        self.group = group
        self.keep = keep
        self.background = background
        self.rank = dist.get_rank(group)
        self.describe = dict(describe)
        self.on_saved = on_saved
        # DCP's `DefaultStager` adds a thread and a stream on GPU 0 that do not wait for other streams. That of torch
        # 2.11 also drops its buffers after each save, so that all host memory would have to be pinned again.
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._staged: Future[StateDict] | None = None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, state: StateDict, *, step: int, samples_consumed: int, extra: Mapping[str, Any]) -> None:
        """Start to save `state`. In the background mode, return before it is staged and written.

        Raises StorageError if this save or the previous one could not be written.
        """
        self.wait_until_saved()
        start_time = time.monotonic()
        manifest = {
            "version": 1,
            "step": step,
            "samples_consumed": samples_consumed,
            "extra": dict(extra),
            **self.describe,
            "versions": collect_versions(),
        }
        staged = self._staged = Future()
        stream = self._stream
        # the kernels that compute this state may still be queued
        computed = torch.cuda.current_stream().record_event() if stream is not None else None

        def stage_and_write() -> None:
            nonlocal state
            try:
                with torch.cuda.stream(stream):  # None changes nothing
                    if stream is not None and computed is not None:
                        stream.wait_event(computed)
                    copied = cast(StateDict, self._stager.stage(state))
                del state  # frees tensors that the training replaces during the write
                staged.set_result(copied)
                self._write(copied, manifest, start_time)
            except BaseException as error:  # wait_until_saved() raises it in the trainer's thread
                self._error = error
                if not staged.done():
                    staged.set_exception(error)

        if self.background:
            self._writer = device_thread(stage_and_write, f"checkpoint-{step}", daemon=False)
            self._writer.start()
        else:
            stage_and_write()
            self.wait_until_saved()

    def wait_until_staged(self) -> None:
        """Wait until the state is copied. Call it before the weights change."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def wait_until_saved(self) -> None:
        """Wait for the save in progress. Raises StorageError, or another error, if it failed."""
        self.wait_until_staged()
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise _explain_save_error(error, self.folder) from error

    def close(self) -> None:
        """Wait for the save in progress and free the staging buffers."""
        try:
            self.wait_until_saved()
        finally:
            self._stager.close()

    def _write(self, state: StateDict, manifest: dict[str, Any], start_time: float) -> None:
        """Perform parts 2 to 4 of a save. An error on any rank is raised on all ranks."""
        step = manifest["step"]
        target = self.folder / catalog.checkpoint_name(step)
        temporary = self.folder / f".tmp-{target.name}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier(self.group)
        try:
            # The tensors are in host memory. Copying ahead would wait for a GPU.
            writer = dcp.FileSystemWriter(
                temporary, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0
            )
            dcp.save(state, storage_writer=writer, process_group=self.group)
            mine = all_gather_results(self.group, lambda: _hash_own_files(temporary, self.rank))
            if self.rank == 0:
                manifest["files"] = {name: entry for part in mine for name, entry in part.items()}
            all_gather_results(
                self.group, lambda: self._commit(temporary, target, manifest) if self.rank == 0 else None
            )
        except BaseException:  # DCP's CheckpointException does not derive from Exception
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self.rank == 0:
            self.on_saved(step, time.monotonic() - start_time)
            catalog.remove_old_checkpoints(self.folder, self.keep)

    def _commit(self, temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
        write_json(temporary / catalog.MANIFEST_FILE, add_checksum(manifest))
        fsync(temporary)
        os.rename(temporary, target)
        fsync(self.folder)

    # -- restoring ---------------------------------------------------------------------------------------

    def has_checkpoint(self) -> bool:
        """Return True, on all ranks, if there is any checkpoint. Then `restore` loads one or raises."""
        return broadcast_from_rank0(self.group, bool(catalog.list_checkpoint_steps(self.folder)))

    def restore(
        self,
        state: StateDict,
        on_damaged: Callable[[int, str], None],
        check: Callable[[Mapping[str, Any]], None] = lambda manifest: None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint into `state`, in place; return its manifest, or None if there is none.

        Args:
            on_damaged: called on rank 0 with step and reason for each checkpoint that is set aside.
            check: called with the manifest before anything is loaded; may raise on all ranks.

        Raises:
            CheckpointError: there are checkpoints, and none is intact.
        """
        if self.rank == 0:
            catalog.remove_partial_checkpoints(self.folder)
        damaged: list[str] = []
        while True:
            step = broadcast_from_rank0(self.group, (catalog.list_checkpoint_steps(self.folder) or [0])[0])
            if step == 0:
                break
            checkpoint = self.folder / catalog.checkpoint_name(step)
            try:
                manifest = load_verified_manifest(checkpoint, self.group)
            except CheckpointError as error:
                damaged.append(str(error))
                if self.rank == 0:
                    catalog.set_checkpoint_aside(self.folder, step)
                    on_damaged(step, str(error))
                continue
            check(manifest)
            load_checkpoint(state, checkpoint, self.group)  # its files are intact, so an error here is no damage
            return manifest
        set_aside = broadcast_from_rank0(self.group, sorted(path.name for path in self.folder.glob("damaged-*")))
        if set_aside:
            raise CheckpointError(
                "checkpoint.none_intact",
                "no checkpoint is intact, and a start from scratch would discard work:\n  "
                + "\n  ".join(damaged or set_aside)
                + f"\nPut an intact copy of one into {self.folder} under its name step-…; or, to train from scratch, "
                f"remove {self.folder}/damaged-* and the run's metrics.jsonl",
            )
        return None

    def read_tensors(self, step: int, state: StateDict) -> None:
        """Fill `state`, which may differ between ranks, from the restored checkpoint of `step`."""
        if state:
            load_checkpoint(state, self.folder / catalog.checkpoint_name(step), None)


def load_verified_manifest(checkpoint: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """Return the manifest after the ranks together verified every file. Raises CheckpointError on all ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> dict[str, Any]:
        manifest = catalog.read_checkpoint_manifest(checkpoint)
        catalog.verify_checkpoint_files(checkpoint, manifest, part=rank, parts=size)
        return manifest

    return all_gather_results(group, check)[0]


def load_checkpoint(state: StateDict, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` from `checkpoint`, which any layout may have saved.

    Raises CheckpointError, on all ranks, where its metadata is not DCP's ; RuntimeError
    where it does not hold them. DCP's own exception is no `Exception`.
    """
    reader = CheckpointReader(checkpoint)
    if group is None:
        reader.read_metadata()
    else:
        all_gather_results(group, lambda: reader.read_metadata() and None)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # intended: one process reads
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise RuntimeError(f"{checkpoint} cannot be loaded: {reasons}") from error


def compute_digest(checkpoint: Path, *, batch_bytes: int = 1 << 29) -> str:
    """Return the SHA-256 of weights and optimizer state, 64 hex digits, independent of the layout that saved them.

    It covers for each tensor, in the order of the names: name, dtype and shape as one line, then its bytes. At most
    `batch_bytes`, or one tensor, are in memory at a time.
    """
    metadata = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    names = sorted(
        name
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(("model.", "optimizer."))
    )
    total = hashlib.sha256()
    for name, tensor in iterate_tensors(checkpoint, names, batch_bytes=batch_bytes):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def iterate_tensors(
    checkpoint: Path, names: Sequence[str], *, batch_bytes: int = 1 << 29
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and full tensors of a checkpoint in this order; at most `batch_bytes`, or one tensor, at a time."""
    metadata: Any = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    batch: StateDict = {}
    size = 0
    for name in names:
        batch[name] = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        size += batch[name].nbytes
        if size >= batch_bytes or name == names[-1]:
            load_checkpoint(batch, checkpoint, None)
            for loaded in list(batch):
                yield loaded, batch.pop(loaded)
            size = 0


def collect_versions() -> dict[str, str]:
    """Return the versions that a bit-identical continuation requires, and the model of this rank's GPU."""
    found = {"torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        found |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        }
    return found


def _hash_own_files(folder: Path, rank: int) -> dict[str, dict[str, Any]]:
    files = sorted(folder.glob(f"__{rank}_*.distcp")) + ([folder / catalog.METADATA_FILE] if rank == 0 else [])
    for path in files:
        fsync(path)
    return {path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in files}


def _explain_save_error(error: BaseException, folder: Path) -> BaseException:
    """Return the error to show for a failed save: a StorageError if the disk is the cause."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
    for cause in causes:
        if (found := find_storage_error(cause, folder)) is not None:
            return found
        if "inline_container" in str(cause):  # raised by torch's writer, which drops the error number
            free = shutil.disk_usage(folder).free
            message = f"cannot write {folder}: probably no space is left ({free:,} bytes are free)"
            return StorageError("storage.full", message)
    return RuntimeError(f"saving failed: {causes[0]!r}")


_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip
"""What `.metadata` may name, by module, in addition to dtypes such as `torch.float32`."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not number_type:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint's files, except that `.metadata`, a pickle, is read safely and only once.

    Unpickling executes code. Hashes show that a file is unchanged, not who wrote it. Therefore the pickle may name only
    the classes of DCP's own metadata (the same in torch 2.11 and 2.13), and the tensors' files that it names must be in
    the checkpoint. DCP reads the tensors themselves with `weights_only`.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._file = checkpoint / METADATA_FILE
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # without arguments: DCP then asks for no other file
        """Return the metadata. Raises CheckpointError if DCP did not write it, naming the file and the reason."""
        if self._metadata is None:
            self._metadata = _read(self._file)
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _read(file: Path) -> Metadata:
    try:
        with open(file, "rb") as stream:
            found = _Unpickler(stream).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
        paths = {info.relative_path for info in found.storage_data.values()}
        if outside := [path for path in paths if Path(path).name != path]:
            raise pickle.UnpicklingError(f"it points to {min(outside)}")
    except OSError:
        raise
    except Exception as error:  # a crafted pickle may raise anything
        raise CheckpointError(
            "checkpoint.unsafe_metadata",
            f"{file} was not written by a training ({error}). It was not executed. Put an intact copy of this "
            f"checkpoint in its place, or move {file.parent} away",
        ) from error
    return found


def verify_checkpoint(run: Run, which: str | None) -> None:
    """Verify a checkpoint; print a summary and its digest. Raises as `catalog.open_intact_checkpoint` does."""
    checkpoint, manifest = catalog.open_intact_checkpoint(run, which)
    total = sum(entry["size"] for entry in manifest["files"].values())
    layout = ", ".join(f"{key} {value}" for key, value in manifest["layout"].items())
    print(
        f"{run.name}/checkpoints/{checkpoint.name}: {len(manifest['files'])} files, {total:,} bytes, all hashes right"
    )
    print(f"step {manifest['step']}, samples {manifest['samples_consumed']}, saved by: {layout}")
    print(f"digest {compute_digest(checkpoint)}")
