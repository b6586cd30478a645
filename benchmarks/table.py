"""Markdown tables under benchmarks/results/, with what they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_table(name: str, title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table and write it to benchmarks/results/NAME.md."""
    where = f"{os.cpu_count()} cores, Linux {platform.machine()}, Python {platform.python_version()}."
    text = f"# {title}\n\n{note} {where}\n\n{table(header, rows)}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
