"""`status`: the stages of one run, live with `--watch`, or one line for each run below `runs/`.

slurm/query/status.py determines the state of a stage. `--watch` uses the terminal's alternate screen, as an editor
does. The screen never scrolls, and the previous screen is restored at the end. Only changed lines are sent. A slow
connection is therefore sufficient: the output is a few hundred bytes per second. If the output is not a terminal (a
pipe, a log), the table is printed each time that a state changes.
"""

from __future__ import annotations

import io
import os
import select
import signal
import statistics
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.text import Text

from cli.common import console
from pipeline.base.command import format_command
from pipeline.base.console import PlainConsole, supports_live_output
from pipeline.base.errors import UserError, find_storage_error
from pipeline.base.files import read_last_object
from pipeline.run.directory import Run, list_points
from pipeline.run.lines import LineHistory
from pipeline.run.machines import SENSORS, get_sensor_values, is_telemetry_line
from pipeline.run.metrics import is_step_line
from slurm.query.run_jobs import SubmittedJob, find_run_jobs, uses_slurm
from slurm.query.status import (
    MAX_IDLE_POLLS,
    POLL_INTERVAL_S,
    StageStatus,
    StatusPoller,
    build_table,
    print_status,
    render_status,
)

_RESIZE_CHECK_S = 0.25
"""How often the size of the terminal is checked."""
_BARS = "▁▂▃▄▅▆▇█"
_MAX_HOSTS = 4
"""Maximum number of hosts whose telemetry is shown."""


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="a run directory; default: all runs below runs/")
    ] = None,
    live: Annotated[
        bool, typer.Option("--watch", "-w", help="update the screen until the run ends or you press q")
    ] = False,
) -> None:
    """Show the state of each stage of a run; without RUN, one line for each run below runs/."""
    if run is None and live:
        raise UserError("cli.missing_run", "--watch requires a RUN, such as runs/quickstart")
    if run is None:
        print_runs(Path("runs"), console)
    elif live:
        watch(Run.open(run), console)
    else:
        print_status(Run.open(run), console)


def print_runs(root: Path, console: Console) -> None:
    """Print one line for each run below `root`, the most recently changed run last. Also name unreadable runs.

    Slurm is queried once, for the jobs of all runs that are not done.

    Raises:
        OSError: if `root` exists and cannot be listed.
    """
    statuses: dict[Run, list[StageStatus]] = {}
    error_lines: list[Text] = []
    for folder in _list_folders(root):
        try:
            run = Run(folder)
            if run.config_file.exists():
                statuses[run] = _read_statuses(run, [])  # without jobs, this shows which stages are done
        except (UserError, OSError) as error:
            error_lines.append(Text(f"{folder} cannot be read: {find_storage_error(error) or error}", style="red"))
    unfinished = [
        run for run, each in statuses.items() if uses_slurm(run) and any(stage.state != "done" for stage in each)
    ]
    jobs = find_run_jobs([each for run in unfinished for each in (run, *list_points(run))])
    statuses |= {run: _read_statuses(run, jobs) for run in unfinished}
    rows = [_summarize_run(run, statuses[run]) for run in sorted(statuses, key=_last_change)]
    if rows:
        header = ["run", "stage", "state", "step", "loss", "last stop", "changed"]
        # the column `last stop` is left out if it is empty for all runs
        columns = [column for column in zip(header, *rows, strict=True) if any(column[1:]) or column[0] != "last stop"]
        console.print(build_table([*zip(*columns, strict=True)], console.width), soft_wrap=True)
    elif not error_lines:
        console.print(f"no runs below {root}; to make one: {format_command('CONFIG.yaml')}", soft_wrap=True)
    for message in error_lines:
        console.print(message, soft_wrap=True)


def _list_folders(root: Path) -> list[Path]:
    """Return the paths in `root` that are not files; [] if `root` does not exist.

    Raises:
        OSError: if `root` cannot be read. `Path.glob` would instead return no path.
    """
    try:
        return sorted(path for path in root.iterdir() if not path.is_file())
    except FileNotFoundError:
        return []


def _read_statuses(run: Run, jobs: Sequence[SubmittedJob]) -> list[StageStatus]:
    """Return the status of each stage of a run, and one status for each point of a sweep.

    `jobs` may contain jobs of other runs. Slurm is not queried.
    """
    poller = StatusPoller(run)
    return [*poller.read_statuses(jobs), *poller.point_statuses]


def _summarize_run(run: Run, statuses: Sequence[StageStatus]) -> list[str]:
    """Return the cells of a run, which describe the first stage that is not done, or the last stage if all are done.

    If this stage belongs to a point of a sweep, the cell `step` contains the number of points that are done.
    """
    current = next((status for status in statuses if status.state != "done"), statuses[-1])
    point_statuses = [status for status in statuses if status.run is not run]
    step = current.cells["step"]
    if current in point_statuses:
        step = f"{sum(status.state == 'done' for status in point_statuses)}/{len(point_statuses)} points"
    changed = datetime.fromtimestamp(_last_change(run)).strftime("%Y-%m-%d %H:%M")
    return [
        run.name, current.stage, current.state, step, current.cells["loss"], current.last_stop_summary, changed
    ]  # fmt: skip


def _last_change(run: Run) -> float:
    """Return when a run last changed, in seconds since 1970.

    This is the modification time of the file of events or, if there are no events yet, of the config.
    """
    return (run.events_file if run.events_file.exists() else run.config_file).stat().st_mtime


class Screen:
    """The terminal's alternate screen. On exit, the previous screen and the terminal's settings are restored."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._size = (0, 0)
        self._lines: list[str] = []
        """The lines on the screen."""
        self._input_fds = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        """The descriptor of the terminal's input; empty if the input is not a terminal."""
        self._saved_modes = [termios.tcgetattr(fd) for fd in self._input_fds]

    def __enter__(self) -> Screen:
        """Switch to the alternate screen."""
        for fd in self._input_fds:
            mode = termios.tcgetattr(fd)
            mode[3] &= ~(termios.ICANON | termios.ECHO)  # local modes: receive each key at once, and do not print keys
            # control characters: ignore Ctrl-Z, because the shell would continue on the alternate screen
            mode[6][termios.VSUSP] = b"\0"
            termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        self._send("\x1b[?1049h\x1b[?25l\x1b[?7l")  # alternate screen, no cursor, no wrapping
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous screen."""
        self._send("\x1b[?7h\x1b[?25h\x1b[?1049l")
        for fd, mode in zip(self._input_fds, self._saved_modes, strict=True):
            termios.tcsetattr(fd, termios.TCSAFLUSH, mode)

    def _send(self, text: str) -> None:
        """Write text or control sequences to the terminal."""
        self.console.file.write(text)
        self.console.file.flush()

    def show(self, draw: Callable[[int, int], Sequence[str]], duration_s: float) -> bool:
        """Draw the screen, and wait for `duration_s` seconds or until the user presses q.

        Args:
            draw: returns the lines of the screen for a width and height. Called again if the terminal is resized.
            duration_s: how long to wait, in seconds.

        Returns:
            Whether the user pressed q, or closed the terminal's input.
        """
        end_time = time.monotonic() + duration_s
        is_drawn = False
        while (remaining_s := end_time - time.monotonic()) > 0:
            size = os.get_terminal_size(self.console.file.fileno())
            if size != self._size:
                self._size = size
                self._lines = []
                is_drawn = False
                self._send("\x1b[2J")  # clear the screen
            if not is_drawn:
                width = size.columns or 80
                height = size.lines or 24
                new_lines = [*draw(width, height), *[""] * height][:height]
                old_lines = self._lines or [""] * height
                changed = [n for n in range(height) if new_lines[n] != old_lines[n]]
                # for each changed line: move the cursor, print the line, erase the rest of the row
                self._send("".join(f"\x1b[{n + 1}H{new_lines[n]}\x1b[K" for n in changed))
                self._lines = new_lines
                is_drawn = True
            if select.select(self._input_fds, [], [], min(remaining_s, _RESIZE_CHECK_S))[0]:
                keys = os.read(self._input_fds[0], 100)
                if not keys or b"q" in keys.lower():
                    return True
        return False


def watch(run: Run, console: Console) -> None:
    """Show the status of a run until the run is done or inactive, or the user presses q or Ctrl-C.

    q and Ctrl-C end only this command, not the run.
    """
    poller = StatusPoller(run)
    is_live = supports_live_output(console)
    history = LineHistory(run.metrics_file, is_step_line)
    idle_polls = 0
    printed_states: list[tuple[str, str, str]] = []
    render: Callable[[int], Group] | None = None
    # with this handler, SIGTERM raises KeyboardInterrupt, so that the previous screen is restored
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Screen(console) if is_live else nullcontext() as screen, suppress(KeyboardInterrupt):
        while idle_polls < MAX_IDLE_POLLS:
            stage_statuses = poller.poll()
            all_statuses = [*stage_statuses, *poller.point_statuses]
            states = [(status.state, status.problem, status.missing_jobs) for status in all_statuses]
            render = partial(render_status, run, stage_statuses, poller.point_statuses)
            if screen is None and states != printed_states:
                console.print(render(console.width), soft_wrap=True)
            printed_states = states
            if all(status.state == "done" for status in all_statuses):
                break
            idle_polls = 0 if any(status.is_active for status in all_statuses) else idle_polls + 1
            if screen is None:
                time.sleep(POLL_INTERVAL_S)
            elif screen.show(partial(_draw_screen, console, render, run, history.read_new_lines()), POLL_INTERVAL_S):
                break
    if is_live and render is not None:  # the alternate screen is gone, so print the last table below the command
        console.print(render(console.width), soft_wrap=True)


def _draw_screen(
    console: Console, render: Callable[[int], Group], run: Run, history: LineHistory, width: int, height: int
) -> list[str]:
    """Return the lines of the screen: the status, and the progress below. A status that is too long is truncated.

    Args:
        console: the console, which decides about colors.
        render: returns the status for a width.
        run: the run.
        history: the lines of metrics.jsonl that were read so far.
        width: the width of the screen.
        height: the height of the screen.
    """
    status_lines = _render_lines(console, width, render(width))
    progress_lines = _render_lines(console, width, *(Text(line) for line in _describe_progress(run, history, width)))
    available = height - len(progress_lines)
    if len(status_lines) > available:
        status_lines = [*status_lines[: available - 1], "…"]
    return [*status_lines, *progress_lines]


def _render_lines(console: Console, width: int, *contents: Group | Text) -> list[str]:
    """Return contents as lines of terminal output, in the colors of `console`. A text is truncated to one line."""
    output = io.StringIO()
    plain = PlainConsole(file=output, width=width, force_terminal=True, color_system=console.color_system)
    for content in contents:
        if isinstance(content, Text):
            plain.print(content, no_wrap=True, overflow="ellipsis")
        else:
            plain.print(content)
    return output.getvalue().split("\n")[:-1]  # the last text is empty, because the output ends with a line break


def _describe_progress(run: Run, history: LineHistory, width: int) -> Iterator[str]:
    """Yield the lines below the table: loss, speed, telemetry of the hosts and the last events."""
    yield ""
    if losses := history.values("loss"):
        count = min(len(losses), max(1, width - 20))  # 20 columns are left for the label and the newest loss
        means = [fmean(losses[n * len(losses) // count : (n + 1) * len(losses) // count]) for n in range(count)]
        low = min(means)
        span = (max(means) - low) or 1.0
        # 7.999 instead of 8, so that the highest mean also has an index from 0 to 7
        bars = "".join(_BARS[int(7.999 * (mean - low) / span)] for mean in means)
        yield f"loss   {bars} {losses[-1]:.4f}"
    unit = "tokens" if history.values("tokens_per_s") else "samples"
    if rates := history.values(f"{unit}_per_s"):
        median = statistics.median(rates)
        ratio = f"{rates[-1] / median:.2f} × the run's median of {median:,.0f}" if median else ""
        yield f"speed  {rates[-1]:,.0f} {unit}/s, {ratio}"
    yield from _describe_hosts(run)
    for event in run.read_events()[-3:]:
        line = event.to_line()
        facts = [f"{key} {line[key]}" for key in ("step", "cause", "message") if line.get(key) is not None]
        at = datetime.fromtimestamp(event.timestamp).strftime("%H:%M:%S")
        yield f"{at}  {event.stage or '':9} {event.name}  {', '.join(facts)}".split("\n")[0]
    yield "q: stop watching"


def _describe_hosts(run: Run) -> Iterator[str]:
    """Yield a line for each host with its newest telemetry: the means over its GPUs.

    A host without GPUs has the values of CPUs, memory and disks instead.
    """
    files = sorted(run.path.glob("telemetry-*.jsonl"))
    for file in files[:_MAX_HOSTS]:
        sample = read_last_object(file, is_telemetry_line) or {}
        gpus = sample.get("gpus", [])
        means = []
        for sensor, (name, unit, *_) in SENSORS.items():
            if sensor.startswith("gpus.") == bool(gpus) and (values := get_sensor_values(sample, sensor)):
                mean = fmean(value for _, value in values)
                means.append(f"{'' if gpus else f'{name} '}{mean:,.0f} {unit}")
        host = file.stem.removeprefix("telemetry-")
        yield f"{host}  {f'{len(gpus)} GPUs, ' if gpus else ''}{', '.join(means)}"
    if len(files) > _MAX_HOSTS:
        yield f"… and {len(files) - _MAX_HOSTS} more hosts"
