"""Exit codes, and the errors that a user can correct.

Ranks (`python -m pipeline`) exit with one of these codes. The supervisor (`python -m slurm`) reads the code, determines
the cause and decides what to do. A :class:`UserError` is a mistake of the user or a condition outside the program, such
as a typo, a missing file or a full disk. Users see one message without a traceback. Any other exception that ends the
process is a bug, and users see its traceback.
"""

from __future__ import annotations

import errno
import re
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar

_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def make_printable(text: str) -> str:
    """Return `text`, which may come from an untrusted source, with `?` in place of each control character.

    Control characters could clear the screen, overwrite its content or reverse the direction of text. Tabs and line
    ends remain.
    """
    return _CONTROL_CHARACTERS.sub("?", text)


MAX_PROBLEMS_SHOWN = 20
"""The number of problems that one message lists."""


def limit_lines(lines: Sequence[str], max_lines: int = MAX_PROBLEMS_SHOWN, other_count: int = 0) -> list[str]:
    """Return the first `max_lines` of `lines`, and the line `and N more` if lines were left out.

    `other_count` is the number of further lines that `lines` does not contain. N includes them.
    """
    omitted_count = max(0, len(lines) - max_lines) + other_count
    return [*lines[:max_lines], *([f"and {omitted_count:,} more"] if omitted_count else [])]


class ExitCode(IntEnum):
    """Exit codes of ranks and supervisors. Values are stable: scripts may test them."""

    DONE = 0
    """The stage finished and its outputs validate."""
    CRASHED = 1
    """An unexpected exception; its traceback is in the log and in `jobs/STAGE/error-rank-N.json`."""
    USER_ERROR = 2
    """An invalid config or command line, or a missing source. The message says how to correct it."""
    BAD_INPUT = 20
    """The outputs of an earlier stage are damaged or missing."""
    STORAGE = 21
    """The file system refused an operation: it is full, read-only or over quota."""
    OUT_OF_MEMORY = 22
    """Host or device memory ran out."""
    BAD_CHECKPOINT = 23
    """Checkpoints exist, but none is intact. The run does not silently start from scratch."""
    NON_FINITE = 24
    """The loss or the gradient is not a finite number."""
    HANG = 25
    """A rank made no progress for too long, or did not exit after a request to stop."""
    BAD_NODE = 26
    """A node failed the check at the start of the stage. The message names the node and the check."""
    PREEMPTED = 71
    """Slurm gave the nodes to another job. Only supervisors exit with 71 to 74, and with 77."""
    TIME_LIMIT = 72
    """The job reached its time limit."""
    NODE_FAILURE = 73
    """A node failed while the job was running."""
    CANCELLED = 74
    """A user cancelled the job. Nothing restarts it until `resume`."""
    STOPPED = 75
    """The stage stopped on request at a step boundary and saved its state. Run it again to continue (EX_TEMPFAIL)."""
    PEER_LOST = 76
    """Another rank exited or lost its connection. This rank itself did not fail."""
    REQUEUED = 77
    """A user or an administrator requeued the job (`scontrol requeue`): Slurm reported no preemption."""


class UserError(Exception):
    """A condition that the user can correct; shown without a traceback.

    Args:
        code: a stable identifier, `area.problem`, such as `config.unknown_key`. Scripts and tests may rely on it.
        message: what is wrong, where (file, line, key, value), and what to do.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.USER_ERROR

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments with which pickle calls the constructor."""
        return type(self), (self.code, str(self))


@dataclass(frozen=True)
class ConfigProblem:
    """A problem of a config."""

    code: str
    """See :class:`UserError`."""
    message: str
    """The text that a user reads: location, key, value, what is wrong and what to do."""
    key: str = ""
    """The dotted key; "" if the problem concerns no single key."""
    value: Any = None
    """The value as the message shows it, without secrets; None if the problem concerns no single value."""
    where: str = ""
    """`FILE:LINE` of the key, the file alone, or `command line`."""

    @property
    def line(self) -> int | None:
        """The line number of the key in its file; None if `where` has no line number."""
        number = self.where.rpartition(":")[2]  # without a colon, all of `where`, perhaps a file name of digits
        return int(number) if number.isdecimal() and ":" in self.where else None


class ConfigError(UserError):
    """A config is invalid. The message lists the problems, one per line.

    Args:
        code: the code of the first problem.
        message: see :class:`UserError`.
        problems: every problem; by default the problem that `code` and `message` describe.
    """

    def __init__(self, code: str, message: str, problems: Sequence[ConfigProblem] = ()) -> None:
        super().__init__(code, message)
        self.problems = tuple(problems) or (ConfigProblem(code, message),)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments with which pickle calls the constructor."""
        return type(self), (self.code, str(self), self.problems)


class InputError(UserError):
    """Outputs of an earlier stage are missing or damaged; the message names the file."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(UserError):
    """An expected checkpoint is missing or damaged."""

    exit_code = ExitCode.BAD_CHECKPOINT


class StorageError(UserError):
    """The file system refused an operation; the message names the path and the reason."""

    exit_code = ExitCode.STORAGE


class LostMountError(StorageError):
    """This node lost its connection to a parallel file system, or its disk failed; other nodes may be healthy."""

    exit_code = ExitCode.BAD_NODE


class NonFiniteError(UserError):
    """A loss or a gradient is not a finite number."""

    exit_code = ExitCode.NON_FINITE


class NodeError(UserError):
    """A node cannot be used; the message names the node and the check that the node failed.

    Args:
        code, message: see :class:`UserError`.
        host: the node; None for the node of this process.
    """

    exit_code = ExitCode.BAD_NODE

    def __init__(self, code: str, message: str, host: str | None = None) -> None:
        super().__init__(code, message)
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the arguments with which pickle calls the constructor."""
        return type(self), (self.code, str(self), self.host)


class PeerLostError(UserError):
    """Other ranks exited or did not start."""

    exit_code = ExitCode.PEER_LOST


def format_error(error: UserError) -> str:
    """Return the line that a user sees: `error[config.unknown_key]: …`."""
    return f"error[{error.code}]: {error}"


_STORAGE_PROBLEMS = {
    errno.ENOSPC: ("storage.no_space", "no space is left on the device: free some, or choose another `run.root`"),
    errno.EDQUOT: ("storage.quota_exceeded", "the disk quota is used up: free some, or choose another `run.root`"),
    errno.EROFS: ("storage.read_only", "the file system is read-only: choose another `run.root`"),
    errno.EACCES: ("storage.permission_denied", "permission denied: check the owner and mode of the folder"),
    errno.EPERM: ("storage.permission_denied", "permission denied: check the owner and mode of the folder"),
    errno.ENOTDIR: ("storage.invalid_path", "a part of the path is a file, not a folder: check `run.root`"),
    errno.ENAMETOOLONG: (
        "storage.invalid_path",
        "the path is too long: choose a shorter `run.root` or `run.name`",
    ),
    errno.ELOOP: ("storage.invalid_path", "symbolic links form a loop: remove one of them"),
    errno.EEXIST: ("storage.invalid_path", "it already exists: remove it, or choose another `run.name`"),
    errno.EFBIG: (
        "storage.file_too_large",
        "the file would be larger than the file system or the limit of this process (`ulimit -f`) allows: raise the "
        "limit, or write smaller files (`data.shard_tokens`)",
    ),
    errno.ENOTEMPTY: (
        "storage.busy",
        "the folder is not empty, perhaps because another process writes to it: try again, or remove it",
    ),
    errno.EBUSY: ("storage.busy", "another process uses it: try again"),
    errno.EISDIR: ("storage.invalid_path", "it is a folder, but a file is needed: remove it"),
    errno.EMFILE: (
        "storage.too_many_open_files",
        "too many files are open: raise the limit (`ulimit -n`), or use fewer, larger files",
    ),
    errno.ENOMEM: (
        "storage.too_many_mapped_files",
        "no memory is left, or too many files are mapped (vm.max_map_count): use fewer, larger files",
    ),
    errno.ENFILE: (
        "storage.too_many_open_files",
        "too many files are open on this machine: try again later, or on another machine",
    ),
    errno.EIO: ("storage.failed", "input/output error: the storage itself failed"),
    errno.ESTALE: (
        "storage.lost_mount",
        "stale file handle: the file system was remounted, or another node removed the file",
    ),
    errno.ENOTCONN: ("storage.lost_mount", "the file system's server is not connected"),
    errno.ESHUTDOWN: ("storage.lost_mount", "the file system's server has evicted this node"),
}
"""The error code and the message for each errno of a file system."""
LOST_MOUNT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
"""Values of errno on a node that lost its connection to a parallel file system."""


def raise_if_too_many_open_files(error: BaseException) -> None:
    """Raise StorageError if `error` means that this process or its machine cannot open or map more files.

    Code that reads a file calls this function first if the file cannot be opened, so that it does not report the file
    as damaged.
    """
    error_number = getattr(error, "errno", None)
    is_h5py_limit = "Too many open files" in str(error)  # errors of h5py may have no errno
    if error_number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) or is_h5py_limit:
        # find_storage_error needs an errno, which errors of h5py may lack
        limit_error = OSError(error_number or errno.EMFILE, "", getattr(error, "filename", None))
        raise find_storage_error(limit_error) or error from error


def find_storage_error(error: BaseException, path: str | Path | None = None) -> StorageError | None:
    """Return a :class:`StorageError` for a failure of the file system; None if `error` is not such a failure.

    The function also examines the causes of `error` (`__cause__`). `__context__` is followed only for torch's file
    writer, which raises a new error without a cause when the writer is closed after a failed write.

    Args:
        error: the exception.
        path: the path to name in the message if the OSError has no file name. Give a path only if the error cannot come
            from a socket: sockets also raise ENOTCONN and ESHUTDOWN, and their errors have no file name.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, StorageError):
            return cause
        if isinstance(cause, OSError) and cause.errno in _STORAGE_PROBLEMS:
            name = cause.filename or path
            # without a name, ENOTCONN and ESHUTDOWN may be errors of a socket
            if name or cause.errno not in (errno.ENOTCONN, errno.ESHUTDOWN):
                error_class = LostMountError if cause.errno in LOST_MOUNT_ERRNOS else StorageError
                code, problem = _STORAGE_PROBLEMS[cause.errno]
                return error_class(code, f"cannot use {name or 'a file of the run'}: {problem}")
        if isinstance(cause, shutil.Error) and isinstance(cause.args[0], list):
            # shutil.copytree raises one error with the messages of all files as text
            for source, copy, reason in cause.args[0]:
                match = re.match(r"\[Errno (\d+)\]", reason)
                if match and int(match[1]) in _STORAGE_PROBLEMS:
                    code, problem = _STORAGE_PROBLEMS[int(match[1])]
                    return StorageError(code, f"cannot copy {source} to {copy}: {problem}")
        # messages of torch's file writer contain the name of its source file, inline_container.cc
        is_torch_writer = "inline_container" in str(cause)
        cause = cause.__context__ if is_torch_writer else cause.__cause__
    return None


def print_error(error: Exception) -> int:
    """Print the error that ends this process to stderr, and return the exit code.

    A UserError and a failure of the file system are printed as one line, other errors with their traceback.
    """
    user_error = error if isinstance(error, UserError) else find_storage_error(error)
    text = format_error(user_error) if user_error else "".join(traceback.format_exception(error))
    print(text, file=sys.stderr)
    return user_error.exit_code if user_error else ExitCode.CRASHED
