"""Count the bytes that a rank sends, by process group.

    with CommunicationCounter() as counter:
        engine.backward(...)
    counter.bytes        # {"mesh_tp": …, "default_pg": …}

A `TorchDispatchMode` intercepts each call of a collective. The bytes are those that a ring algorithm sends. Use the
counter only in tests and benchmarks, because a dispatch mode slows down every operation.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SENDING_PREFIXES = (
    "reduce_scatter", "allreduce", "all_reduce", "allgather", "all_gather", "all_to_all", "broadcast", "send",
)  # fmt: skip
"""Operators whose names start with one of these prefixes send data."""


def count_ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Return the bytes that one of `ranks` ranks sends with ring algorithms.

    Args:
        kind: one of SENDING_PREFIXES.
        size: bytes of the operation's results on one rank.
        ranks: size of the group.
    """
    if kind in ("broadcast", "send"):
        return size
    # The result of a reduce-scatter is one of `ranks` parts of the buffer. An all-reduce sends the buffer twice: first
    # to reduce its parts, then to gather them.
    return {"reduce_scatter": ranks, "allreduce": 2, "all_reduce": 2}.get(kind, 1) * size * (ranks - 1) // ranks


def flatten_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested list as a flat list. `value` may also be a single tensor."""
    return [value] if isinstance(value, torch.Tensor) else [t for item in value for t in flatten_tensors(item)]


class CommunicationCounter(TorchDispatchMode):
    """Count sent bytes in `bytes`, by the description of the process group.

    A DTensor operation is counted through the functional collectives that it calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: defaultdict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, DTensor) for tensor_type in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        name = func.__name__.lstrip("_")
        kind = next((prefix for prefix in SENDING_PREFIXES if name.startswith(prefix)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            if func.namespace == "c10d":  # operators of c10d work in place, and their group is boxed in a ScriptObject
                results = args[0]
                group: Any = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            else:
                results = output
                group = dist.distributed_c10d._resolve_process_group(args[-1])
            size = sum(tensor.nbytes for tensor in flatten_tensors(results))
            self.bytes[group.group_desc] += count_ring_bytes(kind, size, group.size())
        return output
