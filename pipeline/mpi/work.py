"""Results and errors of operations of the MPI process group, and records of the latest collectives.

The watchdog and the profiler import this module in every run. This module must therefore not import mpi4py, because
that import starts MPI.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

_NO_TIMEOUT = timedelta(0)


class MpiError(dist.DistBackendError):
    """Error of an operation over MPI, for example because the ranks called different operations."""


class MpiTimeout(MpiError):
    """Error of an operation that did not end in time, usually because another rank did not call it."""


@dataclass
class CollectiveRecord:
    """A collective that this rank has called. The watchdog's report has the same fields."""

    operation: str
    """Name of the operation, such as `all_reduce over MPI`."""
    group: str
    """Name of the process group."""
    number: int
    """Number of the collective in its group, from 1."""
    sizes: str
    """Text with the operation, the types and the numbers of elements, which must be the same on all ranks."""
    state: str = "scheduled"
    """`scheduled`, `started` or `completed`, as in torch's flight recorder."""
    time_ns: int = field(default_factory=time.time_ns)
    """Time of the call, in nanoseconds since 1970."""


RECENT_COLLECTIVES: deque[CollectiveRecord] = deque(maxlen=3)
"""The latest collectives of all MPI groups of this process, oldest first."""


class MpiWork(dist.Work):
    """An operation over MPI, in progress or finished.

    The future of an operation is created only on demand, because only few callers, such as DDP, need it.

    Args:
        description: text with the operation and the group, for messages.
        results: the output tensors.
        group: name of the process group.
    """

    recorded: ClassVar[list[tuple[str, str, int, int]] | None] = None
    """While a step is profiled: description, group, call time and end time (ns since 1970) of each operation.

    None if no step is profiled.
    """

    def __init__(self, description: str, results: list[torch.Tensor], group: str = "") -> None:
        super().__init__()
        self.description = description
        self.group = group
        self.error: BaseException | None = None
        self._call_time_ns = time.time_ns()
        self._results = results
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the operation as finished, with `error` if it failed, and wake waiting threads.

        Only the first call has an effect.
        """
        with self._lock:
            if self._finished.is_set():
                return
            self.error = error
            self._finished.set()
            signal = self._signal
            recorded = MpiWork.recorded
        if recorded is not None:
            recorded.append((self.description, self.group, self._call_time_ns, time.time_ns()))
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the operation is finished, and raise its error if it failed.

        Raises MpiTimeout if `timeout` expires. If `timeout` is 0, only the timeout of the operation applies.
        """
        if not self._finished.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None):
            raise MpiTimeout(f"{self.description} did not end within {timeout.total_seconds():g} s")
        self._get_results()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the output tensors.

        The future is the result of `then` with a callback, because C++ receives an error only if a callback raises it.
        """
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._results if tensor.is_cuda}
                self._signal = torch.futures.Future(devices=list(devices))
                self._future = self._signal.then(self._get_results)
                if self._finished.is_set():
                    self._signal.set_result(None)
            return self._future

    def _get_results(self, _: object = None) -> list[torch.Tensor]:
        """Return the output tensors of a finished operation, or raise its error."""
        if self.error is not None:
            raise self.error
        return self._results

    def is_completed(self) -> bool:
        """Return True if the operation has ended, successfully or not."""
        return self._finished.is_set()

    def is_success(self) -> bool:
        """Return True if the operation has ended without an error."""
        return self._finished.is_set() and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if the operation is in progress or succeeded."""
        return self.error

    synchronize = wait  # type: ignore[assignment]
    """The same as `wait`, which blocks the host until the data has arrived. No stream must be synchronized."""
