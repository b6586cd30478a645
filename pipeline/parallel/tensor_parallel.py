"""Tensor parallelism: the matrices of each layer are sharded over neighbouring ranks, as DTensors.

As in Megatron-LM (Shoeybi et al., arXiv 1909.08053), the first matrices of attention and MLP are sharded column-wise:
each rank has some of the heads and some of the hidden width. The second matrices are sharded row-wise, so a layer needs
one all-reduce after attention and one after the MLP. With sequence parallelism (Korthikanti et al., arXiv 2205.05198)
the residual stream is sharded along the sequence. A reduce-scatter and an all-gather replace each all-reduce. The
traffic stays the same, and the residual stream needs 1/tp of the memory. The embedding and the output layer are sharded
along the vocabulary.

Every parameter becomes a DTensor, even a replicated one, so gradient norms and checkpoints treat all parameters alike.
pipeline/model/spec.py describes how each parameter is sharded, and pipeline/model/decoder.py shards the parameters.
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
    """Replicate a module: all ranks have the same parameters, inputs and outputs.

    The parameters become DTensors. Inputs and outputs are local tensors.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def to_dtensor(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def to_local(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, to_dtensor, to_local)


class VocabParallelEmbedding(ParallelStyle):
    """Shard an embedding along the vocabulary.

    Each rank looks up the ids in its share of the vocabulary and uses zeros for other ids. The results of all ranks are
    summed. torch's RowwiseParallel does the same, but in backward, each rank first computes the gradient of the whole
    vocabulary.
    """

    def __init__(self, output_layouts: Placement) -> None:
        self.output_layouts = [output_layouts]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(_: str, embedding: nn.Module, mesh: DeviceMesh) -> None:
            if (rows := len(embedding.get_parameter("weight"))) % mesh.size():
                raise UserError(
                    "parallel.indivisible_size",
                    f"an embedding with {rows} rows cannot be sharded over {mesh.size()} tensor-parallel ranks: the "
                    "number of rows must be a multiple of parallel.tensor",
                )
            embedding.weight = nn.Parameter(distribute_tensor(embedding.get_parameter("weight"), mesh, [Shard(0)]))

        def embed(ids_BT: Tensor) -> Tensor:
            rows_VD = cast(DTensor, module.weight).to_local()
            ids_BT = ids_BT - device_mesh.get_local_rank() * len(rows_VD)
            is_remote_BT = (ids_BT < 0) | (ids_BT >= len(rows_VD))  # The row of this id is on another rank.
            x_BTD = F.embedding(ids_BT.masked_fill(is_remote_BT, 0), rows_VD)
            x_BTD = x_BTD.masked_fill(is_remote_BT.unsqueeze(-1), 0)
            partial = DTensor.from_local(x_BTD, device_mesh, [Partial()], run_check=False)
            return partial.redistribute(placements=self.output_layouts).to_local()

        module.forward = embed
        return distribute_module(module, device_mesh, shard)
