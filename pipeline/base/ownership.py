"""Whose a file, a folder or a run directory is: what we execute, empty or delete must be our own.

A path proves nothing: between a check of the path and its use, whoever may write a folder above can put something else
there. So files and folders are opened first, never through a link, and the descriptor is checked.

Jobs run a run's `code/`, read the pickles that submitit leaves in `jobs/`, import the filter that `prepare` leaves in
`data/`, and their shells run the lines of `site.setup` and `publish.run` in its config. Whoever could write there could
do what we can. So everything that executes a run asks first: is it ours (root's is root's), and can nobody else write
to it?
What only reads (status, report, logs, verify) works on anybody's run, and with the code that was started.
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

_PREPARED = ("prepare.json", "filter.py", "chat.json")
"""What `prepare` leaves in the data folder and later stages execute: the filter, with its hash, and a chat template."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_run_ownership(run: Path) -> None:
    """Raise UserError where anybody else may have written what the run in directory `run` executes."""
    home = (run / "code").resolve().parent  # that of a point of a sweep is the sweep's
    for path, reachable in _executed(run, home):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if found.st_uid != os.geteuid():
            raise UserError(
                "run.foreign_owner",
                f"{path} belongs to {_user(found.st_uid)}; what is in it would run as {_user(os.geteuid())}. Make a "
                "run of your own, with another run.name or run.root; status, report, logs and verify can read this one",
            )
        if reachable and found.st_mode & _OTHERS_WRITE:
            raise UserError(
                "run.writable_by_others",
                f"{path} (of {_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):o}) may be written by others, "
                "and what is in it is executed: look whether it is as you left it, then: chmod -R go-w "
                + shlex.quote(str(home)),
            )


def _executed(run: Path, home: Path) -> Iterator[tuple[Path, bool]]:
    """What to look at, and whether others can reach it: what is in a folder that is closed to them they cannot."""
    reachable = False
    for top in dict.fromkeys((run, home)):
        yield top, True
        reachable = bool(top.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH))
        jobs = top / "jobs"
        read = (top / "config.yaml", top / "changes.jsonl", *jobs.glob("*/*.pkl"), *jobs.glob("*/*.sh"))
        yield from ((path, reachable) for path in (jobs, *jobs.glob("*/"), *read))
        data = top / "data"
        yield data, reachable
        for path in (path for name in _PREPARED for path in (data / name, *data.glob(f"*/{name}"))):
            yield path.parent, reachable  # of a mixture, each source has a folder of its own in `data`
            yield path, reachable or data.is_symlink()
    yield home / "code", reachable
    for folder, names, files in os.walk(home / "code") if reachable else ():
        yield from ((Path(folder, name), True) for name in (*names, *files))


@contextmanager
def open_own_folder(path: Path) -> Iterator[Path]:
    """Open the folder `path`; yield a path that leads to this very folder, as `held_open` does.

    Raises UserError if `path` is a link or not a folder, does not belong to us, or may be written by others.
    """
    fd = _open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with path_through_fd(fd, path) as held:
            _require_own(path, os.fstat(fd))
            yield held
    finally:
        os.close(fd)


@contextmanager
def path_through_fd(fd: int, path: Path) -> Iterator[Path]:
    """Yield a path that leads to what is open as `fd`, even if `path`, by which it was opened, is renamed or replaced.

    Errors that are raised in the block name `path` again.
    """
    held = Path(f"/proc/self/fd/{fd}")
    try:
        yield held
    except UserError as error:
        error.args = (str(error).replace(str(held), str(path)),)
        raise
    except OSError as error:
        for name in ("filename", "filename2"):
            if isinstance(found := getattr(error, name), str | os.PathLike):
                setattr(error, name, os.fspath(found).replace(str(held), str(path), 1))
        raise


def check_own_folder(path: Path) -> None:
    """Raise UserError as :func:`open_own_folder` does."""
    with open_own_folder(path):
        pass


def open_own_file(path: Path) -> BufferedReader:
    """Open the file `path` to read it.

    Raises UserError if `path` is a link or not an ordinary file, does not belong to us, or may be written by others.
    """
    fd = _open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UserError("storage.not_a_file", f"{path} is not an ordinary file: remove it")
        _require_own(path, found)
        return os.fdopen(fd, "rb")
    except BaseException:  # also Ctrl-C: nothing else closes the descriptor; always raised again
        os.close(fd)
        raise


def describe_replacement_risk(path: Path) -> str | None:
    """Return a warning if others can rename or replace `path`, or a folder above it; None if they cannot.

    `path` need not exist.
    """
    found = find_unsafe_ancestors(path)
    if not found:
        return None
    reasons = "; ".join(f"{folder} {reason}" for folder, reason in found)
    return (
        f"warning: others can put something else in the place of {path}, and your jobs would execute it: {reasons}. "
        "Choose another run.root, or ask the owner of a folder without a sticky bit to set it (chmod +t)"
    )


def find_unsafe_ancestors(path: Path) -> list[tuple[Path, str]]:
    """Return the folders above `path`, the nearest first, in which others may rename what is not theirs, and why.

    These are folders that belong to neither root nor us, and those that others may write and that have no sticky bit.
    """
    unsafe = []
    for folder in Path(os.path.realpath(path)).parents:
        try:
            found = folder.stat()
        except FileNotFoundError:
            continue
        if found.st_uid not in (0, os.geteuid()):
            unsafe.append((folder, f"belongs to {_user(found.st_uid)}"))
        elif _others_write(found) and not found.st_mode & stat.S_ISVTX:
            who = "everybody" if found.st_mode & stat.S_IWOTH else f"group {_group(found.st_gid)}"
            mode = f"{stat.S_IMODE(found.st_mode):o}"
            unsafe.append((folder, f"may be written by {who} and has no sticky bit (mode {mode})"))
    return unsafe


def _others_write(found: os.stat_result) -> bool:
    """Whether anybody else may write. A group of our name that has no other members is our own."""
    if found.st_mode & stat.S_IWOTH:
        return True
    if not found.st_mode & stat.S_IWGRP:
        return False
    try:
        us, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(found.st_gid)
    except KeyError:
        return True
    is_ours = us.pw_uid != 0 and us.pw_gid == group.gr_gid and us.pw_name == group.gr_name
    return not (is_ours and {*group.gr_mem} <= {us.pw_name})


def make_ownership_script(folders: Iterable[str]) -> str:
    """Return lines of bash that end a job unless `folders`, words of the shell, are ours and others cannot write them.

    The first one contains the others: if it is closed to others, they cannot reach these, whatever their modes are.
    """
    return f"""\
# another user may have replaced the run while the job waited: the code that runs must still be yours
( # a subshell, so that its variables do not remain set
  closed=
  for folder in {" ".join(folders)}; do
    found=$(stat -c '%u %f' -- "$folder" 2>&1) || :
    if [[ $found != "$EUID 4"* ]] || ((!closed && 0x${{found#* }} & 0x12)); then
      echo "error: $folder must be a folder of your own that others cannot write: nothing in it was run" >&2
      exit {int(ExitCode.USER_ERROR)}
    fi
    closed=${{closed:-$(((0x${{found#* }} & 0x9) == 0))}}
  done
) || exit"""


def _open(path: Path, flags: int) -> int:
    """Open what `path` itself is. Raises UserError for a link and, with O_DIRECTORY, for anything but a folder."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not os.path.lexists(path):
            raise
        what = "a symbolic link" if path.is_symlink() else "not a folder"
        raise UserError("run.foreign_file", f"{path} is {what}: remove it") from error


def _require_own(path: Path, found: os.stat_result) -> None:
    """Raise UserError if what was found at `path` does not belong to us, or may be written by others."""
    if found.st_uid != os.geteuid():
        raise UserError(
            "run.foreign_owner",
            f"{path} belongs to {_user(found.st_uid)}, not to {_user(os.geteuid())}: choose another name or folder",
        )
    if found.st_mode & _OTHERS_WRITE:
        raise UserError(
            "run.writable_by_others",
            f"{path} (mode {stat.S_IMODE(found.st_mode):o}) may be written by others: remove it, or check that it is "
            f"as you left it, then: chmod -R go-w {shlex.quote(str(path))}",
        )


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"gid {gid}"


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def read_umask() -> int:
    """Return the umask of this process. Other threads must not create files meanwhile."""
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def apply_umask(tree: Path, umask: int) -> None:
    """Give everything in `tree` the modes that new files have under `umask`; executables stay executable."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, os.stat(folder).st_mode & stat.S_ISGID | 0o777 & ~umask)
        for path in (Path(folder, name) for name in files):
            path.chmod((0o777 if path.stat().st_mode & stat.S_IXUSR else 0o666) & ~umask)
