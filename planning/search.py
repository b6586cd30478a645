"""Search for the fastest layouts of a config's model that fit a machine: `plan CONFIG --best`.

Every valid combination of tensor, pipeline and data parallelism, ZeRO, schedule, stages per rank, micro-batch and
activation checkpointing is predicted; a prediction takes milliseconds, so no heuristic is needed. Starting with the
fastest, memory is estimated until enough layouts are found that fit. Faster layouts that do not fit are listed too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError, make_printable
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.parallel import DataParallel
from pipeline.config.read import apply_overrides, merge_values
from pipeline.config.sections import Config
from pipeline.parallel.mesh import Layout, LayoutError, resolve_layout
from planning.machine import Machine
from planning.memory import GB, estimate_memory_of_ranks, reserved_gpu_bytes
from planning.predict import StepPrediction, predict_step
from planning.workload import Workload, workload_from_config

_MAX_NODES = 1_000_000
MAX_SHOWN = 10
"""Number of layouts that fit to show; of those that do not fit, half as many."""
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))
"""Schedules with their stages per rank. `gpipe` is never better than 1f1b; torch's others are rarely better."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
OWN_LAYOUT_MARK = "<- the config's own"
"""Marks the row of the config's own layout."""
ANY_LAYOUT = ("parallel={tensor: 1, pipeline: 1, data: auto, zero: 0, schedule: 1f1b, virtual_stages: 1}",
              "parallel.activation_checkpointing=none", "train.micro_batch=1")  # fmt: skip
"""Overrides that reset all searched keys, for a config whose own layout is invalid."""
FRAGMENTATION_FACTOR = 1.08
"""Memory reserved by the allocator relative to that of tensors; fits published peaks best (benchmarks/footprint.py)."""


@dataclass(frozen=True)
class LayoutChoice:
    """A layout with its prediction."""

    config: Config
    layout: Layout
    work: Workload
    found: StepPrediction

    @cached_property
    def bytes_needed(self) -> float:
        """Bytes of the fullest rank, including fragmentation and libraries."""
        found = estimate_memory_of_ranks(self.config, self.layout, self.work.vocab)
        return FRAGMENTATION_FACTOR * max(part.on_gpu(self.config) for part in found) + reserved_gpu_bytes(self.layout)

    def describe_losses(self) -> str:
        """Return the shares of a step that are not computation."""
        found = self.found
        names = ("tensor", "pipeline", "data", "bubble", "optimizer")
        lost = sorted(((getattr(found, name) / found.step, name) for name in names), reverse=True)
        return ", ".join(f"{name} {100 * share:.0f} %" for share, name in lost if share >= 0.005) or "computing only"

    def config_values(self) -> dict[str, Any]:
        """Return the config keys that select this layout."""
        parallel, layout = self.config.parallel, self.layout
        data: Any = "auto"
        if layout.dp_replicate > 1 and layout.dp_shard > 1:
            data = {"replicate": layout.dp_replicate, "shard": layout.dp_shard}
        keys = ("tensor", "pipeline", "zero", "schedule", "virtual_stages", "activation_checkpointing")
        return {
            "parallel": {"data": data, **{key: getattr(parallel, key) for key in keys}},
            "train": {"micro_batch": self.config.train.micro_batch},
            "stages": {"train": {"nodes": layout.world_size // layout.ranks_per_node}},
        }


def enumerate_layouts(config: Config, machine: Machine, vocab: int, nodes: int) -> Iterator[LayoutChoice]:
    """Yield every valid layout on `nodes` nodes with its prediction, in no particular order."""
    per_node, batch = config.stages.train.tasks_per_node, config.train.global_batch
    world, machine = nodes * per_node, machine.in_nodes_of(per_node)
    tensors, pipelines = _divisors(world, per_node), _divisors(world, config.model.layers)
    for tensor, pipeline in product(tensors, pipelines):
        data, left = divmod(world, tensor * pipeline)
        shards = {data, per_node // tensor} if per_node % tensor == 0 and data * tensor % per_node == 0 else {data}
        schedules = SCHEDULES if pipeline > 1 else (("1f1b", 1),)
        levels = (1, 2, 3) if pipeline == 1 else (1,)  # a pipeline keeps weights and gradients whole during a step
        zeros = [(0, 1), *product(levels, (shard for shard in shards if shard > 1))]
        every = product(MICRO_BATCHES, zeros, schedules, ("none", "selective", "full"))
        for micro, (zero, shard), (schedule, virtual), kind in every:
            if left or batch % (data * micro) or pipeline * virtual > config.model.layers:
                continue
            made: Any = DataParallel(replicate=data // shard, shard=shard) if 1 < shard < data else "auto"
            parallel = config.parallel.model_copy(
                update={
                    "tensor": tensor, "pipeline": pipeline, "data": made, "zero": zero, "schedule": schedule,
                    "virtual_stages": virtual, "activation_checkpointing": kind,
                }
            )  # fmt: skip
            train = config.train.model_copy(update={"micro_batch": micro})
            other = config.model_copy(update={"parallel": parallel, "train": train})
            with suppress(LayoutError):
                layout = resolve_layout(other, world, per_node, vocab, suggest=False)
                work = workload_from_config(other, layout, vocab)
                yield LayoutChoice(other, layout, work, predict_step(work, machine))


def predict_own_layout(config: Config, machine: Machine, vocab: int) -> LayoutChoice:
    """Return the config's own layout with its prediction. Raises LayoutError if it is invalid."""
    layout = resolve_layout(config, vocab_size=vocab)
    work = workload_from_config(config, layout, vocab)
    return LayoutChoice(config, layout, work, predict_step(work, machine.in_nodes_of(layout.ranks_per_node)))


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def fastest_that_fit(
    found: Sequence[LayoutChoice], limit: float, most: int = MAX_SHOWN
) -> tuple[list[LayoutChoice], list[LayoutChoice]]:
    """Return the fastest layouts that fit, and the faster ones that do not.

    Args:
        found: Layouts in any order.
        limit: Bytes of a GPU.
        most: Maximum number of layouts that fit.
    """
    fit: list[LayoutChoice] = []
    over: list[LayoutChoice] = []
    for choice in sorted(found, key=lambda made: -made.found.tokens_per_gpu):
        (fit if choice.bytes_needed <= limit else over).append(choice)
        if len(fit) == most:
            break
    return fit, over


def search_layouts(
    config: Config, machine: Machine, vocab: int, nodes: Sequence[int], own: LayoutChoice | None = None
) -> tuple[list[str], LayoutChoice]:
    """Return the lines of `plan --best` and the fastest layout.

    Args:
        config: The config.
        machine: The machine.
        vocab: Size of the vocabulary.
        nodes: Numbers of nodes.
        own: The config's own layout, which is marked, and listed even if it is slower; None if it is invalid.

    Raises:
        UserError: No layout fits.
    """
    limit = (config.site.gpu_memory_gib or machine.memory_gib) * 2**30
    lines, firsts = [], []
    is_shown = False

    def line(choice: LayoutChoice) -> str:
        nonlocal is_shown
        is_own = own is not None and (choice.layout, choice.work) == (own.layout, own.work)
        is_shown |= is_own
        over = choice.bytes_needed - limit
        text = _line(choice) + (f": {over / GB:.1f} GB too large" if over > 0 else "")
        return text + f"  {OWN_LAYOUT_MARK}" * is_own

    for count in nodes:
        found = list(enumerate_layouts(config, machine, vocab, count))
        fit, over = fastest_that_fit(found, limit, MAX_SHOWN if len(nodes) == 1 else 1)
        if fit:
            firsts.append(fit[0])
        lines += [line(choice) for choice in fit] or [f"{count} nodes: none of {len(found)} layouts fits"]
        if len(nodes) == 1:
            near = sorted(over, key=lambda choice: choice.bytes_needed)[: MAX_SHOWN // 2]
            lines += ["", f"faster or equally fast layouts that do not fit into {limit / GB:.1f} GB"] if near else []
            lines += [line(choice) for choice in near]
    if not firsts:
        raise UserError(
            "plan.no_layout_fits",
            f"no layout on {', '.join(map(str, nodes))} nodes fits into {limit / GB:.1f} GB: use more nodes (--nodes), "
            "change train.global_batch, or set train.loss_chunk or optimizer.state",
        )
    if own is not None and not is_shown:
        lines += ["", line(own)]
    columns = f"{'nodes':>5} {'step s':>8} {'tokens/s':>9} {'MFU':>5} {'GB':>6}"
    header = f"{columns}   layout (shares of the step other than computation)"
    return [header, *lines], max(firsts, key=lambda choice: choice.found.tokens_per_gpu * choice.layout.world_size)


def _line(choice: LayoutChoice) -> str:
    found, nodes = choice.found, choice.layout.world_size // choice.layout.ranks_per_node
    size = f"{choice.bytes_needed / GB:>6.1f}   {choice.work.describe_layout()} ({choice.describe_losses()})"
    return f"{nodes:>5} {found.step:>8.3f} {found.tokens_per_gpu:>9,.0f} {100 * found.mfu:>4.0f}% {size}"


def parse_node_counts(text: str) -> list[int]:
    """Parse numbers of nodes: `16,2048`, or `2..64` for 2, 4, 8, …, 64. Raises UserError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2] or ends[1]) <= _MAX_NODES:
            raise UserError(
                "plan.invalid_nodes",
                make_printable(f"--nodes {text}: write numbers from 1 to {_MAX_NODES:,} such as 16,2048, or 2..64"),
            )
        size, last = int(ends[1]), int(ends[2] or ends[1])
        while size < last:
            found.append(size)
            size *= 2
        found.append(last)
    return found


def write_choice(choice: LayoutChoice, path: Path, overrides: Sequence[str]) -> Path:
    """Write `NAME-best.yaml` beside `path`, which extends `path` by a layout. Return its path.

    Raises:
        UserError: The file exists.
    """
    changes = apply_overrides({}, overrides)
    if not any(override.startswith("run.root=") for override in overrides):
        changes.get("run", {}).pop("root", None)  # the one in `path` applies
    values = merge_values(merge_values({"extends": path.name}, changes), choice.config_values())
    target = path.with_name(f"{path.stem}-best.yaml")
    try:
        with target.open("x") as file:
            file.write(f"# Chosen by `plan {path.name} --best`: {choice.work.describe_layout()}\n")
            file.write(dump_yaml(json.loads(json.dumps(values))))
    except FileExistsError:
        raise UserError(
            "plan.file_exists", make_printable(f"{target} exists: move it, and run the command again")
        ) from None
    return target
