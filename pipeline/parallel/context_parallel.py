"""Context parallelism: the ranks along the axis `cp` split each sequence, and exchange keys and values.

With N ranks, a sequence is cut into 2 N chunks, and rank r has the chunks r and 2 N - 1 - r. With causal attention, a
late chunk reads more keys than an early one, and each such pair reads equally many. In each block, the keys and values
of all ranks are gathered before attention, and their gradients are reduce-scattered (Grattafiori et al., "The Llama 3
Herd of Models", arXiv 2407.21783, section 3.3.2). With grouped heads, keys and values are much smaller than queries.
Any ranges of keys work as on one rank (pipeline/model/attention.py).

Names of tensors end with their shape: B sequences, T tokens, P = T / N tokens of this rank, G heads of keys and values,
K = head size, M = B · T.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed import new_group

from pipeline.parallel.mesh import Layout


def create_context_group(layout: Layout) -> dist.ProcessGroup:
    """Return the group of the ranks that have the other tokens of this rank's samples. Every rank must call this."""
    groups = [(ranks, new_group(ranks, group_desc="mesh_cp")) for ranks in layout.list_groups("cp")]
    own_group: dist.ProcessGroup = next(group for ranks, group in groups if dist.get_rank() in ranks)
    return own_group


class ContextParallel:
    """The tokens that this rank has of each sequence, and the exchange with the ranks that have the others.

    Args:
        rank: position of this rank along the axis.
        size: number of ranks along the axis.
        group: these ranks.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup) -> None:
        self.size = size
        self._chunks = [rank, 2 * size - 1 - rank]
        self._group = group
        owners = [[owner, 2 * size - 1 - owner] for owner in range(size)]
        gathered_chunks = [chunk for chunks in owners for chunk in chunks]
        self._order = [gathered_chunks.index(chunk) for chunk in range(2 * size)]
        """For each chunk, its position among the gathered chunks."""

    def list_positions(self, length: int) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length` tokens: int64 on the CPU, shape (P,)."""
        chunk_length = length // (2 * self.size)
        starts = torch.tensor(self._chunks) * chunk_length
        return (starts.unsqueeze(1) + torch.arange(chunk_length)).flatten()

    def select(self, x_BT: Tensor) -> Tensor:
        """Return this rank's tokens of whole sequences, shape (B, P)."""
        chunks = x_BT.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[chunk] for chunk in self._chunks], dim=1)

    def gather(self, k_BPGK: Tensor, v_BPGK: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of whole sequences, each of shape (M, G, K).

        The gradient of each is the sum over all ranks.
        """
        kv_2BPGK = torch.stack((k_BPGK.to(v_BPGK.dtype), v_BPGK))
        # Torch reduce-scatters the gradient. Inside a torch.autograd.Function, torch.compile would not recompute this
        # operator: it would save the keys and values of all blocks, even if activations are recomputed.
        gathered: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(
            kv_2BPGK, self._group.size(), self._group.group_name
        )
        gathered = collectives.wait_tensor(gathered)
        # The ranks, then keys or values, samples, chunks of a rank, and tokens of a chunk.
        gathered = gathered.unflatten(0, (self.size, 2)).unflatten(3, (2, -1))
        chunks = gathered.permute(1, 2, 0, 3, 4, 5, 6).flatten(2, 3)
        kv_2BTGK = chunks[:, :, self._order].flatten(2, 3)
        k_MGK, v_MGK = kv_2BTGK.flatten(1, 2).unbind()
        return k_MGK, v_MGK
