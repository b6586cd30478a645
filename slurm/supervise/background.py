"""Work beside the ranks, which never stops a training: trackers, telemetry, and evaluations of new checkpoints.

- A follower is a process that reads the run directory and sends it to a tracker, or writes telemetry. Followers have a
  lower priority. No process waits for them while ranks run. Their errors are logged in `track/NAME.log`.
- With `evaluate.every: checkpoint`, the supervisor of a training submits an evaluate job when a checkpoint appears. The
  job evaluates all checkpoints that have no result yet. Each one waits for the one before, so a slow queue leads to
  fewer, larger evaluations. The chain's own evaluate job, after the training, does the rest.
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
from pipeline.config.stages import STAGES
from pipeline.data.manifest import count_training_steps
from pipeline.run.code import start_process
from pipeline.run.directory import Run
from pipeline.run.events import EvaluationNotSubmitted, Submitted
from pipeline.train.train_stage import is_complete_early
from slurm.query.job_states import query_job_states
from slurm.query.run_jobs import events_since_submission, list_recorded_jobs
from slurm.submit.site_environment import get_job_python

FOLLOWER_DRAIN_S = 10.0
"""How long followers may hand over the rest when the stage's job ends. The next follower, or `submit.py track RUN`,
hands over what remains."""
CHECKPOINT_POLL_S = 2.0
MIN_RETRY_DELAY_S = 60.0
"""The pause after the first failed submission. It doubles after each further one."""
MAX_RETRY_DELAY_S = 3600.0


# ---- followers


@contextmanager
def run_followers(run: Run, stage: str, nodes: Sequence[str], on_slurm: bool) -> Iterator[None]:
    """Run a follower for each enabled tracker while the block runs, and telemetry on each node.

    Stages that take only seconds, and have no steps, start no tracker whose package takes seconds to import.

    Args:
        run: the run.
        stage: the job's stage.
        nodes: the job's nodes.
        on_slurm: whether this is a Slurm job, in which `srun` starts processes on other nodes.
    """
    track = run.config.track
    names = [name for name in track.enabled if STAGES[stage].is_distributed or TRACKERS[name].package is None]
    processes = [_start_follower(run, name, [sys.executable]) for name in names]
    if track.telemetry_s is not None:
        # --overlap lets the step share the CPUs of the ranks' step (srun(1)); a job on one node needs no step
        step = ["srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
        step += ["--cpus-per-task=1", "--mem=0", f"--chdir={run.code_dir}", get_job_python(run.config.site)]
        processes.append(_start_follower(run, "telemetry", step if on_slurm and len(nodes) > 1 else [sys.executable]))
    try:
        yield
    finally:
        _stop_followers(processes)


def _start_follower(run: Run, name: str, program: Sequence[str]) -> subprocess.Popen[bytes]:
    folder: Path = run.path / "track"
    folder.mkdir(exist_ok=True)
    with open(folder / f"{name}.log", "ab") as log:
        return start_process(run.code_dir, [*program, "-m", "tracking.follower", name, str(run.path)], log, {})


def _stop_followers(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all, wait for `FOLLOWER_DRAIN_S` in total, and kill those that still run."""
    deadline = time.monotonic() + FOLLOWER_DRAIN_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))


# ---- evaluations of new checkpoints


def evaluates_one_checkpoint(run: Run, job_id: str) -> bool:
    """Return True if a job was submitted to evaluate a new checkpoint, beside the jobs of the chain.

    Another checkpoint may appear while it runs, so it may leave outputs missing.
    """
    submissions = run.read_events("evaluate", Submitted)
    if not any(event.step is not None and event.job_id == job_id for event in submissions):
        return False  # this check works without Slurm
    return events_since_submission(submissions, job_id)[0].step is not None


class EvaluationSubmitter:
    """Submits an evaluate job when a new checkpoint of a run appears."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_enabled = run.config.evaluate.every == "checkpoint" and run.config.data.held_out > 0
        steps = [event.step for event in run.read_events("evaluate", Submitted)]
        self._last_step = max((step for step in steps if step is not None), default=0)
        self._next_poll_time = 0.0
        self._retry_delay_s = MIN_RETRY_DELAY_S
        self._last_message = ""

    def poll(self) -> None:
        """Submit one job if there is a new checkpoint. An error is printed, and the submission is repeated later."""
        if not self.is_enabled or time.monotonic() < self._next_poll_time:
            return
        self._next_poll_time = time.monotonic() + CHECKPOINT_POLL_S
        try:
            self._submit_newest()
            self._retry_delay_s = MIN_RETRY_DELAY_S
        except Exception as error:  # some sites accept no jobs from compute nodes; no error may stop the training
            self._next_poll_time = time.monotonic() + self._retry_delay_s
            self._retry_delay_s = min(2 * self._retry_delay_s, MAX_RETRY_DELAY_S)
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            if message != self._last_message:
                self._last_message = message
                print(f"no evaluation could be submitted; trying again later: {message}", file=sys.stderr, flush=True)
                with suppress(OSError):
                    self.run.append_event(EvaluationNotSubmitted(stage="evaluate", message=message))

    def _submit_newest(self) -> None:
        newest_step = next(iter(list_checkpoint_steps(self.run.checkpoints_dir)), 0)
        if newest_step <= self._last_step or self._is_final(newest_step):
            return
        from slurm.submit.sbatch import JOB_SBATCH_TIMEOUT_S, resolve_submissions_if_open, submit_stage

        resolve_submissions_if_open([self.run])
        submitted = [
            (event.step, job)
            for event, job in list_recorded_jobs(self.run)
            if event.stage == "evaluate" and event.step is not None
        ]
        self._last_step = max([self._last_step, *(step for step, _ in submitted)])
        if newest_step <= self._last_step:  # its submission had no record until now
            return
        states = query_job_states(job for _, job in submitted[-1:]).values()
        after = [state.job_id for state in states if state.is_active]
        submit_stage(self.run, "evaluate", after, kind="afterany", patience_s=JOB_SBATCH_TIMEOUT_S, step=newest_step)
        self._last_step = newest_step

    def _is_final(self, step: int) -> bool:
        """Return True if the training ends with the checkpoint of `step`: the chain's own job evaluates that one.

        The training ends there after its last step, or earlier if a callback completed it.
        """
        steps = count_training_steps(self.run.config, self.run.data_dir) or 0
        return step >= steps or is_complete_early(self.run, step, steps)
