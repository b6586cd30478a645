"""Whether the nodes of a partition can satisfy what a stage asks for, as far as `sinfo` tells.

sbatch refuses such a request only when the jobs before it are in the queue, and some it accepts: they wait forever. So
submit.py asks before it submits anything. A request is refused only if no node fits, whatever runs there and whatever
state the nodes are in. If sinfo does not answer, or a value cannot be read, nothing is refused for it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.job_states import read_slurm_config, run_slurm_command

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
        if reason is None or (run.config.sweep is None and stages.load(stage).missing(run) is None):
            continue
        if read_slurm_config(TIMEOUT_S).get("ResumeProgram", "(null)") not in ("", "(null)"):
            return  # nodes of a cloud are not shown while they are off
        raise UserError(reason)


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
