"""`MpiWork`: what every operation of the MPI process group returns, and the errors that it may end with."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import ClassVar

import torch
import torch.distributed as dist

_DEFAULT = timedelta(0)


class MpiError(dist.DistBackendError):
    """A communication over MPI failed: a rank is missing, or the ranks do not do the same thing."""


class MpiTimeout(MpiError):
    """Another rank did not come in time."""


class MpiWork(dist.Work):
    """An operation under way; `get_future` is made on demand, for only DDP and its kin want one."""

    recorded: ClassVar[list[tuple[str, str, int, int]] | None] = None
    """While a step is profiled: what ended, in which group, when it was called and when it ended (ns since 1970)."""

    def __init__(self, what: str, results: list[torch.Tensor], group: str = "") -> None:
        super().__init__()
        self.what, self.group, self._called = what, group, time.time_ns()
        self.error: BaseException | None = None
        self._results, self._done, self._lock = results, threading.Event(), threading.Lock()
        self._signal: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """The operation is over; wakes whoever waits. Only the first call counts."""
        with self._lock:
            if self._done.is_set():
                return
            self.error = error
            self._done.set()
            signal, recorded = self._signal, MpiWork.recorded
        if recorded is not None:
            recorded.append((self.what, self.group, self._called, time.time_ns()))
        if signal is not None:
            signal.set_result(None)

    def wait(self, timeout: timedelta = _DEFAULT) -> bool:
        """Wait for the end, by default as long as the operation's own time-out. Raises what went wrong."""
        if not self._done.wait(timeout.total_seconds() if timeout > _DEFAULT else None):
            raise MpiTimeout(f"{self.what} did not end within {timeout.total_seconds():g} s")
        self._outcome()
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

    def _outcome(self, _: object = None) -> list[torch.Tensor]:
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

    synchronize = wait  # type: ignore[assignment]
    """The host has waited when `wait` returns; there is no stream left to wait for."""
