"""`parallel.hook` and `parallel.local_sgd`: how whole replicas of the model send less than their gradients.

pipeline/parallel/replica_sync.py implements them; docs/communication.md describes their cost. Both are for purely
replicated data parallelism: pipeline/parallel/mesh.py rejects other combinations.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.config.types import NonNegativeInt, PositiveFloat, Section


class HookConfig(Section):
    """What happens to gradients on their way between replicas."""

    kind: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"
    """`none` sends them as they are; `fp16` and `bf16` in half the bytes; `powersgd` as products of two thin matrices;
    `topk` only the largest. What the last two leave out is added to the next step's gradient."""
    rank: PositiveInt = 4
    """Columns of PowerSGD's thin matrices."""
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    """Fraction of each parameter's gradient that Top-K sends."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the training in which more is sent: Top-K's fraction falls from 1 to `ratio`, each step in equal
    proportion; PowerSGD sends whole gradients."""


class LocalSgdConfig(Section):
    """Replicas that step alone and average their weights now and then."""

    every: PositiveInt
    """Steps from one average to the next."""
    warmup_steps: NonNegativeInt = 0
    """First steps of the training in which replicas average every gradient, as without local SGD."""
    outer_lr: PositiveFloat = 1.0
    """How far the weights go from the last average towards the new one: 1 with no momentum is the average itself."""
    outer_momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Nesterov momentum of that outer step (DiLoCo, arXiv 2311.08105, takes outer_lr 0.7 and outer_momentum 0.9)."""


class DataParallel(Section):
    """Data parallel sizes given by hand."""

    replicate: PositiveInt = 1
    """Replicas of the model."""
    shard: PositiveInt = 1
    """Ranks that share one replica's parameters (ZeRO)."""


class ParallelConfig(Section):
    """How the ranks split the work. Sizes multiply to the number of ranks."""

    tensor: PositiveInt = 1
    """Tensor parallel size."""
    pipeline: PositiveInt = 1
    """Pipeline parallel size (stages)."""
    data: Literal["auto"] | DataParallel = "auto"
    """Data parallel size: `auto` takes all ranks that are left."""
    zero: Literal[0, 1, 2, 3] = 0
    """What data parallel ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipe_v"] = "1f1b"
    """Pipeline schedule; without a pipeline it means nothing."""
    virtual_stages: PositiveInt = 1
    """Pipeline stages per rank; without a pipeline it means nothing."""
    sequence: bool = True
    """Whether tensor parallel ranks split the sequence where they do not split the weights (norms, residual stream)."""
    loss_parallel: bool = True
    """Whether tensor parallel ranks compute the loss on their own part of the vocabulary, never gathering logits."""
    reduce: Literal["auto", "step", "micro_batch"] = "auto"
    """When data parallel ranks reduce gradients: once per `step`, or after each `micro_batch` (more traffic, but only a
    shard of the gradients in memory); `auto`: per micro-batch for zero 2 and 3 without a pipeline, else per step."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; they visit the GPU when they are needed."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: nothing, all but matrix products and attention, or all."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication library. `auto`: NCCL on GPUs, otherwise Gloo. `mpi` needs mpi4py and an MPI library
    (docs/communication.md)."""
    accurate_sums: bool = False
    """Over MPI: add fp16 and bf16 up in fp32 and round once, for twice the bytes, instead of rounding at every hop."""
    bucket_mb: PositiveInt = 25
    """Size of the buckets in which DDP reduces gradients, in MiB."""
    hook: HookConfig = HookConfig()
    """What happens to gradients on their way between whole replicas (docs/communication.md)."""
    local_sgd: LocalSgdConfig | None = None
    """Replicas that step alone and average their weights now and then; null: gradients are averaged each step."""
