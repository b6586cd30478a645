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

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

STEP = "sluice step"
"""The annotation that a profiled step stands in."""
PIPELINE = "pp"
"""The group whose exposed communication is the bubble."""
TRAINING = "training"
"""The row of the thread that trains, the first of its process."""
STEP_PARTS = ("compute", "communication_exposed", "copy", "bubble", "idle")
GROUP = "Process Group Description"
"""Kineto's name for it, among the arguments of an NCCL kernel."""
_ON_GPU = {"kernel": "compute", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_NO_WORK = ("autograd::", "torch::autograd::", "torch.distributed.", "c10d::", "_c10d_functional", "record_param")
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
_GROUPS = {"default_pg": "world", "undefined": "control", "": "unnamed"}


class Span(NamedTuple):
    """What was under way from `start` to `end` (microseconds since the step began)."""

    kind: str
    row: str
    """Thread, stream or group."""
    name: str
    start: float
    end: float


def parse_trace(events: Sequence[Mapping[str, Any]]) -> tuple[float, float, list[Span]]:
    """When the step began, in the trace's own microseconds, how long it took, and its spans.

    events: the complete ones (`ph` is X) of a trace. Raises ValueError where the trace does not hold the step.
    """
    step = next((e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation"), None)
    if step is None:
        raise ValueError("the trace does not hold the step")
    begin, gpu = step["ts"], any(event.get("cat") in _ON_GPU for event in events)
    found = []
    for event in events:
        start, end = max(0.0, event["ts"] - begin), min(step["dur"], event["ts"] + event["dur"] - begin)
        if end > start and event is not step and event.get("cat") != "Trace":
            found.append(Span(*_kind(event, gpu), event["name"], start, end))
    return begin, step["dur"], found


def _kind(event: Mapping[str, Any], gpu: bool) -> tuple[str, str]:
    """Kind and row of an event."""
    name, cat, more = str(event["name"]), str(event.get("cat")), event.get("args", {})
    thread = TRAINING if event.get("tid") == event.get("pid") else f"thread {event.get('tid')}"
    if cat == "communication" or (cat == "kernel" and name.startswith("nccl")):
        group = str(more.get(GROUP, ""))
        return "communication", _GROUPS.get(group, group.removeprefix("mesh_"))
    if cat in _ON_GPU:
        return _ON_GPU[cat], f"stream {event.get('tid')}"
    if name == "_c10d_functional::wait_tensor":
        return "wait", thread
    works = "::" in name and not name.startswith(_NO_WORK)
    alone = cat == "cpu_op" and thread == TRAINING and not gpu  # on other threads Gloo adds up what it got
    return "compute" if alone and (works or name.startswith(_COMPILED)) else "host", thread


def divide_step(spans: Sequence[Span], step_us: float) -> dict[str, Any]:
    """Seconds of the step by `PARTS`, which add up to it; and the exposed communication of each group."""
    edges = [(at, change, (s.kind, s.row)) for s in spans for at, change in ((s.start, 1), (s.end, -1))]
    found, by_group = dict.fromkeys(STEP_PARTS, 0.0), Counter[str]()
    under_way, before = Counter[tuple[str, str]](), 0.0
    for at, change, key in [*sorted(edges), (step_us, 0, ("", ""))]:
        if at > before:
            kinds = {kind for (kind, _) in under_way}
            groups = {row for (kind, row) in under_way if kind == "communication"}
            if "compute" in kinds and "wait" not in kinds:
                part, groups = "compute", set()
            elif groups - {PIPELINE}:
                part = "communication_exposed"
            else:
                part = "copy" if "copy" in kinds else "bubble" if groups else "idle"
            found[part] += (at - before) / 1e6
            by_group.update(dict.fromkeys(groups, (at - before) / 1e6))
            before = at
        under_way[key] += change
        if not under_way[key]:
            del under_way[key]
    return found | {"exposed_by_group": dict(by_group)}


def average_ranks(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of each figure over all ranks; a group that a rank is not in counts as none of its time."""
    names = dict.fromkeys(name for one in found for name in one)
    inner = {n: [one.get(n, {}) for one in found] for n in names if isinstance(found[0].get(n), dict)}
    return {
        n: average_ranks(inner[n]) if n in inner else round(fmean(one.get(n, 0.0) for one in found), 6) for n in names
    }


def describe_parts(parts: Mapping[str, Any]) -> str:
    """Return the duration of a profiled step, and the share of each of its parts in per cent."""
    total = sum(parts[name] for name in STEP_PARTS) or 1.0
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * parts[name] / total:.0f} %" for name in STEP_PARTS)
    return f"{1000 * total:.1f} ms: {shares}"
