"""Entry point of a node agent: `python -m slurm.agent STAGE RUN ADDRESS_FILE`, started by the supervisor."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    early_signals: list[int] = []
    # A signal during the imports must not end the agent. The ranks get the signal when they are forked.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda received, _: early_signals.append(received))

    from slurm.agent.agent import Agent

    stage, run_path, address_file = sys.argv[1:]
    sys.exit(Agent(stage, Path(run_path), Path(address_file), early_signals).run())
