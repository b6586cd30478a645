"""Whose a run directory is: what is executed from it must be our own.

Jobs run a run's `code/`, read the pickles that submitit leaves in `jobs/`, and their shells run the lines of
`site.setup` in its config. Whoever could write there could do what we can. So everything that executes a run asks
first: is it ours (root's is root's), and can nobody else write to it?
What only reads (status, report, logs, verify) works on anybody's run, and with the code that was started.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.base.errors import UserError


def refuse_foreign(run: Path) -> None:
    """Raise UserError where anybody else may have written what the run in directory `run` executes."""
    home = (run / "code").resolve().parent  # that of a point of a sweep is the sweep's
    for path, reachable in _executed(run, home):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if found.st_uid != os.geteuid():
            raise UserError(
                f"{path} belongs to {_user(found.st_uid)}; what is in it would run as {_user(os.geteuid())}. Make a "
                "run of your own, with another run.name or run.root; status, report, logs and verify can read this one"
            )
        if reachable and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UserError(
                f"{path} (of {_user(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):o}) may be written by others, "
                "and what is in it is executed: look whether it is as you left it, then: chmod -R go-w "
                + shlex.quote(str(home))
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
    yield home / "code", reachable
    for folder, names, files in os.walk(home / "code") if reachable else ():
        yield from ((Path(folder, name), True) for name in (*names, *files))


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def normalise(tree: Path, umask: int) -> None:
    """Give everything in `tree` the modes that new files have under `umask`; executables stay executable."""
    for folder, _, files in os.walk(tree):
        os.chmod(folder, os.stat(folder).st_mode & stat.S_ISGID | 0o777 & ~umask)
        for path in (Path(folder, name) for name in files):
            path.chmod((0o777 if path.stat().st_mode & stat.S_IXUSR else 0o666) & ~umask)
