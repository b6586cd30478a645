"""Sequences of faults from the shell: `python -m tests.chaos --seeds 1-13 --faults 8 [--only kill_a_rank …] [--write]`.

Each seed is a training and a cluster of its own. `--write` puts its line into the table tests/chaos/results.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos import faults
from tests.chaos.driver import Story, Told, draw, small_disk, undisturbed
from tests.cluster import Cluster, Options

RESULTS = Path(__file__).with_name("results.md")


def one(seed: int, count: int, only: list[str] | None) -> tuple[list[Told], list[str]]:
    """One sequence: what was told of each fault, and everything that was wrong."""
    chosen = [getattr(faults, name) for name in only] if only else draw(seed, count)
    netns = faults.cut_a_network in chosen
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    options = Options(grace=1, user_signal=False, slurmd_timeout=5, netns=netns)
    with small_disk() as folder, Cluster(directory).up(options) as cluster:
        story = Story(cluster, folder, seed, len(chosen))
        try:
            told = story.go(chosen)
            return told, story.check(told, undisturbed(folder / "calm", story))
        finally:
            kept = directory.with_name(f"{directory.name}-run")
            shutil.copytree(story.run.path, kept, symlinks=True)
            print(f"seed {seed}: a copy of the run: {kept}", flush=True)


def main() -> int:
    """Run them; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="1", help="a number, or the first and the last one: 1-13")
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="these kinds, in this order")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    lines = {}
    if RESULTS.exists():
        lines = {int(line.split("|")[1]): line for line in RESULTS.read_text().splitlines() if re.match(r"\| \d", line)}
    wrong: list[str] = []
    for seed in range(int(first), int(last or first) + 1):
        told, problems = one(seed, arguments.faults, arguments.only)
        for t in told:
            print(f"{seed:3} {t.fault:30} {t.expected or '-':14} {t.told or '-':14} {t.seconds:6.1f} s", flush=True)
        print(f"{seed:3} {'; '.join(problems) or 'all well'}", flush=True)
        wrong += problems
        drawn = ", ".join(f"{t.fault} ({t.told or 'no stop'})" for t in told)
        lines[seed] = f"| {seed} | {drawn} | {'; '.join(problems) or 'equal'} |"
        if arguments.write:
            rows = [lines[number] for number in sorted(lines)]
            kinds = Counter(re.findall(r"(\w+) \(", "\n".join(rows)))
            text = [
                "# Drawn faults and what became of them",
                f"`python -m tests.chaos --seeds 1-13 --faults {arguments.faults} --write`: for each seed one training "
                "of 4 nodes × 1 rank. In brackets what was told of each fault. *equal*: the digest of the "
                "weights and the optimizer's state is the undisturbed run's, every step and sample was taken once, no "
                "damaged checkpoint was loaded, every cause was told right.",
                "| seed | faults (told as) | outcome |\n| --- | --- | --- |\n" + "\n".join(rows),
                f"{sum(kinds.values())} faults: " + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items())) + ".",
            ]
            RESULTS.write_text("\n\n".join(text) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
