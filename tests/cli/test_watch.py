"""`status --watch` on a real pseudo-terminal: what is on the screen, that it never scrolls, keys, sizes, bytes."""

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
_PARTS = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([^\x1b]+)|(\x1b)")


def metric_line(step: int) -> str:
    return json.dumps({"step": step, "loss": 9 - step**0.3, "step_time_s": 0.5, "tokens_per_s": 4000 + step}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run in the middle of its training: this process holds the lock."""
    run = make_run(tmp_path)
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause="hang", message="\x1b[2J\x1b]0;mine\x07 oh\nno")
    write_event(run, "started", "train", job_id="1", attempt=2, task=None, ranks=2)
    run.metrics_file.write_text("".join(metric_line(step) for step in range(1, 21)))
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
    fcntl.ioctl(terminal.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def until(terminal: Terminal, told: Callable[[str], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not told(terminal.output.decode(errors="ignore")):
        assert time.monotonic() < end, terminal.output
        terminal.read(0.05)


def screen(sent: str, columns: int, rows: int) -> list[str]:
    """What a terminal of that size shows of `sent` on its second screen; fails where it would scroll or wrap."""
    lines, row, column = [" " * columns for _ in range(rows)], 1, 0
    for part in _PARTS.finditer(sent):
        code, command, text, stray = part.groups()
        assert stray is None, f"a command that is none of ours: {sent[part.start() : part.start() + 20]!r}"
        if text is not None:
            assert not re.search(r"[\x00-\x1f\x7f]", text), f"{text!r} moves the cursor"
            width = cell_len(text)
            assert column + width <= columns and row <= rows, f"line {row} is too long, or below the screen: {text!r}"
            rest = lines[row - 1]
            lines[row - 1] = set_cell_size(rest[:column] + text + rest[column + width :], columns)
            column += width
        elif command == "H":
            row, column = int(code or 1), 0
        elif command == "J":
            assert code == "2"
            lines = [" " * columns for _ in range(rows)]
        elif command == "K":
            lines[row - 1] = set_cell_size(lines[row - 1][:column], columns)
        else:
            assert command == "m" or (command in "hl" and code in ("?25", "?7")), part[0]
    return [line.rstrip() for line in lines]


def test_one_screen_that_never_scrolls_and_sends_little(run: Run, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    resize(terminal, 80, 24)
    until(terminal, lambda sent: "q: stop watching" in sent)
    before, began = len(terminal.output), time.monotonic()
    for step in range(21, 31):  # two looks and more, each with something new
        with open(run.metrics_file, "a") as file:
            file.write(metric_line(step))
        terminal.read(0.5)
    rate = (len(terminal.output) - before) / (time.monotonic() - began)
    assert 0 < rate < 2048, f"{rate:.0f} bytes a second"
    assert b"prepare" not in terminal.output[before:], "a line that has not changed is not sent again"
    until(terminal, lambda sent: "step 30" in sent or "30/30" in sent)
    shown = screen(terminal.output.decode().split("\x1b[?1049h")[1], 80, 24)
    text = "\n".join(shown)
    assert re.search(r"^train +running .* 30/30 +6\.2258", text, re.M), text
    assert re.search(r"^loss   █[▁▂▃▄▅▆▇█]+▁ 6\.2258$", text, re.M), text
    assert "speed  4,030 tokens/s, 1.00 × the run's median of 4,016" in text
    assert "n1  2 GPUs, 94 %, 60 GB, 600 W, 61 °C" in text
    assert "train: GPU 1 on n1: Xid 79" in shown
    events = [line for line in shown if re.match(r"\d\d:\d\d:\d\d  train", line)]
    assert [line.split()[2] for line in events] == ["started", "failed", "started"] and "cause hang" in events[1]
    resize(terminal, 44, 9)
    until(terminal, lambda sent: sent.count("\x1b[2J") >= 2 and "q: stop" in sent.rsplit("\x1b[2J", 1)[1])
    small = screen(terminal.output.decode().rsplit("\x1b[2J", 1)[1], 44, 9)
    assert "…" in small and small[-1] == "q: stop watching"
    end(terminal, b"q")


def end(terminal: Terminal, key: bytes | signal.Signals) -> None:
    """Press a key, or send a signal: the terminal is as it was, and the last table stays below the command."""
    assert not termios.tcgetattr(terminal.fd)[3] & termios.ECHO
    if isinstance(key, bytes):
        os.write(terminal.fd, key)
    else:
        os.kill(terminal.pid, key)
    until(terminal, lambda sent: "\x1b[?1049l" in sent)
    sent = terminal.output.decode()
    assert all(sent.count(f"\x1b[?{mode}h") == sent.count(f"\x1b[?{mode}l") for mode in (25, 7, 1049)), "all set back"
    until(terminal, lambda sent: "evaluate" in sent.split("\x1b[?1049l")[1])
    mode = termios.tcgetattr(terminal.fd)
    assert mode[3] & termios.ECHO and mode[3] & termios.ICANON and mode[6][termios.VSUSP] == b"\x1a"
    assert terminal.wait(60) == 0


@pytest.mark.parametrize("key", [b"\x03", signal.SIGTERM])
def test_what_ends_it_leaves_as_q_does(run: Run, tmp_path: Path, key: bytes | signal.Signals) -> None:
    terminal = Terminal(tmp_path, "status", str(run.path), "--watch")
    until(terminal, lambda sent: "q: stop watching" in sent)
    end(terminal, key)
