"""Everything that uses submitit: batch scripts, pickles, and detached jobs on this machine.

submitit pickles a callable and runs it in the job. Sluice passes `exec` with a short program, which replaces submitit's
process with the stage's supervisor. No signal handler of submitit then runs in the job: submitit would save from inside
a signal handler, and its local executor kills after one second. A function of this package cannot be passed, because it
would be pickled by its name. The run's copy of the code may come from another version, without this name.

Results of submitit are not used: a stage has succeeded if its outputs validate.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission

from pipeline.run.code import make_code_env
from pipeline.run.directory import Run
from pipeline.run.events import Submitted

TESTED_VERSION = "1.5.4"
"""The version of submitit that :func:`render_script` was tested with."""
_ONE_YEAR_MIN = 60 * 24 * 365


BECOME_SUPERVISOR = """
import os, sys, submitit
other_paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != code]
environment = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([code, *other_paths]),
    "PYTHONSAFEPATH": "1",
    "SLUICE_JOB_ID": submitit.JobEnvironment().job_id,
}
os.chdir(code)
os.execve(sys.executable, [sys.executable, "-u", "-m", "slurm", stage, run], environment)
"""
"""A program that replaces the process with the supervisor of `stage` of `run`, from the copy of the code in `code`. It
sets the same environment as :func:`pipeline.run.code.make_code_env`."""


class BatchExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor, which also works on a machine without Slurm (for `--dry-run`)."""

    @classmethod
    def affinity(cls) -> int:
        """Return 1: submitit then does not require Slurm's commands."""
        return 1


def render_script(executor: BatchExecutor, tasks: int) -> str:
    """Return the sbatch script of a job, or of an array if `tasks` is more than 1.

    submitit has no public function that returns the script without submitting it. This is the only place that uses
    private members of submitit.
    """
    executor.parameters["map_count"] = tasks if tasks > 1 else None
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def _make_names(stage: str, run: Run, code: Path) -> dict[str, Any]:
    """Return the values of the global names in :data:`BECOME_SUPERVISOR`."""
    return {"stage": stage, "run": str(run.path), "code": str(code)}


def write_pickle(executor: BatchExecutor, path: Path, stage: str, target: Run, code: Path) -> None:
    """Write the pickle that makes one task of a job the supervisor of `stage` of the run `target`."""
    submission = DelayedSubmission(exec, BECOME_SUPERVISOR, _make_names(stage, target, code))
    submission.set_timeout(executor.parameters["time"], executor.max_num_timeout)
    submission.dump(path)


def submit_locally(run: Run, stage: str) -> submitit.Job[None]:
    """Start the supervisor of a stage on this machine. The supervisor is detached and outlives this process."""
    executor = submitit.LocalExecutor(run.stage_dir(stage))
    # submitit kills a job at its time limit; the supervisor enforces limits itself, so this limit must never be reached
    executor.update_parameters(timeout_min=_ONE_YEAR_MIN, stderr_to_stdout=True)
    with _start_processes_detached(make_code_env(os.environ, run.code_dir)):
        job = executor.submit(exec, BECOME_SUPERVISOR, _make_names(stage, run, run.code_dir))
    run.append_event(Submitted(stage=stage, job_id=job.job_id, executor="local"))
    return job


@contextmanager
def _start_processes_detached(environment: Mapping[str, str]) -> Iterator[None]:
    """Make `subprocess.Popen` start processes in a new session, with `environment` and submitit's own variables.

    submitit has no options for this. In a new session, a job does not receive the Ctrl-C of the terminal. By default,
    submitit would also set CUDA_VISIBLE_DEVICES to an empty value, which hides the GPUs that this process may use.
    """
    popen: Any = subprocess.Popen

    def start(*args: Any, env: Mapping[str, str], **options: Any) -> Any:
        variables = {name: value for name, value in env.items() if name.startswith("SUBMITIT_")}
        return popen(*args, env={**environment, **variables}, start_new_session=True, **options)

    subprocess.Popen = start  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
