"""Attention of each query to one range of keys.

Every restriction of a decoder's attention has this form. A range ends at the query's own position (causal attention).
It begins at the first token of the sample, of the query's document, or of the query's window. Memory therefore grows
with the number of tokens, not with its square, because no mask of all pairs exists:

    CUDA, bf16 or fp16   torch.nn.attention.varlen, a flash kernel that takes the lengths of documents, if the GPU and
                         the size of the heads permit it
    otherwise            blocks of queries, each with the keys of its ranges (`range_attention`)

The tokens of a micro-batch are one after the other. Names of tensors end with their shape: N queries, M keys, H heads
of queries, G heads of keys and values, R = H / G, K = head size, Q queries and J keys of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, library
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 does not have this option, and always accepts fewer heads of keys than of queries.
_GROUPED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)
BLOCK_ROWS = 128
"""Number of queries of a block. More queries need more memory for scores, and compute more scores that are masked."""


@dataclass(frozen=True)
class _FlashCall:
    """Arguments of one call of torch's variable-length attention: consecutive queries with consecutive keys."""

    queries: slice
    keys: slice
    query_ends: Tensor
    """Boundaries of the documents among the queries: int32, one more than there are documents, from 0."""
    key_ends: Tensor
    """Boundaries of the same documents among the keys. A document has at least as many keys as queries."""
    max_queries: int
    max_keys: int


class KeyRanges:
    """The keys that each query may read, from a first one to the one at the query's own position.

    Args:
        starts_N: int64 on the CPU: for each query, the index of the first key of its document.
        positions_N: int64 on the CPU: the index of the last key that each query may read: the key at the same position.
        window: maximum number of keys of a query; None: no limit.
        device: the device of the model.
    """

    def __init__(self, starts_N: Tensor, positions_N: Tensor, window: int | None, device: torch.device) -> None:
        self.window = window
        self.first_N = starts_N if window is None else torch.maximum(starts_N, positions_N - window + 1)
        self.last_N = positions_N
        self._has_flash = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere
        self._flash_calls = list(_make_flash_calls(starts_N, positions_N, device)) if self._has_flash else []

    def attend(self, q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor) -> Tensor:
        """Return the attention of each query to the keys of its range, shape (N, H, K), in the type of `v_MGK`."""
        q_NHK = q_NHK.to(v_MGK.dtype)
        k_MGK = k_MGK.to(v_MGK.dtype)
        # The kernel needs 16-bit types, and heads of a multiple of 8 values, at most 256.
        head_size = v_MGK.shape[-1]
        if not self._has_flash or v_MGK.dtype == torch.float32 or head_size % 8 or head_size > 256:
            out_NHK: Tensor = range_attention(q_NHK, k_MGK, v_MGK, self.first_N, self.last_N)[0]
            return out_NHK
        return torch.cat([self._attend_with_flash(call, q_NHK, k_MGK, v_MGK) for call in self._flash_calls])

    def _attend_with_flash(self, call: _FlashCall, q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor) -> Tensor:
        """Return the attention of the queries of one call."""
        # The window does not count the query's own key.
        window_size = (-1 if self.window is None else self.window - 1, 0)
        out_NHK: Any = varlen_attn(
            q_NHK[call.queries], k_MGK[call.keys], v_MGK[call.keys], call.query_ends, call.key_ends, call.max_queries,
            call.max_keys, window_size=window_size, **_GROUPED_HEADS,
        )  # fmt: skip
        assert isinstance(out_NHK, Tensor)  # Without `return_aux`, nothing else is returned.
        return out_NHK


def _make_flash_calls(starts_N: Tensor, positions_N: Tensor, device: torch.device) -> Iterator[_FlashCall]:
    """Yield the calls that together compute the attention of all queries, in order.

    A call has queries with consecutive positions, so that their documents, and thereby their keys, are consecutive.
    """
    breaks = (positions_N.diff() != 1).nonzero().flatten() + 1
    for begin, end in pairwise([0, *breaks.tolist(), len(positions_N)]):
        starts_Q = starts_N[begin:end]
        first_rows = [0, *((starts_Q.diff() != 0).nonzero().flatten() + 1).tolist()]
        query_ends = torch.tensor([*first_rows, end - begin])
        first_key = int(starts_Q[0])
        end_key = int(positions_N[end - 1]) + 1
        key_ends = torch.cat((starts_Q[first_rows], torch.tensor([end_key]))) - first_key
        yield _FlashCall(
            slice(begin, end),
            slice(first_key, end_key),
            query_ends.to(device, torch.int32, non_blocking=True),
            key_ends.to(device, torch.int32, non_blocking=True),
            _round_up(int(query_ends.diff().max())),
            _round_up(int(key_ends.diff().max())),
        )


def _round_up(length: int) -> int:
    """Return the next power of 2. Few different values let torch.compile compile few times."""
    return 1 << (length - 1).bit_length()


# -- attention in blocks ---------------------------------------------------------------------------------


def range_attention(
    q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, first_N: Tensor, last_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention of each query to a range of keys, and the logarithms of the softmax denominators.

    It is an operator of torch, because torch.compile would compile the loop over the blocks again for each batch. Sums
    are computed in fp32.

    Args:
        q_NHK: queries.
        k_MGK: keys.
        v_MGK: values.
        first_N: int64 on the CPU, the first key of each query.
        last_N: int64 on the CPU, the last key of each query, at least the first one.

    Returns:
        The attention, shape (N, H, K) in the type of the queries, and the logarithms (fp32), shape (G, R, N).
    """
    with torch.autocast(q_NHK.device.type, enabled=False):  # It would round the products in fp32.
        result: tuple[Tensor, Tensor] = torch.ops.sluice.range_attention(q_NHK, k_MGK, v_MGK, first_N, last_N)
    return result


def _compute_forward(
    q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, first_N: Tensor, last_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the operator `range_attention`."""
    q_GRNK, k_GMK, v_GMK = _group_heads(q_NHK, k_MGK.shape[1]), _heads_first(k_MGK), _heads_first(v_MGK)
    out_NHK = torch.empty_like(q_NHK, memory_format=torch.contiguous_format)
    out_GRNK = _group_heads(out_NHK, k_MGK.shape[1])
    lse_GRN = torch.empty(q_GRNK.shape[:3], dtype=torch.float32, device=q_NHK.device)
    for block in _list_blocks(first_N, last_N):
        scores_GRQJ = block.compute_scores(q_GRNK, k_GMK)
        lse_GRQ = scores_GRQJ.logsumexp(dim=-1)
        lse_GRN[:, :, block.rows] = lse_GRQ
        weights_GRQJ = scores_GRQJ.sub_(lse_GRQ.unsqueeze(-1)).exp_()
        out_GRNK[:, :, block.rows] = block.multiply(weights_GRQJ, v_GMK).to(out_NHK.dtype)
    return out_NHK, lse_GRN


def _compute_backward(
    gradient_NHK: Tensor,
    q_NHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    lse_GRN: Tensor,
    first_N: Tensor,
    last_N: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values.

    The weights of the softmax are computed again from the scores, as in Dao et al., "FlashAttention", arXiv 2205.14135,
    section 3.1 and appendix B.2.
    """
    groups = k_MGK.shape[1]
    q_GRNK, k_GMK, v_GMK = _group_heads(q_NHK, groups), _heads_first(k_MGK), _heads_first(v_MGK)
    gradient_GRNK = _group_heads(gradient_NHK, groups)
    dq_NHK = torch.empty_like(q_NHK, memory_format=torch.contiguous_format)
    dq_GRNK = _group_heads(dq_NHK, groups)
    dk_GMK = torch.zeros_like(k_GMK)
    dv_GMK = torch.zeros_like(v_GMK)
    for block in _list_blocks(first_N, last_N):
        weights_GRQJ = block.compute_scores(q_GRNK, k_GMK)
        weights_GRQJ = weights_GRQJ.sub_(lse_GRN[:, :, block.rows].unsqueeze(-1)).exp_()
        block_gradient = gradient_GRNK[:, :, block.rows]
        dv_GMK[:, block.keys] += block.multiply_transposed(weights_GRQJ, block_gradient)
        dscores_GRQJ = block.multiply_keys(block_gradient, v_GMK).mul_(weights_GRQJ)
        # A block has all keys of its queries. The sum is therefore known exactly, without the rounded result.
        sum_GRQ1 = dscores_GRQJ.sum(dim=-1, keepdim=True)
        dscores_GRQJ.addcmul_(weights_GRQJ, sum_GRQ1, value=-1).mul_(q_NHK.shape[-1] ** -0.5)
        dq_GRNK[:, :, block.rows] = block.multiply(dscores_GRQJ, k_GMK).to(dq_NHK.dtype)
        dk_GMK[:, block.keys] += block.multiply_transposed(dscores_GRQJ, q_GRNK[:, :, block.rows])
    dk_MGK = dk_GMK.transpose(0, 1).to(k_MGK.dtype).contiguous()
    dv_MGK = dv_GMK.transpose(0, 1).to(v_MGK.dtype).contiguous()
    return dq_NHK, dk_MGK, dv_MGK


def _make_forward_result(
    q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, first_N: Tensor, last_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes of the results."""
    rows, heads, _ = q_NHK.shape
    groups = k_MGK.shape[1]
    lse_GRN = q_NHK.new_empty((groups, heads // groups, rows), dtype=torch.float32)
    return torch.empty_like(q_NHK, memory_format=torch.contiguous_format), lse_GRN


def _make_backward_result(
    gradient_NHK: Tensor, q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, *others: Tensor
) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes of the results."""
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q_NHK, k_MGK, v_MGK))


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass needs."""
    q_NHK, k_MGK, v_MGK, first_N, last_N = inputs
    ctx.save_for_backward(q_NHK, k_MGK, v_MGK, output[1], first_N, last_N)


def _run_backward(ctx: Any, gradient_NHK: Tensor, lse_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `range_attention`."""
    with torch.autocast(gradient_NHK.device.type, enabled=False):
        gradients = torch.ops.sluice.range_attention_backward(gradient_NHK, *ctx.saved_tensors)
    return *gradients, None, None


def _register_operators() -> None:
    """Define the operators.

    The decorator `custom_op` would be shorter, but the first call of its operators imports the compiler, in 0.8 s.
    """
    forward, backward = "sluice::range_attention", "sluice::range_attention_backward"
    inputs = "Tensor q, Tensor k, Tensor v"
    ranges = "Tensor first, Tensor last"
    library.define(forward, f"({inputs}, {ranges}) -> (Tensor, Tensor)")
    library.define(backward, f"(Tensor gradient, {inputs}, Tensor lse, {ranges}) -> (Tensor, Tensor, Tensor)")
    library.impl(forward, "CompositeExplicitAutograd", _compute_forward)
    library.impl(backward, "CompositeExplicitAutograd", _compute_backward)
    library.register_fake(forward, _make_forward_result)
    library.register_fake(backward, _make_backward_result)
    library.register_autograd(forward, _run_backward, setup_context=_save_for_backward)


def _group_heads(x_NHK: Tensor, groups: int) -> Tensor:
    """Return a view of shape (G, R, N, K)."""
    x_NGRK: Tensor = x_NHK.unflatten(1, (groups, -1))
    return x_NGRK.permute(1, 2, 0, 3)


def _heads_first(x_MGK: Tensor) -> Tensor:
    """Return a contiguous fp32 tensor of shape (G, M, K)."""
    return x_MGK.transpose(0, 1).float().contiguous()


@dataclass(frozen=True)
class _Block:
    """Consecutive queries, and the keys that at least one of them reads."""

    rows: slice
    keys: slice
    first_Q: Tensor
    """int64, the first key of each query."""
    last_Q: Tensor
    """int64, the last key of each query."""
    first_common: int
    """The first key from which on the ranges of all queries have begun."""
    end_common: int
    """The end of the keys that all queries read."""

    def compute_scores(self, q_GRNK: Tensor, k_GMK: Tensor) -> Tensor:
        """Return the scaled scores (fp32), shape (G, R, Q, J); minus infinity for keys that a query does not read."""
        scores_GRQJ = self.multiply_keys(q_GRNK[:, :, self.rows], k_GMK).mul_(q_GRNK.shape[-1] ** -0.5)
        # The mask is only computed for keys that some of the queries do not read.
        for begin, end in ((self.keys.start, self.first_common), (self.end_common, self.keys.stop)):
            if begin < end:
                keys_J = torch.arange(begin, end, device=scores_GRQJ.device)
                first_Q1 = self.first_Q.to(scores_GRQJ.device).unsqueeze(1)
                last_Q1 = self.last_Q.to(scores_GRQJ.device).unsqueeze(1)
                part = scores_GRQJ[..., begin - self.keys.start : end - self.keys.start]
                part.masked_fill_((keys_J < first_Q1) | (keys_J > last_Q1), -torch.inf)
        return scores_GRQJ

    def multiply_keys(self, x_GRQK: Tensor, k_GMK: Tensor) -> Tensor:
        """Return the products of queries and keys, or of other vectors, shape (G, R, Q, J)."""
        x_GXK = x_GRQK.float().flatten(1, 2)  # X = R · Q
        products_GXJ = torch.bmm(x_GXK, k_GMK[:, self.keys].transpose(1, 2))
        return products_GXJ.view(*x_GRQK.shape[:3], -1)

    def multiply(self, weights_GRQJ: Tensor, v_GMK: Tensor) -> Tensor:
        """Return the weighted sums of values, or of other vectors, shape (G, R, Q, K)."""
        return torch.bmm(weights_GRQJ.flatten(1, 2), v_GMK[:, self.keys]).view(*weights_GRQJ.shape[:3], -1)

    def multiply_transposed(self, weights_GRQJ: Tensor, x_GRQK: Tensor) -> Tensor:
        """Return the sums over queries and heads of a group, shape (G, J, K)."""
        return torch.bmm(weights_GRQJ.flatten(1, 2).transpose(1, 2), x_GRQK.float().flatten(1, 2))


def _list_blocks(first_N: Tensor, last_N: Tensor) -> Iterator[_Block]:
    """Yield the blocks of all queries, in order."""
    breaks = (last_N.diff() != 1).nonzero().flatten() + 1  # Queries after a gap read other keys.
    for begin, end in pairwise([0, *breaks.tolist(), len(last_N)]):
        for row in range(begin, end, BLOCK_ROWS):
            rows = slice(row, min(row + BLOCK_ROWS, end))
            first_Q, last_Q = first_N[rows], last_N[rows]
            first_key, first_common = (int(value) for value in first_Q.aminmax())
            end_common, end_key = (int(value) + 1 for value in last_Q.aminmax())
            first_common = min(first_common, end_key)
            yield _Block(rows, slice(first_key, end_key), first_Q, last_Q, first_common, max(first_common, end_common))


_register_operators()
