"""Run sequences of faults: `python -m tests.chaos --seeds 1-13 --faults 8 [--only kill_a_rank …] [--write]`.

Each seed has a separate run and a separate cluster. `--write` updates the table in tests/chaos/results.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.chaos import faults
from tests.chaos.driver import ChaosRun, FaultResult, choose_faults, compute_undisturbed_digest, mount_small_disk
from tests.cluster import Cluster, Options

RESULTS = Path(__file__).with_name("results.md")


def run_sequence(seed: int, count: int, names: list[str] | None) -> tuple[list[FaultResult], list[str]]:
    """Run one sequence of faults.

    Args:
        seed: seed of all random choices: which faults happen, when, and in which rank.
        count: number of random faults. Ignored if `names` is given.
        names: names of the faults, in order; None for random faults.

    Returns:
        The result of each fault, and a description of each problem.
    """
    sequence = [getattr(faults, name) for name in names] if names else choose_faults(seed, count)
    needs_network = faults.disconnect_a_node in sequence
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    options = Options(grace=1, user_signal=False, slurmd_timeout=5, netns=needs_network)
    with mount_small_disk() as folder, Cluster(directory).up(options) as cluster:
        chaos_run = ChaosRun(cluster, folder, seed, len(sequence))
        try:
            results = chaos_run.run_faults(sequence)
            digest = compute_undisturbed_digest(folder / "undisturbed", chaos_run)
            return results, chaos_run.find_problems(results, digest)
        finally:
            copy = directory.with_name(f"{directory.name}-run")
            shutil.copytree(chaos_run.run.path, copy, symlinks=True)
            print(f"seed {seed}: a copy of the run: {copy}", flush=True)


def write_results(line_by_seed: Mapping[int, str], faults_per_seed: int) -> None:
    """Write results.md: a table with one line per seed, and the number of faults of each kind."""
    table = "\n".join(line_by_seed[seed] for seed in sorted(line_by_seed))
    count_by_fault = Counter(re.findall(r"(\w+) \(", table))
    paragraphs = [
        "# Random faults and their outcome",
        f"`python -m tests.chaos --seeds 1-25 --faults {faults_per_seed} --write`: one run of 4 ranks for each seed, "
        "on 4 nodes (odd seeds), or on 2 of 4 nodes, so that 2 nodes are spare nodes (even seeds). Half of the runs "
        "save snapshots in memory. The recorded cause of each fault is in parentheses. *equal*: the digest of the "
        "weights and of the optimizer's state equals that of an undisturbed run, every step and every sample was "
        "processed once, no damaged checkpoint was loaded, every cause was recorded correctly, and the ranks restarted "
        "in the same job wherever that was possible.",
        "| seed | faults (recorded cause) | outcome |\n| --- | --- | --- |\n" + table,
        f"{count_by_fault.total()} faults: "
        + ", ".join(f"{count} {fault}" for fault, count in sorted(count_by_fault.items()))
        + ".",
    ]
    RESULTS.write_text("\n\n".join(paragraphs) + "\n")


def main() -> int:
    """Run one sequence of faults for each seed. Return 1 if there is any problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1", help="a seed, or the first and the last one: 1-13")
    parser.add_argument("--faults", type=int, default=8, help="number of faults per seed")
    parser.add_argument("--only", nargs="*", help="run these faults, in this order")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    line_by_seed = {}
    if RESULTS.exists():
        lines = [line for line in RESULTS.read_text().splitlines() if re.match(r"\| \d", line)]
        line_by_seed = {int(line.split("|")[1]): line for line in lines}
    all_problems: list[str] = []
    for seed in range(int(first), int(last or first) + 1):
        results, problems = run_sequence(seed, arguments.faults, arguments.only)
        for result in results:
            expected = result.expected_cause or "-"
            recorded = result.recorded_cause or "-"
            print(f"{seed:3} {result.fault:30} {expected:14} {recorded:14} {result.seconds:6.1f} s", flush=True)
        print(f"{seed:3} {'; '.join(problems) or 'no problems'}", flush=True)
        all_problems += problems
        fault_list = ", ".join(f"{result.fault} ({result.recorded_cause or 'no stop'})" for result in results)
        line_by_seed[seed] = f"| {seed} | {fault_list} | {'; '.join(problems) or 'equal'} |"
        if arguments.write:
            write_results(line_by_seed, arguments.faults)
    return 1 if all_problems else 0


if __name__ == "__main__":
    sys.exit(main())
