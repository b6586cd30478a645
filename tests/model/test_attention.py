"""Tests of attention to ranges of keys. It is compared with torch's attention with a mask of all pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library

from pipeline.model import attention
from pipeline.model.attention import KeyRanges

HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8
CPU = torch.device("cpu")


def make_inputs(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random queries, keys and values with gradients, and a random gradient of the result."""
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = [(queries, HEADS), (keys, KEY_HEADS), (keys, KEY_HEADS), (queries, HEADS)]
    tensors = [torch.randn((*shape, HEAD_SIZE), generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(number < 3) for number, tensor in enumerate(tensors)]


def attend_with_mask(q_NHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, ranges: KeyRanges) -> Tensor:
    """Return the attention of torch with a mask of all pairs, computed in fp32."""
    keys_M = torch.arange(len(k_MGK))
    mask_NM = (keys_M >= ranges.first_N.unsqueeze(1)) & (keys_M <= ranges.last_N.unsqueeze(1))
    q_HNK, k_HMK, v_HMK = (
        x.float().repeat_interleave(HEADS // x.shape[1], dim=1).transpose(0, 1) for x in (q_NHK, k_MGK, v_MGK)
    )
    return F.scaled_dot_product_attention(q_HNK[None], k_HMK[None], v_HMK[None], mask_NM)[0].transpose(0, 1)


def compute_results(attend: Any, inputs: list[Tensor], ranges: KeyRanges) -> list[Tensor]:
    """Return the attention and the gradients of queries, keys and values."""
    *arguments, gradient = inputs
    out_NHK = attend(*arguments, ranges)
    return [out_NHK.detach(), *torch.autograd.grad(out_NHK, arguments, gradient.to(out_NHK.dtype))]


def assert_equals_masked_attention(ranges: KeyRanges, keys: int) -> None:
    """Check the attention and its gradients with random inputs."""
    inputs = make_inputs(len(ranges.last_N), keys)
    results = compute_results(lambda q, k, v, ranges: ranges.attend(q, k, v), inputs, ranges)
    for result, expected in zip(results, compute_results(attend_with_mask, inputs, ranges), strict=True):
        torch.testing.assert_close(result, expected, atol=3e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    window=st.one_of(st.none(), st.integers(1, 50)),
    block_rows=st.sampled_from([1, 7, 16, 128]),
    cuts=st.lists(st.integers(0, 320), max_size=4),
)
def test_results_and_gradients_equal_those_with_a_mask(
    lengths: list[int], window: int | None, block_rows: int, cuts: list[int]
) -> None:
    """`lengths` are those of documents. If there are `cuts`, only every other part of the tokens has queries."""
    starts = torch.repeat_interleave(torch.tensor([0, *lengths[:-1]]).cumsum(0), torch.tensor(lengths))
    positions = torch.arange(len(starts))
    has_query = (positions.unsqueeze(1) >= torch.tensor(cuts, dtype=torch.int64)).sum(dim=1) % 2 == 0
    if not has_query.any():
        return
    ranges = KeyRanges(starts[has_query], positions[has_query], window, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_ROWS", block_rows)
        assert_equals_masked_attention(ranges, len(starts))


@pytest.mark.parametrize("uses_autocast", [False, True])
def test_results_in_bf16_are_rounded_only_at_the_end(uses_autocast: bool) -> None:
    """Scores and sums are computed in fp32, also under autocast. The scores are large, so that rounding them shows."""
    starts = torch.tensor([0] * 100 + [100] * 200)
    ranges = KeyRanges(starts, torch.arange(300), None, CPU)
    inputs = [tensor.detach() * 3 for tensor in make_inputs(300, 300, torch.bfloat16)]
    inputs = [tensor.requires_grad_(number < 3) for number, tensor in enumerate(inputs)]
    exact = compute_results(attend_with_mask, [tensor.detach().float().requires_grad_() for tensor in inputs], ranges)
    with torch.autocast("cpu", torch.bfloat16, enabled=uses_autocast):
        results = compute_results(lambda q, k, v, ranges: ranges.attend(q, k, v), inputs, ranges)
    for result, expected in zip(results, exact, strict=True):
        assert result.dtype == torch.bfloat16
        assert (result.float() - expected).norm() < 0.01 * expected.norm()


def test_the_operator_follows_the_rules_of_torch() -> None:
    """Among others, its shapes are known without values, and it works in compiled code."""
    ranges = KeyRanges(torch.tensor([0] * 5 + [5] * 7), torch.arange(12), 4, CPU)
    *arguments, _ = make_inputs(12, 12)
    library.opcheck(torch.ops.sluice.range_attention.default, (*arguments, ranges.first_N, ranges.last_N))


def test_the_flash_kernel_gets_the_lengths_of_documents() -> None:
    """Two parts of a sequence of 40 keys have queries, as with context parallelism. Documents begin at 0, 12 and 30."""
    starts = torch.tensor([0] * 12 + [12] * 18 + [30] * 10)
    positions = torch.cat((torch.arange(10, 15), torch.arange(25, 40)))
    first_call, second_call = attention._make_flash_calls(starts[positions], positions, CPU)
    assert (first_call.queries, first_call.keys) == (slice(0, 5), slice(0, 15))
    assert first_call.query_ends.tolist() == [0, 2, 5] and first_call.key_ends.tolist() == [0, 12, 15]
    assert (second_call.queries, second_call.keys) == (slice(5, 20), slice(12, 40))
    assert second_call.query_ends.tolist() == [0, 5, 15] and second_call.key_ends.tolist() == [0, 18, 28]
    assert (first_call.max_queries, first_call.max_keys, second_call.max_keys) == (4, 16, 32)
