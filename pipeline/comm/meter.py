"""What a training step sends, and how long it waits for it: `comm`, `exposed_comm_s`, `overlapped_comm_s` of its line.

Everything that training sends passes one of two places: torch's c10d operators (DDP's reducer and DTensor call them
from C++; FSDP2, pipelines and hooks from Python), or our own MPI group, which no operator knows. In both the meter
notes group, kind, bytes and start. The operators have no kernel for the dispatch key `ADInplaceOrView`, which each call
passes on its way to the device's kernel; the meter's kernels stand there and call on. They let go of Python's lock
meanwhile: a reduce-scatter over Gloo blocks inside that call.

A tensor-parallel step has hundreds of small operations, with other work between them that drives this code out of the
processor's caches: what takes 2 µs in a loop took 80 µs there, and as much again to bring a c10d operator's arguments
(a group, a `Work`) to Python and back. So DTensor's operations in the tensor group are met one level higher, at the
functional operators, whose arguments are plain; there the key above is left out of the call, little more is noted than
times, and `Meter.take` does the rest, in a loop.

- *bytes*: what one rank sends with ring algorithms, as `plan` counts: an all-reduce of n bytes over r ranks
  2·n·(r−1)/r, an all-gather or a reduce-scatter half of that. What a library really sends may differ: Gloo's
  reduce-scatter is an all-reduce.
- *seconds* of a group and kind: at least one such operation was under way, waiting for slower ranks included. An
  operation's end comes from its future; that of a tensor group's, which DTensor waits for at once, from the end of the
  wait. Gloo's messages have no future, and their kinds no seconds.
- *exposed*: the training thread did nothing but start operations, wait for them (`Work.wait`, DTensor's `wait_tensor`),
  or sit in the end of DDP's backward, after the last bucket has started and before the last one has ended.
- *overlapped*: at least one operation with a known end was under way, and the thread was not in one of those places.

On GPUs the host does not wait. There the meter counts calls and bytes, and for DDP the exposed time by CUDA events, on
the stream that computes: from the start of the last bucket to the end of backward. FSDP2 and pipelines wait between
streams, out of the meter's sight, so nothing is said of their time.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import library
from torch._C._distributed_c10d import _resolve_process_group

KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
"""Operators of torch's that are counted; what they leave for others to receive is not counted twice."""
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
"""Those by which DTensor calls some of them."""


@dataclass
class _Count:
    calls: int = 0
    sent: int = 0
    spans: list[list[float]] = field(default_factory=list)
    """Start and end of each operation, by time.perf_counter(); NaN where the end is not known."""

    def add(self, sent: int, span: list[float] | None) -> None:
        """One operation more."""
        self.calls += 1
        self.sent += sent
        if span is not None:
            self.spans.append(span)


class Meter:
    """This rank's account of one step at a time. One meter counts at a time, the last one that was made."""

    def __init__(self, labels: dict[str, str], device: torch.device, ddp: bool) -> None:
        """`labels`: names of the groups that count, by their names in torch. `ddp`: whether DDP reduces gradients."""
        global _current
        self.labels, self.ddp, self._cuda = labels, ddp, device.type == "cuda"
        self._thread = threading.get_ident()
        self.on = self._waiting = False
        self._counts: defaultdict[tuple[str, str], _Count] = defaultdict(_Count)
        self._exposed: list[list[float]] = []
        self._open: list[tuple[list[float], Any]] = []
        self._last: Any = None
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.short = None if self._cuda else next((name for name, label in labels.items() if label == "tp"), None)
        """The group whose operations are noted in short."""
        self._ranks = 0 if self.short is None else _resolve_process_group(self.short).size()  # type: ignore[arg-type]
        self._short: list[list[Any]] = []
        """Kind, bytes, begin and end of the start, begin and end of the wait (NaN: there was none)."""
        self._awaited: dict[int, list[Any]] = {}
        """Those that nobody has waited for, by the address of the result."""
        _current = self
        _install()

    def begin(self) -> None:
        """A step begins."""
        self._counts, self._last = defaultdict(_Count), None
        self._exposed, self._open, self._stalls = [], [], []
        self._short, self._awaited = [], {}
        self.on = True

    def phase(self, name: str) -> None:
        """The phase `name` of the step begins; `reduce` is the end of backward, in which DDP waits for its buckets."""
        if name != "reduce" or not self.ddp or self._last is None:
            return
        if self._cuda:
            self._stalls.append((self._last, _event()))
            return
        self._settle()
        now = time.perf_counter()
        ends = [now if math.isnan(end) else min(now, end) for count in self._counts.values() for _, end in count.spans]
        self._exposed.append([self._last, max(self._last, *ends)])

    def take(self) -> dict[str, Any]:
        """The step's part of its line of metrics. On GPUs its work must have ended."""
        self.on = False
        self._settle()
        for span, _ in self._open:  # the step has its result: only the note of its end still waits for Python's lock
            _end(span)
        for kind, size, started, launched, waits, waited in self._short:
            self._counts["tp", kind].add(sent(kind, size, self._ranks), [started, waited])
            self._exposed.append([started, launched])
            if not math.isnan(waited):
                self._exposed.append([waits, waited])
        self._short = []
        comm: dict[str, dict[str, dict[str, float]]] = {}
        for (label, kind), count in sorted(self._counts.items()):
            entry = comm.setdefault(label, {})[kind] = {"calls": count.calls, "bytes": count.sent}
            if not any(math.isnan(end) for _, end in count.spans) and not self._cuda:
                entry["seconds"] = round(covered(count.spans), 6)
        line: dict[str, Any] = {"comm": comm}
        if not self._cuda:
            known = [span for count in self._counts.values() for span in count.spans if not math.isnan(span[1])]
            line["exposed_comm_s"] = round(covered(self._exposed), 6)
            line["overlapped_comm_s"] = round(covered(known + self._exposed) - covered(self._exposed), 6)
        elif self.ddp:
            line["exposed_comm_s"] = round(sum(begin.elapsed_time(end) for begin, end in self._stalls) / 1000, 6)
        return line

    def launched(self, group: Any, kind: str, results: Sequence[torch.Tensor], work: Any, started: float) -> None:
        """`group` began an operation on `results` at `started`; `work` stands for it."""
        label = self.labels.get(group.group_name) if self.on else None
        if label is None or (not self._cuda and threading.get_ident() != self._thread):
            return
        size = sent(kind, sum(tensor.nbytes for tensor in results), group.size())
        if self._cuda:
            self._counts[label, kind].add(size, None)
            self._last = _event()
            return
        span = [started, math.nan]
        self._counts[label, kind].add(size, span)
        self._busy(started)
        if work.is_completed():
            span[1] = self._last
        elif label == "tp":  # DTensor (over MPI) waits at once: a callback would cost more than it tells
            self._open.append((span, work))
        else:
            with contextlib.suppress(RuntimeError):  # "not implemented": messages over Gloo
                work.get_future().add_done_callback(lambda _: _end(span))
                self._open.append((span, work))

    def began(self, kind: str, result: torch.Tensor, started: float) -> None:
        """DTensor began an operation of the group `short` at `started`; it waits for the result by wait_tensor."""
        self._last = now = time.perf_counter()
        operation = [kind, result.nbytes, started, now, math.nan, math.nan]
        self._short.append(operation)
        self._awaited[result.data_ptr()] = operation

    def wait_tensor(self, call: Callable[..., Any], result: torch.Tensor) -> Any:
        """Call `call`, which waits for the operation with this result."""
        operation = self._awaited.pop(result.data_ptr(), None)
        if operation is None:
            return self.wait(call, _KEYS[result.is_cuda], result)
        operation[4] = time.perf_counter()
        outcome = call(_KEYS[0], result)
        operation[5] = self._last = time.perf_counter()
        return outcome

    def wait(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call `call`, which waits for operations."""
        if not self.on or self._waiting or self._cuda or threading.get_ident() != self._thread:
            return call(*arguments, **options)
        self._waiting, started = True, time.perf_counter()
        try:
            return call(*arguments, **options)
        finally:
            self._waiting = False
            self._busy(started)

    def _busy(self, since: float) -> None:
        self._settle()
        self._last = time.perf_counter()
        self._exposed.append([since, self._last])

    def _settle(self) -> None:
        """Note the end of what has ended: a waiting thread may be back before a callback had its turn."""
        if not self._open:
            return
        for span, work in self._open:
            if work.is_completed():
                _end(span)
        self._open = [(span, work) for span, work in self._open if math.isnan(span[1])]


def _end(span: list[float]) -> None:
    if math.isnan(span[1]):
        span[1] = time.perf_counter()


def sent(kind: str, size: int, ranks: int) -> int:
    """Bytes that one rank of `ranks` sends, by ring algorithms; `size`: bytes of the operation's results on a rank."""
    times = {"all_reduce": 2, "reduce_scatter": ranks, "all_gather": 1, "all_to_all": 1}.get(kind)
    return size if times is None else times * size * (ranks - 1) // ranks


def covered(spans: Sequence[list[float]]) -> float:
    """Seconds that lie in at least one of `spans` (start, end)."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# -- where operations pass -------------------------------------------------------------------------------

_KEYS = tuple(torch._C.DispatchKeySet(key) for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA))
_OURS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
_current: Meter
_libraries: list[library.Library] = []


def _install() -> None:
    """Stand in the way of all operations of this process, once; between steps they just pass."""
    if _libraries:
        return
    c10d, functional = library.Library("c10d", "IMPL"), library.Library("_c10d_functional", "IMPL")
    _libraries.extend((c10d, functional))
    for name, kind in KINDS.items():
        c10d.impl(name, _kernel(getattr(torch.ops.c10d, name).default, kind), "ADInplaceOrView")
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default
    functional.impl("wait_tensor", lambda x: _current.wait_tensor(wait_tensor.redispatch, x), "BackendSelect")
    waits: list[Any] = [dist.Work]
    if dist.get_backend() == "mpi4py":
        from pipeline.mpi.group import MpiGroup
        from pipeline.mpi.lane import MpiWork

        waits.append(MpiWork)
        MpiGroup.observer = staticmethod(_observe)
    else:
        for name, kind in FUNCTIONAL.items():
            operator = getattr(torch.ops._c10d_functional, name).default
            functional.impl(name, _functional_kernel(operator, kind), "BackendSelect")
    for kind_of_work in waits:
        kind_of_work.wait = _timed(kind_of_work.wait)


def _kernel(operator: Any, kind: str) -> Callable[..., Any]:
    place = next(i for i, a in enumerate(operator._schema.arguments) if "ProcessGroup" in str(a.type))

    def call(*arguments: Any) -> Any:
        results = _tensors(arguments[0])
        started = time.perf_counter()
        outcome = operator.redispatch(_KEYS[results[0].is_cuda], *arguments)
        if _current.on:
            work = outcome if isinstance(outcome, torch.ScriptObject) else outcome[-1]
            _observe(dist.ProcessGroup.unbox(arguments[place]), kind, results, dist.Work.unbox(work), started)
        return outcome

    return call


def _functional_kernel(operator: Any, kind: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        keys = _KEYS[arguments[0].is_cuda]
        if not _current.on or arguments[-1] != _current.short:
            return operator.redispatch(keys, *arguments)
        started = time.perf_counter()
        with torch._C._ExcludeDispatchKeyGuard(_OURS):  # the operator inside is not to be counted again
            result = operator.redispatch(keys, *arguments)
        _current.began(kind, result, started)
        return result

    return call


def _observe(group: Any, kind: str, results: Sequence[torch.Tensor], work: Any, started: float) -> None:
    _current.launched(group, kind, results, work, started)


def _timed(wait: Callable[..., bool]) -> Callable[..., bool]:
    return lambda work, *arguments, **options: _current.wait(wait, work, *arguments, **options)


def _tensors(argument: Any) -> list[torch.Tensor]:
    """All tensors of an operator's first argument: a tensor, a list, or a list of lists."""
    return [argument] if isinstance(argument, torch.Tensor) else [t for part in argument for t in _tensors(part)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
