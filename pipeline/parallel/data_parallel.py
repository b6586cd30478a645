"""Data parallelism: each rank processes its part of the batch. Gradients are averaged, and state may be sharded.

- `zero: 0` on models that are not split: `DistributedDataParallel` reduces gradients in buckets during backward.
- Otherwise: FSDP2 (`fully_shard`; Zhao et al., arXiv 2304.11277) over the mesh dimensions replicate × shard. FSDP2
  stores parameters, gradients and optimizer state as DTensors, sharded along `shard`. The ZeRO levels differ in how
  long parameters and gradients are unsharded during a step:

        level   parameters are unsharded            gradients are reduced
        0       always (shard is 1)                 once per step
        1       from first use to end of step       once per step; unsharded until then
        2       from first use to end of step       after each micro-batch, or once per step
        3       while a block computes              after each micro-batch, or once per step

  With pipeline parallelism, torch keeps parameters unsharded during a step and reduces gradients once, at its end.
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

from pipeline.base.errors import UserError
from pipeline.parallel.mesh import Layout

# The buffers of a model are constant tables, so DDP does not need to synchronize them. torch 2.13 renamed the option
# that disables this synchronization.
_NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers": False
}


def wrap_with_ddp(model: nn.Module, device: torch.device, bucket_mb: int) -> DistributedDataParallel:
    """Return `model` wrapped in DDP, so that backward averages gradients over all ranks.

    The weights must already be equal on all ranks. `bucket_mb` is the size of a gradient bucket in MiB.
    """
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
    calls_children: bool = False,
) -> None:
    """Shard `part` with FSDP2, in place.

    Args:
        part: the model, or the part of it that belongs to one pipeline-parallel stage.
        groups: for each group, the modules that are gathered together, and whether `free_after_forward` applies to
            them. All other parameters are gathered together with those of `part` itself.
        mesh: replicate × shard, or shard alone.
        dtype: type in which parameters are gathered, with gradients reduced in fp32. None: parameters are gathered and
            gradients are reduced in the type in which parameters are stored.
        free_after_forward: whether gathered parameters are freed between forward and backward.
        offload: whether shards stay in host memory.
        calls_children: whether a training step calls the children of `part` and not `part` itself. Then each child is
            sharded as a model, and its parameters stay gathered until its method `reshard` is called.

    Raises:
        UserError: if `calls_children` is set, and `part` itself has a parameter.
    """
    policy = MixedPrecisionPolicy()
    if dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    for modules, may_free in groups:
        fully_shard(modules, **options, reshard_after_forward=free_after_forward and may_free)
    if not calls_children:
        fully_shard(part, **options, reshard_after_forward=free_after_forward)
        return
    if own_parameters := [name for name, _ in part.named_parameters(recurse=False)]:
        raise UserError(
            "model.parameter_outside_children",
            f"model.target: with training_step and parallel.zero, the parameter {own_parameters[0]} must be in a child "
            "of the model, such as a network that training_step calls: move it there",
        )
    for child in part.children():
        if any(True for _ in child.parameters()) and not isinstance(child, FSDPModule):
            fully_shard(child, **options, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_backward(False, recurse=False)


def gradient_sync(model: nn.Module, layout: Layout, is_last: bool) -> contextlib.AbstractContextManager[None]:
    """Return a context for the forward and backward pass of one micro-batch.

    In this context, backward reduces gradients in the last micro-batch of the step only. If the layout requires it,
    backward reduces gradients in each micro-batch (`Layout.reduce_each_micro_batch`). For a model with FSDP2, this
    function sets options of `model`, and the context does nothing.

    Args:
        model: the model, wrapped in DDP, sharded by FSDP2, or neither.
        layout: the layout of the run.
        is_last: whether this is the last micro-batch of the step.
    """
    if isinstance(model, DistributedDataParallel) and not is_last:
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context
    if isinstance(model, FSDPModule):
        # After each backward pass, FSDP must forget in which order the forward pass used the modules. Otherwise, if
        # gradients are reduced once per step, FSDP would gather the last parameters of this forward pass again during
        # the next forward pass.
        model.set_is_last_backward(is_last or not layout.reduce_each_micro_batch)
        model.set_requires_gradient_sync(is_last or layout.reduce_each_micro_batch)
        # Replicas all-reduce once per step, even if each micro-batch reduce-scatters its gradients.
        model.set_requires_all_reduce(is_last)
        if layout.zero < 3:
            model.set_reshard_after_backward(is_last)
    return contextlib.nullcontext()


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clear the gradients after a step.

    DDP's gradients are views of its buckets, so they are set to 0. If they were set to None, the next backward pass
    would allocate new gradients beside the buckets.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))
