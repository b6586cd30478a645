"""Activation checkpointing: backward recomputes activations instead of storing them (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_SUMS = (torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.all_reduce.default)


def apply_activation_checkpointing(block: nn.Module, kind: str) -> None:
    """Let backward recompute the activations of `block`, in place.

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
            options["context_fn"] = _selective_contexts  # a function of the module: torch.compile rejects a closure
        return checkpoint.checkpoint(layer, *inputs, use_reentrant=False, **options)

    block.forward = forward


def _selective_contexts() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(_save_expensive)


def _save_expensive(context: Any, op: Any, *inputs: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    """Save the results of matrix products and attention; element-wise operations are cheap to recompute.

    If a product is summed over tensor parallel ranks, its sum is saved instead: that is a shard, and expensive to
    communicate again.
    """
    is_summed = op in _PRODUCTS and isinstance(inputs[-1], DTensor) and inputs[-1].placements[-1].is_shard(0)
    is_expensive = (op in _PRODUCTS and not is_summed) or op in _SUMS or "scaled_dot_product" in str(op)
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_expensive else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
