"""Activation checkpointing: what backward computes again instead of keeping it (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_SUMS = (torch.ops._c10d_functional.reduce_scatter_tensor.default, torch.ops._c10d_functional.all_reduce.default)


def apply_activation_checkpointing(block: nn.Module, kind: str) -> None:
    """Let backward compute the block again instead of keeping it: `full`, `selective` (not what is dear) or `none`."""
    if kind == "none":
        return
    layer = block.forward

    def forward(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return layer(*inputs)
        options: dict[str, Any] = {}
        if kind == "selective":
            options["context_fn"] = _selective  # of the module, not a closure: that one torch.compile refuses
        return checkpoint.checkpoint(layer, *inputs, use_reentrant=False, **options)

    block.forward = forward


def _selective() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(_keep_products)


def _keep_products(context: Any, op: Any, *inputs: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    """Keep what is dear to compute; elementwise work is cheap to do again.

    Of a product that is summed over tensor parallel ranks, the sum: it is a rank's part, and dear to send.
    """
    summed = op in _PRODUCTS and isinstance(inputs[-1], DTensor) and inputs[-1].placements[-1].is_shard(0)
    keep = (op in _PRODUCTS and not summed) or op in _SUMS or "scaled_dot_product" in str(op)
    return checkpoint.CheckpointPolicy.MUST_SAVE if keep else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
