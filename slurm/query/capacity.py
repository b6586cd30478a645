"""Check before submission that the cluster can satisfy the resource requests of a run's stages.

If sbatch refuses a job in the middle of a chain, the jobs before it are already queued. sbatch also accepts some
requests that no node can ever satisfy, and such jobs wait forever. Three checks find these requests early:

- :func:`check_capacity`: enough nodes of one partition have the requested resources (`sinfo`).
- :func:`check_limits`: array sizes and the number of jobs are within the limits of the cluster and the user's QOS.
- :func:`find_planned_placement_problem`: the ranks of a tensor parallel group share a node. At the start of a job,
  :func:`find_placement_problem` checks this again for the granted nodes.

If Slurm does not respond to a query, the check that needs the response is skipped, and sbatch decides.
"""

from __future__ import annotations

import getpass
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.base.dist_env import read_granted_tasks
from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.slurm_commands import cluster_settings, parse_key_values, read_slurm_config, run_slurm_command

_NODE_QUERY_TIMEOUT_S = 5.0
"""Time limit of each query of nodes and of the controller's configuration."""
_FORMAT = "%P|%D|%c|%m|%f|%G"
"""sinfo's columns: partition, number of nodes, CPUs and memory (MB) of each node, features, generic resources."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that all have the same resources.

    The amount of a resource is infinite if sinfo prints only a lower bound, or a text that cannot be parsed.
    """

    partition: str
    count: int
    cpus: float
    memory_mb: float
    features: frozenset[str]
    gpus: Mapping[str, float]
    """Number of GPUs on each node, by type in lower case; the type is "" for GPUs without a type."""


@dataclass(frozen=True)
class _Requirement:
    """One resource that a job requests on each node."""

    is_met: Callable[[NodeGroup], bool]
    description: str
    """The amount, and the config keys that request this amount: `8 CPUs (site.cpus_per_task: 8)`."""
    amount: Callable[[NodeGroup], float] | None
    """Returns how much of the resource a node has; None for features, which have no amount."""
    keys: str
    """The config keys to change, such as `site.mem_gb`."""


def parse_nodes(output: str) -> list[NodeGroup]:
    """Parse the output of `sinfo --exact` with the format `_FORMAT`; malformed lines are left out."""
    rows = [cells for line in output.splitlines() if len(cells := line.strip().split("|")) == 6]
    # sinfo marks the default partition with `*`, and prints `(null)` for nodes without features
    return [
        NodeGroup(
            partition.rstrip("*"), int(count), _parse_number(cpus), _parse_number(memory),
            frozenset(re.findall(r"[^,()]+", features)) - {"null"}, _parse_gpus(gres),
        )
        for partition, count, cpus, memory, features, gres in rows
        if count.isdigit()
    ]  # fmt: skip


def _parse_number(text: str) -> float:
    """Return a number that sinfo printed; infinity for `4+`, which is only a lower bound, and for other text."""
    return float(text) if text.isdigit() else math.inf


def _parse_gpus(gres: str) -> dict[str, float]:
    """Return the number of GPUs by type, from generic resources such as `gpu:h100:2(S:0-1),nvme:1`."""
    counts: dict[str, float] = {}
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = re.sub("^gres[:/]", "", resource.strip()).split(":")
        if name != "gpu":
            continue
        # the rest is [TYPE:][no_consume:]COUNT
        types = [part for part in rest[:-1] if part != "no_consume"]
        gpu_type = types[0].lower() if types else ""
        counts[gpu_type] = counts.get(gpu_type, 0) + (_parse_number(rest[-1]) if rest else math.inf)
    return counts


def has_features(constraint: str, features: frozenset[str]) -> bool:
    """Return True if a node with these features may be part of an allocation with this constraint (sbatch(1)).

    If the constraint has counts (`[a*2&b*4]`), a node needs only one of the features, because other nodes may have the
    other features. Brackets without counts (`[a|b]`) are treated as parentheses, and a comma as `&`. If the constraint
    cannot be parsed, the result is True.
    """
    text = re.sub(r"\*\d+", "", constraint).translate(str.maketrans("[],", "()&"))
    if re.search(r"\*\d+", constraint):
        text = text.replace("&", "|")
    tokens = re.findall(r"[()&|]|[^()&|\s]+", text)

    def evaluate_or() -> bool:
        """Return the value of the OR expression at the beginning of `tokens`, and remove its tokens."""
        value = evaluate_and()
        while tokens and tokens[0] == "|":
            tokens.pop(0)
            value |= evaluate_and()
        return value

    def evaluate_and() -> bool:
        """Return the value of the AND expression at the beginning of `tokens`, and remove its tokens."""
        value = evaluate_operand()
        while tokens and tokens[0] == "&":
            tokens.pop(0)
            value &= evaluate_operand()
        return value

    def evaluate_operand() -> bool:
        """Return the value of the feature or parenthesis at the beginning of `tokens`, and remove its tokens."""
        token = tokens.pop(0)
        if token == "(":
            value = evaluate_or()
            if tokens.pop(0) != ")":
                raise ValueError(constraint)
            return value
        if token in ")&|":
            raise ValueError(constraint)
        return token in features

    try:
        is_met = evaluate_or()
    except (ValueError, IndexError):
        return True
    return is_met or bool(tokens)  # tokens that are left could not be parsed


def check_capacity(run: Run) -> None:
    """Raise UserError if no partition can satisfy the request of a stage, according to sinfo.

    Stages that are done are not checked, except in a sweep. No error is raised if sinfo fails, or if Slurm can power on
    cloud nodes, which sinfo does not show while they are powered off.
    """
    output = run_slurm_command(
        "sinfo", "--noheader", "--all", "--exact", f"--format={_FORMAT}", timeout_s=_NODE_QUERY_TIMEOUT_S
    )
    node_groups = parse_nodes(output or "")
    if not node_groups:
        return
    for stage in run.config.active_stages:
        reason = find_unsatisfiable_request(run.config, stage, node_groups)
        if reason is None:
            continue
        # in a sweep, a stage cannot be recognized as done here, because its outputs may be in the directories of the
        # points and not in the directory of `run`
        is_done = (
            run.config.sweep is None and stages.load_stage_module(run, stage).describe_missing_outputs(run) is None
        )
        if is_done:
            continue
        resume_program = read_slurm_config(_NODE_QUERY_TIMEOUT_S).get("ResumeProgram", "(null)")
        can_power_on_nodes = resume_program not in ("", "(null)")
        if can_power_on_nodes:
            return
        raise UserError("slurm.unsatisfiable_request", reason)


def find_unsatisfiable_request(config: Config, stage: str, node_groups: Sequence[NodeGroup]) -> str | None:
    """Return why no partition can satisfy the request of a stage, with the config keys to change.

    The result is None if a partition may satisfy the request, or if sinfo shows no nodes of a requested partition.

    Args:
        config: the config.
        stage: the stage.
        node_groups: the nodes of all partitions of the cluster.
    """
    site = config.resolve_site(stage)
    min_nodes = config.stages.get_resources(stage).min_nodes
    requested = site.partition or os.environ.get("SBATCH_PARTITION")
    non_empty_groups = [group for group in node_groups if group.count]
    # if no partition is requested, all partitions are checked, because a plugin of Slurm may select any of them
    partitions = requested.split(",") if requested else sorted({group.partition for group in non_empty_groups})
    groups_by_partition = {
        name: [group for group in non_empty_groups if group.partition == name] for name in partitions
    }
    if not all(groups_by_partition.values()):
        return None
    requirements = _list_requirements(config, stage)

    def count_matching_nodes(groups: Sequence[NodeGroup]) -> int:
        """Return how many nodes meet all requirements."""
        return sum(group.count for group in groups if all(each.is_met(group) for each in requirements))

    # all nodes of a job are in one partition
    max_matching = max(map(count_matching_nodes, groups_by_partition.values()))
    if max_matching >= min_nodes:
        return None
    location = f"partition {requested}" if requested else "the cluster"
    candidates = [group for groups in groups_by_partition.values() for group in groups]
    alternative = f" or {_find_key(config, stage, 'partition')}"
    for requirement in requirements:
        if not any(map(requirement.is_met, candidates)):
            limit = f"; the most is {max(map(requirement.amount, candidates)):,.0f}" if requirement.amount else ""
            problem = f"no node of {location} has {requirement.description}{limit}"
            return f"{stage}: {problem}. Change {requirement.keys}{alternative}"
    if max_matching == 0:
        combination = " and ".join(requirement.description for requirement in requirements)
        return f"{stage}: no node of {location} has {combination}. Change one of these{alternative}"
    problem = f"only {max_matching} nodes of {location} fit"
    return f"{stage}: stages.{stage}.nodes is {min_nodes}, and {problem}. Change stages.{stage}.nodes{alternative}"


def _list_requirements(config: Config, stage: str) -> list[_Requirement]:
    """Return the resources that the job of a stage requests on each node: CPUs, memory, GPUs and features."""
    site = config.resolve_site(stage)
    resources = config.stages.get_resources(stage)
    requirements = []
    cpus = resources.processes_per_node * (site.cpus_per_task or 1)
    # every node has at least one CPU; with these options of sbatch, Slurm may compute another number of CPUs
    if cpus > 1 and not site.sbatch.keys() & {"overcommit", "ntasks-per-core", "ntasks-per-socket"}:
        factors: dict[str, int] = {}
        if config.get_stage(stage).is_distributed:
            factors[f"stages.{stage}.tasks_per_node"] = resources.processes_per_node
        if site.cpus_per_task:
            factors[_find_key(config, stage, "cpus_per_task")] = site.cpus_per_task
        description = f"{cpus:,} CPUs ({' × '.join(f'{key}: {value}' for key, value in factors.items())})"
        requirements.append(
            _Requirement(lambda nodes: nodes.cpus >= cpus, description, lambda nodes: nodes.cpus, " or ".join(factors))
        )
    if site.mem_gb:
        memory_mb = math.ceil(site.mem_gb * 1024)
        key = _find_key(config, stage, "mem_gb")
        description = f"{memory_mb:,} MB of memory ({key}: {site.mem_gb:g})"
        requirements.append(
            _Requirement(lambda nodes: nodes.memory_mb >= memory_mb, description, lambda nodes: nodes.memory_mb, key)
        )
    if (gpus := site.gpus_per_node) and site.gpus_as != "none":
        gpu_type = (site.gpu_type or "").lower()

        def count_gpus(nodes: NodeGroup) -> float:
            """Return the number of GPUs of the requested type on each node; of all types if no type is requested."""
            return nodes.gpus.get(gpu_type, 0.0) if gpu_type else sum(nodes.gpus.values())

        key = _find_key(config, stage, "gpus_per_node")
        type_hint = f", site.gpu_type: {site.gpu_type}" if gpu_type else ""
        description = f"{gpus} GPU{'s' if gpus > 1 else ''} ({key}: {gpus}{type_hint})"
        keys = f"{key} or site.gpu_type" if gpu_type else key
        requirements.append(_Requirement(lambda nodes: count_gpus(nodes) >= gpus, description, count_gpus, keys))
    if constraint := site.constraint:
        key = _find_key(config, stage, "constraint")
        description = f"the features {constraint} ({key})"
        requirements.append(
            _Requirement(lambda nodes: has_features(constraint, nodes.features), description, None, key)
        )
    return requirements


def _find_key(config: Config, stage: str, name: str) -> str:
    """Return the config key that sets a resource of a stage.

    The key is `stages.STAGE.NAME`, `site.data_jobs.NAME` or `site.NAME`. `name` is its last part, such as `mem_gb`.
    """
    if getattr(config.stages.get_resources(stage), name) is not None:
        return f"stages.{stage}.{name}"
    if not config.get_stage(stage).is_distributed and getattr(config.site.data_jobs, name) is not None:
        return f"site.data_jobs.{name}"
    return f"site.{name}"


def assign_ranks_to_nodes(tasks: Sequence[int], distribution: str) -> list[int]:
    """Return the index of the node of each rank, by the rules of srun(1), `--distribution`.

    `plane=N` assigns N ranks to each node in turn, and `cyclic` assigns one rank to each node in turn. With `block` and
    all other values, each node is filled before the next node.

    Args:
        tasks: how many ranks each node can run.
        distribution: the value of `--distribution`.
    """
    method = re.split("[:,]", distribution.lower())[0]
    ranks_in_turn = _parse_plane_size(distribution) or (1 if method == "cyclic" else max(tasks, default=1))
    free = list(tasks)
    nodes: list[int] = []
    while any(free):
        for node, available in enumerate(free):
            assigned = min(available, ranks_in_turn)
            nodes += [node] * assigned
            free[node] -= assigned
    return nodes


def _parse_plane_size(distribution: str) -> int | None:
    """Return N for the distribution `plane=N`; None for other distributions."""
    match = re.match(r"plane=(\d+)", distribution.lower())
    return int(match[1]) if match else None


def describe_placement_problem(
    stage: str, nodes: int, per_node: int, tensor: int, tasks: Sequence[int], distribution: str | None
) -> str | None:
    """Return why the ranks of a stage cannot run on the granted nodes with this distribution; None if they can.

    There must be enough nodes, each with enough tasks, and the ranks of a tensor parallel group must share a node. If
    the allocation has more nodes than necessary, srun uses the first nodes.

    Args:
        stage: the stage.
        nodes: the number of nodes that the stage uses.
        per_node: the number of ranks on each node.
        tensor: the number of ranks in a tensor parallel group. This number divides `per_node`.
        tasks: how many tasks each granted node can run.
        distribution: the value of `--distribution`; None for the default (block).
    """
    if len(tasks) < nodes or min(tasks[:nodes]) < per_node:
        return (
            f"{stage} needs {nodes} nodes × {per_node} ranks, and Slurm granted {len(tasks)} nodes that can run "
            f"{', '.join(map(str, tasks))} ranks: request --nodes={nodes} --ntasks-per-node={per_node}, or set "
            f"stages.{stage}.nodes and stages.{stage}.tasks_per_node to what was granted"
        )
    plane_size = _parse_plane_size(distribution or "")
    # for example, with planes of 3, srun would divide 4 ranks among two nodes as 3 and 1 instead of 2 and 2
    if plane_size and per_node % plane_size:
        return (
            f"--distribution={distribution} makes planes that do not divide the ranks per node ({per_node}): request "
            "--distribution=block (site.distribution)"
        )
    node_of_rank = assign_ranks_to_nodes([per_node] * nodes, distribution or "block")
    for first in range(0, len(node_of_rank), tensor):
        if len(set(node_of_rank[first : first + tensor])) > 1:
            return (
                f"--distribution={distribution} puts ranks {first} to {first + tensor - 1} on several nodes, and the "
                f"ranks of a tensor parallel group (parallel.tensor={tensor}) must share one: request "
                "--distribution=block (site.distribution)"
            )
    return None


def find_planned_placement_problem(config: Config) -> str | None:
    """Return why the ranks of the train stage would not fit the nodes that its job requests; None if they fit.

    The rules are those of :func:`describe_placement_problem`.
    """
    train = config.stages.train
    tasks = [train.tasks_per_node] * train.max_nodes
    return describe_placement_problem(
        "train", train.max_nodes, train.tasks_per_node, config.parallel.tensor, tasks, config.site.distribution
    )


def find_placement_problem(run: Run, stage: str, size: int) -> str | None:
    """Return why `size` ranks of a stage do not fit this job's allocation; None if they fit.

    The rules are those of :func:`describe_placement_problem`. The result is also None for a stage without a process
    group, and if the environment does not describe an allocation.
    """
    granted = read_granted_tasks(os.environ)
    definition = run.config.get_stage(stage)
    if not definition.is_distributed or granted is None:
        return None
    per_node = run.config.stages.get_resources(stage).processes_per_node
    tensor = run.config.parallel.tensor if definition.is_training else 1
    return describe_placement_problem(stage, size // per_node, per_node, tensor, *granted)


_LIMIT_QUERY_TIMEOUT_S = 10.0
"""Time limit of each query of a limit on jobs."""


def check_limits(config: Config, planned: Mapping[str, Sequence[int]]) -> None:
    """Raise UserError if the planned jobs exceed a limit on array sizes or on the number of jobs in the queue.

    Args:
        config: the config.
        planned: for each stage, the number of array tasks of each job to submit; 1 for a job without an array.
    """
    if not any(map(sum, planned.values())):
        return
    settings = cluster_settings()
    _check_array_sizes(config, planned, settings)
    if "limits" in settings.get("AccountingStorageEnforce", "").lower():
        _check_job_count(config, planned, settings.get("ClusterName", ""))


def _check_array_sizes(config: Config, planned: Mapping[str, Sequence[int]], settings: Mapping[str, str]) -> None:
    """Raise UserError if an array has more tasks than the cluster allows.

    Args:
        config: the config.
        planned: as in :func:`check_limits`.
        settings: the settings of slurm.conf.
    """
    limits = {"MaxArraySize": settings.get("MaxArraySize", "")}
    if match := re.search(r"max_array_tasks=(\d+)", settings.get("SchedulerParameters", "")):
        limits["SchedulerParameters: max_array_tasks"] = match[1]
    for name, text in limits.items():
        for stage, sizes in planned.items():
            if text.isdigit() and max(sizes, default=0) > int(text) > 0:
                if config.sweep is not None and config.get_stage(stage).is_per_point:
                    # the size of this array has no config key: it is the number of points
                    raise UserError(
                        "slurm.array_too_large",
                        f"sweep: an array of {max(sizes)} points; on this cluster an array has at most {text} tasks "
                        f"({name}): use fewer points",
                    )
                raise UserError(
                    "slurm.array_too_large",
                    f"stages.{stage}.tasks: {max(sizes)}; on this cluster an array has at most {text} tasks ({name}): "
                    f"set stages.{stage}.tasks={text} or less",
                )


def _check_job_count(config: Config, planned: Mapping[str, Sequence[int]], cluster: str) -> None:
    """Raise UserError if the user would have more jobs in the queue than MaxSubmitJobs allows.

    The limit of the job's QOS applies (MaxSubmitJobsPerUser). If the QOS has no limit, the limit of the user's
    association with the account applies. No error is raised if a job's partition has a QOS: the limits of this QOS take
    precedence, and they are not queried.

    Args:
        config: the config.
        planned: as in :func:`check_limits`.
        cluster: the name of the local cluster.
    """
    columns = "DefaultAccount,Account,Partition,DefaultQOS,MaxSubmitJobs"
    associations = _read_sacctmgr(
        "user", getpass.getuser(), "withassoc", "where", f"cluster={cluster}", columns=columns
    )
    limit_by_qos = dict(_read_sacctmgr("qos", columns="Name,MaxSubmitJobsPerUser"))
    new_jobs: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # by key of the limit, then by stage
    limits: dict[tuple[str, str], int] = {}
    requested_partitions: list[str | None] = []
    for stage, sizes in planned.items():
        requested = {name: _find_requested_option(config, stage, name) for name in ("account", "partition", "qos")}
        if not sum(sizes):
            continue
        for default, account, partition, default_qos, limit in associations:
            if account != (requested["account"] or default) or partition not in ("", requested["partition"]):
                continue  # the association is not used for this stage
            qos = requested["qos"] or default_qos or "normal"
            key = ("QOS", qos)
            text = limit_by_qos.get(qos, "")
            # Jobs in a partition for which the user has a separate association do not count for the account's limit. If
            # there is such an association, the account's limit is not checked, because squeue's rows are counted only
            # by account.
            if not text and not any(row[1] == account and row[2] for row in associations):
                key = ("account", account)
                text = limit
            if text.isdigit():
                new_jobs[key][stage] = sum(sizes)
                limits[key] = int(text)
                requested_partitions.append(requested["partition"])
            break
    if not limits:
        return
    output = run_slurm_command(
        "squeue", "--me", "-h", "-r", "-t", "PENDING,RUNNING,SUSPENDED", "-o", "%q|%a", timeout_s=_LIMIT_QUERY_TIMEOUT_S
    )
    queued = Counter[tuple[str, str]]()
    for line in (output or "").splitlines():
        qos, _, account = line.partition("|")
        queued.update([("QOS", qos), ("account", account)])
    for key, count_by_stage in new_jobs.items():
        count = sum(count_by_stage.values())
        if queued[key] + count > limits[key] and not any(map(_has_partition_qos, requested_partitions)):
            counts = ", ".join(f"{stage} {jobs}" for stage, jobs in count_by_stage.items())
            raise UserError(
                "slurm.too_many_jobs",
                f"this needs {count} more jobs ({counts}; each task of an array is one). {key[0]} {key[1]} allows you "
                f"{limits[key]} jobs at a time (MaxSubmitJobs), and {queued[key]} are in the queue. Wait until some "
                "have ended, or request fewer jobs: stages.shard.tasks=1, fewer points of a sweep",
            )


def _find_requested_option(config: Config, stage: str, name: str) -> str | None:
    """Return the account, partition or QOS that a stage's job requests; None for Slurm's default.

    Options of the config take precedence over SBATCH_* variables. `name` is `account`, `partition` or `qos`.
    """
    site = config.resolve_site(stage)
    value = getattr(site, name) or site.sbatch.get(name) or os.environ.get(f"SBATCH_{name.upper()}")
    return None if value is None else str(value)


def _has_partition_qos(partition: str | None) -> bool:
    """Return True if a partition has a QOS, whose limits take precedence over the limits of the job's QOS.

    If `partition` is None, any partition of the cluster counts. The result is also True if Slurm does not respond.
    """
    output = run_slurm_command("scontrol", "--oneliner", "show", "partition", *([partition] if partition else []))
    return any(parse_key_values(line).get("QoS", "N/A") != "N/A" for line in (output or "QoS=unknown").splitlines())


def _read_sacctmgr(*arguments: str, columns: str) -> list[list[str]]:
    """Return the rows of `sacctmgr show`; empty if sacctmgr is missing or the user may not run this command."""
    output = run_slurm_command(
        "sacctmgr", "-n", "-P", "show", *arguments, f"format={columns}", timeout_s=_LIMIT_QUERY_TIMEOUT_S
    )
    rows = [line.split("|") for line in (output or "").splitlines()]
    return [row for row in rows if len(row) == columns.count(",") + 1]  # one cell for each column
