"""`status --watch`: a run on one screen. Its stages, its loss as a line of bars, how fast it is, GPUs, the last events.

The screen is the terminal's second one, as an editor's: it never scrolls, and what stood there comes back. Of its lines
only those that have changed are sent, so that a slow connection carries some hundred bytes a second; of metrics.jsonl
only what was appended since the last look is read. Where no line can be overwritten (a pipe, a log), the table comes
each time that a stage stands otherwise.
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
from statistics import fmean

from rich.console import Console, Group
from rich.text import Text

from pipeline.base.console import PlainConsole, supports_live_output
from pipeline.base.files import last_object
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.history import History
from pipeline.run.ledger import event_timestamp
from pipeline.run.machines import SENSORS, look, readings
from slurm.query.status import MAX_IDLE_POLLS, POLL_INTERVAL_S, StatusPoller, render_status

_NOTICE_S = 0.25
"""So soon a resized terminal is noticed."""
_BARS = "▁▂▃▄▅▆▇█"
_MOST_HOSTS = 4


class Screen:
    """The whole terminal, while somebody watches; afterwards it is as it was found."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._size, self._shown = (0, 0), list[str]()
        self._keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        self._before = [termios.tcgetattr(fd) for fd in self._keys]

    def __enter__(self) -> Screen:
        for fd in self._keys:
            mode = termios.tcgetattr(fd)
            mode[3] &= ~(termios.ICANON | termios.ECHO)
            mode[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on this screen
            termios.tcsetattr(fd, termios.TCSADRAIN, mode)
        self._send("\x1b[?1049h\x1b[?25l\x1b[?7l")  # second screen, no cursor, no wrapping
        return self

    def __exit__(self, *_: object) -> None:
        self._send("\x1b[?7h\x1b[?25h\x1b[?1049l")
        for fd, mode in zip(self._keys, self._before, strict=True):
            termios.tcsetattr(fd, termios.TCSAFLUSH, mode)

    def _send(self, text: str) -> None:
        self.console.file.write(text)
        self.console.file.flush()

    def stay(self, draw: Callable[[int, int], Sequence[str]], for_s: float) -> bool:
        """Show the lines that `draw(width, height)` gives for a while, anew where the terminal is resized; whether
        somebody pressed q."""
        until, drawn = time.monotonic() + for_s, False
        while (left := until - time.monotonic()) > 0:
            size = os.get_terminal_size(self.console.file.fileno())
            if size != self._size:
                self._size, self._shown, drawn = size, [], False
                self._send("\x1b[2J")
            if not drawn:
                width, height = size.columns or 80, size.lines or 24
                new = [*draw(width, height), *[""] * height][:height]
                old = self._shown or [""] * height
                changed = [n for n in range(height) if new[n] != old[n]]
                self._send("".join(f"\x1b[{n + 1}H{new[n]}\x1b[K" for n in changed))
                self._shown, drawn = new, True
            if select.select(self._keys, [], [], min(left, _NOTICE_S))[0]:
                pressed = os.read(self._keys[0], 100)
                if not pressed or b"q" in pressed.lower():
                    return True
        return False


def watch(run: Run, console: Console) -> None:
    """Show it until the run is done or nothing of it runs or waits any more; q and Ctrl-C only stop watching."""
    poller, idle, live = StatusPoller(run), 0, supports_live_output(console)
    history, shown = History(run.metrics_file, lines.metric), list[tuple[str, str, str]]()
    stages: Callable[[int], Group] | None = None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it gets the first screen back, too
    with Screen(console) if live else nullcontext() as screen, suppress(KeyboardInterrupt):
        while idle < MAX_IDLE_POLLS:
            rows = poller.poll()
            everything = [*rows, *poller.point_statuses]
            stand = [(row.state, row.problem, row.missing_jobs) for row in everything]
            stages = partial(render_status, run, rows, poller.point_statuses)
            if screen is None and stand != shown:
                console.print(stages(console.width), soft_wrap=True)
            shown = stand
            if all(row.state == "done" for row in everything):
                break
            idle = 0 if any(row.is_active for row in everything) else idle + 1
            if screen is None:
                time.sleep(POLL_INTERVAL_S)
            elif screen.stay(partial(_screen, console, stages, run, history.look()), POLL_INTERVAL_S):
                break
    if live and stages is not None:  # as it stood last, below the command
        console.print(stages(console.width), soft_wrap=True)


def _screen(
    console: Console, stages: Callable[[int], Group], run: Run, history: History, width: int, height: int
) -> list[str]:
    """The lines of the screen; the table of stages and points is cut where it is too long."""
    kind = console.color_system
    above, below = (
        PlainConsole(file=io.StringIO(), width=width, force_terminal=True, color_system=kind) for _ in range(2)
    )
    above.print(stages(width))
    for line in _below(run, history, width):
        below.print(Text(line), no_wrap=True, overflow="ellipsis")
    upper, lower = (part.file.getvalue().split("\n")[:-1] for part in (above, below))  # type: ignore[attr-defined]
    room = height - len(lower)
    return [*(upper if len(upper) <= room else [*upper[: room - 1], "…"]), *lower]


def _below(run: Run, history: History, width: int) -> Iterator[str]:
    yield ""
    if losses := history.values("loss"):
        parts = min(len(losses), max(1, width - 20))
        values = [fmean(losses[n * len(losses) // parts : (n + 1) * len(losses) // parts]) for n in range(parts)]
        low, wide = min(values), (max(values) - min(values)) or 1.0
        bars = "".join(_BARS[int(7.999 * (value - low) / wide)] for value in values)
        yield f"loss   {bars} {losses[-1]:.4f}"
    unit = "tokens" if history.values("tokens_per_s") else "samples"
    if rates := history.values(f"{unit}_per_s"):
        median = statistics.median(rates)
        share = f"{rates[-1] / median:.2f} × the run's median of {median:,.0f}" if median else ""
        yield f"speed  {rates[-1]:,.0f} {unit}/s, {share}"
    yield from _machines(run)
    for event in run.read_events()[-3:]:
        told = [f"{key} {event[key]}" for key in ("step", "cause", "message") if event.get(key) is not None]
        at = datetime.fromtimestamp(event_timestamp(event)).strftime("%H:%M:%S")
        yield f"{at}  {event.get('stage') or '':9} {event['event']}  {', '.join(told)}".split("\n")[0]
    yield "q: stop watching"


def _machines(run: Run) -> Iterator[str]:
    """The newest telemetry of each host, where there is any; of a host's GPUs the mean."""
    files = sorted(run.path.glob("telemetry-*.jsonl"))
    for file in files[:_MOST_HOSTS]:
        line = last_object(file, look) or {}
        gpus, told = line.get("gpus", []), []
        for sensor, (name, unit, *_) in SENSORS.items():
            if sensor.startswith("gpus.") == bool(gpus) and (found := readings(line, sensor)):
                told.append(f"{'' if gpus else f'{name} '}{fmean(value for _, value in found):,.0f} {unit}")
        yield f"{file.stem.removeprefix('telemetry-')}  {f'{len(gpus)} GPUs, ' if gpus else ''}{', '.join(told)}"
    if len(files) > _MOST_HOSTS:
        yield f"… and {len(files) - _MOST_HOSTS} more hosts"
