"""The documentation is consistent: links lead somewhere, and the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.imports import ROOT, sources

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN_CODE = re.compile(r"error\[([a-z]+\.[a-z_]+)\]")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer makes of the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_error_codes_in_the_documentation_exist() -> None:
    shown = {code for page in PAGES for code in SHOWN_CODE.findall(page.read_text())}
    code = "\n".join(path.read_text() for path in sources().values())
    assert {one for one in shown if f'"{one}"' not in code} == set()
