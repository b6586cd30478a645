"""Pipeline parallelism: consecutive blocks on different ranks, through which micro-batches pass.

Stages and schedules are those of torch.distributed.pipelining:

    gpipe                    all forwards, then all backwards (Huang et al., arXiv 1811.06965)
    1f1b                     alternating forward and backward, so fewer activations are stored (arXiv 1806.03377)
    interleaved_1f1b         several stages per rank, smaller bubbles (Narayanan et al., arXiv 2104.04473)
    interleaved_zero_bubble  also separate gradients of weights, which fill bubbles (Qi et al., arXiv 2401.10241)
    zbv                      the same with two stages per rank, down the ranks and up again (same paper, ZB-V)
    dualpipe_v               DeepSeek's DualPipe folded in half: forward and backward overlap (arXiv 2412.19437)

In the V shapes (zbv, dualpipe_v) the last stage, and the loss, is on pipeline rank 0.
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
"""Names of the schedules in torch."""


class _Stage(PipelineStage):
    forward_context: AbstractContextManager[None]
    """Entered around each forward."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self.forward_context:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Infer shapes without changing the random state: torch 2.11 does it by a real forward, dropout included."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out messages to this rank itself.

        In V shapes neighbouring stages may be on one rank. torch 2.11 connects them anyway, which Gloo cannot do.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class PipelineRunner:
    """This rank's stages and the schedule that runs them.

    Args:
        parts: modules of this rank's stages.
        numbers: numbers of these stages.
        layout: the layout of the training.
        device: this rank's device.
        group: the pipeline's process group.
        loss: `loss(outputs, rows)` returns the loss of one micro-batch, a scalar.
        forward_context: entered around each stage's forward.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        numbers: Sequence[int],
        layout: Layout,
        device: torch.device,
        group: dist.ProcessGroup,
        loss: Callable[[Tensor, Tensor], Tensor],
        forward_context: AbstractContextManager[None],
    ) -> None:
        self.has_first_stage = 0 in numbers
        self.has_last_stage = layout.stages - 1 in numbers
        for part, number in zip(parts, numbers, strict=True):
            if number < layout.stages - 1:  # messages must be contiguous, and torch asks the stage for its strides
                part.register_forward_hook(lambda _, __, hidden: hidden.contiguous())
        pairs = zip(parts, numbers, strict=True)
        stages = [_Stage(part, number, layout.stages, device, group=group) for part, number in pairs]
        for stage in stages:
            stage.forward_context = forward_context
        schedule_class: Any = get_schedule_class(TORCH_SCHEDULES[layout.schedule])
        scheduled = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
        self._schedule = schedule_class(scheduled, layout.micro_batches, loss_fn=loss, scale_grads=False)

    def run_step(
        self,
        inputs: tuple[Tensor, ...],
        loss_inputs: Mapping[str, Tensor],
        rows_B: Tensor,
        document_boundaries: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Run forward and backward of all micro-batches.

        Args:
            inputs: positional arguments of the first stage.
            loss_inputs: keyword arguments of the last stage.
            rows_B: numbers of the batch's samples; the loss of a micro-batch gets its own.
            document_boundaries: keyword arguments of every stage, from this rank's batch.

        Returns:
            The losses of the micro-batches on the rank with the last stage; [] on other ranks.
        """
        losses: list[Tensor] = []
        # torch 2.11 rejects strides that it did not expect
        first_stage_inputs = [tensor.contiguous() for tensor in inputs] if self.has_first_stage else []
        self._schedule.step(
            *first_stage_inputs,
            target=rows_B if self.has_last_stage else None,
            losses=losses if self.has_last_stage else None,
            return_outputs=False,
            **document_boundaries,
            **(loss_inputs if self.has_last_stage else {}),
        )
        return losses


def add_gradient_of_peer(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Exchange `tensor` with rank `peer` of `group` and add the peer's, in place: both get the same bits."""
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor.clone(), group=group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    tensor.add_(received)
