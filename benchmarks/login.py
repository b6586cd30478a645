"""The login node's cost: `submit.py CONFIG --dry-run` against a process that only imports what it depends on.

    python -m benchmarks.login [--pairs 15]

Target: at most 1.5 × (both whole processes, CPU seconds, interleaved). Its dependencies are all modules from outside
the project that the dry run imports.
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
OURS = ("submit", "cli", "slurm", "tracking", "planning", "pipeline", "data_prep", "benchmarks")


def dependencies() -> str:
    """A program that imports every module from outside (the standard library too) that the dry run imports."""
    probe = (
        "import runpy, sys, contextlib, io; sys.argv = ['submit.py', 'configs/quickstart.yaml', '--dry-run']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    runpy.run_path('submit.py', run_name='__main__')\n"
        "print(' '.join(sys.modules))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    names = [n for n in listed.stdout.split() if n.split(".")[0] not in OURS and n.isascii() and "__main" not in n]
    loop = "for n in names:\n with contextlib.suppress(ImportError): importlib.import_module(n)"
    return f"import importlib, contextlib\nnames = {names!r}\n{loop}"


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
    theirs_command = [sys.executable, "-c", dependencies()]
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
