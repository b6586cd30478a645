"""Copies of the training's files on a disk of each node's own (`site.local_disk`), made while training runs.

Training starts on shared storage. On each node one rank copies file after file, hashing each on its way, and gives a
copy its name when it is whole and has the hash of the manifest; every rank of the node looks once a second and reads
what is there from then on. The samples are the same: where they are read changes nothing else. Whatever fails (no such
folder, no room, a disk that breaks) is told once, and training goes on where it reads.

    DISK/sluice-KEY/users    each rank holds a shared lock on it: who gets it alone removes the folder
    DISK/sluice-KEY/copier   held by the rank that copies; where it dies, another one goes on
    DISK/sluice-KEY/SHA256   a copy; of a part of a file, with a hole before it, so that it stands where it stood

The last rank to leave removes the folder. What a killed job left behind is removed by the next run that comes there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from pipeline.base.files import flock, open_lock, replacing, sha256_json
from pipeline.data.samples import MappedDataset

_CHUNK = 1 << 22
KEEP_FREE = 0.05
"""The part of the disk that is left free."""


class LocalCopies(AbstractContextManager["LocalCopies"]):
    """Moves `dataset` to copies of its files, in a thread of its own, until it is closed."""

    every_s = 1.0

    def __init__(self, dataset: MappedDataset, data_dir: Path, disk: str | None, tell: Callable[..., None]) -> None:
        """`disk`: a folder, with variables of the environment; None: nothing is done. `tell` gets what came of it."""
        self._dataset, self._data_dir = dataset, data_dir
        self._disk = Path(os.path.expandvars(disk or ""))
        self._tell = partial(tell, "local_copy", host=socket.gethostname(), disk=str(self._disk))
        self._waiting = dict(enumerate(dataset.entries))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sluice-local-copies", daemon=True)
        if disk is not None:
            self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        key = sha256_json([str(self._data_dir.absolute()), sorted(entry.sha256 for entry in self._waiting.values())])
        folder = self._disk / f"sluice-{key[:16]}"
        try:
            if not self._disk.is_absolute() or not self._disk.is_dir():
                raise FileNotFoundError("there is no such folder on this node (site.local_disk)")
            for other in self._disk.glob("sluice-*"):
                if other != folder:
                    _remove_unused(other)
            users = _joined(folder)
        except OSError as error:
            self._tell(error=str(error))
            return
        try:
            with open(folder / "copier", "w") as copier:
                while self._waiting and not self._closed.wait(self.every_s):
                    self._move(folder)
                    if self._waiting and flock(copier.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
                        self._copy(folder)
                        break
        except OSError as error:
            if not self._closed.is_set():
                self._tell(error=str(error))
        self._closed.wait()
        os.close(users)
        _remove_unused(folder)

    def _move(self, folder: Path) -> None:
        """Read what is there from there."""
        there = set(os.listdir(folder))
        for number in [number for number, entry in self._waiting.items() if entry.sha256 in there]:
            self._dataset.move(number, folder / self._waiting.pop(number).sha256)

    def _copy(self, folder: Path) -> None:
        """Copy each file for which there is room. Raises OSError where one is not what it should be."""
        began, size, left_out = time.monotonic(), 0, 0
        files = {entry.sha256: entry for entry in self._waiting.values()}
        for entry in files.values():
            disk, (start, end) = shutil.disk_usage(folder), entry.part or (0, entry.size)
            if disk.free - (end - start) < KEEP_FREE * disk.total:
                left_out += 1
                continue
            with replacing(folder / entry.sha256) as half:
                if (found := self._copied(self._data_dir / entry.file, half, start, end)) != entry.sha256:
                    raise OSError(f"{entry.file} is not what its manifest says: sha256 {found}")
            size += end - start
            self._move(folder)
        seconds = round(time.monotonic() - began, 1)
        self._tell(files=len(files) - left_out, bytes=size, seconds=seconds, no_room_for=left_out)

    def _copied(self, source: Path, target: Path, start: int, end: int) -> str:
        """Copy these bytes of a file; their sha256. Raises InterruptedError where this is closed meanwhile."""
        digest = hashlib.sha256()
        with open(source, "rb", buffering=0) as read, open(target, "wb", buffering=0) as write:
            write.seek(read.seek(start))
            while chunk := read.read(min(_CHUNK, end - read.tell())):
                if self._closed.is_set():
                    raise InterruptedError
                digest.update(chunk)
                write.write(chunk)
        return digest.hexdigest()


def _joined(folder: Path) -> int:
    """A shared lock on a folder that is there, and nobody else's: its descriptor. Raises PermissionError."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise PermissionError(f"{folder} is somebody else's")
        with suppress(FileNotFoundError):  # who left last removed it just now
            users = open_lock(folder / "users")
            flock(users, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(users), (folder / "users").stat()):
                    return users
            os.close(users)


def _remove_unused(folder: Path) -> None:
    """Remove a folder of copies that no process uses, and that is ours to remove."""
    with suppress(OSError):
        fd = os.open(folder / "users", os.O_RDWR | os.O_NOFOLLOW)
        try:
            if flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(fd)
