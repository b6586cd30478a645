"""Determine the state of the stages of a run, for `status`, `logs`, `report` and trackers.

:func:`determine_state` combines the outputs of a stage with what Slurm reports about its job. If an output is missing,
the stage is not done, even if its job is COMPLETED. If Slurm reports nothing (no accounting, no controller), the state
is taken from the run directory: events, locks and outputs.

:class:`StatusPoller` reads the run directory at each poll, which is cheap. Slurm is queried at once if the directory
has new events. Otherwise, the time between two queries is 2 s, and grows to 30 s while nothing changes.

A stray job has the comment of the run, but belongs to none of its submissions (slurm/query/run_jobs.py).
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.base.command import format_command
from pipeline.base.text import format_duration
from pipeline.evaluate.result import format_result, get_extra_metrics, get_main_metric, read_newest_result
from pipeline.run import stages
from pipeline.run.directory import Run, list_points
from pipeline.run.events import (
    AttemptEvent,
    EndEvent,
    Event,
    Failed,
    HandedOver,
    NotSubmitted,
    RanksStarted,
    Requeued,
    Resumed,
    Retried,
    RetryEvent,
    Started,
    StoppedEarly,
    Submitted,
    TrialsNotSubmitted,
    find_current_stragglers,
    is_event,
    read_stage_state,
)
from pipeline.run.failure import retry_command
from pipeline.run.lines import describe_malformed_lines
from pipeline.run.machines import DEFAULT_SAMPLE_COUNT, list_slow_gpus
from pipeline.run.origin import describe_origin
from pipeline.run.trials import Study, Trial, read_study
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob
from slurm.query.run_jobs import (
    SubmittedJob,
    describe_stray_job,
    describe_unknown_states,
    find_awaited_job,
    find_run_jobs,
    find_submission_indices,
    find_successor,
    is_job_ending,
    uses_slurm,
)
from slurm.query.slurm_commands import JOB_HELD, NOT_RESPONDING

POLL_INTERVAL_S = 2.0
"""The time between two polls of the run directory."""
QUERY_INTERVALS_S = (2.0, 30.0)
"""The shortest and the longest time between two queries of Slurm."""
MAX_IDLE_POLLS = 5
"""After this many polls in a row without an active stage, a run counts as ended. One poll is not enough, because there
is a gap between the end of a stage and the start of the next stage. Without Slurm, this gap takes seconds on a busy
machine, and file systems may show outputs late."""
GPU_COMPARISON_S = 120.0
"""GPUs are compared by their telemetry of the last two minutes. If telemetry is sampled rarely, the period is as long
as `DEFAULT_SAMPLE_COUNT` samples."""
_MAX_SLOW_GPUS_SHOWN = 3
_OPTIONAL_COLUMNS = (
    "last stop",
    "idle",
    "ending",
    "save",
    "ranks",
    "attempts",
    "nodes",
    "time",
    "steps",
    "loss",
    "job",
    "step",
)
"""Columns that are left out if the terminal is narrow, in this order. Other columns, such as Slurm's reason, stay."""
_END_OF_SHORT_PROGRESS = r"(?<=units): |; "
"""The table shows a progress description only up to this pattern: `8/8 units: 731 documents` becomes `8/8 units`."""


# -- last stop ---------------------------------------------------------------------------------------------------------

_CAUSE_DESCRIPTIONS = {
    "preempted": "preemption",
    "time_limit": "its time limit",
    "node_failure": "a node failure",
    "bad_node": "a bad node",
    "crashed": "a crash",
    "out_of_memory": "running out of memory",
    "hang": "a hang",
    "peer_lost": "losing a rank",
    "non_finite": "a loss that was not finite",
    "storage": "a storage error",
    "bad_checkpoint": "a bad checkpoint",
    "bad_input": "bad inputs",
    "user_error": "a user error",
    "cancelled": "a cancellation",
    "stop file": "a stop request",
    "outputs": "incomplete outputs",
    "placement": "a wrong placement of ranks",
    "signal": "a signal",
    "stopped": "a signal",
}
"""Descriptions that follow `after`, by cause. The cause `requeued` has none, because it only says that Slurm requeued
the job."""
_CONTINUATIONS: Mapping[type[RetryEvent], str] = {
    Requeued: "requeued",
    Retried: "restarted",
    HandedOver: "handed over to the next job",
}
"""How a stage continues after an event."""
_SUBMITTED_AGAIN = "submitted again"


@dataclass(frozen=True)
class LastStop:
    """How a stage last stopped before it was done."""

    cause: str | None
    """The name of an exit code, a signal, or what requested the stop; None if unknown."""
    step: int | None
    """The step at which the ranks stopped on request, otherwise the step of the newest checkpoint; None if there is
    neither."""
    is_graceful: bool
    """Whether the ranks stopped at a step boundary, on request, and saved this step."""
    continuation: str | None = None
    """How the stage continues, such as `requeued`; None if the stage does not continue."""
    attempts: int = 1
    """Number of attempts so far."""

    @property
    def cause_phrase(self) -> str:
        """The cause, such as `after preemption`; "" if the cause is unknown or only that Slurm requeued the job."""
        if self.cause in (None, "requeued"):
            return ""
        return f"after {_CAUSE_DESCRIPTIONS.get(str(self.cause), f'a signal ({self.cause})')}"

    @property
    def details(self) -> str:
        """The step and the number of attempts: `at step 1210 (2 attempts)`."""
        step = ""
        if self.step is not None:
            step = f"at step {self.step} " if self.is_graceful else f"with a checkpoint of step {self.step} "
        return f"{step}({self.attempts} attempt{'s' if self.attempts > 1 else ''})"


def find_last_stop(events: Sequence[Event], pending_job: str | None) -> LastStop | None:
    """Return how a stage last stopped; None if the stage did not stop, or is done.

    If the stage is an array, this is the last stop of the task that had the most attempts.

    Args:
        events: all events of the stage, oldest first.
        pending_job: the id of the stage's pending job; None if there is none. If an attempt has no end event, but its
            job is pending, the attempt has stopped without writing an event. For the tasks of an array, the pending job
            is ignored, because it may be the job of another task.
    """
    events_of_task: dict[int | None, list[Event]] = {}
    for event in events:
        task = event.task if isinstance(event, AttemptEvent) else None
        events_of_task.setdefault(task, []).append(event)
    # events without a task concern the whole stage: submissions, and the job after an array
    is_one_group = len(events_of_task) == 1
    stops = [
        _find_last_stop_of_task(task_events, pending_job if is_one_group or task is None else None)
        for task, task_events in events_of_task.items()
    ]
    return max((stop for stop in stops if stop is not None), key=lambda stop: stop.attempts, default=None)


def _find_last_stop_of_task(events: Sequence[Event], pending_job: str | None) -> LastStop | None:
    """Return how a stage, or one task of its array, last stopped; None if there was no stop, or the stage is done.

    The arguments are those of :func:`find_last_stop`, with the events of one task.
    """
    state = read_stage_state(events)
    stop = state.last_stop
    retry = None if stop is None else stop.retry
    started = state.start_event
    if started is not None and state.is_open and pending_job is not None:
        stop = state.describe_open_stop()
        # after a requeue, the job itself is pending; another pending job is its successor
        retry = Requeued if pending_job in (started.slurm_job, started.job_id) else HandedOver
    if stop is None:
        return None
    continuation = None if retry is None else _CONTINUATIONS[retry]
    if state.submitted_again:
        continuation = _SUBMITTED_AGAIN
    return LastStop(stop.cause, stop.step, stop.is_graceful, continuation, state.attempt_count)


# -- state -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageStatus:
    """The status of one stage: a row of the table."""

    run: Run
    stage: str
    state: str
    """Slurm's state while the job is active (running, pending …), otherwise how the stage ended (done, failed …).

    In the state `waiting`, the stage has no job yet, or waits for later checkpoints. In the state `held`, the user or
    an administrator must release the job. In the state `never`, the job will never start, because its dependency can no
    longer be satisfied."""
    problem: str
    """What is wrong; "" if there is no problem."""
    is_active: bool
    """Whether the stage is running, or may still start or continue without a command of the user."""
    cells: Mapping[str, str]
    """The texts of the other columns of the table, by column name."""
    slowdowns: str
    """Ranks and GPUs that are slower than the others; "" if there are none."""
    last_stop: LastStop | None = None
    """How the stage last stopped; None if the stage did not stop, or is done."""
    spare_nodes: str = ""
    """The spare nodes and the failed nodes of the running job; "" if there are none."""
    missing_jobs: str = ""
    """Which jobs of this stage are missing in the queue; "" if no job is missing. The text of the first stage also
    describes the stray jobs of the run."""

    early_end: str = ""
    """At which step a callback completed the stage before its last step, and why; "" if it did not."""

    @property
    def last_stop_summary(self) -> str:
        """How the stage last stopped and continues: `requeued after preemption`.

        The text is "" if the stage has not stopped or is done. It is also "" if the stage ended with a `problem`,
        because the problem contains the cause.
        """
        stop = self.last_stop
        if stop is None or self.state == "done" or (self.problem and not self.is_active):
            return ""
        return _join(stop.continuation or "stopped", stop.cause_phrase)

    @property
    def last_stop_sentence(self) -> str:
        """State and last stop: `train pending (Priority), requeued after preemption at step 12 (2 attempts)`.

        The text is "" in the same cases as `last_stop_summary`.
        """
        stop = self.last_stop
        if stop is None or not self.last_stop_summary:
            return ""
        if self.is_active:
            reason = f" ({self.cells['reason']})" if self.cells["reason"] else ""
            return _join(f"{self.stage} {self.state}{reason},", self.last_stop_summary, stop.details)
        return _join(self.stage, self.state, "" if stop.cause == self.state else stop.cause_phrase, stop.details)


def _join(*parts: str) -> str:
    """Join the parts that are not empty with spaces."""
    return " ".join(filter(None, parts))


class StateSummary(NamedTuple):
    """The state of a stage. The fields have the same meaning as in `StageStatus`."""

    state: str
    problem: str
    is_active: bool


def determine_state(
    missing: str | None, is_locked: bool, events: Sequence[Event], job: JobState | None
) -> StateSummary:
    """Return the state of a stage.

    Args:
        missing: why the outputs of the stage do not validate; None if they are valid.
        is_locked: whether a process holds the lock of the stage.
        events: the events of the stage since its last submission.
        job: the Slurm job to show for the stage; None without Slurm, or if there is no job.
    """
    recorded = read_stage_state(events)
    slurm_state = "" if job is None or job.state == UNKNOWN else job.state
    name = f"job {job.job_id}" if job else ""
    # while its lock is held, a stage with valid outputs is not done until its supervisor has written the event `done`
    if missing is None and (not is_locked or recorded.is_done):
        return StateSummary("done", "", False)
    if job is not None and job.is_unsatisfiable:
        return StateSummary("never", f"{name} waits for a dependency that cannot be satisfied ({job.reason})", False)
    if job is not None and job.is_active and (held_by := JOB_HELD.match(job.reason)):
        by_whom = "" if held_by[1] == "User" else "; only an administrator can do this"
        return StateSummary("held", f"until scontrol release {job.job_id} ({job.reason}{by_whom})", True)
    if job is not None and job.is_active:
        return StateSummary(slurm_state.lower(), "", True)
    if is_locked:
        return StateSummary("running", "", True)
    if slurm_state == "COMPLETED" or recorded.is_done:
        claim = f"{name} is COMPLETED" if slurm_state else "its supervisor reported done"
        return StateSummary("incomplete", f"{claim}, but {missing}", False)
    if recorded.end_event is not None:
        problem = ""
        if isinstance(recorded.end_event, Failed):
            problem = f"({recorded.end_event.cause}): {(recorded.end_event.message or '').rstrip()}"
        return StateSummary(recorded.end_event.name, problem, False)
    if slurm_state == "CANCELLED":
        return StateSummary("cancelled", "", False)
    if job is not None and job.reason == NOT_RESPONDING:
        return StateSummary("unknown", NOT_RESPONDING, True)  # counts as active, because the stage may be running
    if recorded.start_event is not None:
        problem = "it ended without a final event"
        if slurm_state:
            problem = f"{name} is {slurm_state}: its supervisor wrote no final event"
        return StateSummary("died", problem, False)
    if slurm_state:
        return StateSummary("failed", f"{name} is {slurm_state}: it ended before its supervisor started", False)
    if job is not None:
        return StateSummary("unknown", job.reason or f"Slurm does not know {name}", False)
    return StateSummary("waiting", "", False)


def _determine_state_so_far(run: Run, is_locked: bool, events: Sequence[Event], job: JobState | None) -> StateSummary:
    """Return the state of a stage whose outputs are complete for all checkpoints so far, before training has ended.

    Such a stage is not done, because later checkpoints will need more outputs. The arguments are those of
    :func:`determine_state`.
    """
    if is_locked or (job is not None and (job.is_active or job.is_unsatisfiable)):
        return determine_state("the training is not done", is_locked, events, job)
    is_job_cancelled = job is not None and job.state == "CANCELLED"
    is_cancelled = is_job_cancelled or read_stage_state(events).user_request == "cancelled"
    return StateSummary("cancelled" if is_cancelled or run.cancelled_file.exists() else "waiting", "", False)


class StatusPoller:
    """Reads the status of a run repeatedly, and queries Slurm as rarely as possible."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.point_statuses: list[StageStatus] = []
        """One status for each point of a sweep: the first stage that is not done, or the last stage if all are done."""
        self._final_states: dict[RecordedJob, JobState] = {}
        """The states of jobs that squeue no longer shows. These jobs are not queried again."""
        self._jobs: Sequence[SubmittedJob] = ()
        """The jobs of the run and its points, from the last query."""
        self._done_statuses: dict[tuple[Path, str], StageStatus] = {}
        """Statuses of the stages that are done, by run and stage. They are determined only once."""
        self._last_query_result: tuple[int, Sequence[SubmittedJob], bool] | None = None
        """Number of events, jobs, and whether a sweep point was active, at the last query."""
        self._event_count = -1
        """Number of events at the last query; -1 before the first poll, which therefore always queries."""
        self._query_interval_s = QUERY_INTERVALS_S[0]
        self._next_query_time = 0.0

    def poll(self) -> list[StageStatus]:
        """Return the current status of each stage, by the current config."""
        if self.run.reload_config():
            self._done_statuses.clear()
        event_count = len(self.run.read_events())
        if event_count != self._event_count or time.monotonic() >= self._next_query_time:
            self._event_count = event_count
            self._query_slurm()
        return self.read_statuses(self._jobs)

    def read_statuses(self, jobs: Sequence[SubmittedJob]) -> list[StageStatus]:
        """Return the status of each stage from the run directory and `jobs`. Slurm is not queried.

        For a sweep, `point_statuses` is also updated.
        """
        self._jobs = jobs
        statuses = self._read_stages(self.run, stages.list_run_stages(self.run), {})
        run_statuses = list(statuses.values())
        statuses_by_point = [
            list(self._read_stages(point, stages.list_point_stages(point), statuses).values())
            for point in list_points(self.run)
        ]
        is_active = any(status.is_active for each in (run_statuses, *statuses_by_point) for status in each)
        paths = {self.run.path, *(point_statuses[0].run.path for point_statuses in statuses_by_point)}
        run_jobs = [job for job in jobs if job.run_path in paths]  # `jobs` may contain jobs of other runs
        is_slurm_responding = not any(job.reported_job.reason == NOT_RESPONDING for job in run_jobs)
        # while another process submits the jobs of the run, some jobs are missing only for a moment
        if run_jobs and is_slurm_responding and is_active and not self.run.is_being_submitted:
            run_statuses = self._add_missing_jobs(run_statuses)
            statuses_by_point = list(map(self._add_missing_jobs, statuses_by_point))
        stray_jobs = [describe_stray_job(job) for job in run_jobs if job.is_stray and job.reported_job.is_active]
        first_status = run_statuses[0]
        messages = filter(None, [first_status.missing_jobs, *stray_jobs])
        run_statuses[0] = replace(first_status, missing_jobs="; ".join(messages))
        self.point_statuses = []
        for point_statuses in statuses_by_point:
            current = next((status for status in point_statuses if status.state != "done"), point_statuses[-1])
            missing_jobs = [f"{status.stage} {status.missing_jobs}" for status in point_statuses if status.missing_jobs]
            self.point_statuses.append(replace(current, missing_jobs="; ".join(missing_jobs)))
        return run_statuses

    def _add_missing_jobs(self, statuses: Sequence[StageStatus]) -> list[StageStatus]:
        """Return the statuses with `missing_jobs` filled in."""
        return [replace(status, missing_jobs=self._find_missing_jobs(status)) for status in statuses]

    def _find_missing_jobs(self, status: StageStatus) -> str:
        """Return a message if the queue lacks a job that the stage needs in order to be completed; "" otherwise."""
        jobs = [job for job in self._jobs if (job.run_path, job.stage) == (status.run.path, status.stage)]
        active = [job for job in jobs if job.reported_job.is_active and not job.is_stray]
        # a job that evaluates a checkpoint during the training does not complete the evaluate stage
        awaited_job = find_awaited_job(
            self.run.config.get_stage(status.stage), [job for job in active if job.step is None]
        )
        if status.state == "waiting" or (status.is_active and active and awaited_job is None):
            events = status.run.read_events(status.stage, Submitted, NotSubmitted)
            last_event = events[-1] if events else None
            error = last_event.message if isinstance(last_event, NotSubmitted) else None
            subject = "the job that completes it is " if any(job.is_array_of_parts for job in active) else ""
            reason = f": {error}" if error else ""
            return f"{subject}not submitted{reason}"
        if (
            self.run.config.site.requeue
            or self.run.config.sweep is not None
            or not self.run.config.get_stage(status.stage).is_training
        ):
            return ""  # only the train stage has a successor job, and only if the site forbids requeueing
        if awaited_job is None or find_successor(awaited_job, active):
            return ""
        if is_job_ending(status.run, status.stage, awaited_job.reported_job):
            return ""  # a job that will not be retried needs no successor
        return "its successor is not submitted"

    @property
    def has_active_point(self) -> bool:
        """Whether any point of a sweep is active."""
        return any(status.is_active for status in self.point_statuses)

    def _read_stages(
        self, run: Run, names: Iterable[str], sweep_statuses: Mapping[str, StageStatus]
    ) -> dict[str, StageStatus]:
        """Return the statuses of stages by name.

        Args:
            run: the run, or a point of a sweep.
            names: the names of the stages.
            sweep_statuses: for a point, the statuses of the stages of the sweep, on which the point's stages depend.
        """
        statuses: dict[str, StageStatus] = {}
        for stage in names:
            parents = {
                name: statuses.get(name) or sweep_statuses[name] for name in run.config.get_stage(stage).depends_on
            }
            may_get_new_inputs = any(self._may_change_later(name, parents[name]) for name in parents)
            status = self._done_statuses.get((run.path, stage)) or self._read_stage(run, stage, may_get_new_inputs)
            ended_parents = [
                name for name, parent in parents.items() if parent.state != "done" and not parent.is_active
            ]
            # Slurm reports DependencyNeverSatisfied only for the next job in the chain, not for the jobs after it
            if status.is_active and status.cells["reason"] == "Dependency" and ended_parents:
                problem = f"job {status.cells['job']} waits for {', '.join(ended_parents)}"
                status = replace(status, state="never", is_active=False, problem=problem)
            if status.state == "done" and run.pause_step is None:  # a paused trial may continue later
                self._done_statuses[run.path, stage] = status
            statuses[stage] = status
        return statuses

    def _query_slurm(self) -> None:
        """Query the jobs, if the run uses Slurm. If nothing has changed, lengthen the time until the next query."""
        runs = (self.run, *list_points(self.run))
        self._jobs = find_run_jobs(runs, self._final_states) if uses_slurm(self.run) else []
        result = (self._event_count, self._jobs, self.has_active_point)
        shortest_s, longest_s = QUERY_INTERVALS_S
        is_unchanged = result == self._last_query_result
        self._query_interval_s = min(longest_s, 1.5 * self._query_interval_s) if is_unchanged else shortest_s
        self._last_query_result = result
        self._next_query_time = time.monotonic() + self._query_interval_s

    def _may_change_later(self, stage: str, status: StageStatus) -> bool:
        """Return True if later checkpoints may still change the outputs of `stage`, which has the status `status`."""
        definition = self.run.config.get_stage(stage)
        depends_on_training = any(self.run.config.get_stage(name).is_training for name in definition.depends_on)
        return (definition.is_training or depends_on_training) and status.state != "done"

    def _read_stage(self, run: Run, stage: str, may_get_new_inputs: bool) -> StageStatus:
        """Return the status of a stage.

        Args:
            run: the run, or a point of a sweep.
            stage: the stage.
            may_get_new_inputs: whether later checkpoints may still change the inputs of the stage.
        """
        stage_module = stages.load_stage_module(run, stage)
        events = run.read_events(stage)
        missing = stages.describe_missing_outputs_quickly(run, stage)
        lock_holder = run.lock_holder(stage)
        progress = stage_module.progress(run)
        jobs = [job for job in self._jobs if (job.run_path, job.stage) == (run.path, stage) and not job.is_stray]
        # a submission without a job is left out, unless the reason why its state is unknown must be shown
        jobs = [job for job in jobs if job.job_id or job.reported_job.reason]
        shown_job = _choose_job(jobs)
        job = shown_job.reported_job if shown_job else None
        last_submission = max(find_submission_indices(events), default=-1)  # without one, all events are recent
        recent_events = events[last_submission + 1 :]
        is_locked = lock_holder is not None
        state, problem, is_active = determine_state(missing, is_locked, recent_events, job)
        if state == "done" and may_get_new_inputs:
            state, problem, is_active = _determine_state_so_far(run, is_locked, recent_events, job)
        # without a log, the job probably ended because its node could not open the log file
        if (
            shown_job is not None
            and state == "failed"
            and not any((run.jobs_dir / stage).glob(f"{shown_job.job_id}*_log.out"))
        ):
            check = format_command("doctor", str(run.path.parent), "--check-nodes")
            problem += f" and wrote no log. Check that nodes see the run: {check}"
        if state == "waiting":
            problem = stages.missing_inputs(run, stage) or ""
        if state == "waiting" and run.cancelled_file.exists():
            state = "cancelled"  # the stage was cancelled before it started
        active_job = job if is_active else None
        is_running = state == "running"
        recorded = read_stage_state(events)
        seconds = sum(event.seconds or 0.0 for event in events if isinstance(event, EndEvent))
        if is_running and recorded.start_event is not None and recorded.end_event is None:
            seconds += time.time() - recorded.start_event.timestamp
        starts_of_task = Counter(event.task for event in events if isinstance(event, Started))
        # the table shows a short form; slurm/submit/local_runner.py and the report print the whole description
        short_progress = re.split(_END_OF_SHORT_PROGRESS, progress.description)[0]
        cells = {
            "job": shown_job.job_id if shown_job else "",
            "reason": active_job.reason if active_job and active_job.state == "PENDING" else "",
            "nodes": (active_job.nodes if active_job else "") or (lock_holder.host if lock_holder else ""),
            "step": f"{progress.completed}/{progress.total}"
            if run.config.get_stage(stage).is_training
            else short_progress,
            "loss": progress.loss_description,
            "ETA": format_duration(progress.remaining_s) if is_running and progress.remaining_s is not None else "",
            "attempts": str(max(starts_of_task.values(), default=0)),  # of the array task with the most attempts
            "time": format_duration(seconds),
        }
        if not problem and state != "done":
            problem = "; ".join(describe_unknown_states(jobs))
        slowdowns = _describe_slowdowns(run, recorded.start_event, events) if is_running else ""
        pending_job = job.job_id if job and job.is_active and job.state == "PENDING" else None
        last_stop = find_last_stop(events, pending_job) if state != "done" else None
        spare_nodes = _describe_spare_nodes(events) if is_running else ""
        early_ends = [event for event in events if isinstance(event, StoppedEarly)] if state == "done" else []
        early_end = ""
        if early_ends and early_ends[-1].step == progress.completed < progress.total:
            early_end = f"completed early at step {progress.completed}: {early_ends[-1].reason}"
        return StageStatus(
            run, stage, state, problem, is_active, cells, slowdowns, last_stop, spare_nodes, early_end=early_end
        )


def _choose_job(jobs: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Return the job of a stage that the table shows; None if there is none.

    This is the first running job. Without one, it is the first pending job, the first job that can never start, or the
    last job, in this order.
    """
    active = [job for job in jobs if job.reported_job.is_active]
    running = [job for job in active if job.reported_job.state != "PENDING"]
    unsatisfiable = [job for job in jobs if job.reported_job.is_unsatisfiable]
    return next(iter([*running, *active, *unsatisfiable, *reversed(jobs)]), None)


def _describe_slowdowns(run: Run, started: Started | None, events: Iterable[Event]) -> str:
    """Return a description of the ranks and GPUs that are now slower than the others; "" if there are none.

    Args:
        run: the run.
        started: the start of the current attempt; GPU samples before it are ignored.
        events: the events of the stage, oldest first.
    """
    ranks = [
        f"rank {event.rank} on {event.host} takes {event.ratio} × the time of its peers"
        for event in find_current_stragglers(events)
    ]
    # if `telemetry_s` is not set, the run may have older samples; the period below is then GPU_COMPARISON_S
    interval_s = run.config.track.telemetry_s or GPU_COMPARISON_S / DEFAULT_SAMPLE_COUNT
    period_s = max(GPU_COMPARISON_S, DEFAULT_SAMPLE_COUNT * interval_s)
    begin = max(started.timestamp if started else 0.0, time.time() - period_s)
    gpus = list_slow_gpus(run.path, begin, max_samples=math.ceil(period_s / interval_s))
    more = [f"and {len(gpus) - _MAX_SLOW_GPUS_SHOWN} more GPUs"] if len(gpus) > _MAX_SLOW_GPUS_SHOWN else []
    return "; ".join([*ranks, *gpus[:_MAX_SLOW_GPUS_SHOWN], *more])


def _describe_spare_nodes(events: Sequence[Event]) -> str:
    """Return a description of the spare nodes and the failed nodes of a running job; "" if there are none.

    Args:
        events: the events of the stage, oldest first.
    """
    last_event = next((event for event in reversed(events) if isinstance(event, RanksStarted | Started)), None)
    if not isinstance(last_event, RanksStarted):
        return ""
    replaced = last_event.replaced or {}
    parts = [f"{replacing} replaced {node}" for node, replacing in replaced.items()]
    if failed := [node for node in last_event.failed or [] if node not in replaced]:
        parts.append(f"{', '.join(failed)} failed, and this job continues without it")
    if spares := last_event.spares:
        parts.append(f"spare node{'s' * (len(spares) > 1)} {', '.join(spares)}")
    return "; ".join(parts)


# -- tables ------------------------------------------------------------------------------------------------------------


def build_table(rows: Sequence[Sequence[str]], width: int | None = None) -> Table:
    """Return a table for the terminal; columns of numbers are right-aligned.

    Args:
        rows: the texts of the cells by row; the first row is the header.
        width: the width of the terminal; None if unlimited. If the table is wider, columns are left out in the order
            of `_OPTIONAL_COLUMNS`. Cells are never truncated: print the table with `soft_wrap`.
    """
    columns = {column[0]: column for column in zip(*rows, strict=True)}

    def required_width() -> int:
        """Return the width of the remaining columns, with two spaces between them."""
        return sum(max(map(cell_len, column)) + 2 for column in columns.values()) - 2

    for name in _OPTIONAL_COLUMNS:
        if width is None or required_width() <= width:
            break
        columns.pop(name, None)
    table = Table(box=None, pad_edge=False, header_style="bold", width=required_width())
    for name, *column in columns.values():
        table.add_column(name, justify="right" if re.fullmatch(r"[-\d.,:/·]*", "".join(column)) else "left")
    for row in [*zip(*columns.values(), strict=True)][1:]:
        table.add_row(*map(Text, row))
    return table


def tabulate_points(run: Run, statuses: Sequence[StageStatus]) -> list[list[str]]:
    """Return the rows of a table of sweep points: the header, then one row for each point, the best point first.

    Args:
        run: the run. If it is not a sweep, the table is empty.
        statuses: the statuses of the points, in the order of the sweep (`StatusPoller.point_statuses`).
    """
    if run.config.sweep is None:
        return []
    if run.config.sweep.search is not None:
        return tabulate_trials(run, statuses)
    rows = []
    values_of_points = run.config.sweep.points()
    for status, values in zip(statuses, values_of_points, strict=True):
        progress = stages.load_stage_module(status.run, run.config.metrics_stage).progress(status.run)
        result = read_newest_result(status.run)
        main_metric = get_main_metric(result)[1] if result else math.inf
        state = status.state if status.state in ("done", "waiting") else f"{status.stage} {status.state}"
        cells = [status.run.path.name, *map(str, values.values()), state]
        cells += [f"{progress.completed}/{progress.total}", progress.loss_description or "-"]
        cells.append("-" if result is None else f"{main_metric:.4f}")
        rows.append((main_metric, cells, get_extra_metrics(result or {})))
    if not run.config.has_pipeline:  # Commands have no evaluation, and only some report their steps.
        return [["point", *values_of_points[0], "state", "loss"], *([*cells[:-3], cells[-2]] for _, cells, _ in rows)]
    main_name = "bits per byte" if run.config.model.target is None else "held-out loss"
    rows.sort(key=lambda row: row[0])
    extra_names = list(rows[0][2])  # those of the best point; if this point was not evaluated, no point was
    table = [["point", *values_of_points[0], "state", "steps", "loss", main_name, *extra_names]]
    for _, cells, extra in rows:
        table.append([*cells, *(f"{extra[name]:.4f}" if name in extra else "-" for name in extra_names)])
    return table


def tabulate_trials(run: Run, statuses: Sequence[StageStatus]) -> list[list[str]]:
    """Return the rows of a table of the trials of a search: the header, then the trials, the best one first.

    Trials at a higher rung are before those at a lower rung. The arguments are those of :func:`tabulate_points`.
    """
    sweep = run.config.sweep
    assert sweep is not None and sweep.search is not None
    study = read_study(run.path)
    rows = []
    for status, trial in zip(statuses, study.trials, strict=False):  # a trial may have been added since the last poll
        progress = stages.load_stage_module(status.run, run.config.metrics_stage).progress(status.run)
        reached = max((rung for rung, result in trial.results.items() if result.value is not None), default=-1)
        value = trial.results[reached].value if reached >= 0 else None
        evaluation = read_newest_result(status.run)
        cells = [
            status.run.path.name,
            *map(str, trial.parameters.values()),
            _describe_trial_state(study, trial, status),
        ]
        cells += [f"{reached + 1}/{len(study.rungs)}", f"{progress.completed}/{progress.total}"]
        cells += ["-" if value is None else f"{value:.4f}"]
        cells += ["-" if evaluation is None else f"{get_main_metric(evaluation)[1]:.4f}"]
        rows.append(((-reached, math.inf if value is None else value), cells))
    rows.sort(key=lambda row: row[0])
    main_name = "bits per byte" if run.config.model.target is None else "evaluated loss"
    header = ["trial", *sweep.search.space, "state", "rung", "steps", sweep.search.metric, main_name]
    return [header, *(cells for _, cells in rows)] if rows else []


def _describe_trial_state(study: Study, trial: Trial, status: StageStatus) -> str:
    """Return the state of a trial: paused, pruned, failed, done, or the state of its stage, such as `train running`."""
    result = trial.result
    if trial.has_failed:
        return "failed"
    if result is not None and not result.is_final and trial.rung < len(study.rungs) - 1:
        return "pruned" if study.is_finished else "paused"
    state = status.state if status.state in ("done", "waiting") else f"{status.stage} {status.state}"
    return f"promoted, {state}" if trial.rung and result is None else state


def describe_study(run: Run) -> list[str]:
    """Return the progress of a search, its best trial, and why the next trials could not be submitted.

    The result is [] if the run has no search.
    """
    sweep = run.config.sweep
    if sweep is None or sweep.search is None:
        return []
    study = read_study(run.path)
    rungs = ", ".join(map(str, study.rungs)) or "not decided yet"
    state = "finished" if study.is_finished else f"{len(study.trials)} of {sweep.search.optuna.trials} trials sampled"
    lines = [f"search: {state}; rungs at steps {rungs}"]
    if (best := study.find_best()) is not None:
        trial = study.trials[best]
        rung = max(rung for rung, result in trial.results.items() if result.value is not None)
        values = ", ".join(f"{key}={value}" for key, value in trial.parameters.items())
        name = "best trial" if study.is_finished else "best trial so far"
        lines.append(
            f"{name}: {best:03d}, {sweep.search.metric} {trial.results[rung].value:.4f} at step {study.rungs[rung]} "
            f"({values})"
        )
    failures = [trial.result.message for trial in study.trials if trial.result is not None and trial.has_failed]
    lines += [f"failed: {message}" for message in dict.fromkeys(failures)]
    events = run.read_events(None, TrialsNotSubmitted, Resumed)
    if not study.is_finished and events and isinstance(events[-1], TrialsNotSubmitted):
        lines.append(f"the next trials were not submitted: {events[-1].message}")
    return lines


def _group_points(descriptions: Iterable[tuple[StageStatus, str]]) -> list[str]:
    """Return each distinct description once, with the names of its points. Empty descriptions are left out.

    Args:
        descriptions: pairs of the status of a point and a description.
    """
    points_by_description: dict[str, list[str]] = {}
    for status, description in descriptions:
        if description:
            points_by_description.setdefault(description, []).append(status.run.path.name)
    return [
        f"point{'s' if len(points) > 1 else ''} {', '.join(points)}: {description}"
        for description, points in points_by_description.items()
    ]


def describe_failures(statuses: Sequence[StageStatus]) -> list[str]:
    """Return the problems of the points of a sweep. Each distinct problem is returned once, with its points."""
    return _group_points(
        (status, f"{status.stage} {status.state} {status.problem}") for status in statuses if status.problem
    )


def describe_point_stops(statuses: Sequence[StageStatus]) -> list[str]:
    """Return how the points of a sweep last stopped. Each distinct description is returned once, with its points."""
    return _group_points(
        (status, f"{status.stage} {status.state}, {status.last_stop_summary}")
        for status in statuses
        if status.last_stop_summary
    )


def describe_missing_jobs(
    run: Run, statuses: Sequence[StageStatus], point_statuses: Sequence[StageStatus]
) -> list[str]:
    """Return which jobs of the chain are missing or stray, and the command that completes the chain.

    The result is [] if there are no such jobs.

    Args:
        run: the run.
        statuses: the statuses of the run's stages.
        point_statuses: one status for each point of a sweep.
    """
    messages = [f"{status.stage}: {status.missing_jobs}" for status in statuses if status.missing_jobs]
    messages += _group_points((status, status.missing_jobs) for status in point_statuses)
    return [*messages, f"to complete the chain: {run.resume_command}"] if messages else []


def render_status(
    run: Run,
    statuses: Sequence[StageStatus],
    point_statuses: Sequence[StageStatus] = (),
    width: int | None = None,
) -> Group:
    """Return the table of stages, messages for the user, and the table of sweep points.

    The messages are problems, how stages last stopped, warnings, how to continue, and changes of the config.

    Args:
        run: the run.
        statuses: the statuses of the run's stages. Columns that are empty for all stages are left out.
        point_statuses: one status for each point of a sweep.
        width: the width of the terminal; None if unlimited.
    """
    columns = [name for name in statuses[0].cells if any(status.cells[name] for status in statuses)]
    rows = [["stage", "state", *columns]]
    rows += [[status.stage, status.state, *(status.cells[name] for name in columns)] for status in statuses]
    problems = [f"{status.stage} {status.state} {status.problem}" for status in statuses if status.problem]
    problems += describe_failures(point_statuses)
    stops = [status.last_stop_sentence for status in statuses if status.last_stop_sentence]
    stops += describe_point_stops(point_statuses)
    stops += [f"{status.stage}: {status.spare_nodes}" for status in statuses if status.spare_nodes]
    stops += [f"{status.stage} {status.early_end}" for status in statuses if status.early_end]
    warnings = [f"{status.stage}: {status.slowdowns}" for status in statuses if status.slowdowns]
    warnings += describe_missing_jobs(run, statuses, point_statuses)
    lines = [Text(message, style="red") for message in problems]
    lines += [Text(message) for message in stops]
    lines += [Text(message, style="yellow") for message in warnings]
    # `resume` does not run failed trials of a search again.
    all_statuses = [*statuses, *(status for status in point_statuses if not status.run.is_failed_trial)]
    if not any(status.is_active for status in all_statuses) and any(status.state != "done" for status in all_statuses):
        cause = None
        message = ""
        if failed := next((status for status in all_statuses if status.state == "failed"), None):
            # With an event `failed`, the text is `(CAUSE): …`. Without one, the part of the text in `cause` equals no
            # real cause, so `retry_command` adds no option because of it.
            message = failed.problem
            cause = message[1:].partition(")")[0]
        lines.append(Text(f"to continue: {retry_command(run, cause, message)}"))
    lines += [Text(description) for description in (describe_origin(run), run.describe_changes()) if description]
    if malformed_lines := describe_malformed_lines(run.events_file, is_event):
        lines.append(Text(malformed_lines, style="yellow"))
    points = tabulate_points(run, point_statuses)
    lines += map(Text, describe_study(run))
    return Group(Text(run.title), build_table(rows, width), *lines, *([build_table(points, width)] if points else []))


def print_status(run: Run, console: Console) -> None:
    """Print the current status of a run."""
    poller = StatusPoller(run)
    console.print(render_status(run, poller.poll(), poller.point_statuses, console.width), soft_wrap=True)


def describe_outcome(run: Run) -> RenderableType:
    """Return a description of the newest evaluation of a run; for a sweep, its failures and the table of its points."""
    if run.config.sweep is not None:
        poller = StatusPoller(run)
        poller.poll()
        statuses = poller.point_statuses
        points = tabulate_points(run, statuses)
        lines = [*describe_failures(statuses), *describe_study(run)]
        return Group(*lines, *([build_table(points)] if points else []))
    return describe_result(run)


def describe_commands(run: Run) -> str:
    """Return how far the commands of a run without the stages of the pipeline are, in one line."""
    stage = run.config.metrics_stage
    return f"{stage}: {stages.load_stage_module(run, stage).progress(run).description}"


def describe_result(run: Run) -> str:
    """Return the newest evaluation of a run in one line, or why there is no evaluation yet."""
    if not run.config.has_pipeline:
        return describe_commands(run)
    if result := read_newest_result(run):
        return format_result(result)
    return (
        "not evaluated yet"
        if run.config.data.held_out
        else stages.load_stage_module(run, "evaluate").progress(run).description
    )
