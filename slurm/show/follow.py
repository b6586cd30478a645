"""Following a stage from the login node: what it shows while it runs, in a terminal and in a log.

Everything is read from the run directory, so it makes no difference who started the stage. In a terminal there is
one live line (stage, step, loss, tokens/s, time left); elsewhere one plain line every ten seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.run import stages
from pipeline.run.directory import Run

POLL_S = 0.2
LOOK_EVERY_S = 1.0
PLAIN_EVERY_S = 10.0


class Job(Protocol):
    """What is followed."""

    @property
    def running(self) -> bool:
        """Whether it is still there."""


def words(progress: stages.Progress) -> str:
    """How far a stage is that runs, with the time that it still takes."""
    return progress.running + ("" if progress.left_s is None else f"  {clock(progress.left_s)} left")


def clock(seconds: float) -> str:
    """Seconds as `1:02:03` or `02:03`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def follow(run: Run, stage: str, job: Job | None, tick: Callable[[], bool], console: Console) -> float:
    """Show the stage's progress while `job` (None: whoever holds the stage) runs and `tick()` is true; the seconds."""
    started, work = time.monotonic(), stages.load(stage)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[stage]:9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    live: AbstractContextManager[object] = bar if console.is_terminal else nullcontext()
    next_line = started + PLAIN_EVERY_S
    with live:
        task = bar.add_task("starting", total=None, stage=stage)
        next_look = started
        while (job.running if job else run.holder(stage) is not None) and tick():
            now = time.monotonic()
            if console.is_terminal and now >= next_look:
                next_look = now + LOOK_EVERY_S
                now_at = work.progress(run)
                bar.update(task, completed=now_at.done, total=now_at.total or None, description=words(now_at))
            elif now >= next_line and not console.is_terminal:
                next_line += PLAIN_EVERY_S
                console.print(f"{stage:9} {words(work.progress(run))}", highlight=False, soft_wrap=True)
            time.sleep(POLL_S)
    return time.monotonic() - started
