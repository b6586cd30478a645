"""Gather the samples of a micro-batch over all data-parallel ranks, for losses that compare samples (`train.gather`).

In contrastive training, each sample is compared with all other samples of its batch. With more ranks than one, each
rank has only a part of these samples, so the outputs of all ranks are gathered before the loss is computed. Gradients
flow back to the rank that computed an output.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import new_group
from torch.utils._pytree import tree_map

from pipeline.base.errors import UserError
from pipeline.parallel.mesh import Layout


def create_data_parallel_group(layout: Layout) -> dist.ProcessGroup:
    """Return the group of the ranks that have other samples and the same part of the model. All ranks must call this.

    The ranks are ordered by their data-parallel position.
    """
    groups = [
        (ranks, new_group(ranks, group_desc="mesh_dp")) for ranks in layout.list_groups("dp_replicate", "dp_shard")
    ]
    own_group: dist.ProcessGroup = next(group for ranks, group in groups if dist.get_rank() in ranks)
    return own_group


class SampleGather:
    """Gathers the samples of a micro-batch from the ranks of a group. All ranks must have equally many samples.

    Args:
        group: the data-parallel ranks, in the order in which their samples are concatenated.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather_outputs(self, outputs: Any, count: int) -> Any:
        """Return the outputs of all ranks, concatenated along the first dimension.

        The gradient of an output is the sum over the losses of all ranks. If all ranks compute the same loss, it is
        therefore the gradient of this loss times the number of ranks.

        Args:
            outputs: the outputs of this rank's samples: tensors in any nested lists, tuples and dicts. A sample may
                have several consecutive rows. Tensors without dimensions belong to no sample and are not gathered.
            count: the number of this rank's samples.

        Raises:
            UserError: if the number of rows of a tensor is not a multiple of `count`.
        """

        def gather(output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.ndim:
                return output
            if len(output) % count:
                raise UserError(
                    "model.outputs_without_samples",
                    f"train.gather: the model returned a tensor of shape {tuple(output.shape)} for {count} samples. "
                    "Its first dimension must be the samples. Return a number that belongs to no sample, such as a "
                    "temperature, as a tensor without dimensions",
                )
            return self._gather(output)

        return tree_map(gather, outputs)

    def gather_arrays(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the arrays of all ranks, concatenated along the first dimension. They have no gradients."""
        with torch.no_grad():
            return {name: self._gather(array) for name, array in batch.items()}

    def _gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along the first dimension."""
        # In the backward pass, torch reduce-scatters the gradient.
        gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(
            x.contiguous(), self._group.size(), self._group.group_name
        )
        waited: Tensor = collectives.wait_tensor(gathered)
        return waited
