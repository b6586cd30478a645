"""Test `status --watch` on a pseudo-terminal: the content of the screen, scrolling, keys, resizing, bytes sent."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len, set_cell_size

from pipeline.run.directory import Run
from tests.stories.test_local_runs import Terminal
from tests.support.events import write_event
from tests.support.tiny import make_run

pytestmark = pytest.mark.timeout(300)
_TERMINAL_OUTPUT = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b]+)|(\x1b)")
"""Matches a control sequence (parameters and command), text, or the beginning of any other escape sequence."""
ENTER_SCREEN = "\x1b[?1049h"
"""Switches to the alternate screen of the terminal."""
LEAVE_SCREEN = "\x1b[?1049l"
CLEAR_SCREEN = "\x1b[2J"


def make_metrics_line(step: int) -> str:
    """Return a line of metrics.jsonl."""
    return json.dumps({"step": step, "loss": 9 - step**0.3, "step_time_s": 0.5, "tokens_per_s": 4000 + step}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Create a run with a running train stage: this process holds the lock. Yield the run."""
    run = make_run(tmp_path)
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause="hang", message="\x1b[2J\x1b]0;title\x07 oh\nno")
    write_event(run, "started", "train", job_id="1", attempt=2, task=None, ranks=2)
    run.metrics_file.write_text("".join(make_metrics_line(step) for step in range(1, 21)))
    gpu = {"index": 0, "utilization_percent": 90, "memory_gb": 60.0, "power_w": 600, "temperature_c": 61}
    line = {
        "time": time.time(),
        "host": "n1",
        "cpu_percent": 20,
        "gpus": [gpu, {**gpu, "index": 1, "utilization_percent": 98, "xid": [79]}],
    }
    (run.path / "telemetry-n1.jsonl").write_text(json.dumps(line) + "\n")
    yield run
    os.close(lock)


def resize(terminal: Terminal, columns: int, rows: int) -> None:
    """Change the size of a terminal."""
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def wait_for_output(terminal: Terminal, is_expected: Callable[[str], bool], timeout_s: float = 60) -> None:
    """Read from a terminal until its output is as expected. Fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_expected(terminal.output.decode(errors="ignore")):
        assert time.monotonic() < deadline, terminal.output
        terminal.read(0.05)


def render_screen(output: str, columns: int, rows: int) -> list[str]:
    """Return the lines of a terminal of this size after `output`. Fail if the terminal would scroll or wrap."""
    lines = [" " * columns for _ in range(rows)]
    row = 1
    column = 0
    for part in _TERMINAL_OUTPUT.finditer(output):
        code, command, text, unknown = part.groups()
        assert unknown is None, f"unexpected escape sequence: {output[part.start() : part.start() + 20]!r}"
        if text is not None:
            assert not re.search(r"[\x00-\x1f\x7f]", text), f"{text!r} moves the cursor"
            width = cell_len(text)
            assert column + width <= columns and row <= rows, f"line {row} is too long, or below the screen: {text!r}"
            line = lines[row - 1]
            lines[row - 1] = set_cell_size(line[:column] + text + line[column + width :], columns)
            column += width
        elif command == "H":
            row = int(code or 1)
            column = 0
        elif command == "J":
            assert code == "2"
            lines = [" " * columns for _ in range(rows)]
        elif command == "K":
            lines[row - 1] = set_cell_size(lines[row - 1][:column], columns)
        else:
            assert command == "m" or (command in "hl" and code in ("?25", "?7")), part[0]
    return [line.rstrip() for line in lines]


def test_watch_fills_one_screen_without_scrolling_and_sends_only_changes(run: Run, tmp_path: Path) -> None:
    """Resizing the terminal draws the whole screen again, with fewer lines."""
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    resize(terminal, 80, 24)
    wait_for_output(terminal, lambda sent: "q: stop watching" in sent)
    before = len(terminal.output)
    start_time = time.monotonic()
    for step in range(21, 31):  # the screen is drawn at least twice meanwhile
        with open(run.metrics_file, "a") as file:
            file.write(make_metrics_line(step))
        terminal.read(0.5)
    bytes_per_s = (len(terminal.output) - before) / (time.monotonic() - start_time)
    assert 0 < bytes_per_s < 2048
    assert b"prepare" not in terminal.output[before:], "an unchanged line must not be sent again"
    wait_for_output(terminal, lambda sent: "step 30" in sent or "30/30" in sent)
    lines = render_screen(terminal.output.decode().split(ENTER_SCREEN)[1], 80, 24)
    text = "\n".join(lines)
    assert re.search(r"^train +running .* 30/30 +6\.2258", text, re.M), text
    assert re.search(r"^loss   █[▁▂▃▄▅▆▇█]+▁ 6\.2258$", text, re.M), text
    assert "speed  4,030 tokens/s, 1.00 × the run's median of 4,016" in text
    assert "n1  2 GPUs, 94 %, 60 GB, 600 W, 61 °C" in text
    assert "train: GPU 1 on n1: Xid 79" in lines
    events = [line for line in lines if re.match(r"\d\d:\d\d:\d\d  train", line)]
    assert [line.split()[2] for line in events] == ["started", "failed", "started"] and "cause hang" in events[1]
    resize(terminal, 44, 9)
    wait_for_output(
        terminal, lambda sent: sent.count(CLEAR_SCREEN) >= 2 and "q: stop" in sent.rsplit(CLEAR_SCREEN, 1)[1]
    )
    lines = render_screen(terminal.output.decode().rsplit(CLEAR_SCREEN, 1)[1], 44, 9)
    assert "…" in lines and lines[-1] == "q: stop watching"
    stop_watching(terminal, b"q")


def stop_watching(terminal: Terminal, key: bytes | signal.Signals) -> None:
    """Press a key or send a signal. Check that the terminal is restored and that the last table is printed."""
    assert not termios.tcgetattr(terminal.fd)[3] & termios.ECHO
    if isinstance(key, bytes):
        os.write(terminal.fd, key)
    else:
        os.kill(terminal.pid, key)
    wait_for_output(terminal, lambda sent: LEAVE_SCREEN in sent)
    sent = terminal.output.decode()
    for number in (25, 7, 1049):  # the cursor, automatic wrapping, the alternate screen
        assert sent.count(f"\x1b[?{number}h") == sent.count(f"\x1b[?{number}l"), f"mode {number} is not restored"
    wait_for_output(terminal, lambda sent: "evaluate" in sent.split(LEAVE_SCREEN)[1])
    mode = termios.tcgetattr(terminal.fd)
    assert mode[3] & termios.ECHO and mode[3] & termios.ICANON and mode[6][termios.VSUSP] == b"\x1a"  # Ctrl-Z
    assert terminal.wait(60) == 0


@pytest.mark.parametrize("key", [b"\x03", signal.SIGTERM])
def test_ctrl_c_and_sigterm_restore_the_terminal(run: Run, tmp_path: Path, key: bytes | signal.Signals) -> None:
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    wait_for_output(terminal, lambda sent: "q: stop watching" in sent)
    stop_watching(terminal, key)
