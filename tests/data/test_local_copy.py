"""Tests of local copies of the training data.

The samples do not change, all copies are removed at the end, and training continues without copies after a failure.
"""

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
from pipeline.run.events import LocalCopy

Events = list[Any]
SEQUENCE_LENGTH = 10
FILE_SAMPLES = 50


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poll every 10 ms, treat the test folder as a disk, and check that no thread is left."""
    monkeypatch.setattr(LocalCopies, "poll_interval_s", 0.01)
    monkeypatch.setattr(local_copy, "read_file_system_type", lambda _: "ext4")
    threads_before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads_before


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Return a temporary folder that stands for the local disk of a node."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """Return a temporary folder that stands for shared storage."""
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def make_dataset(folder: Path, files: int = 3) -> TokenDataset:
    """Write shards of `FILE_SAMPLES` samples to a folder and open them."""
    entries = []
    for number in range(files):
        path = folder / f"{number}.h5"
        tokens = np.arange(FILE_SAMPLES * SEQUENCE_LENGTH + 1, dtype=np.uint16) + 1000 * number
        path.write_bytes(b"x" * 24 + tokens.tobytes())
        entries.append(
            ShardEntry.model_construct(
                file=path.name, size=path.stat().st_size, sha256=sha256_file(path), tokens=len(tokens), offset=24,
                dtype="uint16",
            )
        )  # fmt: skip
    return TokenDataset(entries, SEQUENCE_LENGTH, folder)


def make_ranges(path: Path, tokens: np.ndarray, ranges: list[tuple[int, int]]) -> list[ShardEntry]:
    """Write tokens to a file and return a shard entry for each range of its bytes.

    Sluice makes such entries for a large token file of the user. The shard stage then writes no shards.
    """
    path.write_bytes(tokens.tobytes())
    return [
        ShardEntry.model_construct(
            file=str(path), size=path.stat().st_size, part=part, sha256=sha256_file(path, part),
            tokens=(part[1] - part[0]) // 2, offset=part[0], dtype="uint16",
        )
        for part in ranges
    ]  # fmt: skip


def copy_files(dataset: TokenDataset, folder: Path, disk: str | Path, events: Events) -> LocalCopies:
    """Start the rank of a node that copies the files."""
    return LocalCopies(dataset, folder, str(disk), "key", events.append)


def follow_copies(dataset: TokenDataset, folder: Path, disk: str | Path) -> LocalCopies:
    """Start another rank of the node, which only uses the copies."""
    return LocalCopies(dataset, folder, str(disk), "key", None)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true; fail after 60 s."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def read_all(dataset: TokenDataset) -> list[list[int]]:
    """Return the tokens of all samples."""
    return [list(row) for row in dataset.read(np.arange(len(dataset)))["tokens"].tolist()]


def overwrite(path: Path) -> None:
    """Overwrite a file in place. A dataset that still maps this file reads other tokens afterwards."""
    with open(path, "r+b") as file:
        file.write(b"\xff" * path.stat().st_size)


def test_samples_are_read_from_the_copies_and_do_not_change(shared_folder: Path, disk: Path) -> None:
    dataset = make_dataset(shared_folder)
    events = Events()
    expected = read_all(dataset)
    total_bytes = sum(entry.size for entry in dataset.entries)
    with copy_files(dataset, shared_folder, disk, events) as copies:
        wait_until(lambda: bool(events))
        assert not copies._pending
        for number in range(3):
            overwrite(shared_folder / f"{number}.h5")
        assert read_all(dataset) == expected
    (event,) = events
    assert isinstance(event, LocalCopy) and (event.files, event.bytes, event.no_room_for) == (3, total_bytes, 0)
    assert event.too_many_files_by is None and not list(disk.iterdir())


def test_copies_use_at_most_half_of_the_file_descriptors(
    shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    dataset = make_dataset(shared_folder)
    expected = read_all(dataset)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))  # so at most two copies are opened
    with copy_files(dataset, shared_folder, disk, events), follow_copies(dataset, shared_folder, disk) as follower:
        wait_until(lambda: bool(events) and not follower._pending)
        assert read_all(dataset) == expected
    assert (events[0].files, events[0].no_room_for, events[0].too_many_files_by) == (2, 0, 1)


def test_each_range_of_a_large_file_has_a_separate_copy(tmp_path: Path, disk: Path) -> None:
    large_file = tmp_path / "large.bin"
    entries = make_ranges(large_file, np.arange(3000, dtype=np.uint16), [(0, 2000), (2000, 3400), (3400, 6000)])
    dataset = TokenDataset(entries, SEQUENCE_LENGTH, tmp_path)
    events = Events()
    expected = read_all(dataset)
    with copy_files(dataset, tmp_path, disk, events):
        wait_until(lambda: bool(events))
        overwrite(large_file)
        assert read_all(dataset) == expected
    assert events[0].bytes == 6000 and events[0].files == 3


def test_entries_with_the_same_range_share_a_copy_but_equal_contents_do_not(tmp_path: Path, disk: Path) -> None:
    large_file = tmp_path / "large.bin"
    tokens = np.tile(np.arange(1000, dtype=np.uint16), 3)  # the ranges have the same content
    entries = make_ranges(large_file, tokens, [(0, 2000), (2000, 4000), (4000, 6000)])
    dataset = TokenDataset([*entries, entries[1]], SEQUENCE_LENGTH, tmp_path)
    events = Events()
    expected = read_all(dataset)
    with copy_files(dataset, tmp_path, disk, events) as copies:
        wait_until(lambda: bool(events))
        assert not copies._pending and events[0].files == 3
        overwrite(large_file)
        assert read_all(dataset) == expected


def test_one_rank_copies_the_files_and_the_last_rank_removes_them(shared_folder: Path, disk: Path) -> None:
    datasets = [make_dataset(shared_folder) for _ in range(4)]
    events = Events()
    ranks = [follow_copies(dataset, shared_folder, disk) for dataset in datasets[1:]]
    ranks.append(copy_files(datasets[0], shared_folder, disk, events))
    wait_until(lambda: not any(rank._pending for rank in ranks))
    assert len(events) == 1
    for rank in ranks[:3]:
        rank.__exit__()
        # three copies; their names end with the position of their first byte in the shared file
        assert len(list(disk.glob("sluice-key/*-0"))) == 3
    ranks[3].__exit__()
    assert not list(disk.iterdir())


def test_only_the_copying_rank_reports_a_failure(
    tmp_path: Path, shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = [make_dataset(shared_folder) for _ in range(3)]
    events = Events()
    # replace the first file, so that its hash differs from that in the manifest
    shutil.copy(shared_folder / "2.h5", tmp_path / "other")
    os.replace(tmp_path / "other", shared_folder / "0.h5")
    copied_sources: list[Path] = []
    original_copy = LocalCopies._copy_range

    def record_source_and_copy(self: LocalCopies, source: Path, *arguments: Any) -> str:
        copied_sources.append(source)
        return original_copy(self, source, *arguments)

    monkeypatch.setattr(LocalCopies, "_copy_range", record_source_and_copy)
    followers = [follow_copies(dataset, shared_folder, disk) for dataset in datasets[1:]]
    with copy_files(datasets[0], shared_folder, disk, events):
        wait_until(lambda: bool(events))
        time.sleep(0.1)  # in this time, a rank that did not stop would copy another file
    for follower in followers:
        follower.__exit__()
    assert len(events) == len(copied_sources) == 1 and not list(disk.iterdir())


def test_copying_stops_at_a_file_that_differs_from_the_manifest(
    tmp_path: Path, shared_folder: Path, disk: Path
) -> None:
    dataset = make_dataset(shared_folder)
    events = Events()
    expected = read_all(dataset)
    (shared_folder / "1.h5").rename(tmp_path / "mapped")  # The dataset still maps this file.
    shutil.copy(shared_folder / "2.h5", shared_folder / "1.h5")
    with copy_files(dataset, shared_folder, disk, events) as copies:
        wait_until(lambda: bool(events))
        assert "1.h5" in events[0].error and sha256_file(shared_folder / "1.h5") in events[0].error
        assert list(copies._pending.values()) == [[1], [2]], "only the first file may be copied"
        assert read_all(dataset) == expected
    assert not list(disk.iterdir())


@pytest.mark.parametrize("folder", ["$SLUICE_NO_SUCH_VARIABLE", "/no/such/folder"])
def test_a_missing_folder_is_reported_once(folder: str, shared_folder: Path) -> None:
    events = Events()
    with copy_files(make_dataset(shared_folder), shared_folder, folder, events):
        wait_until(lambda: bool(events))
    assert "site.local_disk" in events[0].error and len(events) == 1


def test_a_folder_of_another_user_is_not_used(shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with copy_files(make_dataset(shared_folder), shared_folder, disk, events):
        wait_until(lambda: bool(events))
    assert str(disk) in events[0].error and events[0].files is None


def test_a_folder_in_main_memory_is_not_used(shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events()
    monkeypatch.setattr(local_copy, "read_file_system_type", lambda _: "tmpfs")
    with copy_files(make_dataset(shared_folder), shared_folder, disk, events):
        wait_until(lambda: bool(events))
    assert "main memory" in events[0].error and not list(disk.iterdir())


def test_a_write_error_leaves_no_incomplete_copy(shared_folder: Path, disk: Path) -> None:
    dataset = make_dataset(shared_folder)
    events = Events()
    expected = read_all(dataset)
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler_before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, limits_before[1]))  # bytes; each shard is larger
    try:
        with copy_files(dataset, shared_folder, disk, events) as copies:
            wait_until(lambda: bool(events))
            assert events[0].error and len(copies._pending) == 3 and read_all(dataset) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)
        signal.signal(signal.SIGXFSZ, handler_before)
    assert not list(disk.iterdir())


def test_a_file_without_space_on_the_disk_is_read_from_shared_storage(
    shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(shared_folder)
    events = Events()
    expected = read_all(dataset)
    size = dataset.entries[0].size

    def report_space_for_two_files(folder: Path) -> Any:
        used_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        return SimpleNamespace(total=20 * size, free=3 * size - used_bytes)  # a twentieth must stay free

    monkeypatch.setattr(shutil, "disk_usage", report_space_for_two_files)
    with copy_files(dataset, shared_folder, disk, events) as copies:
        wait_until(lambda: bool(events))
        assert (events[0].files, events[0].no_room_for, list(copies._pending.values())) == (2, 1, [[2]])
        assert read_all(dataset) == expected


def test_the_folder_of_a_killed_job_is_removed_but_not_one_in_use(shared_folder: Path, disk: Path) -> None:
    for name in ("killed", "used"):
        (disk / f"sluice-{name}").mkdir()
        (disk / f"sluice-{name}/users").touch()
    (disk / "sluice-ness").mkdir()  # not a folder of copies
    events = Events()
    with open(disk / "sluice-used/users") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with copy_files(make_dataset(shared_folder), shared_folder, disk, events):
            wait_until(lambda: bool(events))
        assert {path.name for path in disk.iterdir()} == {"sluice-used", "sluice-ness"}


def test_no_file_is_left_if_training_ends_while_a_file_is_copied(
    shared_folder: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(shared_folder)
    events = Events()
    is_hashing = threading.Event()
    may_continue = threading.Event()

    class BlockedHash:
        """A hash that waits for the test."""

        def update(self, chunk: bytes) -> None:
            is_hashing.set()
            may_continue.wait(60)

        def hexdigest(self) -> str:
            return "no hash"

    monkeypatch.setattr(local_copy.hashlib, "sha256", BlockedHash)
    monkeypatch.setattr(local_copy, "_CHUNK_BYTES", 100)
    with copy_files(dataset, shared_folder, disk, events) as copies:
        assert is_hashing.wait(60)
        assert any(disk.glob("*/.*.tmp"))
        copies._closed.set()  # as `__exit__` does, but without waiting for the thread
        may_continue.set()
    assert not events and not list(disk.iterdir())
