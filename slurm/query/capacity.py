"""Check before submission that the cluster can run what a run's stages request.

If sbatch refuses a job in the middle of a chain, the jobs before it are already queued. It also accepts some requests
that no node can ever satisfy; such jobs wait forever. Three checks prevent this:

- :func:`check_capacity`: some nodes of the partition have the requested resources (`sinfo`).
- :func:`check_limits`: array sizes and the number of jobs are within the limits of the cluster and the user's QOS.
- :func:`find_placement_problem`: the ranks of a tensor parallel group share a node. It also runs at the start of a job.

What Slurm does not answer is not checked: sbatch decides.
"""

from __future__ import annotations

import getpass
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.base.dist_env import read_granted_tasks
from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.slurm_commands import cluster_settings, parse_key_values, read_slurm_config, run_slurm_command

TIMEOUT_S = 5.0
_FORMAT = "%P|%D|%c|%m|%f|%G"


@dataclass(frozen=True)
class Nodes:
    """Some nodes of a partition that have the same resources; a resource is infinite if it cannot be read."""

    partition: str
    count: int
    cpus: float
    memory_mb: float
    features: frozenset[str]
    gpus: Mapping[str, float]
    """How many GPUs each node has, by type in lower case; "" for those without a type."""


@dataclass(frozen=True)
class _Need:
    """One thing that a job asks of each node."""

    fits: Callable[[Nodes], bool]
    wanted: str
    """In words, with the keys of the config: `8 CPUs (…)`."""
    most: Callable[[Nodes], float] | None
    """How much a node has of it; None if that is no number."""
    keys: str
    """The keys to change."""


def parse_nodes(listed: str) -> list[Nodes]:
    """Parse what `sinfo --exact --format=%P|%D|%c|%m|%f|%G` prints; lines of another form are left out."""
    rows = [cells for line in listed.splitlines() if len(cells := line.strip().split("|")) == 6]
    return [
        Nodes(
            partition.rstrip("*"), int(count), _number(cpus), _number(memory),
            frozenset(re.findall(r"[^,()]+", features)) - {"null"}, _parse_gpus(gres),
        )
        for partition, count, cpus, memory, features, gres in rows
        if count.isdigit()
    ]  # fmt: skip


def _number(text: str) -> float:
    """A number of sinfo's; infinite for `4+`, of which it says only a part, and for what is no number."""
    return float(text) if text.isdigit() else math.inf


def _parse_gpus(gres: str) -> dict[str, float]:
    """The GPUs in a list of generic resources such as `gpu:h100:2(S:0-1),nvme:1`."""
    found: dict[str, float] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = re.sub("^gres[:/]", "", resource.strip()).split(":")
        if name != "gpu":
            continue
        kinds = [part for part in rest[:-1] if part != "no_consume"]
        kind = kinds[0].lower() if kinds else ""
        found[kind] = found.get(kind, 0) + (_number(rest[-1]) if rest else math.inf)
    return found


def has_features(constraint: str, features: frozenset[str]) -> bool:
    """Whether a node with these features fits a constraint as sbatch takes it; True if it cannot be told.

    Of counts (`a*2`) and of alternatives that all nodes must share (`[a|b]`) one node needs a part only.
    """
    text = re.sub(r"\*\d+", "", constraint).translate(str.maketrans("[,", "(&")).replace("]", ")")
    if re.search(r"\*\d+", constraint):
        text = text.replace("&", "|")
    tokens = re.findall(r"[()&|]|[^()&|\s]+", text)

    def either() -> bool:
        found = both()
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            found |= both()
        return found

    def both() -> bool:
        found = one()
        while tokens and tokens[0] == "&":
            tokens.pop(0)
            found &= one()
        return found

    def one() -> bool:
        token = tokens.pop(0)
        if token == "(":
            found = either()
            if tokens.pop(0) != ")":
                raise ValueError(constraint)
            return found
        if token in ")&|":
            raise ValueError(constraint)
        return token in features

    try:
        fits = either()
    except (ValueError, IndexError):
        return True
    return fits or bool(tokens)


def check_capacity(run: Run) -> None:
    """Raise UserError if a stage of the run that is not done asks for more than any node has, as far as sinfo tells."""
    listed = run_slurm_command("sinfo", "--noheader", "--all", "--exact", f"--format={_FORMAT}", timeout_s=TIMEOUT_S)
    if not (groups := parse_nodes(listed or "")):
        return
    for stage in run.config.active_stages:
        reason = unsatisfiable(run.config, stage, groups)
        if reason is None or (
            run.config.sweep is None and stages.load_stage_module(stage).missing_outputs(run) is None
        ):
            continue
        if read_slurm_config(TIMEOUT_S).get("ResumeProgram", "(null)") not in ("", "(null)"):
            return  # nodes of a cloud are not shown while they are off
        raise UserError("slurm.unsatisfiable_request", reason)


def unsatisfiable(config: Config, stage: str, groups: Sequence[Nodes]) -> str | None:
    """Return why no nodes can satisfy what a stage asks for, with the keys to change; None if some may."""
    site, fewest = config.resolve_site(stage), config.stages.get_resources(stage).min_nodes
    named = site.partition or os.environ.get("SBATCH_PARTITION")
    # without a name the cluster chooses: its default, or what a plugin says
    partitions = named.split(",") if named else sorted({group.partition for group in groups if group.count})
    offered = {name: [group for group in groups if group.partition == name and group.count] for name in partitions}
    if not all(offered.values()):
        return None  # one that sinfo does not show
    needs = _needs(config, stage)
    fitting = {
        name: sum(group.count for group in found if all(need.fits(group) for need in needs))
        for name, found in offered.items()
    }
    if max(fitting.values()) >= fewest:
        return None
    where = f"partition {named}" if named else "the cluster"
    everyone = [group for found in offered.values() for group in found]
    change = f" or {_key(config, stage, 'partition')}"
    for need in needs:
        if not any(map(need.fits, everyone)):
            most = f"; the most is {max(map(need.most, everyone)):,.0f}" if need.most else ""
            return f"{stage}: no node of {where} has {need.wanted}{most}. Change {need.keys}{change}"
    if max(fitting.values()) == 0:
        wanted = " and ".join(need.wanted for need in needs)
        return f"{stage}: no node of {where} has {wanted}. Change one of these{change}"
    fit = f"only {max(fitting.values())} nodes of {where} fit"
    return f"{stage}: stages.{stage}.nodes is {fewest}, and {fit}. Change stages.{stage}.nodes{change}"


def _needs(config: Config, stage: str) -> list[_Need]:
    """What the job of a stage asks of each node."""
    site, wanted = config.resolve_site(stage), config.stages.get_resources(stage)
    needs = []
    cpus = wanted.processes_per_node * (site.cpus_per_task or 1)
    if cpus > 1 and not site.sbatch.keys() & {"overcommit", "ntasks-per-core", "ntasks-per-socket"}:
        keys = [f"stages.{stage}.tasks_per_node: {wanted.processes_per_node}"] if STAGES[stage].is_distributed else []
        if site.cpus_per_task:
            keys.append(f"{_key(config, stage, 'cpus_per_task')}: {site.cpus_per_task}")
        names = " or ".join(key.partition(":")[0] for key in keys)
        words = f"{cpus:,} CPUs ({' × '.join(keys)})"
        needs.append(_Need(lambda nodes: nodes.cpus >= cpus, words, lambda nodes: nodes.cpus, names))
    if site.mem_gb:
        memory, key = math.ceil(site.mem_gb * 1024), _key(config, stage, "mem_gb")
        words = f"{memory:,} MB of memory ({key}: {site.mem_gb:g})"
        needs.append(_Need(lambda nodes: nodes.memory_mb >= memory, words, lambda nodes: nodes.memory_mb, key))
    if (gpus := site.gpus_per_node) and site.gpus_as != "none":
        kind = (site.gpu_type or "").lower()

        def count(nodes: Nodes) -> float:
            return nodes.gpus.get(kind, 0.0) if kind else sum(nodes.gpus.values())

        key, of_kind = _key(config, stage, "gpus_per_node"), f", site.gpu_type: {site.gpu_type}" if kind else ""
        words = f"{gpus} GPU{'s' * (gpus > 1)} ({key}: {gpus}{of_kind})"
        needs.append(_Need(lambda nodes: count(nodes) >= gpus, words, count, key + " or site.gpu_type" * bool(kind)))
    if constraint := site.constraint:
        key = _key(config, stage, "constraint")
        words = f"the features {constraint} ({key})"
        needs.append(_Need(lambda nodes: has_features(constraint, nodes.features), words, None, key))
    return needs


def _key(config: Config, stage: str, name: str) -> str:
    """The key of the config that says what a stage asks for: the stage's own, that of all data jobs, or the site's."""
    if getattr(config.stages.get_resources(stage), name) is not None:
        return f"stages.{stage}.{name}"
    if not STAGES[stage].is_distributed and getattr(config.site.data_jobs, name) is not None:
        return f"site.data_jobs.{name}"
    return f"site.{name}"


def assign_ranks_to_nodes(tasks: Sequence[int], distribution: str) -> list[int]:
    """The node of each rank, where node n has room for `tasks[n]` (srun(1), `--distribution`).

    block fills a node before the next, plane=N deals out N ranks to each node in turn, cyclic one.
    """
    first = re.split("[:,]", distribution.lower())[0]
    at_once = _plane(distribution) or (1 if first == "cyclic" else max(tasks, default=1))
    left, nodes = list(tasks), list[int]()
    while any(left):
        for node, room in enumerate(left):
            dealt = min(room, at_once)
            nodes += [node] * dealt
            left[node] -= dealt
    return nodes


def _plane(distribution: str) -> int | None:
    match = re.match(r"plane=(\d+)", distribution.lower())
    return int(match[1]) if match else None


def describe_placement_problem(
    stage: str, nodes: int, per_node: int, tensor: int, tasks: Sequence[int], distribution: str | None
) -> str | None:
    """Why `nodes` × `per_node` ranks in groups of `tensor`, which divides `per_node`, do not fit what was granted; None
    where they do.

    `tasks`: how many each granted node may run; `distribution` as sbatch takes it, None for the default (block).
    More nodes than wanted are no problem: srun takes the first ones.
    """
    if len(tasks) < nodes or min(tasks[:nodes]) < per_node:
        return (
            f"{stage} wants {nodes} nodes × {per_node} ranks, and Slurm granted {len(tasks)} nodes for "
            f"{', '.join(map(str, tasks))} tasks: ask with --nodes={nodes} --ntasks-per-node={per_node}, or set "
            f"stages.{stage}.nodes and stages.{stage}.tasks_per_node to what is there"
        )
    plane = _plane(distribution or "")
    if plane and per_node % plane:  # srun would fill planes where there is room: 3 and 1 ranks instead of 2 and 2
        return (
            f"--distribution={distribution} makes planes that do not divide the ranks per node ({per_node}): ask with "
            "--distribution=block (site.distribution)"
        )
    place = assign_ranks_to_nodes([per_node] * nodes, distribution or "block")
    for first in range(0, len(place), tensor):
        if len(set(place[first : first + tensor])) > 1:
            return (
                f"--distribution={distribution} puts ranks {first} to {first + tensor - 1} on several nodes, and the "
                f"ranks of a tensor parallel group (parallel.tensor={tensor}) must share one: ask with "
                "--distribution=block (site.distribution)"
            )
    return None


def find_planned_placement_problem(config: Config) -> str | None:
    """What is wrong with the placement that the training's job would ask for; None where nothing is."""
    wanted, nodes = config.stages.train, config.stages.train.max_nodes
    tasks = [wanted.tasks_per_node] * nodes
    return describe_placement_problem(
        "train", nodes, wanted.tasks_per_node, config.parallel.tensor, tasks, config.site.distribution
    )


def find_placement_problem(run: Run, stage: str, size: int) -> str | None:
    """Why this allocation does not fit `size` ranks of `stage`; None where it does, or Slurm does not say."""
    granted = read_granted_tasks(os.environ)
    if not STAGES[stage].is_distributed or granted is None:
        return None
    per_node, tensor = (
        run.config.stages.get_resources(stage).processes_per_node,
        run.config.parallel.tensor if STAGES[stage].is_training else 1,
    )
    return describe_placement_problem(stage, size // per_node, per_node, tensor, *granted)


_TIMEOUT_S = 10.0


def check_limits(config: Config, planned: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError if Slurm would refuse one of the planned jobs.

    `planned`: by stage, how many tasks each submission has; 1 for a job that is no array.
    """
    if not any(map(sum, planned.values())):
        return
    settings = cluster_settings()
    _check_arrays(config, planned, settings)
    if "limits" in settings.get("AccountingStorageEnforce", "").lower():
        _check_number(config, planned, settings.get("ClusterName", ""))


def _check_arrays(config: Config, planned: Mapping[str, Sequence[int]], settings: Mapping[str, str]) -> None:
    limits = {"MaxArraySize": settings.get("MaxArraySize", "")}
    if found := re.search(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", "")):
        limits["SchedulerParameters: max_array_tasks"] = found[1]
    for name, text in limits.items():
        for stage, sizes in planned.items():
            if text.isdigit() and max(sizes, default=0) > int(text) > 0:
                if config.sweep is not None and STAGES[stage].is_per_point:
                    raise UserError(
                        "slurm.array_too_large",
                        f"sweep: an array of {max(sizes)} points; on this cluster an array has at most {text} tasks "
                        f"({name}): use fewer",
                    )
                raise UserError(
                    "slurm.array_too_large",
                    f"stages.{stage}.tasks: {max(sizes)}; on this cluster an array has at most {text} tasks ({name}): "
                    f"set stages.{stage}.tasks={text} or less",
                )


def _check_number(config: Config, planned: Mapping[str, Sequence[int]], cluster: str) -> None:
    """Refuse more jobs than the QOS, or if it has no limit the association, allows a user to have in the queue."""
    columns = "DefaultAccount,Account,Partition,DefaultQOS,MaxSubmitJobs"
    associations = _show("user", getpass.getuser(), "withassoc", "where", f"cluster={cluster}", columns=columns)
    of_qos = dict(_show("qos", columns="Name,MaxSubmitJobsPerUser"))
    numbers, limits, parts = Counter[tuple[str, str]](), dict[tuple[str, str], int](), list[str | None]()
    for stage, sizes in planned.items():
        wanted = {name: _asked_for(config, stage, name) for name in ("account", "partition", "qos")}
        for default, account, partition, default_qos, limit in associations if sum(sizes) else ():
            if account != (wanted["account"] or default) or partition not in ("", wanted["partition"]):
                continue
            qos = wanted["qos"] or default_qos or "normal"
            key, text = ("QOS", qos), of_qos.get(qos, "")
            # the limit of an account does not count jobs of the user's own associations with partitions
            if not text and not any(row[1] == account and row[2] for row in associations):
                key, text = ("account", account), limit
            if text.isdigit():
                numbers[key] += sum(sizes)
                limits[key] = int(text)
                parts.append(wanted["partition"])
            break
    if not limits:
        return
    shown = run_slurm_command(
        "squeue", "--me", "-h", "-r", "-t", "PENDING,RUNNING,SUSPENDED", "-o", "%q|%a", timeout_s=_TIMEOUT_S
    )
    queued = Counter[tuple[str, str]]()
    for line in (shown or "").splitlines():
        qos, _, account = line.partition("|")
        queued.update([("QOS", qos), ("account", account)])
    for key, number in numbers.items():
        if queued[key] + number > limits[key] and not any(map(_has_qos, parts)):
            each = ", ".join(f"{stage} {sum(sizes)}" for stage, sizes in planned.items() if sizes)
            raise UserError(
                "slurm.too_many_jobs",
                f"this needs {number} more jobs ({each}; each task of an array is one). {key[0]} {key[1]} allows you "
                f"{limits[key]} jobs at a time (MaxSubmitJobs), and {queued[key]} are in the queue. Wait until fewer "
                "are, or ask for fewer: stages.shard.tasks=1, fewer points of a sweep",
            )


def _asked_for(config: Config, stage: str, name: str) -> str | None:
    """Return the account, partition or QOS that a stage's job gets: the config's, or that of the shell (SBATCH_*)."""
    site = config.resolve_site(stage)
    found = getattr(site, name) or site.sbatch.get(name) or os.environ.get(f"SBATCH_{name.upper()}")
    return None if found is None else str(found)


def _has_qos(partition: str | None) -> bool:
    """Whether a partition (None: any) has a QOS of its own, whose limits count in the place of the others."""
    shown = run_slurm_command("scontrol", "--oneliner", "show", "partition", *([partition] if partition else []))
    return any(parse_key_values(line).get("QoS", "N/A") != "N/A" for line in (shown or "QoS=unknown").splitlines())


def _show(*words: str, columns: str) -> list[list[str]]:
    """Rows of `sacctmgr show`; none if it is not there, or not allowed."""
    shown = run_slurm_command("sacctmgr", "-n", "-P", "show", *words, f"format={columns}", timeout_s=_TIMEOUT_S)
    rows = [line.split("|") for line in (shown or "").splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]
