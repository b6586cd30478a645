"""Compare submitting the chain of the quickstart with three bare `sbatch` calls.

    python -m benchmarks.submit [--pairs 15]        (root, Debian's Slurm: it starts the test cluster)

Both are measured on the same cluster, as interleaved pairs of processes. All jobs are held, so that none runs. The
chain has five jobs: prepare, the array of shard, its validation, train, evaluate. Target: at most 1.5 × the time.

An idle controller on the same machine answers sbatch in milliseconds, less than the start of Python takes. So the first
rows show the cost of the processes. On a login node, the controller is busy and remote. The last rows are therefore
measured with an `sbatch` that first sleeps, on both sides.
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
from tests.cluster.cluster import find_cluster_problem

ROOT = Path(__file__).resolve().parent.parent
SLOW_S = 0.2
CHAIN = 5


def run_timed(commands: list[list[str]], environment: dict[str, str]) -> float:
    """Run the commands one after another and return the wall seconds."""
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - start


def make_row(name: str, submit_s: list[float], sbatch_s: list[float], target: str) -> list[str]:
    """Return a row of the table: medians, and the ratio of the pairs."""
    ratios = [a / b for a, b in zip(submit_s, sbatch_s, strict=True)]
    medians = [f"{statistics.median(values):.3f}" for values in (submit_s, sbatch_s)]
    return [name, *medians, f"{statistics.median(ratios):.1f}", f"{min(ratios):.1f}-{max(ratios):.1f}", target]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    if reason := find_cluster_problem(Options()):
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir="/tmp"))
    script = folder / "job.sh"
    slow = folder / "slow"
    script.write_text("#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n")
    slow.mkdir()
    (slow / "sbatch").write_text(f'#!/bin/sh\nsleep {SLOW_S}\nexec {shutil.which("sbatch")} "$@"\n')
    (slow / "sbatch").chmod(0o755)
    try:
        with Cluster(folder / "cluster").up() as cluster:
            fast = {**os.environ, **cluster.environment()}
            delayed = {**fast, "PATH": f"{slow}:{fast['PATH']}"}
            sbatch = ["sbatch", str(script)]
            run_number = 0

            def make_submit_command() -> list[str]:
                nonlocal run_number
                run_number += 1
                overrides = ["site.sbatch.hold=true", f"run.root={folder}", f"run.name=r{run_number}"]
                return [sys.executable, "submit.py", "configs/quickstart.yaml", *overrides]

            dry_run = [sys.executable, "submit.py", "configs/quickstart.yaml", "--dry-run"]
            cases = {
                "chain": (lambda: [make_submit_command()], fast),
                "  part: Python, imports, config, scripts (--dry-run)": (lambda: [dry_run], fast),
                f"  part: {CHAIN} sbatch calls": (lambda: [sbatch] * CHAIN, fast),
                f"chain, sbatch {SLOW_S} s slower": (lambda: [make_submit_command()], delayed),
                f"  part: {CHAIN} sbatch calls, {SLOW_S} s slower": (lambda: [sbatch] * CHAIN, delayed),
            }
            times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
            for pair in range(pairs + 1):
                for name, (make_commands, environment) in cases.items():
                    submit_s = run_timed(make_commands(), environment)
                    sbatch_s = run_timed([sbatch] * 3, environment)
                    if pair:  # the first pair warms the page cache
                        times[name][0].append(submit_s)
                        times[name][1].append(sbatch_s)
                cluster.output(["scancel", "--user=root"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [make_row(name, *pair_times, "" if name.startswith(" ") else "≤ 1.5") for name, pair_times in times.items()]
    header = ["figure (wall s)", "submit.py", "three bare sbatch", "ratio (median of pairs)", "spread", "target"]
    note = (
        f"{pairs} interleaved pairs of measurements: the commands of a row, and three calls of sbatch without Sluice. "
        f"All jobs are held. The chain has {CHAIN} jobs."
    )
    write_table("submit", "Time to submit the chain", note, header, rows)


if __name__ == "__main__":
    main()
