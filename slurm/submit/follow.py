"""Following a stage from the login node: what it shows while it runs, in a terminal and in a log.

Everything is read from the run directory, so it makes no difference who started the stage. In a terminal there is
one live line (stage, step, loss, tokens/s, time left); elsewhere one plain line every ten seconds. That a checkpoint
was damaged, that steps are done again, that a failed stage goes on by itself has a line that stays, as it comes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from pipeline.base.console import supports_live_output
from pipeline.base.files import parse_json_or_none, read_complete_lines
from pipeline.base.text import format_duration
from pipeline.run import lines, stages
from pipeline.run.directory import Run

POLL_S = 0.2
LOOK_EVERY_S = 1.0
PLAIN_EVERY_S = 10.0
_NEWS = {
    "restored": "restored step {step}; steps done again: {lost_steps}",
    "damaged": "step {step} is set aside, damaged: {reason}",
    "retried": "goes on by itself after: {cause}",
}
"""What a person is told of events as they come."""


def follow_stage(run: Run, stage: str, going: Callable[[], bool], console: Console) -> float:
    """Show the stage's progress while `going()`; the seconds that it took."""
    started, live = time.monotonic(), supports_live_output(console)
    said = TextColumn("{task.description}", markup=False)
    columns = (TextColumn("[bold]{task.fields[stage]:9}"), BarColumn(bar_width=24), said)
    bar = Progress(SpinnerColumn(), *columns, TimeElapsedColumn(), console=console, transient=True, disable=not live)
    task = bar.add_task("starting", total=None, stage=stage)
    next_look = started if live else started + PLAIN_EVERY_S
    read = run.events_file.stat().st_size if run.events_file.exists() else 0

    def tell() -> None:
        nonlocal read
        for text, end in read_complete_lines(run.events_file, read):
            event, read = parse_json_or_none(text), end
            if lines.event(event) and event.get("stage") == stage and event["event"] in _NEWS:
                words = _NEWS[event["event"]].format_map(defaultdict(str, event)).removesuffix("; steps done again: 0")
                console.print(f"{stage:9} {words}", soft_wrap=True)

    with bar:
        while going():
            tell()
            if time.monotonic() >= next_look:
                next_look += LOOK_EVERY_S if live else PLAIN_EVERY_S
                for key, change in run.reload_config().items():
                    console.print(f"{stage:9} changed from elsewhere: {key}: {change}", soft_wrap=True)
                far = stages.load(stage).progress(run)
                words = far.running + ("" if far.left_s is None else f"  {format_duration(far.left_s)} left")
                bar.update(task, completed=far.done, total=far.total or None, description=words)
                if not live:
                    console.print(f"{stage:9} {words}", soft_wrap=True)
            time.sleep(POLL_S)
        tell()
    return time.monotonic() - started
