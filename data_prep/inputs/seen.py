"""What `prepare` saw of the inputs and of its own code, and whether it is still so; light enough for a login node."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pipeline.base.files import sha256_file
from pipeline.data.manifest import SHARDS

PACKAGE = Path(__file__).resolve().parent.parent
"""The sources that shape the shards' bytes."""


def unit_path(data_dir: Path, unit: int) -> Path:
    """The manifest of a work unit."""
    return data_dir / SHARDS / f"unit-{unit:05d}.json"


def code_sha256(package: Path) -> str:
    """SHA-256 over names and contents of the sources in folder `package` and below, as 64 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package).as_posix()}\n{sha256_file(path)}\n".encode())
    return digest.hexdigest()


def input_problem(path: str, size: int, mtime_ns: int) -> str | None:
    """How an input differs from what `prepare` saw (its size, its time in ns), None when it does not."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return f"input {path} is gone since it was prepared"
    if (found.st_size, found.st_mtime_ns) != (size, mtime_ns):
        return f"input {path} has changed since it was prepared"
    return None
