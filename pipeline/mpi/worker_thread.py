"""Run MPI operations in threads: in order, with timeouts, and with errors that name the missing ranks.

- **Threads.** DDP waits in C++ for a future that another thread must complete, and a blocking MPI call cannot be
  interrupted. Each group therefore has a `CollectiveThread`, which runs the collectives in the order of the calls.
  One `MessageWatcher` per process completes point-to-point messages, which have no common order.
- **Two phases.** A blocking MPI call moves bytes fastest. But it polls while it waits, and so takes processor time from
  other ranks on the node. The ranks therefore first wait for each other in an `Iallreduce` of 16 bytes, which a thread
  tests with growing pauses and can abandon. These bytes contain a checksum of the operation. Ranks that call different
  operations therefore get an error before data is corrupted.
- **Errors.** A rank that waits long writes its position (the number of its collective) to the store, so that an error
  can name the missing ranks. A failed group stays unusable, because the state of its communicator is unknown.
"""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI

from pipeline.base.device_thread import device_thread
from pipeline.base.prctl import set_timer_slack
from pipeline.mpi.ops import HostBuffer
from pipeline.mpi.work import RECENT_COLLECTIVES, CollectiveRecord, MpiError, MpiTimeout, MpiWork

MIN_PAUSE_S = 20e-6
"""Minimum pause between two tests of a request."""
MAX_PAUSE_S = 1e-3
"""Maximum pause between two tests of a request."""
DEADLINE_CHECK_S = 1.0
"""Seconds between two checks of the timeouts of collectives that all ranks have started."""
_ABANDONED: list[object] = []
"""Abandoned requests and their memory. The memory is never freed, because MPI may still read or write it."""


def compute_pause_s(waited_s: float) -> float:
    """Return the seconds to sleep before the next test of a request: a tenth of the time waited so far.

    The result is limited to the range from `MIN_PAUSE_S` to `MAX_PAUSE_S`.
    """
    return min(MAX_PAUSE_S, max(MIN_PAUSE_S, waited_s / 10))


@dataclass
class _Collective:
    """A queued collective: its record, the arguments of `CollectiveThread.submit`, and its work."""

    record: CollectiveRecord
    prepare: Callable[[], Callable[[], None]]
    work: MpiWork
    timeout_s: float
    inputs_ready: torch.cuda.Event | None
    """CUDA event that occurs when the GPU has written the inputs; None for tensors in host memory."""


class CollectiveThread:
    """A thread that runs the collectives of one group in the order of their calls.

    Args:
        comm: a communicator that only this thread uses.
        name: name of the group.
        store: a store that only this group uses.
        ranks: global ranks of the group.
    """

    has_failed_group = False
    """Whether any group of this process has failed. If so, MPI cannot be finalized."""
    instances: ClassVar[list[CollectiveThread]] = []
    """The threads of all groups of this process that are not closed."""

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: Sequence[int]) -> None:
        self.comm = comm
        self.name = name
        self.store = store
        self.ranks = ranks
        self.error: BaseException | None = None
        """The first error of the group; None while the group can be used."""
        self._queue: SimpleQueue[_Collective | None] = SimpleQueue()
        self._global_rank = ranks[comm.rank]
        self._count = 0  # number of submitted collectives
        self._running: tuple[_Collective, float] | None = None
        """The collective that this rank runs after all ranks have called it, and its start time; None between two."""
        CollectiveThread.instances.append(self)
        self._thread = device_thread(self._run, f"mpi {name}", own_stream=True)
        self._thread.start()

    def submit(
        self, signature: str, prepare: Callable[[], Callable[[], None]], results: list[torch.Tensor], timeout: timedelta
    ) -> MpiWork:
        """Queue a collective, which runs when all ranks have submitted a collective with the same `signature`.

        Args:
            signature: text with the operation, types and sizes, which must be the same on all ranks.
            prepare: function that allocates the buffers of the operation, which may fail, and returns a function that
                calls MPI.
            results: the output tensors.
            timeout: maximum time to wait for the other ranks, and then again for the operation.
        """
        self.check()
        self._count += 1
        operation = signature.split()[0]
        record = CollectiveRecord(f"{operation} over MPI", self.name, self._count, signature)
        RECENT_COLLECTIVES.append(record)
        work = MpiWork(f"{operation} (number {self._count} in group {self.name})", results, self.name)
        # MPI may read the inputs only after the GPU has executed all kernels on the current stream.
        device = next((tensor.device for tensor in results if tensor.is_cuda), None)
        inputs_ready = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._queue.put(_Collective(record, prepare, work, timeout.total_seconds(), inputs_ready))
        return work

    def close(self) -> None:
        """Wait for the submitted collectives, end the thread and free the communicator. All ranks must call this.

        After an error, only return, because the thread may be blocked in MPI.
        """
        self._queue.put(None)
        while self._thread.is_alive() and self.error is None:
            self._thread.join(DEADLINE_CHECK_S)
        if self.error is None:
            CollectiveThread.instances.remove(self)
            self.comm.Free()

    def check(self) -> None:
        """Raise MpiError if an earlier operation of the group failed."""
        if self.error is not None:
            error_class = MpiTimeout if isinstance(self.error, MpiTimeout) else MpiError
            raise error_class(f"group {self.name} cannot be used after an error: {self.error}")

    def fail(self, work: MpiWork, error: BaseException) -> None:
        """End `work` with `error` and mark the group as failed."""
        self.error = self.error or error
        CollectiveThread.has_failed_group = True
        work.finish(error)

    def check_deadline(self) -> None:
        """Fail the running collective if it exceeds its timeout although all ranks have called it.

        All collectives that are queued after it also fail.
        """
        running = self._running
        if running is None:
            return
        collective, start_time = running
        if time.perf_counter() - start_time < collective.timeout_s:
            return
        message = (
            f"{collective.work.description} timed out after {collective.timeout_s:g} s on rank {self._global_rank}: "
            "all ranks called it, but it does not end"
        )
        self.fail(collective.work, MpiTimeout(message))
        with suppress(Empty):
            while (queued := self._queue.get_nowait()) is not None:
                self.fail(queued.work, MpiTimeout(message))

    def _run(self) -> None:
        """Run the queued collectives until `close` is called. This is the function of the thread."""
        # To save energy, Linux extends sleeps by up to 50 µs by default, which is longer than MIN_PAUSE_S. Reduce this
        # to 1 µs (1000 ns) for this thread.
        set_timer_slack(1000)
        while (collective := self._queue.get()) is not None:
            try:
                self.check()
                collective.record.state = "started"
                if collective.inputs_ready is not None:
                    collective.inputs_ready.synchronize()
                # The buffers are allocated first. If this fails, no other rank is blocked in MPI yet.
                call_mpi = collective.prepare()
                self._wait_for_all_ranks(collective)
                self._running = (collective, time.perf_counter())
                call_mpi()
                if collective.inputs_ready is not None:
                    # Synchronize only the stream of this thread. Later kernels may already be on the default stream.
                    torch.cuda.current_stream(collective.inputs_ready.device).synchronize()
            except BaseException as error:
                self.fail(collective.work, error)
            else:
                collective.record.state = "completed"
                collective.work.finish()
            self._running = None

    def _wait_for_all_ranks(self, collective: _Collective) -> None:
        """Wait until all ranks have called this collective.

        Raises:
            MpiTimeout: if a rank did not call this collective in time.
            MpiError: if a rank called another collective.
        """
        checksum = zlib.crc32(collective.record.sizes.encode())
        # The largest checksum and the negated smallest checksum of all ranks show whether all checksums are equal.
        max_of_ranks = array("q", [checksum, -checksum])
        request = self.comm.Iallreduce(MPI.IN_PLACE, [max_of_ranks, MPI.INT64_T], MPI.MAX)
        start_time = time.perf_counter()
        publish_after_s = min(1.0, collective.timeout_s / 4)
        has_published = False
        while not request.Test():
            waited_s = time.perf_counter() - start_time
            if not has_published and waited_s > publish_after_s:
                self._publish_position(collective)
                has_published = True
            # The wait is longer than the timeout. Ranks that called the collective in time can then still publish their
            # positions.
            if waited_s > collective.timeout_s + 2 * publish_after_s:
                _ABANDONED.append((request, max_of_ranks))
                raise MpiTimeout(self._describe_missing_ranks(collective))
            time.sleep(compute_pause_s(waited_s))
        if max_of_ranks[0] != -max_of_ranks[1]:
            self._publish_position(collective)
            raise MpiError(self._describe_mismatch(collective))

    def _publish_position(self, collective: _Collective) -> None:
        """Write to the store which collective this rank has called."""
        self.store.set(f"position/{self.comm.rank}", f"{collective.record.number} {collective.record.sizes}")

    def _read_position(self, group_rank: int) -> tuple[int, str]:
        """Return number and signature of the collective that a rank published last; (0, "") if it published nothing."""
        key = f"position/{group_rank}"
        if not self.store.check([key]):
            return 0, ""
        number, _, signature = self.store.get(key).decode().partition(" ")
        return int(number), signature

    def _describe_missing_ranks(self, collective: _Collective) -> str:
        """Return the message for a collective that timed out, with the ranks that did not call it."""
        positions = {rank: self._read_position(group_rank)[0] for group_rank, rank in enumerate(self.ranks)}
        absent = [rank for rank, number in positions.items() if number < collective.record.number]
        cause = f"{format_ranks(absent)} did not call it" if absent else "all ranks called it, some too late"
        description = collective.work.description
        return f"{description} timed out after {collective.timeout_s:g} s on rank {self._global_rank}: {cause}"

    def _describe_mismatch(self, collective: _Collective) -> str:
        """Return the message for ranks that called different collectives, with the call of each rank."""
        number = collective.record.number
        ranks_by_call: dict[str, list[int]] = {}
        deadline = time.monotonic() + collective.timeout_s
        for group_rank, rank in enumerate(self.ranks):
            # A rank that waited for an earlier collective has an older position in the store.
            while (position := self._read_position(group_rank))[0] != number and time.monotonic() < deadline:
                time.sleep(0.05)
            ranks_by_call.setdefault(position[1] if position[0] == number else "unknown", []).append(rank)
        calls = "; ".join(f"{format_ranks(ranks)}: {call}" for call, ranks in ranks_by_call.items())
        return f"operation number {number} in group {self.name} is not the same on all ranks: {calls}"


def watch_deadlines() -> None:
    """Check the timeouts of all groups forever. This is the function of a thread."""
    while True:
        time.sleep(DEADLINE_CHECK_S)
        for thread in list(CollectiveThread.instances):
            thread.check_deadline()


def format_ranks(ranks: Sequence[int]) -> str:
    """Return rank numbers as text: `rank 3`, or `ranks 1, 2, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass(eq=False)
class PendingMessage:
    """A point-to-point message that is being sent or received in the group of `collective_thread`."""

    collective_thread: CollectiveThread
    request: MPI.Request
    work: MpiWork
    buffer: HostBuffer
    is_receive: bool
    timeout_s: float
    start_time: float = field(default_factory=time.perf_counter)

    def poll(self) -> bool:
        """Finish the work and return True if the message is complete, has failed or has timed out; otherwise False.

        After an error, the whole group is unusable.
        """
        try:
            status = MPI.Status()
            if self.request.Test(status):
                received = status.Get_count(MPI.BYTE)
                expected = self.buffer.host.nbytes
                if self.is_receive and received != expected:
                    raise MpiError(f"{self.work.description}: {received} bytes were received, but {expected} expected")
                if self.is_receive:
                    self.buffer.copy_back()
                self.work.finish()
                return True
            if time.perf_counter() - self.start_time > self.timeout_s:
                _ABANDONED.append(self)
                if self.is_receive:
                    self.request.Cancel()  # Otherwise this request would receive the next message with this tag.
                message = f"{self.work.description} timed out after {self.timeout_s:g} s: the other rank did not call"
                raise MpiTimeout(message)
        except BaseException as error:
            self.collective_thread.fail(self.work, error)
            return True
        return False


class MessageWatcher:
    """Completes the point-to-point messages of this process, in a thread that runs `watch_forever`."""

    def __init__(self) -> None:
        self._pending: list[PendingMessage] = []
        self._has_new_message = threading.Event()

    def add(self, message: PendingMessage) -> None:
        """Watch `message`, and finish its work when the message is complete or has failed."""
        if not message.poll():
            self._pending.append(message)
            self._has_new_message.set()

    @property
    def is_idle(self) -> bool:
        """Whether no message is pending."""
        return not self._pending

    def watch_forever(self) -> None:
        """Poll all pending messages forever. This is the function of a thread."""
        last_progress = time.perf_counter()
        while True:
            was_idle = self.is_idle
            self._has_new_message.wait(None if was_idle else compute_pause_s(time.perf_counter() - last_progress))
            # The event is cleared before polling. A message that is added during polling then sets the event again.
            self._has_new_message.clear()
            ended = [message for message in self._pending.copy() if message.poll()]
            for message in ended:
                self._pending.remove(message)
            if ended or was_idle:
                last_progress = time.perf_counter()
