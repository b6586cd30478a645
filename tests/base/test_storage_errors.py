"""Tests of the errors for unusable paths (files, symbolic links, pipes) and for limits on files and memory mappings."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipeline.base.errors import StorageError, UserError, find_storage_error
from pipeline.base.files import translate_read_errors
from pipeline.config.read import load_config
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import map_arrays
from pipeline.run.directory import Run
from tests.support.errors import raises_error
from tests.support.events import read_event_lines
from tests.support.tiny import write_config


def create_file(path: Path) -> None:
    """Create a file and its parent folders."""
    path.parent.mkdir(parents=True)
    path.write_text("content")


def create_link_to_itself(path: Path) -> None:
    """Create a symbolic link to itself, and its parent folders."""
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("create_obstacle", "root", "code", "expected_texts"),
    [
        (create_file, "runs", "storage.invalid_path", ["runs/tiny", "file, not a folder"]),
        (create_link_to_itself, "runs", "storage.invalid_path", ["runs/tiny", "remove it"]),
        (None, "/proc", "run.not_writable", ["run.root", "/proc/tiny"]),
        (None, "/dev/null", "storage.invalid_path", ["/dev/null", "file, not a folder"]),
        (None, "/sys/kernel", "storage.permission_denied", ["/sys/kernel/tiny"]),
    ],
)
def test_creating_a_run_fails_if_the_path_is_unusable(
    tmp_path: Path,
    create_obstacle: Callable[[Path], None] | None,
    root: str,
    code: str,
    expected_texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(write_config(tmp_path), [f"run.root={root}"])
    if create_obstacle is not None:
        create_obstacle(tmp_path / root / "tiny")
    with pytest.raises((UserError, OSError)) as raised:
        Run.create(config)
    error = raised.value if isinstance(raised.value, UserError) else find_storage_error(raised.value)
    assert error is not None, repr(raised.value)
    with raises_error(code, *expected_texts):
        raise error


@pytest.mark.parametrize(
    ("path", "expected_text"),
    [
        ("/proc", "no config.yaml"), ("/dev/null", "no such directory"), ("tiny.yaml", "runs/tiny"),
        ("loop", "no such directory"), ("missing", "no such directory"), ("tiny.yaml/x", "no such directory"),
    ],
)  # fmt: skip
def test_opening_a_path_that_is_not_a_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected_text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    create_link_to_itself(tmp_path / "folder/loop")
    (tmp_path / "loop").symlink_to("folder/loop")
    with raises_error("run.not_a_run", path, expected_text):
        Run.open(path)


def test_reading_a_pipe_fails_instead_of_blocking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "copy_code", lambda self, **options: None)
    run = Run.create(load_config(write_config(tmp_path)))
    run.events_file.unlink()
    os.mkfifo(run.events_file)
    with raises_error("storage.not_a_file", run.events_file):
        read_event_lines(run)
    run.code_dir.mkdir()
    (run.code_dir / "DIFF").touch()
    os.mkfifo(run.code_dir / "COMMIT")
    with raises_error("storage.not_a_file", run.code_dir / "COMMIT"):
        print(run.title)  # the title contains the commit


@contextmanager
def exhaust_open_files() -> Iterator[None]:
    """Open files until the limit of this process is reached, so that the block can open no more.

    The limit is lowered to 200 files, so that this takes little time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, soft), hard))
    try:
        with suppress(OSError):
            while True:
                descriptors.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in descriptors:
            os.close(fd)


def test_too_many_open_files_is_not_reported_as_a_damaged_file(tmp_path: Path) -> None:
    shard = tmp_path / "shard.h5"
    with h5py.File(shard, "w") as file:
        file["tokens"] = np.arange(8, dtype=np.uint16)
    entry = ShardEntry(
        file="shard.h5", size=1, sha256="", tokens=8, documents=1, bytes=1, offset=2048, dtype="uint16"
    )  # fmt: skip
    with exhaust_open_files():
        for read_file in (lambda: map_arrays(entry, shard), lambda: open_hdf5(shard), lambda: open_binary(shard)):
            with raises_error("storage.too_many_open_files", "ulimit -n", kind=StorageError):
                read_file()


def open_hdf5(path: Path) -> None:
    """Open and close a file as HDF5."""
    with translate_read_errors(str(path)), h5py.File(path, "r"):
        pass


def open_binary(path: Path) -> None:
    """Open and close a file."""
    with translate_read_errors(str(path)), open(path, "rb"):
        pass


def write_beyond_file_size_limit(folder: Path) -> None:
    """Try to write a file that is larger than this process may write (`ulimit -f`)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        (folder / "large").write_bytes(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def rename_onto_nonempty_folder(folder: Path) -> None:
    """Try to rename a folder to the name of a folder that is not empty."""
    (folder / "new").mkdir()
    (folder / "old/file").mkdir(parents=True)
    os.rename(folder / "new", folder / "old")


@pytest.mark.parametrize(
    ("fail", "code", "expected_text"),
    [
        (write_beyond_file_size_limit, "storage.file_too_large", "ulimit -f"),
        (rename_onto_nonempty_folder, "storage.busy", "new"),
    ],
)
def test_the_file_size_limit_and_a_nonempty_target_folder_are_storage_errors(
    tmp_path: Path, fail: Callable[[Path], None], code: str, expected_text: str
) -> None:
    with pytest.raises(OSError) as raised:
        fail(tmp_path)
    error = find_storage_error(raised.value)
    assert error is not None and error.code == code and expected_text in str(error)


def test_too_many_mapped_files_is_not_reported_as_a_damaged_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux allows 65,530 mappings per process (vm.max_map_count), regardless of `ulimit -n`."""

    def fail_to_map(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    (tmp_path / "shard").write_bytes(bytes(16))
    entry = ShardEntry.model_construct(file="shard", tokens=8, offset=0, dtype="uint16", part=None)
    monkeypatch.setattr(mmap, "mmap", fail_to_map)
    with raises_error("storage.too_many_mapped_files", "vm.max_map_count", kind=StorageError):
        map_arrays(entry, tmp_path / "shard")
