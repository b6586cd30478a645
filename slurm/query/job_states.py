"""Query the states of a run's jobs, and decide which of the jobs that Slurm shows belong to the run.

A job id alone does not identify a job: a controller that lost its state starts again with id 1, and two clusters that
share a file system use the same ids. Callers therefore pass a :class:`RecordedJob`. Slurm's jobs are matched with it in
two ways:

- Proven: squeue shows a job with this id, on this cluster, with the run's comment. Only such a job is cancelled,
  changed or waited for. A requeue changes the job's times, but neither its id nor its comment.
- Similar: only cluster, id, user, name and submit time agree, because many sites keep no comments in accounting. A
  similar job is enough to find out how the recorded job ended.

A query first calls `squeue -t all --me`, which shows jobs until MinJobAge after their end. The controller applies only
the filter `--me` (or a single id) itself; for a list of ids, it sends the whole queue. `sacct` is called for jobs that
squeue does not show; accounting lags by about a second. A second `squeue` is needed for jobs of another user. A job
that neither command shows is UNKNOWN, and so are all jobs if the controller does not respond. The state of the stage of
an UNKNOWN job is then taken from the run directory. All commands of a query share one time limit.

For a submission, the event `submitting` with a random key is written before sbatch is called, and `submitted` with the
job's id afterwards. A submission that has only the first event is unconfirmed: its job may exist. The job is found by
the key, which is part of the name of its batch script (squeue's `%o`, accounting's SubmitLine).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby

from pipeline.base.errors import UserError
from slurm.query import slurm_commands
from slurm.query.slurm_commands import (
    DEPENDENCY_NEVER_SATISFIED,
    NO_SUCH_JOB,
    NOT_RESPONDING,
    TIMEOUT_S,
    parse_slurm_time,
)

SUBMIT_TIME_TOLERANCE_S = 300.0
"""How far the time of an event may be from Slurm's submit time: clocks differ, and sbatch takes time."""
UNKNOWN = "UNKNOWN"
"""The state of a job whose state cannot be determined, for example because Slurm does not show the job or does not
respond. Slurm itself has no such state."""
FINAL_STATES = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
}  # fmt: skip
"""States of a job that has ended. A job in any other state runs or may still run. The other states are not listed,
because there are many, and some are short: a running job is SIGNALING while Slurm notifies it of its time limit or
preemption (seen on Slurm 22.05). Source: https://slurm.schedmd.com/job_state_codes.html"""
COMMENT_PREFIX = "sluice "
"""The comment of a job is this prefix and the path of its run."""
_MAX_IDS_OF_SQUEUE = 500
"""From this number of ids on, squeue is called without ids, because the length of an argument is limited to 128 KiB
(execve(2), MAX_ARG_STRLEN). This number is far below the limit, because a list of ids has little advantage: the
controller sends the whole queue for any list."""
_IDS_PER_SACCT = 5_000
"""Maximum number of ids in one call of sacct, because the length of an argument is limited to 128 KiB."""
_KEY_PATTERN = re.compile(r"/([0-9a-f]{12})_submission\.sh(?: \1)?\s*$")
"""Matches the end of the command of a batch job. The key of the submission is part of the script's name, and also the
argument of the script. Slurm 22.05 shows the argument; 24.11 shows only the script."""
_COMMENT_END = "\x1f"
"""Separates comment and command in squeue's rows. Neither contains this character (slurm/submit/sbatch.py)."""
_STATES_BEFORE_RESTART = ("REQUEUED", "NODE_FAIL", "PREEMPTED")
"""States in accounting after which Slurm may have requeued the job, so that the job was executed again."""


@dataclass(frozen=True)
class JobState:
    """One job, or one task of an array, as Slurm shows it."""

    job_id: str
    state: str
    reason: str = ""
    """Slurm's reason for the state. For an UNKNOWN job, why the state is unknown; "" if Slurm just does not show the
    job."""
    nodes: str = ""
    """The nodes of the job, as a host list."""
    cluster: str | None = None
    uid: int | None = None
    submit_time: float = 0.0
    """When the job was submitted or last requeued, in seconds since 1970."""
    name: str = ""
    comment: str = ""
    command: str = ""
    """The batch script, with its arguments if Slurm shows them (see `_KEY_PATTERN`)."""

    @property
    def key(self) -> str:
        """The key of the submission; "" for a job that Sluice did not submit."""
        match = _KEY_PATTERN.search(self.command)
        return match[1] if match else ""

    @property
    def is_active(self) -> bool:
        """Whether the job runs or may still run."""
        return self.state not in (*FINAL_STATES, UNKNOWN) and not self.is_unsatisfiable

    @property
    def is_unsatisfiable(self) -> bool:
        """Whether the job stays pending forever, because its dependency can no longer be satisfied."""
        return self.state == "PENDING" and DEPENDENCY_NEVER_SATISFIED.search(self.reason) is not None


@dataclass(frozen=True)
class RecordedJob:
    """A job as an event of a run describes it."""

    job_id: str
    comments: tuple[str, ...] = ()
    """The comments that this job may have in Slurm. A job of a sweep point has the comment of the sweep
    (slurm/submit/chain.py). If the point was submitted separately, the job has the comment of the point."""
    cluster: str | None = None
    """None if the event has no cluster. Id and comment are then enough to prove the job."""
    uid: int | None = None
    name: str = ""
    submit_time: float = 0.0
    key: str = ""
    array_task: int | None = None
    """The index of an array task. None for a whole job or array, or if `job_id` already contains the index."""

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the submission is unconfirmed: its job has no known id, and may not exist."""
        return not self.job_id

    def resolve_job_id(self, row: JobState) -> str:
        """Return the id of this job as events contain it: `12`, or `12_3` for an array task.

        `row` is this job or one of its tasks, as Slurm shows it.
        """
        return array_job_id(row.job_id) + ("" if self.array_task is None else f"_{self.array_task}")

    def is_proven_by(self, row: JobState) -> bool:
        """Return True if `row` certainly is this job or one of its tasks.

        If the id of this job is known, the caller must have checked that `row` has the same id. Cluster and comment
        then prove the job. If this is an unconfirmed submission, `row` may have any id. Cluster, script and key then
        prove the job.
        """
        if self.cluster not in (None, row.cluster):
            return False
        if not self.is_unconfirmed:
            return row.comment in self.comments
        is_task = self.array_task is None or row.job_id == self.resolve_job_id(row)
        # A copy of the run has the same key, but another path. The path must follow a space, so that a longer path with
        # the same end does not match.
        script_dirs = (f" {comment.removeprefix(COMMENT_PREFIX)}/jobs/" for comment in self.comments)
        is_script_of_run = any(folder in f" {row.command}" for folder in script_dirs)
        return is_task and is_script_of_run and self.key == row.key

    def is_similar_to(self, row: JobState) -> bool:
        """Return True if `row` may be this job: cluster, user, name and submit time agree.

        The caller must have checked that `row` has the id of this job. The comment of `row` may be missing, truncated,
        or replaced by a comment that Sluice did not write.
        """
        has_sluice_comment = row.comment.startswith(COMMENT_PREFIX)
        if has_sluice_comment and not any(comment.startswith(row.comment) for comment in self.comments):
            return False
        is_same_cluster = row.cluster is not None and self.cluster == row.cluster
        is_same_name = (self.uid, self.name) == (row.uid, row.name)
        return is_same_cluster and is_same_name and abs(self.submit_time - row.submit_time) <= SUBMIT_TIME_TOLERANCE_S


def require_response(states: Iterable[JobState]) -> None:
    """Raise UserError if the controller did not respond to the query that returned `states`."""
    if any(state.reason == NOT_RESPONDING for state in states):
        raise UserError(
            "slurm.not_responding",
            f"{NOT_RESPONDING} (scontrol ping, squeue): the jobs of this run cannot be seen, so nothing is submitted "
            "or changed; try again later",
        )


def query_job_states(
    jobs: Iterable[RecordedJob], final_states: dict[RecordedJob, JobState] | None = None
) -> dict[RecordedJob, JobState]:
    """Return the state of each job.

    An array counts as one job: it has the state of a task that may still run, otherwise the state of a task that did
    not complete. Only if all tasks completed, the array is COMPLETED.

    Args:
        jobs: the jobs.
        final_states: a cache for callers that query repeatedly; None for no cache. Jobs in the cache are not queried
            again. This function adds the states of jobs that squeue no longer shows, and of jobs of other clusters,
            because later queries would return the same states.
    """
    return find_jobs(jobs, frozenset(), final_states)[0]


def find_jobs(
    jobs: Iterable[RecordedJob], comments: Set[str], final_states: dict[RecordedJob, JobState] | None = None
) -> tuple[dict[RecordedJob, JobState], list[JobState] | None]:
    """Query the states of jobs, and find other jobs with the comments of runs.

    Args:
        jobs: the jobs.
        comments: comments of runs.
        final_states: see :func:`query_job_states`.

    Returns:
        The state of each job, and a list of other jobs. The list contains jobs of this user that have one of
        `comments`, have not ended and are not among `jobs`. It is None if the controller does not respond.
    """
    is_in_job = bool(os.environ.get("SLURM_JOB_ID"))
    # outside a job, a user waits for the result
    deadline = time.monotonic() + (TIMEOUT_S if is_in_job else slurm_commands.INTERACTIVE_TIMEOUT_S)
    if final_states is None:
        final_states = {}
    remaining = sorted(set(jobs) - final_states.keys(), key=lambda job: job.job_id)
    cluster = slurm_commands.cluster_name() if remaining or comments else None
    if cluster is None:
        unknown_states = {job: JobState(job.job_id, UNKNOWN, NOT_RESPONDING) for job in remaining}
        return {**final_states, **unknown_states}, None
    query = _Query(cluster, remaining, deadline)
    if query.matches or comments:
        query.query_squeue(query.matches, "--me", includes_other_jobs=bool(comments))
    if unmatched := [job for job in query.unmatched_jobs() if not job.is_unconfirmed]:
        query.query_sacct(unmatched)
    if unconfirmed := [job for job in query.unmatched_jobs() if job.is_unconfirmed]:
        query.query_sacct_by_key(unconfirmed)
    recorded = [job for job in query.unmatched_jobs() if not job.is_unconfirmed]
    if jobs_of_other_users := [job for job in recorded if job.uid != os.getuid()]:
        query.query_squeue(jobs_of_other_users)
    states = {job: query.get_state(job) for job in remaining}
    jobs_of_other_clusters = set(remaining) - query.matches.keys()
    for job in jobs_of_other_clusters | set(unmatched):
        if not states[job].is_active and states[job].reason != NOT_RESPONDING and not job.is_unconfirmed:
            final_states[job] = states[job]
    if query.unclaimed is None:
        return {**final_states, **states}, None
    candidates = (row for row in query.unclaimed if row.comment in comments and row.state not in FINAL_STATES)
    other_jobs = [row for row in candidates if not any(_is_same_job(job, row) for job in final_states)]
    return {**final_states, **states}, other_jobs


def _is_same_job(job: RecordedJob, row: JobState) -> bool:
    """Return True if `row` is the recorded job, or a task of the same array, with the comment of its run."""
    return array_job_id(job.job_id) == array_job_id(row.job_id) and job.is_proven_by(row)


class _Query:
    """One query of Slurm: it runs squeue and sacct, and assigns the rows that they print to the recorded jobs.

    Args:
        cluster: the local cluster.
        jobs: the jobs to find, sorted by job id.
        deadline: when all commands must have ended, by the monotonic clock.
    """

    def __init__(self, cluster: str, jobs: Sequence[RecordedJob], deadline: float) -> None:
        self.cluster = cluster
        self._deadline = deadline
        self.matches: dict[RecordedJob, list[JobState]] = {job: [] for job in jobs if job.cluster in (None, cluster)}
        """For each job of this cluster, the rows that show the job: several rows for the tasks of an array."""
        self._jobs_by_id = {
            job_id: list(group) for job_id, group in groupby(self.matches, key=lambda job: job.job_id) if job_id
        }
        self._unconfirmed = [job for job in self.matches if job.is_unconfirmed]
        self.unclaimed: list[JobState] | None = []
        """Rows of squeue that show none of the jobs; None if squeue did not respond."""

    def unmatched_jobs(self) -> list[RecordedJob]:
        """Return the jobs that no command has shown yet."""
        return [job for job, rows in self.matches.items() if not rows]

    def _find_by_id(self, job_id: str) -> list[RecordedJob]:
        """Return the recorded jobs with the id `job_id`.

        If `job_id` is an array task that is not recorded, return the recorded jobs with the id of the array.
        """
        return self._jobs_by_id.get(job_id, self._jobs_by_id.get(array_job_id(job_id), []))

    def _find_unconfirmed(self, row: JobState) -> list[RecordedJob]:
        """Return the unconfirmed submissions whose job or task is `row`."""
        return [job for job in self._unconfirmed if job.is_proven_by(row)]

    def _time_remaining_s(self) -> float:
        """Return the seconds until the deadline of the query; 0 if it has passed."""
        return max(0.0, self._deadline - time.monotonic())

    def query_squeue(self, jobs: Iterable[RecordedJob], *filters: str, includes_other_jobs: bool = False) -> None:
        """Call squeue, and assign its rows to the jobs. If squeue does not respond, all of `jobs` become UNKNOWN.

        Args:
            jobs: the jobs to find.
            filters: arguments of squeue, such as `--me`.
            includes_other_jobs: whether squeue must also list jobs that are not in `jobs`. They are added to
                `unclaimed`.
        """
        jobs = dict.fromkeys(jobs)
        # the name of the cluster is literal text in the format, so that the rows have the same nine cells as sacct's
        columns = f"%i|%T|%r|%N|{self.cluster}|%U|%V|%j|%k{_COMMENT_END}%o"
        command = ["squeue", "-h", "-r", "-t", "all", "-o", columns, *filters]
        # with a list of ids, squeue would not show other jobs and the jobs of unconfirmed submissions
        if len(jobs) < _MAX_IDS_OF_SQUEUE and not includes_other_jobs and not any(job.is_unconfirmed for job in jobs):
            command += ["-j", _join_ids(jobs)]
        output = slurm_commands.run_slurm_command(
            *command, timeout_s=self._time_remaining_s(), nothing_found=NO_SUCH_JOB
        )
        if output is None:
            self.unclaimed = None
            self.matches |= {job: [JobState(job.job_id, UNKNOWN, NOT_RESPONDING)] for job in jobs}
        for row in _parse_rows(output):
            self._match_squeue_row(row)

    def _match_squeue_row(self, row: JobState) -> None:
        """Assign one row of squeue to the recorded job or unconfirmed submission that it certainly shows.

        If there is no such job, add the row to `unclaimed`, and assign the row to all similar jobs. If the job in the
        row has not ended, the similar jobs get the state UNKNOWN.
        """
        candidates = self._find_by_id(row.job_id)
        if proven_jobs := [job for job in candidates if job.is_proven_by(row)]:
            # two jobs of a run may have had the same id: the row shows the job that was submitted last
            self.matches[max(proven_jobs, key=lambda job: job.submit_time)].append(row)
            return
        if unconfirmed := self._find_unconfirmed(row):
            for job in unconfirmed:
                self.matches[job].append(row)
            return
        if self.unclaimed is not None:
            self.unclaimed.append(row)
        for job in [job for job in candidates if job.is_similar_to(row)]:
            problem = (
                f"job {row.job_id} has the id, name, user and time of a job of this run, but not the comment that "
                f"would prove it ({job.comments[0]}). Sluice does not change it; to end it: scancel {row.job_id}"
            )
            has_ended = row.state in FINAL_STATES
            self.matches[job].append(row if has_ended else replace(row, state=UNKNOWN, reason=problem))

    def query_sacct(self, jobs: Iterable[RecordedJob]) -> None:
        """Call sacct with job ids, and assign its rows to the jobs.

        sacct prints one row for each execution of a requeued job; the newest row counts. Jobs that have not ended
        according to accounting are ignored: if a controller lost a job, accounting never learns of the job's end. sacct
        may use half of the remaining time; the other half is left for another squeue.
        """
        columns = "JobID,State,Reason,NodeList,Cluster,UID,Submit,JobName,Comment"
        newest_rows: dict[RecordedJob, dict[str, JobState]] = {}
        output = query_accounting(_join_ids(jobs), columns, timeout_s=self._time_remaining_s() / 2)
        for row in sorted(_parse_rows(output), key=lambda row: row.submit_time):
            for job in self._find_by_id(row.job_id):
                previous = newest_rows.setdefault(job, {}).get(row.job_id)
                # after a requeue, a row has the time of the requeue; only the time in the first row must agree
                compared_row = row if previous is None else replace(row, submit_time=job.submit_time)
                may_follow_previous = previous is None or previous.state in _STATES_BEFORE_RESTART
                if job.is_similar_to(compared_row) and may_follow_previous:
                    newest_rows[job][row.job_id] = row
        for job, tasks in newest_rows.items():
            if all(task.state in FINAL_STATES for task in tasks.values()):
                self.matches[job] += tasks.values()

    def query_sacct_by_key(self, jobs: Sequence[RecordedJob]) -> None:
        """Call sacct for unconfirmed submissions, and assign rows of ended jobs whose scripts have the same keys.

        Jobs that have not ended according to accounting are ignored, as in :meth:`query_sacct`.
        """
        since = datetime.fromtimestamp(min(job.submit_time for job in jobs) - SUBMIT_TIME_TOLERANCE_S)
        columns = "JobID,State,Reason,NodeList,Cluster,UID,Submit,JobName,SubmitLine"
        names = ",".join(sorted({job.name for job in jobs}))
        command = ["sacct", "-n", "-P", "-X", "-S", since.isoformat(timespec="seconds"), f"--name={names}"]
        output = slurm_commands.run_slurm_command(*command, "-o", columns, timeout_s=self._time_remaining_s() / 2)
        for row in _parse_rows(output):
            ended_job = replace(row, command=row.comment, comment="")  # the last column is SubmitLine here
            if ended_job.state in FINAL_STATES:
                for job in self._find_unconfirmed(ended_job):
                    self.matches[job].append(ended_job)

    def get_state(self, job: RecordedJob) -> JobState:
        """Return the state of a job. For an array, this is the state of one task.

        A running task is preferred, then another active task, then a task that did not complete. The state is UNKNOWN
        if no command has shown the job, or if the job belongs to another cluster.
        """
        if job not in self.matches:
            return JobState(job.job_id, UNKNOWN, f"jobs of cluster {job.cluster} are not visible on {self.cluster}")
        rows = self.matches[job] or [JobState(job.job_id, UNKNOWN)]
        row = min(
            rows, key=lambda row: (not row.is_active, row.state in ("COMPLETED", UNKNOWN), row.state != "RUNNING")
        )
        job_id = job.job_id
        if not job_id and row.job_id:  # the job of an unconfirmed submission was found
            job_id = job.resolve_job_id(row)
        return replace(row, job_id=job_id)


def query_accounting(ids: str, columns: str, timeout_s: float = TIMEOUT_S) -> str:
    """Return the output of sacct about jobs, without a header: one row for each execution of each job.

    Args:
        ids: job ids, separated by commas. More than `_IDS_PER_SACCT` ids are queried in several calls. If a call fails,
            its rows are missing.
        columns: sacct's columns.
        timeout_s: the time limit for all calls together.
    """
    all_ids = ids.split(",")
    deadline = time.monotonic() + timeout_s
    command = ("sacct", "-n", "-P", "-X", "-D", "-o", columns, "-j")
    output = ""
    for first in range(0, len(all_ids), _IDS_PER_SACCT):
        ids_of_call = ",".join(all_ids[first : first + _IDS_PER_SACCT])
        remaining_s = max(0.0, deadline - time.monotonic())
        output += slurm_commands.run_slurm_command(*command, ids_of_call, timeout_s=remaining_s) or ""
    return output


def cancel_jobs(jobs: Iterable[JobState]) -> None:
    """Cancel the jobs that have not ended. The caller must have checked just before that all jobs belong to the run."""
    if ids := [job.job_id for job in jobs if job.is_active or job.is_unsatisfiable]:
        slurm_commands.run_slurm_command("scancel", *ids)


def _parse_rows(output: str | None) -> list[JobState]:
    """Parse the rows of squeue or sacct; rows without nine cells are left out.

    Users choose the text of the last cell. It may therefore contain the separator `|`.
    """
    # splitlines() is not used, because it also splits at other characters that a path may contain
    rows = [cells for line in (output or "").split("\n") if len(cells := line.split("|", 8)) == 9]
    states: list[JobState] = []
    for job_id, state, reason, nodes, cluster, uid, submit_time, name, text in rows:
        comment, _, command = text.partition(_COMMENT_END)
        states.append(
            JobState(
                job_id,
                state.split(" ")[0].rstrip("+"),  # `CANCELLED by 0`, or `CANCELLED+` if truncated (sacct(1))
                reason,
                nodes,
                cluster,
                int(uid) if uid.isdigit() else None,
                parse_slurm_time(submit_time),
                name,
                comment.strip(),
                command,
            )
        )
    return states


def _join_ids(jobs: Iterable[RecordedJob]) -> str:
    """Return the distinct ids of the jobs, separated by commas."""
    return ",".join(dict.fromkeys(job.job_id for job in jobs))


def array_job_id(job_id: str) -> str:
    """Return the id of the array to which a task belongs: `12` for `12_3`. The id of any other job is unchanged."""
    return job_id.split("_")[0]
