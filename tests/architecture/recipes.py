"""The recipes of docs/development.md as data: which files each names, and what it says to write into them.

A recipe is a section `### Title` with a line `Files: …`, and for each edit a line that names the file, maybe where in
it (`above`, `below`, `instead of` a piece of text), and a block of code.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.imports import ROOT

_EDIT = re.compile(r"^`([\w/.]+)`(?:, (above|below|instead of) `([^`\n]+)`)?:\n\n```python\n(.*?)```$", re.M | re.S)


@dataclass(frozen=True)
class Recipe:
    """One recipe."""

    title: str
    files: frozenset[str]
    edits: tuple[tuple[str, str, str, str], ...]
    """File, `above`, `below`, `instead of` or "" (a new file), the text there, and what to write."""

    def apply(self, checkout: Path) -> None:
        """Do what it says, in a copy of the code."""
        for file, where, anchor, text in self.edits:
            path = checkout / file
            if not where:
                assert not path.exists(), f"{self.title}: {file} is there already"
                path.write_text(text)
                continue
            before = path.read_text()
            assert before.count(anchor) == 1, f"{self.title}: {file} has {before.count(anchor)} of: {anchor}"
            new = {"above": text + anchor, "below": f"{anchor}\n{text.rstrip()}", "instead of": text.rstrip("\n")}[
                where
            ]
            path.write_text(before.replace(anchor, new))


def recipes() -> dict[str, Recipe]:
    """All of them, by title."""
    text = (ROOT / "docs/development.md").read_text()
    found = {}
    for section in re.split(r"^### ", text[text.index("## Recipes") :], flags=re.M)[1:]:
        title = section.splitlines()[0]
        (files,) = re.findall(r"^Files: (.*?)\.$", section, re.M | re.S)
        edits = tuple((m[1], m[2] or "", m[3] or "", m[4]) for m in _EDIT.finditer(section))
        assert len(edits) == section.count("```python\n"), f"{title}: an edit that is not understood"
        found[title] = Recipe(title, frozenset(re.findall(r"`([\w/.]+)`", files)), edits)
    return found


def checkout(folder: Path) -> Path:
    """A copy of the product to apply a recipe to."""
    folder.mkdir(exist_ok=True)
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("submit.py", "setup.py", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    return folder
