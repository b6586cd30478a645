"""`submit.py doctor`: what the cluster it stands on offers, and what of it Sluice will use or lacks.

Facts are read with Slurm's own commands (`scontrol show config`, `scontrol show partition`, `sinfo`,
`srun --mpi=list`), turned into plain values by the parsers, and judged by :func:`judge`, a pure function: `ok`, `note`
(works, and something is worth knowing) or `problem` (something will not work). The sources of the judgements are
slurm.conf(5) and what the tests see on a real Slurm. What a person could do nothing about is left out. Where no Slurm
answers, this machine is looked at: cores, memory, MPI, and torch with its GPUs, in a process of its own, for its import
takes seconds.
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
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.base.errors import UserError
from pipeline.base.files import file_system_type
from pipeline.base.ownership import unsafe_ancestors
from pipeline.config.site import SiteConfig
from slurm.query.job_states import parse_key_values, parse_slurm_config, run_slurm_command
from slurm.query.slurm_messages import SRUN_ERROR

NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "dvs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
}  # fmt: skip
Verdict = Literal["ok", "note", "problem"]
_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
_CHECK_S = 60
_ASK_TORCH = """\
import json, torch
gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, torch.version.cuda, [f"{g.name}, {g.total_memory / 1e9:.0f} GB" for g in gpus]]))
"""


@dataclass(frozen=True)
class Finding:
    """One fact and what it means for a run."""

    what: str
    found: str
    meaning: str
    verdict: Verdict = "ok"


@dataclass(frozen=True)
class Facts:
    """What the cluster says of itself."""

    config: Mapping[str, str]
    """slurm.conf as the controller has it."""
    partitions: Sequence[Mapping[str, str]]
    """One mapping per partition, by Slurm's names."""
    gres: Mapping[str, str]
    """Generic resources (GPUs) of the nodes of each partition, where there are any."""
    mpi: Sequence[str]
    """Plugins of `srun --mpi`."""


def parse_partitions(text: str) -> list[dict[str, str]]:
    """`scontrol --oneliner show partition`: names and values of each line."""
    return [found for line in text.splitlines() if "PartitionName" in (found := parse_key_values(line))]


def parse_gres(text: str) -> dict[str, str]:
    """`sinfo --noheader --format=%R|%G`: partition → resources of its nodes, without those that have none."""
    found: dict[str, str] = {}
    for line in dict.fromkeys(text.splitlines()):
        partition, _, gres = line.partition("|")
        if gres not in ("", "(null)"):
            found[partition] = f"{found[partition]}; {gres}" if partition in found else gres
    return found


def parse_mpi(text: str) -> list[str]:
    """`srun --mpi=list`: the plugins. Slurm writes them one a line, older ones behind `srun: `."""
    words = (line.removeprefix("srun:").strip() for line in text.splitlines())
    return [word for word in words if re.fullmatch(r"[a-z]\w*", word)]


def number(settings: Mapping[str, str], name: str) -> int:
    """The number that a setting begins with, 0 where there is none: `10 sec` → 10."""
    match = re.match(r"\d+", settings.get(name, ""))
    return int(match[0]) if match else 0


def judge(facts: Facts) -> Iterator[Finding]:
    """What the facts mean for a run."""
    config = facts.config
    version = config.get("SLURM_VERSION", "?")
    tried = tuple(map(int, re.findall(r"\d+", version)[:2])) >= (22, 5)
    yield Finding("Slurm", version, "22.05 and later are known to work", "ok" if tried else "note")
    yield from _preemption(facts)
    most, meaning = number(config, "MaxJobCount"), "jobs of all users at once; a run is 4 jobs and stages.shard.tasks"
    yield Finding("MaxJobCount", str(most), meaning, "ok" if most >= 1000 else "note")
    if (tasks := number(config, "MaxArraySize")) > 1:
        yield Finding("MaxArraySize", str(tasks), f"stages.shard.tasks may be up to {tasks}")
    else:
        yield Finding("MaxArraySize", str(tasks), "no job arrays: set stages.shard.tasks to 1", "problem")
    storage, enforced = (config.get(f"AccountingStorage{name}", "none") for name in ("Type", "Enforce"))
    if storage in ("accounting_storage/none", "none", "(null)"):
        meaning = "no sacct: Slurm forgets ended jobs after MinJobAge, then the run directory alone tells what happened"
        yield Finding("accounting", "off", meaning, "note")
    else:
        account = "" if enforced == "none" else f"; {enforced} enforced: site.account must be yours"
        yield Finding("accounting", storage, f"sacct knows jobs that ended{account}")
    pmi = next((f"srun --mpi={name}" for name in facts.mpi if name.startswith("pm")), None)
    meaning = f"MPI ranks can be started by {pmi or 'mpirun (Slurm has no PMI here)'}; NCCL and Gloo need none of it"
    yield Finding("srun --mpi", ", ".join(facts.mpi) or "nothing", meaning, "ok" if pmi else "note")


def _preemption(facts: Facts) -> Iterator[Finding]:
    """The partitions, and whether their jobs make room for others, by PreemptType."""
    config, kind = facts.config, facts.config.get("PreemptType", "preempt/none")
    for partition in facts.partitions:
        name, state, mode = (partition.get(key, "?") for key in ("PartitionName", "State", "PreemptMode"))
        what = f"partition {name}" + (" (default)" if partition.get("Default") == "YES" else "")
        found = f"{partition.get('TotalNodes')} nodes, time {partition.get('MaxTime')}, a job's nodes "
        found += f"{partition.get('MaxNodes')}, gres {facts.gres.get(name, 'none')}"
        if state != "UP":
            yield Finding(what, found, f"its state is {state}: jobs do not start here", "problem")
        elif kind == "preempt/qos":
            yield Finding(what, found, "the QOS of a job says whether it may be preempted: see `sacctmgr show qos`")
        elif kind == "preempt/none" or mode == "OFF":
            yield Finding(what, found, "jobs here are not preempted")
        else:
            yield _preempted(what, found, mode, number(partition, "GraceTime"))
    if kind != "preempt/none":
        at_once = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
        meaning = f"ranks get {'USR2' if at_once else 'TERM'} as soon as their job must leave, and save"
        yield Finding("preempt_send_user_signal", "on" if at_once else "off", meaning)


def _preempted(what: str, found: str, mode: str, grace: int) -> Finding:
    """What a job has to expect where it may be preempted."""
    found += f", PreemptMode {mode}, GraceTime {grace} s"
    if "REQUEUE" not in mode:
        gone = "gone: with site.requeue: false a successor takes over" if "CANCEL" in mode else f"treated with {mode}"
        return Finding(what, found, f"a preempted job is {gone}", "note")
    if grace:
        return Finding(what, found, f"a preempted training has about {grace} s to save, then it is requeued")
    meaning = "a preempted training has KillWait to save, and is requeued; work since its last checkpoint may be lost"
    return Finding(what, found, meaning, "note")


def this_machine() -> Iterator[Finding]:
    """What there is for a run where there is no Slurm."""
    meaning = "stages.train.tasks_per_node × train.threads of them are used; more only wait for each other"
    yield Finding("CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}", meaning)
    size, free = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") / 1e9 for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    meaning = "`python submit.py plan CONFIG` says what a rank of a config takes"
    yield Finding("memory", f"{size:.1f} GB, {free:.1f} GB of it free", meaning)
    yield from _torch()
    # the one beside this Python comes first, as slurm/supervise/mpi_launch.py has it
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if mpirun := shutil.which("mpirun", path=path):
        version = (run_slurm_command(mpirun, "--version") or "it does not say its version").splitlines()[0]
        yield Finding("MPI", f"{version}: {mpirun}", "parallel.backend: mpi can be used")
    else:
        yield Finding("MPI", "no mpirun", "only parallel.backend: mpi needs one: pip install -e '.[mpi]'")


def _torch() -> Iterator[Finding]:
    """torch and the GPUs that it sees."""
    told = run_slurm_command(sys.executable, "-c", _ASK_TORCH, timeout_s=2 * _CHECK_S)
    if told is None:
        meaning = f"`{sys.executable} -c 'import torch'` says why: nothing can be trained with it"
        yield Finding("torch", f"not importable within {2 * _CHECK_S} s", meaning, "problem")
        return
    version, cuda, gpus = json.loads(told)
    ranks = f"each rank takes one: up to {len(gpus)} ranks" if gpus else "ranks compute on CPUs: small models"
    yield Finding("torch", version, f"built for CUDA {cuda}" if cuda else "built for CPUs")
    yield Finding("GPUs", "; ".join(gpus) or "none that torch can use", ranks)


def file_system(folder: Path, nodes: int, kind: str, unseen: str | None) -> Iterator[Finding]:
    """Whether `folder` on a file system of type `kind` can hold runs for `nodes` nodes.

    `unseen`: why compute nodes do not see it, "" where they do, None where nobody looked.
    """
    verdict: Verdict = "ok"
    if unseen:
        verdict, meaning = "problem", f"compute nodes do not share it: {unseen}"
    elif unseen is not None:
        meaning = "compute nodes see it"
    elif kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse."):
        meaning = "a network file system; --check-nodes asks whether compute nodes see it"
    elif not nodes:
        meaning = "runs stay on this machine"
    else:
        verdict, meaning = "problem", "if compute nodes do not share it no job starts; --check-nodes finds out"
    yield Finding("run.root", f"{folder}: {kind or 'unknown file system'}", meaning, verdict)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        meaning = "on this machine two jobs cannot run the same stage at once"
        if kind in NETWORK_FILE_SYSTEMS:
            meaning += "; on two nodes only if the mount shares locks (Lustre: flock, not localflock): ask the admins"
        yield Finding("file locks", "flock works", meaning)
    except OSError as error:
        meaning = "two jobs may run the same stage at once; on NFS, events.jsonl may lose lines, too"
        yield Finding("file locks", str(error), meaning, "note")


def folders_above(folder: Path) -> Iterator[Finding]:
    """The folders down to `folder` in which others can replace a run while its jobs wait."""
    for above, reason in unsafe_ancestors(folder / "RUN"):
        meaning = "others can replace a run there, and your jobs would execute theirs; its owner can set the sticky bit"
        yield Finding("run.root", f"{above} {reason}", meaning, "note")


def seen_by_nodes(folder: Path, nodes: int, site: SiteConfig) -> tuple[str | None, str]:
    """Read a file of `folder` on compute nodes (two, where there are) with srun, as the site's jobs are asked for.

    "" where it is there, else why not; None and Slurm's words where no node was asked.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sluice-doctor-") as probe:
        probe.write(b"seen\n")
        probe.flush()
        wanted = min(nodes, 2)
        options = {"nodes": wanted, "ntasks": wanted, "time": 1, "chdir": "/", "immediate": _CHECK_S}
        options |= site.model_dump(include={"partition", "account", "qos", "constraint"})
        command = ["srun", *(f"--{name}={value}" for name, value in options.items() if value), "cat", probe.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _CHECK_S)
        except subprocess.TimeoutExpired:
            return None, f"srun did not answer within {2 * _CHECK_S} s"
    if done.returncode == 0:
        return "" if done.stdout.split() == ["seen"] * wanted else "the file read there is another one", ""
    told = done.stderr.splitlines()
    if by_cat := [line for line in told if re.match(r"\S*\bcat: ", line)]:
        return by_cat[0], ""
    return None, next((line for line in told if SRUN_ERROR.search(line)), f"srun left with {done.returncode}")


def examine(folder: Path, check_nodes: bool, site: SiteConfig) -> list[Finding]:
    """All findings for runs in `folder`. Raises UserError where there is no such folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # `runs` is made by the first run
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name the one that will hold the runs (run.root)")
    folder = folder.resolve()
    kind = file_system_type(folder)
    if (config := run_slurm_command("scontrol", "show", "config")) is None:
        meaning = "runs use this machine (--executor local); on a cluster, ask doctor on a login node"
        lacks = Finding("Slurm", "no scontrol on PATH", meaning, "note")
        if shutil.which("scontrol"):
            meaning = "`scontrol show config` fails: the controller is down, or this machine may not ask it"
            lacks = Finding("Slurm", "no answer", meaning, "problem")
        return [lacks, *this_machine(), *file_system(folder, 0, kind, None), *folders_above(folder)]
    partitions = parse_partitions(run_slurm_command("scontrol", "--oneliner", "show", "partition") or "")
    gres, mpi = (
        run_slurm_command("sinfo", "--noheader", "--format=%R|%G") or "",
        run_slurm_command("srun", "--mpi=list") or "",
    )
    facts = Facts(parse_slurm_config(config), partitions, parse_gres(gres), parse_mpi(mpi))
    nodes = max((number(partition, "TotalNodes") for partition in partitions), default=0)
    unseen, refused = seen_by_nodes(folder, nodes, site) if check_nodes and nodes else (None, "")
    findings = [*judge(facts), *file_system(folder, nodes, kind, unseen), *folders_above(folder)]
    if refused:
        meaning = "the nodes could not be asked; try later, or with --site PROFILE (its partition, account, QOS)"
        findings.append(Finding("--check-nodes", refused, meaning, "note"))
    return findings


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """The findings as a table, and the count of what will not work."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "found", "what it means for a run"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        words = (Text(text) for text in (finding.what, finding.found, finding.meaning))
        table.add_row(Text(finding.verdict, style=_COLOURS[finding.verdict]), *words)
    console.print(table)
    bad = sum(finding.verdict == "problem" for finding in findings)
    console.print(f"{bad} problem{'' if bad == 1 else 's'}", style="red" if bad else "green")
