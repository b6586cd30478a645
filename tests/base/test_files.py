"""Lines that several processes append to one file, on file systems where that is hard."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.base import files
from pipeline.base.files import append_line

WRITERS, LINES = 4, 20


def write_as_nfs_does(fd: int, line: str, name: str) -> None:
    """Find the end, then write there: what an NFS client makes of O_APPEND (open(2))."""
    with open(name, "r+b") as file:
        file.seek(0, os.SEEK_END)
        time.sleep(0.001)
        file.write(line.encode() + b"\n")


def write_many(path: Path, writer: int) -> None:
    for number in range(LINES):
        append_line(path, f"{writer} {number}")


def test_no_line_is_lost_where_appends_are_not_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_line", write_as_nfs_does)
    path, context = tmp_path / "events.jsonl", multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, writer)) for writer in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    wanted = [f"{writer} {number}" for writer in range(WRITERS) for number in range(LINES)]
    assert sorted(path.read_text().splitlines()) == sorted(wanted)


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_still_takes_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write_many(tmp_path / "events.jsonl", 1)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == LINES


def test_nobody_waits_for_ever_for_a_writer_that_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "events.jsonl"
    append_line(path, "first")
    with open(path) as sleeper:
        fcntl.flock(sleeper, fcntl.LOCK_EX)
        append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"
