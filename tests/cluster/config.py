"""What the cluster is: its options, its nodes, and the files that Slurm reads.

Everything lies in the cluster's directory: munge key and socket, slurm.conf, state, spool, logs, devices,
the database. Ports are chosen free. The comments in the generated slurm.conf say what each setting is for.
"""

from __future__ import annotations

import json
import os
import random
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.cluster.machines import save

CRED_EXPIRE_S = 5
"""Lifetime of a job credential in seconds; Slurm's default is 120."""
NODES = ("n1", "n2", "n3", "n4")
CONTROL = "control"
"""The host name of the daemons that are not nodes."""
PORTS = ("slurmctld", "slurmdbd", *NODES)


@dataclass(frozen=True)
class Options:
    """What a cluster can be asked for."""

    user_signal: bool = True
    """A preempted job gets the signal of its `--signal` at once (SlurmctldParameters=preempt_send_user_signal).
    Otherwise, and where a job has no `--signal`, its steps get TERM at once."""
    accounting: bool = False
    """Run MariaDB and slurmdbd, so that sacct answers. Without it sacct fails, as on some small clusters."""
    enforce_limits: bool = False
    """Enforce the limits of associations and QOS (AccountingStorageEnforce=limits). Needs `accounting`."""
    netns: bool = False
    """A network namespace for each node, so that its cable can be cut."""
    grace: int = 10
    """GraceTime of partition `low` in seconds. 0 ends preempted jobs at once (KILL comes KillWait later); above
    that Slurm counts coarsely: 1 and 10 both last 15 s."""
    switches: bool = False
    """Two leaf switches of two nodes each (TopologyPlugin=topology/tree), as clusters with a fat tree have."""
    preempt: str = "REQUEUE"
    """PreemptMode of partition `low`: REQUEUE, or CANCEL as on sites where a preempted job is gone."""
    slurmd_timeout: int = 15
    """SlurmdTimeout in seconds: a node that is silent for so long is down, and its jobs are requeued.
    Slurm is late: 3 takes about 10 s after a crash and 27 s after a cut."""
    min_job_age: int = 600
    """For how many seconds scontrol and squeue know an ended job (MinJobAge). Slurm looks every ten seconds or more."""


@dataclass(frozen=True)
class Site:
    """The choices of one bring-up, kept in `site.json`: the other commands and processes read them there."""

    options: Options
    ports: dict[str, int]
    subnet: str | None
    """First three bytes of the nodes' network with `netns`, else None."""

    @property
    def host(self) -> str:
        """The address of the host, where the controller listens."""
        return f"{self.subnet}.1" if self.subnet else "127.0.0.1"

    def address(self, node: str) -> str:
        """The address of a node: .11 for n1 to .14 for n4."""
        return f"{self.subnet or '127.0.0'}.{10 + int(node[1:])}"

    def save(self, directory: Path) -> None:
        """Write `site.json`."""
        save(directory / "site.json", json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path) -> Site:
        """Read `site.json`. Raises FileNotFoundError where no cluster is."""
        fields = json.loads((directory / "site.json").read_text())
        return cls(Options(**fields["options"]), fields["ports"], fields["subnet"])


def free_ports() -> dict[str, int]:
    """A free TCP port for each daemon.

    They lie below the kernel's range for outgoing connections (32768 and up): one of these could otherwise
    take the port of a node while the node is off.
    """
    ports: dict[str, int] = {}
    with ExitStack() as held:
        while len(ports) < len(PORTS):
            probe = held.enter_context(socket.socket())
            port = random.SystemRandom().randrange(20000, 32000)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports[PORTS[len(ports)]] = port
    return ports


def slurm_conf(directory: Path, site: Site) -> str:
    """The text of slurm.conf."""
    options, ports = site.options, site.ports
    topology = "TopologyPlugin=topology/tree" if options.switches else ""
    signal_at_once = "SlurmctldParameters=preempt_send_user_signal" if options.user_signal else ""
    nodes = "\n".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={site.address(node)} Port={ports[node]} CPUs=4 Sockets=1 "
        "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=65536 Gres=gpu:h100:2 State=UNKNOWN"
        for node in NODES
    )
    accounting = (
        f"""
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={site.host}
AccountingStoragePort={ports["slurmdbd"]}
# The name lies: this is munge's socket, and with a private socket slurmdbd is not reached without it.
AccountingStoragePass={directory}/munge.socket
AccountingStorageTRES=gres/gpu
{"AccountingStorageEnforce=limits" if options.enforce_limits else ""}
"""
        if options.accounting
        else ""
    )
    return f"""ClusterName=sluice{ports["slurmctld"]}
SlurmctldHost={CONTROL}({site.host})
SlurmctldPort={ports["slurmctld"]}
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
# Each node's own: where nodes share /tmp, as here, their parts of srun --mpi=pmix collide in it.
TmpFS={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/spool/%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/%n.log
MailProg=/bin/true

# The private munge. A requeued job waits cred_expire + 1 s, by default 121 s, until its old credential has expired.
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire={CRED_EXPIRE_S}

# No cgroups: the host's belong to the host, and a namespace already holds all that a node runs.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none

# A node may claim more CPUs than the host has (4 each), instead of being drained for it.
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core

# Schedule within seconds, not minutes.
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,bf_continue,batch_sched_delay=0,sched_interval=2,sched_min_interval=0

# A job of `high` that lacks room takes it from jobs of `low`, which go back to the queue.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{signal_at_once}

# Notice dead things soon. ReturnToService=2: a node that was down serves again once it registers.
SlurmctldTimeout=30
SlurmdTimeout={options.slurmd_timeout}
ReturnToService=2
MessageTimeout=10
TCPTimeout=2
BatchStartTimeout=10
# Between TERM and KILL.
KillWait=5
OverTimeLimit=0
# scontrol and squeue know an ended job for so long.
MinJobAge={options.min_job_age}
MaxArraySize=1001
{topology}
{accounting}
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode={options.preempt} GraceTime={options.grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def slurmdbd_conf(directory: Path, site: Site) -> str:
    """The text of slurmdbd.conf. The database listens on a socket only, and its root has no password."""
    return f"""AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
DbdHost={CONTROL}
DbdAddr={site.host}
DbdPort={site.ports["slurmdbd"]}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
LogFile={directory}/log/slurmdbd.log
PidFile={directory}/slurmdbd.pid
"""


def write(directory: Path, site: Site) -> None:
    """Write everything that the daemons read, the fake GPUs too, into the empty `directory`."""
    site.save(directory)  # first: what has a site.json can be taken down
    for folder in ("state", "spool", "log", "devices", "machines", "database"):
        (directory / folder).mkdir()
    save(directory / "slurm.conf", slurm_conf(directory, site))
    # Slurm looks for a cgroup file system even where nothing uses it, unless told that none is to be mounted.
    save(
        directory / "cgroup.conf",
        "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n",
    )
    if site.options.switches:
        leaves = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\n"
        save(directory / "topology.conf", f"{leaves}SwitchName=spine Switches=leaf[1-2]\n")
    # CUDA_VISIBLE_DEVICES is set for character devices only: these have the numbers of NVIDIA's, and no driver.
    for number in range(2):
        os.mknod(directory / "devices" / f"nvidia{number}", 0o020600, os.makedev(195, number))
    save(directory / "gres.conf", f"AutoDetect=off\nName=gpu Type=h100 File={directory}/devices/nvidia[0-1]\n")
    names = [f"{site.address(node)} {node}" for node in NODES]
    save(directory / "hosts", "\n".join(["127.0.0.1 localhost", f"{site.host} {CONTROL}", *names, ""]))
    for name, content in (("munge.key", os.urandom(128)), ("slurmdbd.conf", slurmdbd_conf(directory, site).encode())):
        (directory / name).touch(mode=0o600)  # munged and slurmdbd refuse files that others may read
        (directory / name).write_bytes(content)
