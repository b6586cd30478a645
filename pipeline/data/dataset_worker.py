"""The processes that read the samples of a user's dataset: `python -m pipeline.data.dataset_worker PARENT FD`.

A rank starts one such program, the server. The server imports torch and the user's module once, and forks the workers.
A rank itself cannot fork them, because it has threads and may use CUDA. Each worker opens the dataset itself, so that
workers do not share the positions of open files.

The rank and its workers share memory (memfd) with room for several batches. A task names a batch in this memory and
some of its rows. The worker writes each array of these samples to its row, and reports that the task is done.

All messages are pickled objects on socket pairs that the rank creates (pipeline/data/dataset_pool.py):

    rank → server: a `ServerRequest`                server → rank: `WorkerExit` for a worker that has exited
    rank → worker: a `Task`                         worker → rank: `TaskDone`, or the exception with which it failed

The processes ignore the signals that stop a job, because Slurm sends them to all processes. They end in these ways:

- The rank closes its sockets. The server then kills the workers and exits.
- The rank dies, also by SIGKILL. The kernel then kills the server (PR_SET_PDEATHSIG), and then the workers. The rank
  must start the server in its main thread, because the signal is sent when the starting thread ends.
"""

from __future__ import annotations

import faulthandler
import io
import math
import mmap
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import _utils as torch_data

from pipeline.base.errors import UserError
from pipeline.base.forked import run_and_exit
from pipeline.base.prctl import set_parent_death_signal, set_process_name
from pipeline.base.signals import STOP_SIGNALS
from pipeline.data.dataset import DatasetRequest, SampleReader
from pipeline.data.manifest import SampleArray

IGNORED_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP)
"""Signals that stop a job or close a terminal. All processes of the job may receive them."""
_ALIGNMENT = 4096
"""The arrays begin at multiples of this number of bytes."""


@dataclass(frozen=True)
class BatchMemory:
    """The layout of the memory that a rank shares with its workers: arrays of shape (slots, rows, …)."""

    arrays: dict[str, SampleArray]
    """Shape and type of each array of a sample."""
    slots: int
    """Number of batches."""
    rows: int
    """Maximum number of samples of a batch."""

    @property
    def batch_bytes(self) -> int:
        """Size of a batch."""
        return sum(self._count_bytes(array) // self.slots for array in self.arrays.values())

    @property
    def size(self) -> int:
        """Size of the memory in bytes."""
        return sum(self._pad(self._count_bytes(array)) for array in self.arrays.values())

    def map_arrays(self, fd: int) -> dict[str, np.ndarray]:
        """Map the memory, and return the arrays by name."""
        memory = mmap.mmap(fd, self.size)
        views = {}
        offset = 0
        for name, array in self.arrays.items():
            shape = (self.slots, self.rows, *array.shape)
            views[name] = np.frombuffer(memory, array.dtype, math.prod(shape), offset).reshape(shape)
            offset += self._pad(self._count_bytes(array))
        return views

    def _count_bytes(self, array: SampleArray) -> int:
        """Return the size of an array of all slots."""
        return self.slots * self.rows * math.prod(array.shape) * np.dtype(array.dtype).itemsize

    def _pad(self, size: int) -> int:
        """Return `size`, rounded up so that the next array is aligned. An empty array also takes up space."""
        return max(1, -(-size // _ALIGNMENT)) * _ALIGNMENT


@dataclass(frozen=True)
class ServerRequest:
    """The first message of a rank to its server."""

    dataset: DatasetRequest
    memory: BatchMemory
    memory_fd: int
    worker_fds: Sequence[int]
    """The socket of each worker."""


@dataclass(frozen=True)
class Task:
    """Samples that a worker must read."""

    slot: int
    """The batch in the shared memory."""
    rows: Sequence[int]
    """The row of each sample in this batch."""
    indices: Sequence[int]
    """The numbers of the samples in the dataset. For an iterable dataset: how many samples this worker has drawn before
    each of these samples. The worker draws and drops samples until it has drawn this many."""
    positions: Sequence[int] | None
    """The position of each sample in the order of the run; None for held-out samples."""


@dataclass(frozen=True)
class TaskDone:
    """The answer to a task."""

    slot: int
    count: int
    """Number of samples of the task."""
    state: bytes | None = None
    """For an iterable dataset: its state after the last sample of the task (:func:`dump_state`)."""


@dataclass(frozen=True)
class WorkerExit:
    """A worker has exited."""

    worker: int
    code: int
    """The exit code; below 0: the number of the signal that killed the worker."""


# -- the server ----------------------------------------------------------------------------------------------


def run_server(parent_pid: int, fd: int) -> NoReturn:
    """Fork the workers, report their exits, and exit when the rank closes its socket.

    Args:
        parent_pid: the process id of the rank.
        fd: the socket to the rank.
    """
    _follow_parent(parent_pid)
    control = Connection(fd)
    wake_up, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    worker_by_pid: dict[int, int] = {}
    # An EOFError means that the rank has died or has closed the socket.
    with suppress(EOFError, ConnectionError):
        request: ServerRequest = control.recv()
        torch.set_num_threads(1)  # Each worker uses one core.
        with suppress(UserError):  # Each worker reports this error.
            request.dataset.model.load(request.dataset.code_dir)
        for worker, worker_fd in enumerate(request.worker_fds):
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other_fd in (fd, *request.worker_fds):
                    if other_fd != worker_fd:
                        os.close(other_fd)
                _run_worker(request, worker, worker_fd)
            worker_by_pid[pid] = worker
        for worker_fd in request.worker_fds:  # A rank sees the end of the stream when the worker exits.
            os.close(worker_fd)
        while True:
            readable, _, _ = select.select([control.fileno(), wake_up.fileno()], [], [])
            if control.fileno() in readable:
                control.recv()  # The rank sends nothing more, so this raises EOFError.
            if wake_up.fileno() in readable:
                wake_up.recv(4096)
            for pid, worker in list(worker_by_pid.items()):
                exited_pid, status = os.waitpid(pid, os.WNOHANG)
                if exited_pid:
                    del worker_by_pid[pid]
                    control.send(WorkerExit(worker, os.waitstatus_to_exitcode(status)))
    for pid in worker_by_pid:
        os.kill(pid, signal.SIGKILL)
    for pid in worker_by_pid:
        os.waitpid(pid, 0)
    os._exit(0)


def _follow_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies. Exit if the parent has died already."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


# -- a worker ------------------------------------------------------------------------------------------------


def _run_worker(request: ServerRequest, worker: int, fd: int) -> NoReturn:
    """Read samples until the rank closes the socket, and exit. An error of the dataset is reported to the rank."""

    def answer_tasks() -> int:
        server_pid = os.getppid()
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)
        set_process_name(f"sluice-data-{worker}")
        rank = Connection(fd)
        with suppress(EOFError, ConnectionError):
            try:
                _answer_tasks(request, worker, rank)
            except Exception as error:
                rank.send(_make_portable(error))
        return 0

    run_and_exit(answer_tasks)


def _make_portable(error: Exception) -> Exception:
    """Return an error that the rank can unpickle. Errors of Sluice and lack of memory keep their types."""
    if isinstance(error, UserError):
        return error
    text = "".join(traceback.format_exception(error))
    return MemoryError(text) if isinstance(error, MemoryError) else RuntimeError(text)


def _answer_tasks(request: ServerRequest, worker: int, rank: Connection) -> None:
    """Open the dataset, and answer tasks. Raises EOFError when the rank closes the socket."""
    dataset = request.dataset
    assert dataset.entry is not None
    if dataset.entry.is_iterable and dataset.checks_samples and worker == 0:
        # As in the prepare stage, one process reads the whole dataset. The dataset is opened again below, because
        # reading changes its state.
        SampleReader(replace(dataset, seed=0)).check_entry()
    _set_worker_info(dataset, worker, None)
    reader = SampleReader(dataset)
    _set_worker_info(dataset, worker, reader.dataset)
    if worker == 0 and not reader.is_iterable:
        reader.check_entry()
    stream = _Stream(reader, worker) if reader.is_iterable else None
    views = request.memory.map_arrays(request.memory_fd)
    while True:
        task: Task = rank.recv()
        for i, index in enumerate(task.indices):
            position = None if task.positions is None else task.positions[i]
            if stream is None:
                sample = reader.read(index, position)
            else:
                assert position is not None
                sample = stream.read(index, position)
            for name, array in sample.items():
                views[name][task.slot, task.rows[i]] = array
        state = None if stream is None else stream.dump_state()
        rank.send(TaskDone(task.slot, len(task.indices), state))


def _set_worker_info(request: DatasetRequest, worker: int, dataset: Any) -> None:
    """Set what `get_worker_info` of torch.utils.data returns in the user's code.

    The workers of all data-parallel ranks are numbered consecutively, so that an iterable dataset can divide its
    samples among them.
    """
    rank, size = request.stream
    torch_data.worker._worker_info = torch_data.worker.WorkerInfo(
        id=rank * request.workers + worker, num_workers=size * request.workers, seed=request.seed, dataset=dataset
    )


class _Stream:
    """The samples of an iterable dataset in one worker.

    Args:
        reader: the dataset, whose saved state is restored if there is one.
        worker: number of this worker among those of the rank.
    """

    def __init__(self, reader: SampleReader, worker: int) -> None:
        self._reader = reader
        self._drawn = 0  # samples that this worker has drawn since the beginning of the run
        self._position = 0
        self._is_state_checked = False
        states = reader.request.states
        if states and states[worker]:  # An empty state belongs to a worker that has not read any sample.
            saved = load_state(states[worker])
            self._drawn = saved["drawn"]
            try:
                reader.dataset.load_state_dict(saved["state"])
            except Exception as error:
                raise reader.explain(error, "load_state_dict fails") from error
        self._samples = reader.iterate(self._iter_positions())

    def _iter_positions(self) -> Iterator[int]:
        """Yield the position of each sample that is drawn."""
        while True:
            yield self._position

    def read(self, drawn: int, position: int) -> dict[str, np.ndarray]:
        """Return the sample after the first `drawn` samples of this worker. Earlier samples are dropped."""
        self._position = position
        while self._drawn < drawn:
            next(self._samples)
            self._drawn += 1
        self._drawn += 1
        return next(self._samples)

    def dump_state(self) -> bytes:
        """Return the state after the latest sample."""
        try:
            content = dump_state({"drawn": self._drawn, "state": self._reader.dataset.state_dict()})
            if not self._is_state_checked:
                load_state(content)
                self._is_state_checked = True
            return content
        except Exception as error:
            raise self._reader.explain(error, "state_dict fails, or its value cannot be saved") from error


def dump_state(state: object) -> bytes:
    """Return a state as bytes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def load_state(content: bytes) -> dict[str, Any]:
    """Return a saved state. Only tensors and plain Python values are loaded, so that no code is executed."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return state


if __name__ == "__main__":
    faulthandler.enable()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)  # The rank has blocked them during the start.
    # Messages are pickled with the name of this module, which is not `__main__` in the rank.
    from pipeline.data import dataset_worker

    dataset_worker.run_server(int(sys.argv[1]), int(sys.argv[2]))
