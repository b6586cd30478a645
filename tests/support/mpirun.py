"""Start Python modules under mpirun for MPI tests, and find their processes.

    run_mpirun(4, "tests.support.mpi_programs", "sweep")   # `python -m tests.support.mpi_programs sweep` in 4 ranks

A rank needs two seconds to import torch, so a test runs many cases in one start of mpirun.
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
from slurm.supervise.launch import build_mpirun_command


def run_mpirun(
    ranks: int, module: str, *arguments: str, timeout: float = 240, env: Mapping[str, str] | None = None,
    program: Path | None = None,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run `python -W ignore -m module arguments` in `ranks` MPI ranks on this machine and wait for them.

    Args:
        ranks: number of ranks.
        module: module that each rank runs.
        arguments: arguments of the module.
        timeout: seconds after which mpirun is terminated and the test fails with the output of the ranks.
        env: further environment variables.
        program: path of the mpirun command; None for the mpirun of the installed wheel.
    """
    process = start_mpirun(ranks, module, *arguments, env=env, program=program)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then ends its ranks
        output, _ = process.communicate(timeout=240)
        raise AssertionError(f"mpirun did not end within {timeout:g} s:\n{output}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start_mpirun(
    ranks: int, module: str, *arguments: str, env: Mapping[str, str] | None = None, program: Path | None = None
) -> subprocess.Popen[str]:
    """Start the ranks as `run_mpirun` does, but do not wait for them. stdout and stderr share one pipe."""
    command, environment = build_mpirun_command(ranks)
    if program is not None:  # mpi4py must load the MPI library of this mpirun, not the library of the wheel
        command[0] = str(program)
        environment["MPI4PY_LIBMPI"] = "/usr/lib/x86_64-linux-gnu/libmpi.so.40"
    return subprocess.Popen(
        [*command, sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**os.environ, **environment, **(env or {})},
        cwd=CODE_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def find_debian_mpirun() -> Path | None:
    """Return the path of the mpirun in /usr/bin, which a Debian package installs; None if it is missing."""
    path = shutil.which("mpirun", path="/usr/bin")
    return Path(path) if path else None


def find_processes(text: str) -> list[int]:
    """Return the PIDs of all processes, except this one, with `text` in their command line."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if text in command_line and int(folder.name) != os.getpid():
            pids.append(int(folder.name))
    return pids


def list_remaining_processes(text: str, timeout_s: float) -> list[int]:
    """Wait up to `timeout_s` until all processes with `text` in their command line exit; return the remaining PIDs."""
    deadline = time.monotonic() + timeout_s
    while (pids := find_processes(text)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids
