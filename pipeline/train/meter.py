"""`exposed_comm_s`: how long in a step the training thread could do nothing but wait for other ranks.

What it waits for passes inside torch, mostly out of sight. It is told where that can be seen without changing torch:

- whole replicas on CPUs (DDP, over Gloo or MPI): from the moment when the last gradient is there until all ranks' loss
  is. In between DDP waits for its buckets, and the loss for its sum; a hook compresses the last bucket;
- all other layouts over our MPI group: the time blocked in its waits (pipeline/mpi/work.py).

Elsewhere nothing is said: over Gloo the waits of FSDP2, DTensor and pipelines are torch's, and on GPUs the host does
not wait. What a rank sends needs no measuring: `traffic` of pipeline/parallel/traffic.py.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.comm.groups import World
from pipeline.mpi.work import blocked


class Meter:
    """This rank's account of waiting, one step at a time."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`model`: what is called in forward."""
        self._ddp = isinstance(model, DistributedDataParallel)
        self._known = world.size > 1 and world.device.type == "cpu" and (self._ddp or world.transport is not None)
        self._blocked_s = self._last_gradient = self._exposed_s = 0.0
        for parameter in model.parameters() if self._known and self._ddp else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, _: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        self._blocked_s = blocked.seconds

    def reduced(self) -> None:
        """All ranks' loss is there."""
        self._exposed_s = time.perf_counter() - self._last_gradient

    def take(self) -> dict[str, float]:
        """The step's part of its line of metrics; empty where nothing is known."""
        exposed = self._exposed_s if self._ddp else blocked.seconds - self._blocked_s
        return {"exposed_comm_s": round(exposed, 6)} if self._known else {}


def peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory, in GB: on a GPU since the last call, what tensors took and what torch's allocator had reserved
    for them (the rest of the card is free to others); elsewhere that of the process since it began."""
    if device.type == "cpu":
        return {"memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}
    taken, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory_gb": round(taken / 1e9, 3), "memory_reserved_gb": round(reserved / 1e9, 3)}
