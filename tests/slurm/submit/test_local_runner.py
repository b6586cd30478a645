"""Test what happens to a stage on this machine when submit.py, which runs the stage, receives a signal."""

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

SAVE_ON_SIGTERM = (
    "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(1), sys.exit(5))); print(flush=True)"
)


@pytest.fixture
def supervisor() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process in place of a supervisor. After SIGTERM, it needs a second to save, and exits with code 5."""
    process = subprocess.Popen([sys.executable, "-c", f"{SAVE_ON_SIGTERM}; time.sleep(8)"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.wait(10)


@pytest.mark.parametrize("signal_count", [1, 2])
@pytest.mark.parametrize("in_batch_job", [True, False])
def test_a_signal_creates_a_stop_file_only_outside_of_a_batch_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    supervisor: subprocess.Popen[bytes],
    in_batch_job: bool,
    signal_count: int,
) -> None:
    """A stop file means that the user stopped the run. After a signal of Slurm, a requeued job must continue the run.

    In a batch job, submit.py sends the signal to the supervisor as soon as the supervisor has the lock of the stage.
    submit.py then waits for the save, because Slurm kills all processes of a job when the batch script exits. Outside
    of a batch job, a second signal ends the wait.
    """
    run = Run.create(load_config(write_config(tmp_path)))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("ENVIRONMENT", "BATCH" if in_batch_job else "")
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    lock_queries = 0

    def find_lock_holder(self: Run, stage: str) -> LockHolder | None:
        nonlocal lock_queries
        lock_queries += 1
        has_lock = lock_queries > 3 and supervisor.poll() is None  # not yet at the first three queries
        return LockHolder(supervisor.pid, os.uname().nodename) if has_lock else None

    job = SimpleNamespace(
        done=lambda: supervisor.poll() is not None, job_id="1", paths=SimpleNamespace(stdout=tmp_path)
    )
    monkeypatch.setattr("slurm.submit.submitit_job.submit_locally", lambda run, stage: job)
    monkeypatch.setattr(Run, "lock_holder", find_lock_holder)
    flag = StopFlag()
    flag._set(signal.SIGTERM)
    flag.signal_count = signal_count
    if not in_batch_job:
        threading.Timer(2, supervisor.terminate).start()  # as if the supervisor had read the stop file
    exit_code = local_runner.run_stage_locally(run, "prepare", flag, PlainConsole(file=io.StringIO()))
    assert run.stop_file.exists() == (not in_batch_job)
    if in_batch_job or signal_count == 1:
        assert (supervisor.poll(), exit_code) == (5, ExitCode.CRASHED), "an exit without an event is a crash"
    else:
        assert (supervisor.poll(), exit_code) == (None, ExitCode.STOPPED), "submit.py must not wait after two signals"
