"""Tests of the batch loader: how far its thread reads ahead, how the thread ends, and how errors are reported."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.loader import BatchLoader
from pipeline.data.samples import TokenDataset
from tests.support.shards import write_shards

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def check_remaining_threads() -> Iterator[None]:
    """Let torch use one thread, and check that no thread is left after each test."""
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    threads_before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == threads_before
    torch.set_num_threads(torch_threads)


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    """Return a dataset with 10 samples of 11 tokens."""
    return TokenDataset(write_shards(tmp_path, [(101, 6)], "uint16")[0], 10)


def repeat_indices() -> Iterator[np.ndarray]:
    """Yield the indices of the same batch without end."""
    while True:
        yield np.array([1, 2])


@pytest.fixture
def limit_to_two_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loader keep at most two blocks ready, regardless of the consumer's speed."""
    monkeypatch.setattr(BatchLoader, "AHEAD_BYTES", 0)


def wait_until_full(batches: BatchLoader) -> None:
    """Wait until two blocks are ready."""
    deadline = time.monotonic() + 240
    while batches._ready.qsize() < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert batches._ready.qsize() == 2


@pytest.mark.usefixtures("limit_to_two_blocks")
def test_the_reader_thread_keeps_at_most_two_blocks_ready(dataset: TokenDataset) -> None:
    requested_batches = []

    def record_requests() -> Iterator[np.ndarray]:
        for indices in repeat_indices():
            requested_batches.append(indices)
            yield indices

    with BatchLoader(dataset, record_requests(), CPU) as batches:
        wait_until_full(batches)
        time.sleep(0.05)
        assert batches._ready.qsize() == 2
        # blocks of 1 and 2 batches are ready, and the thread may already have requested a block of 4 batches
        assert len(requested_batches) <= 1 + 2 + 4
        next(batches)
        wait_until_full(batches)


@pytest.mark.usefixtures("limit_to_two_blocks")
@pytest.mark.parametrize("batches_taken", [0, 1, 5])
def test_close_ends_a_waiting_thread(dataset: TokenDataset, batches_taken: int) -> None:
    batches = BatchLoader(dataset, repeat_indices(), CPU)
    for _ in range(batches_taken):
        next(batches)
    wait_until_full(batches)
    closer = threading.Thread(target=batches.close)
    closer.start()
    closer.join(60)
    assert not closer.is_alive()
    assert not batches._thread.is_alive()
    batches.close()
    assert list(batches) == []


def test_next_raises_the_errors_of_the_thread(dataset: TokenDataset) -> None:
    def fail_after_one() -> Iterator[np.ndarray]:
        yield np.array([1])
        raise OSError(5, "the storage failed")

    with BatchLoader(dataset, fail_after_one(), CPU) as batches:
        assert next(batches)["tokens"].shape == (1, 11)
        for _ in range(2):
            with pytest.raises(OSError, match="the storage failed"):
                next(batches)
    with BatchLoader(dataset, [np.array([0]), np.array([10])], CPU) as batches:
        next(batches)
        with pytest.raises(IndexError, match="10"):
            next(batches)


def test_a_finite_sampler_ends_the_iteration(dataset: TokenDataset) -> None:
    with BatchLoader(dataset, [np.array([number]) for number in range(5)], CPU) as batches:
        assert [batch["tokens"][0].tolist() for batch in batches] == dataset.read(np.arange(5))["tokens"].tolist()
        assert list(batches) == []


def test_the_thread_does_not_use_a_block_that_it_has_handed_over(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EmptyingQueue(queue.SimpleQueue[Any]):
        """Empty each block after it is put, as a fast consumer might do."""

        def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
            super().put(item.copy() if isinstance(item, list) else item)
            if isinstance(item, list):
                item.clear()

    monkeypatch.setattr("pipeline.data.loader.queue.SimpleQueue", EmptyingQueue)
    with BatchLoader(dataset, [np.array([number]) for number in range(5)], CPU) as batches:
        assert [batch["tokens"][0].tolist() for batch in batches] == dataset.read(np.arange(5))["tokens"].tolist()


@pytest.mark.usefixtures("limit_to_two_blocks")
def test_data_wait_s_is_the_time_that_the_consumer_waited(dataset: TokenDataset) -> None:
    def start_slowly() -> Iterator[np.ndarray]:
        time.sleep(0.2)
        yield from repeat_indices()

    with BatchLoader(dataset, start_slowly(), CPU) as batches:
        next(batches)
        first_wait_s = batches.data_wait_s
        wait_until_full(batches)
        next(batches)
        assert batches.data_wait_s < first_wait_s
    assert first_wait_s > 0.1


def test_a_read_that_takes_five_seconds_does_not_delay_the_consumer(
    dataset: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a simulated clock, a step takes 50 ms, so the loader reads 200 batches (ten seconds) ahead.

    The next read then blocks for 100 steps. The two blocks that are always read ahead have at most 32 batches, which
    would not be enough.
    """
    clock_s = 0.0
    is_blocked = threading.Event()
    may_continue = threading.Event()
    monkeypatch.setattr("pipeline.data.loader.time", SimpleNamespace(perf_counter=lambda: clock_s))
    monkeypatch.setattr(BatchLoader, "BLOCK_BYTES", 16 * 1024)
    original_read = dataset.read

    def wait_and_read(indices: np.ndarray, out: Any = None) -> Any:
        if is_blocked.is_set():
            assert may_continue.wait(60)
        return original_read(indices, out)

    monkeypatch.setattr(dataset, "read", wait_and_read)
    with BatchLoader(dataset, (np.array([number % 10]) for number in count()), CPU) as batches:
        for _ in range(40):
            assert next(batches)["tokens"].shape == (1, 11)
            clock_s += 0.05
        deadline = time.monotonic() + 60
        while batches._waiting_batches < 200 and time.monotonic() < deadline:
            time.sleep(0.001)
        is_blocked.set()
        for _ in range(100):
            next(batches)
            clock_s += 0.05
        may_continue.set()


@pytest.mark.usefixtures("limit_to_two_blocks")
def test_the_loader_starts_only_one_thread(tmp_path: Path) -> None:
    """Torch operations of this size would start an OpenMP pool in the loader's thread."""
    torch.set_num_threads(4)
    dataset = TokenDataset(write_shards(tmp_path, [(400_001, 0)], "uint16")[0], 100_000)
    threads_before = len(os.listdir("/proc/self/task"))
    with BatchLoader(dataset, (np.arange(4) for _ in range(9)), CPU) as batches:
        wait_until_full(batches)
        assert len(os.listdir("/proc/self/task")) == threads_before + 1


@settings(max_examples=30)
@given(st.lists(st.sampled_from([0.0, 1e-4, 1.0]), min_size=1, max_size=40), st.integers(0, 40), st.booleans())
def test_batches_arrive_in_order_at_any_speed_of_the_consumer(
    step_times_s: list[float], available_batches: int, fails: bool
) -> None:
    """`step_times_s` are the consumer's times for each batch.

    The sampler yields `available_batches` batches, and then ends or fails.
    """
    clock_s = 0.0

    def yield_indices() -> Iterator[np.ndarray]:
        yield from (np.array([number % 7, number % 5]) for number in range(available_batches))
        if fails:
            raise OSError(5, "the storage failed")

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr("pipeline.data.loader.time", SimpleNamespace(perf_counter=lambda: clock_s))
        patch.setattr(BatchLoader, "BLOCK_BYTES", 4 * 1024)  # at most four batches
        dataset = TokenDataset(write_shards(Path(folder), [(101, 6)], "uint16")[0], 10)
        expected = [
            dataset.read(indices)["tokens"].tolist()
            for indices in islice(yield_indices(), min(available_batches, len(step_times_s)))
        ]
        received: list[Any] = []
        with BatchLoader(dataset, yield_indices(), CPU) as batches:
            for step_time_s in step_times_s:
                try:
                    received.append(next(batches)["tokens"].tolist())
                except (OSError, StopIteration) as error:
                    assert isinstance(error, OSError if fails else StopIteration)
                    break
                clock_s += step_time_s
    # If reading a batch fails, up to three earlier batches of the same block are lost.
    min_received = len(expected) - (3 if fails else 0)
    assert received == expected[: len(received)] and len(received) >= min_received
