"""The working directory of commands: a copy, in the run, of the directory from which the run was submitted.

Like Sluice's own code (pipeline/run/code.py), the files are copied when the run is made. Later edits of the source
files do not affect the run, even if its jobs are still pending. `resume --update-code` copies the files again, and
keeps the files that the commands have written.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.base.ownership import apply_umask

IGNORE_FILE = ".sluiceignore"
DEFAULT_PATTERNS = (
    ".git", "__pycache__", "*.pyc", ".venv", "venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "node_modules",
    "*.egg-info",
)  # fmt: skip
"""Patterns of files and directories that are never copied."""
MAX_BYTES = 100 << 20
"""Largest total size of the copied files: 100 MiB."""
MAX_FILES = 20_000
_SHOWN_ENTRIES = 5
"""How many of the largest entries an error message names."""


def copy_working_dir(source: Path, target: Path, excluded: Sequence[Path], umask: int) -> None:
    """Copy the files of a directory, except those that `.sluiceignore` names. Existing files are replaced.

    Args:
        source: the directory to copy.
        target: where to copy its content. The directory may exist.
        excluded: directories that are not copied, such as that of all runs.
        umask: permission bits to remove from the copied files.

    Raises:
        UserError: if there are too many files, or they are too large.
    """
    check_working_dir(source, excluded)
    target.mkdir(exist_ok=True)
    for path in _list_files(source, excluded):
        copy = target / path.relative_to(source)
        _make_parents(copy, target)
        if copy.is_dir() and not copy.is_symlink():
            raise UserError(
                "work.is_directory",
                f"{path} is a file, but {copy} in the run is a directory. If the commands no longer need it, remove it",
            )
        copy.unlink(missing_ok=True)  # It may be a link.
        with suppress(FileNotFoundError):  # The file may have disappeared, for example a temporary file of an editor.
            shutil.copy2(path, copy, follow_symlinks=False)
    apply_umask(target, umask)


def _make_parents(path: Path, top: Path) -> None:
    """Make the parent directories of a path below `top`. Files and links in their place, which a command has made or
    an earlier copy contained, are removed: nothing may be written to the target of a link."""
    for folder in reversed(path.relative_to(top).parents[:-1]):
        if (top / folder).is_symlink() or (top / folder).is_file():
            (top / folder).unlink()
        (top / folder).mkdir(exist_ok=True)


def check_working_dir(source: Path, excluded: Sequence[Path]) -> None:
    """Raise UserError if a directory has too many files to be copied, or too large files."""
    sizes: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    for path in _list_files(source, excluded):
        entry = source / path.relative_to(source).parts[0]
        with suppress(FileNotFoundError):
            sizes[entry] = sizes.get(entry, 0) + path.lstat().st_size
        counts[entry] = counts.get(entry, 0) + 1
    total_bytes = sum(sizes.values())
    total_files = sum(counts.values())
    if total_bytes <= MAX_BYTES and total_files <= MAX_FILES:
        return
    measure = sizes if total_bytes > MAX_BYTES else counts
    largest = sorted(measure, key=lambda entry: measure[entry], reverse=True)[:_SHOWN_ENTRIES]
    shown = ", ".join(
        f"{entry.name} ({sizes.get(entry, 0) / 1e6:,.0f} MB, {counts[entry]:,} files)" for entry in largest
    )
    raise UserError(
        "work.too_large",
        f"{source} has {total_files:,} files with {total_bytes / 1e6:,.0f} MB, but at most {MAX_FILES:,} files with "
        f"{MAX_BYTES / 1e6:,.0f} MB are copied into a run. The largest are {shown}. Submit the run from another "
        f"directory, or list what the commands do not need in {source / IGNORE_FILE}, one pattern per line",
    )


def _read_patterns(source: Path) -> tuple[list[str], list[str]]:
    """Return the patterns of names, and those of paths relative to `source`, that `.sluiceignore` contains."""
    lines: list[str] = []
    file = source / IGNORE_FILE
    if file.is_file():
        lines = [line.strip() for line in file.read_text(errors="replace").splitlines()]
    patterns = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    for pattern in patterns:
        if pattern.startswith("!"):
            raise UserError("work.invalid_pattern", f"{file}: {pattern}: patterns with ! are not supported")
    names = [pattern for pattern in patterns if "/" not in pattern]
    paths = [pattern.lstrip("/") for pattern in patterns if "/" in pattern]
    return [*DEFAULT_PATTERNS, *names], paths


def _list_files(source: Path, excluded: Sequence[Path]) -> Iterator[Path]:
    """Yield the files and symbolic links of a directory that are copied."""
    names, paths = _read_patterns(source)
    excluded_paths = {Path(os.path.realpath(path)) for path in excluded}

    def is_ignored(path: Path) -> bool:
        relative = str(path.relative_to(source))
        return (
            any(fnmatch.fnmatchcase(path.name, pattern) for pattern in names)
            or any(fnmatch.fnmatchcase(relative, pattern) for pattern in paths)
            or Path(os.path.realpath(path)) in excluded_paths
        )

    def walk(folder: Path) -> Iterator[Path]:
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if is_ignored(path):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not (path / "events.jsonl").exists():  # Otherwise, it is another run.
                    yield from walk(path)
            elif entry.is_file() or entry.is_symlink():
                yield path

    yield from walk(source)
