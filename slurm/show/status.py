"""`status`: how each stage of a run stands, once or as a live table.

What a stage has come to is judged by its outputs together with what Slurm says of its job (`judge`): a job that is
COMPLETED while an output is missing has failed, and so has one that ended before its supervisor began. Where Slurm
says nothing (no accounting, no controller), the run directory tells: events, locks, outputs.

A table that is watched reads the run directory every two seconds, which costs nothing; Slurm is asked when the
directory shows something new, else after 2 s, growing to 30 s while nothing changes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.config.stages import STAGES
from pipeline.run import points as sweep
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query import attempts
from slurm.query.attempts import ENDS
from slurm.query.jobs import Submitted, jobs_of, unproven, uses_slurm
from slurm.query.states import FORGOTTEN, Claim, JobState
from slurm.show.follow import clock
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
    why: str = ""
    """What is wrong, in words; empty where nothing is."""
    job: str = ""
    nodes: str = ""
    reason: str = ""
    """Slurm's reason for a pending job."""
    step: str = ""
    loss: str = ""
    eta: str = ""
    attempts: int = 0
    seconds: float = 0.0
    """How long it has run, over all attempts."""
    going: bool = False
    """Whether it runs, or waits in the queue for something that can happen."""
    slow: str = ""
    """Ranks that keep the others waiting, in words."""


def judge(
    missing: str | None, held: bool, events: Sequence[Mapping[str, Any]], job: JobState | None
) -> tuple[str, str, bool]:
    """State, what is wrong, and whether it goes on, from a stage's outputs, lock, events and newest Slurm job.

    `missing`: why its outputs do not validate. `events`: its own since it was last submitted.
    """
    told = attempts.read(events)
    end = told.end
    if missing is None and (not held or told.done):
        return "done", "", False
    if job is not None and job.dead:
        return "never", f"job {job.job_id} waits for what cannot happen any more ({job.reason})", False
    if job is not None and job.active:
        return job.state.lower(), "", True
    if held:
        return "running", "", True
    slurm = "" if job is None or job.state == FORGOTTEN else job.state
    if slurm == "COMPLETED" or told.done:
        who = f"job {job.job_id} is COMPLETED" if job is not None and slurm else "its supervisor said done"
        return "incomplete", f"{who}, but {missing}", False
    if end is not None:
        words = f"({end.get('cause')}): {str(end.get('message', '')).rstrip()}"
        return str(end["event"]), words if end["event"] == "failed" else "", False
    began = told.started is not None
    if job is not None and slurm:
        word = "cancelled" if slurm == "CANCELLED" else "died" if began else "failed"
        how = "its supervisor left no word" if began else "it ended before its supervisor began"
        return word, "" if word == "cancelled" else f"job {job.job_id} is {slurm}: {how}", False
    if began:
        return "died", "it ended without a word", False
    if job is not None:
        return "unknown", job.reason or f"Slurm does not know job {job.job_id}", False
    return "waiting", "", False


class Lookout:
    """Looks at a run again and again, and asks Slurm as seldom as will do."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._forgotten: dict[Claim, JobState] = {}
        self._jobs: list[Submitted] = []
        self._done: dict[str, Row] = {}
        self.points_going = False
        """Whether any point of a sweep goes on, when Slurm was last asked."""
        self._seen: object = None
        self._pause, self._ask_at, self._size = PAUSE_S[0], 0.0, -1

    def look(self) -> list[Row]:
        """The stages as they stand now."""
        self._ask_slurm()
        rows: dict[str, Row] = {}
        for stage in stages.own_stages(self.run):
            row = self._row(stage)
            vain = [name for name in STAGES[stage].needs if rows[name].state != "done" and not rows[name].going]
            if row.going and row.reason == "Dependency" and vain:  # Slurm says so of the next job in a chain only
                row = replace(row, state="never", going=False, why=f"job {row.job} waits for {', '.join(vain)}")
            rows[stage] = row
        return list(rows.values())

    def _ask_slurm(self) -> None:
        now, size = time.monotonic(), self.run.events.stat().st_size if self.run.events.exists() else 0
        if now < self._ask_at and size == self._size:
            return
        points = sweep.points(self.run)
        self._jobs = jobs_of((self.run, *points), self._forgotten) if uses_slurm(self.run) else []
        self.points_going = bool(points) and (
            any(STAGES[job.stage].per_point and job.state.active for job in self._jobs)
            or any(point.holder(stage) for point in points for stage in stages.point_stages())
        )
        seen = (size, self._jobs, self.points_going)
        self._pause = min(PAUSE_S[1], 1.5 * self._pause) if seen == self._seen else PAUSE_S[0]
        self._seen, self._size, self._ask_at = seen, size, now + self._pause

    def _row(self, stage: str) -> Row:
        if stage in self._done:
            return self._done[stage]
        run, work = self.run, stages.load(stage)
        events, holder = run.read_events(stage), run.holder(stage)
        jobs = [job for job in self._jobs if job.stage == stage]
        job = _shown(jobs)
        since = max((i for i, e in enumerate(events) if e["event"] == "submitted"), default=-1)
        missing = work.missing(run)
        state, why, going = judge(missing, holder is not None, events[since + 1 :], job.state if job else None)
        why = why or ("" if state == "done" else "; ".join(unproven(jobs)))
        if state == "waiting" and run.cancelled_file.exists():
            state = "cancelled"  # before it began
        far, trains = work.progress(run), STAGES[stage].trains
        step = f"{far.done}/{far.total}" if trains else far.words
        eta = clock(far.left_s) if state == "running" and far.left_s is not None else ""
        nodes = (job.state.nodes if job and going else "") or (holder.host if holder else "")
        row = Row(
            stage, state, why, job.job_id if job else "", nodes,
            job.state.reason if job and going and job.state.state == "PENDING" else "", step, far.loss, eta,
            max(Counter(e.get("task") for e in events if e["event"] == "started").values(), default=0),
            _running_time(events, state == "running"), going, slow_ranks(events) if state == "running" else "",
        )  # fmt: skip
        if state == "done":
            self._done[stage] = row
        return row


def _shown(jobs: Sequence[Submitted]) -> Submitted | None:
    """Which of a stage's jobs to show: one that runs, the first that may, one that waits in vain, the last."""
    active = [job for job in jobs if job.state.active]
    running = [job for job in active if job.state.state != "PENDING"]
    dead = [job for job in jobs if job.state.dead]
    return next(iter([*running, *active, *dead, *reversed(jobs)]), None)


def _running_time(events: Sequence[Mapping[str, Any]], running: bool) -> float:
    """Seconds of all attempts; of the one that runs, since it began."""
    spent = sum(e.get("seconds", 0.0) for e in events if e["event"] in ENDS)
    told = attempts.read(events)
    if running and told.started is not None and told.end is None:
        spent += (datetime.now(UTC) - datetime.fromisoformat(told.started["time"])).total_seconds()
    return spent


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


def grid(cells: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> Table:
    """Cells, the first row being the header, as a table for the terminal; the columns `left` begin at the left."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(cells[0]):
        drawn.add_column(name, justify="left" if number in left else "right")
    for row in cells[1:]:
        drawn.add_row(*map(Text, row))
    return drawn


def table(run: Run, rows: Sequence[Row], points_going: bool = False) -> Group:
    """The table, what is wrong, and how to go on; columns that are empty everywhere are left out."""
    columns = {
        "stage": [row.stage for row in rows],
        "state": [row.state for row in rows],
        "job": [row.job for row in rows],
        "reason": [row.reason for row in rows],
        "nodes": [row.nodes for row in rows],
        "step": [row.step for row in rows],
        "loss": [row.loss for row in rows],
        "ETA": [row.eta for row in rows],
        "attempts": [str(row.attempts) for row in rows],
        "time": [clock(row.seconds) for row in rows],
    }
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    drawn = grid([list(kept), *map(list, zip(*kept.values(), strict=True))], left=range(len(kept)))
    lines: list[RenderableType] = [Text(f"{row.stage} {row.state} {row.why}", style="red") for row in rows if row.why]
    lines += [Text(f"{row.stage}: {row.slow}", style="yellow") for row in rows if row.slow]
    if not points_going and not any(row.going for row in rows) and any(row.state != "done" for row in rows):
        lines.append(Text(f"to go on: {run.resume_command}"))
    if points := point_table(run):
        lines.append(grid(points))
    return Group(Text(f"run {run.name}" + (f"  code {run.commit[:12]}" if run.commit else "")), drawn, *lines)


def print_status(run: Run, console: Console) -> None:
    """How the run stands now."""
    lookout = Lookout(run)
    console.print(table(run, lookout.look(), lookout.points_going), highlight=False, soft_wrap=True)


def watch(run: Run, console: Console) -> None:
    """A live table, until the run is done or nothing of it runs or waits any more; Ctrl-C only stops watching."""
    lookout, idle = Lookout(run), 0
    with Live(console=console, auto_refresh=False) as live:
        while idle < IDLE_LOOKS:
            rows = lookout.look()
            live.update(table(run, rows, lookout.points_going), refresh=True)
            if all(row.state == "done" for row in rows) and run.config.sweep is None:
                return
            idle = 0 if lookout.points_going or any(row.going for row in rows) else idle + 1
            try:
                time.sleep(LOOK_S)
            except KeyboardInterrupt:
                return
