"""Where a step went, read from what torch.profiler recorded of it on one rank. Pure: intervals, no torch.

A trace (Chrome's "Trace Event Format", as torch.profiler exports it) becomes spans in microseconds since the step
began, each of a kind:

- `compute`: on a GPU its kernels but for NCCL's; without one, operators on the thread that trains;
- `communication`: NCCL's kernels; on CPUs an operation over Gloo or MPI, from its call to its end;
- `copy`: the GPU's copies (on CPUs operators copy, which is computing);
- `wait`: an operator that does nothing but wait for communication;
- `host`: everything else, to look at.

:func:`parts` divides the step among them, so that they add up to it: compute first; then communication that no
computing covers; copies that neither covers; the pipeline's bubble, which is what its messages are waited for (their
own transfer is in it: a rank alone cannot tell when the other one sent); idle is when nothing was under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEP = "sluice step"
"""The annotation that a profiled step stands in."""
PIPELINE = "pp"
"""The group whose exposed communication is the bubble."""
TRAINING = "training"
"""The row of the thread that trains, the first of its process."""
PARTS = ("compute", "communication_exposed", "copy", "bubble", "idle")
_ON_GPU = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_NO_WORK = ("autograd::", "torch::autograd::", "torch.distributed.", "c10d::", "_c10d_functional", "record_param")
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_GROUPS = {"default_pg": "world", "undefined": "control", "": "unnamed"}

Intervals = list[tuple[float, float]]


class Span(NamedTuple):
    """What was under way from `start` to `end` (microseconds since the step began)."""

    kind: str
    name: str
    row: str
    """Thread, stream or group."""
    start: float
    end: float


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same times as intervals that are in order and do not touch."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def without(intervals: Intervals, others: Intervals) -> Intervals:
    """What of `intervals` none of `others` covers; both and the result are unions."""
    found: Intervals = []
    at = 0
    for start, end in intervals:
        while at < len(others) and others[at][1] <= start:
            at += 1
        for left, right in others[at:]:
            if left >= end:
                break
            if left > start:
                found.append((start, left))
            start = right
        if start < end:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """How long they are together."""
    return sum(end - start for start, end in intervals)


def group_name(description: str) -> str:
    """What to call a process group, by torch's description of it."""
    return _GROUPS.get(description, description.removeprefix("mesh_"))


def read(events: Sequence[Mapping[str, Any]]) -> tuple[float, float, list[Span]]:
    """When the step began, in the trace's own microseconds, how long it took, and its spans.

    Raises ValueError where the trace does not hold the step.
    """
    whole = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
    step = next((e for e in whole if e["name"] == STEP and e.get("cat") == "user_annotation"), None)
    if step is None:
        raise ValueError("the trace does not hold the step")
    begin, gpu = step["ts"], any(event.get("cat") in _ON_GPU for event in whole)
    found = []
    for event in whole:
        start, end = max(0.0, event["ts"] - begin), min(step["dur"], event["ts"] + event["dur"] - begin)
        if end > start and event is not step and event.get("cat") != "Trace":
            kind, row = _kind(event, gpu)
            found.append(Span(kind, event["name"], row, start, end))
    return begin, step["dur"], found


def _kind(event: Mapping[str, Any], gpu: bool) -> tuple[str, str]:
    """Kind and row of an event."""
    name, cat, more = str(event["name"]), str(event.get("cat")), event.get("args", {})
    thread = TRAINING if event.get("tid") == event.get("pid") else f"thread {event.get('tid')}"
    if cat == "communication" or (cat == "kernel" and name.startswith("nccl")):
        return "communication", group_name(str(more.get("Process Group Description", "")))
    if cat in _ON_GPU:
        return _ON_GPU[cat], f"stream {event.get('tid')}"
    if name == "_c10d_functional::wait_tensor":
        return "wait", thread
    works = "::" in name and not name.startswith(_NO_WORK)
    alone = cat == "cpu_op" and thread == TRAINING and not gpu  # on other threads Gloo adds up what it got
    return "compute" if alone and (works or name.startswith(_COMPILED)) else "host", thread


def parts(spans: Sequence[Span], step_us: float) -> dict[str, Any]:
    """Seconds of the step by `PARTS`, which add up to it; and the exposed communication of each group."""

    def of(kind: str, group: str | None = None) -> Intervals:
        return union((s.start, s.end) for s in spans if s.kind == kind and group in (None, s.row))

    left, found = [(0.0, step_us)], dict[str, Any]()
    groups = sorted({span.row for span in spans if span.kind == "communication"})
    compute = without(of("compute"), of("wait"))
    exposed = {group: without(of("communication", group), compute) for group in groups}
    collective = union(one for group in groups if group != PIPELINE for one in exposed[group])
    for part, covered in zip(PARTS, (compute, collective, of("copy"), exposed.get(PIPELINE, []), left), strict=True):
        now = without(left, covered)
        found[part], left = round((length(left) - length(now)) / 1e6, 6), now
    by_group = {group: round(length(times) / 1e6, 6) for group, times in exposed.items()}
    return found | ({"exposed_by_group": by_group} if by_group else {})
