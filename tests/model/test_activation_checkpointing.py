"""Tests that activation checkpointing never changes a gradient silently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipeline.base.errors import UserError
from pipeline.model.activation_checkpointing import apply_activation_checkpointing


class Block(nn.Module):
    """A block that adds its input to the result of a matrix product, in place or not."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_place = in_place

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return a scalar."""
        y_BTD = self.linear(x_BTD)
        y_BTD = y_BTD.add_(x_BTD) if self.in_place else y_BTD + x_BTD
        return (y_BTD * y_BTD).sum()


def compute_gradient(kind: str, *, in_place: bool) -> Tensor:
    """Return the gradient of the weight of a block."""
    torch.manual_seed(0)
    block = Block(in_place=in_place)
    apply_activation_checkpointing(block, kind)
    block(torch.randn(2, 3, 4)).backward()
    gradient = block.linear.weight.grad
    assert gradient is not None
    return gradient


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_gradients_equal_those_without_checkpointing(kind: str) -> None:
    assert torch.equal(compute_gradient(kind, in_place=False), compute_gradient("none", in_place=False))


def test_a_product_that_is_changed_in_place_is_recomputed_or_rejected() -> None:
    assert torch.equal(compute_gradient("full", in_place=True), compute_gradient("none", in_place=True))
    with pytest.raises(UserError, match=r"changes the result of a matrix product in place.*use full or none"):
        compute_gradient("selective", in_place=True)
