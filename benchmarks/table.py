"""Write Markdown tables to benchmarks/results/, with a description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def write_table(name: str, title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table and write it to benchmarks/results/NAME.md."""
    machine = f"{os.cpu_count()} cores, Linux {platform.machine()}, Python {platform.python_version()}."
    text = f"# {title}\n\n{note} {machine}\n\n{format_table(header, rows)}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
