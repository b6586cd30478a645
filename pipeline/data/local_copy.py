"""Copies of the training's files on a disk of each node's own (`site.local_disk`), made while training runs.

Training starts on shared storage. On each node the first rank copies file after file, hashing each on its way, and
gives a copy its name when it is whole and has the hash of the manifest; every rank of the node looks once a second and
reads what is there from then on. The samples are the same: where they are read changes nothing else. Whatever fails (no
such folder, no room, a disk that breaks, more copies than half the files that a process may open) is told once a node,
and training goes on where it reads.

    DISK/sluice-KEY/users          each rank holds a shared lock on it: who gets it alone removes the folder
    DISK/sluice-KEY/SHA256-START   a copy; of a part of a file, with a hole before it, so that it stands where it stood

KEY is drawn anew at each start: what a killed job left is never read, and is removed by the next training there.
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

_CHUNK = 1 << 22
KEEP_FREE = 0.05
"""The part of the disk that is left free."""


class LocalCopies(AbstractContextManager["LocalCopies"]):
    """Moves `dataset` to copies of its files, in a thread of its own, until it is closed."""

    every_s = 1.0

    def __init__(
        self, dataset: MappedDataset, data_dir: Path, disk: str | None, key: str, tell: Callable[[Event], None] | None
    ) -> None:
        """`disk`: a folder, with variables of the environment; None: nothing is done. `key`: the ranks' of this start.
        `tell` gets what came of it: of the rank of a node that copies; None: another one does."""
        self._dataset, self._data_dir = dataset, data_dir
        self._disk = Path(os.path.expandvars(disk or ""))
        self._folder = self._disk / f"sluice-{key}"
        self._tell = tell
        self._waiting: dict[str, list[int]] = {}
        for number, entry in enumerate(dataset.entries):
            self._waiting.setdefault(_name(entry), []).append(number)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # each copy holds a descriptor, also of a file's part
        too_many = list(self._waiting)[most:]
        for name in too_many:
            del self._waiting[name]
        self._too_many_files_by = len(too_many) or None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-local-copies", daemon=True)
        if disk is not None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        users = None
        try:
            if not self._disk.is_absolute() or not self._disk.is_dir():
                raise FileNotFoundError("there is no such folder on this node (site.local_disk)")
            if read_file_system_type(self._disk) in ("tmpfs", "ramfs"):
                raise UserError(
                    "data.local_disk_in_memory", "this folder is in memory, which training needs (site.local_disk)"
                )
            users = _joined(self._folder)
            if self._tell is not None:
                self._sweep()
                self._tell(self._copy())
            while self._waiting and not self._closed.wait(self.every_s):
                for name in os.listdir(self._folder):
                    self._move(name)
        except (OSError, UserError) as error:
            if self._tell is not None and not self._closed.is_set():
                self._tell(LocalCopy(stage="train", host=socket.gethostname(), disk=str(self._disk), error=str(error)))
        self._closed.wait()
        if users is not None:
            os.close(users)
            _remove_unused(self._folder)

    def _sweep(self) -> None:
        """Remove what killed trainings left."""
        for other in self._disk.glob("sluice-*"):
            if other != self._folder and not self._closed.is_set():
                _remove_unused(other)

    def _move(self, name: str) -> None:
        for number in self._waiting.pop(name, ()):
            self._dataset.remap_file(number, self._folder / name)

    def _copy(self) -> LocalCopy:
        """Copy each file for which there is room, and return the event that reports it.

        Raises:
            OSError: A file does not have the content that its manifest describes.
        """
        began, size, left_out = time.monotonic(), 0, 0
        for name, numbers in list(self._waiting.items()):
            entry, disk = self._dataset.entries[numbers[0]], shutil.disk_usage(self._folder)
            start, end = entry.part or (0, entry.size)
            if disk.free - (end - start) < KEEP_FREE * disk.total:
                left_out += 1
                continue
            with replace_atomically(self._folder / name) as half:
                if (found := self._copied(self._data_dir / entry.file, half, start, end)) != entry.sha256:
                    raise OSError(f"{entry.file} is not what its manifest says: sha256 {found}")
            size += end - start
            self._move(name)
        seconds = round(time.monotonic() - began, 1)
        return LocalCopy(
            stage="train",
            host=socket.gethostname(),
            disk=str(self._disk),
            files=sum(1 for _ in self._folder.glob("*-*")),
            bytes=size,
            seconds=seconds,
            no_room_for=left_out,
            too_many_files_by=self._too_many_files_by,
        )

    def _copied(self, source: Path, target: Path, start: int, end: int) -> str:
        """Copy these bytes of a file; their sha256. Raises InterruptedError where this is closed meanwhile."""
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as read, open(target, "wb") as write:
            write.seek(read.seek(start))
            while chunk := read.read(min(_CHUNK, end - read.tell())):
                if self._closed.is_set():
                    raise InterruptedError
                digest.update(chunk)
                write.write(chunk)
        return digest.hexdigest()


def _name(entry: ShardEntry | SampleFile) -> str:
    return f"{entry.sha256}-{entry.part[0] if entry.part else 0}"


def _joined(folder: Path) -> int:
    """A shared lock on a folder that is there: its descriptor. Raises UserError where it is not ours."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # who left last removed it just now
            check_own_folder(folder)
            users = open_lock_file(folder / "users")
            try_flock(users, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(users), (folder / "users").stat()):
                    return users
            os.close(users)


def _remove_unused(folder: Path) -> None:
    """Remove a folder of copies that no process uses, and that is ours to remove."""
    with suppress(OSError):
        users = os.open(folder / "users", os.O_RDWR | os.O_NOFOLLOW)
        try:
            if try_flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(users)
