"""Tests that several processes can append lines to one file, also without atomic appends and without locks."""

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

WRITER_COUNT = 4
LINES_PER_WRITER = 20


def write_line_like_nfs(fd: int, line: str, name: str) -> None:
    """Append a line in two steps, as an NFS client does for O_APPEND (open(2)): find the end of the file, then write.

    Another process can find the same end between the two steps. One line then overwrites the other.
    """
    with open(name, "r+b") as file:
        file.seek(0, os.SEEK_END)
        time.sleep(0.001)
        file.write(line.encode() + b"\n")


def append_numbered_lines(path: Path, writer: int) -> None:
    """Append lines that consist of the number of the writer and the number of the line."""
    for number in range(LINES_PER_WRITER):
        append_line(path, f"{writer} {number}")


def test_no_line_is_lost_if_appends_are_not_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_line", write_line_like_nfs)
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_numbered_lines, args=(path, writer)) for writer in range(WRITER_COUNT)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    expected = [f"{writer} {number}" for writer in range(WRITER_COUNT) for number in range(LINES_PER_WRITER)]
    assert sorted(path.read_text().splitlines()) == sorted(expected)


@pytest.mark.parametrize("error_number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_lines_are_appended_if_the_file_system_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    def fail_to_lock(*_: Any) -> None:
        raise OSError(error_number, os.strerror(error_number))

    monkeypatch.setattr(fcntl, "flock", fail_to_lock)
    append_numbered_lines(tmp_path / "events.jsonl", 1)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == LINES_PER_WRITER


def test_append_line_writes_without_the_lock_after_the_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT_S", 0.05)
    path = tmp_path / "events.jsonl"
    append_line(path, "first")
    with open(path) as lock_holder:
        fcntl.flock(lock_holder, fcntl.LOCK_EX)
        append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"
