"""Activation checkpointing: what backward computes again instead of keeping it (Chen et al., arXiv 1604.06174)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

_KEPT = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def recompute(block: nn.Module, kind: str) -> None:
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


def _keep_products(context: Any, op: Any, *_: Any, **__: Any) -> checkpoint.CheckpointPolicy:
    """Keep what is dear to compute; elementwise work is cheap to do again."""
    keep = op in _KEPT or "scaled_dot_product" in str(op)
    return checkpoint.CheckpointPolicy.MUST_SAVE if keep else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
