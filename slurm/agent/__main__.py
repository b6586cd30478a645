"""Entry point of a node agent: `python -m slurm.agent STAGE RUN ADDRESS_FILE`, started by the supervisor."""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.agent.agent import Agent

if __name__ == "__main__":
    stage, run_path, address_file = sys.argv[1:]
    sys.exit(Agent(stage, Path(run_path), Path(address_file)).run())
