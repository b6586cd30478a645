"""Pipeline parallelism: consecutive blocks on different ranks, micro-batches passing through like on a belt.

Stages and schedules are those of torch.distributed.pipelining:

    gpipe                    all forwards, then all backwards (Huang et al., arXiv 1811.06965)
    1f1b                     forward and backward in turn, so that fewer activations wait (arXiv 1806.03377)
    interleaved_1f1b         several stages per rank, smaller bubbles (Narayanan et al., arXiv 2104.04473)
    interleaved_zero_bubble  also with gradients of weights apart, which fill bubbles (Qi et al., arXiv 2401.10241)
    zbv                      the same with two stages per rank, down the ranks and up again (same paper, ZB-V)
    dualpipe_v               DeepSeek's DualPipe cut in half: forward and backward overlap (arXiv 2412.19437)

With the V shapes the last stage, and the loss, is on pipeline rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from pipeline.parallel.mesh import Layout

TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
"""The schedules' names in torch."""


class _Stage(PipelineStage):
    own: AbstractContextManager[None]
    """Entered around each forward."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.own:
            return super().forward_maybe_with_nosync(*args, **kwargs)

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Torch 2.11 finds shapes out by a real forward before the first step; its dropout must not use up the seed."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """In V shapes neighbours may be one rank; torch 2.11 greets them all the same, and Gloo knows no such pair."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class PipelineRunner:
    """This rank's stages and the schedule that runs them."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        numbers: Sequence[int],
        layout: Layout,
        device: torch.device,
        group: dist.ProcessGroup,
        loss: Callable[[Tensor, Tensor], Tensor],
        own: AbstractContextManager[None],
    ) -> None:
        """`parts` are the stages `numbers` of this rank; `loss(outputs, rows)` of one micro-batch is a scalar.

        `own` is entered around each stage's forward.
        """
        self.has_first_stage, self.has_last_stage = 0 in numbers, layout.stages - 1 in numbers
        for part, number in zip(parts, numbers, strict=True):
            if number < layout.stages - 1:  # what is sent must be contiguous, and torch asks the stage for its strides
                part.register_forward_hook(lambda _, __, hidden: hidden.contiguous())
        pairs = zip(parts, numbers, strict=True)
        stages = [_Stage(part, number, layout.stages, device, group=group) for part, number in pairs]
        for stage in stages:
            stage.own = own
        kind: Any = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
        what = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self._schedule = kind(what, layout.micro_batches, loss_fn=loss, scale_grads=False)

    def run_step(
        self,
        inputs: tuple[Tensor, ...],
        targets: Mapping[str, Tensor],
        rows_B: Tensor,
        borders: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches; their losses on the rank with the last stage, elsewhere [].

        `rows_B`: which samples of the batch `inputs` stand for; the loss of a micro-batch is told its own. `targets`:
        what the last stage takes besides. `borders`: what every stage does, from its own rank's batch.
        """
        losses: list[Tensor] = []
        self._schedule.step(
            *(
                part.contiguous() for part in inputs if self.has_first_stage
            ),  # torch 2.11 refuses strides that it did not expect
            target=rows_B if self.has_last_stage else None,
            losses=losses if self.has_last_stage else None,
            return_outputs=False,
            **borders,
            **(targets if self.has_last_stage else {}),
        )
        return losses


def add_gradient_of_peer(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Add the tensor that rank `peer` of `group` holds, while it adds this one: both end with the same bits."""
    theirs = torch.empty_like(tensor)
    sending = dist.P2POp(dist.isend, tensor.clone(), group=group, group_peer=peer)
    receiving = dist.P2POp(dist.irecv, theirs, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([sending, receiving]):
        work.wait()
    tensor.add_(theirs)
