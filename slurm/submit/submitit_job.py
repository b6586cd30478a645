"""Submitting a stage through submitit: what runs in the job is one supervisor, `python -m slurm STAGE RUN`.

The callable that submitit pickles is `become`: it replaces submitit's own process by the supervisor, so that no
handler of submitit's (its rank 0 would save from inside a signal handler, and its local executor kills after a
second) stands between a signal and ours, and nothing travels in the pickle that the run directory can tell.

submitit's results are not used: whether a stage succeeded is read from its outputs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import submitit
from submitit.local import local as submitit_local

from pipeline.run.code import make_code_env
from pipeline.run.directory import Run

_A_YEAR_MIN = 60 * 24 * 365


def become_supervisor(stage: str, run: str, code: str) -> None:
    """Replace this process by the stage's supervisor, running the run's own copy of the code."""
    environment = {**make_code_env(os.environ, Path(code)), "SLUICE_JOB_ID": submitit.JobEnvironment().job_id}
    os.chdir(code)
    os.execve(sys.executable, [sys.executable, "-u", "-m", "slurm", stage, run], environment)


class DetachedExecutor(submitit.LocalExecutor):
    """submitit's local executor, as a stage needs it: in a session of its own (a terminal's Ctrl-C does not reach the
    job by itself), with the run's code, and with the GPUs that this process sees; submitit hides them."""

    def __init__(self, run: Run, stage: str) -> None:
        super().__init__(run.stage_dir(stage))
        self.environment = make_code_env(os.environ, run.code_dir)

    def _submit_command(self, command: str) -> Any:
        popen: Any = subprocess.Popen

        def start(*words: Any, env: Mapping[str, str], **more: Any) -> Any:
            told = {name: value for name, value in env.items() if name.startswith("SUBMITIT_")}
            return popen(*words, env=self.environment | told, start_new_session=True, **more)

        submitit_local.subprocess.Popen = start  # it offers no options for these
        try:
            return super()._submit_command(command)
        finally:
            submitit_local.subprocess.Popen = popen


def submit_locally(run: Run, stage: str) -> Any:
    """Start the stage's supervisor on this machine, detached; it outlives this process. Returns submitit's job."""
    executor = DetachedExecutor(run, stage)
    # the year: submitit's own limit would kill; time limits are the supervisor's business
    executor.update_parameters(timeout_min=_A_YEAR_MIN, stderr_to_stdout=True)
    job = executor.submit(become_supervisor, stage, str(run.path), str(run.code_dir))
    run.event("submitted", stage, job_id=job.job_id, executor="local")
    return job
