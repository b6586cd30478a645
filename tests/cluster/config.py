"""Options and nodes of the test cluster, and the files that Slurm reads.

The directory of a cluster contains all its files: munge key and socket, slurm.conf, state, spool, logs, devices and the
database. Comments in the generated slurm.conf explain the settings.
"""

from __future__ import annotations

import json
import os
import random
import socket
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.base.ports import MASTER_PORTS
from tests.cluster.machines import write_file_atomically

CRED_EXPIRE_S = 5
"""Lifetime of a job credential in seconds; Slurm's default is 120."""
NODES = ("n1", "n2", "n3", "n4")
CONTROL = "control"
"""Host name of the machines that are not nodes."""
DAEMONS_WITH_PORT = ("slurmctld", "slurmdbd", *NODES)


@dataclass(frozen=True)
class Options:
    """Options of a test cluster."""

    user_signal: bool = True
    """Send a preempted job the signal of its `--signal` at once (SlurmctldParameters=preempt_send_user_signal).
    If False, or if the job has no `--signal`, its steps get SIGTERM at once."""
    accounting: bool = False
    """Run MariaDB and slurmdbd. Without them, sacct fails, as on some small clusters."""
    enforce_limits: bool = False
    """Enforce the limits of associations and QOS (AccountingStorageEnforce=limits). Needs `accounting`."""
    netns: bool = False
    """Give each node its own network namespace, so that it can be disconnected."""
    grace: int = 10
    """GraceTime of the partition `low` in seconds. With 0, Slurm ends preempted jobs at once (SIGTERM, SIGKILL after
    KillWait). Slurm rounds other values: 1 and 10 both last 15 s."""
    switches: bool = False
    """Use two leaf switches with two nodes each (TopologyPlugin=topology/tree), like a cluster with a fat tree."""
    preempt: str = "REQUEUE"
    """PreemptMode of the partition `low`: REQUEUE, or CANCEL as on sites that do not requeue preempted jobs."""
    slurmd_timeout: int = 15
    """SlurmdTimeout in seconds. If a node does not respond for this time, it is down and its jobs are requeued. Slurm
    reacts later: with 3, about 10 s after a crash and 27 s after a disconnection."""
    min_job_age: int = 600
    """MinJobAge: seconds for which scontrol and squeue show an ended job. Slurm checks the age of jobs at intervals of
    ten seconds or more."""


@dataclass(frozen=True)
class Site:
    """Options, ports and network of a started cluster, saved in `site.json` for other commands and processes."""

    options: Options
    ports: dict[str, int]
    subnet: str | None
    """First three bytes of the nodes' network with `netns`; otherwise None."""

    @property
    def host(self) -> str:
        """Return the address of the host, at which the controller listens."""
        return f"{self.subnet}.1" if self.subnet else "127.0.0.1"

    def address(self, node: str) -> str:
        """Return the address of a node. The last byte is 11 for n1 and 14 for n4."""
        return f"{self.subnet or '127.0.0'}.{10 + int(node[1:])}"

    def save(self, directory: Path) -> None:
        """Write `site.json`."""
        write_file_atomically(directory / "site.json", json.dumps(asdict(self)))

    @classmethod
    def load(cls, directory: Path) -> Site:
        """Read `site.json`. Raise FileNotFoundError if there is no cluster."""
        fields = json.loads((directory / "site.json").read_text())
        return cls(Options(**fields["options"]), fields["ports"], fields["subnet"])


def find_free_ports() -> dict[str, int]:
    """Return a free TCP port for each daemon.

    The ports are below the kernel's range for outgoing connections (from 32768). Otherwise, an outgoing connection
    could take the port of a node while the node is off. They are above `MASTER_PORTS`, at which ranks meet.
    """
    ports: dict[str, int] = {}
    with ExitStack() as open_sockets:
        while len(ports) < len(DAEMONS_WITH_PORT):
            probe = open_sockets.enter_context(socket.socket())
            port = random.SystemRandom().randrange(MASTER_PORTS.stop, 32768)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            ports[DAEMONS_WITH_PORT[len(ports)]] = port
    return ports


def format_slurm_conf(directory: Path, site: Site) -> str:
    """Return the content of slurm.conf."""
    options = site.options
    ports = site.ports
    topology = "TopologyPlugin=topology/tree" if options.switches else ""
    signal_setting = "SlurmctldParameters=preempt_send_user_signal" if options.user_signal else ""
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
# Despite its name, this is the socket of munge. It is needed because the socket is not the default one.
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
# A separate folder for each node: the nodes share /tmp, in which their parts of srun --mpi=pmix would collide.
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

# No cgroups: those of the host must not change, and the namespace of a node already contains all its processes.
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

# A job of `high` preempts jobs of `low`, which are requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
{signal_setting}

# Detect failures soon. ReturnToService=2: a node that was down is used again when it registers.
SlurmctldTimeout=30
SlurmdTimeout={options.slurmd_timeout}
ReturnToService=2
MessageTimeout=10
TCPTimeout=2
BatchStartTimeout=10
# Seconds between SIGTERM and SIGKILL.
KillWait=5
OverTimeLimit=0
# Seconds for which scontrol and squeue show an ended job.
MinJobAge={options.min_job_age}
MaxArraySize=1001
{topology}
{accounting}
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode={options.preempt} GraceTime={options.grace} State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def format_slurmdbd_conf(directory: Path, site: Site) -> str:
    """Return the content of slurmdbd.conf. The database only listens on a Unix socket, and its root has no password."""
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


def write_cluster_files(directory: Path, site: Site) -> None:
    """Write all files that the daemons read, and the device files of fake GPUs, into the empty `directory`."""
    site.save(directory)  # This file is written first, because `down` needs it.
    for folder in ("state", "spool", "log", "devices", "machines", "database"):
        (directory / folder).mkdir()
    write_file_atomically(directory / "slurm.conf", format_slurm_conf(directory, site))
    # Without this file, Slurm searches for a cgroup file system, although this configuration does not use cgroups.
    write_file_atomically(
        directory / "cgroup.conf",
        "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainDevices=no\nConstrainRAMSpace=no\n",
    )
    if site.options.switches:
        leaves = "SwitchName=leaf1 Nodes=n[1-2]\nSwitchName=leaf2 Nodes=n[3-4]\n"
        write_file_atomically(directory / "topology.conf", f"{leaves}SwitchName=spine Switches=leaf[1-2]\n")
    # Slurm sets CUDA_VISIBLE_DEVICES only for character devices. These two have the device numbers of NVIDIA GPUs.
    for number in range(2):
        os.mknod(directory / "devices" / f"nvidia{number}", 0o020600, os.makedev(195, number))
    write_file_atomically(
        directory / "gres.conf", f"AutoDetect=off\nName=gpu Type=h100 File={directory}/devices/nvidia[0-1]\n"
    )
    node_lines = [f"{site.address(node)} {node}" for node in NODES]
    lines = ["127.0.0.1 localhost", f"{site.host} {CONTROL}", *node_lines, ""]
    write_file_atomically(directory / "hosts", "\n".join(lines))
    secrets = {"munge.key": os.urandom(128), "slurmdbd.conf": format_slurmdbd_conf(directory, site).encode()}
    for name, content in secrets.items():
        (directory / name).touch(mode=0o600)  # munged and slurmdbd reject files that other users can read.
        (directory / name).write_bytes(content)
