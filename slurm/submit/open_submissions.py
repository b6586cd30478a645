"""Find out what became of submissions whose outcome the run directory does not tell.

`submit` writes the event `submitting` before it calls sbatch and `submitted` after that (slurm/submit/sbatch.py). If
the second is missing, submit.py was killed in between, or sbatch did not answer; the job may exist. Whoever submits or
cancels jobs of a run settles its open submissions first: a job that Slurm shows is recorded as `submitted`, and a
submission without a job is given up (`not_submitted`). A job that appears after it was given up ends at once.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import try_flock
from pipeline.run.directory import Run
from slurm.query import job_states
from slurm.query.job_states import INTERACTIVE_TIMEOUT_S, array_job_id, list_submissions, require_response
from slurm.query.run_jobs import SubmittedJob, find_run_jobs

SBATCH_TIMEOUT_S = 300.0
"""How long sbatch may take. It tries again by itself for two minutes if the controller is busy."""
LOOK_AGAIN_S = (1.0, 2.0, 3.0)
"""Pauses between looks at the queue before a submission is given up. A controller that was suspended takes jobs of
clients that have gone, a moment after it answers again."""
MOST_LOOKS = 20
"""Other processes may submit jobs of the run again and again; what is new after so many looks is left alone."""
POLL_S = 0.5
JOB_SBATCH_TIMEOUT_S = 60.0
"""How long a job may wait for sbatch, or for another process that is calling it: it has other things to do."""
SUBMISSION_KEY_VARIABLE = "SLUICE_SUBMISSION"
"""The environment variable of a job that holds the key of its submission."""


def submission_script_path(run: Run, stage: str, key: str) -> Path:
    """The batch script of a submission. Whoever runs sbatch with it, and sbatch, hold a lock on it."""
    return run.jobs_dir / stage / f"{key}_submission.sh"


def resolve_open_submissions(
    runs: Sequence[Run],
    say: Callable[[str], None],
    patience_s: float = SBATCH_TIMEOUT_S,
    known: list[SubmittedJob] | None = None,
) -> list[SubmittedJob]:
    """Return the jobs of `runs` after their open submissions were recorded or given up.

    `patience_s`: how long to wait for another process that is calling sbatch. `known`: the jobs as they are now, if
    they were just looked up. Raises UserError if the other process still waits after that, or if the controller does
    not answer.
    """
    known = find_run_jobs(runs) if known is None else known
    require_response(job.state for job in known)
    by_path = {run.path: run for run in runs}
    seen = Counter(map(_doubt, known))
    for _ in range(MOST_LOOKS):
        doubtful = [job for job in known if _doubt(job) and seen[_doubt(job)] <= len(LOOK_AGAIN_S)]
        if not doubtful:
            break
        for job in doubtful:
            if _is_lost(job):
                _wait_for_sbatch(by_path[job.run], job, patience_s)
        time.sleep(LOOK_AGAIN_S[min(seen[_doubt(job)] for job in doubtful) - 1])
        known = find_run_jobs(runs)
        require_response(job.state for job in known)
        seen.update(map(_doubt, known))
    found: list[SubmittedJob] = []
    for job in known:
        if _doubt(job) and seen[_doubt(job)] <= len(LOOK_AGAIN_S):
            continue  # it appeared during the last looks: another process is submitting it
        if _is_lost(job):
            abandon_submission(by_path[job.run], job.event, "no job of this submission is in the queue")
            say(f"{job.stage:9} a submission at {job.event['time']} came to nothing; it is given up")
            continue
        if job.job_id and not job.is_recorded and not job.is_stray:
            record_submission(by_path[job.run], job.event, job.job_id, job_submitted=_time_of(job))
            say(f"{job.stage:9} job {job.job_id} was submitted without a record; it is recorded now")
        found.append(job)
    return found


def resolve_submissions_if_open(runs: Sequence[Run]) -> None:
    """Settle what is open, for a job that submits or cancels others. Asks Slurm only if there is something.

    Raises UserError as `settle`.
    """
    if any(one.is_open for run in runs for _, one in list_submissions(run)):
        resolve_open_submissions(runs, print_to_log, JOB_SBATCH_TIMEOUT_S)


def print_to_log(message: str) -> None:
    """Print a message to standard error, which is the log of a job."""
    print(message, file=sys.stderr, flush=True)


def _doubt(job: SubmittedJob) -> str:
    """What is to be seen in several looks before it is believed; empty if nothing about the job is doubtful.

    Another process may just be submitting it: then a look sees its event without the job, or the job without its event.
    """
    if _is_lost(job):
        return f"submission {job.event['key']}"
    return f"job {job.job_id}" if job.is_stray and job.state.is_active else ""


def _is_lost(job: SubmittedJob) -> bool:
    """Whether it is an open submission on this cluster of which no job is found."""
    is_here = job.event.get("cluster") in (None, job_states.cluster_name())
    return not job.job_id and job.event.get("event") == "submitting" and is_here


def _time_of(job: SubmittedJob) -> float:
    at = job.event.get("time")
    return job.state.submit_time if at is None else datetime.fromisoformat(str(at)).timestamp()


def _wait_for_sbatch(run: Run, job: SubmittedJob, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while _is_in_sbatch(run, job.stage, str(job.event["key"])):
        if time.monotonic() >= deadline:
            raise UserError(
                f"another process is submitting {job.stage} of {run.name} (since {job.event['time']}), and sbatch has "
                "not answered it yet: try again later"
            )
        time.sleep(POLL_S)


def _is_in_sbatch(run: Run, stage: str, key: str) -> bool:
    for one in (run, run.sweep_or_self):  # a point may have been submitted with its sweep
        with suppress(FileNotFoundError), open(submission_script_path(one, stage, key), "rb") as script:
            return not try_flock(script.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    return False


def record_submission(run: Run, facts: Mapping[str, Any], job_id: str, **more: Any) -> None:
    """Write that the job of a submission is known. `facts`: its event `submitting`."""
    left_out = ("time", "event", "stage", "array_task")
    kept = {name: value for name, value in facts.items() if name not in left_out}
    run.event("submitted", str(facts["stage"]), job_id=job_id, **kept, **more)


def record_own_job(run: Run, stage: str, job_id: str) -> None:
    """Record the job that this process runs in, if submit.py could not. `job_id`: its own, of a task `12_3`."""
    key = os.environ.get(SUBMISSION_KEY_VARIABLE)
    for event, one in list_submissions(run) if key else ():
        if one.is_open and (one.key, event["stage"]) == (key, stage):
            task = "" if one.array_task is None else f"_{one.array_task}"
            record_submission(run, event, array_job_id(job_id) + task, job_submitted=one.submit_time)


def abandon_submission(run: Run, facts: Mapping[str, Any], message: str) -> None:
    """Write that a submission has no job, and see to it that a job of it that appears later ends at once."""
    stage, key = str(facts["stage"]), str(facts["key"])
    task = facts.get("array_task")
    for one in (run, run.sweep_or_self):
        for pickle in (one.jobs_dir / stage).glob(f"{key}_{'*' if task is None else task}_submitted.pkl"):
            pickle.rename(pickle.with_name(pickle.name.replace("_submitted", "_given_up")))
    run.event("not_submitted", stage, key=key, executor="slurm", message=message)


def wait_for_controller(patience_s: float, check: Callable[[], None]) -> bool:
    """Wait until the controller lists jobs; whether it did in time. `check` is called between the attempts."""
    deadline = time.monotonic() + patience_s
    while job_states.run_slurm_command("squeue", "-h", "--me", "-o", "%i", timeout_s=INTERACTIVE_TIMEOUT_S) is None:
        check()
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
