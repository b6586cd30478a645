"""Activation checkpointing: the backward pass recomputes activations instead of storing them.

See Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_SUMS = (torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.all_reduce.default)


def apply_activation_checkpointing(block: nn.Module, kind: str) -> None:
    """Change `block` in place so that the backward pass recomputes its activations.

    Args:
        block: the module to change.
        kind: `full` recomputes everything, `selective` everything except expensive operations, `none` nothing.
    """
    if kind == "none":
        return
    layer = block.forward

    def forward(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer(*inputs)
        options: dict[str, Any] = {}
        if kind == "selective":
            options["context_fn"] = _create_contexts  # A module-level function, because torch.compile rejects closures.
        return checkpoint.checkpoint(layer, *inputs, use_reentrant=False, **options)

    block.forward = forward


def _create_contexts() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(_save_expensive)


def _save_expensive(context: Any, op: Any, *inputs: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    """Save the results of matrix products and attention. Element-wise operations are cheap to recompute.

    If a product is summed over tensor-parallel ranks, the sum is saved instead of the product. The sum is only a shard,
    and recomputing it would repeat the communication.
    """
    is_summed = op in _PRODUCTS and isinstance(inputs[-1], DTensor) and inputs[-1].placements[-1].is_shard(0)
    is_expensive = (op in _PRODUCTS and not is_summed) or op in _SUMS or "scaled_dot_product" in str(op)
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_expensive else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
