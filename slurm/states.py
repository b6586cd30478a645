"""What Slurm says of jobs: one batched `squeue` per look, then `sacct`, then `scontrol`, for what it does not tell.

`squeue -t all` knows a job until MinJobAge after its end; `sacct` knows all, where there is accounting, and lags a
second or so; `scontrol` is asked job by job, for those of another user and where `sacct` does not answer. A job that
nobody knows any more is UNKNOWN: the run directory has to tell.

squeue is asked for this user's jobs only (`--me`): of all its filters that one (and a single job id) is
applied by the controller; with a list of ids it sends the whole queue and squeue picks. Ids that it
does not know are passed over, but for an only one, which makes it fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

TIMEOUT_S = 30
FORGOTTEN = "UNKNOWN"
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States that a job does not leave again; the rest are of jobs that run or may still run. There are many, some for
moments only: a running job that is being told of its time limit or its preemption is SIGNALING (seen on Slurm 22.05).
Source: https://slurm.schedmd.com/job_state_codes.html"""
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
        return self.state not in (*ENDED, FORGOTTEN) and not self.dead

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


def query(job_ids: Iterable[str], forgotten: dict[str, JobState] | None = None) -> dict[str, JobState]:
    """The state of each job; an array counts as one: its least finished task, a failed one before a good one.

    `forgotten` is for those who ask again and again: what squeue answered and had forgotten once is kept there and not
    asked for again, so that a look costs one `squeue`, and one `sacct` whenever a job is forgotten.
    """
    kept = {} if forgotten is None else forgotten
    tasks: dict[str, list[JobState]] = {job: [] for job in sorted(set(job_ids)) if job not in kept}
    listed = None
    if tasks:
        listed = call("squeue", "-h", "-r", "--me", "-t", "all", "-j", ",".join(tasks), "-o", "%i|%T|%r|%N")
        _collect(tasks, listed)
    if missing := [job for job, found in tasks.items() if not found]:
        _collect(tasks, call("sacct", "-n", "-P", "-X", "-j", ",".join(missing), "-o", "JobID,State,Reason,NodeList"))
    for job in missing:
        if not tasks[job] and (shown := call("scontrol", "-o", "show", "job", job)) is not None:
            tasks[job] = [_shown(job, line) for line in shown.splitlines() if line.strip()]
    states = {job: _merge(job, found) for job, found in tasks.items()}
    ended = (states[job] for job in missing if not states[job].active)
    kept.update((one.job_id, one) for one in ended if one.state != FORGOTTEN or listed is not None)
    return {**kept, **states}


def fields(shown: str) -> dict[str, str]:
    """`Key=value` words of one job in `scontrol show job`.

    The first of each key counts: what a person chose (comment, command, paths) stands behind all that is read here.
    """
    found: dict[str, str] = {}
    for word in shown.split():
        key, separator, value = word.partition("=")
        if separator:
            found.setdefault(key, value)
    return found


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config`: names and values."""
    return dict(re.findall(r"^(\w+(?:\[\d+\])?)[^\S\n]*=[^\S\n]*(.*?)[^\S\n]*$", text, re.MULTILINE))


def settings() -> dict[str, str]:
    """slurm.conf as the controller has it, and its version; nothing where it does not answer."""
    return parse_config(call("scontrol", "show", "config") or "")


def _shown(job: str, line: str) -> JobState:
    found = fields(line)
    empty = ("None", "(null)")
    reason, nodes = (found.get(key, "") for key in ("Reason", "NodeList"))
    return JobState(job, found.get("JobState", FORGOTTEN), reason, "" if nodes in empty else nodes)


def _collect(tasks: dict[str, list[JobState]], listed: str | None) -> None:
    for line in (listed or "").splitlines():
        values = line.split("|")
        if len(values) == 4:
            job, state, reason, nodes = values
            found = tasks.get(job, tasks.get(job.split("_")[0]))
            if found is not None:
                found.append(JobState(job, state.split(" ")[0].rstrip("+"), reason, nodes))


def _merge(job: str, found: list[JobState]) -> JobState:
    if not found:
        return JobState(job, FORGOTTEN)
    found = sorted(found, key=lambda s: (not s.active, s.state in ("COMPLETED", FORGOTTEN), s.state != "RUNNING"))
    return JobState(job, found[0].state, found[0].reason, found[0].nodes)
