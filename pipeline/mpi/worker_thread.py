"""The threads behind the MPI process group: operations in order, time-outs, and the names of missing ranks.

**Why threads.** DDP waits in C++ for a future that somebody else must complete, and a blocking MPI call cannot be
interrupted. So each group has a `Lane`: a thread that takes the group's collectives one after the other, as every
rank of the group called them. Point-to-point messages have no common order; they are posted at once by their caller,
and one more thread (`Messages`) watches all of them.

**Why two phases.** A blocking MPI call is the fastest way to move bytes, but while it waits for a rank that is not
there yet it spins: it takes a core from the very rank it waits for. So a collective first *meets*: a 16-byte
`Iallreduce`, tested in growing pauses (a tenth of the time waited so far, at most a millisecond), which sleeps and
can be given up at a deadline. Only when all ranks are there does the blocking call move the data. The 16 bytes carry a
checksum of what each rank is about to do: different operations, types or sizes are found before they do harm.

**Errors.** A rank that has waited for a while writes what it waits for into the store. When the time is up, those who
wrote nothing, or something else, are the missing ones. A rank may also stop in the blocking call: one more thread gives
up on a call that lasts too long, though the call itself stays. After an error a group stays broken: MPI cannot tell in
what state its communicator is.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from mpi4py import MPI

from pipeline.base.device_thread import device_thread
from pipeline.mpi.ops import HostBuffer
from pipeline.mpi.work import MpiError, MpiTimeout, MpiWork

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
LOOK_S = 1.0
"""How often somebody looks at operations that all ranks have begun."""
_PR_SET_TIMERSLACK = 29
_GIVEN_UP: list[object] = []
"""Requests and their memory, kept for good: MPI may still read or write it."""


def pause_s(waited: float) -> float:
    """How long to sleep between two looks after waiting for `waited` seconds: late by a tenth at most, and idle."""
    return min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, waited / 10))


@dataclass
class _Collective:
    number: int
    signature: str
    prepare: Callable[[], Callable[[], None]]
    work: MpiWork
    seconds: float
    ready: torch.cuda.Event | None


class CollectiveThread:
    """One group's collectives, in the order of their calls, on a thread of their own."""

    broken = False
    """Whether any group of this process has failed: then MPI cannot be finalized any more."""
    recent: ClassVar[deque[tuple[int, CollectiveThread, int, str]]] = deque(maxlen=3)
    """The last collectives that this process entered: time (ns), lane, number and signature."""
    all: ClassVar[list[CollectiveThread]] = []

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: Sequence[int]) -> None:
        """comm: only this lane's; store: only this group's; ranks: global numbers of the group's ranks."""
        self.comm, self.name, self.store, self.ranks = comm, name, store, ranks
        self.error: BaseException | None = None
        self._queue: SimpleQueue[_Collective | None] = SimpleQueue()
        self._me = ranks[comm.rank]
        self._number = self.done = 0
        self.running: tuple[_Collective, float] | None = None
        """What all ranks have begun, and when."""
        CollectiveThread.all.append(self)
        self._thread = device_thread(self._serve, f"mpi {name}", own_stream=True)
        self._thread.start()

    def submit(
        self, signature: str, prepare: Callable[[], Callable[[], None]], results: list[torch.Tensor], timeout: timedelta
    ) -> MpiWork:
        """Run what `prepare` gives once all ranks have submitted the same `signature` (operation, type and sizes).

        `prepare` makes ready what is needed, which may fail; what it gives only calls MPI.
        """
        self.check()
        self._number += 1
        CollectiveThread.recent.append((time.time_ns(), self, self._number, signature))
        work = MpiWork(f"{signature.split()[0]} (number {self._number} in group {self.name})", results, self.name)
        # what is queued on the GPU's stream must have happened before MPI reads it
        device = next((tensor.device for tensor in results if tensor.is_cuda), None)
        ready = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._queue.put(_Collective(self._number, signature, prepare, work, timeout.total_seconds(), ready))
        return work

    def close(self) -> None:
        """Run what was submitted, then end the thread and free the communicator. All ranks of the group call it."""
        self._queue.put(None)
        while self._thread.is_alive() and self.error is None:
            self._thread.join(LOOK_S)
        if self.error is None:
            CollectiveThread.all.remove(self)
            self.comm.Free()

    def check(self) -> None:
        """Raises MpiError where the group is broken."""
        if self.error is not None:
            kind = MpiTimeout if isinstance(self.error, MpiTimeout) else MpiError
            raise kind(f"group {self.name} cannot be used after an error: {self.error}")

    def fail(self, work: MpiWork, error: BaseException) -> None:
        """`work` ended with `error`, and the group with it."""
        self.error = self.error or error
        CollectiveThread.broken = True
        work.finish(error)

    def _serve(self) -> None:
        # Linux prolongs a thread's sleeps by up to 50 µs to save wake-ups, more than the pauses here (prctl(2))
        getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(_PR_SET_TIMERSLACK, 1000)
        while (item := self._queue.get()) is not None:
            try:
                self.check()
                if item.ready is not None:
                    item.ready.synchronize()
                move = item.prepare()  # without memory for copies, say, this rank fails here, before others wait in MPI
                self._meet(item)
                self.running = item, time.perf_counter()
                move()
                if item.ready is not None:  # this thread's own stream: training's next kernels may be queued already
                    torch.cuda.current_stream(item.ready.device).synchronize()
            except BaseException as error:
                self.fail(item.work, error)
            else:
                self.done = item.number
                item.work.finish()
            self.running = None

    def look(self) -> None:
        """Give up on an operation that all ranks began and that lasts too long, and on those behind it."""
        running = self.running
        if running is None or time.perf_counter() - running[1] < running[0].seconds:
            return
        what, seconds = running[0].work.what, running[0].seconds
        words = f"{what} timed out after {seconds:g} s on rank {self._me}: all ranks called it, but it does not end"
        self.fail(running[0].work, MpiTimeout(words))
        with suppress(Empty):
            while (behind := self._queue.get_nowait()) is not None:
                self.fail(behind.work, MpiTimeout(words))

    def _meet(self, item: _Collective) -> None:
        """Wait until all ranks are at this operation. Raises MpiError where they are not, in time or at another."""
        check = zlib.crc32(item.signature.encode())
        largest = array("q", [check, -check])
        request = self.comm.Iallreduce(MPI.IN_PLACE, [largest, MPI.INT64_T], MPI.MAX)
        started, told, patience = time.perf_counter(), False, min(1.0, item.seconds / 4)
        while not request.Test():
            waited = time.perf_counter() - started
            if not told and waited > patience:
                self._tell(item)
                told = True
            if waited > item.seconds + 2 * patience:  # so that those who came in time have told
                _GIVEN_UP.append((request, largest))
                raise MpiTimeout(self._missing(item))
            time.sleep(pause_s(waited))
        if largest[0] != -largest[1]:
            self._tell(item)
            raise MpiError(self._different(item))

    def _tell(self, item: _Collective) -> None:
        """Write into the store where this rank is."""
        self.store.set(f"at/{self.comm.rank}", f"{item.number} {item.signature}")

    def _heard(self, rank: int) -> tuple[int, str]:
        """Where a rank says it is: number and signature of its operation; 0 where it has not told."""
        key = f"at/{rank}"
        if not self.store.check([key]):
            return 0, ""
        number, _, signature = self.store.get(key).decode().partition(" ")
        return int(number), signature

    def _missing(self, item: _Collective) -> str:
        absent = [self.ranks[r] for r in range(self.comm.size) if self._heard(r)[0] < item.number]
        who = f"{format_ranks(absent)} did not call it" if absent else "all ranks called it, some too late"
        return f"{item.work.what} timed out after {item.seconds:g} s on rank {self._me}: {who}"

    def _different(self, item: _Collective) -> str:
        calls: dict[str, list[int]] = {}
        deadline = time.monotonic() + item.seconds
        for rank, name in enumerate(self.ranks):
            while (heard := self._heard(rank))[0] != item.number and time.monotonic() < deadline:
                time.sleep(0.05)  # what stands there is from an earlier wait
            calls.setdefault(heard[1] if heard[0] == item.number else "no word", []).append(name)
        words = "; ".join(f"{format_ranks(ranks)}: {call}" for call, ranks in calls.items())
        return f"operation number {item.number} in group {self.name} is not the same on all ranks: {words}"


def watch_deadlines() -> None:
    """A thread's work: all lanes' deadlines."""
    while True:
        time.sleep(LOOK_S)
        for lane in list(CollectiveThread.all):
            lane.look()


def last_collectives() -> list[dict[str, Any]]:
    """What this rank called last in its MPI groups, in the watchdog's words."""
    return [
        {
            "operation": f"{signature.split()[0]} over MPI",
            "group": lane.name,
            "number": number,
            "sizes": signature,
            "state": "completed" if number <= lane.done else "started" if number == lane.done + 1 else "scheduled",
            "time_ns": moment,
        }
        for moment, lane, number, signature in CollectiveThread.recent.copy()
    ]


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass(eq=False)
class PendingMessage:
    """A point-to-point message under way, in the group of `lane`."""

    lane: CollectiveThread
    request: MPI.Request
    work: MpiWork
    buffer: HostBuffer
    receives: bool
    seconds: float
    started: float = field(default_factory=time.perf_counter)

    def over(self) -> bool:
        """Whether it is done, or its time is up; then `work` is finished. An error breaks the group."""
        try:
            status = MPI.Status()
            if self.request.Test(status):
                came, expected = status.Get_count(MPI.BYTE), self.buffer.host.nbytes
                if self.receives and came != expected:
                    raise MpiError(f"{self.work.what}: {came} bytes came, {expected} were expected")
                if self.receives:
                    self.buffer.back()
                self.work.finish()
                return True
            if time.perf_counter() - self.started > self.seconds:
                _GIVEN_UP.append(self)
                if self.receives:
                    self.request.Cancel()  # or it takes the next message with its tag
                raise MpiTimeout(f"{self.work.what} timed out after {self.seconds:g} s: the other rank did not come")
        except BaseException as error:
            self.lane.fail(self.work, error)
            return True
        return False


class MessageWatcher:
    """All point-to-point messages of this process that are under way, watched by one thread."""

    def __init__(self) -> None:
        self._pending: list[PendingMessage] = []
        self._posted = threading.Event()

    def watch(self, message: PendingMessage) -> None:
        """Finish the message's work once it is over."""
        if not message.over():
            self._pending.append(message)
            self._posted.set()

    @property
    def idle(self) -> bool:
        """Whether no message is under way."""
        return not self._pending

    def look_for_ever(self) -> None:
        """A thread's work: all messages' ends."""
        moved = time.perf_counter()
        while True:
            idle = self.idle
            self._posted.wait(None if idle else pause_s(time.perf_counter() - moved))
            self._posted.clear()  # before the look: what comes after it sets this again
            over = [message for message in self._pending.copy() if message.over()]
            for message in over:
                self._pending.remove(message)
            if over or idle:
                moved = time.perf_counter()
