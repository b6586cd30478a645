"""The login node's cost: `submit.py CONFIG --dry-run` against a process that only imports what it depends on.

    python -m benchmarks.login [--pairs 15]

Target: at most 1.5 × (both whole processes, CPU seconds, interleaved).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.table import write_table

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = "import typer, rich.console, rich.progress, rich.table, pydantic, yaml, submitit"


def cpu_seconds(command: list[str]) -> float:
    """User and system seconds of one child process."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{command} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    ours_command = [sys.executable, "submit.py", "configs/quickstart.yaml", "--dry-run"]
    theirs_command = [sys.executable, "-c", DEPENDENCIES]
    ours, theirs = [], []
    for pair in range(pairs + 1):
        a, b = cpu_seconds(ours_command), cpu_seconds(theirs_command)
        if pair:  # the first pair warms the page cache
            ours.append(a)
            theirs.append(b)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    row = ["CPU s", f"{statistics.median(ours):.3f}", f"{statistics.median(theirs):.3f}"]
    row += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}", "≤ 1.5"]
    header = ["figure", "--dry-run", "importing its dependencies", "ratio (median of pairs)", "spread", "target"]
    write_table("login", "What --dry-run costs", f"{pairs} interleaved pairs of whole processes.", header, [row])


if __name__ == "__main__":
    main()
