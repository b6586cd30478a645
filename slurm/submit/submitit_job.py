"""Everything that uses submitit: batch scripts, pickles, and detached jobs on this machine.

submitit pickles a callable and runs it in the job. Sluice passes `exec` with a short program, which replaces submitit's
process with the stage's supervisor. Signal handlers of submitit therefore do not run in this process: they would save
from inside the handler. A function of this package cannot be passed, because pickle stores only the name of a function.
The run's copy of the code may come from another version, which may not have a function of this name.

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
"""Minutes in a year."""


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
"""A program that replaces its process with the supervisor of `stage` of `run`. The supervisor uses the code in the
folder `code`, and the same environment as :func:`pipeline.run.code.make_code_env` returns."""


class BatchExecutor(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's Slurm executor, which also works on a machine without Slurm (for `--dry-run`)."""

    @classmethod
    def affinity(cls) -> int:
        """Return 1. submitit refuses a negative value, which the method of the base class returns without srun."""
        return 1


def render_script(executor: BatchExecutor, tasks: int) -> str:
    """Return the sbatch script of a job, or of an array if `tasks` is more than 1.

    submitit has no public function that returns the script without submitting it. This is the only place that uses
    private members of submitit.
    """
    executor.parameters["map_count"] = tasks if tasks > 1 else None
    # submitit does not use the second argument
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


def _make_globals(stage: str, run: Run, code: Path) -> dict[str, Any]:
    """Return the global variables with which to execute :data:`BECOME_SUPERVISOR`."""
    return {"stage": stage, "run": str(run.path), "code": str(code)}


def write_pickle(executor: BatchExecutor, path: Path, stage: str, target: Run, code: Path) -> None:
    """Write the pickle that makes one task of a job the supervisor of a stage.

    Args:
        executor: the executor with the parameters of the job.
        path: the path of the pickle.
        stage: the stage.
        target: the run or sweep point that the supervisor supervises.
        code: the folder with the run's copy of the code.
    """
    submission = DelayedSubmission(exec, BECOME_SUPERVISOR, _make_globals(stage, target, code))
    # submitit makes the same call when it submits a job; only its signal handler reads these values
    submission.set_timeout(executor.parameters["time"], executor.max_num_timeout)
    submission.dump(path)


def submit_locally(run: Run, stage: str) -> submitit.Job[None]:
    """Start the supervisor of a stage on this machine. The supervisor is detached and outlives this process."""
    executor = submitit.LocalExecutor(run.stage_dir(stage))
    # At this time limit, submitit interrupts a job and kills it one second later, which is too short for a save. The
    # supervisor itself enforces limits, so this limit must never be reached.
    executor.update_parameters(timeout_min=_ONE_YEAR_MIN, stderr_to_stdout=True)
    with _start_processes_detached(make_code_env(os.environ, run.code_dir)):
        job = executor.submit(exec, BECOME_SUPERVISOR, _make_globals(stage, run, run.code_dir))
    run.append_event(Submitted(stage=stage, job_id=job.job_id, executor="local"))
    return job


@contextmanager
def _start_processes_detached(environment: Mapping[str, str]) -> Iterator[None]:
    """Make `subprocess.Popen` start processes in a new session, with `environment` and the variables SUBMITIT_*.

    submitit has no options for this. In a new session, a process does not receive the Ctrl-C of the terminal. Without
    `environment`, submitit would also set CUDA_VISIBLE_DEVICES to an empty value, which hides the GPUs that this
    process may use.
    """
    popen: Any = subprocess.Popen

    def start_detached(*args: Any, env: Mapping[str, str], **options: Any) -> Any:
        """Replace `subprocess.Popen`. `env` is the environment that submitit passes."""
        variables = {name: value for name, value in env.items() if name.startswith("SUBMITIT_")}
        return popen(*args, env={**environment, **variables}, start_new_session=True, **options)

    subprocess.Popen = start_detached  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        subprocess.Popen = popen  # type: ignore[misc]
