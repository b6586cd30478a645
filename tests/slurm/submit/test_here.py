"""Following a stage here: whose a signal is, and what becomes of it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import ExitCode
from pipeline.base.signals import StopFlag
from pipeline.config.read import load_config
from pipeline.run.directory import LockHolder, Run
from slurm.submit import local_runner
from tests.support.tiny import write_config

SAVES = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(5))); print(flush=True)"


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    """A process that saves for a second when it is told to stop, and leaves with 5."""
    child = subprocess.Popen([sys.executable, "-c", f"{SAVES}; time.sleep(8)"], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    yield child
    child.kill()
    child.wait(10)


@pytest.mark.parametrize("signals", [1, 2])
@pytest.mark.parametrize("batch", [True, False])
def test_in_a_batch_job_a_signal_is_no_persons_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: subprocess.Popen[bytes], batch: bool, signals: int
) -> None:
    """A stop file would say that a person stopped it, and the job that Slurm puts back would not go on. The stage is
    told once it has its lock, and followed until it has saved: with the script all of the job ends."""
    run, looks = Run.create(load_config(write_config(tmp_path))), [0]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ENVIRONMENT", "BATCH" if batch else "")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)

    def holder(self: Run, stage: str) -> LockHolder | None:
        looks[0] += 1  # before it is submitted, then as it starts
        return LockHolder(supervisor.pid, os.uname().nodename) if looks[0] > 3 and supervisor.poll() is None else None

    job = SimpleNamespace(
        done=lambda: supervisor.poll() is not None, job_id="1", paths=SimpleNamespace(stdout=tmp_path)
    )
    monkeypatch.setattr("slurm.submit.submitit_job.submit_locally", lambda run, stage: job)
    monkeypatch.setattr(Run, "lock_holder", holder)
    flag = StopFlag()
    flag._set(signal.SIGTERM)
    flag.signal_count = signals
    if not batch:
        threading.Timer(2, supervisor.terminate).start()  # it reads the file
    code = local_runner.run_stage_locally(run, "prepare", flag, PlainConsole(file=io.StringIO()))
    assert run.stop_file.exists() == (not batch)
    if batch or signals == 1:
        assert (supervisor.poll(), code) == (5, ExitCode.CRASHED), "it wrote no event"
    else:
        assert (supervisor.poll(), code) == (None, ExitCode.STOPPED), "a second Ctrl-C only stops watching"
