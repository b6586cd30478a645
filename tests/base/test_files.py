"""Tests of writing files: several processes append lines to one file, and files are linked, cloned or copied."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.base import files
from pipeline.base.files import append_line, link_or_copy
from tests.support.requirements import skip_or_fail_in_ci

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


# -- links and copies ------------------------------------------------------------------------------------------


def check_independence(source: Path, target: Path) -> None:
    """Check that `target` has the content of `source`, and keeps it if `source` is replaced and removed."""
    content = source.read_bytes()
    assert target.read_bytes() == content
    replacement = source.with_name("replacement")
    replacement.write_bytes(b"other")
    replacement.rename(source)
    assert target.read_bytes() == content
    source.unlink()
    assert target.read_bytes() == content


def test_a_file_is_linked_if_possible(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    (tmp_path / "symlink").symlink_to(source)
    assert link_or_copy(tmp_path / "symlink", target) == "linked"
    assert not target.is_symlink() and target.samefile(source)
    check_independence(source, target)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_a_file_is_copied_if_it_can_be_neither_linked_nor_cloned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(fcntl, "ioctl", fail)
    assert link_or_copy(source, target) == "copied"
    check_independence(source, target)


def test_a_file_is_cloned_if_it_cannot_be_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file systems of most test machines have no clones, so this test replaces the ioctl."""

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def clone(target: int, request: int, source: int) -> None:
        assert request == 0x40049409  # FICLONE in linux/fs.h: _IOW(0x94, 9, int)
        os.sendfile(target, source, 0, os.fstat(source).st_size)

    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(100_000))
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(fcntl, "ioctl", clone)
    assert link_or_copy(source, target) == "cloned"
    check_independence(source, target)


def test_a_file_is_copied_to_another_file_system(tmp_path: Path) -> None:
    if not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        skip_or_fail_in_ci("/dev/shm is not a second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source, target = tmp_path / "source", Path(folder, "target")
        source.write_bytes(os.urandom(100_000))
        assert link_or_copy(source, target) == "copied"
        check_independence(source, target)


def test_an_existing_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    with pytest.raises(FileExistsError):
        link_or_copy(source, target)
    assert target.read_text() == "old"
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "missing", tmp_path / "other")
