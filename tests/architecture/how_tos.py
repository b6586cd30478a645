"""Read the how-tos of CONTRIBUTING.md, and apply their edits to a copy of the code.

A how-to is a section `### Title` with a line `Files: …`. Each edit is a line that names a file, followed by a block of
code. The line may name a position in the file: `above`, `below` or `instead of` a piece of text.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.imports import ROOT

_EDIT = re.compile(r"^`([\w/.]+)`(?:, (above|below|instead of) `([^`\n]+)`)?:\n\n```python\n(.*?)```$", re.M | re.S)


@dataclass(frozen=True)
class Edit:
    """One edit of a file."""

    file: str
    position: str
    """Where to insert `text`: "above", "below" or "instead of" the anchor; "" for a new file."""
    anchor: str
    """A piece of text that the file contains exactly once; "" for a new file."""
    text: str
    """The code to insert."""


@dataclass(frozen=True)
class HowTo:
    """One how-to."""

    title: str
    files: frozenset[str]
    """The files that the line `Files:` names."""
    edits: tuple[Edit, ...]

    def apply(self, checkout: Path) -> None:
        """Apply the edits to a copy of the code in the folder `checkout`."""
        for edit in self.edits:
            path = checkout / edit.file
            if not edit.position:
                assert not path.exists(), f"{self.title}: {edit.file} already exists"
                path.write_text(edit.text)
                continue
            original_text = path.read_text()
            count = original_text.count(edit.anchor)
            assert count == 1, f"{self.title}: {edit.file} contains this {count} times: {edit.anchor}"
            replacement = {
                "above": edit.text + edit.anchor,
                "below": f"{edit.anchor}\n{edit.text.rstrip()}",
                "instead of": edit.text.rstrip("\n"),
            }[edit.position]
            path.write_text(original_text.replace(edit.anchor, replacement))


def read_how_tos() -> dict[str, HowTo]:
    """Return all how-tos by title."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    how_tos = {}
    for section in re.split(r"^### ", page[page.index("## How-tos") :], flags=re.M)[1:]:
        title = section.splitlines()[0]
        (files,) = re.findall(r"^Files: (.*?)\.$", section, re.M | re.S)
        edits = tuple(Edit(match[1], match[2] or "", match[3] or "", match[4]) for match in _EDIT.finditer(section))
        assert len(edits) == section.count("```python\n"), f"{title}: the format of an edit is wrong"
        how_tos[title] = HowTo(title, frozenset(re.findall(r"`([\w/.]+)`", files)), edits)
    return how_tos


def copy_code(folder: Path) -> Path:
    """Copy the code, without tests and documentation, into `folder`; return `folder`."""
    folder.mkdir(exist_ok=True)
    for name in ("cli", "slurm", "tracking", "planning", "pipeline", "data_prep", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("submit.py", "setup.py", "setup.cfg"):
        shutil.copy(ROOT / name, folder)
    return folder
