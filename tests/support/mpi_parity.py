"""Train each case of FOLDER/cases.json over MPI.

    python -m tests.support.mpi_parity FOLDER        under mpirun, in every rank

A case is a JSON object of config sections for `tiny_config`. Rank N writes the loss and gradient norm of each step to
FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from pipeline.base.dist_env import read_rank_info
from tests.support.tiny_training import tiny_config, train_steps


def main(folder: Path) -> None:
    """Train all cases on this rank and write the results."""
    from pipeline.comm import groups

    torch.set_num_threads(1)
    rank_info = read_rank_info(os.environ)
    cases = json.loads((folder / "cases.json").read_text())
    configs = [tiny_config(rank_info.world_size, **case) for case in cases]
    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    from pipeline.mpi.process_group import MpiProcessGroup

    assert MpiProcessGroup.accurate_sums == configs[0].parallel.accurate_sums and "MPI" in str(world.transport)
    results = [train_steps(rank_info, config, world)[1] for config in configs]
    (folder / f"rank-{rank_info.rank}.json").write_text(json.dumps(results))
    groups.leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
