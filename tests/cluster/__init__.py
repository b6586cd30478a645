"""A real Slurm with four nodes on one machine, for tests and for manual experiments.

    python -m tests.cluster up                  # takes about a second
    eval "$(python -m tests.cluster env)"       # makes sinfo, sbatch, srun and salloc work in this shell
    python -m tests.cluster crash n2            # simulates a power failure; `boot n2` starts the node again
    python -m tests.cluster down                # ends all processes and removes all files

In Python, and in tests through :mod:`tests.cluster.fixture`:

    with Cluster(directory).up(Options(grace=5)) as cluster:
        cluster.run(["srun", "-N4", "hostname"], timeout=30)

Tests need a real Slurm, because only Slurm determines which process gets which signal, and when. :mod:`cluster` is the
API, :mod:`config` writes the files of Slurm, :mod:`machines` starts and ends the processes of nodes, and :mod:`network`
connects the nodes with `--netns`.
"""
# Why namespaces: several node daemons can run on one host. But then all nodes have the same host name, and if a node
# daemon is killed, the steps of its jobs survive. Here, each node consists of the PID, UTS, IPC and mount namespaces of
# one process. On the node n1, `hostname` prints n1. If the process is killed, the kernel at once kills all processes of
# the node, as in a power failure. The daemons of the controller run in namespaces for the same reason. The nodes share
# all files of the host, so a job uses the same /tmp, home directory and virtual environment as the shell.
#
# Why a separate munge: Slurm trusts messages that munge signed. Each cluster has a key and a socket in its directory.
# So it does not need munge or Slurm on the host and does not affect them. Two clusters cannot communicate by mistake.

from tests.cluster.cluster import Cluster
from tests.cluster.config import NODES, Options

__all__ = ["NODES", "Cluster", "Options"]
