"""Check that files and folders belong to this user before Sluice executes, empties or deletes them.

Jobs execute files of the run directory: its `code/`, the pickles of submitit in `jobs/`, the filter that `prepare`
writes to `data/`, and the shell lines `site.setup` and `publish.run` of its config. A user who can write these files
can run commands as the owner of the jobs. Every command that executes files of a run therefore first checks two things:
the run belongs to the user of the command, even if this user is root, and no other user can write to the run. Commands
that only read (status, report, logs, verify) work on the runs of all users, because they do not use the run's code.

Checking a path is not enough. Before the path is used, a user who may write to a parent folder can replace it. Files
and folders are therefore opened first, never through a symbolic link, and the open descriptor is checked.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from pipeline.base.errors import ExitCode, UserError

_EXECUTED_DATA_FILES = ("prepare.json", "filter.py", "chat.json")
"""Files that `prepare` writes to the data folder, with content that later stages execute: the filter, the chat
template, and prepare.json with the hashes of both."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
"""The mode bits that allow other users to write."""


def check_run_ownership(run_dir: Path) -> None:
    """Raise UserError if another user owns, or may write to, a file that the run in directory `run_dir` executes."""
    # `code` of a sweep point is a link into the directory of the sweep
    code_parent = (run_dir / "code").resolve().parent
    for path, is_reachable in _list_executed_paths(run_dir, code_parent):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if status.st_uid != os.geteuid():
            raise UserError(
                "run.foreign_owner",
                f"{path} belongs to {_format_user(status.st_uid)}, but its content would be executed as "
                f"{_format_user(os.geteuid())}. Create your own run with another run.name or run.root. The commands "
                "status, report, logs and verify can read this run",
            )
        if is_reachable and status.st_mode & _OTHERS_WRITE:
            raise UserError(
                "run.writable_by_others",
                f"{path} (of {_format_user(status.st_uid)}, mode {stat.S_IMODE(status.st_mode):o}) can be written by "
                "other users, but its content is executed: check that nobody has changed it, then run: "
                f"chmod -R go-w {shlex.quote(str(code_parent))}",
            )


def _list_executed_paths(run_dir: Path, code_parent: Path) -> Iterator[tuple[Path, bool]]:
    """Yield pairs: a path with content that a run executes, and whether other users can reach the path.

    Other users cannot reach the content of a folder that they may not enter (mode x).

    Args:
        run_dir: the run directory.
        code_parent: the run directory that contains `code/`. For a point of a sweep, this is the directory of the
            sweep.
    """
    is_reachable = False
    for parent in dict.fromkeys((run_dir, code_parent)):
        yield parent, True
        is_reachable = bool(parent.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH))
        jobs = parent / "jobs"
        files = (parent / "config.yaml", parent / "changes.jsonl", *jobs.glob("*/*.pkl"), *jobs.glob("*/*.sh"))
        yield from ((path, is_reachable) for path in (jobs, *jobs.glob("*/"), *files))
        data = parent / "data"
        yield data, is_reachable
        for name in _EXECUTED_DATA_FILES:
            for path in (data / name, *data.glob(f"*/{name}")):
                yield path.parent, is_reachable  # each source of a mixture has its own folder in `data`
                # if `data` is a link, other users may reach the folder to which the link points
                yield path, is_reachable or data.is_symlink()
    # the last `parent` was `code_parent`, so `is_reachable` describes its content
    yield code_parent / "code", is_reachable
    for folder, folder_names, file_names in os.walk(code_parent / "code") if is_reachable else ():
        yield from ((Path(folder, name), True) for name in (*folder_names, *file_names))


@contextmanager
def open_own_folder(path: Path) -> Iterator[Path]:
    """Open the folder `path` and yield a path through its descriptor (:func:`path_through_fd`).

    Raises UserError if `path` is a symbolic link or not a folder, or if another user owns or may write to the folder.
    """
    fd = _open_without_links(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with path_through_fd(fd, path) as fd_path:
            _check_owner_and_mode(path, os.fstat(fd))
            yield fd_path
    finally:
        os.close(fd)


@contextmanager
def path_through_fd(fd: int, path: Path) -> Iterator[Path]:
    """Yield a path through the open descriptor `fd`. The yielded path stays valid if `path` is renamed or replaced.

    Errors raised in the block name `path` instead of the yielded path.

    Args:
        fd: the descriptor of an open file or folder.
        path: the path with which the file or folder was opened.
    """
    fd_path = Path(f"/proc/self/fd/{fd}")
    try:
        yield fd_path
    except UserError as error:
        error.args = (str(error).replace(str(fd_path), str(path)),)
        raise
    except OSError as error:
        for attribute in ("filename", "filename2"):
            if isinstance(name := getattr(error, attribute), str | os.PathLike):
                setattr(error, attribute, os.fspath(name).replace(str(fd_path), str(path), 1))
        raise


def check_own_folder(path: Path) -> None:
    """Raise UserError as :func:`open_own_folder` does."""
    with open_own_folder(path):
        pass


def open_own_file(path: Path) -> BufferedReader:
    """Open the file `path` for reading.

    Raises UserError if `path` is a symbolic link or not a regular file, or if another user owns or may write to the
    file.
    """
    fd = _open_without_links(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UserError("storage.not_a_file", f"{path} is not a regular file: remove it")
        _check_owner_and_mode(path, status)
        return os.fdopen(fd, "rb")
    except BaseException:  # also Ctrl-C, because nothing else closes the descriptor
        os.close(fd)
        raise


def describe_replacement_risk(path: Path) -> str | None:
    """Return a warning if other users can rename or replace `path` or one of its parents; None if they cannot.

    `path` need not exist.
    """
    unsafe_folders = find_unsafe_ancestors(path)
    if not unsafe_folders:
        return None
    reasons = "; ".join(f"{folder} {reason}" for folder, reason in unsafe_folders)
    return (
        f"warning: other users can replace {path}, and your jobs would execute their files: {reasons}. "
        "Choose another run.root, or ask the owner of a folder without a sticky bit to set it (chmod +t)"
    )


def find_unsafe_ancestors(path: Path) -> list[tuple[Path, str]]:
    """Return the parents of `path` in which other users can rename this user's files, the nearest first, with reasons.

    These are folders that belong to another user, except root, and folders without a sticky bit to which other users
    may write.
    """
    unsafe_folders = []
    for folder in Path(os.path.realpath(path)).parents:
        try:
            status = folder.stat()
        except FileNotFoundError:
            continue
        if status.st_uid not in (0, os.geteuid()):
            unsafe_folders.append((folder, f"belongs to {_format_user(status.st_uid)}"))
        elif _is_writable_by_others(status) and not status.st_mode & stat.S_ISVTX:
            writers = "all users" if status.st_mode & stat.S_IWOTH else f"group {_format_group(status.st_gid)}"
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            unsafe_folders.append((folder, f"can be written by {writers} and has no sticky bit (mode {mode})"))
    return unsafe_folders


def _is_writable_by_others(status: os.stat_result) -> bool:
    """Return whether another user may write to a folder with this status.

    A group is ignored if it is the private group of this user: same name and gid, and no other members. A group of root
    is never ignored, and neither is a group if the user or the group has no name.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    is_private = user.pw_uid != 0 and user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return not (is_private and {*group.gr_mem} <= {user.pw_name})


def make_ownership_script(folders: Iterable[str]) -> str:
    """Return lines of bash that end a job unless its user owns `folders` and no other user can write to them.

    In these lines, `stat` prints the owner's uid in decimal and the mode in hexadecimal. The mode of a folder has the
    first digit 4. 0x12 are the write bits of group and others, and 0x9 are the execute bits of group and others.

    Args:
        folders: the folders, quoted for the shell. The first folder contains the other folders. If other users may not
            enter the first folder, the modes of the other folders are not checked.
    """
    return f"""\
# Another user may have replaced the run while the job was pending. Check that you still own the code, and that nobody
# else can write to it. The subshell keeps the variables local. %f prints the type and mode in hexadecimal: 4… is a
# folder, 0x12 the permissions of group and others to write, and 0x9 their permissions to enter the folder.
# If they cannot enter the first folder, their permissions in the other folders do not matter.
(
  closed=
  for folder in {" ".join(folders)}; do
    owner_and_mode=$(stat -c '%u %f' -- "$folder" 2>&1) || :
    if [[ $owner_and_mode != "$EUID 4"* ]] || ((!closed && 0x${{owner_and_mode#* }} & 0x12)); then
      echo "error: $folder must belong to you, and no other user may write to it: nothing in it was run" >&2
      exit {int(ExitCode.USER_ERROR)}
    fi
    closed=${{closed:-$(((0x${{owner_and_mode#* }} & 0x9) == 0))}}
  done
) || exit"""


def _open_without_links(path: Path, flags: int) -> int:
    """Open `path` and return the descriptor.

    Raises UserError if `path` is a symbolic link or, with O_DIRECTORY, not a folder.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not os.path.lexists(path):
            raise
        problem = "a symbolic link" if path.is_symlink() else "not a folder"
        raise UserError("run.foreign_file", f"{path} is {problem}: remove it") from error


def _check_owner_and_mode(path: Path, status: os.stat_result) -> None:
    """Raise UserError if another user owns or may write to `path`.

    Args:
        path: a file or folder.
        status: the result of fstat for the open file or folder.
    """
    if status.st_uid != os.geteuid():
        raise UserError(
            "run.foreign_owner",
            f"{path} belongs to {_format_user(status.st_uid)}, not to {_format_user(os.geteuid())}: "
            "choose another name or folder",
        )
    if status.st_mode & _OTHERS_WRITE:
        raise UserError(
            "run.writable_by_others",
            f"{path} (mode {stat.S_IMODE(status.st_mode):o}) can be written by other users: remove it, or check that "
            f"nobody has changed it, then run: chmod -R go-w {shlex.quote(str(path))}",
        )


def _format_group(gid: int) -> str:
    """Return the name and ID of a group; only the ID if the group has no name."""
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def _format_user(uid: int) -> str:
    """Return the name and ID of a user; only the ID if the user has no name."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def read_umask() -> int:
    """Return the umask of this process. Other threads must not create files during the call."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def apply_umask(tree: Path, umask: int) -> None:
    """Set the modes of all files and folders in `tree` as if they had been created with `umask`.

    Executable files stay executable, and folders keep the setgid bit. Symbolic links are left as they are.
    """
    for folder, _, files in os.walk(tree):
        os.chmod(folder, os.stat(folder).st_mode & stat.S_ISGID | 0o777 & ~umask)
        for path in (Path(folder, name) for name in files if not os.path.islink(Path(folder, name))):
            path.chmod((0o777 if path.stat().st_mode & stat.S_IXUSR else 0o666) & ~umask)
