"""Paths that are not what they should be, and limits that are reached: told as what they are, at once."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipeline.base.errors import StorageError, UserError, find_storage_error
from pipeline.base.files import translate_read_errors
from pipeline.config.read import load_config
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import map_arrays
from pipeline.run.directory import Run
from tests.support.events import read_event_lines
from tests.support.tiny import write_config


def file_at(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("a thesis")


def circle_at(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "root", "says"),
    [
        (file_at, "runs", "runs/tiny.*(is a file, not a folder|in the way)"),
        (circle_at, "runs", "something else is in the way: remove it"),
        (None, "/proc", "run.root: cannot make /proc/tiny: .* choose another run.root"),
        (None, "/dev/null", "a part of the path is a file"),
        (None, "/sys/kernel", "cannot"),
    ],
)
def test_a_run_cannot_be_made_there(
    tmp_path: Path, make: Callable[[Path], None] | None, root: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(write_config(tmp_path), [f"run.root={root}"])
    if make is not None:
        make(tmp_path / root / "tiny")
    with pytest.raises((UserError, OSError)) as found:
        Run.create(config)
    error = found.value if isinstance(found.value, UserError) else find_storage_error(found.value)
    assert error is not None, repr(found.value)
    with pytest.raises(UserError, match=says):
        raise error


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/proc", "no config.yaml"), ("/dev/null", "no such directory"), ("tiny.yaml", "runs/tiny"),
        ("circle", "no such directory"), ("none", "no such directory"), ("tiny.yaml/x", "no such directory"),
    ],
)  # fmt: skip
def test_there_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    circle_at(tmp_path / "more/circle")
    (tmp_path / "circle").symlink_to("more/circle")
    with pytest.raises(UserError) as error:
        Run.open(path)
    assert error.value.code == "run.not_a_run" and path in str(error.value) and says in str(error.value)


def test_a_pipe_in_place_of_a_file_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    run = Run.create(load_config(write_config(tmp_path)))
    run.events_file.unlink()
    os.mkfifo(run.events_file)
    with pytest.raises(UserError, match=r"events\.jsonl is no ordinary file"):
        read_event_lines(run)
    run.code_dir.mkdir()
    (run.code_dir / "DIFF").touch()
    os.mkfifo(run.code_dir / "COMMIT")
    with pytest.raises(UserError, match="COMMIT is no ordinary file"):
        print(run.title)


@contextmanager
def no_more_files() -> Iterator[None]:
    before, opened = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(200, before[0]), before[1]))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in opened:
            os.close(fd)


def test_a_limit_of_files_is_no_fault_of_the_file(tmp_path: Path) -> None:
    import h5py
    import numpy as np

    shard = tmp_path / "shard.h5"
    with h5py.File(shard, "w") as file:
        file["tokens"] = np.arange(8, dtype=np.uint16)
    entry = ShardEntry(
        file="shard.h5", size=1, sha256="", tokens=8, documents=1, bytes=1, offset=2048, dtype="uint16"
    )  # fmt: skip
    path = tmp_path / entry.file
    with no_more_files():
        for use in (lambda: map_arrays(entry, path), lambda: _read_hdf5(shard), lambda: _read_text(shard)):
            with pytest.raises(StorageError, match=r"too many files are open: raise the limit \(`ulimit -n`\)"):
                use()


def _read_hdf5(path: Path) -> None:
    import h5py

    with translate_read_errors(str(path)), h5py.File(path, "r"):
        pass


def _read_text(path: Path) -> None:
    with translate_read_errors(str(path)), open(path, "rb"):
        pass


def write_beyond_the_limit(folder: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        (folder / "large").write_bytes(bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rename_onto_a_folder(folder: Path) -> None:
    (folder / "new").mkdir()
    (folder / "old/file").mkdir(parents=True)
    os.rename(folder / "new", folder / "old")


@pytest.mark.parametrize(
    ("use", "facts"), [(write_beyond_the_limit, ["ulimit -f"]), (rename_onto_a_folder, ["new", "not empty"])]
)
def test_a_limit_and_a_full_folder_are_storage_errors(
    tmp_path: Path, use: Callable[[Path], None], facts: list[str]
) -> None:
    with pytest.raises(OSError) as found:
        use(tmp_path)
    error = find_storage_error(found.value)
    assert error is not None and all(fact in str(error) for fact in facts)


def test_too_many_maps_are_no_fault_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux lets a process map 65,530 pieces (vm.max_map_count), whatever `ulimit -n` says."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    (tmp_path / "shard").write_bytes(bytes(16))
    entry = ShardEntry.model_construct(file="shard", tokens=8, offset=0, dtype="uint16", part=None)
    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(StorageError, match=r"too many files are mapped \(vm.max_map_count\): have fewer"):
        map_arrays(entry, tmp_path / "shard")
