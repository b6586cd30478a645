"""Divide the time of a training step into compute, exposed communication, copies, pipeline bubble and idle time.

The input is the trace of one rank in Chrome's "Trace Event Format", as torch.profiler exports it. `parse_trace` gives
each event one of these kinds:

- `compute`: on a GPU, all kernels except NCCL's; on a CPU, operators of the thread that trains
- `communication`: on a GPU, NCCL's kernels; on a CPU, an operation over Gloo or MPI, from its call to its end
- `copy`: memory copies and fills of the GPU (on a CPU, they are `compute`)
- `wait`: operators that only wait for communication
- `host`: all other events, which are only displayed
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

STEP = "sluice step"
"""Name of the annotation around a profiled step."""
PIPELINE = "pp"
"""Name of the pipeline's process group. Exposed communication of this group counts as the bubble."""
TRAINING = "training"
"""Name of the row of the thread that trains. This is the main thread, so its thread id is the process id."""
STEP_PARTS = ("compute", "communication_exposed", "copy", "bubble", "idle")
"""The parts of a step (:func:`divide_step`)."""
GROUP = "Process Group Description"
"""Key of the process group's name in the arguments of an NCCL kernel, as Kineto writes it."""
_KIND_BY_GPU_CATEGORY = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_WRAPPERS = ("autograd::", "torch::autograd::", "torch.distributed.", "c10d::", "_c10d_functional", "record_param")
"""Prefixes of events on a CPU that only contain or start other work. Such events are not `compute`."""
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
"""Prefixes of the events of compiled code, which are `compute`."""
_GROUP_NAMES = {"default_pg": "world", "undefined": "control", "": "unnamed"}
"""Our names of process groups, by torch's names."""


class Span(NamedTuple):
    """An event of a trace. `start` and `end` are in microseconds since the start of the step."""

    kind: str
    row: str
    """The row in which the event is displayed: the name of its thread, GPU stream or process group."""
    name: str
    start: float
    end: float


def parse_trace(events: Sequence[Mapping[str, Any]]) -> tuple[float, float, list[Span]]:
    """Find the profiled step in a trace, and the events during this step.

    Args:
        events: the complete events (`ph` is X) of the trace.

    Returns:
        The start of the step by the clock of the trace, the duration of the step, both in microseconds, and the spans
        of the step. Events that begin before the step or end after it are clipped to the step.

    Raises:
        ValueError: if the trace does not contain the step.
    """
    annotations = (e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    step = next(annotations, None)
    if step is None:
        raise ValueError("the trace does not contain the step")
    step_start = step["ts"]
    has_gpu = any(event.get("cat") in _KIND_BY_GPU_CATEGORY for event in events)
    spans = []
    for event in events:
        start = max(0.0, event["ts"] - step_start)
        end = min(step["dur"], event["ts"] + event["dur"] - step_start)
        # Kineto adds an event of the category `Trace` that covers the whole profile.
        if end > start and event is not step and event.get("cat") != "Trace":
            spans.append(Span(*_classify_event(event, has_gpu), event["name"], start, end))
    return step_start, step["dur"], spans


def _classify_event(event: Mapping[str, Any], has_gpu: bool) -> tuple[str, str]:
    """Return the kind and the row of an event, as :class:`Span` has them.

    Args:
        event: a complete event of the trace.
        has_gpu: whether the trace has events of a GPU. If so, operators on the CPU only start kernels, and are not
            `compute`.
    """
    name = str(event["name"])
    category = str(event.get("cat"))
    thread = TRAINING if event.get("tid") == event.get("pid") else f"thread {event.get('tid')}"
    if category == "communication" or (category == "kernel" and name.startswith("nccl")):
        group = str(event.get("args", {}).get(GROUP, ""))
        return "communication", _GROUP_NAMES.get(group, group.removeprefix("mesh_"))
    if category in _KIND_BY_GPU_CATEGORY:
        return _KIND_BY_GPU_CATEGORY[category], f"stream {event.get('tid')}"
    if name == "_c10d_functional::wait_tensor":
        return "wait", thread
    is_operator = "::" in name and not name.startswith(_WRAPPERS)
    is_compiled = name.startswith(_COMPILED)
    # In other threads, Gloo computes the sums of its collectives. These operators are part of the communication.
    may_compute = category == "cpu_op" and thread == TRAINING and not has_gpu
    return "compute" if may_compute and (is_operator or is_compiled) else "host", thread


def divide_step(spans: Sequence[Span], step_us: float) -> dict[str, Any]:
    """Return how many seconds of a step belong to each of `STEP_PARTS`.

    Each moment belongs to the first of these parts that applies, so the parts add up to the step:

    1. `compute`: a span of the kind `compute` is active, and no span of the kind `wait`.
    2. `communication_exposed`: communication of a group other than the pipeline's group is active.
    3. `copy`: a copy is active.
    4. `bubble`: communication of the pipeline's group is active. The bubble includes the transfer of messages,
       because the trace of one rank does not show when the other rank sent a message.
    5. `idle`: none of the above.

    Args:
        spans: the spans of the step.
        step_us: the duration of the step in microseconds.

    Returns:
        The seconds by part, and under `exposed_by_group` the seconds of exposed communication by group. A time at which
        several groups communicate counts for each of these groups.
    """
    # Each span has two edges. At its start, the number of active spans of its kind and row increases by 1. At its end,
    # the number decreases by 1. Between two edges, the active spans do not change.
    edges = [(s.start, 1, (s.kind, s.row)) for s in spans] + [(s.end, -1, (s.kind, s.row)) for s in spans]
    end_of_step = (step_us, 0, ("", ""))
    parts = dict.fromkeys(STEP_PARTS, 0.0)
    exposed_by_group = Counter[str]()
    active = Counter[tuple[str, str]]()
    previous_time = 0.0
    for time, change, key in [*sorted(edges), end_of_step]:
        if time > previous_time:
            kinds = {kind for (kind, _) in active}
            groups = {row for (kind, row) in active if kind == "communication"}
            if "compute" in kinds and "wait" not in kinds:
                part = "compute"
                groups = set()  # This communication is not exposed, because the rank computes at the same time.
            elif groups - {PIPELINE}:
                part = "communication_exposed"
            elif "copy" in kinds:
                part = "copy"
            else:
                part = "bubble" if groups else "idle"
            seconds = (time - previous_time) / 1e6
            parts[part] += seconds
            exposed_by_group.update(dict.fromkeys(groups, seconds))
            previous_time = time
        active[key] += change
        if not active[key]:
            del active[key]
    return parts | {"exposed_by_group": dict(exposed_by_group)}


def average_parts_over_ranks(parts_of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each part over the ranks, in seconds, rounded to microseconds.

    A rank that does not belong to a process group has no entry for this group in `exposed_by_group`. The mean includes
    such a rank with 0 seconds.

    Args:
        parts_of_ranks: for each rank, the result of :func:`divide_step`; at least one.
    """
    means: dict[str, Any] = {}
    for name in dict.fromkeys(name for parts in parts_of_ranks for name in parts):
        if isinstance(parts_of_ranks[0].get(name), dict):  # `exposed_by_group`, which every rank has.
            means[name] = average_parts_over_ranks([parts.get(name, {}) for parts in parts_of_ranks])
        else:
            means[name] = round(fmean(parts.get(name, 0.0) for parts in parts_of_ranks), 6)
    return means


def describe_parts(parts: Mapping[str, Any]) -> str:
    """Return a message with the duration of a profiled step in ms, and the share of each part in per cent.

    Args:
        parts: the seconds by part (:func:`divide_step`).
    """
    total = sum(parts[name] for name in STEP_PARTS) or 1.0  # The value 1.0 avoids a division by zero.
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * parts[name] / total:.0f} %" for name in STEP_PARTS)
    return f"{1000 * total:.1f} ms: {shares}"
