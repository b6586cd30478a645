"""Activation checkpointing: the backward pass recomputes activations instead of storing them.

See Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint

_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_REDUCTIONS = (
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)
"""Collectives that sum the products of tensor-parallel ranks: with and without sequence parallelism."""


def apply_activation_checkpointing(block: nn.Module, kind: str) -> None:
    """Change `block` in place so that the backward pass recomputes its activations.

    Args:
        block: the module to change.
        kind: `full` recomputes all activations. `selective` recomputes all except those of expensive operations (see
            :func:`_choose_policy`). `none` leaves the module unchanged.
    """
    if kind == "none":
        return
    original_forward = block.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_forward(*inputs, **keywords)
        options: dict[str, Any] = {}
        if kind == "selective":
            # As `context_fn`, torch.compile accepts a function of a module, but no closure.
            options["context_fn"] = _create_contexts
        return checkpoint.checkpoint(original_forward, *inputs, use_reentrant=False, **options, **keywords)

    block.forward = forward


def _create_contexts() -> Any:
    """Return the two context managers of selective checkpointing: for the forward pass and for the recomputation."""
    return checkpoint.create_selective_checkpoint_contexts(_choose_policy)


def _choose_policy(context: Any, op: Any, *inputs: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    """Return whether the result of an operation is saved or recomputed.

    The results of matrix products and attention are saved. Element-wise operations are cheap to recompute.

    If a product is summed over tensor-parallel ranks, the sum is saved instead of the product, because recomputing the
    sum would repeat the communication. With sequence parallelism, the sum is also smaller: only a shard.
    """
    # A product is summed over ranks if its second factor, the transposed weight, is sharded along the inner dimension.
    is_summed = op in _MATRIX_PRODUCTS and isinstance(inputs[-1], DTensor) and inputs[-1].placements[-1].is_shard(0)
    is_attention = any(name in str(op) for name in ("scaled_dot_product", "range_attention", "varlen_attn"))
    is_expensive = (op in _MATRIX_PRODUCTS and not is_summed) or op in _REDUCTIONS or is_attention
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_expensive else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
