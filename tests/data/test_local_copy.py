"""Copies on a node's own disk: the same samples, one copier a node, nothing left; what fails leaves training alone."""

from __future__ import annotations

import fcntl
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.base.files import sha256_file
from pipeline.data import local_copy
from pipeline.data.local_copy import LocalCopies
from pipeline.data.manifest import ShardEntry
from pipeline.data.samples import TokenDataset

Told = list[dict[str, Any]]
LENGTH = 10


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LocalCopies, "every_s", 0.01)
    monkeypatch.setattr(local_copy, "read_file_system_type", lambda _: "ext4")
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def make_dataset(folder: Path, files: int = 3) -> TokenDataset:
    """Of shards in `folder`, each of 50 samples."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number in range(files):
        path, tokens = folder / f"{number}.h5", np.arange(50 * LENGTH + 1, dtype=np.uint16) + 1000 * number
        path.write_bytes(b"x" * 24 + tokens.tobytes())
        entries.append(
            ShardEntry.model_construct(
                file=path.name, size=path.stat().st_size, sha256=sha256_file(path), tokens=len(tokens), offset=24,
                dtype="uint16",
            )
        )  # fmt: skip
    return TokenDataset(entries, LENGTH, folder)


def copies(dataset: TokenDataset, folder: Path, disk: str | Path, told: Told) -> LocalCopies:
    return LocalCopies(
        dataset, folder, str(disk), "key", lambda event, **fields: told.append({"event": event, **fields})
    )


def beside(dataset: TokenDataset, folder: Path, disk: str | Path) -> LocalCopies:
    """Another rank of the node."""
    return LocalCopies(dataset, folder, str(disk), "key", None)


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_no_more_copies_than_descriptors(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Told = []
    dataset = make_dataset(tmp_path / "data")
    expected = all_of(dataset)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    with copies(dataset, tmp_path / "data", disk, told), beside(dataset, tmp_path / "data", disk) as other:
        until(lambda: bool(told) and not other._waiting)
        assert all_of(dataset) == expected
    assert (told[0]["files"], told[0]["no_room_for"], told[0]["too_many_files_by"]) == (2, 0, 1)


def all_of(dataset: TokenDataset) -> list[list[int]]:
    return [list(row) for row in dataset.read(np.arange(len(dataset)))["tokens"].tolist()]


def test_what_is_read_is_the_same_and_stands_on_the_disk(tmp_path: Path, disk: Path) -> None:
    dataset, told = make_dataset(tmp_path / "shared"), Told()
    expected, size = all_of(dataset), sum(entry.size for entry in dataset.entries)
    with copies(dataset, tmp_path / "shared", disk, told) as moved:
        until(lambda: bool(told))
        assert not moved._waiting
        for number in range(3):  # in place: the maps that were there would show it
            path = tmp_path / "shared" / f"{number}.h5"
            with open(path, "r+b") as file:
                file.write(b"\xff" * path.stat().st_size)
        assert all_of(dataset) == expected
    assert {key: told[0][key] for key in ("event", "files", "bytes", "no_room_for")} == {
        "event": "local_copy", "files": 3, "bytes": size, "no_room_for": 0,
    }  # fmt: skip
    assert len(told) == 1 and not list(disk.iterdir())


def test_parts_of_a_large_file_are_copied_one_by_one(tmp_path: Path, disk: Path) -> None:
    tokens, told = np.arange(3000, dtype=np.uint16), Told()
    (tmp_path / "large.bin").write_bytes(tokens.tobytes())
    borders = [(0, 2000), (2000, 3400), (3400, 6000)]
    entries = [
        ShardEntry.model_construct(
            file=str(tmp_path / "large.bin"), size=6000, part=part, sha256=sha256_file(tmp_path / "large.bin", part),
            tokens=(part[1] - part[0]) // 2, offset=part[0], dtype="uint16",
        )
        for part in borders
    ]  # fmt: skip
    dataset = TokenDataset(entries, LENGTH, tmp_path)
    expected = all_of(dataset)
    with copies(dataset, tmp_path, disk, told):
        until(lambda: bool(told))
        (tmp_path / "large.bin").write_bytes(b"\xff" * 6000)
        assert all_of(dataset) == expected and told[0]["bytes"] == 6000 and told[0]["files"] == 3


def test_files_with_the_same_content_are_one_copy_and_equal_parts_are_not(tmp_path: Path, disk: Path) -> None:
    tokens, told = np.tile(np.arange(1000, dtype=np.uint16), 3), Told()
    (tmp_path / "large.bin").write_bytes(tokens.tobytes())
    entries = [
        ShardEntry.model_construct(
            file=str(tmp_path / "large.bin"), size=6000, part=(start, start + 2000), tokens=1000, offset=start,
            sha256=sha256_file(tmp_path / "large.bin", (start, start + 2000)), dtype="uint16",
        )
        for start in (0, 2000, 4000)
    ]  # fmt: skip
    dataset = TokenDataset([*entries, entries[1]], LENGTH, tmp_path)
    expected = all_of(dataset)
    with copies(dataset, tmp_path, disk, told) as moved:
        until(lambda: bool(told))
        assert not moved._waiting and told[0]["files"] == 3
        (tmp_path / "large.bin").write_bytes(b"\xff" * 6000)
        assert all_of(dataset) == expected


def test_one_rank_of_a_node_copies_and_the_last_one_removes(tmp_path: Path, disk: Path) -> None:
    ranks, told = [make_dataset(tmp_path / "shared") for _ in range(4)], Told()
    running = [beside(dataset, tmp_path / "shared", disk) for dataset in ranks[1:]]
    running.append(copies(ranks[0], tmp_path / "shared", disk, told))
    until(lambda: not any(one._waiting for one in running))
    assert len(told) == 1
    for one in running[:3]:
        one.__exit__()
        assert len(list(disk.glob("sluice-key/*-0"))) == 3
    running[3].__exit__()
    assert not list(disk.iterdir())


def test_what_fails_is_told_by_one_rank(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, told = [make_dataset(tmp_path / "shared") for _ in range(3)], Told()
    shutil.copy(tmp_path / "shared/2.h5", tmp_path / "other")
    os.replace(tmp_path / "other", tmp_path / "shared/0.h5")
    reads: list[Path] = []
    copied = LocalCopies._copied

    def counted(self: LocalCopies, source: Path, *more: Any) -> str:
        reads.append(source)
        return copied(self, source, *more)

    monkeypatch.setattr(LocalCopies, "_copied", counted)
    running = [beside(dataset, tmp_path / "shared", disk) for dataset in ranks[1:]]
    with copies(ranks[0], tmp_path / "shared", disk, told):
        until(lambda: bool(told))
        time.sleep(0.1)
    for one in running:
        one.__exit__()
    assert len(told) == len(reads) == 1 and not list(disk.iterdir())


def test_a_folder_in_memory_is_refused(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    monkeypatch.setattr(local_copy, "read_file_system_type", lambda _: "tmpfs")
    with copies(make_dataset(tmp_path / "shared"), tmp_path / "shared", disk, told):
        until(lambda: bool(told))
    assert "in memory" in told[0]["error"] and not list(disk.iterdir())


def test_a_full_disk_leaves_no_half_copy(tmp_path: Path, disk: Path) -> None:
    dataset, told = make_dataset(tmp_path / "shared"), Told()
    expected = all_of(dataset)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, old[1]))
    try:
        with copies(dataset, tmp_path / "shared", disk, told) as moved:
            until(lambda: bool(told))
            assert "error" in told[0] and len(moved._waiting) == 3 and all_of(dataset) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(disk.iterdir())


def test_a_killed_jobs_folder_is_removed_and_one_in_use_is_not(tmp_path: Path, disk: Path) -> None:
    for name in ("killed", "used"):
        (disk / f"sluice-{name}").mkdir()
        (disk / f"sluice-{name}/users").touch()
    (disk / "sluice-ness").mkdir()  # not one of ours
    with open(disk / "sluice-used/users") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        told = Told()
        with copies(make_dataset(tmp_path / "shared"), tmp_path / "shared", disk, told):
            until(lambda: bool(told))
        assert {path.name for path in disk.iterdir()} == {"sluice-used", "sluice-ness"}


def test_what_has_no_room_is_read_where_it_lies(tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, told = make_dataset(tmp_path / "shared"), Told()
    expected, size = all_of(dataset), dataset.entries[0].size

    def room_for_two(folder: Path) -> Any:
        held = sum(path.stat().st_size for path in Path(folder).iterdir())
        return SimpleNamespace(total=20 * size, free=3 * size - held)  # a twentieth stays free

    monkeypatch.setattr(shutil, "disk_usage", room_for_two)
    with copies(dataset, tmp_path / "shared", disk, told) as moved:
        until(lambda: bool(told))
        assert (told[0]["files"], told[0]["no_room_for"], list(moved._waiting.values())) == (2, 1, [[2]])
        assert all_of(dataset) == expected


def test_whatever_fails_is_told_once_and_nothing_stays(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong in ("$SLUICE_NO_SUCH_VARIABLE", tmp_path / "none"):
        told = Told()
        with copies(make_dataset(tmp_path / "shared"), tmp_path / "shared", wrong, told):
            until(lambda told=told: bool(told))  # type: ignore[misc]
        assert "no such folder" in told[0]["error"] and len(told) == 1
    dataset, told = make_dataset(tmp_path / "shared"), Told()
    expected = all_of(dataset)
    (tmp_path / "shared/1.h5").rename(tmp_path / "held")
    shutil.copy(tmp_path / "shared/2.h5", tmp_path / "shared/1.h5")
    with copies(dataset, tmp_path / "shared", disk, told) as moved:
        until(lambda: bool(told))
        assert "1.h5 is not what its manifest says" in told[0]["error"] and list(moved._waiting.values()) == [[1], [2]]
        assert all_of(dataset) == expected
    assert not list(disk.iterdir())
    told = Told()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with copies(dataset, tmp_path / "shared", disk, told):
        until(lambda: bool(told))
    assert "belongs to" in told[0]["error"]


def test_closing_in_the_middle_of_a_file_leaves_nothing(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, told, there, ends = make_dataset(tmp_path / "shared"), Told(), threading.Event(), threading.Event()

    class Slow:
        """A hash that takes its time."""

        def update(self, chunk: bytes) -> None:
            there.set()
            ends.wait(60)

        def hexdigest(self) -> str:
            return "no hash"

    monkeypatch.setattr(local_copy.hashlib, "sha256", Slow)
    monkeypatch.setattr(local_copy, "_CHUNK", 100)
    with copies(dataset, tmp_path / "shared", disk, told) as moved:
        assert there.wait(60)
        assert any(disk.glob("*/.*.tmp"))
        moved._closed.set()
        ends.set()
    assert not told and not list(disk.iterdir())
