"""Tests of the copy of the working directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.run import work_dir
from pipeline.run.work_dir import IGNORE_FILE, copy_working_dir
from tests.support.errors import raises_error


def make_files(folder: Path, *names: str) -> None:
    """Make files with their names as content."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def list_files(folder: Path) -> set[str]:
    """Return the paths of all files and links in a directory, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def test_everything_is_copied_except_what_is_ignored(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    kept = {"train.py", "package/module.py", "data/small.txt", "deep/data/x.bin", IGNORE_FILE}
    make_files(
        source, "train.py", "package/module.py", "data/small.txt", "deep/data/x.bin", "data/x.bin", "big.npz",
        "package/__pycache__/module.pyc", ".git/config", ".venv/bin/python", "runs/old/config.yaml", "logs/a/b.txt",
        "elsewhere/run/events.jsonl", "elsewhere/run/config.yaml",
    )  # fmt: skip
    (source / IGNORE_FILE).write_text("# large files\n*.npz\n/data/*.bin\nlogs/\n\n")
    copy_working_dir(source, target, [source / "runs"], 0o077)
    assert list_files(target) == kept
    assert all(path.stat().st_mode & 0o077 == 0 for path in target.rglob("*"))


def test_links_stay_links(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    make_files(source, "a.txt")
    (tmp_path / "elsewhere").mkdir()
    os.symlink("a.txt", source / "link")
    os.symlink("missing", source / "dangling")
    shared = tmp_path / "shared.txt"
    shared.touch()
    shared.chmod(0o644)
    os.symlink(shared, source / "shared")
    os.symlink(tmp_path / "elsewhere", source / "folder")
    copy_working_dir(source, target, [], 0o077)
    assert os.readlink(target / "dangling") == "missing" and shared.stat().st_mode & 0o777 == 0o644
    assert os.readlink(target / "link") == "a.txt" and os.readlink(target / "folder") == str(tmp_path / "elsewhere")


def test_a_second_copy_replaces_files_and_keeps_outputs(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    make_files(source, "train.py")
    copy_working_dir(source, target, [], 0o022)
    make_files(target, "out/result.txt")
    (source / "train.py").write_text("new")
    copy_working_dir(source, target, [], 0o022)
    assert (target / "train.py").read_text() == "new" and (target / "out/result.txt").exists()


def test_a_second_copy_writes_nothing_to_the_targets_of_links(tmp_path: Path) -> None:
    """A directory was a file or a link when it was copied first. A command replaced another one by a link."""
    source, target, shared = tmp_path / "source", tmp_path / "copy", tmp_path / "shared"
    make_files(shared, "a.txt")
    make_files(source, "file", "made/b.txt")
    os.symlink(shared, source / "link")
    copy_working_dir(source, target, [], 0o022)
    for name in ("file", "link"):
        (source / name).unlink()
    shutil.rmtree(target / "made")
    os.symlink(shared, target / "made")
    make_files(source, "file/a.txt", "link/a.txt", "made/a.txt")
    copy_working_dir(source, target, [], 0o022)
    assert (shared / "a.txt").read_text() == "a.txt" and list_files(shared) == {"a.txt"}
    assert list_files(target) == {"file/a.txt", "link/a.txt", "made/a.txt", "made/b.txt"}


def test_an_output_directory_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "copy"
    make_files(source, "out")
    make_files(target, "out/result.txt")
    with raises_error("work.is_directory", target / "out"):
        copy_working_dir(source, target, [], 0o022)
    assert (target / "out/result.txt").exists()


@pytest.mark.parametrize(("limit", "value"), [("MAX_BYTES", 1000), ("MAX_FILES", 3)])
def test_too_much_is_an_error_that_names_the_largest_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    make_files(tmp_path, "data/a", "data/b", "data/c", "train.py")
    (tmp_path / "data/a").write_text("x" * 5000)
    monkeypatch.setattr(work_dir, limit, value)
    with raises_error("work.too_large", "data (", tmp_path / IGNORE_FILE):
        copy_working_dir(tmp_path, tmp_path / "copy", [], 0o022)
    assert not (tmp_path / "copy").exists()
    (tmp_path / IGNORE_FILE).write_text("data\n")
    copy_working_dir(tmp_path, tmp_path / "copy", [], 0o022)


def test_an_unsupported_pattern_is_an_error(tmp_path: Path) -> None:
    make_files(tmp_path, "train.py")
    (tmp_path / IGNORE_FILE).write_text("*.bin\n!keep.bin\n")
    with raises_error("work.invalid_pattern", "!keep.bin", tmp_path / IGNORE_FILE):
        copy_working_dir(tmp_path, tmp_path / "copy", [], 0o022)
