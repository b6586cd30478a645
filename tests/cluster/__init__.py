"""A real Slurm with four nodes on one machine, for tests and for manual experiments.

    python -m tests.cluster up                  # takes about a second
    eval "$(python -m tests.cluster env)"       # makes sinfo, sbatch, srun and salloc work in this shell
    python -m tests.cluster crash n2            # simulates a power failure; `boot n2` starts the node again
    python -m tests.cluster down                # ends all processes and removes all files

In Python, and in tests through :mod:`tests.cluster.fixture`:

    with Cluster(directory).up(Options(grace=5)) as cluster:
        cluster.run(["srun", "-N4", "hostname"], timeout=30)

A real Slurm is needed because its rules decide which process gets which signal, and when. A mock would only repeat our
assumptions. :mod:`cluster` is the API, :mod:`config` writes the files, :mod:`machines` starts and ends namespaces, and
:mod:`network` connects nodes with `--netns`.
"""
# Why namespaces: several node daemons can run on one host, but then all nodes share one host name, and killing a node
# daemon leaves its job steps alive. Here each node is the PID, UTS, IPC and mount namespace of one process. `hostname`
# prints n1. If that process is killed, the kernel kills everything on the node at once, as a power failure does. The
# daemons of the controller run in namespaces for the same reason. Files are shared as on a parallel file system: a job
# uses the same /tmp, home directory and virtual environment as the shell.
#
# Why a private munge: Slurm trusts messages that munge signed. The cluster has its own key and socket in its directory.
# It therefore does not need or affect munge or Slurm on the host, and two clusters cannot communicate by mistake.

from tests.cluster.cluster import Cluster
from tests.cluster.config import NODES, Options

__all__ = ["NODES", "Cluster", "Options"]
