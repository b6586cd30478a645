"""The files through which a command and the process that watches it exchange messages."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_PUNCH_HOLE = 2
_KEEP_SIZE = 1
"""Modes of fallocate(2) (linux/falloc.h)."""
_FREED_BYTES = 1 << 20
"""How many bytes of messages are freed at a time."""
CLIENT_PATH = Path(__file__).resolve().parents[2] / "client"
"""The directory that contains the package `sluice`, which commands can import."""


class ClientFiles:
    """The directory through which a command and this process exchange messages (sluice/__init__.py).

    - The command appends JSON objects to `messages`, one per line.
    - The command creates `polled` when it asks for the first time whether it should stop.
    - The command writes an image to a file `image-…`, whose name is in a message. This process removes the file.
    - This process creates `stop` to ask the command to stop.

    The directory is in memory if possible, so that a message takes microseconds.

    Args:
        owner: text that identifies the rank. If an earlier process of this rank was killed, its directory is removed.
    """

    def __init__(self, owner: str) -> None:
        shared_memory = Path("/dev/shm")
        parent = shared_memory if os.access(shared_memory, os.W_OK) else Path(tempfile.gettempdir())
        self._folder = parent / f"sluice-{hashlib.sha256(owner.encode()).hexdigest()[:16]}"
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700)
        except FileExistsError:  # It belongs to another user.
            self._folder = Path(tempfile.mkdtemp(prefix="sluice-", dir=parent))
        self._messages = self._folder / "messages"
        self._messages.touch()
        self._position = 0
        """How much of `messages` has been read, in bytes."""
        self._freed = 0
        """How much of it has been freed, in bytes."""

    def __enter__(self) -> ClientFiles:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variable with which the command finds the directory."""
        return {"SLUICE_CLIENT": str(self._folder)}

    @property
    def is_polling(self) -> bool:
        """Whether the command has asked whether it should stop, so that it needs no signal."""
        return (self._folder / "polled").exists()

    def take_image(self, name: str) -> bytes:
        """Return the content of the file of an image, and remove the file.

        Raises OSError if there is no such file.
        """
        path = self._folder / Path(name).name
        content = path.read_bytes()
        path.unlink()
        return content

    def request_stop(self) -> None:
        """Ask the command to stop."""
        (self._folder / "stop").touch()

    def _free_memory(self) -> None:
        """Free the memory of the messages that have been read, once there are many of them."""
        if self._position - self._freed > _FREED_BYTES:
            with open(self._messages, "r+b") as file, suppress(OSError, AttributeError):
                libc = ctypes.CDLL(None)
                size = ctypes.c_long(self._position)
                libc.fallocate(file.fileno(), _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(0), size)
            self._freed = self._position

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived since the last call. Malformed lines are left out."""
        with open(self._messages, "rb") as file:
            file.seek(self._position)
            content = file.read()
        complete, newline, _ = content.rpartition(b"\n")
        self._position += len(complete) + len(newline)
        self._free_memory()
        messages = []
        for line in complete.splitlines():
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages
