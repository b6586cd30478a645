"""One sequence of faults from the shell: `python -m tests.chaos --seed 7 --faults 8 [--only kill_a_rank …]`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.chaos import faults
from tests.chaos.driver import Story, draw, small_disk, undisturbed
from tests.cluster import Cluster, Options


def main() -> int:
    """Run it; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=8)
    parser.add_argument("--only", nargs="*", help="these kinds, in this order")
    arguments = parser.parse_args()
    chosen = draw(arguments.seed, arguments.faults)
    if arguments.only:
        chosen = [getattr(faults, name) for name in arguments.only]
    netns = faults.cut_a_network in chosen
    directory = Path(tempfile.mkdtemp(prefix="sluice-cluster-", dir="/tmp"))
    options = Options(grace=1, user_signal=False, slurmd_timeout=5, netns=netns)
    with small_disk() as folder, Cluster(directory).up(options) as cluster:
        story = Story(cluster, folder, arguments.seed, len(chosen))
        try:
            told = story.go(chosen)
        finally:
            shutil.copytree(story.run.path, directory.with_name(f"{directory.name}-run"), symlinks=True)
        for t in told:
            print(f"{t.fault:30} {t.expected or '-':14} {t.told or '-':14} {t.seconds:6.1f} s", flush=True)
        wrong = story.check(told, undisturbed(folder / "calm", story))
    print("\n".join(wrong) or "all well")
    print(f"a copy of the run: {directory}-run")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
