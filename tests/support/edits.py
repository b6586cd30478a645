"""Replace text in a file, for example in the copy of the code that a run has."""

from __future__ import annotations

from pathlib import Path


def replace_in_file(path: Path, old: str, new: str) -> None:
    """Replace the only occurrence of `old` in a file.

    Raises:
        AssertionError: `old` does not occur exactly once. Without this check, a test could run
                unchanged code without notice.
    """
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} occurrences of {old!r} instead of one"
    path.write_text(text.replace(old, new))
