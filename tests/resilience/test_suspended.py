"""A suspended job (`scontrol suspend`, a partition with PreemptMode=SUSPEND) hangs as little as one that was not."""

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


def in_a_phase(rank_info: RankInfo, path: Path, begun: Path, seconds: float) -> None:
    """One rank, so long in one phase by the sleeps that it counts, not by the clock."""
    watchdog = Watchdog(Run.open(path), "train", rank_info, StopFlag())
    watchdog.start()
    watchdog.enter_phase(1, "forward")
    begun.touch()
    for _ in range(round(10 * seconds)):
        time.sleep(0.1)
    watchdog.close()


def left(tmp_path: Path, seconds: float, stopped_s: float) -> int | None:
    """How a rank left that was stopped meanwhile."""
    run = make_run(tmp_path, overrides=(f"recovery.hang_s={HANG_S}",))
    run.stage_dir("train").mkdir(parents=True, exist_ok=True)
    begun = tmp_path / "begun"
    ranks = Ranks(1, in_a_phase, run.path, begun, seconds)
    (process,) = ranks.processes
    assert process.pid is not None
    deadline = time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(stopped_s)
    os.kill(process.pid, signal.SIGCONT)
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize(("seconds", "stopped_s", "code"), [(3, 10, 0), (30, 0, ExitCode.HANG)])
def test_time_that_a_job_was_suspended_is_no_hang(tmp_path: Path, seconds: float, stopped_s: float, code: int) -> None:
    assert left(tmp_path, seconds, stopped_s) == code
