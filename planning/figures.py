"""What the pictures of a plan show, as plain values: memory, the schedule with its durations, operators, the step.

`plan --html` asks for them in a child, for schedules may need torch; planning/plan_page.py draws.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.parallel.mesh import resolve_layout
from planning.machine import Machine
from planning.measure import shapes
from planning.memory import GB, memories, reserve
from planning.predict import predict, rank_of, replayed
from planning.workload import Workload, workload_of

_PRODUCTS = ("query, key, value", "attention's output", "MLP in", "MLP out", "output layer")


def figures(config: Config, machine: Machine | None) -> dict[str, Any]:
    """By picture; those of speed where there is a machine. Raises UserError for a model of one's own."""
    if config.model.target is not None:
        raise UserError("--html is for the decoder, whose sizes it knows; not for model.target")
    layout, vocab = resolve_layout(config), config.model.vocab_size or config.data.tokenizer.vocab_size
    work = workload_of(config, layout, vocab)
    kinds = ["gathered", "activations"]
    if not config.parallel.offload:  # else these are in host memory
        kinds = ["weights", "gathered", "gradients", "optimizer", "activations"]
    size = config.site.gpu_memory_gib
    own = {} if size is None else {"CUDA and NCCL": reserve(layout) / GB}
    parts = [{kind: getattr(held, kind) / GB for kind in kinds} | own for held in memories(config, layout, vocab)]
    found: dict[str, Any] = {
        "config": config.model_dump(mode="json", exclude_defaults=True),
        "words": {
            "layout": layout.describe_sizes(),
            "fullest rank": f"{max(sum(part.values()) for part in parts):.1f} GB",
        },
        "memory": parts,
        "limit": None if size is None else size * 2**30 / GB,
    }
    forward, backward = (1.0,) * len(work.stages), (2.0,) * len(work.stages)
    if machine is not None:
        machine = machine.in_nodes_of(layout.ranks_per_node)
        step = predict(work, machine)
        forward, backward = step.forward, step.backward
        speed = f"{step.step:.3g} s, {step.tokens_per_gpu:,.0f} tokens/s of a GPU, MFU {100 * step.mfu:.1f} %"
        found["words"] |= {"machine": machine.gpu, "a step": speed}
        found |= {"step": asdict(step), "operators": _operators(work, machine)}
        found |= {"roof": [machine.rate(work.precision), machine.bandwidth]}
    return found | {"timeline": _timeline(work, forward, backward)}


def _timeline(work: Workload, forward: tuple[float, ...], backward: tuple[float, ...]) -> list[list[list[Any]]]:
    """By pipeline rank: kind, stage, micro-batch, start and end of each action of the first rounds."""
    done, duration, _ = replayed(
        work.schedule, work.pipeline, work.virtual_stages, work.micro_batches, forward, backward
    )
    return [[[*action, start, start + duration(action)] for action, start in made] for made in done]


def _operators(work: Workload, machine: Machine) -> dict[str, tuple[float, float]]:
    """FLOPs per byte of memory traffic, and predicted FLOP/s, of operators of a forward."""
    rank, width = rank_of(work, machine), 4 if work.precision == "fp32" else 2
    found = {}
    for name, (m, n, k) in zip(_PRODUCTS, shapes(work)[::3], strict=True):
        size = width * (m * k + k * n + m * n)
        found[name] = 2 * m * n * k / size, 2 * m * n * k / rank.product(m, n, k, work.precision)
    done = 2 * rank.tokens * work.sequence * work.heads * work.head / work.tensor
    moved = width * 2 * rank.tokens * (work.heads + work.kv_heads) * work.head / work.tensor
    found["attention"] = done / moved, done / rank.attention()
    return found
