"""The loss of a chunk of tokens after the other, against torch's of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.read import parse_config
from pipeline.model.decoder import IGNORE_INDEX, LMHead, cross_entropy_sum
from tests.support.errors import raises_error

TOKENS, WIDTH, VOCAB = (3, 10), 16, 50


def made(dtype: torch.dtype | None = None) -> tuple[LMHead, torch.Tensor, torch.Tensor]:
    """A head, hidden states and targets, a third of which count nothing, all of the last sequence among them."""
    torch.manual_seed(1)
    head = LMHead(WIDTH, VOCAB, bias=False)
    head.compute_dtype = dtype
    x_BTD = 3 * torch.randn(*TOKENS, WIDTH)
    targets_BT = torch.randint(0, VOCAB, TOKENS)
    targets_BT[0, ::4] = IGNORE_INDEX
    targets_BT[2] = IGNORE_INDEX
    return head, x_BTD.requires_grad_(), targets_BT


@pytest.mark.parametrize("chunk", [1, 7, 10, 30, 1000])
def test_loss_and_gradients_are_those_of_whole_logits(chunk: int) -> None:
    """Also where whole chunks count nothing, with a factor before backward, and twice through one graph."""
    head, x_BTD, targets_BT = made()
    head.chunk = chunk
    exact = (x_BTD.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_())
    logits = F.linear(*exact).flatten(0, 1)
    expected = F.cross_entropy(logits, targets_BT.flatten(), reduction="sum")
    theirs = torch.autograd.grad(expected * 0.3, exact)
    loss = head(x_BTD, targets_BT=targets_BT)
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(loss, head(x_BTD, targets_BT=targets_BT)), "the same bits again"
    for _ in range(2):  # schedules that split the backward pass come twice
        ours = torch.autograd.grad(loss * 0.3, (x_BTD, head.weight), retain_graph=True)
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.double(), its, rtol=1e-5, atol=1e-6)
    assert not ours[0][2].any() and not ours[0][0, ::4].any(), "what counts nothing has no gradient"


def test_in_bf16_it_is_as_near_as_whole_logits() -> None:
    """Both round logits and their gradients to bf16; the chunks' shares of the weights' gradient are added in fp32."""
    head, x_BTD, targets_BT = made(torch.bfloat16)
    head.chunk = 4
    exact = torch.autograd.grad(cross_entropy_sum(F.linear(x_BTD, head.weight), targets_BT), (x_BTD, head.weight))
    with torch.autocast("cpu", torch.bfloat16):
        whole = torch.autograd.grad(cross_entropy_sum(head(x_BTD), targets_BT), (x_BTD, head.weight))
        ours = torch.autograd.grad(head(x_BTD, targets_BT=targets_BT), (x_BTD, head.weight))
    for mine, its, true in zip(ours, whole, exact, strict=True):
        assert mine.dtype == its.dtype == torch.float32
        assert (mine - true).norm() < 1.2 * (its - true).norm() < 0.02 * true.norm()


def test_loss_chunk_is_rejected_for_a_custom_model() -> None:
    values = {"run": {"name": "tiny"}, "train": {"steps": 1, "loss_chunk": 8}, "model": {"target": "my.model"}}
    with raises_error("config.conflict", "train.loss_chunk", "model.target"):
        parse_config(values, "tiny.yaml")
