"""The output layer, and its loss without the logits of all tokens: a chunk of tokens after the other.

Whole logits in fp32, their log-softmax and its gradient take 12 bytes per token and id: 6.3 GB for 4,096 tokens and
128,256 ids. Here the gradient of a chunk's logits is made with its loss, in the forward pass, and used at once: for the
gradient of the chunk's hidden states and, added up in fp32, for that of the weights. Nothing is computed twice, and
what stays until the backward pass has the size of hidden states and weights. So does Liger Kernel's fused linear
cross-entropy (Hsu et al., arXiv 2410.10989).

Cut along the vocabulary (tensor parallel), each rank has the logits of its own ids; ranks exchange the largest logit,
the sum of exponentials and the target's logit of each token (Shoeybi et al., arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

IGNORE_INDEX = -100
"""A target that counts nothing, as for torch's cross-entropy: what masks a token."""


class LMHead(nn.Linear):
    """Hidden states `x_BTD` to logits; with targets, to the summed loss."""

    chunk = 1024
    """Tokens whose logits are there at a time, where the loss is asked for."""
    compute_dtype: torch.dtype | None = None
    """Type of the matrix products then; None: that of the hidden states."""

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """`logits_BTV`; with `targets_BT` (int64) what `loss_sum` of these would be: an fp32 scalar.

        On a cut layer hidden states are a replicated DTensor, and so is the loss.
        """
        if targets_BT is None:
            return super().forward(x_BTD)
        weight: Tensor = self.weight
        dtype, group, mesh = self.compute_dtype or x_BTD.dtype, None, None
        if isinstance(x_BTD, DTensor) and isinstance(weight, DTensor):
            mesh = weight.device_mesh
            group = mesh.get_group()
            # each rank has its own ids' share of the gradient
            x_BTD, weight = x_BTD.to_local(grad_placements=[Partial()]), weight.to_local()
        x_ND, weight_VD = x_BTD.flatten(0, 1).to(dtype), weight.to(dtype)
        loss, grad_x, grad_weight = _loss(x_ND, weight_VD, targets_BT.flatten(), self.chunk, group)
        # not one node with two inputs: torch 2.11's schedules that split the backward pass cannot part a Python one
        loss = loss + _Given.apply(x_ND, grad_x) + _Given.apply(weight_VD, grad_weight)
        return loss if mesh is None else DTensor.from_local(loss, mesh, [Replicate()], run_check=False)


class _Given(torch.autograd.Function):
    """A zero whose gradient is known already."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return torch.zeros((), dtype=torch.float32, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None


@torch.no_grad()
def _loss(
    x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, and its gradients by hidden states and weights, in their types."""
    loss = torch.zeros((), dtype=torch.float32, device=x_ND.device)
    grad_x, grad_weight = torch.empty_like(x_ND), torch.zeros_like(weight_VD, dtype=torch.float32)
    for rows_x, rows_targets, rows_grad in zip(
        x_ND.split(chunk), targets_N.split(chunk), grad_x.split(chunk), strict=True
    ):
        value, gradient = _cross_entropy(rows_x @ weight_VD.T, rows_targets, group)
        loss += value
        torch.mm(gradient, weight_VD, out=rows_grad)
        grad_weight += gradient.T @ rows_x
        del gradient  # before the next chunk's logits
    return loss, grad_x, grad_weight.to(weight_VD.dtype)


def _cross_entropy(logits_NV: Tensor, targets_N: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The summed loss, computed in fp32, and its gradient (softmax less the target's one) in the type of the logits."""
    size, dtype = logits_NV.shape[1], logits_NV.dtype
    logits_NV = logits_NV.float()
    columns_N = targets_N - (0 if group is None else dist.get_rank(group) * size)
    here_N, counted_N = (columns_N >= 0) & (columns_N < size), targets_N != IGNORE_INDEX
    rows_N, columns_N = torch.arange(len(targets_N), device=targets_N.device), columns_N.clamp(0, size - 1)
    logits_NV -= _reduced(logits_NV.amax(dim=1), "max", group).unsqueeze(1)
    at_target_N = torch.where(here_N, logits_NV[rows_N, columns_N], 0.0)
    logits_NV.exp_()
    total_N, at_target_N = _reduced(torch.stack([logits_NV.sum(dim=1), at_target_N]), "sum", group)
    logits_NV *= (counted_N / total_N).unsqueeze(1)
    logits_NV[rows_N, columns_N] -= here_N.float()
    return torch.where(counted_N, total_N.log() - at_target_N, 0.0).sum(), logits_NV.to(dtype)


def _reduced(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> Tensor:
    return tensor if group is None else collectives.wait_tensor(collectives.all_reduce(tensor, op, group))
