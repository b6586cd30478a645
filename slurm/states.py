"""What Slurm says of jobs: one batched `squeue` per look, then `sacct`, then `scontrol`, for what it forgot.

`squeue -t all` knows a job until MinJobAge after its end, `scontrol` as long; `sacct` knows all, where there is
accounting, and lags a second or so. A job that nobody knows any more is UNKNOWN: the run directory has to tell.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

TIMEOUT_S = 30
ACTIVE = {"PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "SPECIAL_EXIT"}
_DEAD_REASON = "DependencyNeverSatisfied"


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array."""

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""

    @property
    def active(self) -> bool:
        """Whether it runs or may still run."""
        return self.state in ACTIVE and not self.dead

    @property
    def dead(self) -> bool:
        """Pending for ever: what it waits for can no longer happen (Slurm keeps such jobs)."""
        return self.state == "PENDING" and _DEAD_REASON in self.reason


def slurm_answers() -> bool:
    """Whether there is a Slurm controller to talk to."""
    if shutil.which("scontrol") is None or shutil.which("sbatch") is None:
        return False
    done = call("scontrol", "ping")
    return done is not None and " is UP" in done


def call(*command: str) -> str | None:
    """Output of a Slurm command; None where it fails or does not answer in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def query(job_ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each job; an array counts as one: its least finished task, a failed one before a good one."""
    wanted = sorted(set(job_ids))
    if not wanted:
        return {}
    tasks: dict[str, list[JobState]] = {job: [] for job in wanted}
    listed = call("squeue", "-h", "-r", "-t", "all", "-o", "%i|%T|%r|%N")
    if listed is not None:
        _collect(tasks, listed)
    if missing := [job for job, found in tasks.items() if not found]:
        listed = call("sacct", "-n", "-P", "-X", "-j", ",".join(missing), "-o", "JobID,State,Reason,NodeList")
        if listed is not None:
            _collect(tasks, listed)
    return {job: _merge(job, found) for job, found in tasks.items()}


def _collect(tasks: dict[str, list[JobState]], listed: str) -> None:
    for line in listed.splitlines():
        fields = line.split("|")
        if len(fields) == 4:
            job, state, reason, nodes = fields
            found = tasks.get(job, tasks.get(job.split("_")[0]))
            if found is not None:
                found.append(JobState(job, state.split(" ")[0].rstrip("+"), reason, nodes))


def _merge(job: str, found: list[JobState]) -> JobState:
    if not found:
        return JobState(job, "UNKNOWN")
    found = sorted(found, key=lambda s: (not s.active, s.state in ("COMPLETED", "UNKNOWN"), s.state != "RUNNING"))
    return JobState(job, found[0].state, found[0].reason, found[0].nodes)
