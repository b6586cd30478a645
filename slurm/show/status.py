"""`status`: how each stage of a run stands, once or as a live table.

What a stage has come to is judged by its outputs together with what Slurm says of its job (`judge`): a job that is
COMPLETED while an output is missing has failed, and so has one that ended before its supervisor began. Where Slurm
says nothing (no accounting, no controller), the run directory tells: events, locks, outputs.

A table that is watched reads the run directory every two seconds, which costs nothing; Slurm is asked when the
directory shows something new, else after 2 s, growing to 30 s while nothing changes.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.config.stages import STAGES
from pipeline.run import lines as known
from pipeline.run import points as sweep
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query import attempts
from slurm.query.attempts import ENDS
from slurm.query.jobs import Submitted, jobs_of, unproven, uses_slurm
from slurm.query.states import FORGOTTEN, SILENT, Claim, JobState
from slurm.show.follow import clock
from slurm.show.ledger import seconds
from slurm.show.sweep_table import point_table

LOOK_S = 2.0
PAUSE_S = (2.0, 30.0)
"""The shortest and the longest time between two questions to Slurm."""
IDLE_LOOKS = 2
"""After so many looks in a row at which nothing ran or waited in the queue it counts as ended: between two stages,
and while a file system shows the outputs late, it may seem so for a moment."""


@dataclass(frozen=True)
class Row:
    """One stage in the table."""

    stage: str
    state: str
    """done, running, pending …: a word of Slurm's while its job is active, else how it ended; never: waits in vain."""
    why: str
    """What is wrong, in words; empty where nothing is."""
    going: bool
    """Whether it runs, or waits in the queue for something that can happen."""
    cells: Mapping[str, str]
    """What the table shows besides stage and state, by the names of its columns."""
    slow: str
    """Ranks that keep the others waiting, in words."""


def judge(
    missing: str | None, held: bool, events: Sequence[Mapping[str, Any]], job: JobState | None
) -> tuple[str, str, bool]:
    """State, what is wrong, and whether it goes on, from a stage's outputs, lock, events and newest Slurm job.

    `missing`: why its outputs do not validate. `events`: its own since it was last submitted.
    """
    told = attempts.read(events)
    slurm = "" if job is None or job.state == FORGOTTEN else job.state
    name = f"job {job.job_id}" if job else ""
    if missing is None and (not held or told.done):
        return "done", "", False
    if job is not None and job.dead:
        return "never", f"{name} waits for what cannot happen any more ({job.reason})", False
    if job is not None and job.active:
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
    if job is not None and job.reason == SILENT:
        return "unknown", SILENT, True  # for all we know
    if told.started is not None:
        how = f"{name} is {slurm}: its supervisor left no word" if slurm else "it ended without a word"
        return "died", how, False
    if slurm:
        return "failed", f"{name} is {slurm}: it ended before its supervisor began", False
    if job is not None:
        return "unknown", job.reason or f"Slurm does not know {name}", False
    return "waiting", "", False


class Lookout:
    """Looks at a run again and again, and asks Slurm as seldom as will do."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.points_going = False
        """Whether any point of a sweep goes on, when Slurm was last asked."""
        self._forgotten: dict[Claim, JobState] = {}
        self._jobs: list[Submitted] = []
        self._done: dict[str, Row] = {}
        self._seen: object = None
        self._events, self._pause, self._ask_at = -1, PAUSE_S[0], 0.0

    def look(self) -> list[Row]:
        """The stages as they stand now."""
        events = self.run.read_events()
        if len(events) != self._events or time.monotonic() >= self._ask_at:
            self._events = len(events)
            self._ask_slurm()
        rows: dict[str, Row] = {}
        for stage in stages.own_stages(self.run):
            row = self._done.get(stage) or self._row(stage, [e for e in events if e.get("stage") == stage])
            vain = [name for name in STAGES[stage].needs if rows[name].state != "done" and not rows[name].going]
            if row.going and row.cells["reason"] == "Dependency" and vain:  # Slurm says so of the next in a chain only
                why = f"job {row.cells['job']} waits for {', '.join(vain)}"
                row = replace(row, state="never", going=False, why=why)
            if row.state == "done":
                self._done[stage] = row
            rows[stage] = row
        return list(rows.values())

    def _ask_slurm(self) -> None:
        points = sweep.points(self.run)
        self._jobs = jobs_of((self.run, *points), self._forgotten) if uses_slurm(self.run) else []
        self.points_going = bool(points) and (
            any(STAGES[job.stage].per_point and job.state.active for job in self._jobs)
            or any(point.holder(stage) for point in points for stage in stages.point_stages())
        )
        seen = (self._events, self._jobs, self.points_going)
        self._pause = min(PAUSE_S[1], 1.5 * self._pause) if seen == self._seen else PAUSE_S[0]
        self._seen, self._ask_at = seen, time.monotonic() + self._pause

    def _row(self, stage: str, events: Sequence[Mapping[str, Any]]) -> Row:
        run, work = self.run, stages.load(stage)
        holder, missing, far = run.holder(stage), work.missing(run), work.progress(run)
        jobs = [job for job in self._jobs if job.stage == stage]
        shown = _shown(jobs)
        job = shown.state if shown else None
        since = max((i for i, e in enumerate(events) if e["event"] == "submitted"), default=-1)
        state, why, going = judge(missing, holder is not None, events[since + 1 :], job)
        if state == "waiting" and run.cancelled_file.exists():
            state = "cancelled"  # before it began
        active, running = job if going else None, state == "running"
        spent = sum(e.get("seconds") or 0.0 for e in events if e["event"] in ENDS)
        told = attempts.read(events)
        if running and told.started is not None and told.end is None:
            spent += time.time() - seconds(told.started)
        starts = Counter(e.get("task") for e in events if e["event"] == "started")
        cells = {
            "job": shown.job_id if shown else "",
            "reason": active.reason if active and active.state == "PENDING" else "",
            "nodes": (active.nodes if active else "") or (holder.host if holder else ""),
            "step": f"{far.done}/{far.total}" if STAGES[stage].trains else far.words,
            "loss": far.loss,
            "ETA": clock(far.left_s) if running and far.left_s is not None else "",
            "attempts": str(max(starts.values(), default=0)),
            "time": clock(spent),
        }
        why = why or ("" if state == "done" else "; ".join(unproven(jobs)))
        return Row(stage, state, why, going, cells, slow_ranks(events) if running else "")


def _shown(jobs: Sequence[Submitted]) -> Submitted | None:
    """Which of a stage's jobs to show: one that runs, the first that may, one that waits in vain, the last."""
    active = [job for job in jobs if job.state.active]
    running = [job for job in active if job.state.state != "PENDING"]
    dead = [job for job in jobs if job.state.dead]
    return next(iter([*running, *active, *dead, *reversed(jobs)]), None)


def slow_ranks(events: Iterable[Mapping[str, Any]]) -> str:
    """The stragglers of the last attempt (pipeline/resilience/stragglers.py) that have not recovered, slowest first."""
    slow: dict[int, Mapping[str, Any]] = {}
    for event in events:
        if event["event"] == "started":
            slow.clear()
        elif event["event"] == "straggler":
            slow[event["rank"]] = event
        elif event["event"] == "recovered":
            slow.pop(event["rank"], None)
    worst = sorted(slow.values(), key=lambda event: -float(event["ratio"]))
    return ", ".join(f"rank {e['rank']} on {e['host']} takes {e['ratio']} × the time of its peers" for e in worst)


def grid(cells: Sequence[Sequence[str]]) -> Table:
    """Cells, the first row being the header, as a table for the terminal; columns of numbers end at the right."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for name, *column in zip(*cells, strict=True):
        drawn.add_column(name, justify="right" if re.fullmatch(r"[-\d.,:/·]*", "".join(column)) else "left")
    for row in cells[1:]:
        drawn.add_row(*map(Text, row))
    return drawn


def table(run: Run, rows: Sequence[Row], points_going: bool = False) -> Group:
    """The table, what is wrong, and how to go on; columns that are empty everywhere are left out."""
    used = [name for name in rows[0].cells if any(row.cells[name] for row in rows)]
    cells = [["stage", "state", *used], *([row.stage, row.state, *(row.cells[name] for name in used)] for row in rows)]
    lines = [Text(f"{row.stage} {row.state} {row.why}", style="red") for row in rows if row.why]
    lines += [Text(f"{row.stage}: {row.slow}", style="yellow") for row in rows if row.slow]
    if not points_going and not any(row.going for row in rows) and any(row.state != "done" for row in rows):
        lines.append(Text(f"to go on: {run.resume_command}"))
    if words := known.odd(run.events, known.event):
        lines.append(Text(words, style="yellow"))
    points = point_table(run)
    return Group(Text(run.title), grid(cells), *lines, *([grid(points)] if points else []))


def print_status(run: Run, console: Console) -> None:
    """How the run stands now."""
    lookout = Lookout(run)
    console.print(table(run, lookout.look(), lookout.points_going), soft_wrap=True)


def watch(run: Run, console: Console) -> None:
    """A live table, until the run is done or nothing of it runs or waits any more; Ctrl-C only stops watching."""
    lookout, idle = Lookout(run), 0
    with Live(console=console, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        while idle < IDLE_LOOKS:
            rows = lookout.look()
            live.update(table(run, rows, lookout.points_going), refresh=True)
            if all(row.state == "done" for row in rows) and run.config.sweep is None:
                return
            idle = 0 if lookout.points_going or any(row.going for row in rows) else idle + 1
            time.sleep(LOOK_S)
