"""Tensor parallelism: the matrices of each layer cut over neighbouring ranks, as DTensors.

After Shoeybi et al. ("Megatron-LM", arXiv 1909.08053): the first matrices of attention and MLP are cut by columns
(each rank has some of the heads, some of the hidden width), the second ones by rows, so that a layer needs one
reduction after attention and one after the MLP. With `sequence` (Korthikanti et al., arXiv 2205.05198) the residual
stream and the norms between them are cut along the sequence: the reduction becomes a reduce-scatter and the next
layer's input an all-gather, the same traffic for 1/tensor of the memory. Embedding and output layer are cut along the
vocabulary, and with `loss_parallel` the loss is computed on logits that stay cut.

Every parameter becomes a DTensor, those of the norms too (replicated): gradient norms and checkpoints then treat all
alike.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle


class Replicated(ParallelStyle):
    """Parameters are the same on all ranks, and so are inputs and outputs, as local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)
