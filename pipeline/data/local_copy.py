"""Copy the training data to a local disk of each node (`site.local_disk`) while training runs.

Training starts with the files on shared storage. On each node, the first rank copies one file after another. A copy
gets its final name when it is complete and has the hash of the manifest. Once per second, the other ranks of the node
look for new copies. When a rank has found a copy, it reads the copy instead of the original. If copying fails, an event
reports the error and training continues with the originals.

    DISK/sluice-KEY/users          lock file; every rank holds a shared lock, and only an unlocked folder is removed
    DISK/sluice-KEY/SHA256-START   copy of the bytes of a file from START on, with a hole before START, so that the
                                   offsets in the manifest remain valid

KEY is random for each start, so copies of a killed job are never read. The next run on the node removes such copies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.files import open_lock_file, read_file_system_type, replace_atomically, try_flock
from pipeline.base.ownership import check_own_folder
from pipeline.data.manifest import SampleFile, ShardEntry
from pipeline.data.samples import MappedDataset
from pipeline.run.events import Event, LocalCopy

_CHUNK_BYTES = 1 << 22
"""Bytes that are read and written at a time. After each chunk, the thread checks whether it must stop."""
MIN_FREE_FRACTION = 0.05
"""Fraction of the local disk that stays free."""


class LocalCopies(AbstractContextManager["LocalCopies"]):
    """Make `dataset` read local copies of its files as soon as they exist, until the context ends.

    A background thread copies the files on one rank of the node, and looks for new copies on the other ranks.

    Args:
        dataset: the training samples.
        data_dir: folder to which relative paths in the manifest refer.
        disk: path of a folder on a local disk, which may contain environment variables; None: make no copies.
        key: random text, the same on all ranks of this start.
        write_event: function that writes an event with the result, on the rank of a node that copies the files; None on
            the other ranks.
    """

    poll_interval_s = 1.0
    """Seconds between two searches for new copies."""

    def __init__(
        self,
        dataset: MappedDataset,
        data_dir: Path,
        disk: str | None,
        key: str,
        write_event: Callable[[Event], None] | None,
    ) -> None:
        self._dataset = dataset
        self._data_dir = data_dir
        self._disk = Path(os.path.expandvars(disk or ""))
        self._folder = self._disk / f"sluice-{key}"
        self._write_event = write_event
        self._pending: dict[str, list[int]] = {}
        """By file name of each copy that the dataset does not read yet: the indices of the entries to replace."""
        for entry_index, entry in enumerate(dataset.entries):
            self._pending.setdefault(_copy_name(entry), []).append(entry_index)
        # Each copy needs a file descriptor, even if several copies are parts of one file. Half of the limit remains for
        # the originals and for other files.
        max_copies = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        omitted_names = list(self._pending)[max_copies:]
        for name in omitted_names:
            del self._pending[name]
        self._too_many_files_by = len(omitted_names) or None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-local-copies", daemon=True)
        if disk is not None:
            self._thread.start()

    def __exit__(self, *exception_info: object) -> None:
        """Stop the thread, and remove the copies if no other rank uses them."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        """Copy files or look for copies, then wait until the context ends. Runs in the background thread.

        An error ends the copying. The rank that copies writes an event with the error.
        """
        lock = None
        try:
            if not self._disk.is_absolute() or not self._disk.is_dir():
                raise FileNotFoundError("this folder does not exist on this node (site.local_disk)")
            if read_file_system_type(self._disk) in ("tmpfs", "ramfs"):
                raise UserError(
                    "data.local_disk_in_memory",
                    "this folder is in main memory, which training needs: set site.local_disk to a folder on a disk",
                )
            lock = _lock_shared(self._folder)
            if self._write_event is not None:
                self._remove_abandoned_folders()
                self._write_event(self._copy_files())
            while self._pending and not self._closed.wait(self.poll_interval_s):
                for name in os.listdir(self._folder):
                    self._use_copy(name)
        except (OSError, UserError) as error:
            if self._write_event is not None and not self._closed.is_set():
                self._write_event(
                    LocalCopy(stage="train", host=socket.gethostname(), disk=str(self._disk), error=str(error))
                )
        self._closed.wait()
        if lock is not None:
            os.close(lock)
            _remove_unused(self._folder)

    def _remove_abandoned_folders(self) -> None:
        """Remove copies that killed runs have left on the disk."""
        for folder in self._disk.glob("sluice-*"):
            if folder != self._folder and not self._closed.is_set():
                _remove_unused(folder)

    def _use_copy(self, name: str) -> None:
        """Make the dataset read the copy `name`. Do nothing if it already reads the copy, or if `name` is no copy."""
        for entry_index in self._pending.pop(name, ()):
            self._dataset.remap_file(entry_index, self._folder / name)

    def _copy_files(self) -> LocalCopy:
        """Copy each file for which the disk has space, and return an event with the result.

        Raises OSError if a file cannot be copied or its hash differs from the manifest, and InterruptedError if the
        context ends.
        """
        start_time = time.monotonic()
        copied_bytes = 0
        no_space_count = 0
        for name, entry_indices in list(self._pending.items()):
            entry = self._dataset.entries[entry_indices[0]]
            disk = shutil.disk_usage(self._folder)
            start, end = entry.part or (0, entry.size)
            if disk.free - (end - start) < MIN_FREE_FRACTION * disk.total:
                no_space_count += 1
                continue
            with replace_atomically(self._folder / name) as temporary:
                digest = self._copy_range(self._data_dir / entry.file, temporary, start, end)
                if digest != entry.sha256:
                    raise OSError(f"{entry.file} differs from its manifest: its sha256 is {digest}")
            copied_bytes += end - start
            self._use_copy(name)
        return LocalCopy(
            stage="train",
            host=socket.gethostname(),
            disk=str(self._disk),
            # Names of copies contain a `-`. The name of the lock file, `users`, does not.
            files=sum(1 for _ in self._folder.glob("*-*")),
            bytes=copied_bytes,
            seconds=round(time.monotonic() - start_time, 1),
            no_room_for=no_space_count,
            too_many_files_by=self._too_many_files_by,
        )

    def _copy_range(self, source: Path, target: Path, start: int, end: int) -> str:
        """Copy bytes [start, end) of a file and return their sha256. Raises InterruptedError if the context ends."""
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as source_file, open(target, "wb") as target_file:
            # The copy gets a hole before `start`, so that offsets remain valid.
            target_file.seek(source_file.seek(start))
            while chunk := source_file.read(min(_CHUNK_BYTES, end - source_file.tell())):
                if self._closed.is_set():
                    raise InterruptedError
                digest.update(chunk)
                target_file.write(chunk)
        return digest.hexdigest()


def _copy_name(entry: ShardEntry | SampleFile) -> str:
    """Return the file name of the copy of an entry. Entries with the same result have the same content."""
    return f"{entry.sha256}-{entry.part[0] if entry.part else 0}"


def _lock_shared(folder: Path) -> int:
    """Create a folder of copies if needed, take a shared lock, and return the file descriptor of the lock.

    Raises UserError if another user owns or may write to the folder.
    """
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # Another process has just removed the folder.
            check_own_folder(folder)
            lock = open_lock_file(folder / "users")
            try_flock(lock, fcntl.LOCK_SH)  # Without LOCK_NB, this waits until no other process removes the folder.
            # Another process may have removed or replaced the file before this process locked it.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), (folder / "users").stat()):
                    return lock
            os.close(lock)


def _remove_unused(folder: Path) -> None:
    """Remove a folder of copies, unless a process uses the folder or its lock file cannot be opened."""
    with suppress(OSError):
        lock = os.open(folder / "users", os.O_RDWR | os.O_NOFOLLOW)
        try:
            if try_flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
