"""Write Markdown tables to benchmarks/results/, with a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with these cells."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_table(
    name: str,
    title: str,
    note: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *further_tables: tuple[Sequence[str], Sequence[Sequence[str]]],
) -> None:
    """Write a page with one or more tables to benchmarks/results/NAME.md, and print the page.

    Args:
        name: name of the file without `.md`.
        title: heading of the page.
        note: paragraph above the table. A description of this machine is appended.
        header: titles of the columns.
        rows: cells of the table.
        further_tables: header and rows of the tables below the first one. Tables without rows are left out.
    """
    machine = f"{os.cpu_count()} cores, Linux {platform.machine()}, Python {platform.python_version()}."
    text = f"# {title}\n\n{note} {machine}\n\n{format_table(header, rows)}"
    text += "".join(f"\n{format_table(*table)}" for table in further_tables if table[1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
