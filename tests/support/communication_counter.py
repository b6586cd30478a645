"""`Sent`: what a rank really sends while it is entered, seen where all of torch's communication passes.

    with Sent() as sent:
        engine.backward(...)
    sent.bytes        # {"mesh_tp": …, "default_pg": …}: by the group's description, with ring algorithms

It is for tests and benchmarks: a dispatch mode slows every operation down.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("reduce_scatter", "allreduce", "all_reduce", "allgather", "all_gather", "all_to_all", "broadcast", "send")
"""How the names of operators that send begin."""


def count_ring_bytes(kind: str, size: int, ranks: int) -> int:
    """Bytes that one rank of `ranks` sends, by ring algorithms; `size`: bytes of the operation's results on a rank."""
    if kind in ("broadcast", "send"):
        return size
    return {"reduce_scatter": ranks, "allreduce": 2, "all_reduce": 2}.get(kind, 1) * size * (ranks - 1) // ranks


def flatten_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a tensor, a list, or a list of lists."""
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in flatten_tensors(part)]


class CommunicationCounter(TorchDispatchMode):
    """Counts by group. DTensor's operations are seen as the functional ones that it makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: defaultdict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        outcome = func(*args, **(kwargs or {}))
        name = func.__name__.lstrip("_")
        kind = next((kind for kind in KINDS if name.startswith(kind)), None)
        if func.namespace in ("c10d", "_c10d_functional") and kind is not None:
            if func.namespace == "c10d":  # in place, and the group is a box
                results = args[0]
                group: Any = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            else:
                results, group = outcome, dist.distributed_c10d._resolve_process_group(args[-1])
            size = sum(tensor.nbytes for tensor in flatten_tensors(results))
            self.bytes[group.group_desc] += count_ring_bytes(kind, size, group.size())
        return outcome
