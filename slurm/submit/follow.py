"""Follow a running stage from the login node, in a terminal or a log.

Everything is read from the run directory, so any process may have started the stage. A terminal has one live line:
stage, step, loss, tokens/s and remaining time. Otherwise a plain line is printed every ten seconds. Important events
get a line of their own that stays: a damaged checkpoint, repeated steps, an automatic retry.
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
LIVE_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 10.0
_EVENT_MESSAGES = {
    "restored": "restored step {step}; repeated steps: {lost_steps}",
    "damaged": "step {step} is damaged and was set aside: {reason}",
    "retried": "restarts automatically after: {cause}",
}
"""Event → the line that is printed when it is written."""


def follow_stage(run: Run, stage: str, is_running: Callable[[], bool], console: Console) -> float:
    """Print the progress of a stage while `is_running()`; return the seconds that this took."""
    start_time = time.monotonic()
    is_live = supports_live_output(console)
    columns = (
        SpinnerColumn(),
        TextColumn("[bold]{task.fields[stage]:9}"),
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not is_live)
    task = bar.add_task("starting", total=None, stage=stage)
    next_update_time = start_time if is_live else start_time + PLAIN_INTERVAL_S
    offset = run.events_file.stat().st_size if run.events_file.exists() else 0

    def print_new_events() -> None:
        nonlocal offset
        for text, end in read_complete_lines(run.events_file, offset):
            event = parse_json_or_none(text)
            offset = end
            if lines.is_event(event) and event.get("stage") == stage and event["event"] in _EVENT_MESSAGES:
                message = _EVENT_MESSAGES[event["event"]].format_map(defaultdict(str, event))
                console.print(f"{stage:9} {message.removesuffix('; repeated steps: 0')}", soft_wrap=True)

    with bar:
        while is_running():
            print_new_events()
            if time.monotonic() >= next_update_time:
                next_update_time += LIVE_INTERVAL_S if is_live else PLAIN_INTERVAL_S
                for key, change in run.reload_config().items():
                    console.print(f"{stage:9} changed by another process: {key}: {change}", soft_wrap=True)
                progress = stages.load_stage_module(stage).progress(run)
                remaining = "" if progress.remaining_s is None else f"  {format_duration(progress.remaining_s)} left"
                bar.update(
                    task,
                    completed=progress.completed,
                    total=progress.total or None,
                    description=progress.running_description + remaining,
                )
                if not is_live:
                    console.print(f"{stage:9} {progress.running_description}{remaining}", soft_wrap=True)
            time.sleep(POLL_S)
        print_new_events()
    return time.monotonic() - start_time
