"""The rank's side of the processes that read a dataset (pipeline/data/dataset_worker.py).

    DatasetPool     starts the processes, gives them tasks and waits for the results
    DatasetSamples  the samples of a split: their number and shapes; reads held-out samples
    DatasetLoader   delivers training batches in the order of a sampler, with the interface of `BatchLoader`

Each batch is divided among all workers, so that a batch is complete early. Tasks are given to the worker that is free
first. Which worker reads a sample does not change the sample. An iterable dataset is an exception: each worker reads
its own part of the dataset, so worker w of N reads the rows w, w + N, … of this rank.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

import torch

from pipeline.base.device_thread import device_thread
from pipeline.data.dataset import TRAIN_SPLIT, DatasetRequest, make_dataset_options
from pipeline.data.dataset_worker import IGNORED_SIGNALS, BatchMemory, ServerRequest, Task, TaskDone, WorkerExit
from pipeline.data.loader import Batch
from pipeline.data.manifest import SampleManifest
from pipeline.data.sample_order import IndexedDataset, Int64Array
from pipeline.data.samples import Arrays
from pipeline.run.code import CODE_ROOT, make_code_env
from pipeline.run.directory import Run
from pipeline.run.worker import WorkerDiedError

AHEAD_BYTES = 1 << 28
"""Maximum size of the batches that workers read ahead, unless all workers would not have enough tasks."""
MAX_SLOTS = 64
"""Maximum number of batches that workers read ahead, unless all workers would not have enough tasks."""
_TASKS_PER_WORKER = 2
"""Number of tasks that a worker has at a time, so that it need not wait for the rank between two tasks."""
_EXIT_S = 10.0
"""How long the server may take to report why a worker has exited, or to exit, in seconds."""


@dataclass
class _Worker:
    """A worker process."""

    socket: Connection
    waiting: deque[Task] = field(default_factory=deque)
    """Tasks of an iterable dataset that only this worker can do, and that it has not received yet."""
    running: int = 0
    """Number of tasks that the worker has received and not answered."""


class DatasetPool:
    """The processes of a rank that read one split of a dataset. Create it in the main thread.

    Args:
        request: the dataset.
        rows: maximum number of samples of a batch.
        slots: number of batches that have room in the shared memory; None: choose it.
    """

    def __init__(self, request: DatasetRequest, rows: int, slots: int | None = None) -> None:
        assert request.entry is not None
        assert threading.current_thread() is threading.main_thread(), "the kernel ends the server with this thread"
        self._name = f"dataset of {request.model.target}"
        self._is_iterable = request.split == TRAIN_SPLIT and request.entry.is_iterable
        workers = request.workers
        # Twice as many tasks as workers let a fast worker do more of a batch than a slow one.
        self._task_rows = max(1, -(-rows // (2 * workers)))
        memory = BatchMemory(request.entry.arrays, 1, rows)
        if slots is None:
            tasks_per_batch = -(-rows // self._task_rows)
            min_slots = 2 + -(-_TASKS_PER_WORKER * workers // tasks_per_batch)
            slots = max(min_slots, min(MAX_SLOTS, AHEAD_BYTES // max(1, memory.batch_bytes)))
        self.slots = slots
        """Number of batches that can be read at the same time."""
        memory = replace(memory, slots=slots)
        self._waiting: deque[Task] = deque()
        """Tasks that any worker can do."""
        self._missing = [0] * slots
        """For each slot, the number of samples that are not read yet."""
        self.states: list[list[bytes | None]] = [[None] * workers for _ in range(slots)]
        """For an iterable dataset, the state of each worker after the batch of each slot; None: not used in it."""
        memory_fd = os.memfd_create("sluice-batches")
        os.ftruncate(memory_fd, memory.size)
        self._views = memory.map_arrays(memory_fd)
        pairs = [socket.socketpair() for _ in range(workers + 1)]
        fds = [child.fileno() for _, child in pairs]
        # Signals that arrive before the server ignores them would kill it. A process inherits blocked signals.
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.data.dataset_worker", str(os.getpid()), str(fds[0])],
                # With a fixed hash seed, sets have the same order in each process.
                env={**make_code_env(os.environ, CODE_ROOT), "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                pass_fds=(*fds, memory_fd),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            for _, child in pairs:
                child.close()
        self._control, *sockets = [Connection(parent.detach()) for parent, _ in pairs]
        self._workers = [_Worker(worker_socket) for worker_socket in sockets]
        self._control.send(ServerRequest(request, memory, memory_fd, fds[1:]))
        os.close(memory_fd)

    def submit(self, slot: int, indices: Int64Array, positions: Int64Array | None, first_row: int = 0) -> None:
        """Let the workers read a batch into a free slot.

        Args:
            slot: number of the slot.
            indices: numbers of the samples, int64, shape (B,). For an iterable dataset, the workers do not use them.
            positions: positions in the order of the run, the same shape; None for held-out samples.
            first_row: for an iterable dataset, how many samples this rank has drawn before this batch.
        """
        count = len(indices)
        self._missing[slot] = count
        position_list = None if positions is None else positions.tolist()
        if not self._is_iterable:
            index_list = indices.tolist()
            for start in range(0, count, self._task_rows):
                rows = slice(start, start + self._task_rows)
                task_positions = None if position_list is None else position_list[rows]
                self._waiting.append(Task(slot, range(count)[rows], index_list[rows], task_positions))
        else:
            assert position_list is not None
            workers = len(self._workers)
            self.states[slot] = [None] * workers
            for number, worker in enumerate(self._workers):
                rows = slice((number - first_row) % workers, None, workers)
                drawn = [(first_row + row) // workers for row in range(count)[rows]]
                if drawn:
                    worker.waiting.append(Task(slot, range(count)[rows], drawn, position_list[rows]))
        self._send_tasks()

    @property
    def needs_tasks(self) -> bool:
        """Return whether a worker may soon have no task unless another batch is submitted."""
        counts = [len(self._waiting) + len(worker.waiting) for worker in self._workers]
        return min(counts) < len(self._workers)

    def is_complete(self, slot: int) -> bool:
        """Return whether the batch of a slot has been read."""
        return not self._missing[slot]

    def copy_batch(self, slot: int, count: int, out: Arrays) -> None:
        """Copy the first `count` samples of a slot to arrays."""
        for name, array in out.items():
            array[:] = self._views[name][slot, :count]

    def process_answers(self, other: Sequence[int] = ()) -> None:
        """Wait until workers have answered, or one of the file descriptors `other` is readable. Send further tasks.

        Raises UserError or another error if a worker failed, and WorkerDiedError or MemoryError if it was killed.
        """
        by_socket = {worker.socket: (number, worker) for number, worker in enumerate(self._workers)}
        for ready in wait([*by_socket, self._control, *other]):
            if ready is self._control:
                self._raise_exit()
            elif (found := by_socket.get(ready)) is not None:  # type: ignore[call-overload]
                self._process_answer(*found)
        self._send_tasks()

    def close(self) -> None:
        """End the processes and wait for them."""
        for connection in (self._control, *(worker.socket for worker in self._workers)):
            connection.close()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._views = {}  # This unmaps the memory.

    def _process_answer(self, number: int, worker: _Worker) -> None:
        """Receive the answer of a worker."""
        try:
            answer = worker.socket.recv()
        except (EOFError, ConnectionError):
            if self._control.poll(_EXIT_S):
                self._raise_exit()
            raise WorkerDiedError(f"{self._name}: worker {number} closed its connection") from None
        if isinstance(answer, BaseException):
            raise answer
        assert isinstance(answer, TaskDone)
        worker.running -= 1
        self._missing[answer.slot] -= answer.count
        if answer.state is not None:
            self.states[answer.slot][number] = answer.state

    def _raise_exit(self) -> None:
        """Raise the error for a message of the server: a worker or the server itself has exited."""
        try:
            message = self._control.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait(_EXIT_S)
            raise _make_death_error(self._name, "the server of its workers", code) from None
        assert isinstance(message, WorkerExit)
        worker = self._workers[message.worker]
        # The worker may have reported an error before it exited, which is the better explanation.
        while worker.socket.poll():
            try:
                answer = worker.socket.recv()
            except (EOFError, ConnectionError):
                break
            if isinstance(answer, BaseException):
                raise answer
        raise _make_death_error(self._name, f"worker {message.worker}", message.code)

    def _send_tasks(self) -> None:
        """Send tasks to the workers that have fewer than `_TASKS_PER_WORKER`, beginning with the least busy one."""
        for limit in range(1, _TASKS_PER_WORKER + 1):
            for worker in self._workers:
                while worker.running < limit and (tasks := worker.waiting or self._waiting):
                    try:
                        worker.socket.send(tasks[0])
                    except ConnectionError:
                        break  # `process_answers` reports the exit.
                    tasks.popleft()
                    worker.running += 1


def _make_death_error(name: str, process: str, code: int) -> Exception:
    """Return the error for a process that exited with `code`, which is below 0 if a signal killed the process."""
    if code == -signal.SIGKILL:
        return MemoryError(
            f"{name}: {process} was killed (SIGKILL), perhaps because no memory was left: a lower data.workers needs "
            "less memory"
        )
    reason = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return WorkerDiedError(f"{name}: {process} ended with {reason}", None if code >= 0 else -code)


def make_dataset_request(
    run: Run,
    manifest: SampleManifest,
    split: str,
    *,
    is_rank0: bool,
    stream: tuple[int, int] = (0, 1),
    states: Sequence[bytes] = (),
) -> DatasetRequest:
    """Return what the worker processes of a rank need to read a split of the dataset of a run.

    Args:
        run: the run.
        manifest: the manifest with the dataset.
        split: `TRAIN_SPLIT` or `HELD_OUT_SPLIT`.
        is_rank0: whether this is rank 0, which compares the first and the last sample with the manifest.
        stream: for an iterable dataset, the data-parallel rank and size.
        states: for an iterable dataset, the saved states of the workers of this rank.
    """
    assert run.user_model is not None and manifest.dataset is not None
    # A point of a sweep may have other options than the sweep, whose first and last samples the manifest describes.
    is_point = run.sweep_or_self is not run
    return DatasetRequest(
        model=run.user_model,
        code_dir=run.code_dir,
        options=make_dataset_options(run.config.model.all_options, manifest.dataset.sources),
        split=split,
        seed=run.config.run.seed,
        entry=manifest.dataset,
        checks_samples=is_rank0 and not is_point and run.config.data.verify != "sizes",
        stream=stream,
        workers=run.config.data.workers,
        states=states,
    )


class DatasetSamples(IndexedDataset):
    """The samples of one split of a user's dataset. Worker processes read them.

    Args:
        request: the dataset.
        rows: maximum number of samples of a batch.
    """

    def __init__(self, request: DatasetRequest, rows: int) -> None:
        assert request.entry is not None
        self.request = request
        self.rows = rows
        self.needs_positions = request.split == TRAIN_SPLIT
        self.is_iterable = self.needs_positions and request.entry.is_iterable
        self._entry = request.entry
        self._pool: DatasetPool | None = None

    def __len__(self) -> int:
        """Return the number of samples; for an iterable dataset, a number that is larger than any run needs."""
        if not self.needs_positions:
            return self._entry.held_out_samples
        return 2**62 if self.is_iterable else self._entry.samples

    def open_pool(self) -> DatasetPool:
        """Return the processes that read the samples. The first call starts them."""
        if self._pool is None:
            self._pool = DatasetPool(self.request, self.rows)
        return self._pool

    def close(self) -> None:
        """End the processes. The next call of `open_pool` starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def allocate_batch(self, rows: int, pin: bool = False) -> Batch:
        """Return uninitialized host tensors for `rows` samples; page-locked if `pin`."""
        return {
            name: torch.empty((rows, *array.shape), dtype=getattr(torch, array.dtype), pin_memory=pin)
            for name, array in self._entry.arrays.items()
        }

    def read(self, indices: Int64Array) -> Arrays:
        """Return held-out samples, with samples along the first dimension.

        Args:
            indices: numbers of the samples, int64, shape (B,).
        """
        pool = self.open_pool()
        out = {name: tensor.numpy() for name, tensor in self.allocate_batch(len(indices)).items()}
        for start in range(0, len(indices), self.rows):
            part = indices[start : start + self.rows]
            pool.submit(0, part, None)
            while not pool.is_complete(0):
                pool.process_answers()
            pool.copy_batch(0, len(part), {name: array[start : start + len(part)] for name, array in out.items()})
        return out


@dataclass(frozen=True)
class _ReadBatch:
    """A batch in host memory."""

    arrays: Batch
    states: Sequence[bytes | None]
    """As `DatasetPool.states`."""


class DatasetLoader(AbstractContextManager["DatasetLoader"], Iterator[Batch]):
    """Iterate over this rank's batches on `device`, as :class:`pipeline.data.loader.BatchLoader` does.

    A background thread gives tasks to the workers, copies complete batches from the shared memory to host memory
    (page-locked on CUDA), and hands them over in the order of the sampler. The consumer copies each batch to the
    device. If a worker fails, `next` raises the error in place of the batch that failed.

    Args:
        dataset: the training samples. The loader closes it.
        sampler: yields numbers and positions of the samples of each batch, shape (2, B). In the order of an iterable
            dataset, the number of a sample counts the samples of all ranks from the beginning of the dataset.
        device: device to which batches are copied.
        order: for an iterable dataset, this rank's place in the global batch; None for a map-style dataset.
    """

    READY_BATCHES = 2
    """Number of batches in host memory that are ready for the consumer."""

    def __init__(
        self,
        dataset: DatasetSamples,
        sampler: Iterable[Int64Array],
        device: torch.device,
        order: StreamOrder | None = None,
    ) -> None:
        self.data_wait_s = 0.0
        """Seconds that the last call of `next` waited for its batch."""
        self.states: list[bytes] = list(dataset.request.states)
        """For an iterable dataset, the state of each worker after the batches that `next` returned. [] before them."""
        self._dataset = dataset
        self._pool = dataset.open_pool()
        self._sampler = iter(sampler)
        self._device = device
        self._order = order
        # An exception takes the place of a batch and is the last item.
        self._ready: queue.SimpleQueue[_ReadBatch | BaseException] = queue.SimpleQueue()
        self._ready_count = 0
        self._lock = threading.Lock()
        self._end: BaseException | None = None
        self._is_closed = False
        self._wake_up, self._wake_up_writer = os.pipe()
        os.set_blocking(self._wake_up_writer, False)
        self._thread = device_thread(self._run, "sluice-dataset")
        self._thread.start()

    def __next__(self) -> Batch:
        if self._is_closed:
            raise StopIteration
        start = time.perf_counter()
        batch = self._end or self._ready.get()
        self.data_wait_s = time.perf_counter() - start
        if isinstance(batch, BaseException):
            self._end = batch
            raise batch
        with self._lock:
            self._ready_count -= 1
        self._wake_thread()
        if self._order is not None:
            old_states = self.states or [b""] * len(batch.states)
            self.states = [new if new is not None else old for new, old in zip(batch.states, old_states, strict=True)]
        return {name: array.to(self._device, non_blocking=True) for name, array in batch.arrays.items()}

    def close(self) -> None:
        """Stop the thread and end the worker processes. Later calls of `next` raise StopIteration."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_thread()
        self._thread.join()
        os.close(self._wake_up)
        os.close(self._wake_up_writer)
        self._dataset.close()

    def __exit__(self, *exception_info: object) -> None:
        """Close the loader."""
        self.close()

    def _wake_thread(self) -> None:
        """Let the background thread check its state."""
        with suppress(BlockingIOError):  # If the pipe is full, the thread will wake up anyway.
            os.write(self._wake_up_writer, b"x")

    def _run(self) -> None:
        """Read batches until the sampler ends, a worker fails or the loader is closed. Runs in the thread."""
        try:
            self._read_batches()
        except BaseException as error:
            self._ready.put(error)

    def _read_batches(self) -> None:
        """Read batches. Raises StopIteration when the sampler has ended."""
        pool = self._pool
        # The slot that was freed last is used first, because its memory may still be in a cache.
        free_slots = [*range(pool.slots)]
        reading: deque[tuple[int, int]] = deque()  # slot and number of samples of each batch, oldest first
        has_more = True
        while not self._is_closed:
            while has_more and free_slots and pool.needs_tasks:
                numbers = next(self._sampler, None)
                if numbers is None:
                    has_more = False
                    break
                slot = free_slots.pop()
                indices, positions = numbers
                first_row = 0 if self._order is None else self._order.count_drawn(int(indices[0]))
                pool.submit(slot, indices, positions, first_row)
                reading.append((slot, len(indices)))
            if reading and pool.is_complete(reading[0][0]) and self._ready_count < self.READY_BATCHES:
                slot, count = reading.popleft()
                self._hand_over(slot, count)
                free_slots.append(slot)
                continue
            if not reading and not has_more:
                raise StopIteration
            pool.process_answers([self._wake_up])
            self._drain_wake_up()

    def _drain_wake_up(self) -> None:
        """Read what `_wake_thread` has written."""
        if wait([self._wake_up], 0):
            os.read(self._wake_up, 4096)

    def _hand_over(self, slot: int, count: int) -> None:
        """Copy a batch to host memory and hand it over to the consumer."""
        host = self._dataset.allocate_batch(count, pin=self._device.type == "cuda")
        self._pool.copy_batch(slot, count, {name: tensor.numpy() for name, tensor in host.items()})
        with self._lock:
            self._ready_count += 1
        self._ready.put(_ReadBatch(host, self._pool.states[slot]))


@dataclass(frozen=True)
class StreamOrder:
    """The place of a data-parallel rank in the global batches of an iterable dataset."""

    global_batch: int
    rank: int
    size: int

    def count_drawn(self, position: int) -> int:
        """Return how many samples this rank has drawn before a sample.

        Args:
            position: number of the sample, counted over all ranks from the beginning of the dataset. It belongs to this
                rank.
        """
        step, offset = divmod(position, self.global_batch)
        rows = self.global_batch // self.size
        return step * rows + offset - self.rank * rows
