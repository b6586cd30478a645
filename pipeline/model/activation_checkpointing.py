"""Activation checkpointing: the backward pass recomputes activations instead of storing them.

See Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.base.errors import UserError

_MATRIX_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
_REDUCTIONS = (
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)
"""Collectives that sum the products of tensor-parallel ranks: with and without sequence parallelism."""


def apply_activation_checkpointing(block: nn.Module, kind: str, *, is_compiled: bool = False) -> None:
    """Change `block` in place so that the backward pass recomputes its activations.

    Args:
        block: the module to change.
        kind: `full` recomputes all activations. `selective` recomputes all except those of expensive operations (see
            :func:`_choose_policy`). `none` leaves the module unchanged.
        is_compiled: whether the block will be compiled. torch.compile has no operations in place.
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
            options["context_fn"] = _create_contexts if is_compiled else _create_checked_contexts
        return checkpoint.checkpoint(original_forward, *inputs, use_reentrant=False, **options, **keywords)

    block.forward = forward


def _create_contexts() -> Any:
    """Return the two context managers of selective checkpointing: for the forward pass and for the recomputation."""
    return checkpoint.create_selective_checkpoint_contexts(_choose_policy)


def _create_checked_contexts() -> Any:
    """Return the context managers of `_create_contexts`. The first one also rejects changes of saved results."""
    forward_context, recompute_context = _create_contexts()
    return _RejectChanges(forward_context), recompute_context


class _RejectChanges(TorchDispatchMode):
    """Raise UserError if an operation changes the saved result of another one in place.

    The recomputation would then start from the changed result, and the gradients would be wrong. torch 2.13 does not
    notice this for a product of tensors with three or more dimensions.

    Args:
        caching_mode: the mode of torch that saves results.
    """

    def __init__(self, caching_mode: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._caching_mode = caching_mode
        self._saved: dict[int, Any] = {}
        """The storages of saved results, by their addresses."""

    def __enter__(self) -> Any:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._caching_mode.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._caching_mode.__exit__(*details)
        self._saved.clear()
        super().__exit__(*details)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            for value, argument in zip(args, func._schema.arguments, strict=False):
                is_written = argument.alias_info is not None and argument.alias_info.is_write
                if is_written and isinstance(value, Tensor) and value.untyped_storage()._cdata in self._saved:
                    raise UserError(
                        "model.changed_in_place",
                        "parallel.activation_checkpointing selective: a block of the model changes the result of a "
                        f"matrix product in place ({func}), so gradients would be wrong: use full or none",
                    )
        result = func(*args, **(kwargs or {}))
        if _choose_policy(None, func, *args) is checkpoint.CheckpointPolicy.MUST_SAVE:
            for output in tree_leaves(result):
                if isinstance(output, Tensor) and not isinstance(output, DTensor):
                    storage = output.untyped_storage()
                    self._saved[storage._cdata] = storage
        return result


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
