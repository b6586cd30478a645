"""Submitting a stage through submitit: what runs in the job is one supervisor, `python -m slurm STAGE RUN`.

The callable that submitit pickles is `become`: it replaces submitit's own process by the supervisor, so that no
handler of submitit's (its rank 0 would save from inside a signal handler, and its local executor kills after a
second) stands between a signal and ours, and nothing travels in the pickle that the run directory can tell.

submitit's results are not used: whether a stage succeeded is read from its outputs.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit.local import local as submitit_local

from pipeline.run.code import with_code
from pipeline.run.directory import Run

_A_YEAR_MIN = 60 * 24 * 365
_VISIBLE = "SLUICE_VISIBLE_DEVICES"


def become(stage: str, run: str, code: str) -> None:
    """Replace this process by the stage's supervisor, running the run's own copy of the code."""
    environment = {**with_code(os.environ, Path(code)), "SLUICE_JOB_ID": submitit.JobEnvironment().job_id}
    visible = environment.pop(_VISIBLE, None)
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # submitit's local executor hides GPUs that it was not asked for
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    os.chdir(code)
    os.execve(sys.executable, [sys.executable, "-u", "-m", "slurm", stage, run], environment)


class DetachedExecutor(submitit.LocalExecutor):
    """submitit's local executor, in a session of its own: a terminal's Ctrl-C does not reach the job by itself."""

    def _submit_command(self, command: str) -> Any:
        with _own_sessions():
            return super()._submit_command(command)


@contextmanager
def _own_sessions() -> Iterator[None]:
    """Start what submitit starts in a new session; it offers no option for that."""
    popen = subprocess.Popen
    submitit_local.subprocess.Popen = functools.partial(popen, start_new_session=True)
    try:
        yield
    finally:
        submitit_local.subprocess.Popen = popen


class LocalJob:
    """A stage submitted to this machine."""

    def __init__(self, job: Any, folder: Path) -> None:
        self._job = job
        self.job_id = str(job.job_id)
        self.log = folder / f"{job.job_id}_0_log.out"

    @property
    def running(self) -> bool:
        """Whether the job's process is still there."""
        return self._job._process.poll() is None


def submit_local(run: Run, stage: str) -> LocalJob:
    """Start the stage's supervisor on this machine, detached; it outlives this process."""
    folder = run.stage_folder(stage)
    executor = DetachedExecutor(folder)
    # the year: submitit's own limit would kill; time limits are the supervisor's business
    executor.update_parameters(timeout_min=_A_YEAR_MIN, stderr_to_stdout=True)
    before = dict(os.environ)
    os.environ.update(with_code(os.environ, run.code))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        os.environ[_VISIBLE] = visible
    try:
        job = LocalJob(executor.submit(become, stage, str(run.path), str(run.code)), folder)
    finally:
        os.environ.clear()
        os.environ.update(before)
    run.event("submitted", stage, job_id=job.job_id, executor="local")
    return job
