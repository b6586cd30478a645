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
wrote nothing, or something else, are the missing ones. After an error a group stays broken: MPI cannot tell in what
state its communicator is.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from mpi4py import MPI

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 1e-3
_DEFAULT = timedelta(0)
_PR_SET_TIMERSLACK = 29


class MpiError(dist.DistBackendError):
    """A communication over MPI failed: a rank is missing, or the ranks do not do the same thing."""


class MpiTimeout(MpiError):
    """Another rank did not come in time."""


class MpiWork(dist.Work):
    """An operation under way; `get_future` is made on demand, for only DDP and its kin want one."""

    def __init__(self, what: str, results: list[torch.Tensor]) -> None:
        super().__init__()
        self.what, self.sender = what, -1
        self.error: BaseException | None = None
        self._results, self._done, self._lock = results, threading.Event(), threading.Lock()
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is over; wakes whoever waits."""
        self.error = error
        with self._lock:
            self._done.set()
            signal = self._signal
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Wait for the end, by default as long as the operation's own time-out. Raises what went wrong."""
        if not self._done.wait(timeout.total_seconds() if timeout > _DEFAULT else None):
            raise MpiTimeout(f"{self.what} did not end within {timeout.total_seconds():g} s")
        if self.error is not None:
            raise self.error
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of the output tensors. C++ sees an error only if a callback raised it, hence the `then`."""
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._results if tensor.is_cuda}
                self._signal = torch.futures.Future(devices=list(devices))
                self._future = self._signal.then(self._outcome)
                if self._done.is_set():
                    self._signal.set_result(None)
            return self._future

    def _outcome(self, _: torch.futures.Future[None]) -> list[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self._results

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self._done.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        """What went wrong, once it is over."""
        return self.error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._results

    def synchronize(self) -> None:
        """The host has waited when `wait` returns; there is no stream left to wait for."""
        self.wait()

    def _source_rank(self) -> int:
        return self.sender


class AllWork(MpiWork):
    """Several operations that are waited for as one."""

    def __init__(self, parts: Sequence[MpiWork]) -> None:
        super().__init__("coalesced operations", [tensor for part in parts for tensor in part.result()])
        self._parts = parts

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Wait for all of them."""
        for part in self._parts:
            part.wait(timeout)
        return True


def pause_s(waited: float) -> float:
    """How long to sleep between two looks after waiting for `waited` seconds: late by a tenth at most, and idle."""
    return min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, waited / 10))


@dataclass
class _Collective:
    number: int
    signature: str
    run: Callable[[], None]
    work: MpiWork
    seconds: float
    ready: torch.cuda.Event | None


class Lane:
    """One group's collectives, in the order of their calls, on a thread of their own."""

    broken = False
    """Whether any group of this process has failed: then MPI cannot be finalized any more."""

    def __init__(self, comm: MPI.Intracomm, name: str, store: dist.Store, ranks: Sequence[int]) -> None:
        """comm: only this lane's; store: only this group's; ranks: global numbers of the group's ranks."""
        self.comm, self.name, self.store, self.ranks = comm, name, store, ranks
        self.error: BaseException | None = None
        self._queue: SimpleQueue[_Collective | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._number = 0

    def submit(
        self, signature: str, run: Callable[[], None], results: list[torch.Tensor], timeout: timedelta
    ) -> MpiWork:
        """Have `run` called once all ranks have submitted the same `signature` (operation, type and sizes)."""
        if self.error is not None:
            raise self._broken(self.error)
        self._number += 1
        work = MpiWork(f"{signature.split()[0]} (number {self._number} in group {self.name})", results)
        # what is queued on the GPU's stream must have happened before MPI reads it
        device = next((tensor.device for tensor in results if tensor.is_cuda), None)
        ready = torch.cuda.current_stream(device).record_event() if device is not None else None
        self._queue.put(_Collective(self._number, signature, run, work, timeout.total_seconds(), ready))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"mpi {self.name}", daemon=True)
            self._thread.start()
        return work

    def close(self) -> None:
        """Run what was submitted, then end the thread and free the communicator. All ranks of the group call it."""
        if self.error is None:
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
            self.comm.Free()

    def _serve(self) -> None:
        # Linux prolongs a thread's sleeps by up to 50 µs to save wake-ups, more than the pauses here (prctl(2))
        getattr(ctypes.CDLL(None), "prctl", lambda *_: 0)(_PR_SET_TIMERSLACK, 1000)
        while (item := self._queue.get()) is not None:
            try:
                if self.error is not None:
                    raise self._broken(self.error)
                if item.ready is not None:
                    item.ready.synchronize()
                self._meet(item)
                item.run()
                if item.ready is not None:
                    torch.cuda.synchronize(item.ready.device)
            except BaseException as error:
                self.error = self.error or error
                Lane.broken = True
                item.work.finish(error)
            else:
                item.work.finish()

    def _meet(self, item: _Collective) -> None:
        """Wait until all ranks are at this operation. Raises MpiError where they are not, in time or at another."""
        check = zlib.crc32(item.signature.encode())
        largest = array("q", [check, -check])
        request = self.comm.Iallreduce(MPI.IN_PLACE, [largest, MPI.INT64_T], MPI.MAX)
        started, told = time.perf_counter(), False
        while not request.Test():
            waited = time.perf_counter() - started
            if not told and waited > min(1.0, item.seconds / 4):
                self._tell(item)
                told = True
            if waited > item.seconds:
                raise MpiTimeout(self._missing(item))
            time.sleep(pause_s(waited))
        if largest[0] != -largest[1]:
            self._tell(item)
            raise MpiError(self._different(item))

    def _broken(self, error: BaseException) -> MpiError:
        kind = MpiTimeout if isinstance(error, MpiTimeout) else MpiError
        return kind(f"group {self.name} cannot be used after an error: {error}")

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
        who = f"{named(absent)} did not call it" if absent else "all ranks called it, some too late"
        return f"{item.work.what} timed out after {item.seconds:g} s on rank {self._me}: {who}"

    def _different(self, item: _Collective) -> str:
        self.store.wait([f"at/{rank}" for rank in range(self.comm.size)], timedelta(seconds=item.seconds))
        calls: dict[str, list[int]] = {}
        for rank, name in enumerate(self.ranks):
            calls.setdefault(self._heard(rank)[1], []).append(name)
        words = "; ".join(f"{named(ranks)}: {call}" for call, ranks in calls.items())
        return f"operation number {item.number} in group {self.name} is not the same on all ranks: {words}"

    @property
    def _me(self) -> int:
        return self.ranks[self.comm.rank]


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 2, 3`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@dataclass
class _Message:
    request: MPI.Request
    work: MpiWork
    received: Callable[[MPI.Status], None]
    seconds: float
    started: float


class Messages:
    """All point-to-point messages of this process that are under way, watched by one thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._pending: list[_Message] = []
        self._thread: threading.Thread | None = None

    def watch(
        self, request: MPI.Request, work: MpiWork, received: Callable[[MPI.Status], None], timeout: timedelta
    ) -> None:
        """Finish `work` once `request` is done and `received` has been called with its status."""
        message = _Message(request, work, received, timeout.total_seconds(), time.perf_counter())
        if self._finished(message):
            return
        with self._condition:
            self._pending.append(message)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="mpi messages", daemon=True)
                self._thread.start()
            self._condition.notify()

    @property
    def idle(self) -> bool:
        """Whether no message is under way."""
        return not self._pending

    def _serve(self) -> None:
        moved = time.perf_counter()
        while True:
            with self._condition:
                while not self._pending:
                    self._condition.wait()
                    moved = time.perf_counter()
                pending = list(self._pending)
            done = {id(message) for message in pending if self._finished(message)}
            with self._condition:
                if done:
                    moved = time.perf_counter()
                    self._pending = [message for message in self._pending if id(message) not in done]
                else:
                    self._condition.wait(pause_s(time.perf_counter() - moved))

    @staticmethod
    def _finished(message: _Message) -> bool:
        """Whether the message is done, or its time is up."""
        try:
            status = MPI.Status()
            if message.request.Test(status):
                message.received(status)
                message.work.finish()
                return True
            if time.perf_counter() - message.started > message.seconds:
                raise MpiTimeout(
                    f"{message.work.what} timed out after {message.seconds:g} s: the other rank did not come"
                )
        except BaseException as error:
            Lane.broken = True
            message.work.finish(error)
            return True
        return False
