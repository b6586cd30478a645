"""Compute the ledger of a run: how each attempt spent its time. `report` prints the ledger.

The input is events.jsonl, metrics.jsonl, and the start and end times of jobs if `sacct` is available. The ledger has
one account for each attempt. An account begins when the account of the previous attempt ends. The first account begins
when the stage was submitted and the stages on which it depends were done. The seconds of all attempts of a stage
therefore add up to its wall time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.stages import Stage
from pipeline.run.events import (
    AttemptEvent,
    Done,
    EndEvent,
    Event,
    LostWork,
    RanksStarted,
    Ready,
    Restored,
    Resumed,
    RetryEvent,
    Saved,
    Started,
    Submitted,
    read_stage_state,
    split_into_attempts,
)

StepLine = Mapping[str, Any]
CATEGORIES = (
    "idle", "queue", "startup", "compute", "data", "communication", "evaluation", "checkpoint", "profiling", "lost",
    "ending",
)  # fmt: skip
"""The categories of the time of an attempt, in order:

    ├ idle ┼─ queue ─┼ startup ┼ compute · data · communication · evaluation · checkpoint · … · lost ┼ ending ┤
    previous   request   job       first step                                             last step     end of the
    end                  starts                                                                         attempt

idle           the stage had ended, and no user had requested to continue it
queue          a user or Sluice had requested the attempt, but its job had not started yet
startup        start of the job → first step: health check, imports, rendezvous, reading the checkpoint
compute        computation of steps that count; for stages without steps, all of their running time
data           waiting for the next batch
communication  communication that does not overlap with computation, if it is measured
evaluation     evaluation on held-out data by the train stage (`train.evaluate_every`)
checkpoint     time that saves block the training loop, and the last save
profiling      the overhead of profiled steps (`train.profile_every`)
lost           steps that were repeated, because no checkpoint contained them
ending         from the last recorded step to the end: exiting, or hanging until the hang was detected
"""
PRODUCTIVE_CATEGORIES = ("compute", "data", "communication", "evaluation")
"""Categories of time that advances the training (see :func:`compute_ratios`)."""
WAITING_CATEGORIES = ("idle", "queue")
"""Categories of time before the job starts."""
_STEP_CATEGORIES = (*PRODUCTIVE_CATEGORIES, "checkpoint", "profiling", "lost")
"""Categories to which the time of steps is assigned."""
_METRIC_OF_CATEGORY = {
    "data": "data_wait_s",
    "communication": "exposed_comm_s",
    "evaluation": "evaluate_s",
    "checkpoint": "checkpoint_s",
    "profiling": "profile_s",
}
"""Category → key of a line of metrics.jsonl with the seconds of this category in a step."""
STEP_TIME_KEYS = ("step", "step_time_s", *_METRIC_OF_CATEGORY.values())
"""Keys of a line of metrics.jsonl that are needed to compute the ledger."""
_REQUESTS = (Submitted, Resumed)
"""Events that request the stage to run."""
_NO_END = "no end recorded"
"""The cause of an attempt without an end event."""


@dataclass(frozen=True)
class JobRun:
    """One run of a Slurm job, as accounting reports it; times in seconds since 1970."""

    job_id: str
    start_time: float
    end_time: float | None
    """None if the job has not ended."""


@dataclass
class AttemptTimes:
    """The account of one attempt of a stage, or of one task of its array: how the attempt spent its time."""

    stage: str
    task: int | None
    number: int
    ranks: int
    start_time: float
    """Seconds since 1970: the end of the previous account."""
    end_time: float = 0.0
    """Seconds since 1970."""
    cause: str = ""
    """`done`, the cause for which the attempt ended, `running`, or `no end recorded`."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    """Seconds by `CATEGORIES`; they add up to `end_time - start_time`."""
    spare_nodes: int = 0
    """The number of nodes of the job that waited to replace a node."""

    @property
    def job_seconds(self) -> float:
        """The seconds in which the attempt had a job."""
        return self.end_time - self.start_time - sum(self.seconds[category] for category in WAITING_CATEGORIES)


def build_ledger(
    events: Sequence[Event],
    metrics: Sequence[StepLine],
    stages: Mapping[str, Stage],
    now: float,
    running: Sequence[str] = (),
    jobs: Sequence[JobRun] = (),
) -> list[AttemptTimes]:
    """Return the accounts of all attempts, in the order of `stages`. Within a stage, they are ordered by array task.

    The attempts of the job after an array follow those of its array tasks.

    Args:
        events: all events of the run.
        metrics: the lines of metrics.jsonl.
        stages: the stages to account, by name.
        now: the current time in seconds since 1970.
        running: the stages that are running now. Their last attempt lasts until `now`.
        jobs: the runs of Slurm jobs, if accounting reports them.
    """
    ledger: list[AttemptTimes] = []
    for stage, definition in stages.items():
        stage_events = [event for event in events if event.stage == stage or isinstance(event, Resumed)]
        ready_times = [
            event.timestamp for event in events if event.stage in definition.depends_on and isinstance(event, Done)
        ]
        # A command may report no steps. Its time then counts as computation.
        has_steps = definition.is_training or (definition.records_metrics and bool(metrics))
        tasks = {event.task for event in stage_events if isinstance(event, Started)}
        for task in sorted(tasks, key=lambda task: math.inf if task is None else task):
            task_events = [event for event in stage_events if not isinstance(event, AttemptEvent) or event.task == task]
            if task is None:  # the job after an array waits for the whole array
                ready_times += [attempt.end_time for attempt in ledger if attempt.stage == stage]
            steps = metrics if has_steps else ()
            ready_time = max(ready_times, default=0.0)
            ledger += _account_attempts(stage, task, task_events, steps, ready_time, jobs, has_steps)
            last = ledger[-1]
            if stage in running and last.cause == _NO_END:
                # without a complete step, the attempt is probably still in its start-up
                last.seconds["compute" if last.seconds["compute"] else "startup"] += max(0.0, now - last.end_time)
                last.end_time = max(now, last.end_time)
                last.cause = "running"
    return ledger


def _account_attempts(
    stage: str,
    task: int | None,
    events: list[Event],
    metrics: Sequence[StepLine],
    ready_time: float,
    jobs: Sequence[JobRun],
    has_steps: bool,
) -> list[AttemptTimes]:
    """Return the accounts of the attempts of a stage, or of one task of its array.

    Args:
        stage: the stage.
        task: the index of the array task; None for a job without an array.
        events: the events of the stage or task, oldest first.
        metrics: the lines of metrics.jsonl; empty for a stage without steps.
        ready_time: when all stages and tasks on which the first attempt depends were done, in seconds since 1970.
        jobs: the runs of Slurm jobs.
        has_steps: whether metrics.jsonl contains the steps of the stage.
    """
    earlier_events, attempts = split_into_attempts(events)
    accounts: list[AttemptTimes] = []
    for attempt_events, (kept_steps, lost_steps) in zip(attempts, _assign_steps(attempts, metrics), strict=True):
        state = read_stage_state(attempt_events)
        start_event = state.start_event
        assert start_event is not None
        attempt_start = start_event.timestamp
        request_times = (event.timestamp for event in earlier_events if isinstance(event, _REQUESTS))
        first_request = next(request_times, attempt_start)
        begin = accounts[-1].end_time if accounts else min(attempt_start, max(first_request, ready_time))
        job = _find_job_run(jobs, start_event, attempt_start)
        job_start = max(begin, min(attempt_start, job.start_time) if job else attempt_start)
        queue_start = min(max(_find_request_time(earlier_events, begin), begin), job_start)
        # without `ready`, the attempt ended before its first step; `restored` is then the end of its start-up
        ready_times = [event.timestamp for event in attempt_events if isinstance(event, Ready)]
        restored_times = [event.timestamp for event in attempt_events if isinstance(event, Restored)]
        first_step_time = next(iter(ready_times or restored_times), None)
        end = state.end_event
        if end is not None and not end.noticed_later:
            possible_ends = [end.timestamp]
        elif job and job.end_time:  # the supervisor died with the job, and accounting has the end time of the job
            possible_ends = [job.end_time]
        else:  # use the last event or step that the attempt recorded
            possible_ends = [
                event.timestamp
                for event in attempt_events
                if not (isinstance(event, EndEvent | RetryEvent) and event.noticed_later)
                and not isinstance(event, _REQUESTS)
            ]
            steps_s = sum(line["step_time_s"] for line in [*kept_steps, *lost_steps])
            possible_ends.append(max(job_start, first_step_time or 0.0) + steps_s)
        account = AttemptTimes(
            stage, task, len(accounts) + 1, start_event.ranks or 1, begin, max(job_start, *possible_ends)
        )
        account.cause = _NO_END if end is None else str(end.cause or end.name)
        account.spare_nodes = max(
            (len(event.spares or ()) for event in attempt_events if isinstance(event, RanksStarted)), default=0
        )
        account.seconds |= {"idle": queue_start - begin, "queue": job_start - queue_start}
        if has_steps and first_step_time is not None:
            first_step_time = min(max(job_start, first_step_time), account.end_time)
            _divide_running_time(account, job_start, first_step_time, kept_steps, lost_steps, attempt_events)
        else:
            account.seconds["startup" if has_steps else "compute"] = account.end_time - job_start
        accounts.append(account)
        earlier_events = attempt_events  # these end with the events between this attempt and the next attempt
    return accounts


def _divide_running_time(
    account: AttemptTimes,
    job_start: float,
    first_step_time: float,
    kept_steps: list[StepLine],
    lost_steps: list[StepLine],
    events: Sequence[Event],
) -> None:
    """Divide the running time of an attempt with steps into categories, in `account.seconds`.

    Args:
        account: the account of the attempt, with its end time.
        job_start: when the job started, in seconds since 1970.
        first_step_time: when the first step began, in seconds since 1970.
        kept_steps: the lines of the steps that count.
        lost_steps: the lines of the steps that were repeated later.
        events: the events of the attempt.
    """
    seconds = account.seconds
    available_s = account.end_time - first_step_time
    seconds["startup"] = first_step_time - job_start
    for line in kept_steps:
        for category, spent_s in split_step_time(line).items():
            seconds[category] += spent_s
    seconds["lost"] = sum(line["step_time_s"] for line in lost_steps)
    steps_s = sum(seconds[name] for name in _STEP_CATEGORIES)
    if steps_s > available_s:  # the steps cannot take longer than the attempt, but the clocks of hosts may differ
        for name in _STEP_CATEGORIES:
            seconds[name] *= available_s / steps_s
        steps_s = available_s
    save_time = max((event.timestamp for event in events if isinstance(event, Saved)), default=0.0)
    last_save_s = min(max(0.0, save_time - (first_step_time + steps_s)), available_s - steps_s)
    seconds["checkpoint"] += last_save_s
    seconds["ending"] = available_s - steps_s - last_save_s


def split_step_time(line: StepLine) -> dict[str, float]:
    """Return the seconds of a step by category. Their sum is the duration of the step."""
    seconds = {"compute": 0.0}
    remaining_s = float(line["step_time_s"])
    for category, key in _METRIC_OF_CATEGORY.items():
        seconds[category] = min(max(0.0, line.get(key) or 0.0), remaining_s)
        remaining_s -= seconds[category]
    return seconds | {"compute": remaining_s}


def _assign_steps(
    attempts: Sequence[list[Event]], metrics: Sequence[StepLine]
) -> list[tuple[list[StepLine], list[StepLine]]]:
    """Return two lists for each attempt: the lines of steps that count, and the lines of steps that were repeated.

    An attempt that restores step s writes lines from s + 1, and moves existing lines after s to its `lost_work` event.
    To find the attempt that wrote a line, search backwards. For a line in a `lost_work` event, the search begins with
    the attempt before the attempt of the event. For a line of metrics.jsonl, it begins with the last attempt. The first
    attempt that began after an earlier step than the step of the line wrote the line.
    """
    steps_by_attempt: list[tuple[list[StepLine], list[StepLine]]] = [([], []) for _ in attempts]
    restored_steps: list[float] = []
    """For each attempt so far, the step after which its training began; infinity if the training did not begin."""

    def add_to_attempt(line: StepLine, is_lost: bool) -> None:
        """Add the line of a step to the attempt that wrote the line."""
        for index in reversed(range(len(restored_steps))):
            if restored_steps[index] < line["step"]:
                kept_steps, lost_steps = steps_by_attempt[index]
                (lost_steps if is_lost else kept_steps).append(line)
                return

    for events in attempts:
        for event in events:
            if isinstance(event, LostWork):
                for lost_line in event.lines:
                    add_to_attempt(lost_line, is_lost=True)
        steps_before_start = [event.step for event in events if isinstance(event, Restored | Ready)]
        restored_steps.append(steps_before_start[-1] if steps_before_start else math.inf)
    for line in metrics:
        add_to_attempt(line, is_lost=False)
    return steps_by_attempt


def _find_request_time(earlier_events: Sequence[Event], begin: float) -> float:
    """Return when a user or Sluice requested the next attempt, in seconds since 1970.

    A retry is requested when the previous account ends. A user requests an attempt by a submission or `resume`.

    Args:
        earlier_events: the events between the start of the previous attempt and the start of the next attempt.
        begin: the end of the previous account, which is also the result if no request is found.
    """
    for event in earlier_events:
        if isinstance(event, RetryEvent):
            return begin
        if isinstance(event, Submitted) and event.is_successor:
            continue
        if isinstance(event, _REQUESTS) and event.timestamp >= begin:
            return event.timestamp
    return begin


def _find_job_run(jobs: Sequence[JobRun], started: Started, start_time: float) -> JobRun | None:
    """Return the run of a Slurm job in which an attempt began; None if accounting does not have it.

    Args:
        jobs: the runs of Slurm jobs.
        started: the start event of the attempt.
        start_time: the time of this event, in seconds since 1970. If the job ran several times, the result is the last
            run that started before this time, with a tolerance of 2 s.
    """
    job_id = started.slurm_job or started.job_id
    possible = [job for job in jobs if job.job_id == job_id and job.start_time <= start_time + 2]
    return max(possible, key=lambda job: job.start_time, default=None)


def sum_categories(attempts: Sequence[AttemptTimes]) -> dict[str, float]:
    """Return the seconds by category, summed over several attempts."""
    return {category: sum(attempt.seconds[category] for attempt in attempts) for category in CATEGORIES}


def compute_ratios(seconds: Mapping[str, float]) -> tuple[float, float]:
    """Return two measures of efficiency, the effective training time ratio (ETTR) and the forward progress.

    Both are from 0 to 1, and 0 if no time has passed.

    The measures follow Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters" (HPCA
    2025, arXiv 2410.21680), section II. Repeated steps and the costs of a restart are unproductive, and so is the first
    start-up. As in the paper's model of the ETTR, the time for writing checkpoints is also unproductive.

    Args:
        seconds: seconds by category.

    Returns:
        The ETTR: productive time divided by the time in jobs and in the queue, without idle time. The forward progress:
        productive time divided by the time in jobs.
    """
    productive = sum(seconds[name] for name in PRODUCTIVE_CATEGORIES)
    scheduled = sum(seconds[name] for name in seconds if name not in WAITING_CATEGORIES)
    available = scheduled + seconds["queue"]
    return (productive / available if available else 0.0), (productive / scheduled if scheduled else 0.0)
