"""Data parallelism: every rank its own part of the batch; gradients are averaged, state may be split.

- `zero: 0` on whole models: `DistributedDataParallel`, which reduces gradients in buckets during backward.
- anything else: FSDP2 (`fully_shard`; Zhao et al., arXiv 2304.11277) over the mesh dimensions replicate × shard. It
  keeps parameters, gradients and optimizer state as DTensors, split along `shard`; what differs between the levels is
  how long things are whole during a step:

        level   parameters are whole             gradients are reduced
        0       always (shard is 1)              once per step
        1       from first use to end of step    once per step; whole until then
        2       from first use to end of step    after each micro-batch, or once per step
        3       while a block computes           after each micro-batch, or once per step

  Under a pipeline torch's stages hold parameters whole during a step and reduce once, at its end.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeline.parallel.mesh import Layout

# a model's only buffers are constant tables; torch 2.13 gave the option that says so another name
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def wrap_with_ddp(model: nn.Module, device: torch.device, bucket_mb: int) -> DistributedDataParallel:
    """`model` with gradients averaged over all ranks in backward; weights must be equal already."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,
        **_NO_BUFFER_SYNC,
    )


def apply_fsdp(
    part: nn.Module,
    groups: Iterable[tuple[list[nn.Module], bool]],
    mesh: DeviceMesh,
    dtype: torch.dtype | None,
    *,
    free_after_forward: bool,
    offload: bool = False,
) -> None:
    """Let FSDP2 keep `part` split over `mesh` (replicate × shard, or shard alone), in place.

    `groups` are gathered one by one, each with whether `free_after_forward` holds for it, the rest together. With
    `dtype` parameters are gathered in that type; gradients are always reduced in fp32.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    for modules, free in groups:
        fully_shard(modules, **options, reshard_after_forward=free_after_forward and free)
    fully_shard(part, **options, reshard_after_forward=free_after_forward)


def gradient_sync(model: nn.Module, layout: Layout, last: bool) -> contextlib.AbstractContextManager[None]:
    """Around one micro-batch: whether its backward reduces gradients. `last`: it is the step's last one."""
    if isinstance(model, DistributedDataParallel) and not last:
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context
    if isinstance(model, FSDPModule):
        # where nothing is reduced yet FSDP may forget the order of a forward, or the next one gathers its end once more
        model.set_is_last_backward(last or not layout.reduce_each_micro_batch)
        model.set_requires_gradient_sync(last or layout.reduce_each_micro_batch)
        model.set_requires_all_reduce(last)
        if layout.zero < 3:
            model.set_reshard_after_backward(last)
    return contextlib.nullcontext()


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """After a step. DDP's stay in its buckets, as zeros: the next micro-batches would add up in others beside them."""
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
