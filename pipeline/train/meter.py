"""`exposed_comm_s`: how long in a step whole replicas on CPUs could do nothing but wait for other ranks.

DDP's waits pass inside torch, over Gloo and MPI. It is told from the moment when the last gradient is there until all
ranks' loss is: in between DDP waits for its buckets, and the loss for its sum; a hook compresses the last bucket. Other
layouts, and GPUs, need a profile (pipeline/train/profiler.py), which costs more than a look at the clock. What a rank
sends needs no measuring: `traffic` of pipeline/parallel/traffic.py.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline.comm.groups import World


class ExposedCommMeter:
    """This rank's account of waiting, one step at a time."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """`model`: what is called in forward."""
        self._known = world.size > 1 and world.device.type == "cpu" and isinstance(model, DistributedDataParallel)
        self._last_gradient = self._exposed_s = 0.0
        for parameter in model.parameters() if self._known else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, _: Tensor) -> None:
        self._last_gradient = time.perf_counter()

    def reduced(self) -> None:
        """All ranks' loss is there."""
        self._exposed_s = time.perf_counter() - self._last_gradient

    def take(self) -> dict[str, float]:
        """The step's part of its line of metrics; empty where nothing is known."""
        return {"exposed_comm_s": round(self._exposed_s, 6)} if self._known else {}


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """The most memory, in GB: on a GPU since the last call, what tensors took and what torch's allocator had reserved
    for them (the rest of the card is free to others); elsewhere that of the process since it began."""
    if device.type == "cpu":
        return {"memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3)}
    taken, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory_gb": round(taken / 1e9, 3), "memory_reserved_gb": round(reserved / 1e9, 3)}
