"""Pipeline parallelism: consecutive blocks are on different ranks, and micro-batches pass through them.

In this module, a stage is a pipeline-parallel stage. The schedules are those of torch.distributed.pipelining:

    gpipe                    all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)
    1f1b                     forward and backward alternate, so fewer activations are stored (arXiv 1806.03377)
    interleaved_1f1b         several stages per rank, smaller bubbles (Narayanan et al., arXiv 2104.04473)
    interleaved_zero_bubble  computes weight gradients separately, to fill bubbles (Qi et al., arXiv 2401.10241)
    zbv                      also separate weight gradients; two stages per rank in the shape of a V (same paper, ZB-V)
    dualpipe_v               DeepSeek's DualPipe folded in half: forward and backward overlap (arXiv 2412.19437)

In the V-shaped schedules (zbv, dualpipe_v) samples pass through all ranks and back. The last stage, and with it the
loss, is on pipeline rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from pipeline.parallel.host_tensor import HostTensor
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
    """torch's pipeline stage with a context for forward passes, and with workarounds for torch 2.11."""

    forward_context: AbstractContextManager[None]
    """Context that is entered for each forward pass of the stage."""

    host_arguments: Collection[str] = ()
    """Keyword arguments of the model that stay on the CPU. FSDP would move a tensor to the device."""

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of one micro-batch in `forward_context`."""
        kwargs |= {name: HostTensor(kwargs[name]) for name in self.host_arguments}
        with self.forward_context:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _shape_inference(self, *args: Any, **kwargs: Any) -> Any:
        """Infer shapes without changing the random state.

        torch 2.11 infers shapes by a real forward pass, in which dropout would use random numbers.
        """
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            return super()._shape_inference(*args, **kwargs)  # type: ignore[misc]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the initial messages between neighbouring stages, without messages to this rank itself.

        In V-shaped schedules, neighbouring stages may be on the same rank. torch 2.11 nevertheless sends a
        message, but Gloo cannot send a message from a rank to itself.
        """
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class PipelineRunner:
    """This rank's stages and the schedule that runs them.

    Args:
        parts: model parts of this rank's stages.
        stage_numbers: numbers of these stages in the whole pipeline.
        layout: the layout of the run.
        device: this rank's device.
        group: process group of the pipeline axis.
        loss: function `loss(outputs, rows)` that returns the loss of one micro-batch, a scalar. `rows` are the
            positions of the micro-batch's samples in this rank's batch.
        forward_context: context that is entered for each forward pass of a stage.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stage_numbers: Sequence[int],
        layout: Layout,
        device: torch.device,
        group: dist.ProcessGroup,
        loss: Callable[[Tensor, Tensor], Tensor],
        forward_context: AbstractContextManager[None],
    ) -> None:
        self.has_first_stage = 0 in stage_numbers
        self.has_last_stage = layout.stages - 1 in stage_numbers
        for part, stage_number in zip(parts, stage_numbers, strict=True):
            if stage_number < layout.stages - 1:
                # Messages must be contiguous, and torch takes their strides from the stage's output.
                part.register_forward_hook(lambda _, __, hidden: hidden.contiguous())
        schedule_class: Any = get_schedule_class(TORCH_SCHEDULES[layout.schedule])

        def build() -> tuple[list[_Stage], Any]:
            """Return this rank's stages and their schedule, which do not know the shapes of samples yet."""
            pairs = zip(parts, stage_numbers, strict=True)
            stages = [_Stage(part, stage_number, layout.stages, device, group=group) for part, stage_number in pairs]
            for stage in stages:
                stage.forward_context = forward_context
            # Schedules with several stages per rank expect a list, other schedules expect one stage.
            stage_argument = stages if issubclass(schedule_class, PipelineScheduleMulti) else stages[0]
            # The gradients are not scaled, because `loss` already returns a scaled loss (`Engine._loss_factor`).
            schedule = schedule_class(stage_argument, layout.micro_batches, loss_fn=loss, scale_grads=False)
            return stages, schedule

        self._build = build
        self._stages, self._schedule = build()

    def reset_shapes(self) -> None:
        """Accept samples of other shapes from the next step on. All ranks of the pipeline must call this method."""
        self._stages, self._schedule = self._build()

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
            rows_B: positions of the samples in this rank's batch, 0 to B − 1. The loss function receives those of one
                micro-batch.
            document_boundaries: keyword arguments of every stage, which describe where documents begin in this
                rank's batch.

        Returns:
            The losses of the micro-batches on the rank with the last stage; [] on other ranks.
        """
        losses: list[Tensor] = []
        for stage in self._stages:
            stage.host_arguments = document_boundaries.keys()
        # torch 2.11 rejects inputs with unexpected strides.
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
    """Exchange `tensor` with rank `peer` of `group`, and add the tensor of the peer to `tensor` in place.

    Both ranks get the same bits, because a sum of two numbers does not depend on their order.
    """
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor.clone(), group=group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    tensor.add_(received)
