"""Which jobs that a run's events name exist, are the run's own, and how they stand: the one place that asks Slurm.

A job's id alone proves nothing: ids start from 1 again where a controller lost its state, and each of two clusters that
share a file system counts for itself. So callers ask with a :class:`Claim`, and an answer counts as follows:

- squeue shows a job of that id on that cluster with the run's comment (slurm/submit/sbatch.py): it is ours.
  Only such a job is ever cancelled, changed or waited for; requeues change its times, but neither id nor comment.
- Only cluster, id, user, name and the time of submission agree (accounting keeps no comments on many sites): enough
  to read how it ended, and for nothing else.

One `squeue` per look; then `sacct` for what it does not tell, which prints the same columns. `squeue -t all` knows a
job until MinJobAge after its end; `sacct` knows all, where there is accounting, and lags a second or so. One more
`squeue` is asked for jobs of another user that are left. A job that nobody knows any more is UNKNOWN: the run directory
has to tell, and so it has where the controller does not answer, which is waited for once. A `squeue` that fails is
such a silence, whatever was answered before: its jobs may be there. All calls of a look share one time limit.

squeue is asked for this user's jobs only (`--me`): of all its filters that one (and a single job id) is
applied by the controller; with a list of ids it sends the whole queue and squeue picks. Ids that it
does not know are passed over, but for an only one, which makes it fail. Very many ids are left out, and picked here;
sacct, which knows years, is asked for them in parts.

A submission writes the event `submitting`, with a random key, before it calls sbatch, and `submitted`, with the job's
id, after that. If only the first is there (submit.py was killed, sbatch did not answer), the job may exist: the
submission is open. Its job is found by the key, which is an argument of the batch script (squeue's `%o`, accounting's
SubmitLine). With :func:`look_up` one `squeue` also finds jobs that carry the run's comment and that no event names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from pipeline.base.errors import UserError
from pipeline.run.directory import Run
from pipeline.run.events import Event, NotSubmitted, Started, SubmissionEvent, Submitted, Submitting, get_job_id
from slurm.query import slurm_messages

E = TypeVar("E", bound=Event)
TIMEOUT_S = 30
INTERACTIVE_TIMEOUT_S = 10.0
"""How long a person waits before it is said that the controller does not answer."""
NOT_RESPONDING = "no Slurm controller answers here"
SUBMIT_TIME_TOLERANCE_S = 300.0
"""How far an event's time may be from the time of submission that Slurm tells: clocks differ, and sbatch takes time."""
UNKNOWN = "UNKNOWN"
FINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States that a job does not leave again; the rest are of jobs that run or may still run. There are many, some for
moments only: a running job that is being told of its time limit or its preemption is SIGNALING (seen on Slurm 22.05).
Source: https://slurm.schedmd.com/job_state_codes.html"""
_OF_A_PERSON = ("SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_", "SLURM_TIME_FORMAT")
"""Variables that filter or change what Slurm's commands show and do: they are for a person's own calls."""
_MANY = 500
"""From so many ids on squeue is asked without them: one argument holds 128 KiB (execve(2), MAX_ARG_STRLEN)."""
_PART = 5_000
"""How many ids sacct is asked for at once."""
_MARK = "sluice "
_KEY = re.compile(r"/([0-9a-f]{12})_submission\.sh \1\s*$")
_BEFORE_COMMAND = "\x1f"
"""Separates comment and command in squeue's rows: neither can hold it (slurm/submit/sbatch.py)."""
_PUT_BACK = ("REQUEUED", "NODE_FAIL", "PREEMPTED")
"""How accounting says that a run of a job ended after which there may be another, submitted at that moment."""


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array, as Slurm shows it. What is `active` or `dead` is ours by its comment."""

    job_id: str
    state: str
    reason: str = ""
    """Slurm's; of a job that is UNKNOWN, why, in words, where there is something to say."""
    nodes: str = ""
    cluster: str | None = None
    uid: int | None = None
    submit_time: float = 0.0
    """When it was submitted, or last put back into the queue."""
    name: str = ""
    comment: str = ""
    command: str = ""
    """The batch script and its arguments."""

    @property
    def key(self) -> str:
        """The key of the submission; empty for a job that was submitted in another way."""
        found = _KEY.search(self.command)
        return found[1] if found else ""

    @property
    def is_active(self) -> bool:
        """Whether it runs or may still run."""
        return self.state not in (*FINAL_STATES, UNKNOWN) and not self.is_unsatisfiable

    @property
    def is_unsatisfiable(self) -> bool:
        """Pending for ever: what it waits for can no longer happen (Slurm keeps such jobs)."""
        return self.state == "PENDING" and slurm_messages.DEPENDENCY_NEVER_SATISFIED.search(self.reason) is not None


@dataclass(frozen=True)
class RecordedJob:
    """A job as an event of a run names it."""

    job_id: str
    comments: tuple[str, ...] = ()
    """Those that prove it; a point's jobs have its sweep's (slurm/submit/chain.py) or, submitted by themselves, its
    own."""
    cluster: str | None = None
    """None in events that do not say: id and comment count."""
    uid: int | None = None
    name: str = ""
    submit_time: float = 0.0
    key: str = ""
    array_task: int | None = None
    """The task of an array that the job is. None for a whole job or array, and if `job_id` names the task."""

    @property
    def is_open(self) -> bool:
        """Whether the submission is open: its job, if there is one, is known by its key only."""
        return not self.job_id

    def id_of(self, shown: JobState) -> str:
        """The id that an event gives this job, from what is shown of it or of one of its tasks."""
        return array_job_id(shown.job_id) + ("" if self.array_task is None else f"_{self.array_task}")

    def proven(self, shown: JobState) -> bool:
        """Whether what is shown under this id is this very job."""
        if self.is_open:
            is_task = self.array_task is None or shown.job_id == self.id_of(shown)
            scripts = (f" {comment.removeprefix(_MARK)}/jobs/" for comment in self.comments)  # a copy has others
            is_here = any(folder in f" {shown.command}" for folder in scripts)
            return is_task and is_here and self.key == shown.key and self.cluster in (None, shown.cluster)
        return shown.comment in self.comments and self.cluster in (None, shown.cluster)

    def resembles(self, shown: JobState) -> bool:
        """Whether it is this job as far as can be told without a comment, or with one that was cut off or replaced."""
        if shown.comment.startswith(_MARK) and not any(whole.startswith(shown.comment) for whole in self.comments):
            return False  # another run's
        same = shown.cluster is not None and self.cluster == shown.cluster
        same &= (self.uid, self.name) == (shown.uid, shown.name)
        return same and abs(self.submit_time - shown.submit_time) <= SUBMIT_TIME_TOLERANCE_S


def is_slurm_responding() -> bool:
    """Whether there is a Slurm to submit to. Raises UserError where there is one whose controller does not answer:
    what is meant for its nodes must not start on this machine."""
    if shutil.which("sbatch") is None:
        return False
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=INTERACTIVE_TIMEOUT_S)
        answers = slurm_messages.CONTROLLER_UP.search(done.stdout) is not None
        silent = not answers and slurm_messages.CONTROLLER_DOWN.search(done.stdout) is not None
    except OSError:
        return False
    except subprocess.TimeoutExpired:
        answers, silent = False, True
    if silent:
        raise UserError(
            "slurm.not_responding",
            f"{NOT_RESPONDING} (scontrol ping): try again later, or use --executor local to train on this machine",
        )
    return answers  # where a machine merely has Slurm's commands, nothing is said of a controller


def require_response(states: Iterable[JobState]) -> None:
    """Raise UserError where a look found no controller that answers."""
    if any(state.reason == NOT_RESPONDING for state in states):
        raise UserError(
            "slurm.not_responding",
            f"{NOT_RESPONDING} (scontrol ping, squeue): the jobs of this run cannot be seen, so nothing is submitted "
            "or changed; try again later",
        )


def run_slurm_command(*command: str, timeout_s: float | None = None, none: re.Pattern[str] | None = None) -> str | None:
    """Output of a Slurm command; None where it fails or does not answer in time (`TIMEOUT_S`).

    `none`: what it fails with where there is merely nothing to show.
    """
    try:
        timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        env = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_PERSON)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    empty = none is not None and none.search(done.stderr) is not None
    return done.stdout if done.returncode == 0 or empty else None


_clusters: dict[str | None, dict[str, str]] = {}
_silent_until: dict[str | None, float] = {}


def cluster_name() -> str | None:
    """The cluster that answers here: a job's own, else the controller's word, asked for once; None if it is silent, and
    then for half a minute more: one who looks again and again does not wait each time."""
    if os.environ.get("SLURM_JOB_ID") and (own := os.environ.get("SLURM_CLUSTER_NAME")):
        return own
    require_single_cluster(os.environ)
    return cluster_settings().get("ClusterName")


def require_single_cluster(env: Mapping[str, str]) -> None:
    """Raise UserError if variables in `env` send Slurm's commands to another cluster than the local one."""

    for name in ("SLURM_CLUSTERS", "SBATCH_CLUSTERS"):
        if (value := env.get(name, "")) not in ("", env.get("SLURM_CLUSTER_NAME")):
            raise UserError(
                "slurm.other_cluster",
                f"{name}={value}: all jobs of a run are on one cluster and visible only there: unset the variable and "
                "log in to that cluster (sbatch -M is not supported)",
            )


def cluster_settings() -> dict[str, str]:
    """The settings of the cluster that answers here, asked for once; nothing if it does not, and then for half a minute
    more."""
    conf = os.environ.get("SLURM_CONF")
    if conf not in _clusters and time.monotonic() >= _silent_until.get(conf, 0.0):
        told = read_slurm_config(INTERACTIVE_TIMEOUT_S)
        if told.get("ClusterName"):
            _clusters[conf] = told
        else:
            _silent_until[conf] = time.monotonic() + 30
    return _clusters.get(conf, {})


def job_comment(run: Path) -> str:
    """The comment of a run's jobs."""
    return f"{_MARK}{run}"


def job_identity(job_name: str, **more: Any) -> dict[str, Any]:
    """What an event says of a job besides its id, so that it can be told from others of that id."""
    return {"cluster": cluster_name(), "uid": os.getuid(), "job_name": job_name, **more}


def read_recorded_job(run: Run, event: Submitting | Submitted | Started) -> RecordedJob:
    """What an event `submitted`, or `started`, says of its job. The comment is of the run where it lies: a copy's."""
    paths = dict.fromkeys((run.path, run.sweep_or_self.path))
    comments = tuple(job_comment(path).strip() for path in paths)
    job_id: str | None = ""
    key: str | None = ""
    submit_time: float | None = None
    open_task: int | None = None
    if isinstance(event, Started):
        job_id = event.slurm_job
        submit_time = event.job_submitted
    elif isinstance(event, Submitted):
        job_id = event.job_id
        key = event.key
        submit_time = event.job_submitted
    else:
        key = event.key
        open_task = event.array_task
    return RecordedJob(
        job_id or "",
        comments,
        event.cluster,
        event.uid,
        event.job_name or "",
        submit_time or event.timestamp,
        key or "",
        open_task,
    )


def list_submissions(
    run: Run, events: Sequence[SubmissionEvent] | None = None
) -> list[tuple[Submitting | Submitted, RecordedJob]]:
    """The submissions to Slurm for a run, oldest first, with their newest events; open ones too.

    `events`: the run's, of these names at least, if they were read.
    """
    found: dict[str | int, Submitting | Submitted] = {}
    for number, event in enumerate(run.read_events(None, SubmissionEvent) if events is None else events):
        if event.executor == "slurm":
            key = event.key or number
            if isinstance(event, NotSubmitted):
                found.pop(key, None)
            elif isinstance(event, Submitted) or (isinstance(event, Submitting) and key not in found):
                found[key] = event
    return [(event, read_recorded_job(run, event)) for event in found.values()]


def list_recorded_jobs(run: Run) -> list[tuple[Submitting | Submitted, RecordedJob]]:
    """The jobs that were submitted for a run, oldest first, behind their events."""
    return [(event, one) for event, one in list_submissions(run) if not one.is_open]


def events_since_submission(events: Sequence[E], job_id: str) -> list[E]:
    """Those of a run's events that may speak of the job that has this id here and now.

    What was said before the id was last submitted is of another job, and so is what another cluster's job said.
    """
    here, job = cluster_name(), array_job_id(job_id)
    ours = [e for e in events if here is None or getattr(e, "cluster", None) in (None, here)]
    at = (i for i in find_first_submissions(ours) if array_job_id(get_job_id(ours[i]) or "") == job)
    return ours[max(at, default=0) :]


def find_first_submissions(events: Sequence[Event]) -> list[int]:
    """Where in `events` a job was submitted: the indices of `submitted`, for each key the first one.

    A job that starts writes the event itself if it is missing; submit.py may then write it once more.
    """
    found: dict[str | int, int] = {}
    for number, event in enumerate(events):
        if isinstance(event, Submitted):
            found.setdefault(event.key or number, number)
    return list(found.values())


def query_job_states(
    asked: Iterable[RecordedJob], forgotten: dict[RecordedJob, JobState] | None = None
) -> dict[RecordedJob, JobState]:
    """The state of each job; an array counts as one: its least finished task, a failed one before a good one.

    `forgotten` is for those who ask again and again: what squeue answered and had forgotten once is kept there and not
    asked for again, so that a look costs one `squeue`, and one `sacct` whenever a job is forgotten.
    """
    return find_jobs(asked, frozenset(), forgotten)[0]


def find_jobs(
    asked: Iterable[RecordedJob], comments: Set[str], forgotten: dict[RecordedJob, JobState] | None = None
) -> tuple[dict[RecordedJob, JobState], list[JobState] | None]:
    """As :func:`query`; and this user's jobs that have one of `comments`, have not ended and are none of `asked`.

    None for these if the controller does not answer.
    """
    until = time.monotonic() + (TIMEOUT_S if os.environ.get("SLURM_JOB_ID") else INTERACTIVE_TIMEOUT_S)
    kept = {} if forgotten is None else forgotten
    wanted = sorted(set(asked) - kept.keys(), key=lambda one: one.job_id)
    here = cluster_name() if wanted or comments else None
    if here is None:
        return {**kept, **{one: JobState(one.job_id, UNKNOWN, NOT_RESPONDING) for one in wanted}}, None
    look = _Look(here, wanted, until)
    if look.found or comments:
        look.ask_controller(look.found, "--me", all_of_user=bool(comments))
    if missing := [one for one in look.missing() if not one.is_open]:
        look.ask_accounting(missing)
    if lost := [one for one in look.missing() if one.is_open]:
        look.ask_accounting_by_key(lost)
    if others := [one for one in look.missing() if one.uid != os.getuid() and not one.is_open]:
        look.ask_controller(others)
    states = {one: look.state(one) for one in wanted}
    for one in set(wanted) - look.found.keys() | set(missing):
        if not states[one].is_active and states[one].reason != NOT_RESPONDING and not one.is_open:
            kept[one] = states[one]
    if look.unclaimed is None:
        return {**kept, **states}, None
    mine = (job for job in look.unclaimed if job.comment in comments and job.state not in FINAL_STATES)
    return {**kept, **states}, [job for job in mine if not any(_is_same_job(one, job) for one in kept)]


def _is_same_job(one: RecordedJob, shown: JobState) -> bool:
    return array_job_id(one.job_id) == array_job_id(shown.job_id) and one.proven(shown)


class _Look:
    """One look at Slurm, and whose is what it shows."""

    def __init__(self, here: str, wanted: Sequence[RecordedJob], until: float) -> None:
        self.here = here
        self._until = until
        self.found: dict[RecordedJob, list[JobState]] = {c: [] for c in wanted if c.cluster in (None, here)}
        self._claims = {job: list(ones) for job, ones in groupby(self.found, key=lambda one: one.job_id) if job}
        self._open = [one for one in self.found if one.is_open]
        self.unclaimed: list[JobState] | None = []
        """What squeue shows besides; None if it did not answer."""

    def missing(self) -> list[RecordedJob]:
        """Those of which nothing was shown yet."""
        return [one for one, jobs in self.found.items() if not jobs]

    def _of(self, job: str) -> list[RecordedJob]:
        return self._claims.get(job, self._claims.get(array_job_id(job), []))

    def _open_of(self, shown: JobState) -> list[RecordedJob]:
        return [one for one in self._open if one.proven(shown)]

    def _left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    def ask_controller(self, asked: Iterable[RecordedJob], *filters: str, all_of_user: bool = False) -> None:
        """Take what squeue shows, or its silence. Where one run had an id twice, it is the job submitted last."""
        columns, asked = f"%i|%T|%r|%N|{self.here}|%U|%V|%j|%k{_BEFORE_COMMAND}%o", dict.fromkeys(asked)
        command = ["squeue", "-h", "-r", "-t", "all", "-o", columns, *filters]
        if len(asked) < _MANY and not all_of_user and not any(one.is_open for one in asked):
            command += ["-j", _ids(asked)]
        listed = run_slurm_command(*command, timeout_s=self._left_s(), none=slurm_messages.NO_SUCH_JOB)
        if listed is None:
            self.unclaimed = None
            self.found |= {one: [JobState(one.job_id, UNKNOWN, NOT_RESPONDING)] for one in asked}
        for job in _rows(listed):
            if ours := [one for one in self._of(job.job_id) if one.proven(job)]:
                self.found[max(ours, key=lambda one: one.submit_time)].append(job)
                continue
            if lost := self._open_of(job):
                for one in lost:
                    self.found[one].append(job)
                continue
            if self.unclaimed is not None:
                self.unclaimed.append(job)
            for one in [one for one in self._of(job.job_id) if one.resembles(job)]:
                left_alone = (
                    f"job {job.job_id} has id, name, user and time of this run's, but not the comment that would prove "
                    f"it ({one.comments[0]}): nothing is done to it; to end it: scancel {job.job_id}"
                )
                ended = job.state in FINAL_STATES
                self.found[one].append(job if ended else replace(job, state=UNKNOWN, reason=left_alone))

    def ask_accounting(self, asked: Iterable[RecordedJob]) -> None:
        """Take jobs in accounting, each run of one that was put back in a row of its own. What has not ended tells
        nothing: of jobs that a controller lost it never hears. Half of the time is left for one more squeue."""
        columns = "JobID,State,Reason,NodeList,Cluster,UID,Submit,JobName,Comment"
        runs: dict[RecordedJob, dict[str, JobState]] = {}
        listed = query_accounting(_ids(asked), columns, timeout_s=self._left_s() / 2)
        for job in sorted(_rows(listed), key=lambda job: job.submit_time):
            for one in self._of(job.job_id):
                before = runs.setdefault(one, {}).get(job.job_id)
                at_once = job if before is None else replace(job, submit_time=one.submit_time)
                if one.resembles(at_once) and (before is None or before.state in _PUT_BACK):
                    runs[one][job.job_id] = job
        for one, tasks in runs.items():
            if all(task.state in FINAL_STATES for task in tasks.values()):
                self.found[one] += tasks.values()

    def ask_accounting_by_key(self, asked: Sequence[RecordedJob]) -> None:
        """Take jobs of open submissions that have ended and that the controller has forgotten."""
        since = datetime.fromtimestamp(min(one.submit_time for one in asked) - SUBMIT_TIME_TOLERANCE_S).isoformat(
            timespec="seconds"
        )
        columns = "JobID,State,Reason,NodeList,Cluster,UID,Submit,JobName,SubmitLine"
        names = ",".join(sorted({one.name for one in asked}))
        command = ("sacct", "-n", "-P", "-X", "-S", since, f"--name={names}", "-o", columns)
        for job in _rows(run_slurm_command(*command, timeout_s=self._left_s() / 2)):
            shown = replace(job, command=job.comment, comment="")
            for one in self._open_of(shown) if job.state in FINAL_STATES else ():
                self.found[one].append(shown)

    def state(self, one: RecordedJob) -> JobState:
        """The state of a job: of the tasks of an array one that may run, then one that failed."""
        if one not in self.found:
            return JobState(one.job_id, UNKNOWN, f"jobs of cluster {one.cluster} are not seen from {self.here}")
        found = self.found.get(one) or [JobState(one.job_id, UNKNOWN)]
        first = min(found, key=lambda s: (not s.is_active, s.state in ("COMPLETED", UNKNOWN), s.state != "RUNNING"))
        return replace(first, job_id=one.job_id or (first.job_id and one.id_of(first)))


def query_accounting(ids: str, columns: str, timeout_s: float = TIMEOUT_S) -> str:
    """What sacct prints of jobs (`1,2`), each run of one in a row; asked in parts, within one time limit."""
    each, until = ids.split(","), time.monotonic() + timeout_s
    parts = [each[first : first + _PART] for first in range(0, len(each), _PART)]
    command = ("sacct", "-n", "-P", "-X", "-D", "-o", columns, "-j")
    return "".join(
        run_slurm_command(*command, ",".join(part), timeout_s=max(0.0, until - time.monotonic())) or ""
        for part in parts
    )


def cancel_jobs(jobs: Iterable[JobState]) -> None:
    """Cancel those of these jobs that a look has just shown to be ours and not ended."""
    if ids := [job.job_id for job in jobs if job.is_active or job.is_unsatisfiable]:
        run_slurm_command("scancel", *ids)


def parse_key_values(shown: str) -> dict[str, str]:
    """`Key=value` words of one job in `scontrol show job`.

    The first of each key counts: what a person chose (comment, command, paths) stands behind all that is read here.
    """
    return dict(reversed(re.findall(r"(?<!\S)([^\s=]+)=(\S*)", shown)))


def parse_slurm_config(text: str) -> dict[str, str]:
    """`scontrol show config`: names and values."""
    return dict(re.findall(r"^(\w+(?:\[\d+\])?)[^\S\n]*=[^\S\n]*(.*?)[^\S\n]*$", text, re.MULTILINE))


def read_slurm_config(timeout_s: float | None = None) -> dict[str, str]:
    """slurm.conf as the controller has it, and its version; nothing where it does not answer."""
    return parse_slurm_config(run_slurm_command("scontrol", "show", "config", timeout_s=timeout_s) or "")


def _rows(listed: str | None) -> list[JobState]:
    """What squeue and sacct print; the last cell, which a person chose, may hold the separator."""
    lines = (listed or "").split("\n")  # a path may hold what splitlines takes for the end of a line
    rows = [cells for line in lines if len(cells := line.split("|", 8)) == 9]
    return [
        JobState(
            job, state.split(" ")[0].rstrip("+"), reason, nodes, cluster, int(uid) if uid.isdigit() else None,
            parse_slurm_time(at), name, comment.partition(_BEFORE_COMMAND)[0].strip(),
            comment.partition(_BEFORE_COMMAND)[2],
        )
        for job, state, reason, nodes, cluster, uid, at, name, comment in rows
    ]  # fmt: skip


def _ids(jobs: Iterable[RecordedJob]) -> str:
    return ",".join(dict.fromkeys(one.job_id for one in jobs))


def array_job_id(job_id: str) -> str:
    """The id of the array that a job is a task of, else its own."""
    return job_id.split("_")[0]


def parse_slurm_time(text: str) -> float:
    """Seconds since 1970 of a time as Slurm writes it, by the local clock; 0 for Unknown."""
    with suppress(ValueError):
        return datetime.fromisoformat(text).timestamp()
    return 0.0
