"""Which jobs that a run's events name exist, are the run's own, and how they stand: the one place that asks Slurm.

A job's id alone proves nothing: ids start from 1 again where a controller lost its state, and each of two clusters that
share a file system counts for itself. So callers ask with a :class:`Claim`, and an answer counts as follows:

- squeue or scontrol shows a job of that id on that cluster with the run's comment (slurm/submit/sbatch.py): it is ours.
  Only such a job is ever cancelled, changed or waited for; requeues change its times, but neither id nor comment.
- Only cluster, id, user, name and the time of submission agree (accounting keeps no comments on many sites): enough
  to read how it ended, and for nothing else.

One `squeue` per look; then `sacct`, then `scontrol`, for what it does not tell. `squeue -t all` knows a job until
MinJobAge after its end; `sacct` knows all, where there is accounting, and lags a second or so; `scontrol` is asked job
by job, for those of another user and where `sacct` does not answer. A job that nobody knows any more is UNKNOWN: the
run directory has to tell.

squeue is asked for this user's jobs only (`--me`): of all its filters that one (and a single job id) is
applied by the controller; with a list of ids it sends the whole queue and squeue picks. Ids that it
does not know are passed over, but for an only one, which makes it fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.run.directory import Run

TIMEOUT_S = 30
TOLERANCE_S = 300.0
"""How far an event's time may be from the time of submission that Slurm tells: clocks differ, and sbatch takes time."""
FORGOTTEN = "UNKNOWN"
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States that a job does not leave again; the rest are of jobs that run or may still run. There are many, some for
moments only: a running job that is being told of its time limit or its preemption is SIGNALING (seen on Slurm 22.05).
Source: https://slurm.schedmd.com/job_state_codes.html"""
_DEAD_REASON = "DependencyNeverSatisfied"
_MARK = "sluice "
_PUT_BACK = ("REQUEUED", "NODE_FAIL", "PREEMPTED")
"""How accounting says that a run of a job ended after which there may be another, submitted at that moment."""


@dataclass(frozen=True)
class Seen:
    """What Slurm shows of whose job it is."""

    comment: str = ""
    uid: int | None = None
    name: str = ""
    submitted: float = 0.0
    """When it was submitted, or last put back into the queue."""


@dataclass(frozen=True)
class Claim:
    """A job as an event of a run names it."""

    job_id: str
    comments: tuple[str, ...] = ()
    """Those that prove it; a point's jobs have its sweep's (slurm/submit/sweeps.py) or, submitted by themselves, its
    own."""
    cluster: str | None = None
    """None in events that do not say: id and comment count."""
    uid: int | None = None
    name: str = ""
    submitted: float = 0.0

    def proven(self, cluster: str | None, seen: Seen) -> bool:
        """Whether what was seen under this id is this very job."""
        return seen.comment in self.comments and self.cluster in (None, cluster)

    def resembles(self, cluster: str | None, seen: Seen) -> bool:
        """Whether it is this job as far as can be told without a comment, or with one that was cut off or replaced."""
        if seen.comment.startswith(_MARK) and not any(whole.startswith(seen.comment) for whole in self.comments):
            return False  # another run's
        same = cluster is not None and (self.cluster, self.uid, self.name) == (cluster, seen.uid, seen.name)
        return same and abs(self.submitted - seen.submitted) <= TOLERANCE_S


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array. What is `active` or `dead` was shown by the controller, and is ours."""

    job_id: str
    state: str
    reason: str = ""
    """Slurm's; of a job that is UNKNOWN, why, in words, where there is something to say."""
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


_clusters: dict[str | None, str] = {}


def cluster_name() -> str | None:
    """The cluster that answers here: a job's own, else the controller's word, asked for once; None if it is silent."""
    conf = os.environ.get("SLURM_CONF")
    own = os.environ.get("SLURM_CLUSTER_NAME") if os.environ.get("SLURM_JOB_ID") else None
    if own is None and conf not in _clusters:
        told = re.search(r"^ClusterName\s*=\s*(\S+)", call("scontrol", "show", "config") or "", re.M)
        if told:
            _clusters[conf] = told[1]
    return own or _clusters.get(conf)


def comment_of(run: Path) -> str:
    """The comment of a run's jobs."""
    return f"{_MARK}{run}"


def identity(job_name: str, **more: Any) -> dict[str, Any]:
    """What an event says of a job besides its id, so that it can be told from others of that id."""
    return {"cluster": cluster_name(), "uid": os.getuid(), "job_name": job_name, **more}


def claim(run: Run, event: Mapping[str, Any]) -> Claim:
    """What an event `submitted`, or `started`, says of its job. The comment is of the run where it lies: a copy's."""
    paths = [run.path, *([run.path.parents[1]] if run.path.parent.name == "points" else [])]
    job_id = event["slurm_job" if event["event"] == "started" else "job_id"]
    submitted = event.get("job_submitted") or datetime.fromisoformat(event["time"]).timestamp()
    cluster, uid, name = (event.get(key) for key in ("cluster", "uid", "job_name"))
    return Claim(str(job_id), tuple(comment_of(path).strip() for path in paths), cluster, uid, name or "", submitted)


def claims(run: Run) -> list[tuple[dict[str, Any], Claim]]:
    """The jobs that were submitted for a run, oldest first, behind their events."""
    return [(e, claim(run, e)) for e in run.read_events(None, "submitted") if e.get("executor") == "slurm"]


def since_submitted(events: Sequence[dict[str, Any]], job_id: str) -> list[dict[str, Any]]:
    """Those of a run's events that may speak of the job that has this id here and now.

    What was said before the id was last submitted is of another job, and so is what another cluster's job said.
    """
    here, job = cluster_name(), _array(job_id)
    ours = [e for e in events if here is None or e.get("cluster") in (None, here)]
    at = (i for i, e in enumerate(ours) if e["event"] == "submitted" and _array(str(e["job_id"])) == job)
    return ours[max(at, default=0) :]


def query(asked: Iterable[Claim], forgotten: dict[Claim, JobState] | None = None) -> dict[Claim, JobState]:
    """The state of each job; an array counts as one: its least finished task, a failed one before a good one.

    `forgotten` is for those who ask again and again: what squeue answered and had forgotten once is kept there and not
    asked for again, so that a look costs one `squeue`, and one `sacct` whenever a job is forgotten.
    """
    kept = {} if forgotten is None else forgotten
    wanted = sorted(set(asked) - kept.keys(), key=lambda one: one.job_id)
    look = _Look(cluster_name() if wanted else None, wanted)
    listed = None
    if look.found:
        ids = ",".join(dict.fromkeys(one.job_id for one in look.found))
        listed = call("squeue", "-h", "-r", "--me", "-t", "all", "-j", ids, "-o", "%i|%T|%r|%N|%k")
        for job, state, reason, nodes, comment in _rows(listed, 5):
            look.take(job, Seen(comment.strip()), JobState(job, _word(state), reason, nodes))
    if missing := [one for one, found in look.found.items() if not found]:
        ids = ",".join(dict.fromkeys(one.job_id for one in missing))
        columns = "JobID,State,Reason,NodeList,Cluster,UID,Submit,JobName"
        look.read_ends(call("sacct", "-n", "-P", "-X", "-D", "-j", ids, "-o", columns))
    for one in missing:
        if not look.found[one] and (shown := call("scontrol", "show", "job", one.job_id)) is not None:
            for record in filter(str.strip, shown.split("\n\n")):
                look.take(one.job_id, seen(record), _shown(one.job_id, record))
    states = {one: look.state(one) for one in wanted}
    for one in set(wanted) - look.found.keys() | set(missing):
        if not states[one].active and (states[one].state != FORGOTTEN or listed is not None):
            kept[one] = states[one]
    return {**kept, **states}


class _Look:
    """Whose is what Slurm shows."""

    def __init__(self, here: str | None, wanted: Sequence[Claim]) -> None:
        self.here = here
        self.found: dict[Claim, list[JobState]] = {c: [] for c in wanted if here and c.cluster in (None, here)}
        self._claims: dict[str, list[Claim]] = {}
        for one in self.found:
            self._claims.setdefault(one.job_id, []).append(one)

    def _of(self, job: str) -> list[Claim]:
        return self._claims.get(job, self._claims.get(_array(job), []))

    def take(self, job: str, what: Seen, state: JobState) -> None:
        """A job that the controller shows. Where one run had the id twice, it is the one that was submitted last."""
        if ours := [one for one in self._of(job) if one.proven(self.here, what)]:
            self.found[max(ours, key=lambda one: one.submitted)].append(state)
            return
        for one in self._of(job):
            if one.resembles(self.here, what):
                words = (
                    f"job {job} has id, name, user and time of this run's, but not the comment that would prove it "
                    f"({one.comments[0]}): nothing is done to it; to end it: scancel {job}"
                )
                self.found[one].append(state if state.state in ENDED else JobState(job, FORGOTTEN, words))

    def read_ends(self, listed: str | None) -> None:
        """Jobs in accounting, each run of one that was put back in a row of its own. What has not ended tells nothing:
        of jobs that a controller lost it never hears."""
        runs: dict[Claim, dict[str, JobState]] = {}
        for job, state, reason, nodes, cluster, uid, at, name in sorted(_rows(listed, 8), key=lambda row: row[6]):
            what = Seen("", int(uid) if uid.isdigit() else None, name, _time(at))
            for one in self._of(job):
                before = runs.setdefault(one, {}).get(job)
                at_once = what if before is None else replace(what, submitted=one.submitted)
                if one.resembles(cluster, at_once) and (before is None or before.state in _PUT_BACK):
                    runs[one][job] = JobState(job, _word(state), reason, nodes)
        for one, tasks in runs.items():
            if all(task.state in ENDED for task in tasks.values()):
                self.found[one] += tasks.values()

    def state(self, one: Claim) -> JobState:
        if self.here and one not in self.found:
            return JobState(one.job_id, FORGOTTEN, f"jobs of cluster {one.cluster} are not seen from {self.here}")
        return _merge(one.job_id, self.found.get(one, []))


def cancel(jobs: Iterable[JobState]) -> None:
    """Cancel those of these jobs that a look has just shown to be ours and not ended."""
    if ids := [job.job_id for job in jobs if job.active or job.dead]:
        call("scancel", *ids)


def seen(record: str) -> Seen:
    """Whose job it is that `scontrol show job` shows (not with -o: nothing there would end a comment)."""

    def line(pattern: str) -> str:
        found = re.search(pattern, record, re.M)
        return found[1].strip() if found else ""

    uid = line(r"^ *UserId=\S*\((\d+)\)")
    submitted = _time(fields(record).get("SubmitTime", ""))
    return Seen(line("^ *Comment=(.*)$"), int(uid) if uid else None, line(r"JobName=(.*)$"), submitted)


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


def _rows(listed: str | None, width: int) -> list[list[str]]:
    """Lines of so many cells; the last one, which a person chose, may hold the separator."""
    rows = (line.split("|", width - 1) for line in (listed or "").splitlines())
    return [row for row in rows if len(row) == width]


def _array(job_id: str) -> str:
    """The id of the array that a job is a task of, else its own."""
    return job_id.split("_")[0]


def _word(state: str) -> str:
    """Without what may stand behind it: `CANCELLED by 0`."""
    return state.split(" ")[0].rstrip("+")


def _time(text: str) -> float:
    """Seconds since 1970 of a time as Slurm writes it, by the local clock; 0 for Unknown."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return 0.0


def _merge(job: str, found: list[JobState]) -> JobState:
    if not found:
        return JobState(job, FORGOTTEN)
    found = sorted(found, key=lambda s: (not s.active, s.state in ("COMPLETED", FORGOTTEN), s.state != "RUNNING"))
    return JobState(job, found[0].state, found[0].reason, found[0].nodes)
