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

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from pipeline.base.errors import UserError


class Replicated(ParallelStyle):
    """Parameters are the same on all ranks, and so are inputs and outputs, as local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


class VocabParallelEmbedding(ParallelStyle):
    """An embedding cut by rows: of ids whose rows others have a rank gives zeros, and all ranks' values are added up.

    torch's RowwiseParallel does so, too, but makes the gradient of all rows on each rank before it cuts that.
    """

    def __init__(self, output_layouts: Placement) -> None:
        self.output_layouts = [output_layouts]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: str, table: nn.Module, mesh: DeviceMesh) -> None:
            if (rows := len(table.get_parameter("weight"))) % mesh.size():
                raise UserError(f"an embedding of {rows} rows cannot be cut over {mesh.size()} tensor parallel ranks")
            table.weight = nn.Parameter(distribute_tensor(table.get_parameter("weight"), mesh, [Shard(0)]))

        def look_up(ids_BT: Tensor) -> Tensor:
            rows_VD = cast(DTensor, module.weight).to_local()
            ids_BT = ids_BT - device_mesh.get_local_rank() * len(rows_VD)
            others_BT = (ids_BT < 0) | (ids_BT >= len(rows_VD))
            x_BTD = F.embedding(ids_BT.masked_fill(others_BT, 0), rows_VD).masked_fill(others_BT.unsqueeze(-1), 0)
            whole = DTensor.from_local(x_BTD, device_mesh, [Partial()], run_check=False)
            return whole.redistribute(placements=self.output_layouts).to_local()

        module.forward = look_up
        return distribute_module(module, device_mesh, cut)
