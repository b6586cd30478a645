"""Write files that survive a crash, and read files that a crash may have left incomplete.

A file of a run directory is written in one of two ways:

- As a whole: under a temporary name, with fsync, then a rename. Readers see the old or the new content, never a part.
- Line by line: each line with one `write`, under a lock if several processes append to the file. A crash can only
  truncate the last line, and :func:`read_jsonl` skips a truncated line.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import resource
import secrets
import shutil
import stat
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

from pipeline.base.errors import UserError, raise_if_too_many_open_files

LOCK_TIMEOUT_S = 5.0
"""How many seconds :func:`append_line` waits for the lock."""
_MAX_MKDIR_ATTEMPTS = 100


def fsync(path: str | Path) -> None:
    """Make the content of file `path`, or the names inside directory `path`, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FolderExistsError(UserError):
    """Another process has created the folder that this process was about to create."""


@contextmanager
def create_folder_atomically(folder: Path, owner: str = "") -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end of the block.

    The block must fsync the files that it writes. `folder` is therefore complete or does not exist. If the block
    fails, the temporary folder and all parent folders created for it are removed, and the error is raised again. A
    process that is killed leaves a folder `.NAME.….tmp`.

    Args:
        folder: the folder to create.
        owner: a part of the temporary name, so that the caller can tell its own leftover folders from folders that
            other processes are still filling.

    Raises:
        FolderExistsError: if `folder` exists at the end of the block. An empty folder is replaced instead.
    """
    missing_parents = [path for path in folder.parents if not path.exists()]
    temporary = folder.with_name(f".{folder.name}.{owner}{secrets.token_hex(4)}.tmp")
    try:
        _make_folder_and_parents(temporary)
        yield temporary
        fsync(temporary)
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FolderExistsError(
                "storage.folder_exists", f"{folder} already exists: another process has created it in the meantime"
            ) from error
    except BaseException:  # also Ctrl-C and SystemExit, because an unfinished folder must not remain
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # another process may have created files in these folders
            for path in missing_parents:
                path.rmdir()
        raise
    fsync(folder.parent)


def _make_folder_and_parents(folder: Path) -> None:
    """Create a folder and its parents. Retry, because another process that fails may remove the empty parents."""
    for attempt in range(_MAX_MKDIR_ATTEMPTS):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileNotFoundError:
            if attempt == _MAX_MKDIR_ATTEMPTS - 1:
                raise
        else:
            return


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` at the end of the block.

    The block must write and fsync the file. The rename is fsynced here. If the block fails, also by Ctrl-C or
    SystemExit, the temporary file is removed and the error is raised again.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C and SystemExit, because an incomplete file must not remain
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write `content` to the file `path`, atomically and durably."""
    with replace_atomically(Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


_FICLONE = 0x40049409
"""The request of ioctl(2) that makes a file share the blocks of another file (ioctl_ficlone(2))."""
_LINK_ERRORS = (
    errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL,
)  # fmt: skip
"""Errors of link(2) that mean that the file system or its rules do not allow the link."""


def link_or_copy(source: Path, target: Path) -> Literal["linked", "cloned", "copied"]:
    """Create the file `target` with the content of `source`, in the cheapest way that works.

    The ways are: a hard link; a clone that shares the blocks (on XFS, Btrfs and others); a copy. In each case, removing
    or replacing one of the files does not affect the other one. Use this function only for files that are never
    changed in place. A clone or copy is durable when this function returns.

    Args:
        source: the file; a symbolic link is followed.
        target: the new file.

    Returns:
        What `target` is.

    Raises:
        OSError: if `source` cannot be read, or `target` exists or cannot be written.
    """
    source = source.resolve(strict=True)
    try:
        os.link(source, target)
        return "linked"
    except OSError as error:
        if error.errno not in _LINK_ERRORS:
            raise
    with open_regular_file(source) as reader, open(target, "xb") as writer:
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            result: Literal["cloned", "copied"] = "cloned"
        except OSError:  # The file system cannot clone, or the files are on different file systems.
            shutil.copyfileobj(reader, writer, 1 << 22)
            result = "copied"
        writer.flush()
        os.fsync(writer.fileno())
    return result


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def try_flock(fd: int, operation: int) -> bool:
    """Apply flock(2) to a descriptor. Return False if another process holds the lock, otherwise True.

    If the file system does not support locks, nothing is locked and the result is True.
    """
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def open_lock_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a lock file without truncating it, and return the descriptor.

    Raises UserError if `path` is a symbolic link, because the link may point to a valuable file.
    """
    try:
        # O_NONBLOCK: if `path` is a pipe, opening it must not wait for another process
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                "run.foreign_file", f"{path} is a symbolic link, but a lock file must not be one: remove it"
            ) from error
        raise


def append_line(path: str | Path, line: str) -> None:
    """Append one line with a single `write`, under a lock, so that lines of several machines are not lost or mixed.

    The lock is needed because NFS has no atomic append: each client writes at the position that it believes to be the
    end (open(2), O_APPEND). If another process, which may be suspended, holds the lock for longer than
    `LOCK_TIMEOUT_S`, the line is written without the lock. If a crash has truncated the last line, a newline is written
    first, so that the new line is not joined to the truncated line.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not try_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and time.monotonic() < deadline:
            time.sleep(0.01)
        size = os.fstat(fd).st_size
        is_truncated = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        write_line(fd, f"\n{line}" if is_truncated else line, str(path))
    finally:
        os.close(fd)


def write_line(fd: int, line: str, name: str) -> None:
    """Write one line with one `write`. Raises OSError, naming the file `name`, if only a part fits on the disk."""
    data = line.encode() + b"\n"
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def open_regular_file(path: str | Path) -> BufferedReader:
    """Open a file for reading.

    Raises UserError for a pipe or a device, because reading it might block or never end. Raises IsADirectoryError for a
    directory.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise UserError("storage.not_a_file", f"{path} is not a regular file: replace it with a regular file")
    return os.fdopen(fd, "rb")


def read_json(path: str | Path) -> Any:
    """Return the value of a JSON file; None if its content is not valid JSON (:func:`parse_json_or_none`)."""
    with open_regular_file(path) as file:
        return parse_json_or_none(file.read())


def parse_json_or_none(text: bytes) -> Any:
    """Return the JSON value of a text; None if the text is not valid JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError also means invalid UTF-8, or a number of thousands of digits
        return None


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, without malformed lines; nothing if the file does not exist."""
    if Path(path).exists():
        with open_regular_file(path) as file:
            yield from _parse_objects(file)


def _parse_objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Return an iterator over the JSON objects in `lines`, without other lines."""
    return (value for value in map(parse_json_or_none, lines) if isinstance(value, dict))


def read_last_objects(
    path: str | Path, matches: Callable[[Any], bool], tail_bytes: int = 1 << 16
) -> Iterator[dict[str, Any]]:
    """Yield the objects in the last `tail_bytes` bytes of a JSON-lines file for which `matches` is true, newest first.

    Yields nothing if the file does not exist.
    """
    try:
        with open_regular_file(path) as file:
            # if the first line is incomplete, it is not valid JSON and is left out
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    yield from filter(matches, _parse_objects(reversed(lines)))


def read_last_object(path: str | Path, matches: Callable[[Any], bool]) -> dict[str, Any] | None:
    """Return the newest object that :func:`read_last_objects` yields; None if it yields nothing."""
    return next(read_last_objects(path, matches), None)


def read_complete_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """Yield the complete lines of a file from byte `offset` on, each with the offset of its end.

    Yields nothing if the file does not exist.
    """
    if not path.exists():
        return
    with open_regular_file(path) as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):  # another process is still writing this line
                return
            offset += len(line)
            yield line, offset


def sha256_file(path: str | Path, part: tuple[int, int] | None = None) -> str:
    """Return the SHA-256 of a file, or of its bytes `part` = [start, end), as 64 hex digits.

    Raises UserError for a pipe or a device.
    """
    with open_regular_file(path) as file:
        if part is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        start, end = part
        file.seek(start)
        remaining = end - start
        digest = hashlib.sha256()
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            digest.update(block)
            remaining -= len(block)
        return digest.hexdigest()


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values`, such as the content of a manifest, with their hash in the key `sha256`."""
    body = {key: value for key, value in values.items() if key != "sha256"}
    return {**body, "sha256": sha256_json(body)}


def has_valid_checksum(values: Any) -> bool:
    """Return whether `values` is an unchanged result of :func:`add_checksum`."""
    return isinstance(values, dict) and add_checksum(values)["sha256"] == values.get("sha256")


def has_wrong_checksum(values: Mapping[str, Any]) -> bool:
    """Return whether `values` has a checksum that does not match. Files of older versions have no checksum."""
    return "sha256" in values and not has_valid_checksum(values)


def sha256_json(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of `value` (sorted keys, no spaces), as 64 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_file_system_type(path: Path) -> str:
    """Return the type of the file system of `path` ("lustre", "ext4", …); "" if df(1) cannot determine it."""
    try:
        command = ["df", "--output=fstype", os.fspath(path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (result.stdout.split() or [""])[-1]  # the first word is the title of the column


@contextmanager
def translate_read_errors(path: str, *other_exceptions: type[Exception]) -> Iterator[None]:
    """Raise UserError, naming the file, if the block raises an error that a damaged or unreadable file may cause.

    An OSError with an errno becomes `data.unreadable_file`. An OSError without an errno, EOFError, zlib.error and
    `other_exceptions` become `data.damaged_file`. All other errors pass unchanged. UserError, MemoryError and
    ImportError pass unchanged even if `other_exceptions` includes them.

    Args:
        path: the file that the block reads.
        other_exceptions: further exceptions that mean a damaged file. For example, h5py raises many kinds.

    Raises:
        UserError: see above.
        StorageError: too many files are open.
    """
    try:
        yield
    except (UserError, MemoryError, ImportError):
        raise
    except Exception as error:
        if not isinstance(error, (OSError, EOFError, zlib.error, *other_exceptions)):
            raise
        raise_if_too_many_open_files(error)
        is_unreadable = isinstance(error, OSError) and error.errno is not None
        code = "data.unreadable_file" if is_unreadable else "data.damaged_file"
        raise UserError(code, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


MAX_OPEN_FILES = 1 << 16
"""The highest limit on open files to set. By default, Linux maps about as many files into memory (vm.max_map_count)."""


def raise_open_file_limit() -> None:
    """Raise this process's soft limit on open files, up to the hard limit and `MAX_OPEN_FILES`.

    A job inherits the limit of the login node, often 1,024 files, which is too few for a data set of many shards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
