"""Compare `submit.py CONFIG --dry-run` with a process that only imports the dependencies of this command.

    python -m benchmarks.login [--pairs 15]

The dependencies are all modules from outside the project that the command imports. Target: the command takes at most
1.5 × the CPU seconds of the imports, as the median of interleaved pairs of processes.
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
PROJECT_PACKAGES = ("submit", "cli", "slurm", "tracking", "planning", "pipeline", "data_prep", "benchmarks")


def make_import_program() -> str:
    """Return a program that imports every module from outside the project that the dry run imports."""
    probe = (
        "import runpy, sys, contextlib, io; sys.argv = ['submit.py', 'configs/quickstart.yaml', '--dry-run']\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    runpy.run_path('submit.py', run_name='__main__')\n"
        "print(' '.join(sys.modules))"
    )
    listed = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    # Keep only the modules from outside the project. `__main__` is the dry run itself.
    names = [
        name
        for name in listed.stdout.split()
        if name.split(".")[0] not in PROJECT_PACKAGES and name.isascii() and "__main" not in name
    ]
    loop = "for n in names:\n with contextlib.suppress(ImportError): importlib.import_module(n)"
    return f"import importlib, contextlib\nnames = {names!r}\n{loop}"


def measure_cpu_seconds(command: list[str]) -> float:
    """Run a command and return its user and system seconds. Exits if the command fails."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{command} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure both kinds of processes in pairs, and write benchmarks/results/login.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    dry_run = [sys.executable, "submit.py", "configs/quickstart.yaml", "--dry-run"]
    import_only = [sys.executable, "-c", make_import_program()]
    dry_run_s = []
    import_s = []
    for pair in range(pairs + 1):
        pair_s = measure_cpu_seconds(dry_run), measure_cpu_seconds(import_only)
        if pair:  # The first pair only warms the page cache.
            dry_run_s.append(pair_s[0])
            import_s.append(pair_s[1])
    ratios = [a / b for a, b in zip(dry_run_s, import_s, strict=True)]
    row = ["CPU s", f"{statistics.median(dry_run_s):.3f}", f"{statistics.median(import_s):.3f}"]
    row += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}", "≤ 1.5"]
    header = ["figure", "--dry-run", "importing its dependencies", "ratio (median of pairs)", "spread", "target"]
    write_table("login", "CPU time of --dry-run", f"{pairs} interleaved pairs of processes.", header, [row])


if __name__ == "__main__":
    main()
