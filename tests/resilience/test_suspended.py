"""Tests that the watchdog does not count time for which Slurm suspended the job (`scontrol suspend`)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.base.signals import StopFlag
from pipeline.resilience.watchdog import Watchdog
from pipeline.run.directory import Run
from tests.support.ranks import Ranks
from tests.support.tiny import make_run

HANG_S = 6
"""Value of recovery.hang_s: the watchdog ends a rank that stays in one phase for longer."""


def stay_in_phase(rank_info: RankInfo, path: Path, start_file: Path, seconds: float) -> None:
    """Create `start_file`, then stay in one phase until this process has run for `seconds`.

    The time is spent in short sleeps, so time for which the process is suspended does not count.
    """
    watchdog = Watchdog(Run.open(path), "train", rank_info, StopFlag())
    watchdog.start()
    watchdog.enter_phase(1, "forward")
    start_file.touch()
    for _ in range(round(10 * seconds)):
        time.sleep(0.1)
    watchdog.close()


def suspend_rank(tmp_path: Path, seconds: float, suspended_s: float) -> int | None:
    """Run `stay_in_phase` in a rank, suspend it for `suspended_s` seconds with SIGSTOP, and return its exit code."""
    run = make_run(tmp_path, overrides=(f"recovery.hang_s={HANG_S}",))
    run.stage_dir("train").mkdir(parents=True, exist_ok=True)
    start_file = tmp_path / "started"
    ranks = Ranks(1, stay_in_phase, run.path, start_file, seconds)
    (process,) = ranks.processes
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while not start_file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(suspended_s)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    return process.exitcode


@pytest.mark.story
@pytest.mark.parametrize(("seconds", "suspended_s", "code"), [(3, 10, 0), (30, 0, ExitCode.HANG)])
def test_watchdog_does_not_count_suspended_time(tmp_path: Path, seconds: float, suspended_s: float, code: int) -> None:
    """A rank that is suspended for longer than HANG_S succeeds. A rank that runs for longer than HANG_S hangs."""
    assert suspend_rank(tmp_path, seconds, suspended_s) == code
