"""`status`: how each stage of a run stands; cli/watch.py shows it live.

What a stage has come to is judged by its outputs together with what Slurm says of its job (`judge`): a job that is
COMPLETED while an output is missing has failed, and so has one that ended before its supervisor began. Where Slurm
says nothing (no accounting, no controller), the run directory tells: events, locks, outputs.

A table that is watched reads the run directory every two seconds, which costs nothing; Slurm is asked when the
directory shows something new, else after 2 s, growing to 30 s while nothing changes.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.base.command import format_command
from pipeline.base.text import format_duration
from pipeline.config.stages import STAGES
from pipeline.evaluate.result import format_result, get_extra_metrics, get_main_metric, read_newest_result
from pipeline.run import attempts, stages
from pipeline.run import lines as known
from pipeline.run import points as sweep
from pipeline.run.attempts import ENDS
from pipeline.run.directory import Run
from pipeline.run.failure import retry_command
from pipeline.run.ledger import event_timestamp
from pipeline.run.machines import LOOKS, gpus_behind
from slurm.query.job_states import NOT_RESPONDING, UNKNOWN, JobState, RecordedJob, find_first_submissions
from slurm.query.last_stop import LastStop, find_last_stop
from slurm.query.run_jobs import (
    SubmittedJob,
    describe_stray_job,
    describe_unproven_jobs,
    find_awaited_job,
    find_run_jobs,
    find_successor,
    uses_slurm,
)
from slurm.query.slurm_messages import JOB_HELD
from slurm.query.stop_causes import is_job_ending

POLL_INTERVAL_S = 2.0
QUERY_INTERVALS_S = (2.0, 30.0)
"""The shortest and the longest time between two questions to Slurm."""
GPU_LOOK_S, _MOST_GPUS = 120.0, 3
"""GPUs are compared by what they did in the last two minutes, or 12 looks; so many are named."""
_LEAST_WANTED = (
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
"""Columns that go where a terminal is narrow, in this order: Slurm's reason stays, and the sum of all hours."""
MAX_IDLE_POLLS = 5
_MORE = r"(?<=units): |; "
"""After so many looks in a row at which nothing ran or waited in the queue it counts as ended: between two stages,
which without Slurm takes seconds on a busy machine, and while a file system shows the outputs late, it may seem so."""


@dataclass(frozen=True)
class StageStatus:
    """One stage in the table."""

    run: Run
    stage: str
    state: str
    """done, running, pending …: a word of Slurm's while its job is active, else how it ended; held: until a person lets
    it go; never: waits in vain."""
    problem: str
    """What is wrong, in words; empty where nothing is."""
    is_active: bool
    """Whether it runs, or waits in the queue for something that can happen."""
    cells: Mapping[str, str]
    """What the table shows besides stage and state, by the names of its columns."""
    slowdowns: str
    """Ranks that keep the others waiting, and GPUs that fall behind, in words."""
    last_stop: LastStop | None = None
    """How it last stopped, if it is not done."""
    missing_jobs: str = ""
    """What of it is not in the queue, while other jobs of the run are, or is there without a record; else empty."""

    @property
    def last_stop_summary(self) -> str:
        """How it last stopped and continues: `requeued after preemption`; "" as for `state_and_stop`."""
        stop = self.last_stop
        if stop is None or self.state == "done" or (self.problem and not self.is_active):
            return ""
        return _join(stop.continues or "stopped", stop.after)

    @property
    def last_stop_sentence(self) -> str:
        """State and last stop: `train pending (Priority), requeued after preemption at step 12 (2 attempts)`; "" if it
        has not stopped, or `why` has more to say."""
        stop = self.last_stop
        if stop is None or not self.last_stop_summary:
            return ""
        if self.is_active:
            reason = f" ({self.cells['reason']})" if self.cells["reason"] else ""
            return _join(f"{self.stage} {self.state}{reason},", self.last_stop_summary, stop.details)
        return _join(self.stage, self.state, "" if stop.cause == self.state else stop.after, stop.details)


def _join(*words: str) -> str:
    return " ".join(filter(None, words))


def determine_state(
    missing: str | None, held: bool, events: Sequence[Mapping[str, Any]], job: JobState | None
) -> tuple[str, str, bool]:
    """State, what is wrong, and whether it goes on, from a stage's outputs, lock, events and newest Slurm job.

    `missing`: why its outputs do not validate. `events`: its own since it was last submitted.
    """
    told = attempts.read(events)
    slurm = "" if job is None or job.state == UNKNOWN else job.state
    name = f"job {job.job_id}" if job else ""
    if missing is None and (not held or told.done):
        return "done", "", False
    if job is not None and job.is_unsatisfiable:
        return "never", f"{name} waits for what cannot happen any more ({job.reason})", False
    if job is not None and job.is_active and (held_by := JOB_HELD.match(job.reason)):
        who = "" if held_by[1] == "User" else ", which takes an administrator"
        return "held", f"until scontrol release {job.job_id} ({job.reason}{who})", True
    if job is not None and job.is_active:
        return slurm.lower(), "", True
    if held:
        return "running", "", True
    if slurm == "COMPLETED" or told.done:
        return "incomplete", f"{f'{name} is COMPLETED' if slurm else 'its supervisor said done'}, but {missing}", False
    if told.end is not None:
        words = f"({told.end.get('cause')}): {str(told.end.get('message', '')).rstrip()}"
        return told.end["event"], words if told.end["event"] == "failed" else "", False
    if slurm == "CANCELLED":
        return "cancelled", "", False
    if job is not None and job.reason == NOT_RESPONDING:
        return "unknown", NOT_RESPONDING, True  # for all we know
    if told.started is not None:
        how = f"{name} is {slurm}: its supervisor left no word" if slurm else "it ended without a word"
        return "died", how, False
    if slurm:
        return "failed", f"{name} is {slurm}: it ended before its supervisor began", False
    if job is not None:
        return "unknown", job.reason or f"Slurm does not know {name}", False
    return "waiting", "", False


class StatusPoller:
    """Looks at a run again and again, and asks Slurm as seldom as will do."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.point_statuses: list[StageStatus] = []
        """For each point of a sweep the first of its stages that is not done, else its last one."""
        self._forgotten: dict[RecordedJob, JobState] = {}
        self._jobs: Sequence[SubmittedJob] = ()
        self._done: dict[tuple[Path, str], StageStatus] = {}
        self._seen: object = None
        self._events, self._pause, self._ask_at = -1, QUERY_INTERVALS_S[0], 0.0

    def poll(self) -> list[StageStatus]:
        """The stages as they stand now, with the config as it is now."""
        if self.run.reload_config():
            self._done.clear()
        events = self.run.read_events()
        if len(events) != self._events or time.monotonic() >= self._ask_at:
            self._events = len(events)
            self._ask_slurm()
        return self.statuses_from(self._jobs)

    def statuses_from(self, jobs: Sequence[SubmittedJob]) -> list[StageStatus]:
        """The stages as they stand by the run directory and by `jobs`; Slurm is not asked."""
        self._jobs = jobs
        rows = self._rows(self.run, stages.own_stages(self.run), {})
        swept = [list(self._rows(point, stages.point_stages(), rows).values()) for point in sweep.points(self.run)]
        own = list(rows.values())
        going = any(row.is_active for each in (own, *swept) for row in each)
        paths = {self.run.path, *(each[0].run.path for each in swept)}
        mine = [job for job in jobs if job.run in paths]
        answers = not any(job.state.reason == NOT_RESPONDING for job in mine)
        if mine and answers and going and not self.run.is_being_submitted:
            swept = [[replace(row, missing_jobs=self._lacking(row)) for row in each] for each in swept]
            own = [replace(row, missing_jobs=self._lacking(row)) for row in own]
        strays = [describe_stray_job(job) for job in mine if job.is_stray and job.state.is_active]
        own[0] = replace(own[0], missing_jobs="; ".join(filter(None, [own[0].missing_jobs, *strays])))
        self.point_statuses = []
        for each in swept:
            first = next((row for row in each if row.state != "done"), each[-1])
            lacking = [f"{row.stage} {row.missing_jobs}" for row in each if row.missing_jobs]
            self.point_statuses.append(replace(first, missing_jobs="; ".join(lacking)))
        return own

    def _lacking(self, row: StageStatus) -> str:
        """What of a stage is not in the queue: all of it, or a part."""
        jobs = [job for job in self._jobs if (job.run, job.stage) == (row.run.path, row.stage)]
        alive = [job for job in jobs if job.state.is_active and not job.is_stray]
        last = find_awaited_job(row.stage, [job for job in alive if job.step is None])
        if row.state == "waiting" or (row.is_active and alive and last is None):
            events = row.run.read_events(row.stage, "submitted", "not_submitted")
            refused = events[-1].get("message") if events and events[-1]["event"] == "not_submitted" else None
            what = "the job that completes it is " if any(job.is_array_of_parts for job in alive) else ""
            return f"{what}not submitted{f': {refused}' if refused else ''}"
        single = self.run.config.sweep is None and not self.run.config.site.requeue
        if STAGES[row.stage].is_training and single and last is not None and find_successor(last, alive) is None:
            return "" if is_job_ending(row.run, row.stage, last.state) else "its successor is not submitted"
        return ""

    @property
    def has_active_point(self) -> bool:
        """Whether any point of a sweep goes on."""
        return any(row.is_active for row in self.point_statuses)

    def _rows(self, run: Run, names: Sequence[str], before: Mapping[str, StageStatus]) -> dict[str, StageStatus]:
        """These stages of a run; `before`: those of the sweep that they wait for."""
        rows: dict[str, StageStatus] = {}
        for stage in names:
            needed = {name: rows.get(name) or before[name] for name in STAGES[stage].depends_on}
            behind = next((name for name in needed if self._is_behind(name, needed[name])), None)
            row = self._done.get((run.path, stage)) or self._row(run, stage, behind)
            vain = [name for name, other in needed.items() if other.state != "done" and not other.is_active]
            if (
                row.is_active and row.cells["reason"] == "Dependency" and vain
            ):  # Slurm says so of the next in a chain only
                why = f"job {row.cells['job']} waits for {', '.join(vain)}"
                row = replace(row, state="never", is_active=False, problem=why)
            if row.state == "done":
                self._done[run.path, stage] = row
            rows[stage] = row
        return rows

    def _ask_slurm(self) -> None:
        runs = (self.run, *sweep.points(self.run))
        self._jobs = find_run_jobs(runs, self._forgotten) if uses_slurm(self.run) else []
        seen = (self._events, self._jobs, self.has_active_point)
        self._pause = min(QUERY_INTERVALS_S[1], 1.5 * self._pause) if seen == self._seen else QUERY_INTERVALS_S[0]
        self._seen, self._ask_at = seen, time.monotonic() + self._pause

    @staticmethod
    def _is_behind(stage: str, row: StageStatus) -> bool:
        """Whether what follows a stage cannot be done yet: the outputs so far may be of an earlier checkpoint."""
        follows_training = STAGES[stage].is_training or any(
            STAGES[name].is_training for name in STAGES[stage].depends_on
        )
        return follows_training and row.state != "done"

    def _row(self, run: Run, stage: str, behind: str | None = None) -> StageStatus:
        """The row of a stage. `behind`: a stage before it that has checkpoints still to come."""
        work, events = stages.load(stage), run.read_events(stage)
        missing = getattr(work, "missing_at_a_glance", work.missing)(run)
        holder, far = run.lock_holder(stage), work.progress(run)
        jobs = [job for job in self._jobs if (job.run, job.stage) == (run.path, stage) and not job.is_stray]
        jobs = [job for job in jobs if job.job_id or job.state.reason]  # no job of an open submission is no job
        shown = _shown(jobs)
        job = shown.state if shown else None
        since = max(find_first_submissions(events), default=-1)
        state, why, going = determine_state(missing, holder is not None, events[since + 1 :], job)
        if state == "done" and behind:
            state, why, going = _judge_so_far(run, holder is not None, events[since + 1 :], job)
        if shown is not None and state == "failed" and not any((run.jobs_dir / stage).glob(f"{shown.job_id}*_log.out")):
            nodes = format_command("doctor", str(run.path.parent), "--check-nodes")
            why += f" and left no log: do nodes see the run? {nodes}"
        if state == "waiting" and (lacks := getattr(work, "lacks", None)):
            why = lacks(run) or ""
        if state == "waiting" and run.cancelled_file.exists():
            state = "cancelled"  # before it began
        active, running = job if going else None, state == "running"
        spent = sum(e.get("seconds") or 0.0 for e in events if e["event"] in ENDS)
        told = attempts.read(events)
        if running and told.started is not None and told.end is None:
            spent += time.time() - event_timestamp(told.started)
        starts = Counter(e.get("task") for e in events if e["event"] == "started")
        cells = {
            "job": shown.job_id if shown else "",
            "reason": active.reason if active and active.state == "PENDING" else "",
            "nodes": (active.nodes if active else "") or (holder.host if holder else ""),
            # in short: the whole words stand where a stage ends (slurm/submit/local_runner.py), and in the report
            "step": f"{far.done}/{far.total}" if STAGES[stage].is_training else re.split(_MORE, far.words)[0],
            "loss": far.loss,
            "ETA": format_duration(far.left_s) if running and far.left_s is not None else "",
            "attempts": str(max(starts.values(), default=0)),
            "time": format_duration(spent),
        }
        why = why or ("" if state == "done" else "; ".join(describe_unproven_jobs(jobs)))
        slow = _slow(run, told.started, events) if running else ""
        waits = job.job_id if job and job.is_active and job.state == "PENDING" else None
        last = find_last_stop(events, waits) if state != "done" else None
        return StageStatus(run, stage, state, why, going, cells, slow, last)


def _judge_so_far(
    run: Run, held: bool, events: Sequence[Mapping[str, Any]], job: JobState | None
) -> tuple[str, str, bool]:
    """Like `judge`, for a stage that is done as far as the training has come: the training itself is not done."""
    if held or (job is not None and (job.is_active or job.is_unsatisfiable)):
        return determine_state("the training is not done", held, events, job)
    cancelled = (job is not None and job.state == "CANCELLED") or attempts.read(events).asked == "cancelled"
    return "cancelled" if cancelled or run.cancelled_file.exists() else "waiting", "", False


def _shown(jobs: Sequence[SubmittedJob]) -> SubmittedJob | None:
    """Which of a stage's jobs to show: one that runs, the first that may, one that waits in vain, the last."""
    active = [job for job in jobs if job.state.is_active]
    running = [job for job in active if job.state.state != "PENDING"]
    dead = [job for job in jobs if job.state.is_unsatisfiable]
    return next(iter([*running, *active, *dead, *reversed(jobs)]), None)


def _slow(run: Run, started: Mapping[str, Any] | None, events: Iterable[Mapping[str, Any]]) -> str:
    """Ranks and GPUs that fall behind now, in an attempt that runs."""
    ranks = [
        f"rank {e['rank']} on {e['host']} takes {e['ratio']} × the time of its peers"
        for e in find_current_stragglers(events)
    ]
    every_s = run.config.track.telemetry_s or GPU_LOOK_S / LOOKS
    span_s = max(GPU_LOOK_S, LOOKS * every_s)
    begin = max(event_timestamp(started) if started else 0.0, time.time() - span_s)
    gpus = gpus_behind(run.path, begin, looks=math.ceil(span_s / every_s))
    more = [f"and {len(gpus) - _MOST_GPUS} more GPUs"] if len(gpus) > _MOST_GPUS else []
    return "; ".join([*ranks, *gpus[:_MOST_GPUS], *more])


def find_current_stragglers(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of the last attempt (pipeline/resilience/stragglers.py) that have not recovered, slowest first."""
    slow: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["event"] == "started":
            slow.clear()
        elif event["event"] == "straggler":
            slow[event["rank"]] = event
        elif event["event"] == "recovered":
            slow.pop(event["rank"], None)
    return sorted(slow.values(), key=lambda event: -float(event["ratio"]))


def build_table(cells: Sequence[Sequence[str]], width: int | None = None) -> Table:
    """Cells, the first row being the header, as a table for the terminal; columns of numbers end at the right.

    What does not fit into `width` is left out, the least wanted column first; what then does not fit is not cut: print
    with `soft_wrap`, and the terminal wraps the lines.
    """
    columns = {column[0]: column for column in zip(*cells, strict=True)}

    def needed() -> int:
        return sum(max(map(cell_len, column)) + 2 for column in columns.values()) - 2

    for name in _LEAST_WANTED:
        if width is None or needed() <= width:
            break
        columns.pop(name, None)
    drawn = Table(box=None, pad_edge=False, header_style="bold", width=needed())
    for name, *column in columns.values():
        drawn.add_column(name, justify="right" if re.fullmatch(r"[-\d.,:/·]*", "".join(column)) else "left")
    for row in [*zip(*columns.values(), strict=True)][1:]:
        drawn.add_row(*map(Text, row))
    return drawn


def tabulate_points(run: Run, rows: Sequence[StageStatus]) -> list[list[str]]:
    """The points of a sweep, header first: their values, how they stand, and what they came to; the best one first.

    `rows`: one for each point (`StatusPoller.point_statuses`). Empty where the run is no sweep.
    """
    if run.config.sweep is None:
        return []
    values_of, found = run.config.sweep.points(), []
    for row, values in zip(rows, values_of, strict=True):
        far, result = stages.load("train").progress(row.run), read_newest_result(row.run)
        came_to = get_main_metric(result)[1] if result else math.inf
        state = row.state if row.state in ("done", "waiting") else f"{row.stage} {row.state}"
        cells = [*map(str, values.values()), state, f"{far.done}/{far.total}", far.loss or "-"]
        cells.append("-" if result is None else f"{came_to:.4f}")
        found.append((came_to, [row.run.path.name, *cells], get_extra_metrics(result or {})))
    compared = "bits per byte" if run.config.model.target is None else "held-out loss"
    found.sort(key=lambda one: one[0])
    names = list(found[0][2])  # of the best one: where that was not evaluated, none was
    table = [["point", *values_of[0], "state", "steps", "loss", compared, *names]]
    table += (
        [*cells, *(f"{measured[n]:.4f}" if n in measured else "-" for n in names)] for _, cells, measured in found
    )
    return table


def describe_failures(rows: Sequence[StageStatus]) -> list[str]:
    """What is wrong with the points of a sweep, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.problem:
            reasons.setdefault(f"{row.stage} {row.state} {row.problem}", []).append(row.run.path.name)
    return [f"point{'s'[: len(names) - 1]} {', '.join(names)}: {why}" for why, names in reasons.items()]


def describe_point_stops(rows: Sequence[StageStatus]) -> list[str]:
    """How the points of a sweep last stopped, each way once."""
    ways: dict[str, list[str]] = {}
    for row in rows:
        if row.last_stop_summary:
            ways.setdefault(f"{row.stage} {row.state}, {row.last_stop_summary}", []).append(row.run.path.name)
    return [f"point{'s'[: len(names) - 1]} {', '.join(names)}: {words}" for words, names in ways.items()]


def describe_missing_jobs(run: Run, rows: Sequence[StageStatus], of_points: Sequence[StageStatus]) -> list[str]:
    """What of the chain is not in the queue, or not as it should be, and the command that mends it."""
    found = [f"{row.stage}: {row.missing_jobs}" for row in rows if row.missing_jobs]
    by_reason: dict[str, list[str]] = {}
    for row in of_points:
        if row.missing_jobs:
            by_reason.setdefault(row.missing_jobs, []).append(row.run.path.name)
    found += [f"point{'s'[: len(names) - 1]} {', '.join(names)}: {lacking}" for lacking, names in by_reason.items()]
    return [*found, f"to complete the chain: {run.resume_command}"] if found else []


def render_status(
    run: Run, rows: Sequence[StageStatus], of_points: Sequence[StageStatus] = (), width: int | None = None
) -> Group:
    """The table, what is wrong, and how to go on; columns that are empty everywhere are left out, or do not fit."""
    used = [name for name in rows[0].cells if any(row.cells[name] for row in rows)]
    cells = [["stage", "state", *used], *([row.stage, row.state, *(row.cells[name] for name in used)] for row in rows)]
    lines = [Text(f"{row.stage} {row.state} {row.problem}", style="red") for row in rows if row.problem]
    lines += [Text(words, style="red") for words in describe_failures(of_points)]
    lines += [
        Text(words) for words in [*(row.last_stop_sentence for row in rows), *describe_point_stops(of_points)] if words
    ]
    lines += [Text(f"{row.stage}: {row.slowdowns}", style="yellow") for row in rows if row.slowdowns]
    lines += [Text(words, style="yellow") for words in describe_missing_jobs(run, rows, of_points)]
    everything = [*rows, *of_points]
    if not any(row.is_active for row in everything) and any(row.state != "done" for row in everything):
        failed = [row for row in everything if row.state == "failed"]
        cause, message = (failed[0].problem[1:].partition(")")[0], failed[0].problem) if failed else (None, "")
        lines.append(Text(f"to go on: {retry_command(run, cause, message)}"))
    lines += [Text(words) for words in (run.describe_changes(),) if words]
    if words := known.odd(run.events_file, known.event):
        lines.append(Text(words, style="yellow"))
    points = tabulate_points(run, of_points)
    return Group(Text(run.title), build_table(cells, width), *lines, *([build_table(points, width)] if points else []))


def print_status(run: Run, console: Console) -> None:
    """How the run stands now."""
    poller = StatusPoller(run)
    console.print(render_status(run, poller.poll(), poller.point_statuses, console.width), soft_wrap=True)


def describe_outcome(run: Run) -> RenderableType:
    """Return the newest evaluation of a run; for a sweep, its failures and the table of its points."""
    if run.config.sweep is not None:
        poller = StatusPoller(run)
        poller.poll()
        statuses = poller.point_statuses
        return Group(*describe_failures(statuses), build_table(tabulate_points(run, statuses)))
    return describe_result(run)


def describe_result(run: Run) -> str:
    """Return the newest evaluation in one line, or why there is none yet."""
    if result := read_newest_result(run):
        return format_result(result)
    return "not evaluated yet" if run.config.data.held_out else stages.load("evaluate").progress(run).words
