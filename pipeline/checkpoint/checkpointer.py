"""Saving and restoring: torch's distributed checkpoint (DCP) inside a commit that can be trusted.

A save, on every rank, at the same step boundary:

1. *stage*: copy the state to cached host buffers (DCP's stager, on a GPU on a stream of our own, which waits
   for the optimizer's last kernel; `wait_until_staged` must be called before the optimizer changes the weights again);
2. *write*: `dcp.save` into a fresh `.tmp-` directory, each rank its share of the tensors;
3. *hash*: each rank hashes the files it wrote;
4. *commit*: rank 0 gathers the hashes, writes `manifest.json`, syncs, renames. Only then is it "saved".

With `mode: async` all of this runs in a background thread, beside the next forward and backward, on a Gloo group of
its own, so that it never waits for, or disturbs, the training's collectives. One save is in flight at most. A failed
save (a full disk) raises at the next `save` or `wait_until_saved`, and the checkpoints before it stay.

A restore takes the newest checkpoint whose files pass their hashes: every file is read once in all, split
over the ranks, and all ranks agree on the verdict; a damaged one is set aside and the one before is tried.
Where there are checkpoints but none is intact, that is an error: never a silent start from zero; nor where they are
gone (`catalog.describe_missing_checkpoints`).

The state is a flat dict of tensors with layout-independent names: `model.<parameter>` and
`optimizer.<parameter>.<state>`; what replicas have of their own has other names, outside the digest. DCP hashes nothing
by itself, and its `CheckpointException` is no `Exception`.
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
    """Saves and restores one training's state; the same calls, in the same order, on every rank.

    `group` is a Gloo group of all ranks that nothing else uses; `describe` goes into each manifest; `on_saved`
    is called on rank 0 after each commit with the step and the seconds the save took.
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
        self.folder, self.group, self.keep, self.background = folder, group, keep, background
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.describe, self.on_saved = dict(describe), on_saved
        # DCP's `DefaultStager` is this one with a thread and a stream that wait for no other, on GPU 0; and that of
        # torch 2.11 forgets its buffers with each save, so that all host memory would be pinned anew
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._staged: Future[StateDict] | None = None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, state: StateDict, *, step: int, samples_consumed: int, extra: Mapping[str, Any]) -> None:
        """Start saving `state`; with background writing, return while it is staged and written.

        Raises StorageError where this save, or the one before it, could not be written.
        """
        self.wait_until_saved()
        started = time.monotonic()
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
        # the kernels that made this state may still be queued
        made = torch.cuda.current_stream().record_event() if stream is not None else None

        def stage_and_write() -> None:
            nonlocal state
            try:
                with torch.cuda.stream(stream):  # None changes nothing
                    if stream is not None and made is not None:
                        stream.wait_event(made)
                    copied = cast(StateDict, self._stager.stage(state))
                del state  # what training replaces need not stay for as long as the write takes
                staged.set_result(copied)
                self._write(copied, manifest, started)
            except BaseException as error:  # raised again by wait_until_saved(), in the trainer's own thread
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
        """Wait until the state was copied. Call before anything changes the weights."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def wait_until_saved(self) -> None:
        """Wait for the save in flight. Raises StorageError (or what else went wrong) where it failed."""
        self.wait_until_staged()
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise _readable(error, self.folder) from error

    def close(self) -> None:
        """Wait for the save in flight and free the staging buffers."""
        try:
            self.wait_until_saved()
        finally:
            self._stager.close()

    def _write(self, state: StateDict, manifest: dict[str, Any], started: float) -> None:
        """Steps 2 to 4, on every rank. An error on any rank is an error on all."""
        step = manifest["step"]
        target = self.folder / catalog.checkpoint_name(step)
        temporary = self.folder / f".tmp-{target.name}"
        if self.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        dist.barrier(self.group)
        try:
            # what it writes is in host memory: it need not copy ahead, for which it would wait for a GPU
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
        except BaseException:  # DCP's CheckpointException is no Exception; nothing half stays, and the error goes on
            if self.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if self.rank == 0:
            self.on_saved(step, time.monotonic() - started)
            catalog.remove_old_checkpoints(self.folder, self.keep)

    def _commit(self, temporary: Path, target: Path, manifest: dict[str, Any]) -> None:
        write_json(temporary / catalog.MANIFEST_FILE, add_checksum(manifest))
        fsync(temporary)
        os.rename(temporary, target)
        fsync(self.folder)

    # -- restoring ---------------------------------------------------------------------------------------

    def has_checkpoint(self) -> bool:
        """Whether there is any checkpoint: then `restore` loads one, or raises. The same on all ranks."""
        return broadcast_from_rank0(self.group, bool(catalog.list_checkpoint_steps(self.folder)))

    def restore(
        self,
        state: StateDict,
        on_damaged: Callable[[int, str], None],
        check: Callable[[Mapping[str, Any]], None] = lambda manifest: None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint into `state`, in place; its manifest, or None where there is none yet.

        `on_damaged(step, reason)` is called on rank 0 for each checkpoint that had to be set aside; `check`, before
        anything is loaded, with the manifest, and may raise on all ranks. Raises
        CheckpointError where there are checkpoints and none is intact.
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
            load_checkpoint(state, checkpoint, self.group)  # its files are intact: what fails here is no damage
            return manifest
        left = broadcast_from_rank0(self.group, sorted(path.name for path in self.folder.glob("damaged-*")))
        if left:
            raise CheckpointError(
                "no checkpoint is intact, and starting from zero would throw work away:\n  "
                + "\n  ".join(damaged or left)
                + f"\nput an intact copy of one into {self.folder} under its step-… name, or, to train from zero "
                f"all the same, remove {self.folder}/damaged-* and the run's metrics.jsonl"
            )
        return None

    def read_tensors(self, step: int, state: StateDict) -> None:
        """Fill `state`, which may differ from rank to rank, from the checkpoint that was just restored."""
        if state:
            load_checkpoint(state, self.folder / catalog.checkpoint_name(step), None)


def load_verified_manifest(checkpoint: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """The manifest, once every file passed its hash on one of the ranks; CheckpointError on all ranks if not."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def check() -> dict[str, Any]:
        manifest = catalog.read_checkpoint_manifest(checkpoint)
        catalog.verify_checkpoint_files(checkpoint, manifest, part=rank, parts=size)
        return manifest

    return all_gather_results(group, check)[0]


def load_checkpoint(state: StateDict, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` from `checkpoint`, whatever layout saved it.

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
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant: one process reads
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise RuntimeError(f"{checkpoint} cannot be loaded: {reasons}") from error


def compute_digest(checkpoint: Path, *, batch_bytes: int = 1 << 29) -> str:
    """SHA-256 over weights and optimizer state, independent of the layout that saved them; 64 hex digits.

    Per tensor, in the order of the names: name, dtype and shape as one line, then its bytes. Tensors are read
    whole, one after another, at most `batch_bytes` (or one tensor) at a time.
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
    """These tensors of a checkpoint, whole, with their names, in this order; at most `batch_bytes` are there at a time,
    or one tensor."""
    metadata: Any = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    batch, size = cast(StateDict, {}), 0
    for name in names:
        batch[name] = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        size += batch[name].nbytes
        if size >= batch_bytes or name == names[-1]:
            load_checkpoint(batch, checkpoint, None)
            for loaded in list(batch):
                yield loaded, batch.pop(loaded)
            size = 0


def collect_versions() -> dict[str, str]:
    """What must be equal for a bit-identical continuation; the GPU is this rank's."""
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
    own = sorted(folder.glob(f"__{rank}_*.distcp")) + ([folder / catalog.METADATA_FILE] if rank == 0 else [])
    for path in own:
        fsync(path)
    return {path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)} for path in own}


def _readable(error: BaseException, folder: Path) -> BaseException:
    """What a person should see of a failed save: a StorageError where the disk is to blame."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [failure[0] for failure in error.failures.values()]
    for cause in causes:
        if (found := find_storage_error(cause, folder)) is not None:
            return found
        if "inline_container" in str(cause):  # torch's own writer: it forgets the error number
            free = shutil.disk_usage(folder).free
            return StorageError(f"cannot write {folder}: no space is left, it seems ({free:,} bytes are free)")
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
"""What `.metadata` may name, by module; types of numbers (`torch.float32`) besides."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        number_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not number_type:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """DCP's own reader of a checkpoint's files, with a `.metadata` that was read with care and only once."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._file = checkpoint / METADATA_FILE
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # without arguments: DCP then asks for no other file
        """The metadata. Raises CheckpointError, naming the file and what it asks for, where DCP did not write it."""
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
            f"{file} was not written by a training ({error}): nothing of it was executed; put an intact copy of this "
            f"checkpoint in its place, or move {file.parent} away"
        ) from error
    return found


def verify_checkpoint(run: Run, which: str | None) -> None:
    """Check one checkpoint and say so. Raises what `catalog.open_intact_checkpoint` does."""
    checkpoint, manifest = catalog.open_intact_checkpoint(run, which)
    total = sum(entry["size"] for entry in manifest["files"].values())
    layout = ", ".join(f"{key} {value}" for key, value in manifest["layout"].items())
    print(
        f"{run.name}/checkpoints/{checkpoint.name}: {len(manifest['files'])} files, {total:,} bytes, all hashes right"
    )
    print(f"step {manifest['step']}, samples {manifest['samples_consumed']}, saved by: {layout}")
    print(f"digest {compute_digest(checkpoint)}")
