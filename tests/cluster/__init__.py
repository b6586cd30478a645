"""A real Slurm with four nodes on one machine, for tests and for trying things by hand.

    python -m tests.cluster up                  # about a second
    eval "$(python -m tests.cluster env)"       # then sinfo, sbatch, srun, salloc work in this shell
    python -m tests.cluster crash n2            # a power failure; `boot n2` switches it on again
    python -m tests.cluster down                # nothing is left

In Python, and in tests through :mod:`tests.cluster.fixture`:

    with Cluster(directory).up(Options(grace=5)) as cluster:
        cluster.run(["srun", "-N4", "hostname"], timeout=30)

**Why a real Slurm.** What a pipeline must survive (preemption, time limits, requeues, dead nodes) is decided
by Slurm's own rules about which process gets which signal when. A mock repeats one's beliefs about them.

**Why namespaces.** Several node daemons can run on one host, but then all nodes share one host name, and
killing a node daemon leaves its job steps alive. Here each node is the PID, UTS, IPC and mount namespace of
one process: `hostname` says n1, and killing that process makes the kernel kill everything on the node at once,
as a power failure does. Files are shared as on a cluster's parallel file system: a job sees the same /tmp,
home and virtual environment as the shell. The daemons of the controller live in namespaces too, for the same
clean end.

**Why a private munge.** Slurm trusts messages that munge signed. With an own key and socket in the cluster's
directory, a cluster neither needs nor disturbs a munge (or a Slurm) of the host, and two clusters cannot talk
to each other by mistake.

The modules: :mod:`config` writes the files, :mod:`machines` starts and ends namespaces, :mod:`network` lays
the cables of `--netns`, :mod:`cluster` is the API.
"""

from tests.cluster.cluster import Cluster
from tests.cluster.config import NODES, Options

__all__ = ["NODES", "Cluster", "Options"]
