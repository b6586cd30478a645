"""Files that survive a crash: atomic writes, appended lines, hashes, and reading what a crash left.

Every file of a run directory is either written whole (temporary name, fsync, rename: readers see the old or
the new content, never half) or appended to one line per `write` (a crash can tear the last line only, and
:func:`read_jsonl` drops a torn tail), under a lock where several processes append.
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
from typing import Any

from pipeline.base.errors import UserError, raise_if_too_many_open_files

LOCK_TIMEOUT_S = 5.0
"""How long an append waits for the lock, in seconds."""


def fsync(path: str | Path) -> None:
    """Make the content of file `path`, or the names inside directory `path`, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FolderExistsError(UserError):
    """Another process gave a folder the name that was wanted for one of ours."""


@contextmanager
def create_folder_atomically(folder: Path, owner: str = "") -> Iterator[Path]:
    """A temporary folder beside `folder` to fill with files that are synced, which then takes its name by one rename.

    It is whole, or not there. Where the block fails nothing stays, not even of the folders above that were missing, and
    the error goes on; a kill leaves `.NAME.….tmp`. `owner`: a part of that temporary name, by which leftovers of one
    owner can be told from what another process is still filling. Raises FolderExistsError if `folder` exists at the
    end.
    """
    above = [path for path in folder.parents if not path.exists()]
    temporary = folder.with_name(f".{folder.name}.{owner}{secrets.token_hex(4)}.tmp")
    try:
        _make_inside(temporary)
        yield temporary
        fsync(temporary)
        try:
            os.rename(temporary, folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise FolderExistsError(
                "storage.folder_exists", f"{folder} exists already: another process made it in the meantime"
            ) from error
    except BaseException:  # also Ctrl-C and SystemExit: an unfinished folder must not remain; always raised again
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # somebody else has put something there
            for path in above:
                path.rmdir()
        raise
    fsync(folder.parent)


def _make_inside(folder: Path) -> None:
    """Make a folder and those above it. Another process that failed may remove the empty ones above at any moment."""
    for attempt in range(100):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileNotFoundError:
            if attempt == 99:
                raise
        else:
            return


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write and fsync a file under, which then replaces `path`, durably.

    Where the block fails, by Ctrl-C or SystemExit too, no half file stays, and the error goes on.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:  # also Ctrl-C and SystemExit: half a file must not remain; always raised again
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replace `path` by `content`."""
    with replace_atomically(Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: str | Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def try_flock(fd: int, operation: int) -> bool:
    """flock(2); False where somebody holds it. Where the file system has no locks, nobody does."""
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
    return True


def open_lock_file(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a lock's file: never through a link, which may lead to a file of value, and never emptying it.

    Raises UserError where it is a link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                "run.foreign_file", f"{path} is a symbolic link, which a lock never is: remove it"
            ) from error
        raise


def append_line(path: str | Path, line: str) -> None:
    """Append one line in a single `write`, under a lock: writers on several machines never lose or mix their lines.

    NFS alone has no atomic append: each client writes where it believes the end to be (open(2), O_APPEND). Who holds
    the lock for longer than `PATIENCE_S` (a suspended process) is not waited for. A tail without a newline (torn by a
    crash) is closed first, so that it cannot swallow the new line.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not try_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB) and time.monotonic() < deadline:
            time.sleep(0.01)
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        write_line(fd, f"\n{line}" if torn else line, str(path))
    finally:
        os.close(fd)


def write_line(fd: int, line: str, name: str) -> None:
    """Write one line in one `write`. Raises OSError, naming the file, where the disk fills up in the middle of it."""
    data = line.encode() + b"\n"
    if os.write(fd, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def open_regular_file(path: str | Path) -> BufferedReader:
    """Open a file to read it. Raises UserError for a pipe or a device, which would never end, or never answer."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise UserError("storage.not_a_file", f"{path} is no ordinary file: put one in its place")
    return os.fdopen(fd, "rb")


def read_json(path: str | Path) -> Any:
    """The value of a JSON file, as `parse` reads it."""
    with open_regular_file(path) as file:
        return parse_json_or_none(file.read())


def parse_json_or_none(text: bytes) -> Any:
    """The JSON value of a text; None where it is none, or one too deep to be read."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also what is no UTF-8, and numbers of 5,000 digits
        return None


def read_jsonl(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, skipping lines that a crash tore; nothing where there is no file."""
    if Path(path).exists():
        with open_regular_file(path) as file:
            yield from _objects(file)


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (value for value in map(parse_json_or_none, lines) if isinstance(value, dict))


def read_last_objects(path: str | Path, fits: Callable[[Any], bool], tail: int = 1 << 16) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file that fit, the newest first, in its last `tail` bytes; none without a file."""
    try:
        with open_regular_file(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    yield from filter(fits, _objects(reversed(lines)))


def read_last_object(path: str | Path, fits: Callable[[Any], bool]) -> dict[str, Any] | None:
    """The newest of these; None where there is none."""
    return next(read_last_objects(path, fits), None)


def read_complete_lines(path: Path, offset: int) -> Iterator[tuple[bytes, int]]:
    """The whole lines of a file from byte `offset` on, each with the offset behind it; none where there is no file."""
    if not path.exists():
        return
    with open_regular_file(path) as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):  # it is being written
                return
            offset += len(line)
            yield line, offset


def sha256_file(path: str | Path, part: tuple[int, int] | None = None) -> str:
    """SHA-256 of a file's content, or of its bytes [start, end), as 64 hex digits. Raises UserError for a pipe or a
    device."""
    with open_regular_file(path) as file:
        if part is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest, left = hashlib.sha256(), part[1] - file.seek(part[0])
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        return digest.hexdigest()


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says, with its own hash added as `sha256`."""
    body = {key: value for key, value in values.items() if key != "sha256"}
    return {**body, "sha256": sha256_json(body)}


def has_valid_checksum(values: Any) -> bool:
    """Whether this is the content of a sealed manifest, as it was written."""
    return isinstance(values, dict) and add_checksum(values)["sha256"] == values.get("sha256")


def has_wrong_checksum(values: Mapping[str, Any]) -> bool:
    """Whether what was sealed is not as it was written. What was written before there were seals has none."""
    return "sha256" in values and not has_valid_checksum(values)


def sha256_json(value: Any) -> str:
    """SHA-256 of `value`'s canonical JSON (sorted keys, no spaces), as 64 hex digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_file_system_type(path: Path) -> str:
    """Type of the file system that holds `path` ("lustre", "ext4", …); "" where df(1) cannot tell."""
    try:
        command = ["df", "--output=fstype", os.fspath(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return (done.stdout.split() or [""])[-1]


@contextmanager
def translate_read_errors(path: str, *more: type[Exception]) -> Iterator[None]:
    """Raise UserError, naming the file, instead of the errors that reading an input may raise.

    Translates OSError (`data.unreadable_file` if the system refused, otherwise `data.damaged_file`) and errors of
    compressed data (`data.damaged_file`). Errors that say nothing about the file, such as a lack of memory or of a
    package, pass unchanged.

    Args:
        path: the file.
        more: further exceptions that mean a damaged file. h5py, for example, raises many kinds.
    """
    try:
        yield
    except (UserError, MemoryError, ImportError):
        raise
    except Exception as error:
        if not isinstance(error, (OSError, EOFError, zlib.error, *more)):
            raise
        raise_if_too_many_open_files(error)
        is_refused = isinstance(error, OSError) and error.errno is not None
        code = "data.unreadable_file" if is_refused else "data.damaged_file"
        raise UserError(code, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


MAX_OPEN_FILES = 1 << 16
"""Upper bound on open files of a process: Linux maps no more files into memory (vm.max_map_count)."""


def raise_open_file_limit() -> None:
    """Raise this process's soft limit on open files: a job inherits 1,024 of a login node, too few for many shards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
