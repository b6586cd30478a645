"""Read this process's rank, world size and rendezvous address from its environment variables.

Each launcher (srun, torchrun, mpirun, …) describes a process with its own variables. :func:`read_rank_info` converts
these variables to a :class:`RankInfo`. The function reads only its argument, a mapping, so tests can describe any
launcher with a dictionary. No other module reads the variables of SLURM_*, OMPI_*, PMI_* and torchrun that describe a
rank.

:data:`_LAUNCHERS` lists the variables of each launcher. The first launcher with set variables is used, because an inner
launcher inherits the variables of an outer launcher. A process without such variables is `alone`, but may be in a Slurm
job. An empty variable counts as unset.

If no variable sets the rendezvous port, it is 20000 + (hash(cluster, job, start) + restart count) mod 10000. `start` is
the ID of the Slurm step or of the mpirun, or the name of another launcher. All ranks compute the same port. A restart
gets another port, because the old port may still be in use. The range ends below 32768, the first ephemeral port of
Linux.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Literal, NamedTuple

from pipeline.base.errors import UserError
from pipeline.base.ports import MASTER_PORTS

TIME_LEFT_VARIABLE = "SLUICE_TIME_LEFT"
"""The environment variable with the seconds that the job has left (:func:`read_time_limit_s`)."""

_FIRST_SPECIAL_STEP = 4_294_967_290
"""Step IDs from this number on mean batch scripts, salloc shells and extern steps (slurm.h, SLURM_BATCH_SCRIPT …)."""
_MAX_INTEGER = 2**32 - 1
"""The largest valid number in a variable. Slurm's numbers have 32 bits."""
_MAX_NODES = 65_536
"""The largest valid number of hosts in a host list. A damaged host list could name billions."""
_RANGE = r"([0-9]{1,9})(?:-([0-9]{1,9}))?"
"""A number or a range in the brackets of a host list, such as `07` or `1-3`."""
_COUNT = r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?"
"""A number of tasks, possibly with the number of nodes that have it, such as `1` or `2(x3)`."""
_COUNTS = re.compile(rf"{_COUNT}(?:,{_COUNT})*")
_HOST = re.compile(rf"(?:[^\[\],\s]|\[{_RANGE}(?:,{_RANGE})*\])+")


Launcher = Literal["local", "torchrun", "openmpi", "pmi", "srun", "alone"]
Env = Mapping[str, str]


@dataclass(frozen=True)
class RankInfo:
    """The rank of this process, the sizes of its process group, and its rendezvous address."""

    launcher: Launcher
    """The program that started this process."""
    rank: int
    """0 … world_size - 1."""
    world_size: int
    """The number of ranks."""
    local_rank: int
    """0 … local_world_size - 1, among the ranks of this node."""
    local_world_size: int
    """The number of ranks on this node."""
    master_host: str
    """The host on which rank 0 listens."""
    master_port: int
    """The port on which rank 0 listens."""
    job_id: str | None
    """The Slurm job ID in the form of `scontrol requeue`: `1234`, or `1234_5` for an array task; None outside Slurm."""
    restart_count: int
    """How often Slurm has requeued the job."""
    submitted_as: str | None = None
    """The ID by which submit.py recorded the job: the ID of the Slurm job or of the local job."""
    array: tuple[int, int] | None = None
    """The index of this Slurm array task, from 0, and the number of array tasks; None outside a job array."""
    listen_fd: int | None = None
    """For rank 0 under the launcher `local`: an inherited socket that already listens on `master_port`."""


class _LauncherVariables(NamedTuple):
    """The environment variables by which a launcher describes a process."""

    launcher: Launcher
    ranks: tuple[str, ...]
    """The variables of the rank, world size, local rank and local world size."""
    marker: int = 0
    """The index in `ranks` of the marker variable. If several launchers have a set marker variable, the first launcher
    in `_LAUNCHERS` is used."""
    start: str = ""
    """A variable that differs between two starts in one job or on one machine. The port is computed from its value. If
    the variable is not set, or the launcher has none (""), the port is computed from the name of the launcher."""
    hosts: str = "SLURM_JOB_NODELIST"
    """A variable with the list of nodes, which begins with the node of rank 0. With MPI launchers, SLURM_STEP_*
    describe the step of mpirun's daemons, so the variable of the job is used."""

    @property
    def rank(self) -> str:
        """The variable of the rank."""
        return self.ranks[0]

    @property
    def world_size(self) -> str:
        """The variable of the world size."""
        return self.ranks[1]

    @property
    def local_rank(self) -> str:
        """The variable of the local rank."""
        return self.ranks[2]

    @property
    def local_world_size(self) -> str:
        """The variable of the local world size. For srun, this variable lists the tasks of each node."""
        return self.ranks[3]


_LAUNCHERS = (
    _LauncherVariables("local", ("SLUICE_RANK", "SLUICE_WORLD_SIZE", "SLUICE_LOCAL_RANK", "SLUICE_LOCAL_WORLD_SIZE")),
    # torch.distributed.run, "Environment Variables"
    _LauncherVariables("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    # mpirun(1). PMIx gives each mpirun a different namespace.
    _LauncherVariables("openmpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                       "OMPI_COMM_WORLD_LOCAL_SIZE"), start="PMIX_NAMESPACE"),
    # Hydra, the launcher of MPICH and Intel MPI. PALS and srun also set PMI_RANK, so MPI_LOCALRANKID is the marker.
    _LauncherVariables("pmi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), marker=2),
    # srun(1), "OUTPUT ENVIRONMENT VARIABLES". The last variable describes all nodes (see _read_ranks).
    _LauncherVariables("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
                       start="SLURM_STEP_ID", hosts="SLURM_STEP_NODELIST"),
    # Cray PALS. `srun --mpi=cray_shasta` sets the same variables, and `srun --mpi=pmi2` the first two. The entry of
    # srun precedes this one, so both count as srun.
    _LauncherVariables("pmi", ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
)  # fmt: skip
_ALONE = _LauncherVariables("alone", ())


def read_rank_info(env: Env) -> RankInfo:
    """Return the :class:`RankInfo` that the variables in `env` describe.

    Raises UserError, naming the variable and its value, if variables are missing, contradictory or not numbers.
    """
    set_variables = {name for name, value in env.items() if value}
    if _read_step_number(env) is None:
        set_variables.discard("SLURM_PROCID")  # batch scripts and shells also have it, but are not ranks
    variables = next((entry for entry in _LAUNCHERS if entry.ranks[entry.marker] in set_variables), _ALONE)
    if variables is _ALONE:
        ranks = (0, 1, 0, 1)
        host = "localhost"
    else:
        ranks = _read_ranks(env, variables)
        _, world_size, _, local_world_size = ranks
        host = _find_master_host(env, variables, has_several_nodes=world_size > local_world_size)
    job_id, array = _read_job(env)
    restart_count = _read_optional_int(env, "SLURM_RESTART_COUNT") or 0
    port = _read_optional_int(env, "SLUICE_MASTER_PORT", 1, 65_535) or _read_optional_int(env, "MASTER_PORT", 1, 65_535)
    if port is None:
        seed = f"{env.get('SLURM_CLUSTER_NAME', '')} {job_id} {env.get(variables.start) or variables.launcher}"
        digest = hashlib.sha256(seed.encode(errors="surrogatepass")).digest()
        port = MASTER_PORTS[(int.from_bytes(digest[:8]) + restart_count) % len(MASTER_PORTS)]
    submitted_as = env.get("SLUICE_JOB_ID") or job_id
    listen_fd = _read_optional_int(env, "SLUICE_LISTEN_FD")
    return RankInfo(variables.launcher, *ranks, host, port, job_id, restart_count, submitted_as, array, listen_fd)


def _read_ranks(env: Env, variables: _LauncherVariables) -> tuple[int, int, int, int]:
    """Return the rank, world size, local rank and local world size.

    Raises UserError if the variables are incomplete or contradict each other.
    """
    rank, world_size = _read_index_and_size(env, variables.rank, variables.world_size)
    if variables.launcher != "srun":
        local_rank, local_world_size = _read_index_and_size(env, variables.local_rank, variables.local_world_size)
        if local_world_size > world_size:
            raise UserError(
                "rank.contradictory_environment",
                f"{variables.local_world_size}={local_world_size} must not be more than "
                f"{variables.world_size}={world_size}",
            )
        return rank, world_size, local_rank, local_world_size
    tasks_per_node = _read_tasks_per_node(env, variables.local_world_size)
    nodes = read_allocated_hosts(env, variables.hosts)
    node = _read_int(env, "SLURM_NODEID")
    local_rank = _read_int(env, "SLURM_LOCALID")
    is_consistent = len(tasks_per_node) == len(nodes) and sum(tasks_per_node) == world_size
    if not is_consistent or node >= len(nodes) or local_rank >= tasks_per_node[node]:
        names = (variables.hosts, *variables.ranks, "SLURM_NODEID")
        values = ", ".join(f"{name}={env.get(name, '')}" for name in names)
        raise UserError("rank.contradictory_environment", f"these variables contradict each other: {values}")
    return rank, world_size, local_rank, tasks_per_node[node]


def _find_master_host(env: Env, variables: _LauncherVariables, has_several_nodes: bool) -> str:
    """Return the host of rank 0; `localhost` if no variable names the host and there is one node.

    Raises UserError if there are several nodes and no variable names the host.
    """
    host = env.get("SLUICE_MASTER_HOST") or env.get("MASTER_ADDR")
    if not host:
        host = next(iter(read_allocated_hosts(env, variables.hosts)), "")
    if not host and has_several_nodes:
        reason = f"{variables.world_size} is more than {variables.local_world_size}, so there are several nodes"
        _require_variable(env, "MASTER_ADDR", reason)  # always raises UserError, because the variable is not set
    return host or "localhost"


def make_local_rank_env(rank: int, size: int, port: int, listen_fd: int | None = None) -> dict[str, str]:
    """Return the variables of a rank that Sluice itself starts on this machine (launcher `local`).

    Args:
        rank: the rank.
        size: the world size. All ranks run on this machine.
        port: the port on which rank 0 listens.
        listen_fd: for rank 0, a socket that already listens on `port`, so that no other program can take the port.
    """
    variables: dict[str, object] = dict(zip(_LAUNCHERS[0].ranks, (rank, size, rank, size), strict=True))
    variables |= {"SLUICE_MASTER_HOST": "127.0.0.1", "SLUICE_MASTER_PORT": port}
    if listen_fd is not None:
        variables["SLUICE_LISTEN_FD"] = listen_fd
    return {name: str(value) for name, value in variables.items()}


def read_time_limit_s(env: Env) -> float | None:
    """Return the seconds that the job has left, counted from the start of this process; None without a limit.

    If the job has a time limit, its supervisor sets `TIME_LEFT_VARIABLE` for the ranks. Raises UserError if the value
    of the variable is not a number.
    """
    try:
        return float(env[TIME_LEFT_VARIABLE]) if env.get(TIME_LEFT_VARIABLE) else None
    except ValueError:
        raise UserError(
            "rank.invalid_variable", f"{TIME_LEFT_VARIABLE}={env[TIME_LEFT_VARIABLE]!r} is not a number of seconds"
        ) from None


def expand_hostlist(text: str, name: str = "host list") -> list[str]:
    """Return the names in a Slurm host list: `n[1-3,07-09],rack[1-2]n0` is n1 n2 n3 n07 n08 n09 rack1n0 rack2n0.

    A range keeps the leading zeros of its first number. If a name has several brackets, the last bracket varies fastest
    (scontrol(1), "show hostnames"). Raises UserError, naming the variable `name`, if `text` is not a host list.
    """
    hosts: list[str] = []
    for pattern in re.split(r",(?![^\[\]]*\])", text):  # at commas outside brackets
        # an invalid pattern gets one part without text; its only name is empty and is removed below
        pattern_parts = re.findall(r"\[(.*?)\]|([^\[]+)", pattern) if _HOST.fullmatch(pattern) else [("", "")]
        names = product(*(_expand_ranges(ranges) if ranges else [text_part] for ranges, text_part in pattern_parts))
        # one name more than allowed is enough to notice that there are too many
        pattern_hosts = list(filter(None, map("".join, islice(names, _MAX_NODES + 1))))
        hosts += pattern_hosts
        if not pattern_hosts or len(hosts) > _MAX_NODES:
            raise UserError(
                "slurm.invalid_host_list",
                f"{name}={text!r}: {pattern!r} is not valid in a host list, such as n[1-3,07],login, of at most "
                f"{_MAX_NODES} hosts",
            )
    return hosts


def _expand_ranges(ranges: str) -> list[str]:
    """Return the numbers in a bracket: `1-3,07` is 1 2 3 07. Empty if a range counts down or is too long."""
    pairs = re.findall(_RANGE, ranges)
    spans = [(len(first), range(int(first), int(last or first) + 1)) for first, last in pairs]
    is_valid = all(0 < len(span) <= _MAX_NODES for _, span in spans)
    return [f"{number:0{width}d}" for width, span in spans for number in span] if is_valid else []


def _require_variable(env: Env, name: str, reason: str) -> str:
    """Return the value of a variable. Raises UserError if the variable is not set; `reason` says why it is needed."""
    value = env.get(name)
    if not value:
        raise UserError(
            "rank.missing_variable",
            f"{name} is not set, but {reason}: set it, or start the ranks with srun, torchrun or submit.py",
        )
    return value


def _read_int(env: Env, name: str, minimum: int = 0, maximum: int = _MAX_INTEGER) -> int:
    """Return the whole number in a variable.

    Raises UserError if the variable is not set or its value is not a whole number from `minimum` to `maximum`.
    Unlike int(), this function does not accept underscores (`1_0`) or spaces.
    """
    value = _require_variable(env, name, "other variables of the launcher are")
    if not re.fullmatch(r"[0-9]{1,10}", value) or not minimum <= int(value) <= maximum:
        raise UserError("rank.invalid_variable", f"{name}={value!r} is not a whole number from {minimum} to {maximum}")
    return int(value)


def _read_optional_int(env: Env, name: str, minimum: int = 0, maximum: int = _MAX_INTEGER) -> int | None:
    """Return the whole number in a variable, as `_read_int`; None if the variable is not set."""
    return _read_int(env, name, minimum, maximum) if env.get(name) else None


def _read_index_and_size(env: Env, index_name: str, size_name: str) -> tuple[int, int]:
    """Return the values of two variables. Raises UserError unless 0 <= index < size."""
    index = _read_int(env, index_name)
    size = _read_int(env, size_name, minimum=1)
    if index >= size:
        raise UserError("rank.contradictory_environment", f"{index_name}={index} must be less than {size_name}={size}")
    return index, size


def _read_tasks_per_node(env: Env, name: str) -> list[int]:
    """Return the number of tasks of each node: `2(x3),1` is 2 2 2 1.

    Raises UserError if the variable is not set, is not in this format, or describes more than `_MAX_NODES` nodes.
    """
    text = _require_variable(env, name, "this is a Slurm step")
    pairs = [(int(count), int(times or 1)) for count, times in re.findall(_COUNT, text)]
    if not _COUNTS.fullmatch(text) or sum(times for _, times in pairs) > _MAX_NODES:
        raise UserError("rank.invalid_variable", f"{name}={text!r} is not a list of tasks per node such as 2(x3),1")
    return [count for count, times in pairs for _ in range(times)]


def _read_step_number(env: Env) -> int | None:
    """Return the number of the Slurm step that started this process.

    Returns None in batch scripts, interactive shells and outside Slurm.
    """
    step = _read_optional_int(env, "SLURM_STEP_ID")
    return None if step is None or step >= _FIRST_SPECIAL_STEP else step


def read_step_id(env: Env) -> str | None:
    """Return the ID of the Slurm step of this process in the form of scancel, such as `1234.0`; None outside a step."""
    step = _read_step_number(env)
    return None if step is None else f"{_read_int(env, 'SLURM_JOB_ID', minimum=1)}.{step}"


def _read_job(env: Env) -> tuple[str | None, tuple[int, int] | None]:
    """Return the ID of the Slurm job and, in an array, the index of this array task and the number of array tasks.

    The pair is None outside an array, and also if the number of array tasks is not set. Both results are None outside
    Slurm.

    The ID has the form of `scontrol requeue`: `1234`, or `1234_5`, because the SLURM_JOB_ID of an array task may be the
    ID of the whole array. submit.py submits arrays without gaps, so the index of an array task is its distance from the
    first array task.
    """
    job_id = _read_optional_int(env, "SLURM_JOB_ID", minimum=1)
    task_id = _read_optional_int(env, "SLURM_ARRAY_TASK_ID")
    if job_id is None:
        return None, None
    if task_id is None:
        return str(job_id), None
    array_task = f"{_read_int(env, 'SLURM_ARRAY_JOB_ID', minimum=1)}_{task_id}"
    count = _read_optional_int(env, "SLURM_ARRAY_TASK_COUNT")
    first = _read_optional_int(env, "SLURM_ARRAY_TASK_MIN") or 0
    if count is None:
        return array_task, None
    if not first <= task_id < first + count:
        raise UserError(
            "rank.contradictory_environment",
            f"SLURM_ARRAY_TASK_ID={task_id} is not one of {count} array tasks from {first}",
        )
    return array_task, (task_id - first, count)


def is_in_allocation(env: Env) -> bool:
    """Return whether this process is in a Slurm job and may start a step with srun.

    The result is False in a step, and in a rank of the launcher `local`.
    """
    return bool(env.get("SLURM_JOB_ID")) and _read_step_number(env) is None and not env.get("SLUICE_RANK")


def is_in_batch_job(env: Env) -> bool:
    """Return whether this process belongs to a batch script rather than to a shell of salloc.

    In a batch job, a signal comes from Slurm. In a shell, a signal may come from the user.
    """
    return is_in_allocation(env) and env.get("ENVIRONMENT") == "BATCH"  # Slurm sets this value for batch scripts


@contextmanager
def without_job_variables(*kept_names: str) -> Iterator[None]:
    """Remove the variables of the current job from the environment while the block runs.

    sbatch passes the environment on to the new job, in which some of these variables would be wrong: Slurm sets
    `SLURM_RESTART_COUNT` and the array variables only if they apply. The SBATCH_* variables of the user are removed as
    well, because they override the options in a script (sbatch(1)). The PMI* variables describe a rank of the current
    job. SLURM_CONF and the variables `kept_names` remain.
    """
    before = dict(os.environ)
    prefixes = ("SLURM_", "SLUICE_", "PMI", "SBATCH_")
    removed = [name for name in before if name.startswith(prefixes) and name not in ("SLURM_CONF", *kept_names)]
    try:
        for name in removed:
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)


def read_allocated_hosts(env: Env, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """Return the nodes in the host list of the variable `name`, in Slurm's order; empty if the variable is not set."""
    return expand_hostlist(env[name], name) if env.get(name) else []


def read_cpus_per_task(env: Env) -> int | None:
    """Return the number of CPUs requested for each task of this allocation; None if no number was requested."""
    return _read_optional_int(env, "SLURM_CPUS_PER_TASK", minimum=1)


def read_granted_tasks(env: Env) -> tuple[list[int], str] | None:
    """Return the number of tasks that each node of this allocation may run, and how srun distributes ranks.

    The distribution is a value of srun's `--distribution`, such as `block` or `plane=2`. Returns None if Slurm does not
    set the variables. Raises UserError if a value is invalid.
    """
    if not env.get("SLURM_TASKS_PER_NODE"):
        return None
    distribution = env.get("SLURM_DISTRIBUTION") or "block"
    if distribution == "plane":
        distribution = f"plane={_read_int(env, 'SLURM_DIST_PLANESIZE', minimum=1)}"
    return _read_tasks_per_node(env, "SLURM_TASKS_PER_NODE"), distribution
