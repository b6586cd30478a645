"""Who am I? Rank, world, node and rendezvous of this process, read from its environment variables alone.

Every launcher tells its processes who they are in variables of its own. :func:`identify` turns them into one
:class:`Place`. It is a pure function of the mapping it is given and the only reader of SLURM_*, OMPI_*, PMI_*
and torchrun variables, so every launcher can be tested with a dictionary. The first of these that is there wins,
because an inner launcher runs inside an outer one and inherits its variables:

1. `local`: Sluice's own launcher on one machine (`SLUICE_RANK`, see :func:`local_environment`).
2. `torchrun`: `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` (torch.distributed.run, "Environment Variables").
3. `openmpi`: `OMPI_COMM_WORLD_RANK` and its kin (mpirun(1)).
4. `pmi`: `PMI_RANK`, `PMI_SIZE`, and `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` (MPICH's and Intel MPI's Hydra) or
   `PMI_LOCAL_RANK`, `PMI_LOCAL_SIZE` (Cray's PALS). `srun --mpi=pmi2` sets the first two as well, but no
   `MPI_LOCALRANKID`: inside a Slurm step that is srun.
5. `srun`: `SLURM_PROCID` in a real step. The batch script, `salloc`'s interactive shell and the extern step have
   special step ids and are no ranks (slurm.h, SLURM_BATCH_SCRIPT and its neighbours).
6. `alone`: one process. It still knows its Slurm job, if it is in one.

A variable that is set to nothing counts as not set. Values that contradict each other raise UserError.

The rendezvous port, where nobody sets one, is 20000 + (hash(cluster, job, step) + restart count) mod 10000: the same on
every rank without talking, another one after each restart (the old port may still linger), and below 32768, where Linux
begins to hand out ephemeral ports.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Literal

from pipeline.base.errors import UserError

TIME_LEFT = "SLUICE_TIME_LEFT"
PORTS = range(20_000, 30_000)
"""Rendezvous ports that are derived."""

_FIRST_SPECIAL_STEP = 4_294_967_290
_MAX_NODES = 65_536
_IN_STEP = "this is a Slurm step"
_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_HOST = re.compile(r"([^\[\],\s]+|\[[^\[\]\s]+\])+")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


Launcher = Literal["local", "torchrun", "openmpi", "pmi", "srun", "alone"]
Env = Mapping[str, str]
Ranks = tuple[int, int, int, int]
"""Rank, world size, local rank and local world size."""


@dataclass(frozen=True)
class Place:
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
    node_rank: int
    """Number of this node, from 0."""
    hosts: tuple[str, ...]
    """Names of the nodes in node order; only the master's where the launcher names no others."""
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


def identify(env: Env) -> Place:
    """The :class:`Place` that the variables in `env` describe.

    Raises UserError, naming the variable and its value, where they are incomplete, no numbers or contradictory.
    """
    step = _step(env)
    if env.get("SLUICE_RANK"):
        return _local(env)
    if env.get("RANK"):
        return _torchrun(env)
    if env.get("OMPI_COMM_WORLD_RANK"):
        return _mpi(env, "openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in _MPI))
    if env.get("PMI_RANK"):
        if env.get("MPI_LOCALRANKID"):
            return _mpi(env, "pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        if step is None:
            return _mpi(env, "pmi", *(f"PMI_{name}" for name in _MPI))
    if step is not None and env.get("SLURM_PROCID"):
        return _srun(env, step)
    return _place(env, "alone", (0, 1, 0, 1), 0, ("localhost",), "localhost", "")


def local_environment(
    rank: int, world_size: int, local_world_size: int, host: str, port: int, listen_fd: int | None = None
) -> dict[str, str]:
    """The variables that Sluice's own launcher sets for rank `rank` of `world_size` on this machine.

    `local_world_size` ranks make one node, so that several nodes can be acted on one machine. `listen_fd` is for
    rank 0: a socket on `port` that listens already, so that nobody takes the port in between.
    """
    return {
        **({} if listen_fd is None else {"SLUICE_LISTEN_FD": str(listen_fd)}),
        "SLUICE_RANK": str(rank),
        "SLUICE_WORLD_SIZE": str(world_size),
        "SLUICE_LOCAL_RANK": str(rank % local_world_size),
        "SLUICE_LOCAL_WORLD_SIZE": str(local_world_size),
        "SLUICE_MASTER_HOST": host,
        "SLUICE_MASTER_PORT": str(port),
    }


def time_left(env: Env) -> float | None:
    """Seconds that the job has left, counted from the start of this process; None where there is no limit.

    The supervisor asks Slurm and sets it for its ranks. Raises UserError where it is no number.
    """
    try:
        return float(env[TIME_LEFT]) if env.get(TIME_LEFT) else None
    except ValueError:
        raise UserError(f"{TIME_LEFT}={env[TIME_LEFT]!r} is no number of seconds") from None


def expand_hostlist(text: str, name: str = "host list") -> list[str]:
    """The names behind a Slurm host list: `n[1-3,07-09],rack[1-2]n0` is n1 n2 n3 n07 n08 n09 rack1n0 rack2n0.

    A range keeps the zeros in front of its first number; of several brackets the last one counts fastest
    (scontrol(1), "show hostnames"). Raises UserError, naming the variable `name`, for anything else.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[\]]*\])", text):  # at commas outside of brackets
        if not _HOST.fullmatch(item):
            raise UserError(f"{name}={text!r} is no host list: {item!r} is no host name")
        parts = re.findall(r"\[([^\]]*)\]|([^\[]+)", item)
        names = product(*(_expand_ranges(ranges, f"{name}={text!r}") if ranges else [word] for ranges, word in parts))
        hosts += map("".join, islice(names, _MAX_NODES + 1))
        if len(hosts) > _MAX_NODES:
            raise UserError(f"{name}={text!r} is no host list: it has more than {_MAX_NODES} hosts")
    return hosts


def _expand_ranges(ranges: str, where: str) -> list[str]:
    """`1-3,07` → 1 2 3 07."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + _MAX_NODES:
            raise UserError(f"{where} is no host list: {item!r} is no number or range such as 1-3")
        numbers += (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return numbers


# -- one function per launcher -------------------------------------------------------------------------------


def _local(env: Env) -> Place:
    names = ("SLUICE_RANK", "SLUICE_WORLD_SIZE", "SLUICE_LOCAL_RANK", "SLUICE_LOCAL_WORLD_SIZE")
    ranks = _ranks(env, names)
    nodes = _even_nodes(env, names, ranks)
    host = env.get("SLUICE_MASTER_HOST") or "localhost"
    return _place(env, "local", ranks, ranks[0] // ranks[3], (host,) * nodes, host, "local")


def _torchrun(env: Env) -> Place:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    ranks = _ranks(env, names)
    node = _below(env, "GROUP_RANK", "GROUP_WORLD_SIZE")[0] if env.get("GROUP_RANK") else ranks[0] // ranks[3]
    if ranks[1] > ranks[3]:
        _need(env, "MASTER_ADDR", "the ranks are on several nodes")
    host = env.get("MASTER_ADDR") or "localhost"
    return _place(env, "torchrun", ranks, node, (host,), host, "torchrun")


def _mpi(env: Env, launcher: Launcher, *names: str) -> Place:
    """Ranks of mpirun: it numbers ranks but names no nodes; those are known inside a Slurm job only.

    The SLURM_STEP_* variables belong to the step of mpirun's daemons (or to none, on the first node): the job's are
    read. Neither do they enter the port.
    """
    ranks = _ranks(env, names)
    hosts = tuple(allocated_hosts(env))
    # Hydra hands the first node's variables to all ranks; Open MPI's daemons pass on those of their own node.
    own = env.get("SLURMD_NODENAME", "") if launcher == "openmpi" else ""
    if own in hosts:
        node = hosts.index(own)
    else:
        nodes = _even_nodes(env, names, ranks)
        node = ranks[0] // ranks[3]
        if hosts and nodes > len(hosts):
            raise UserError(
                f"{names[1]}={ranks[1]} and {names[3]}={ranks[3]} need {nodes} nodes, but SLURM_JOB_NODELIST has "
                f"{len(hosts)}: start the same number of ranks on each node, or use srun"
            )
        hosts = hosts[:nodes]
        if nodes > 1 and not hosts:
            _need(env, "MASTER_ADDR", f"{names[1]} is more than {names[3]}, so there are several nodes")
    host = env.get("MASTER_ADDR") or (hosts[0] if hosts else "localhost")
    # PMIx gives each mpirun a name of its own: two in one job, or on one machine, get two ports.
    step = env.get("PMIX_NAMESPACE", launcher) if launcher == "openmpi" else launcher
    return _place(env, launcher, ranks, node, hosts or (host,), host, step)


def _srun(env: Env, step: int) -> Place:
    """A task of a Slurm step (srun(1), "OUTPUT ENVIRONMENT VARIABLES"); nodes may have different numbers of tasks."""
    size = _first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, world = _below(env, "SLURM_PROCID", size)
    nodes = _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    hosts = tuple(expand_hostlist(_need(env, nodes, _IN_STEP), nodes))
    tasks = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = _tasks_per_node(env, tasks)
    node, local_rank = _int(env, "SLURM_NODEID"), _int(env, "SLURM_LOCALID")
    if len(counts) != len(hosts) or sum(counts) != world or node >= len(hosts) or local_rank >= counts[node]:
        told = (nodes, tasks, size, "SLURM_NODEID", "SLURM_LOCALID")
        raise UserError(f"{', '.join(f'{name}={env[name]}' for name in told)} contradict each other")
    host = env.get("SLUICE_MASTER_HOST") or env.get("MASTER_ADDR") or hosts[0]
    return _place(env, "srun", (rank, world, local_rank, counts[node]), node, hosts, host, str(step))


def _place(
    env: Env, launcher: Launcher, ranks: Ranks, node: int, hosts: tuple[str, ...], master_host: str, step: str
) -> Place:
    """Add what all launchers share: the Slurm job, its restarts and the port."""
    job = _job_id(env)
    restarts = _optional(env, "SLURM_RESTART_COUNT") or 0
    named = _first(env, "SLUICE_MASTER_PORT", "MASTER_PORT")
    if env.get(named):
        port = _int(env, named, least=1, most=65_535)
    else:
        seed = f"{env.get('SLURM_CLUSTER_NAME', '')} {job} {step}"
        digest = hashlib.sha256(seed.encode(errors="surrogatepass")).digest()
        port = PORTS[(int.from_bytes(digest[:8]) + restarts) % len(PORTS)]
    known_as, listen_fd = env.get("SLUICE_JOB_ID") or job, _optional(env, "SLUICE_LISTEN_FD")
    return Place(launcher, *ranks, node, hosts, master_host, port, job, restarts, known_as, _array(env), listen_fd)


def _need(env: Env, name: str, why: str) -> str:
    value = env.get(name)
    if not value:
        raise UserError(f"{name} is not set, but {why}: set it, or start the ranks with srun, torchrun or submit.py")
    return value


def _int(env: Env, name: str, least: int = 0, most: int = 2**63 - 1) -> int:
    """The whole number in a variable that must be set; stricter than int(), which takes `1_0` and blanks."""
    value = _need(env, name, "it is needed beside the variables of the launcher that are set")
    if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= most:
        limit = f"from {least} to {most}" if most < 2**63 - 1 else f"of at least {least}"
        raise UserError(f"{name}={value!r} is no whole number {limit}")
    return int(value)


def _optional(env: Env, name: str, least: int = 0) -> int | None:
    return _int(env, name, least) if env.get(name) else None


def _below(env: Env, name: str, limit: str) -> tuple[int, int]:
    """The values of two variables of which the first counts from 0 up to the second."""
    value, end = _int(env, name), _int(env, limit, least=1)
    if value >= end:
        raise UserError(f"{name}={value} must be less than {limit}={end}")
    return value, end


def _ranks(env: Env, names: tuple[str, ...]) -> Ranks:
    """Rank, world size, local rank and local world size from four variables."""
    rank, world = _below(env, names[0], names[1])
    local_rank, local_world = _below(env, names[2], names[3])
    if local_world > world:
        raise UserError(f"{names[3]}={local_world} must not be more than {names[1]}={world}")
    return rank, world, local_rank, local_world


def _even_nodes(env: Env, names: tuple[str, ...], ranks: Ranks) -> int:
    """The number of nodes when each has as many ranks as this one, numbered node by node; UserError where not."""
    rank, world, local_rank, local_world = ranks
    if world == local_world:  # here any numbering will do: Open MPI 5 gives local ranks in another order
        return 1
    if world % local_world or rank % local_world != local_rank or world // local_world > _MAX_NODES:
        raise UserError(
            f"{', '.join(f'{name}={env[name]}' for name in names)}: cannot tell which rank is on which node; start the "
            "same number of ranks on each node, numbered node by node (mpirun --map-by slot), or use srun"
        )
    return world // local_world


def _first(env: Env, *names: str) -> str:
    """The first of `names` that is set, else the last one."""
    return next((name for name in names if env.get(name)), names[-1])


def _tasks_per_node(env: Env, name: str) -> list[int]:
    """`2(x3),1` → 2 2 2 1."""
    counts: list[int] = []
    for item in _need(env, name, _IN_STEP).split(","):
        match = _COUNT.fullmatch(item)
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= _MAX_NODES - len(counts):
            raise UserError(f"{name}={env[name]!r} is no list of tasks per node such as 2(x3),1")
        counts += [int(match[1])] * times
    return counts


def _step(env: Env) -> int | None:
    """The id of the Slurm step this process is a task of; None in batch scripts, interactive shells and outside."""
    step = _optional(env, "SLURM_STEP_ID")
    return None if step is None or step >= _FIRST_SPECIAL_STEP else step


def step_id(env: Env) -> str | None:
    """The step this process is a task of, as scancel takes it: `1234.0`; None outside of steps."""
    step = _step(env)
    return None if step is None else f"{_int(env, 'SLURM_JOB_ID', least=1)}.{step}"


def _array(env: Env) -> tuple[int, int] | None:
    """Number of this task of an array and of all its tasks; tasks are numbered without gaps, as submit.py does."""
    if not env.get("SLURM_ARRAY_TASK_ID") or not env.get("SLURM_ARRAY_TASK_COUNT"):
        return None
    first = _optional(env, "SLURM_ARRAY_TASK_MIN") or 0
    task, count = _int(env, "SLURM_ARRAY_TASK_ID") - first, _int(env, "SLURM_ARRAY_TASK_COUNT", least=1)
    if not 0 <= task < count:
        raise UserError(f"SLURM_ARRAY_TASK_ID={env['SLURM_ARRAY_TASK_ID']} is not one of {count} tasks from {first}")
    return task, count


def in_allocation(env: Env) -> bool:
    """Whether srun would start a step here: inside a Slurm job, in its batch step or shell, and no step itself."""
    return bool(env.get("SLURM_JOB_ID")) and _step(env) is None and not env.get("SLUICE_RANK")


@contextmanager
def outside_job() -> Iterator[None]:
    """Without the variables of the job that this process runs in: sbatch hands the environment on to the new job.

    There some would lie: `SLURM_RESTART_COUNT` and the array's are only set where they apply. SLURM_CONF stays.
    """
    before = dict(os.environ)
    for name in before:
        if name.startswith(("SLURM_", "SLUICE_", "PMI")) and name != "SLURM_CONF":
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def allocated_hosts(env: Env) -> list[str]:
    """The nodes of this allocation, in Slurm's order; none outside."""
    name = "SLURM_JOB_NODELIST"
    return expand_hostlist(env[name], name) if env.get(name) else []


def cpus_per_task(env: Env) -> int | None:
    """How many CPUs each task of this allocation was promised; None where nobody asked for a number."""
    return _optional(env, "SLURM_CPUS_PER_TASK", least=1)


def granted_tasks(env: Env) -> tuple[list[int], str] | None:
    """How many tasks each node of this allocation may run, and how srun would deal out ranks: `block`, `plane=2` …

    None where Slurm does not say. Raises UserError where it says nonsense.
    """
    if not env.get("SLURM_TASKS_PER_NODE"):
        return None
    spread = env.get("SLURM_DISTRIBUTION") or "block"
    if spread == "plane":
        spread = f"plane={_int(env, 'SLURM_DIST_PLANESIZE', least=1)}"
    return _tasks_per_node(env, "SLURM_TASKS_PER_NODE"), spread


def _job_id(env: Env) -> str | None:
    """`1234`, or `1234_5` in an array: one task's own SLURM_JOB_ID may be the id of the whole array."""
    job = _optional(env, "SLURM_JOB_ID", least=1)
    if job is None:
        return None
    if env.get("SLURM_ARRAY_JOB_ID") or env.get("SLURM_ARRAY_TASK_ID"):
        return f"{_int(env, 'SLURM_ARRAY_JOB_ID', least=1)}_{_int(env, 'SLURM_ARRAY_TASK_ID')}"
    return str(job)
