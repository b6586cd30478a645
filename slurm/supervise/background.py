"""Work that the supervisor starts in addition to the ranks: trackers, telemetry, and evaluations of new checkpoints.

- A follower is a process that reads the run directory and sends metrics and events to a tracker, or that writes
  telemetry. Followers run at a lower priority than the ranks, and write their errors to `track/NAME.log`.
- With `evaluate.every: checkpoint`, the supervisor of the train stage submits an evaluate job when a new checkpoint
  appears. The job evaluates all checkpoints without a result. Each of these jobs waits for the previous one. So if jobs
  wait long in the queue, each job evaluates more checkpoints. The evaluate job of the chain evaluates the remaining
  checkpoints.

A failure of this work never stops the run.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.base.errors import UserError
from pipeline.checkpoint.catalog import list_checkpoint_steps
from pipeline.config.sections import TRACKERS
from pipeline.data.manifest import count_training_steps
from pipeline.run.code import start_process
from pipeline.run.directory import Run
from pipeline.run.events import EvaluationNotSubmitted, Submitted
from pipeline.train.train_stage import is_complete_early
from slurm.query.job_states import query_job_states
from slurm.query.run_jobs import events_since_submission, list_recorded_jobs
from slurm.submit.site_environment import get_job_python

FOLLOWER_STOP_TIMEOUT_S = 10.0
"""How long followers may send remaining data when the job ends. If this time is too short, the next follower sends the
rest, or the user runs `submit.py track RUN`."""
CHECKPOINT_POLL_S = 2.0
"""The pause between two checks for a new checkpoint."""
MIN_RETRY_DELAY_S = 60.0
"""The pause after the first failed submission of an evaluate job. The pause doubles after each further failure."""
MAX_RETRY_DELAY_S = 3600.0
"""The longest pause between two attempts to submit an evaluate job."""


# ---- followers


@contextmanager
def run_followers(run: Run, stage: str, nodes: Sequence[str], on_slurm: bool) -> Iterator[None]:
    """Run a follower for each enabled tracker, and telemetry on each node, until the block ends.

    The stages prepare, shard and publish often take only seconds. In these stages, no tracker is started that needs a
    package of its own, such as wandb, because importing the package takes seconds as well.

    Args:
        run: the run.
        stage: the job's stage.
        nodes: the job's nodes.
        on_slurm: whether this process runs in a Slurm job. If the job has several nodes, srun starts telemetry
            on all nodes.
    """
    track = run.config.track
    names = [
        name for name in track.enabled if run.config.get_stage(stage).is_distributed or TRACKERS[name].package is None
    ]
    processes = [_start_follower(run, name, [sys.executable]) for name in names]
    if track.telemetry_s is not None:
        python_command = [sys.executable]
        if on_slurm and len(nodes) > 1:
            # With --overlap, this job step shares CPUs and memory with the job step of the ranks (srun(1)).
            python_command = ["srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}"]
            python_command += ["--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", f"--chdir={run.code_dir}"]
            python_command += ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
            python_command.append(get_job_python(run.config.site))
        processes.append(_start_follower(run, "telemetry", python_command))
    try:
        yield
    finally:
        _stop_followers(processes)


def _start_follower(run: Run, name: str, python_command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a follower, and append its output to `track/NAME.log`.

    Args:
        run: the run.
        name: the name of the tracker, such as `wandb`; or `telemetry`.
        python_command: the command that starts Python: the path of Python, perhaps preceded by srun and its options.
    """
    folder: Path = run.path / "track"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.log", "ab") as log:
        return start_process(run.code_dir, [*python_command, "-m", "tracking.follower", name, str(run.path)], log, {})


def _stop_followers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all followers, and SIGKILL to followers that still run after `FOLLOWER_STOP_TIMEOUT_S`."""
    deadline = time.monotonic() + FOLLOWER_STOP_TIMEOUT_S
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal_number)
        for process in processes:
            # After SIGKILL, the deadline may have passed. The minimum gives the killed processes time to exit.
            timeout_s = max(0.1, deadline - time.monotonic())
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)


# ---- evaluations of new checkpoints


def was_submitted_for_checkpoint(run: Run, job_id: str) -> bool:
    """Return True if :class:`EvaluationSubmitter` submitted this job, and not, for example, the chain.

    After a job of EvaluationSubmitter, the outputs of the evaluate stage may still be incomplete, because more
    checkpoints may appear while the job runs.
    """
    submissions = run.read_events("evaluate", Submitted)
    if not any(event.step is not None and event.job_id == job_id for event in submissions):
        return False  # In this common case, no Slurm command is needed.
    # Slurm may have reused the job id. `events_since_submission` finds the submission of the current job.
    return events_since_submission(submissions, job_id)[0].step is not None


class EvaluationSubmitter:
    """Submits an evaluate job when a new checkpoint of a run appears, if `evaluate.every` is `checkpoint`.

    If the run has no held-out data, no jobs are submitted.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_enabled = run.config.evaluate.every == "checkpoint" and run.config.data.held_out > 0
        steps = [event.step for event in run.read_events("evaluate", Submitted)]
        self._last_submitted_step = max((step for step in steps if step is not None), default=0)
        """The largest step of a checkpoint for which a job was submitted; 0 if there is none."""
        self._next_poll_time = 0.0
        self._retry_delay_s = MIN_RETRY_DELAY_S
        """The pause after the next failed submission, in seconds."""
        self._last_message = ""
        """The latest error, which is printed only once if it repeats."""

    def poll(self) -> None:
        """Submit a job if there is a new checkpoint. If the submission fails, print the error and try again later."""
        if not self.is_enabled or time.monotonic() < self._next_poll_time:
            return
        self._next_poll_time = time.monotonic() + CHECKPOINT_POLL_S
        try:
            self._submit_newest()
            self._retry_delay_s = MIN_RETRY_DELAY_S
        except Exception as error:  # Some sites accept no jobs from compute nodes. No error here may stop the run.
            self._next_poll_time = time.monotonic() + self._retry_delay_s
            self._retry_delay_s = min(2 * self._retry_delay_s, MAX_RETRY_DELAY_S)
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            if message != self._last_message:
                self._last_message = message
                print(f"no evaluation could be submitted; trying again later: {message}", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self.run.append_event(EvaluationNotSubmitted(stage="evaluate", message=message))

    def _submit_newest(self) -> None:
        """Submit a job for the newest checkpoint, unless this checkpoint has a job or is the final checkpoint."""
        newest_step = next(iter(list_checkpoint_steps(self.run.checkpoints_dir)), 0)  # The first step is the newest.
        if newest_step <= self._last_submitted_step or self._is_final(newest_step):
            return
        from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, confirm_submissions_from_job, submit_stage

        # A submission is unconfirmed if a process was interrupted while it called sbatch. The job may exist
        # nevertheless.
        confirm_submissions_from_job([self.run])
        submitted = [
            (event.step, job)
            for event, job in list_recorded_jobs(self.run)
            if event.stage == "evaluate" and event.step is not None
        ]
        self._last_submitted_step = max([self._last_submitted_step, *(step for step, _ in submitted)])
        if newest_step <= self._last_submitted_step:  # The unconfirmed submission has a job.
            return
        previous_jobs = [job for _, job in submitted[-1:]]  # The latest job, or no job.
        previous_states = query_job_states(previous_jobs).values()
        active_jobs = [state.job_id for state in previous_states if state.is_active]
        submit_stage(
            self.run,
            "evaluate",
            active_jobs,
            dependency_type="afterany",
            timeout_s=JOB_SBATCH_TIMEOUT_S,
            step=newest_step,
        )
        self._last_submitted_step = newest_step

    def _is_final(self, step: int) -> bool:
        """Return True if the checkpoint of `step` is the final one, which the evaluate job of the chain evaluates.

        The final checkpoint belongs to the last step, or to an earlier step if a callback completed the stage early. If
        the number of steps is unknown, return True.
        """
        steps = count_training_steps(self.run.config, self.run.data_dir) or 0
        return step >= steps or is_complete_early(self.run, step, steps)
