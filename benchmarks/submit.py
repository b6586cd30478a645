"""Submission's cost: the chain of the quickstart through submit.py against three bare `sbatch` calls.

    python -m benchmarks.submit [--pairs 15]        (root, Debian's Slurm: it starts the test cluster)

Both sides are whole processes on the same cluster, interleaved; all jobs are held, so that none runs meanwhile. The
chain is five jobs: prepare, the shard array, its validation, train, evaluate. Target: at most 1.5 ×.

An idle controller on the same machine answers an sbatch in milliseconds, less than it takes to start Python, so the
first rows show what the processes cost. On a login node the controller is busy and elsewhere; the last row is measured
behind an `sbatch` that first sleeps for so long, on both sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.table import write_table
from tests.cluster import Cluster, Options
from tests.cluster.cluster import missing

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 0.2
CHAIN = 5


def timed(commands: list[list[str]], environment: dict[str, str]) -> float:
    """Wall seconds of commands run one after another."""
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - start


def row(name: str, ours: list[float], theirs: list[float], target: str) -> list[str]:
    """One line of the table: medians and the ratio of each pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    medians = [f"{statistics.median(values):.3f}" for values in (ours, theirs)]
    return [name, *medians, f"{statistics.median(ratios):.1f}", f"{min(ratios):.1f}-{max(ratios):.1f}", target]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    if reason := missing(Options()):
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir="/tmp"))
    script, slow = folder / "job.sh", folder / "slow"
    script.write_text("#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n")
    slow.mkdir()
    (slow / "sbatch").write_text(f'#!/bin/sh\nsleep {SLOW_S}\nexec {shutil.which("sbatch")} "$@"\n')
    (slow / "sbatch").chmod(0o755)
    try:
        with Cluster(folder / "cluster").up() as cluster:
            fast = {**os.environ, **cluster.environment()}
            late = {**fast, "PATH": f"{slow}:{fast['PATH']}"}
            bare = ["sbatch", str(script)]
            number = 0

            def chain() -> list[str]:
                nonlocal number
                number += 1
                keys = ["site.sbatch.hold=true", f"run.root={folder}", f"run.name=r{number}"]
                return [sys.executable, "submit.py", "configs/quickstart.yaml", *keys]

            dry = [sys.executable, "submit.py", "configs/quickstart.yaml", "--dry-run"]
            kinds = {
                "the chain": (lambda: [chain()], 3, fast),
                "  of it: Python, imports, config, scripts (--dry-run)": (lambda: [dry], 3, fast),
                f"  of it: {CHAIN} sbatch calls": (lambda: [bare] * CHAIN, 3, fast),
                f"the chain, sbatch {SLOW_S} s slower": (lambda: [chain()], 3, late),
                f"  of it: {CHAIN} sbatch calls, {SLOW_S} s slower": (lambda: [bare] * CHAIN, 3, late),
            }
            times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in kinds}
            for pair in range(pairs + 1):
                for name, (ours, calls, environment) in kinds.items():
                    a, b = timed(ours(), environment), timed([bare] * calls, environment)
                    if pair:  # the first pair warms the page cache
                        times[name][0].append(a)
                        times[name][1].append(b)
                cluster.output(["scancel", "--user=root"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [row(name, *both, "" if name.startswith(" ") else "≤ 1.5") for name, both in times.items()]
    header = ["figure (wall s)", "submit.py", "three bare sbatch", "ratio (median of pairs)", "spread", "target"]
    note = f"{pairs} interleaved pairs of whole processes, all jobs held; the chain is {CHAIN} jobs."
    write_table("submit", "What submitting the chain costs", note, header, rows)


if __name__ == "__main__":
    main()
