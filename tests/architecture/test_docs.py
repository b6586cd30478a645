"""Tests that links and error codes in the documentation exist, and that the README stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.imports import ROOT, list_modules

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ERROR_CODE = re.compile(r"error\[([a-z]+\.[a-z_]+)\]")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


def list_anchors(page: Path) -> set[str]:
    """Return the anchors that a Markdown renderer creates for the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_an_existing_file_and_heading(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in list_anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_readme_has_at_most_200_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


def test_error_codes_in_the_documentation_exist() -> None:
    documented_codes = {code for page in PAGES for code in ERROR_CODE.findall(page.read_text())}
    source_code = "\n".join(path.read_text() for path in list_modules().values())
    assert {code for code in documented_codes if f'"{code}"' not in source_code} == set()
