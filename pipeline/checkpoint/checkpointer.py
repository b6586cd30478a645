"""Save and restore checkpoints with torch's distributed checkpoint (DCP), verification and an atomic commit.

A save has two parts. With `checkpoint.mode: async`, they run in a background thread during the next steps:

1. stage: each rank copies its state to host buffers, which are kept for the next save.
2. write: the ranks write, hash and commit the checkpoint (pipeline/checkpoint/writer.py). If node agents have forked
   savers (pipeline/checkpoint/saver.py), the savers do this, and the thread of the rank only waits for them.

A restore loads the newest checkpoint whose files match their hashes. The state is a flat dict of tensors with names
that do not depend on the layout: `model.<parameter>`, `optimizer.<parameter>.<state>` and, with `train.ema`,
`ema.<parameter>`.
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
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
from pipeline.base.errors import CheckpointError
from pipeline.checkpoint import catalog
from pipeline.checkpoint.catalog import METADATA_FILE
from pipeline.checkpoint.memory_snapshot import StateDict
from pipeline.checkpoint.saver import Saver
from pipeline.checkpoint.writer import CheckpointWriter, explain_save_error
from pipeline.comm.groups import all_gather_results, broadcast_from_rank0
from pipeline.config.sections import KeepConfig
from pipeline.run.directory import Run

WEIGHT_PREFIX = "model."
"""Prefix of the names of weights in a checkpoint."""
EMA_PREFIX = "ema."
"""Prefix of the names of the moving averages of weights (`train.ema`) in a checkpoint."""


class Checkpointer:
    """Saves and restores the state of a run. All ranks must make the same calls in the same order.

    Only one save is in progress at a time. If a save fails, for example because the disk is full, the next call of
    `save` or `wait_until_saved` raises the error. Earlier checkpoints remain.

    Args:
        folder: the directory of all checkpoints.
        group: a Gloo group of all ranks. Nothing else may use it, because a background save communicates on it while
            the run continues.
        keep: which checkpoints to keep (`checkpoint.keep`).
        background: whether to save in a background thread.
        manifest_entries: entries that are added to each manifest, such as the layout and the identity of the run.
        on_saved: called on rank 0 after each save, with the step and the duration of the save in seconds.
        on_committed: called before `on_saved` with the same arguments, unless a saver has written the checkpoint.
        metrics_file: metrics.jsonl, which has the held-out losses; None if no rule of `keep` needs them.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup,
        *,
        keep: int | KeepConfig,
        background: bool,
        manifest_entries: Mapping[str, Any],
        on_saved: Callable[[int, float], None],
        on_committed: Callable[[int, float], None] = lambda step, seconds: None,
        metrics_file: Path | None = None,
    ) -> None:
        self.folder = folder
        self.group = group
        self.background = background
        self.rank = dist.get_rank(group)
        self.manifest_entries = dict(manifest_entries)
        self.on_saved = on_saved
        self._checkpoint_writer = CheckpointWriter(
            folder, group, keep=keep, metrics_file=metrics_file, on_committed=on_committed
        )
        self.saver: Saver | None = None
        """The saver that writes the checkpoints; None if this process writes them. Set it on all ranks or on none. With
        a saver, each save also leaves a snapshot in memory."""
        # DCP's `DefaultStager` is not used, because its thread uses a CUDA stream of GPU 0 that does not wait for other
        # streams. In torch 2.11, it also frees its buffers after each save, so each save would have to pin host memory.
        self._stager = StateDictStager(pin_memory=torch.cuda.is_available())
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        """The CUDA stream that copies the state to host memory; None without a GPU."""
        self._staged: Future[None] | None = None
        """Done when the state of the save in progress is copied; None if no caller needs to wait for the copy."""
        self._thread: threading.Thread | None = None
        """The background thread of the save in progress."""
        self._error: BaseException | None = None
        """The error of the latest save, which `wait_until_saved` raises."""

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, state: StateDict, *, step: int, samples_consumed: int, extra: Mapping[str, Any]) -> None:
        """Save `state`. In the background mode, only wait for the previous save, and start this save.

        In the background mode, call `wait_until_staged` before you change the tensors of `state`.

        Args:
            state: this rank's tensors by name.
            step: the number of the step after which the state is saved.
            samples_consumed: the number of samples in all steps so far.
            extra: JSON values for the entry `extra` of the manifest.

        Raises:
            StorageError: if the previous save could not be written; without the background mode, also if this save
                could not be written.
            RuntimeError: if one of these saves failed for another reason.
        """
        self.wait_until_saved()
        start_time = time.monotonic()
        manifest = {
            "version": 1,  # The version of the manifest's format.
            "step": step,
            "samples_consumed": samples_consumed,
            "extra": dict(extra),
            **self.manifest_entries,
            "versions": collect_versions(),
        }
        staged = self._staged = Future()
        stream = self._stream
        # The copy must wait for this event, because the kernels that compute the state may still be queued.
        computed = torch.cuda.current_stream().record_event() if stream is not None else None

        def stage_and_write() -> None:
            nonlocal state
            try:
                with torch.cuda.stream(stream):  # The context does nothing if the stream is None.
                    if stream is not None and computed is not None:
                        stream.wait_event(computed)
                    write = self._stage(state, manifest, start_time)
                del state  # Free tensors that later steps replace while this save is being written.
                staged.set_result(None)
                seconds = write()
                if self.rank == 0:
                    self.on_saved(step, seconds)
            except BaseException as error:  # `wait_until_saved` raises this error in the trainer's thread.
                self._error = explain_save_error(error, self.folder)
                self._error.__cause__ = error if error is not self._error else error.__cause__
                if not staged.done():
                    staged.set_exception(self._error)

        if self.background:
            # Without `daemon`, the process does not exit before the save has ended.
            self._thread = device_thread(stage_and_write, f"checkpoint-{step}", daemon=False)
            self._thread.start()
        else:
            stage_and_write()
            self.wait_until_saved()

    def _stage(self, state: StateDict, manifest: dict[str, Any], start_time: float) -> Callable[[], float]:
        """Copy the state to host memory. Return a function that writes it and returns the duration of the save."""
        if self.saver is not None:
            self.saver.start(state, manifest, start_time)
            return self.saver.finish
        copied = cast(StateDict, self._stager.stage(state))
        return partial(self._checkpoint_writer.write, copied, manifest, start_time)

    def wait_until_staged(self) -> None:
        """Wait until the state is copied to host memory. Call this method before the weights change.

        If the copy failed, raise its error.
        """
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def wait_until_saved(self) -> None:
        """Wait for the save in progress, if there is one.

        Raises:
            StorageError: if the save failed because of the disk or the file system.
            RuntimeError: if the save failed for another reason.
        """
        self.wait_until_staged()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error = self._error
            self._error = None
            raise error

    def close(self) -> None:
        """Wait for the save in progress, if there is one, and free the host buffers."""
        try:
            self.wait_until_saved()
        finally:
            self._stager.close()
            if self.saver is not None:
                self.saver.close()

    # -- restoring ---------------------------------------------------------------------------------------

    def has_checkpoint(self) -> bool:
        """Return True if there is any committed checkpoint, intact or damaged. All ranks return the same value."""
        return broadcast_from_rank0(self.group, bool(catalog.list_checkpoint_steps(self.folder)))

    def restore(
        self,
        state: StateDict,
        on_damaged: Callable[[int, str], None],
        check: Callable[[Mapping[str, Any]], None] = lambda manifest: None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint into `state`, in place.

        The ranks share the verification, so each file is hashed once. A damaged checkpoint is renamed
        (`catalog.set_checkpoint_aside`), and the previous checkpoint is tried.

        Args:
            state: this rank's tensors by name, which are filled.
            on_damaged: called on rank 0 with the step and the reason for each damaged checkpoint.
            check: called on all ranks with the manifest before any tensor is loaded. This function may raise an error,
                which `restore` passes on.

        Returns:
            The manifest of the loaded checkpoint; None if there is no checkpoint.

        Raises:
            CheckpointError: if there are damaged checkpoints and no intact checkpoint. Otherwise the run would start
                from scratch without the user's knowledge.
        """
        if self.rank == 0:
            catalog.remove_partial_checkpoints(self.folder)
        damage_reasons: list[str] = []
        while True:
            steps = catalog.list_checkpoint_steps(self.folder)
            step = broadcast_from_rank0(self.group, steps[0] if steps else 0)
            if step == 0:
                break
            checkpoint = self.folder / catalog.checkpoint_name(step)
            try:
                manifest = load_verified_manifest(checkpoint, self.group)
            except CheckpointError as error:
                damage_reasons.append(str(error))
                if self.rank == 0:
                    catalog.set_checkpoint_aside(self.folder, step)
                    on_damaged(step, str(error))
                continue
            check(manifest)
            # The files are intact, so an error from here on does not mean that the checkpoint is damaged.
            load_checkpoint(state, checkpoint, self.group)
            return manifest
        # Earlier attempts may also have found damaged checkpoints.
        damaged_names = broadcast_from_rank0(self.group, sorted(path.name for path in self.folder.glob("damaged-*")))
        if damaged_names:
            raise CheckpointError(
                "checkpoint.none_intact",
                "no checkpoint is intact, and a start from scratch would discard work:\n  "
                + "\n  ".join(damage_reasons or damaged_names)
                + f"\nCopy an intact checkpoint to {self.folder}, under its name step-…; or, to train from scratch, "
                f"remove {self.folder}/damaged-* and the run's metrics.jsonl",
            )
        return None

    def read_tensors(self, step: int, state: StateDict) -> None:
        """Fill tensors in place from the checkpoint of `step`.

        Ranks may pass different names, because each rank reads without communication.

        Args:
            step: the step of the restored checkpoint.
            state: tensors by name; {} to read nothing.
        """
        if state:
            load_checkpoint(state, self.folder / catalog.checkpoint_name(step), None)


def load_verified_manifest(checkpoint: Path, group: dist.ProcessGroup) -> dict[str, Any]:
    """Verify all files of a checkpoint and return its manifest. Each rank verifies a part of the files.

    All ranks of `group` must call this function. It raises CheckpointError on all ranks if any file is missing, damaged
    or not listed in the manifest.
    """
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)

    def verify_part() -> dict[str, Any]:
        manifest = catalog.read_checkpoint_manifest(checkpoint)
        catalog.verify_checkpoint_files(checkpoint, manifest, part=rank, parts=size)
        return manifest

    return all_gather_results(group, verify_part)[0]


def load_checkpoint(state: StateDict, checkpoint: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors of `state` from a checkpoint, which any layout may have saved.

    Args:
        state: tensors by name, which are filled in place.
        checkpoint: the directory of the checkpoint.
        group: a Gloo group of all ranks, which must all call this function; None if one process reads alone.

    Raises:
        CheckpointError: on all ranks, if DCP did not write the checkpoint's `.metadata`.
        RuntimeError: if the checkpoint does not contain these tensors. This error replaces DCP's `CheckpointException`,
            which does not derive from `Exception`.
    """
    reader = CheckpointReader(checkpoint)

    def read_metadata() -> None:
        reader.read_metadata()  # The reader stores the result for `dcp.load`.

    if group is None:
        read_metadata()
    else:
        all_gather_results(group, read_metadata)  # An error on one rank is raised on all ranks.
    try:
        with warnings.catch_warnings():
            # torch warns that it uses no process group. If one process reads alone, this is intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        # Each value of `failures` is a pair of an exception and its traceback.
        reasons = "; ".join(sorted({str(failure[0]) for failure in error.failures.values()}))
        raise RuntimeError(f"{checkpoint} cannot be loaded: {reasons}") from error


def compute_digest(checkpoint: Path, *, batch_bytes: int = 1 << 29) -> str:
    """Return the SHA-256 of weights and optimizer state as 64 hex digits. The hash does not depend on the layout.

    The hash covers the tensors `model.…`, `optimizer.…` and `ema.…`, in the order of their names. For each tensor, it
    covers a line with name, dtype and shape, and then the bytes of the tensor. State that differs between data-parallel
    replicas is stored under other names, and is not covered.

    Args:
        checkpoint: the directory of the checkpoint.
        batch_bytes: tensors are loaded in batches, and a batch ends when it has at least this many bytes.
    """
    metadata = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    names = sorted(
        name
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith((WEIGHT_PREFIX, "optimizer.", EMA_PREFIX))
    )
    digest = hashlib.sha256()
    for name, tensor in iterate_tensors(checkpoint, names, batch_bytes=batch_bytes):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def find_weights(checkpoint: Path, *, averaged: bool = False) -> dict[str, tuple[str, torch.Size]]:
    """Return the name in the checkpoint and the shape of each weight, by its name in the model.

    Args:
        checkpoint: the directory of the checkpoint.
        averaged: whether to use the moving average of each weight that has one (`train.ema`).
    """
    metadata = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    weights: dict[str, tuple[str, torch.Size]] = {}
    for prefix in (WEIGHT_PREFIX, EMA_PREFIX) if averaged else (WEIGHT_PREFIX,):  # Averages replace weights.
        for name, entry in metadata.items():
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix):
                weights[name.removeprefix(prefix)] = name, entry.size
    return weights


def iterate_tensors(
    checkpoint: Path, names: Sequence[str], *, batch_bytes: int = 1 << 29
) -> Iterator[tuple[str, Tensor]]:
    """Load the full tensors of a checkpoint. Yield each name with its tensor, in the order of `names`.

    Args:
        checkpoint: the directory of the checkpoint.
        names: the names of the tensors to load.
        batch_bytes: tensors are loaded in batches, and a batch ends when it has at least this many bytes.
    """
    metadata: Any = CheckpointReader(checkpoint).read_metadata().state_dict_metadata
    batch: StateDict = {}
    size_bytes = 0
    for name in names:
        batch[name] = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        size_bytes += batch[name].nbytes
        if size_bytes >= batch_bytes or name == names[-1]:
            load_checkpoint(batch, checkpoint, None)
            for loaded_name in list(batch):
                yield loaded_name, batch.pop(loaded_name)
            size_bytes = 0


def collect_versions() -> dict[str, str]:
    """Return the software versions on which bit-identical results depend, and the model of this rank's GPU."""
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if torch.cuda.is_available():
        versions |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": str(torch.version.cuda),
            "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        }
    return versions


_DCP = "torch.distributed.checkpoint"
_ALLOWED_NAMES = {
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
"""Classes and functions to which `.metadata` may refer, by module. The file may also refer to dtypes, such as
`torch.float32`."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes that DCP's metadata needs, because other classes could execute code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function to which the pickle refers. Raise UnpicklingError if the name is not allowed."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED_NAMES.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader of a checkpoint, with the difference that it reads the pickle `.metadata` safely and only once.

    Unpickling can execute code. Hashes show that a file is unchanged, but not who wrote the file. Therefore the pickle
    may refer only to the classes of DCP's metadata, which are the same in torch 2.11 and 2.13. The metadata may list
    only files of tensors in the directory of the checkpoint. DCP reads the tensors themselves with `weights_only`.

    Args:
        checkpoint: the directory of the checkpoint.
    """

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self._file = checkpoint / METADATA_FILE
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:  # This method has no parameters, so DCP does not try to read files per rank.
        """Return the metadata. Raise CheckpointError if DCP did not write the file."""
        if self._metadata is None:
            self._metadata = _unpickle_metadata(self._file)
            # DCP's own `read_metadata` sets these fields in the same way.
            self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
            self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


def _unpickle_metadata(file: Path) -> Metadata:
    """Return the content of a checkpoint's `.metadata`. Raise CheckpointError if DCP did not write the file."""
    try:
        with open(file, "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"it contains an object of the type {type(metadata).__name__}")
        paths = {info.relative_path for info in metadata.storage_data.values()}
        if outside_paths := [path for path in paths if Path(path).name != path]:
            raise pickle.UnpicklingError(f"it refers to {min(outside_paths)}, outside of the checkpoint")
    except OSError:
        raise
    except Exception as error:  # A manipulated pickle may raise any exception.
        raise CheckpointError(
            "checkpoint.unsafe_metadata",
            f"{file} was not written by a save ({error}). Its code was not executed. Put an intact copy of this "
            f"checkpoint in its place, or move {file.parent} away",
        ) from error
    return metadata


def verify_checkpoint(run: Run, which: str | None) -> None:
    """Verify a checkpoint, and print a summary and the digest of its state.

    Args:
        run: the run.
        which: the step, as the user typed it; None or `newest` for the newest checkpoint.

    Raises:
        CheckpointError: if a file is missing, damaged or not listed in the manifest, or there is no checkpoint.
        UserError: if the run is a sweep, or the step does not exist.
    """
    checkpoint, manifest = catalog.open_intact_checkpoint(run, which)
    total_bytes = sum(entry["size"] for entry in manifest["files"].values())
    layout = ", ".join(f"{key} {value}" for key, value in manifest["layout"].items())
    file_count = len(manifest["files"])
    print(f"{run.name}/checkpoints/{checkpoint.name}: {file_count} files, {total_bytes:,} bytes, all hashes right")
    print(f"step {manifest['step']}, samples {manifest['samples_consumed']}, saved by: {layout}")
    print(f"digest {compute_digest(checkpoint)}")
