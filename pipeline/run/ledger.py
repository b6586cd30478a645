"""The ledger: where the hours of a run went, attempt by attempt. Arithmetic only; tracking/report.py shows it.

Everything comes from events.jsonl and metrics.jsonl, and from `sacct` where there is one (when Slurm really started
and ended a job). An attempt's account begins where that of the attempt before it ended; for the first one, when
the stage was submitted and its parents were done. So the parts of all attempts add up to the stage's wall time:

    ├ idle ┼─ queue ─┼ startup ┼ compute · data · communication · evaluation · checkpoint · … · lost ┼ ending ┤
    end of    somebody   the job    the loop begins                          last step     end of this one
    the last  wants it   starts

idle           nobody had asked for the stage to go on
queue          asked for, and waiting: for nodes, or for the delay after a requeue
startup        start of the job → first step: health check, imports, rendezvous, reading the checkpoint
compute        steps that count; for stages without steps all of their running time
data           waiting for the next batch; `communication`: that which no computing hides, where it is measured
evaluation     looking at held-out data in the training (`train.evaluate_every`)
checkpoint     what a save keeps the loop waiting, with the last save
profiling      what profiled steps (`train.profile_every`) took beside themselves
lost           steps that were done again, because no checkpoint held them
ending         from the last recorded step to the end: leaving, or hanging until somebody noticed

Two figures sum it up, after Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters"
(HPCA 2025, arXiv 2410.21680, the metrics of section II): the *effective training time ratio* is productive
runtime over available wall-clock time, which is time scheduled or waiting in the queue (idle time is neither).
Unproductive is work that is done again and what a restart costs; the paper's model of the ETTR also counts writing
checkpoints. *Forward progress* is productive runtime over scheduled time: the same without the queue. The very
first start-up counts as unproductive, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from pipeline.config.stages import STAGES
from pipeline.run import attempts
from pipeline.run.attempts import GOES_ON

Event = Mapping[str, Any]
CATEGORIES = (
    "idle", "queue", "startup", "compute", "data", "communication", "evaluation", "checkpoint", "profiling", "lost",
    "ending",
)  # fmt: skip
PRODUCTIVE_CATEGORIES = ("compute", "data", "communication", "evaluation")
WAITING_CATEGORIES = ("idle", "queue")
_STEPS = (*PRODUCTIVE_CATEGORIES, "checkpoint", "profiling", "lost")
_IN_STEP = {
    "data": "data_wait_s", "communication": "exposed_comm_s", "evaluation": "evaluate_s",
    "checkpoint": "checkpoint_s", "profiling": "profile_s",
}  # fmt: skip
STEP_TIME_KEYS = ("step", "step_time_s", *_IN_STEP.values())
"""What the ledger asks of the line of a step."""
_ASKS = ("submitted", "resumed")
_SILENT = "no word of its end"


@dataclass(frozen=True)
class JobRun:
    """One run of a Slurm job, as accounting knows it; times in seconds since 1970."""

    job_id: str
    start_time: float
    end_time: float | None


@dataclass
class AttemptTimes:
    """One attempt of a stage (of one task of an array); all times in seconds, `begin` and `end` since 1970."""

    stage: str
    task: int | None
    number: int
    ranks: int
    start_time: float
    """Where the account before it ended."""
    end_time: float = 0.0
    cause: str = ""
    """How it ended: done, or the cause."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    """Seconds by the names in `PARTS`; they add up to `end - begin`."""


def event_timestamp(event: Event) -> float:
    """An event's time, in seconds since 1970."""
    return datetime.fromisoformat(event["time"]).timestamp()


def build_ledger(
    events: Sequence[Event],
    metrics: Sequence[Event],
    stages: Sequence[str],
    now: float,
    going: Sequence[str] = (),
    jobs: Sequence[JobRun] = (),
) -> list[AttemptTimes]:
    """The attempts of these stages, in this order, tasks one by one.

    `going`: the stages that run at this moment; their last attempt lasts until `now`.
    """
    found: list[AttemptTimes] = []
    for stage in stages:
        row = STAGES[stage]
        own = [e for e in events if e.get("stage") == stage or e["event"] == "resumed"]
        since = [event_timestamp(e) for e in events if e.get("stage") in row.depends_on and e["event"] == "done"]
        tasks = {e.get("task") for e in own if e["event"] == "started"}
        for task in sorted(tasks, key=lambda t: math.inf if t is None else t):
            mine = [e for e in own if "task" not in e or e["task"] == task]
            if task is None:  # the job behind an array waits for all of it
                since += [attempt.end_time for attempt in found if attempt.stage == stage]
            found += _attempts(stage, task, mine, metrics if row.is_training else (), max(since, default=0.0), jobs)
            last = found[-1]
            if stage in going and last.cause == _SILENT:
                last.seconds["compute" if last.seconds["compute"] else "startup"] += max(0.0, now - last.end_time)
                last.end_time, last.cause = max(now, last.end_time), "running"
    return found


def _attempts(
    stage: str, task: int | None, events: list[Event], metrics: Sequence[Event], ready_at: float, jobs: Sequence[JobRun]
) -> list[AttemptTimes]:
    """The attempts of a task; `ready_at`: when what it waits for was done."""
    chunks: list[list[Event]] = [[]]  # what came before the first attempt, then what each one began with and said
    for event in events:
        if event["event"] == "started":
            chunks.append([])
        chunks[-1].append(event)
    found: list[AttemptTimes] = []
    for (before, own), (kept, lost) in zip(pairwise(chunks), _steps_of(chunks[1:], metrics), strict=True):
        told = event_timestamp(own[0])
        asked = next((event_timestamp(e) for e in before if e["event"] in _ASKS), told)
        begin = found[-1].end_time if found else min(told, max(asked, ready_at))
        job = _job_run(jobs, own[0], told)
        start = max(begin, min(told, job.start_time) if job else told)
        asked_at = min(max(_asked(before, begin), begin), start)
        ready = next((event_timestamp(e) for name in ("ready", "restored") for e in own if e["event"] == name), None)
        end = attempts.read(own).end
        if end is not None and not end.get("noticed_later"):
            ends = [event_timestamp(end)]
        elif job and job.end_time:  # its supervisor died with it: Slurm's word
            ends = [job.end_time]
        else:  # the last sign of life
            ends = [event_timestamp(e) for e in own if not e.get("noticed_later") and e["event"] not in _ASKS]
            ends.append(max(start, ready or 0.0) + sum(line["step_time_s"] for line in [*kept, *lost]))
        attempt = AttemptTimes(stage, task, len(found) + 1, own[0].get("ranks") or 1, begin, max(start, *ends))
        attempt.cause = _SILENT if end is None else str(end.get("cause", end["event"]))
        attempt.seconds |= {"idle": asked_at - begin, "queue": start - asked_at}
        if STAGES[stage].is_training and ready is not None:
            _divide(attempt, start, min(max(start, ready), attempt.end_time), kept, lost, own)
        else:
            attempt.seconds["startup" if STAGES[stage].is_training else "compute"] = attempt.end_time - start
        found.append(attempt)
    return found


def _divide(
    attempt: AttemptTimes, start: float, ready: float, kept: list[Event], lost: list[Event], own: Sequence[Event]
) -> None:
    """Divide the running time of an attempt with steps."""
    parts, left = attempt.seconds, attempt.end_time - ready
    parts["startup"] = ready - start
    for line in kept:
        for part, spent in split_step_time(line).items():
            parts[part] += spent
    parts["lost"] = sum(line["step_time_s"] for line in lost)
    known = sum(parts[name] for name in _STEPS)
    if known > left:  # clocks of several hosts: what the steps took cannot be more than there was
        for name in _STEPS:
            parts[name] *= left / known
        known = left
    saved = max((event_timestamp(e) for e in own if e["event"] == "saved"), default=0.0)
    last_save = min(max(0.0, saved - (ready + known)), left - known)
    parts["checkpoint"] += last_save
    parts["ending"] = left - known - last_save


def split_step_time(line: Event) -> dict[str, float]:
    """Where the seconds of a step went, by part; they add up to its time."""
    parts, rest = {"compute": 0.0}, float(line["step_time_s"])
    for part, key in _IN_STEP.items():
        parts[part] = min(max(0.0, line.get(key) or 0.0), rest)
        rest -= parts[part]
    return parts | {"compute": rest}


def _steps_of(chunks: Sequence[list[Event]], metrics: Sequence[Event]) -> list[tuple[list[Event], list[Event]]]:
    """For each attempt the metric lines of its steps: those that count, and those that were done again.

    An attempt that restores step s writes lines from s + 1; lines beyond s of those before it were moved to its
    `lost_work` event. So a line belongs to the newest attempt that began before its step.
    """
    steps: list[tuple[list[Event], list[Event]]] = [([], []) for _ in chunks]
    began: list[float] = []

    def give(line: Event, again: bool) -> None:
        made_by = next((n for n in reversed(range(len(began))) if began[n] < line["step"]), None)
        if made_by is not None:
            steps[made_by][again].append(line)

    for chunk in chunks:
        for line in (line for event in chunk if event["event"] == "lost_work" for line in event["lines"]):
            give(line, True)
        firsts = [event["step"] for event in chunk if event["event"] in ("restored", "ready")]
        began.append(firsts[-1] if firsts else math.inf)
    for line in metrics:
        give(line, False)
    return steps


def _asked(before: Sequence[Event], begin: float) -> float:
    """When somebody, or the stage itself, asked for the next attempt."""
    for event in before:
        if event["event"] in GOES_ON:
            return begin
        if event["event"] in _ASKS and event.get("kind") != "afternotok" and event_timestamp(event) >= begin:
            return event_timestamp(event)
    return begin


def _job_run(jobs: Sequence[JobRun], started: Event, start: float) -> JobRun | None:
    """The run of its Slurm job that an attempt began in: the last one that had started by then.

    One supervisor may make several attempts in one run of a job; then only the first began with it.
    """
    job_id = started.get("slurm_job") or started.get("job_id")
    fitting = [job for job in jobs if job.job_id == job_id and job.start_time <= start + 2]
    return max(fitting, key=lambda job: job.start_time, default=None)


def sum_categories(attempts: Sequence[AttemptTimes]) -> dict[str, float]:
    """Seconds by part, over several attempts."""
    return {part: sum(attempt.seconds[part] for attempt in attempts) for part in CATEGORIES}


def compute_ratios(parts: Mapping[str, float]) -> tuple[float, float]:
    """Effective training time ratio and forward progress, each from 0 to 1 (0 where no time has passed)."""
    productive = sum(parts[name] for name in PRODUCTIVE_CATEGORIES)
    scheduled = sum(spent for name, spent in parts.items() if name not in WAITING_CATEGORIES)
    available = scheduled + parts["queue"]
    return (productive / available if available else 0.0), (productive / scheduled if scheduled else 0.0)
