"""`submit.py doctor`: what the cluster it stands on offers, and what of it Sluice will use or lacks.

Facts are read with Slurm's own commands (`scontrol show config`, `scontrol show partition`, `sinfo`,
`srun --mpi=list`, `sacctmgr show qos`), turned into plain values by the parsers, and judged by :func:`judge`, a pure
function: `ok`, `note` (works, and something is worth knowing) or `problem` (something will not work). The sources of
the judgements are slurm.conf(5) and what the tests see on a real Slurm.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from data_prep.lustre import file_system_type
from pipeline.config_site import SiteConfig
from pipeline.config_types import parse_time
from pipeline.errors import UserError
from slurm.states import call, fields, parse_config

NETWORK_FILE_SYSTEMS = {
    "9p", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "dvs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "virtiofs", "wekafs",
}  # fmt: skip
Verdict = Literal["ok", "note", "problem"]
_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
_NO_PREEMPTION, _BY_QOS = "preempt/none", "preempt/qos"
_CHECK_S = 60
_QOS = ("Name", "Preempt", "PreemptMode", "GraceTime")


@dataclass(frozen=True)
class Finding:
    """One fact and what it means for a run."""

    verdict: Verdict
    what: str
    found: str
    meaning: str


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
    qos: Sequence[Mapping[str, str]] = ()
    """Name, Preempt, PreemptMode and GraceTime of each QOS, where they decide who makes room for whom."""


def parse_partitions(text: str) -> list[dict[str, str]]:
    """`scontrol --oneliner show partition`: names and values of each line."""
    return [found for line in text.splitlines() if "PartitionName" in (found := fields(line))]


def parse_gres(text: str) -> dict[str, str]:
    """`sinfo --noheader --format=%R|%G`: partition → resources of its nodes, without those that have none."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        partition, _, gres = line.partition("|")
        if gres and gres != "(null)" and gres not in found.setdefault(partition, []):
            found[partition].append(gres)
    return {partition: "; ".join(gres) for partition, gres in found.items() if gres}


def parse_mpi(text: str) -> list[str]:
    """`srun --mpi=list`: the plugins. Slurm writes them one a line, older ones behind `srun: `."""
    words = (line.removeprefix("srun:").strip() for line in text.splitlines())
    return [word for word in words if re.fullmatch(r"[a-z]\w*", word)]


def parse_qos(text: str) -> list[dict[str, str]]:
    """`sacctmgr --noheader --parsable2 show qos format=…` of the names in :data:`_QOS`."""
    rows = (line.split("|") for line in text.splitlines())
    return [dict(zip(_QOS, row, strict=True)) for row in rows if len(row) == len(_QOS)]


def number(text: str) -> int | None:
    """The number that a setting begins with: `10 sec` → 10; None where there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else None


def judge(facts: Facts) -> Iterator[Finding]:
    """What the facts mean for a run."""
    config = facts.config

    def value(name: str) -> int:
        return number(config.get(name, "")) or 0

    def note_unless(good: bool) -> Verdict:
        return "ok" if good else "note"

    version = config.get("SLURM_VERSION", "?")
    tried = tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (22, 5)
    yield Finding(note_unless(tried), "Slurm", version, "22.05 and later are known to work")
    yield from (_partition(partition, facts) for partition in facts.partitions)
    preempts = config.get("PreemptType", _NO_PREEMPTION)
    if preempts != _NO_PREEMPTION:
        where = "`sacctmgr show qos`" if preempts == _BY_QOS else "the partitions"
        yield Finding("ok", "preemption", preempts, f"jobs may have to make room for others: see {where}")
        for qos in facts.qos:
            if by := [other["Name"] for other in facts.qos if qos["Name"] in other["Preempt"].split(",")]:
                mode = config.get("PreemptMode", "?") if qos["PreemptMode"] == "cluster" else qos["PreemptMode"].upper()
                grace = parse_time(qos["GraceTime"]) if ":" in qos["GraceTime"] else 0
                yield _preempted(f"QOS {qos['Name']}", f"may be preempted by {', '.join(by)}", mode, grace)
        at_once = "preempt_send_user_signal" in config.get("SlurmctldParameters", "")
        meaning = f"ranks get {'USR2' if at_once else 'TERM'} as soon as their job must leave, and save"
        yield Finding("ok", "preempt_send_user_signal", "on" if at_once else "off", meaning)
    meaning = "Sluice asks for it with each job (--requeue), unless site.requeue is false"
    yield Finding("ok", "JobRequeue", config.get("JobRequeue", "?"), meaning)
    expire = re.search(r"cred_expire=(\d+)", config.get("AuthInfo", ""))
    wait = int(expire[1]) + 1 if expire else 121
    yield Finding(
        "ok", "after a requeue", f"{wait} s", "a requeued job waits so long before it may start (cred_expire)"
    )
    meaning = "from TERM to KILL; site.signal_s gives a save more time than that"
    yield Finding(note_unless(value("KillWait") >= 30), "KillWait", f"{value('KillWait')} s", meaning)
    tasks = value("MaxArraySize")
    meaning = f"stages.shard.tasks may be up to {tasks}" if tasks > 1 else "no job arrays: set stages.shard.tasks to 1"
    yield Finding("ok" if tasks > 1 else "problem", "MaxArraySize", str(tasks), meaning)
    jobs, meaning = value("MaxJobCount"), "jobs of all users at once; a run is 4 jobs and stages.shard.tasks"
    yield Finding(note_unless(jobs >= 1000), "MaxJobCount", str(jobs), meaning)
    storage = config.get("AccountingStorageType", "(null)")
    if storage in ("accounting_storage/none", "(null)"):
        meaning = "no sacct: Slurm forgets ended jobs after MinJobAge, then the run directory alone tells what happened"
        yield Finding("note", "accounting", "off", meaning)
    else:
        enforced = config.get("AccountingStorageEnforce", "none")
        meaning = (
            "sacct knows jobs that ended" if enforced == "none" else f"{enforced} enforced: site.account must be yours"
        )
        yield Finding("ok", "accounting", storage, meaning)
    age, meaning = value("MinJobAge"), "squeue and scontrol know a job for so long after its end"
    yield Finding(note_unless(age >= 60), "MinJobAge", f"{age} s", meaning)
    if config.get("EnforcePartLimits", "NO") == "NO":
        meaning = "a job that asks for more than its partition has is accepted and waits for ever: see `status`"
        yield Finding("note", "EnforcePartLimits", "NO", meaning)
    pmi = [name for name in facts.mpi if name.startswith("pm")]
    how = f"srun --mpi={pmi[0]}" if pmi else "mpirun (Slurm has no PMI here)"
    meaning = f"MPI ranks can be started by {how}; NCCL and Gloo need none of it"
    yield Finding(note_unless(bool(pmi)), "srun --mpi", ", ".join(facts.mpi) or "nothing", meaning)
    topology = config.get("TopologyPlugin", "topology/none")
    if topology in ("", "topology/none", "topology/default", "topology/flat"):
        yield Finding("note", "TopologyPlugin", topology, "Slurm knows no switches: site.switches does nothing")
    else:
        most = re.search(r"max_switch_wait=(\d+)", config.get("SchedulerParameters", ""))
        meaning = (
            f"site.switches keeps a job under few switches, and waits for that at most {most[1] if most else 300} s"
        )
        yield Finding("ok", "TopologyPlugin", topology, meaning)


def _partition(partition: Mapping[str, str], facts: Facts) -> Finding:
    name, state, mode = (partition.get(key, "?") for key in ("PartitionName", "State", "PreemptMode"))
    what = f"partition {name}" + (" (default)" if partition.get("Default") == "YES" else "")
    found = f"{partition.get('TotalNodes')} nodes, time {partition.get('MaxTime')}, a job's nodes "
    found += f"{partition.get('MaxNodes')}, gres {facts.gres.get(name, 'none')}"
    preempts = facts.config.get("PreemptType", _NO_PREEMPTION)
    if state != "UP":
        return Finding("problem", what, found, f"its state is {state}: jobs do not start here")
    if preempts == _BY_QOS:
        return Finding("ok", what, found, "the QOS of a job says whether it may be preempted")
    if preempts == _NO_PREEMPTION or mode == "OFF":
        return Finding("ok", what, found, "jobs here are not preempted")
    return _preempted(what, found, mode, number(partition.get("GraceTime", "")) or 0)


def _preempted(what: str, found: str, mode: str, grace: int) -> Finding:
    """What a job has to expect where it may be preempted."""
    found += f", PreemptMode {mode}, GraceTime {grace} s"
    if "REQUEUE" not in mode:
        gone = "gone: with site.requeue: false a successor takes over" if "CANCEL" in mode else f"treated with {mode}"
        return Finding("note", what, found, f"a preempted job is {gone}")
    if grace:
        return Finding("ok", what, found, f"a preempted training has about {grace} s to save, then it is requeued")
    meaning = "a preempted training has KillWait to save, and is requeued; work since its last checkpoint may be lost"
    return Finding("note", what, found, meaning)


def file_system(folder: Path, nodes: int, kind: str, unseen: str | None) -> Iterator[Finding]:
    """Whether `folder` on a file system of type `kind` can hold runs for `nodes` nodes.

    `unseen`: why compute nodes do not see it, "" where they do, None where nobody looked.
    """
    shared = kind in NETWORK_FILE_SYSTEMS or kind.startswith("fuse.")
    verdict: Verdict = "problem" if unseen or (unseen is None and nodes and not shared) else "ok"
    if unseen is not None:
        meaning = f"compute nodes do not share it: {unseen}" if unseen else "compute nodes see it"
    elif shared:
        meaning = "a network file system; --check-nodes asks whether compute nodes see it"
    elif nodes:
        meaning = "no network file system: if compute nodes do not share it no job starts; --check-nodes finds out"
    else:
        meaning = "runs stay on this machine"
    yield Finding(verdict, "run.root", f"{folder}: {kind or 'unknown file system'}", meaning)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Finding("ok", "file locks", "flock works", "two jobs cannot run the same stage at once")
    except OSError as error:
        meaning = "nothing keeps two jobs from running the same stage at once"
        meaning += ", and events.jsonl may lose lines" if kind.startswith("nfs") else ""
        yield Finding("note", "file locks", str(error), meaning)


def seen_by_nodes(folder: Path, nodes: int, site: SiteConfig) -> tuple[str | None, str]:
    """Read a file of `folder` on compute nodes (two, where there are) with srun, as the site's jobs are asked for.

    "" where it is there, else why not; None and Slurm's words where no node was asked.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".sluice-doctor-") as probe:
        probe.write(b"seen\n")
        probe.flush()
        wanted = min(nodes, 2)
        command = ["srun", f"--nodes={wanted}", f"--ntasks={wanted}", "--time=1", "--chdir=/"]
        wishes = {"partition": site.partition, "account": site.account, "qos": site.qos, "constraint": site.constraint}
        command += [f"--{option}={value}" for option, value in wishes.items() if value]
        command += [f"--immediate={_CHECK_S}", "cat", probe.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _CHECK_S)
        except subprocess.TimeoutExpired:
            return None, f"srun did not answer within {2 * _CHECK_S} s"
    if done.returncode == 0:
        return "" if done.stdout.split() == ["seen"] * wanted else "the file read there is another one", ""
    told = done.stderr.splitlines()
    if by_cat := [line for line in told if re.match(r"\S*\bcat: ", line)]:
        return by_cat[0], ""
    return None, next((line for line in told if "error: " in line), f"srun left with {done.returncode}")


def examine(folder: Path, check_nodes: bool, site: SiteConfig) -> list[Finding]:
    """All findings for runs in `folder`. Raises UserError where there is no such folder."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent  # `runs` is made by the first run
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name the one that will hold the runs (run.root)")
    folder = folder.resolve()
    kind = file_system_type(folder)
    config = call("scontrol", "show", "config")
    if config is None:
        meaning = "`scontrol show config` fails: the controller is down, or this machine may not ask it"
        lacks = Finding("problem", "Slurm", "no answer", meaning)
        if shutil.which("scontrol") is None:
            meaning = "runs use this machine (--executor local); on a cluster, ask doctor on a login node"
            lacks = Finding("note", "Slurm", "no scontrol on PATH", meaning)
        return [lacks, *file_system(folder, 0, kind, None)]
    partitions = parse_partitions(call("scontrol", "--oneliner", "show", "partition") or "")
    gres = parse_gres(call("sinfo", "--noheader", "--format=%R|%G") or "")
    mpi, known = parse_mpi(call("srun", "--mpi=list") or ""), parse_config(config)
    by_qos = known.get("PreemptType") == _BY_QOS
    listing = ("sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={','.join(_QOS)}")
    facts = Facts(known, partitions, gres, mpi, parse_qos((call(*listing) if by_qos else None) or ""))
    nodes = max((number(partition.get("TotalNodes", "")) or 0 for partition in partitions), default=0)
    unseen, refused = seen_by_nodes(folder, nodes, site) if check_nodes and nodes else (None, "")
    found = [*judge(facts), *file_system(folder, nodes, kind, unseen)]
    if refused:
        meaning = "the nodes could not be asked; try later, or with --site PROFILE (its partition, account, QOS)"
        found.append(Finding("note", "--check-nodes", refused, meaning))
    return found


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """The findings as a table, and the count of what will not work."""
    table = Table("", "what", "found", "what it means for a run", box=None, pad_edge=False)
    for finding in findings:
        words = (escape(text) for text in (finding.what, finding.found, finding.meaning))
        table.add_row(f"[{_COLOURS[finding.verdict]}]{finding.verdict}[/]", *words)
    console.print(table)
    bad = sum(finding.verdict == "problem" for finding in findings)
    console.print(f"{bad} problem{'' if bad == 1 else 's'}", highlight=False, style="red" if bad else "green")
