"""How a process of Sluice ends: the exit codes, and the errors that a person can mend.

Ranks (`python -m pipeline`) leave with one of these codes; the supervisor (`python -m slurm`) reads the
code, decides the cause and acts. A :class:`UserError` is a mistake or a condition outside the program (a
typo, a missing file, a full disk): it is shown as one clear message without a traceback. Anything else
that escapes is a bug and is shown with its traceback.
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

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def make_printable(text: str) -> str:
    """What a terminal may get of a text that anybody may have written: control characters, which could clear the
    screen, fake what stands there or turn its direction, become `?`; tabs and line ends stay."""
    return _CONTROL.sub("?", text)


MAX_PROBLEMS_SHOWN = 20
"""The number of problems that one message lists."""


def limit_lines(lines: Sequence[str], most: int = MAX_PROBLEMS_SHOWN, uncounted: int = 0) -> list[str]:
    """Return the first `most` of `lines`, and `and N more` if there are more, or `uncounted` others."""
    more = max(0, len(lines) - most) + uncounted
    return [*lines[:most], *([f"and {more:,} more"] if more else [])]


class ExitCode(IntEnum):
    """Exit codes of ranks and supervisors. Values are stable: scripts may test them."""

    DONE = 0
    """The stage finished and its outputs validate."""
    CRASHED = 1
    """An unexpected exception; its traceback is in the log and in `jobs/STAGE/error-rank-N.json`."""
    USER_ERROR = 2
    """A wrong config, command line or missing source: the message says how to mend it."""
    BAD_INPUT = 20
    """What an earlier stage left does not validate (damaged or missing files)."""
    STORAGE = 21
    """The file system refused: full, read-only, over quota."""
    OUT_OF_MEMORY = 22
    """Host or device memory ran out."""
    BAD_CHECKPOINT = 23
    """There are checkpoints, and none of them is intact: nothing was started from zero in silence."""
    NON_FINITE = 24
    """The loss or the gradient is not a finite number."""
    HANG = 25
    """A rank made no progress for too long, or did not leave when it was asked to."""
    BAD_NODE = 26
    """A node failed the check at the start; the message names it."""
    PREEMPTED = 71
    """Slurm took the nodes for another job (a supervisor's code; the same holds for the next three)."""
    TIME_LIMIT = 72
    """The job's time limit came."""
    NODE_FAILURE = 73
    """A node died under the job."""
    CANCELLED = 74
    """Cancelled by a person: nothing goes on by itself."""
    STOPPED = 75
    """Stopped on request at a step boundary, everything saved: run again to go on (EX_TEMPFAIL)."""
    PEER_LOST = 76
    """Another rank went away; this rank has no fault of its own to report."""
    REQUEUED = 77
    """Slurm requeued the job, and nothing shows a preemption: somebody asked for it (`scontrol requeue`)."""


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
        return type(self), (self.code, str(self))


@dataclass(frozen=True)
class ConfigProblem:
    """One thing that is wrong with a config."""

    code: str
    """As :attr:`UserError.code`."""
    message: str
    """The line that a user reads: where, key, value, what is wrong and what to do."""
    key: str = ""
    """The dotted key; "" if the problem concerns no single key."""
    value: Any = None
    """The value as the message shows it, without secrets; None if the problem concerns no single value."""
    where: str = ""
    """`FILE:LINE` of the key, the file alone, or `command line`."""

    @property
    def line(self) -> int | None:
        """The line of the key in its file; None if the key has no line."""
        number = self.where.rpartition(":")[2]
        return int(number) if number.isdecimal() and ":" in self.where else None


class ConfigError(UserError):
    """A config that cannot be used. The message lists the problems, one per line.

    Args:
        code: the code of the first problem.
        message: see :class:`UserError`.
        problems: every problem; by default the one that `code` and `message` describe.
    """

    def __init__(self, code: str, message: str, problems: Sequence[ConfigProblem] = ()) -> None:
        super().__init__(code, message)
        self.problems = tuple(problems) or (ConfigProblem(code, message),)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, str(self), self.problems)


class InputError(UserError):
    """Outputs of an earlier stage are missing or damaged; the message names the file."""

    exit_code = ExitCode.BAD_INPUT


class CheckpointError(UserError):
    """No intact checkpoint exists where one is expected."""

    exit_code = ExitCode.BAD_CHECKPOINT


class StorageError(UserError):
    """The file system refused an operation; the message names the path and the reason."""

    exit_code = ExitCode.STORAGE


class LostMountError(StorageError):
    """This node lost its connection to a parallel file system, or its disk failed; other nodes may be healthy."""

    exit_code = ExitCode.BAD_NODE


class NonFiniteError(UserError):
    """A loss or gradient that is not a finite number."""

    exit_code = ExitCode.NON_FINITE


class NodeError(UserError):
    """A node cannot be used; the message names it and the check that it failed.

    Args:
        code, message: see :class:`UserError`.
        host: the node, if it is not this one.
    """

    exit_code = ExitCode.BAD_NODE

    def __init__(self, code: str, message: str, host: str | None = None) -> None:
        super().__init__(code, message)
        self.host = host

    def __reduce__(self) -> tuple[Any, ...]:
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
    errno.ELOOP: ("storage.invalid_path", "links lead in a circle: remove the one that is in the way"),
    errno.EEXIST: ("storage.invalid_path", "something else is in the way: remove it, or choose another `run.name`"),
    errno.EFBIG: (
        "storage.file_too_large",
        "the file would be larger than the file system or the limit of this process (`ulimit -f`) allows: raise the "
        "limit, or have smaller files (`data.shard_tokens`)",
    ),
    errno.ENOTEMPTY: (
        "storage.busy",
        "the folder is not empty; maybe another process writes to it: try again, or remove it",
    ),
    errno.EBUSY: ("storage.busy", "another process uses it: try again"),
    errno.EISDIR: ("storage.invalid_path", "a folder is in the way: remove it"),
    errno.EMFILE: (
        "storage.too_many_open_files",
        "too many files are open: raise the limit (`ulimit -n`), or have fewer, larger ones",
    ),
    errno.ENOMEM: (
        "storage.too_many_mapped_files",
        "no memory is left, or too many files are mapped (vm.max_map_count): have fewer, larger ones",
    ),
    errno.ENFILE: (
        "storage.too_many_open_files",
        "too many files are open on this machine: try again later, or on another one",
    ),
    errno.EIO: ("storage.failed", "input/output error: the storage itself failed"),
    errno.ESTALE: (
        "storage.lost_mount",
        "stale file handle: the file system was remounted or the file removed by another node",
    ),
    errno.ENOTCONN: ("storage.lost_mount", "the file system's server is not connected"),
    errno.ESHUTDOWN: ("storage.lost_mount", "the file system's server has evicted this node"),
}
"""The error code and the message for each number of an error that a file system reports."""
LOST_MOUNT_ERRNOS = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN)
"""Numbers of errors on a node that lost its connection to a parallel file system."""


def raise_if_too_many_open_files(error: BaseException) -> None:
    """Raise StorageError where this process, or its machine, may open no more files: the file at hand is all right."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) or "Too many open files" in str(
        error
    ):  # h5py's
        limit = OSError(getattr(error, "errno", None) or errno.EMFILE, "", getattr(error, "filename", None))
        raise find_storage_error(limit) or error from error


def find_storage_error(error: BaseException, path: str | Path | None = None) -> StorageError | None:
    """The :class:`StorageError` behind `error` (or behind what caused it), None if it is something else.

    `path` is named where the system's own error has no file name. What merely happened before `error` is not to
    blame for it, but for torch's file writer: closing, it raises anew and names no cause.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StorageError):
            return seen
        if isinstance(seen, OSError) and seen.errno in _STORAGE_PROBLEMS:
            name = seen.filename or path
            if name or seen.errno not in (errno.ENOTCONN, errno.ESHUTDOWN):  # sockets' errors, too, but without a name
                kind = LostMountError if seen.errno in LOST_MOUNT_ERRNOS else StorageError
                code, problem = _STORAGE_PROBLEMS[seen.errno]
                return kind(code, f"cannot use {name or 'a file of the run'}: {problem}")
        if isinstance(seen, shutil.Error) and isinstance(seen.args[0], list):  # copytree: all files' errors, as text
            for source, copy, reason in seen.args[0]:
                number = re.match(r"\[Errno (\d+)\]", reason)
                if number and int(number[1]) in _STORAGE_PROBLEMS:
                    code, problem = _STORAGE_PROBLEMS[int(number[1])]
                    return StorageError(code, f"cannot copy {source} to {copy}: {problem}")
        seen = seen.__context__ if "inline_container" in str(seen) else seen.__cause__
    return None


def print_error(error: Exception) -> int:
    """Say on stderr what ends this process, a bug with its traceback; the exit code."""
    found = error if isinstance(error, UserError) else find_storage_error(error)
    print(format_error(found) if found else "".join(traceback.format_exception(error)), file=sys.stderr)
    return found.exit_code if found else ExitCode.CRASHED
