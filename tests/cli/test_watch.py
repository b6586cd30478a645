"""Test `status --watch` on a pseudo-terminal: the screen, keys, resizing, and the number of bytes that are sent."""

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
"""Matches a control sequence (groups: parameters, command), text, or the start of another escape sequence."""
ENTER_SCREEN = "\x1b[?1049h"
"""Switch to the alternate screen of the terminal."""
LEAVE_SCREEN = "\x1b[?1049l"
"""Switch back to the normal screen."""
CLEAR_SCREEN = "\x1b[2J"


def make_metrics_line(step: int) -> str:
    """Return a line of metrics.jsonl, with a loss that decreases with the step."""
    return json.dumps({"step": step, "loss": 9 - step**0.3, "step_time_s": 0.5, "tokens_per_s": 4000 + step}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Yield a run whose train stage seems to run, because this process has its lock.

    The first attempt hung, and its message contains control codes.
    """
    run = make_run(tmp_path)
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause="hang", message="\x1b[2J\x1b]0;title\x07 a\nb")
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
    """Change the size of a terminal, in characters."""
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def wait_for_output(terminal: Terminal, is_expected: Callable[[str], bool], timeout_s: float = 60) -> None:
    """Read from a terminal until `is_expected(output)` returns True. Fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not is_expected(terminal.output.decode(errors="ignore")):
        assert time.monotonic() < deadline, terminal.output
        terminal.read(0.05)


def render_screen(output: str, columns: int, rows: int) -> list[str]:
    """Return the lines that a terminal of this size shows after `output`. Fail if it would scroll or wrap a line."""
    lines = [" " * columns for _ in range(rows)]
    row = 1
    column = 0
    for match in _TERMINAL_OUTPUT.finditer(output):
        parameters, command, text, unknown = match.groups()
        assert unknown is None, f"unexpected escape sequence: {output[match.start() : match.start() + 20]!r}"
        if text is not None:
            assert not re.search(r"[\x00-\x1f\x7f]", text), f"{text!r} moves the cursor"
            width = cell_len(text)
            assert column + width <= columns and row <= rows, f"line {row} is too long, or below the screen: {text!r}"
            line = lines[row - 1]
            lines[row - 1] = set_cell_size(line[:column] + text + line[column + width :], columns)
            column += width
        elif command == "H":  # move the cursor
            row = int(parameters or 1)
            column = 0
        elif command == "J":  # clear the screen
            assert parameters == "2"
            lines = [" " * columns for _ in range(rows)]
        elif command == "K":  # clear the rest of the line
            lines[row - 1] = set_cell_size(lines[row - 1][:column], columns)
        else:
            # colors, or the modes for the cursor (25) and automatic wrapping (7)
            assert command == "m" or (command in "hl" and parameters in ("?25", "?7")), match[0]
    return [line.rstrip() for line in lines]


@pytest.mark.story
def test_watch_fills_one_screen_without_scrolling_and_sends_only_changes(run: Run, tmp_path: Path) -> None:
    """After the terminal has been made smaller, the whole screen is drawn again, with fewer lines."""
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    resize(terminal, 80, 24)
    wait_for_output(terminal, lambda output: "q: stop watching" in output)
    byte_count_before = len(terminal.output)
    start_time = time.monotonic()
    for step in range(21, 31):  # in these 5 s, the screen is drawn at least twice
        with open(run.metrics_file, "a") as file:
            file.write(make_metrics_line(step))
        terminal.read(0.5)
    bytes_per_s = (len(terminal.output) - byte_count_before) / (time.monotonic() - start_time)
    assert 0 < bytes_per_s < 2048
    assert b"prepare" not in terminal.output[byte_count_before:], "an unchanged line must not be sent again"
    wait_for_output(terminal, lambda output: "step 30" in output or "30/30" in output)
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
        terminal, lambda output: output.count(CLEAR_SCREEN) >= 2 and "q: stop" in output.rsplit(CLEAR_SCREEN, 1)[1]
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
    wait_for_output(terminal, lambda output: LEAVE_SCREEN in output)
    output = terminal.output.decode()
    for number in (25, 7, 1049):  # the cursor, automatic wrapping, the alternate screen
        assert output.count(f"\x1b[?{number}h") == output.count(f"\x1b[?{number}l"), f"mode {number} is not restored"
    wait_for_output(terminal, lambda output: "evaluate" in output.split(LEAVE_SCREEN)[1])
    mode = termios.tcgetattr(terminal.fd)
    assert mode[3] & termios.ECHO and mode[3] & termios.ICANON and mode[6][termios.VSUSP] == b"\x1a"  # Ctrl-Z
    assert terminal.wait(60) == 0


@pytest.mark.parametrize("key", [b"\x03", signal.SIGTERM])
def test_ctrl_c_and_sigterm_restore_the_terminal(run: Run, tmp_path: Path, key: bytes | signal.Signals) -> None:
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    wait_for_output(terminal, lambda output: "q: stop watching" in output)
    stop_watching(terminal, key)
