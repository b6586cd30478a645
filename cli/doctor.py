"""`doctor`: print what this cluster or machine supports, and how that affects a run.

Facts are read with Slurm's own commands (`scontrol show config`, `scontrol show partition`, `sinfo`,
`srun --mpi=list`) and parsed into plain values. The pure function :func:`assess_cluster` gives each fact a verdict:
`ok`, `note` (works, with a restriction) or `problem` (something will fail). The verdicts follow slurm.conf(5) and tests
on a real Slurm. Facts that the user cannot change are left out. If Slurm does not respond, this machine is examined
instead: cores, memory, MPI, and torch with its GPUs.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.common import console
from pipeline.base.command import format_command
from pipeline.base.errors import UserError
from pipeline.base.files import read_file_system_type
from pipeline.base.ownership import find_unsafe_ancestors
from pipeline.config.read import load_site
from pipeline.config.site import SiteConfig
from slurm.query.slurm_commands import SRUN_ERROR, parse_key_values, parse_slurm_config, run_slurm_command

NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "dvs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
}  # fmt: skip
"""Types of file systems that several machines can share, as df(1) prints them."""
Verdict = Literal["ok", "note", "problem"]
_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}
_NODE_WAIT_S = 60
"""How long `srun` may wait for nodes."""
_TIMEOUT_S = 120
"""Time limit of the check of compute nodes, and of the import of torch."""
_TORCH_PROGRAM = """\
import json, torch
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.version.cuda, [f"{g.name}, {g.total_memory / 1e9:.0f} GB" for g in gpus]]))
"""


def doctor(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the folder for runs (run.root)")] = Path("runs"),
    check_nodes: Annotated[
        bool, typer.Option("--check-nodes", help="also check that compute nodes see FOLDER (a short srun on two nodes)")
    ] = False,
    site: Annotated[
        Path | None,
        typer.Option(metavar="PROFILE", help="with --check-nodes: use the partition, account … of this site profile"),
    ] = None,
) -> None:
    """Check what this cluster, or this machine, supports, and what that means for a run."""
    print_findings(run_checks(folder, check_nodes, load_site(site)), console)


@dataclass(frozen=True)
class Finding:
    """A fact, and what it means for a run."""

    subject: str
    fact: str
    meaning: str
    verdict: Verdict = "ok"


@dataclass(frozen=True)
class ClusterFacts:
    """What Slurm reports about a cluster."""

    config: Mapping[str, str]
    """slurm.conf, as the controller reports it."""
    partitions: Sequence[Mapping[str, str]]
    """The settings of each partition, with Slurm's names."""
    gres: Mapping[str, str]
    """Generic resources (GPUs) of the nodes, by partition. Partitions without generic resources are left out."""
    mpi_plugins: Sequence[str]
    """The plugins that `srun --mpi=list` prints."""


def parse_partitions(text: str) -> list[dict[str, str]]:
    """Parse the output of `scontrol --oneliner show partition` into the settings of each partition."""
    return [partition for line in text.splitlines() if "PartitionName" in (partition := parse_key_values(line))]


def parse_gres(text: str) -> dict[str, str]:
    """Parse the output of `sinfo --noheader --format=%R|%G` into the generic resources of each partition.

    Partitions without generic resources are left out. Different resources of a partition are separated by `; `.
    """
    gres_by_partition: dict[str, str] = {}
    for line in dict.fromkeys(text.splitlines()):
        partition, _, gres = line.partition("|")
        if gres not in ("", "(null)"):
            previous = f"{gres_by_partition[partition]}; " if partition in gres_by_partition else ""
            gres_by_partition[partition] = previous + gres
    return gres_by_partition


def parse_mpi_plugins(text: str) -> list[str]:
    """Parse the output of `srun --mpi=list` into the names of the plugins.

    Each plugin has its own line; older versions of Slurm print `srun: ` before the name. Other lines are left out.
    """
    names = (line.removeprefix("srun:").strip() for line in text.splitlines())
    return [name for name in names if re.fullmatch(r"[a-z]\w*", name)]


def parse_leading_number(settings: Mapping[str, str], name: str) -> int:
    """Return the number at the start of a setting, such as 10 for `10 sec`; 0 if the setting has none."""
    match = re.match(r"\d+", settings.get(name, ""))
    return int(match[0]) if match else 0


def assess_cluster(facts: ClusterFacts) -> Iterator[Finding]:
    """Yield the findings about a cluster: preemption, limits, accounting and MPI."""
    config = facts.config
    version = config.get("SLURM_VERSION", "?")
    is_tested = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (22, 5)
    yield Finding("Slurm", version, "22.05 and later are known to work", "ok" if is_tested else "note")
    yield from _assess_preemption(facts)
    max_jobs = parse_leading_number(config, "MaxJobCount")
    meaning = "jobs of all users at once; a run has 4 jobs, and stages.shard.tasks more"
    yield Finding("MaxJobCount", str(max_jobs), meaning, "ok" if max_jobs >= 1000 else "note")
    max_tasks = parse_leading_number(config, "MaxArraySize")
    if max_tasks > 1:
        yield Finding("MaxArraySize", str(max_tasks), f"stages.shard.tasks may be up to {max_tasks}")
    else:
        yield Finding("MaxArraySize", str(max_tasks), "no job arrays: set stages.shard.tasks to 1", "problem")
    storage = config.get("AccountingStorageType", "none")
    enforced = config.get("AccountingStorageEnforce", "none")
    if storage in ("accounting_storage/none", "none", "(null)"):
        meaning = "no sacct: Slurm forgets ended jobs after MinJobAge; then only the run directory shows what happened"
        yield Finding("accounting", "off", meaning, "note")
    else:
        account = "" if enforced == "none" else f"; {enforced} enforced: site.account must be an account of yours"
        yield Finding("accounting", storage, f"sacct reports jobs that ended{account}")
    # MPI libraries use the plugins pmi2 and pmix, also with a version such as pmix_v5
    pmi = next((f"srun --mpi={name}" for name in facts.mpi_plugins if name.startswith("pm")), None)
    starter = pmi or "mpirun (Slurm has no PMI here)"
    meaning = f"{starter} can start MPI ranks; NCCL and Gloo need no PMI"
    yield Finding("srun --mpi", ", ".join(facts.mpi_plugins) or "nothing", meaning, "ok" if pmi else "note")


def _assess_preemption(facts: ClusterFacts) -> Iterator[Finding]:
    """Yield a finding about each partition and its preemption, and a finding about the signal at a preemption."""
    config = facts.config
    preempt_type = config.get("PreemptType", "preempt/none")
    for partition in facts.partitions:
        name = partition.get("PartitionName", "?")
        state = partition.get("State", "?")
        mode = partition.get("PreemptMode", "?")
        subject = f"partition {name}" + (" (default)" if partition.get("Default") == "YES" else "")
        fact = (
            f"{partition.get('TotalNodes')} nodes, MaxTime {partition.get('MaxTime')}, MaxNodes "
            f"{partition.get('MaxNodes')}, gres {facts.gres.get(name, 'none')}"
        )
        if state != "UP":
            yield Finding(subject, fact, f"its state is {state}: jobs do not start here", "problem")
        elif preempt_type == "preempt/qos":
            yield Finding(subject, fact, "the QOS of a job decides whether it can be preempted: `sacctmgr show qos`")
        elif preempt_type == "preempt/none" or mode == "OFF":
            yield Finding(subject, fact, "jobs here are not preempted")
        else:
            yield _assess_preempted_jobs(subject, fact, mode, parse_leading_number(partition, "GraceTime"))
    if preempt_type != "preempt/none":
        sends_user_signal = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
        meaning = f"ranks receive SIG{'USR2' if sends_user_signal else 'TERM'} when their job is preempted, and save"
        yield Finding("preempt_send_user_signal", "on" if sends_user_signal else "off", meaning)


def _assess_preempted_jobs(subject: str, fact: str, mode: str, grace_s: int) -> Finding:
    """Return the finding about a partition whose jobs can be preempted.

    Args:
        subject: the name of the partition.
        fact: the description of the partition.
        mode: the PreemptMode of the partition.
        grace_s: the GraceTime of the partition, in seconds.
    """
    fact += f", PreemptMode {mode}, GraceTime {grace_s} s"
    if "REQUEUE" not in mode:
        effect = f"treated with {mode}"
        if "CANCEL" in mode:
            effect = "cancelled: set site.requeue: false, so that a successor job continues"
        return Finding(subject, fact, f"a preempted job is {effect}", "note")
    if grace_s:
        return Finding(subject, fact, f"a preempted job has about {grace_s} s to save; then it is requeued")
    meaning = "a preempted job has KillWait to save, and is requeued; work since its last checkpoint may be lost"
    return Finding(subject, fact, meaning, "note")


def describe_machine() -> Iterator[Finding]:
    """Yield the findings about this machine, for runs without Slurm."""
    meaning = (
        "the train stage uses stages.train.tasks_per_node × train.threads of them; more threads than cores are slower"
    )
    yield Finding("CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}", meaning)
    size_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    free_gb = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    meaning = f"`{format_command('plan', 'CONFIG')}` predicts the memory of each rank"
    yield Finding("memory", f"{size_gb:.1f} GB, {free_gb:.1f} GB of it free", meaning)
    yield from _describe_torch()
    # the mpirun in the folder of this Python is preferred, as in slurm/supervise/launch.py
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if mpirun := shutil.which("mpirun", path=path):
        # `run_slurm_command` can run any command with a time limit
        version = (run_slurm_command(mpirun, "--version") or "unknown version").splitlines()[0]
        yield Finding("MPI", f"{version}: {mpirun}", "parallel.backend: mpi can be used")
    else:
        yield Finding("MPI", "no mpirun", "only parallel.backend: mpi requires it: pip install -e '.[mpi]'")


def _describe_torch() -> Iterator[Finding]:
    """Yield findings about torch and its GPUs. A child process imports torch, so that the import has a time limit."""
    output = run_slurm_command(sys.executable, "-c", _TORCH_PROGRAM, timeout_s=_TIMEOUT_S)
    if output is None:
        meaning = f"training is impossible; `{sys.executable} -c 'import torch'` shows the reason"
        yield Finding("torch", f"not importable within {_TIMEOUT_S} s", meaning, "problem")
        return
    version, cuda, gpus = json.loads(output)
    meaning = f"each rank uses one: up to {len(gpus)} ranks" if gpus else "ranks compute on CPUs: small models only"
    yield Finding("torch", version, f"built for CUDA {cuda}" if cuda else "built for CPUs")
    yield Finding("GPUs", "; ".join(gpus) or "none that torch can use", meaning)


def check_file_system(folder: Path, nodes: int, file_system: str, sharing_problem: str | None) -> Iterator[Finding]:
    """Yield findings about a folder for runs: whether compute nodes share the folder, and whether file locks work.

    Args:
        folder: the folder for runs.
        nodes: the number of compute nodes; 0 without Slurm.
        file_system: the type of the folder's file system, such as `nfs`; "" if unknown.
        sharing_problem: why compute nodes do not see the folder; "" if they see the folder; None if this was not
            checked.
    """
    verdict: Verdict = "ok"
    if sharing_problem:
        verdict = "problem"
        meaning = f"compute nodes do not share it: {sharing_problem}"
    elif sharing_problem is not None:
        meaning = "compute nodes see it"
    elif file_system in NETWORK_FILE_SYSTEMS or file_system.startswith("fuse."):
        meaning = "a network file system; --check-nodes checks that compute nodes see it"
    elif not nodes:
        meaning = "runs stay on this machine"
    else:
        verdict = "problem"
        meaning = "jobs cannot start if compute nodes do not share this folder; --check-nodes checks this"
    yield Finding("run.root", f"{folder}: {file_system or 'unknown file system'}", meaning, verdict)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        meaning = "on one machine, two jobs cannot run the same stage at once"
        if file_system in NETWORK_FILE_SYSTEMS:
            meaning += (
                "; on two nodes only if the mount shares locks (Lustre: flock, not localflock): ask your administrators"
            )
        yield Finding("file locks", "flock works", meaning)
    except OSError as error:
        meaning = "two jobs could run the same stage at once; on NFS, events.jsonl could also lose lines"
        yield Finding("file locks", str(error), meaning, "note")


def check_parent_folders(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each folder on the path to a run in which other users can replace the run or a folder.

    They could then replace the code of a run whose jobs are pending. `folder` and its parent folders are checked.
    """
    for parent, reason in find_unsafe_ancestors(folder / "RUN"):
        meaning = (
            "other users can replace a run there, and your jobs would execute their code; the owner of the folder can "
            "set the sticky bit"
        )
        yield Finding("run.root", f"{parent} {reason}", meaning, "note")


def check_nodes_see_folder(folder: Path, nodes: int, site: SiteConfig) -> tuple[str | None, str]:
    """Check with srun that up to two compute nodes can read a new file in `folder`.

    Args:
        folder: the folder for runs.
        nodes: the number of nodes of the cluster.
        site: the site profile; srun uses the partition, account, QOS and constraint of this profile.

    Returns:
        The problem and Slurm's message. The problem is why the nodes do not see the file; "" if they see the file; None
        if srun reached no node. The message is Slurm's reason if srun reached no node, otherwise "".
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sluice-doctor-") as probe:
        probe.write(b"seen\n")
        probe.flush()
        count = min(nodes, 2)
        # `time` is in minutes, `immediate` in seconds
        options = {"nodes": count, "ntasks": count, "time": 1, "chdir": "/", "immediate": _NODE_WAIT_S}
        options |= site.model_dump(include={"partition", "account", "qos", "constraint"})
        srun = ["srun", *(f"--{name}={value}" for name, value in options.items() if value), "cat", probe.name]
        try:
            result = subprocess.run(srun, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None, f"srun did not respond within {_TIMEOUT_S} s"
    if result.returncode == 0:
        return "" if result.stdout.split() == ["seen"] * count else "the nodes read a different file", ""
    messages = result.stderr.splitlines()
    if cat_errors := [line for line in messages if re.match(r"\S*\bcat: ", line)]:
        return cat_errors[0], ""
    return None, next((line for line in messages if SRUN_ERROR.search(line)), f"srun exited with {result.returncode}")


def run_checks(folder: Path, check_nodes: bool, site: SiteConfig) -> list[Finding]:
    """Return all findings for runs in `folder`.

    Args:
        folder: the folder for runs; it may not exist yet.
        check_nodes: whether to check with srun that compute nodes see the folder.
        site: the site profile for this check.

    Raises:
        UserError: if `folder`, or its nearest parent that exists, is not a folder.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # the first run creates the missing folders
    if not folder.is_dir():
        raise UserError("cli.not_a_folder", f"{folder} is not a folder; give the folder for runs (run.root)")
    folder = folder.resolve()
    file_system = read_file_system_type(folder)
    config = run_slurm_command("scontrol", "show", "config")
    if config is None:
        meaning = "runs use this machine (--executor local); on a cluster, run doctor on a login node"
        slurm = Finding("Slurm", "no scontrol on PATH", meaning, "note")
        if shutil.which("scontrol"):
            meaning = "`scontrol show config` fails: the controller is down, or this machine has no access to it"
            slurm = Finding("Slurm", "no response", meaning, "problem")
        findings = [slurm, *describe_machine()]
        return [*findings, *check_file_system(folder, 0, file_system, None), *check_parent_folders(folder)]
    partitions = parse_partitions(run_slurm_command("scontrol", "--oneliner", "show", "partition") or "")
    gres = parse_gres(run_slurm_command("sinfo", "--noheader", "--format=%R|%G") or "")
    mpi_plugins = parse_mpi_plugins(run_slurm_command("srun", "--mpi=list") or "")
    facts = ClusterFacts(parse_slurm_config(config), partitions, gres, mpi_plugins)
    nodes = max((parse_leading_number(partition, "TotalNodes") for partition in partitions), default=0)
    sharing_problem: str | None = None
    srun_message = ""
    if check_nodes and nodes:
        sharing_problem, srun_message = check_nodes_see_folder(folder, nodes, site)
    findings = [
        *assess_cluster(facts),
        *check_file_system(folder, nodes, file_system, sharing_problem),
        *check_parent_folders(folder),
    ]
    if srun_message:
        meaning = (
            "no node was reached; try again later, or with --site PROFILE: srun then requests the profile's partition, "
            "account and QOS"
        )
        findings.append(Finding("--check-nodes", srun_message, meaning, "note"))
    return findings


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print the findings as a table, and the number of problems."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found", "what it means for a run"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        cells = (Text(text) for text in (finding.subject, finding.fact, finding.meaning))
        table.add_row(Text(finding.verdict, style=_COLORS[finding.verdict]), *cells)
    console.print(table)
    problems = sum(finding.verdict == "problem" for finding in findings)
    console.print(f"{problems} problem{'' if problems == 1 else 's'}", style="red" if problems else "green")
