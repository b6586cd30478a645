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

import contextlib
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from pipeline.model import Decoder


class Replicated(ParallelStyle):
    """Parameters are the same on all ranks, and so are inputs and outputs, as local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def cut(part: Decoder, mesh: DeviceMesh, *, sequence: bool, keep_logits_cut: bool) -> None:
    """Cut `part` over the one-dimensional `mesh`, in place.

    Sizes must divide (`pipeline/layout.py` checks). Hidden states between layers are local tensors: of shape
    (B, T / tensor, D) with `sequence`, else (B, T, D). Logits are a DTensor cut along the vocabulary with
    `keep_logits_cut`, else whole local tensors.
    """
    stream = Shard(1) if sequence else Replicate()
    norm: ParallelStyle = SequenceParallel(use_local_output=True) if sequence else Replicated()
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "model.norm": norm,
        "lm_head": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if keep_logits_cut else Replicate(),
            use_local_output=not keep_logits_cut,
        ),
        "model.layers.*.input_layernorm": norm,
        "model.layers.*.self_attn": PrepareModuleInput(
            input_layouts=(stream, None), desired_input_layouts=(Replicate(), None)
        ),
        "model.layers.*.post_attention_layernorm": norm,
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=stream)
    absent = {"model.embed_tokens": part.model.embed_tokens, "model.norm": part.model.norm, "lm_head": part.lm_head}
    parallelize_module(part, mesh, {name: style for name, style in plan.items() if absent.get(name, part) is not None})
    part.tie_weights()


def loss_context(keep_logits_cut: bool) -> contextlib.AbstractContextManager[None]:
    """Around forward, loss and backward alike: cross-entropy on logits that are cut along the vocabulary."""
    return loss_parallel() if keep_logits_cut else contextlib.nullcontext()
