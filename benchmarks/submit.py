"""Compare submitting the chain of the quickstart with three bare `sbatch` calls.

    python -m benchmarks.submit [--pairs 15]        (root, Debian's Slurm: it starts the test cluster)

Both are measured on the same cluster, as interleaved pairs of processes. All jobs are held, so that no job runs. The
chain has five jobs: prepare, the array of shard, the validation of shard, train, evaluate. Target: the submission takes
at most 1.5 × the time of the `sbatch` calls.

An idle controller on the same machine answers sbatch in milliseconds, which is less than the start of Python takes. The
first rows therefore show the cost of the processes. On a real cluster, the controller is busy and remote. In the last
rows, both sides therefore use an `sbatch` that sleeps first.
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
SBATCH_DELAY_S = 0.2
"""Duration for which the slow `sbatch` sleeps."""
CHAIN_LENGTH = 5
"""Number of jobs of the chain."""


def run_timed(commands: list[list[str]], environment: dict[str, str]) -> float:
    """Run the commands one after another and return the wall seconds."""
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True, timeout=60)
    return time.perf_counter() - start


def make_row(name: str, submit_s: list[float], sbatch_s: list[float], target: str) -> list[str]:
    """Return a row of the table: the medians, and the median and the spread of the ratios of the pairs."""
    ratios = [a / b for a, b in zip(submit_s, sbatch_s, strict=True)]
    medians = [f"{statistics.median(values):.3f}" for values in (submit_s, sbatch_s)]
    return [name, *medians, f"{statistics.median(ratios):.1f}", f"{min(ratios):.1f}-{max(ratios):.1f}", target]


def main() -> None:
    """Measure the rows in interleaved pairs, and write benchmarks/results/submit.md."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=15)
    pairs = parser.parse_args().pairs
    if reason := find_cluster_problem(Options()):
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="sluice-bench-", dir="/tmp"))
    script = folder / "job.sh"
    slow_sbatch_folder = folder / "slow_sbatch_folder"
    script.write_text("#!/bin/bash\n#SBATCH --hold\n#SBATCH --output=/dev/null\ntrue\n")
    slow_sbatch_folder.mkdir()
    (slow_sbatch_folder / "sbatch").write_text(
        f'#!/bin/sh\nsleep {SBATCH_DELAY_S}\nexec {shutil.which("sbatch")} "$@"\n'
    )
    (slow_sbatch_folder / "sbatch").chmod(0o755)
    try:
        with Cluster(folder / "cluster").up() as cluster:
            normal_env = {**os.environ, **cluster.environment()}
            slow_env = {**normal_env, "PATH": f"{slow_sbatch_folder}:{normal_env['PATH']}"}
            sbatch = ["sbatch", str(script)]
            run_number = 0

            def make_submit_command() -> list[str]:
                """Return the command that submits the chain of a new run."""
                nonlocal run_number
                run_number += 1
                overrides = ["site.sbatch.hold=true", f"run.root={folder}", f"run.name=r{run_number}"]
                return [sys.executable, "submit.py", "configs/quickstart.yaml", *overrides]

            dry_run = [sys.executable, "submit.py", "configs/quickstart.yaml", "--dry-run"]
            cases = {
                "chain": (lambda: [make_submit_command()], normal_env),
                "  part: Python, imports, config, scripts (--dry-run)": (lambda: [dry_run], normal_env),
                f"  part: {CHAIN_LENGTH} sbatch calls": (lambda: [sbatch] * CHAIN_LENGTH, normal_env),
                f"chain, sbatch {SBATCH_DELAY_S} s slower": (lambda: [make_submit_command()], slow_env),
                f"  part: {CHAIN_LENGTH} sbatch calls, {SBATCH_DELAY_S} s slower": (
                    lambda: [sbatch] * CHAIN_LENGTH,
                    slow_env,
                ),
            }
            times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in cases}
            for pair in range(pairs + 1):
                for name, (make_commands, environment) in cases.items():
                    submit_s = run_timed(make_commands(), environment)
                    sbatch_s = run_timed([sbatch] * 3, environment)
                    if pair:  # The first pair only warms the page cache.
                        times[name][0].append(submit_s)
                        times[name][1].append(sbatch_s)
                cluster.output(["scancel", "--user=root"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = [make_row(name, *pair_times, "" if name.startswith(" ") else "≤ 1.5") for name, pair_times in times.items()]
    header = ["figure (wall s)", "submit.py", "three bare sbatch", "ratio (median of pairs)", "spread", "target"]
    note = (
        f"{pairs} interleaved pairs of measurements: the commands of a row, and three calls of sbatch without Sluice. "
        f"All jobs are held. The chain has {CHAIN_LENGTH} jobs."
    )
    write_table("submit", "Time to submit the chain", note, header, rows)


if __name__ == "__main__":
    main()
