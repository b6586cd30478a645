"""Who am I? Rank, world and rendezvous of this process, read from its environment variables alone.

Every launcher tells its processes who they are in variables of its own. :func:`identify` turns them into one
:class:`RankInfo`. It is a pure function of the mapping it is given and the only reader of SLURM_*, OMPI_*, PMI_*
and torchrun variables, so every launcher can be tested with a dictionary. :data:`_LAUNCHERS` says which variables
those are. The first launcher in it that is there wins, because an inner one runs inside an outer one and inherits its
variables; `alone` is one process without any. It still knows its Slurm job, if it is in one.

A variable that is set to nothing counts as not set. Values that contradict each other raise UserError.

The rendezvous port, where nobody sets one, is 20000 + (hash(cluster, job, start) + restart count) mod 10000: the same
on every rank without talking, another one after each restart (the old port may still linger), and below 32768, where
Linux begins to hand out ephemeral ports.
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

TIME_LEFT_VARIABLE = "SLUICE_TIME_LEFT"
MASTER_PORTS = range(20_000, 30_000)
"""Rendezvous ports that are derived."""

_FIRST_SPECIAL_STEP = 4_294_967_290
"""From here on ids are those of batch scripts, salloc's shells and extern steps (slurm.h, SLURM_BATCH_SCRIPT …)."""
_LARGEST = 2**32 - 1
_MAX_NODES = 65_536
_RANGE = r"([0-9]{1,9})(?:-([0-9]{1,9}))?"
_COUNT = r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,8})\))?"
_COUNTS = re.compile(rf"{_COUNT}(?:,{_COUNT})*")
_HOST = re.compile(rf"(?:[^\[\],\s]|\[{_RANGE}(?:,{_RANGE})*\])+")


Launcher = Literal["local", "torchrun", "openmpi", "pmi", "srun", "alone"]
Env = Mapping[str, str]


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands among all processes of its stage."""

    launcher: Launcher
    """Who started it."""
    rank: int
    """0 … world_size - 1."""
    world_size: int
    """Processes in all."""
    local_rank: int
    """0 … local_world_size - 1, among the processes of this node."""
    local_world_size: int
    """Processes on this node."""
    master_host: str
    """Where rank 0 listens."""
    master_port: int
    """The port rank 0 listens on."""
    job_id: str | None
    """The Slurm job as `scontrol requeue` takes it: `1234`, or `1234_5` for a task of an array; None outside Slurm."""
    restart_count: int
    """How often Slurm has requeued the job."""
    submitted_as: str | None = None
    """The id that submit.py knows this job by; the Slurm job's own, or that of a local job."""
    array: tuple[int, int] | None = None
    """In a job array: the number of this task, from 0, and of all tasks; None elsewhere."""
    listen_fd: int | None = None
    """Rank 0 under our own launcher: the socket on `master_port` that it inherits, listening already."""


class _Names(NamedTuple):
    """The variables that a launcher tells its processes who they are with."""

    launcher: Launcher
    ranks: tuple[str, ...]
    """Rank, world size, local rank and local world size."""
    known_by: int = 0
    """Which of these its processes have, and no others."""
    start: str = ""
    """What differs between two starts in one job, or on one machine: they get two ports."""
    hosts: str = "SLURM_JOB_NODELIST"
    """The nodes, that of rank 0 first; of MPI's launchers, for SLURM_STEP_* are of the step of mpirun's daemons."""


_LAUNCHERS = (
    _Names("local", ("SLUICE_RANK", "SLUICE_WORLD_SIZE", "SLUICE_LOCAL_RANK", "SLUICE_LOCAL_WORLD_SIZE")),
    # torch.distributed.run, "Environment Variables"
    _Names("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
    # mpirun(1); PMIx gives each mpirun a name of its own
    _Names("openmpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
           "OMPI_COMM_WORLD_LOCAL_SIZE"), start="PMIX_NAMESPACE"),
    # MPICH's and Intel MPI's Hydra
    _Names("pmi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), known_by=2),
    # srun(1), "OUTPUT ENVIRONMENT VARIABLES"; the last one is for all nodes, see _ranks
    _Names("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
           start="SLURM_STEP_ID", hosts="SLURM_STEP_NODELIST"),
    # Cray's PALS. srun --mpi=cray_shasta sets the same variables, and --mpi=pmi2 the first two: that is srun.
    _Names("pmi", ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")),
)  # fmt: skip
_ALONE = _Names("alone", ())


def read_rank_info(env: Env) -> RankInfo:
    """The :class:`RankInfo` that the variables in `env` describe.

    Raises UserError, naming the variable and its value, where they are incomplete, no numbers or contradictory.
    """
    there = {name for name, value in env.items() if value}
    if _step(env) is None:
        there.discard("SLURM_PROCID")  # a batch script's or a shell's: they are no ranks
    names = next((names for names in _LAUNCHERS if names.ranks[names.known_by] in there), _ALONE)
    ranks = _ranks(env, names) if names.ranks else (0, 1, 0, 1)
    host = _master_host(env, names, several_nodes=ranks[1] > ranks[3]) if names.ranks else "localhost"
    (job, array), restarts = _job(env), _optional(env, "SLURM_RESTART_COUNT") or 0
    port = _optional(env, "SLUICE_MASTER_PORT", 1, 65_535) or _optional(env, "MASTER_PORT", 1, 65_535)
    if port is None:
        seed = f"{env.get('SLURM_CLUSTER_NAME', '')} {job} {env.get(names.start) or names.launcher}"
        digest = hashlib.sha256(seed.encode(errors="surrogatepass")).digest()
        port = MASTER_PORTS[(int.from_bytes(digest[:8]) + restarts) % len(MASTER_PORTS)]
    known_as, listen_fd = env.get("SLUICE_JOB_ID") or job, _optional(env, "SLUICE_LISTEN_FD")
    return RankInfo(names.launcher, *ranks, host, port, job, restarts, known_as, array, listen_fd)


def _ranks(env: Env, names: _Names) -> tuple[int, int, int, int]:
    """Rank, world size, local rank and local world size."""
    rank, world = _below(env, *names.ranks[:2])
    if names.launcher != "srun":
        local_rank, local_world = _below(env, *names.ranks[2:])
        if local_world > world:
            raise UserError(
                "rank.contradictory_environment",
                f"{names.ranks[3]}={local_world} must not be more than {names.ranks[1]}={world}",
            )
        return rank, world, local_rank, local_world
    counts, nodes = _tasks_per_node(env, names.ranks[3]), read_allocated_hosts(env, names.hosts)
    node, local_rank = _int(env, "SLURM_NODEID"), _int(env, "SLURM_LOCALID")
    if len(counts) != len(nodes) or sum(counts) != world or node >= len(nodes) or local_rank >= counts[node]:
        told = ", ".join(f"{name}={env.get(name, '')}" for name in (names.hosts, *names.ranks, "SLURM_NODEID"))
        raise UserError("rank.contradictory_environment", f"{told} contradict each other")
    return rank, world, local_rank, counts[node]


def _master_host(env: Env, names: _Names, several_nodes: bool) -> str:
    told = (
        env.get("SLUICE_MASTER_HOST") or env.get("MASTER_ADDR") or "".join(read_allocated_hosts(env, names.hosts)[:1])
    )
    if not told and several_nodes:
        _need(env, "MASTER_ADDR", f"{names.ranks[1]} is more than {names.ranks[3]}, so there are several nodes")
    return told or "localhost"


def make_local_rank_env(rank: int, size: int, port: int, listen_fd: int | None = None) -> dict[str, str]:
    """The variables that Sluice's own launcher sets for rank `rank` of `size` on this machine.

    `listen_fd` is for rank 0: a socket on `port` that listens already, so that nobody takes the port in between.
    """
    told: dict[str, object] = dict(zip(_LAUNCHERS[0].ranks, (rank, size, rank, size), strict=True))
    told |= {"SLUICE_MASTER_HOST": "127.0.0.1", "SLUICE_MASTER_PORT": port}
    told |= {} if listen_fd is None else {"SLUICE_LISTEN_FD": listen_fd}
    return {name: str(value) for name, value in told.items()}


def read_time_left(env: Env) -> float | None:
    """Seconds that the job has left, counted from the start of this process; None where there is no limit.

    The supervisor asks Slurm and sets it for its ranks. Raises UserError where it is no number.
    """
    try:
        return float(env[TIME_LEFT_VARIABLE]) if env.get(TIME_LEFT_VARIABLE) else None
    except ValueError:
        raise UserError(
            "rank.invalid_variable", f"{TIME_LEFT_VARIABLE}={env[TIME_LEFT_VARIABLE]!r} is not a number of seconds"
        ) from None


def expand_hostlist(text: str, name: str = "host list") -> list[str]:
    """The names behind a Slurm host list: `n[1-3,07-09],rack[1-2]n0` is n1 n2 n3 n07 n08 n09 rack1n0 rack2n0.

    A range keeps the zeros in front of its first number; of several brackets the last one counts fastest
    (scontrol(1), "show hostnames"). Raises UserError, naming the variable `name`, for anything else.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[\]]*\])", text):  # at commas outside of brackets
        parts = re.findall(r"\[(.*?)\]|([^\[]+)", item) if _HOST.fullmatch(item) else [("", "")]
        names = product(*(_numbers(ranges) if ranges else [word] for ranges, word in parts))
        more = list(filter(None, map("".join, islice(names, _MAX_NODES + 1))))
        hosts += more
        if not more or len(hosts) > _MAX_NODES:
            most = f"of at most {_MAX_NODES} hosts"
            raise UserError(
                "slurm.invalid_host_list",
                f"{name}={text!r} is not a host list such as n[1-3,07],login {most}: see {item!r}",
            )
    return hosts


def _numbers(ranges: str) -> list[str]:
    """`1-3,07` → 1 2 3 07; none where a range counts down or too far."""
    pairs = re.findall(_RANGE, ranges)
    spans = [(len(first), range(int(first), int(last or first) + 1)) for first, last in pairs]
    fits = all(0 < len(span) <= _MAX_NODES for _, span in spans)
    return [f"{number:0{width}d}" for width, span in spans for number in span] if fits else []


def _need(env: Env, name: str, why: str) -> str:
    value = env.get(name)
    if not value:
        raise UserError(
            "rank.missing_variable",
            f"{name} is not set, but {why}: set it, or start the ranks with srun, torchrun or submit.py",
        )
    return value


def _int(env: Env, name: str, least: int = 0, most: int = _LARGEST) -> int:
    """The whole number in a variable that must be set; stricter than int(), which takes `1_0` and blanks."""
    value = _need(env, name, "it is needed beside the variables of the launcher that are set")
    if not re.fullmatch(r"[0-9]{1,10}", value) or not least <= int(value) <= most:
        raise UserError("rank.invalid_variable", f"{name}={value!r} is not a whole number from {least} to {most}")
    return int(value)


def _optional(env: Env, name: str, least: int = 0, most: int = _LARGEST) -> int | None:
    return _int(env, name, least, most) if env.get(name) else None


def _below(env: Env, name: str, limit: str) -> tuple[int, int]:
    """The values of two variables of which the first counts from 0 up to the second."""
    value, end = _int(env, name), _int(env, limit, least=1)
    if value >= end:
        raise UserError("rank.contradictory_environment", f"{name}={value} must be less than {limit}={end}")
    return value, end


def _tasks_per_node(env: Env, name: str) -> list[int]:
    """`2(x3),1` → 2 2 2 1."""
    text = _need(env, name, "this is a Slurm step")
    pairs = [(int(count), int(times or 1)) for count, times in re.findall(_COUNT, text)]
    if not _COUNTS.fullmatch(text) or sum(times for _, times in pairs) > _MAX_NODES:
        raise UserError("rank.invalid_variable", f"{name}={text!r} is not a list of tasks per node such as 2(x3),1")
    return [count for count, times in pairs for _ in range(times)]


def _step(env: Env) -> int | None:
    """The id of the Slurm step this process is a task of; None in batch scripts, interactive shells and outside."""
    step = _optional(env, "SLURM_STEP_ID")
    return None if step is None or step >= _FIRST_SPECIAL_STEP else step


def read_step_id(env: Env) -> str | None:
    """The step this process is a task of, as scancel takes it: `1234.0`; None outside of steps."""
    step = _step(env)
    return None if step is None else f"{_int(env, 'SLURM_JOB_ID', least=1)}.{step}"


def _job(env: Env) -> tuple[str | None, tuple[int, int] | None]:
    """Its id as `scontrol requeue` takes it, and in an array the number of this task and of all.

    That is `1234`, or `1234_5`: one task's own SLURM_JOB_ID may be the id of the whole array. Tasks are numbered
    without gaps, as submit.py does.
    """
    job, number = _optional(env, "SLURM_JOB_ID", least=1), _optional(env, "SLURM_ARRAY_TASK_ID")
    if job is None or number is None:
        return None if job is None else str(job), None
    known_as = f"{_int(env, 'SLURM_ARRAY_JOB_ID', least=1)}_{number}"
    count, first = _optional(env, "SLURM_ARRAY_TASK_COUNT"), _optional(env, "SLURM_ARRAY_TASK_MIN") or 0
    if count is None:
        return known_as, None
    if not first <= number < first + count:
        raise UserError(
            "rank.contradictory_environment", f"SLURM_ARRAY_TASK_ID={number} is not one of {count} tasks from {first}"
        )
    return known_as, (number - first, count)


def is_in_allocation(env: Env) -> bool:
    """Whether srun would start a step here: inside a Slurm job, in its batch step or shell, and no step itself."""
    return bool(env.get("SLURM_JOB_ID")) and _step(env) is None and not env.get("SLUICE_RANK")


def is_in_batch_job(env: Env) -> bool:
    """Whether this is a batch job's script or was started by it, and no shell of salloc's: a signal is Slurm's."""
    return is_in_allocation(env) and env.get("ENVIRONMENT") == "BATCH"


@contextmanager
def without_job_variables(*keep: str) -> Iterator[None]:
    """Without the variables of the job that this process runs in: sbatch hands the environment on.

    There some would lie: `SLURM_RESTART_COUNT` and the array's are only set where they apply. Without a person's
    SBATCH_*, too, which overrule what a script says (sbatch(1)), but for those to `keep`. SLURM_CONF stays.
    """
    before = dict(os.environ)
    own = ("SLURM_", "SLUICE_", "PMI", "SBATCH_")
    theirs = [name for name in before if name.startswith(own) and name not in ("SLURM_CONF", *keep)]
    try:
        for name in theirs:
            del os.environ[name]
        yield
    finally:
        os.environ.update(before)


def read_allocated_hosts(env: Env, name: str = "SLURM_JOB_NODELIST") -> list[str]:
    """The nodes of this allocation, in Slurm's order; none outside."""
    return expand_hostlist(env[name], name) if env.get(name) else []


def read_cpus_per_task(env: Env) -> int | None:
    """How many CPUs each task of this allocation was promised; None where nobody asked for a number."""
    return _optional(env, "SLURM_CPUS_PER_TASK", least=1)


def read_granted_tasks(env: Env) -> tuple[list[int], str] | None:
    """How many tasks each node of this allocation may run, and how srun would deal out ranks: `block`, `plane=2` …

    None where Slurm does not say. Raises UserError where it says nonsense.
    """
    if not env.get("SLURM_TASKS_PER_NODE"):
        return None
    spread = env.get("SLURM_DISTRIBUTION") or "block"
    if spread == "plane":
        spread = f"plane={_int(env, 'SLURM_DIST_PLANESIZE', least=1)}"
    return _tasks_per_node(env, "SLURM_TASKS_PER_NODE"), spread
