"""`plan CONFIG --best`: the layouts of a config's model on a machine, the fastest that fit first.

All that pipeline/parallel/mesh.py allows of tensor, pipeline, schedule, stages per rank, data and ZeRO, micro-batch and
recomputation are predicted (milliseconds for each: nothing is left out by a heuristic); then, from the fastest on,
memory is counted until enough are found that fit. So what is faster and does not fit is known by name, too.
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

_MOST_NODES = 1_000_000
MAX_SHOWN = 10
"""Layouts that fit and are shown; of those that do not, half as many."""
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))
"""With their stages per rank. `gpipe` is never better than 1f1b, and torch's others hardly than these."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
OWN_LAYOUT_MARK = "<- the config's own"
"""What marks the row of the config's own layout."""
ANY_LAYOUT = ("parallel={tensor: 1, pipeline: 1, data: auto, zero: 0, schedule: 1f1b, virtual_stages: 1}",
              "parallel.activation_checkpointing=none", "train.micro_batch=1")  # fmt: skip
"""All that is sought, as the command line says it: for a config whose own layout does not fit."""
FRAGMENTATION_FACTOR = 1.08
"""What an allocator holds, to what its tensors are; published peaks agree best with it (benchmarks/footprint.py)."""


@dataclass(frozen=True)
class LayoutChoice:
    """One layout, predicted."""

    config: Config
    layout: Layout
    work: Workload
    found: StepPrediction

    @cached_property
    def bytes_needed(self) -> float:
        """Of the fullest rank, with what the allocator holds beyond the tensors, and the libraries."""
        found = estimate_memory_of_ranks(self.config, self.layout, self.work.vocab)
        return FRAGMENTATION_FACTOR * max(part.on_gpu(self.config) for part in found) + reserved_gpu_bytes(self.layout)

    def why(self) -> str:
        """What its step loses to other things than computing."""
        found = self.found
        names = ("tensor", "pipeline", "data", "bubble", "optimizer")
        lost = sorted(((getattr(found, name) / found.step, name) for name in names), reverse=True)
        return ", ".join(f"{name} {100 * share:.0f} %" for share, name in lost if share >= 0.005) or "computing only"

    def values(self) -> dict[str, Any]:
        """The keys of a config that make it."""
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
    """Every layout on `nodes` nodes, predicted, in no order."""
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
    """Return the config's own layout, predicted. Raises LayoutError if it cannot work."""
    layout = resolve_layout(config, vocab_size=vocab)
    work = workload_from_config(config, layout, vocab)
    return LayoutChoice(config, layout, work, predict_step(work, machine.in_nodes_of(layout.ranks_per_node)))


def _divisors(number: int, most: int) -> list[int]:
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def fastest_that_fit(
    found: Sequence[LayoutChoice], limit: float, most: int = MAX_SHOWN
) -> tuple[list[LayoutChoice], list[LayoutChoice]]:
    """The fastest `most` that fit into `limit` bytes, and those faster than the last of them that do not."""
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
    """What `--best` prints, and its first. Raises UserError where nothing fits.

    The config's `own` layout is marked; if it is not among the best, it has a row of its own.
    """
    limit = (config.site.gpu_memory_gib or machine.memory_gib) * 2**30
    lines, firsts = [], []
    is_shown = False

    def line(choice: LayoutChoice) -> str:
        nonlocal is_shown
        is_own = own is not None and (choice.layout, choice.work) == (own.layout, own.work)
        is_shown |= is_own
        over = choice.bytes_needed - limit
        text = _line(choice) + (f": {over / GB:.1f} GB too much" if over > 0 else "")
        return text + f"  {OWN_LAYOUT_MARK}" * is_own

    for count in nodes:
        found = list(enumerate_layouts(config, machine, vocab, count))
        fit, over = fastest_that_fit(found, limit, MAX_SHOWN if len(nodes) == 1 else 1)
        if fit:
            firsts.append(fit[0])
        lines += [line(choice) for choice in fit] or [f"{count} nodes: none of {len(found)} layouts fits"]
        if len(nodes) == 1:
            near = sorted(over, key=lambda choice: choice.bytes_needed)[: MAX_SHOWN // 2]
            lines += ["", f"faster, or as fast, but they do not fit into {limit / GB:.1f} GB"] if near else []
            lines += [line(choice) for choice in near]
    if not firsts:
        raise UserError(
            f"no layout on {', '.join(map(str, nodes))} nodes fits into {limit / GB:.1f} GB: more nodes (--nodes), "
            "another train.global_batch, or set train.loss_chunk or optimizer.state"
        )
    if own is not None and not is_shown:
        lines += ["", line(own)]
    head = f"{'nodes':>5} {'step s':>8} {'tokens/s':>9} {'MFU':>5} {'GB':>6}   layout (what its step loses)"
    return [head, *lines], max(firsts, key=lambda choice: choice.found.tokens_per_gpu * choice.layout.world_size)


def _line(choice: LayoutChoice) -> str:
    found, nodes = choice.found, choice.layout.world_size // choice.layout.ranks_per_node
    size = f"{choice.bytes_needed / GB:>6.1f}   {choice.work.describe_layout()} ({choice.why()})"
    return f"{nodes:>5} {found.step:>8.3f} {found.tokens_per_gpu:>9,.0f} {100 * found.mfu:>4.0f}% {size}"


def parse_node_counts(text: str) -> list[int]:
    """Numbers of nodes from `16,2048` or `2..64` (2, 4, 8 … 64). Raises UserError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2] or ends[1]) <= _MOST_NODES:
            raise UserError(
                make_printable(f"--nodes {text}: write numbers from 1 to {_MOST_NODES:,} such as 16,2048, or 2..64")
            )
        size, last = int(ends[1]), int(ends[2] or ends[1])
        while size < last:
            found.append(size)
            size *= 2
        found.append(last)
    return found


def write_choice(choice: LayoutChoice, path: Path, overrides: Sequence[str]) -> Path:
    """A config beside `path` that extends it by a choice; `path` stays as it is. Raises UserError where one exists."""
    said = apply_overrides({}, overrides)
    if not any(override.startswith("run.root=") for override in overrides):
        said.get("run", {}).pop("root", None)  # that of `path` holds
    values = merge_values(merge_values({"extends": path.name}, said), choice.values())
    target = path.with_name(f"{path.stem}-best.yaml")
    try:
        with target.open("x") as file:
            file.write(f"# Chosen by `plan {path.name} --best`: {choice.work.describe_layout()}\n")
            file.write(dump_yaml(json.loads(json.dumps(values))))
    except FileExistsError:
        raise UserError(make_printable(f"{target} exists: move it away, and ask again")) from None
    return target
