"""Divide the time of a step into compute, exposed communication, copies, pipeline bubble and idle time.

The input is a trace of one rank (Chrome's "Trace Event Format", as torch.profiler exports it). Each event has a kind:

- `compute`: on a GPU, kernels except NCCL's; on a CPU, operators of the training thread
- `communication`: NCCL's kernels; on a CPU, an operation over Gloo or MPI, from its call to its end
- `copy`: copies of the GPU (on a CPU they are compute)
- `wait`: operators that only wait for communication
- `host`: everything else, for display

At each moment `divide_step` counts the first of these that applies, so the parts add up to the step. The bubble is the
time spent waiting for pipeline messages, transfer included: one rank does not know when the other one sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

STEP = "sluice step"
"""Name of the annotation around a profiled step."""
PIPELINE = "pp"
"""Name of the group whose exposed communication is the bubble."""
TRAINING = "training"
"""Row of the training thread, which is the first of its process."""
STEP_PARTS = ("compute", "communication_exposed", "copy", "bubble", "idle")
GROUP = "Process Group Description"
"""Name of the process group among the arguments of an NCCL kernel (Kineto)."""
_ON_GPU = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_NO_WORK = ("autograd::", "torch::autograd::", "torch.distributed.", "c10d::", "_c10d_functional", "record_param")
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_GROUPS = {"default_pg": "world", "undefined": "control", "": "unnamed"}


class Span(NamedTuple):
    """An event from `start` to `end`, in microseconds since the start of the step."""

    kind: str
    row: str
    """Thread, stream or group."""
    name: str
    start: float
    end: float


def parse_trace(events: Sequence[Mapping[str, Any]]) -> tuple[float, float, list[Span]]:
    """Return start and duration of the step, in microseconds of the trace, and its spans.

    Args:
        events: complete events (`ph` is X) of a trace.

    Raises:
        ValueError: if the trace does not contain the step.
    """
    step = next((e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"), None)
    if step is None:
        raise ValueError("the trace does not contain the step")
    step_start = step["ts"]
    has_gpu = any(event.get("cat") in _ON_GPU for event in events)
    spans = []
    for event in events:
        start = max(0.0, event["ts"] - step_start)
        end = min(step["dur"], event["ts"] + event["dur"] - step_start)
        if end > start and event is not step and event.get("cat") != "Trace":
            spans.append(Span(*_classify_event(event, has_gpu), event["name"], start, end))
    return step_start, step["dur"], spans


def _classify_event(event: Mapping[str, Any], has_gpu: bool) -> tuple[str, str]:
    """Return kind and row of an event."""
    name = str(event["name"])
    cat = str(event.get("cat"))
    thread = TRAINING if event.get("tid") == event.get("pid") else f"thread {event.get('tid')}"
    if cat == "communication" or (cat == "kernel" and name.startswith("nccl")):
        group = str(event.get("args", {}).get(GROUP, ""))
        return "communication", _GROUPS.get(group, group.removeprefix("mesh_"))
    if cat in _ON_GPU:
        return _ON_GPU[cat], f"stream {event.get('tid')}"
    if name == "_c10d_functional::wait_tensor":
        return "wait", thread
    is_operator = "::" in name and not name.startswith(_NO_WORK)
    # operators of other threads are Gloo's sums, which belong to the communication
    may_compute = cat == "cpu_op" and thread == TRAINING and not has_gpu
    return "compute" if may_compute and (is_operator or name.startswith(_COMPILED)) else "host", thread


def divide_step(spans: Sequence[Span], step_us: float) -> dict[str, Any]:
    """Return the seconds of each of `STEP_PARTS`, which add up to the step, and each group's exposed communication."""
    edges = [(time, change, (s.kind, s.row)) for s in spans for time, change in ((s.start, 1), (s.end, -1))]
    parts = dict.fromkeys(STEP_PARTS, 0.0)
    exposed_by_group = Counter[str]()
    active = Counter[tuple[str, str]]()
    previous_time = 0.0
    for time, change, key in [*sorted(edges), (step_us, 0, ("", ""))]:
        if time > previous_time:
            kinds = {kind for (kind, _) in active}
            groups = {row for (kind, row) in active if kind == "communication"}
            if "compute" in kinds and "wait" not in kinds:
                part = "compute"
                groups = set()
            elif groups - {PIPELINE}:
                part = "communication_exposed"
            else:
                part = "copy" if "copy" in kinds else "bubble" if groups else "idle"
            seconds = (time - previous_time) / 1e6
            parts[part] += seconds
            exposed_by_group.update(dict.fromkeys(groups, seconds))
            previous_time = time
        active[key] += change
        if not active[key]:
            del active[key]
    return parts | {"exposed_by_group": dict(exposed_by_group)}


def average_ranks(parts_of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each part over all ranks. A rank counts as 0 for a group that it is not in."""
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for parts in parts_of_ranks for name in parts):
        if isinstance(parts_of_ranks[0].get(name), dict):
            means[name] = average_ranks([parts.get(name, {}) for parts in parts_of_ranks])
        else:
            means[name] = round(fmean(parts.get(name, 0.0) for parts in parts_of_ranks), 6)
    return means


def describe_parts(parts: Mapping[str, Any]) -> str:
    """Return the duration of a profiled step, and the share of each of its parts in per cent."""
    total = sum(parts[name] for name in STEP_PARTS) or 1.0
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * parts[name] / total:.0f} %" for name in STEP_PARTS)
    return f"{1000 * total:.1f} ms: {shares}"
