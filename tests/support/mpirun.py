"""Ranks for MPI tests: programs that mpirun starts, and the groups, over MPI and over Gloo, that they compare.

    mpirun(4, "tests.support.mpi_programs", "sweep")   # `python -m tests.support.mpi_programs sweep` in four ranks

Importing torch takes a rank two seconds, so one world runs many cases. In a rank, `worlds()` gives the same set of
groups twice: made by the MPI backend, and by Gloo.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.run.code import CODE_ROOT
from slurm.supervise.mpi_launch import mpirun_command


def run_mpirun(
    ranks: int, module: str, *arguments: str, timeout: float = 240, env: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `python -W ignore -m module arguments` in `ranks` MPI ranks on this machine; `program`: another mpirun."""
    process = start_mpirun(ranks, module, *arguments, env=env, program=program)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        output, _ = process.communicate(timeout=240)
        raise AssertionError(f"not over within {timeout:g} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_mpirun(
    ranks: int, module: str, *arguments: str, env: Mapping[str, str] | None = None, program: Path | None = None
) -> subprocess.Popen[str]:
    """The same, without waiting; both outputs come through one pipe."""
    command, environment = mpirun_command(ranks)
    if program is not None:  # its library must be loaded then, not that of the wheel
        command[0], environment["MPI4PY_LIBMPI"] = str(program), "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
    return subprocess.Popen(
        [*command, sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, **environment, **(env or {})},
        cwd=CODE_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def find_debian_mpirun() -> Path | None:
    """The mpirun of the system's packages, where it is installed."""
    found = shutil.which("mpirun", path="/usr/bin")
    return Path(found) if found else None


def find_processes(text: str) -> list[int]:
    """Processes of this machine whose command line contains `text`, without this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in line and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def wait_until_processes_exit(text: str, seconds: float) -> list[int]:
    """What `processes_with(text)` still finds after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := find_processes(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
