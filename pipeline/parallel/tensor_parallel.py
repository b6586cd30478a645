"""Tensor parallelism: the matrices of each layer are sharded over neighbouring ranks, as DTensors.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053), the first matrices of attention and MLP are sharded column-wise:
each rank has some of the heads and some of the hidden width. The second matrices are sharded row-wise, so a layer needs
one reduction after attention and one after the MLP. With sequence parallelism (Korthikanti et al., arXiv 2205.05198)
the residual stream and the norms are sharded along the sequence. The reduction becomes a reduce-scatter and the next
layer's input an all-gather: the same traffic for 1/tp of the memory. Embedding and output layer are sharded along the
vocabulary; with `loss_parallel` the loss is computed on sharded logits.

Every parameter becomes a DTensor, also the replicated ones, so gradient norms and checkpoints treat all alike.
pipeline/model/spec.py says how each parameter is sharded, pipeline/model/decoder.py applies it.
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
    """All ranks have the same parameters, inputs and outputs; inputs and outputs are local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_dtensor(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def to_local(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, to_dtensor, to_local)


class VocabParallelEmbedding(ParallelStyle):
    """An embedding that is sharded along the vocabulary.

    A rank returns zeros for ids whose rows other ranks have, and the values of all ranks are summed. torch's
    RowwiseParallel does the same, but computes the gradient of all rows on each rank before it shards it.
    """

    def __init__(self, output_layouts: Placement) -> None:
        self.output_layouts = [output_layouts]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(_: str, embedding: nn.Module, mesh: DeviceMesh) -> None:
            if (rows := len(embedding.get_parameter("weight"))) % mesh.size():
                raise UserError(
                    "parallel.indivisible_size",
                    f"an embedding of {rows} rows cannot be sharded over {mesh.size()} tensor parallel ranks",
                )
            embedding.weight = nn.Parameter(distribute_tensor(embedding.get_parameter("weight"), mesh, [Shard(0)]))

        def embed(ids_BT: Tensor) -> Tensor:
            rows_VD = cast(DTensor, module.weight).to_local()
            ids_BT = ids_BT - device_mesh.get_local_rank() * len(rows_VD)
            is_elsewhere_BT = (ids_BT < 0) | (ids_BT >= len(rows_VD))
            x_BTD = F.embedding(ids_BT.masked_fill(is_elsewhere_BT, 0), rows_VD)
            x_BTD = x_BTD.masked_fill(is_elsewhere_BT.unsqueeze(-1), 0)
            partial = DTensor.from_local(x_BTD, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=self.output_layouts).to_local()

        module.forward = embed
        return distribute_module(module, device_mesh, shard)
