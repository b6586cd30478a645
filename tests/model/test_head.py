"""Tests of the output layer's loss in chunks of tokens, compared with torch's loss of the logits of all tokens."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.read import parse_config
from pipeline.model.decoder import IGNORE_INDEX, LMHead, cross_entropy_sum
from tests.support.errors import raises_error

SHAPE = (3, 10)
"""Number of sequences, and number of tokens in each sequence."""
WIDTH = 16
VOCAB = 50


def build_head(dtype: torch.dtype | None = None) -> tuple[LMHead, torch.Tensor, torch.Tensor]:
    """Return an output layer, hidden states and targets.

    Every fourth target of the first sequence and all targets of the last sequence have no loss.
    """
    torch.manual_seed(1)
    head = LMHead(WIDTH, VOCAB, bias=False)
    head.compute_dtype = dtype
    x_BTD = 3 * torch.randn(*SHAPE, WIDTH)
    targets_BT = torch.randint(0, VOCAB, SHAPE)
    targets_BT[0, ::4] = IGNORE_INDEX
    targets_BT[2] = IGNORE_INDEX
    return head, x_BTD.requires_grad_(), targets_BT


@pytest.mark.parametrize("chunk", [1, 7, 10, 30, 1000])
def test_loss_and_gradients_in_chunks_equal_those_without_chunks(chunk: int) -> None:
    """Some chunks have no target with a loss, the loss is scaled before backward, and backward runs twice."""
    head, x_BTD, targets_BT = build_head()
    head.chunk = chunk
    exact_inputs = (x_BTD.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_())
    logits = F.linear(*exact_inputs).flatten(0, 1)
    expected_loss = F.cross_entropy(logits, targets_BT.flatten(), reduction="sum")
    expected_gradients = torch.autograd.grad(expected_loss * 0.3, exact_inputs)
    loss = head(x_BTD, targets_BT=targets_BT)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-6, atol=0)
    assert torch.equal(loss, head(x_BTD, targets_BT=targets_BT)), "two equal calls have different bits"
    for _ in range(2):  # Pipeline schedules that split the backward pass run it twice.
        gradients = torch.autograd.grad(loss * 0.3, (x_BTD, head.weight), retain_graph=True)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)
    grad_x_BTD = gradients[0]
    assert not grad_x_BTD[2].any() and not grad_x_BTD[0, ::4].any(), "a token without a loss has a gradient"


def test_gradients_in_bf16_in_chunks_are_as_accurate_as_those_without_chunks() -> None:
    """With and without chunks, logits and their gradients are rounded to bf16.

    The weight gradients of the chunks are added in fp32.
    """
    head, x_BTD, targets_BT = build_head(torch.bfloat16)
    head.chunk = 4
    inputs = (x_BTD, head.weight)
    exact_gradients = torch.autograd.grad(cross_entropy_sum(F.linear(x_BTD, head.weight), targets_BT), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        unchunked_gradients = torch.autograd.grad(cross_entropy_sum(head(x_BTD), targets_BT), inputs)
        gradients = torch.autograd.grad(head(x_BTD, targets_BT=targets_BT), inputs)
    for gradient, unchunked, exact in zip(gradients, unchunked_gradients, exact_gradients, strict=True):
        assert gradient.dtype == unchunked.dtype == torch.float32
        assert (gradient - exact).norm() < 1.2 * (unchunked - exact).norm() < 0.02 * exact.norm()


def test_loss_chunk_with_a_custom_model_is_an_error() -> None:
    values = {"run": {"name": "tiny"}, "train": {"steps": 1, "loss_chunk": 8}, "model": {"target": "my.model"}}
    with raises_error("config.conflict", "train.loss_chunk", "model.target"):
        parse_config(values, "tiny.yaml")


def test_compiled_loss_equals_the_loss_without_compilation() -> None:
    """torch.compile gets another function (`_fused_cross_entropy_with_gradient`), with the same result."""
    head, x_BTD, targets_BT = build_head()
    head.chunk = 20
    expected_loss = head(x_BTD, targets_BT=targets_BT)
    expected_gradients = torch.autograd.grad(expected_loss, (x_BTD, head.weight))
    head.compiles_loss = True
    loss = head(x_BTD, targets_BT=targets_BT)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0)
    for gradient, expected in zip(torch.autograd.grad(loss, (x_BTD, head.weight)), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
