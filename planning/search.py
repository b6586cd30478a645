"""Search for the fastest layouts of a config's model that fit a machine: `plan CONFIG --best`.

The search predicts every valid combination of tensor, context, pipeline and data parallelism, ZeRO, schedule, stages
per rank, micro-batch and activation checkpointing. It needs no heuristic, because a prediction takes milliseconds. It
then estimates memory, beginning with the fastest layout, until enough layouts fit. Faster layouts that do not fit are
also listed.
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
from pipeline.config.read import apply_overrides, merge_values
from pipeline.config.sections import Config, DataParallel
from pipeline.parallel.mesh import Layout, LayoutError, resolve_layout
from planning.machine import Machine
from planning.memory import GB, estimate_memory_of_ranks, reserved_gpu_bytes
from planning.predict import StepPrediction, predict_step
from planning.workload import Workload, workload_from_config

_MAX_NODES = 1_000_000
"""Largest number of nodes that `--nodes` accepts."""
MAX_SHOWN = 10
"""Maximum number of shown layouts that fit. Half as many layouts that do not fit are shown."""
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))
"""Schedules and their stages per rank. `gpipe` is never better than 1f1b, and torch's other schedules rarely are."""
MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Values of `train.micro_batch` that are searched."""
CONFIGURED_LAYOUT_MARK = "<- the config's own"
"""Text at the end of the row of the config's own layout."""
MIN_CONTEXT_TOKENS = 2048
"""Smallest number of tokens of a sequence on a context-parallel rank in the search."""
ANY_LAYOUT = ("parallel={tensor: 1, context: 1, pipeline: 1, data: auto, zero: 0, schedule: 1f1b, virtual_stages: 1}",
              "parallel.activation_checkpointing=none", "train.micro_batch=1")  # fmt: skip
"""Overrides that reset all searched keys, for a config whose own layout is invalid."""
FRAGMENTATION_FACTOR = 1.08
"""Memory that the allocator reserves, relative to the memory of tensors.

This value fits published peaks best (benchmarks/footprint.py).
"""


@dataclass(frozen=True)
class LayoutChoice:
    """A layout with its prediction."""

    config: Config
    layout: Layout
    work: Workload
    prediction: StepPrediction

    @cached_property
    def bytes_needed(self) -> float:
        """Bytes of GPU memory of the fullest rank, including fragmentation, CUDA and NCCL."""
        ranks = estimate_memory_of_ranks(self.config, self.layout, self.work.vocab)
        fullest = max(rank.on_gpu(self.config) for rank in ranks)
        return FRAGMENTATION_FACTOR * fullest + reserved_gpu_bytes(self.layout)

    def describe_overhead(self) -> str:
        """Return the shares of a step that are not computation."""
        step = self.prediction
        names = {name: name for name in ("tensor", "pipeline", "data", "bubble", "optimizer")} | {"others": "context"}
        shares = sorted(((getattr(step, key) / step.step, name) for key, name in names.items()), reverse=True)
        return ", ".join(f"{name} {100 * share:.0f} %" for share, name in shares if share >= 0.005) or "computing only"

    def config_values(self) -> dict[str, Any]:
        """Return the config keys that select this layout."""
        parallel = self.config.parallel
        layout = self.layout
        data: Any = "auto"
        if layout.zero and layout.dp_replicate > 1:
            data = {"replicate": layout.dp_replicate, "shard": layout.dp_shard}
        keys = ("tensor", "context", "pipeline", "zero", "schedule", "virtual_stages", "activation_checkpointing")
        return {
            "parallel": {"data": data, **{key: getattr(parallel, key) for key in keys}},
            "train": {"micro_batch": self.config.train.micro_batch},
            "stages": {"train": {"nodes": layout.world_size // layout.ranks_per_node}},
        }


def enumerate_layouts(config: Config, machine: Machine, vocab: int, nodes: int) -> Iterator[LayoutChoice]:
    """Yield every valid layout on `nodes` nodes with its prediction, in no particular order."""
    per_node = config.stages.train.tasks_per_node
    world_size = nodes * per_node
    machine = machine.with_gpus_per_node(per_node)
    # Shorter parts of a sequence than `MIN_CONTEXT_TOKENS` would only add communication.
    contexts = _divisors(world_size, max(1, config.data.sequence_length // MIN_CONTEXT_TOKENS))
    for tensor, context, pipeline in product(
        _divisors(world_size, per_node), contexts, _divisors(world_size, config.model.layers)
    ):
        data, remainder = divmod(world_size, tensor * context * pipeline)
        # ZeRO shards over all data-parallel ranks, or over those of one node (hybrid sharding).
        inner = tensor * context
        shards = {data, per_node // inner} if per_node % inner == 0 and data * inner % per_node == 0 else {data}
        schedules = SCHEDULES if pipeline > 1 else (("1f1b", 1),)
        # A pipeline keeps weights and gradients whole during a step, so only ZeRO 1 is useful.
        levels = (1, 2, 3) if pipeline == 1 else (1,)
        zero_and_shards = [(0, 1), *product(levels, (shard for shard in shards if shard * context > 1))]
        combinations = product(MICRO_BATCHES, zero_and_shards, schedules, ("none", "selective", "full"))
        for micro_batch, (zero, shard), (schedule, virtual_stages), checkpointing in combinations:
            is_divisible = remainder == 0 and config.train.global_batch % (data * micro_batch) == 0
            if not is_divisible or pipeline * virtual_stages > config.model.layers:
                continue
            is_hybrid = zero > 0 and shard < data
            parallel = config.parallel.model_copy(
                update={
                    "tensor": tensor,
                    "context": context,
                    "pipeline": pipeline,
                    "data": DataParallel(replicate=data // shard, shard=shard) if is_hybrid else "auto",
                    "zero": zero,
                    "schedule": schedule,
                    "virtual_stages": virtual_stages,
                    "activation_checkpointing": checkpointing,
                }
            )
            train = config.train.model_copy(update={"micro_batch": micro_batch})
            candidate = config.model_copy(update={"parallel": parallel, "train": train})
            with suppress(LayoutError):
                layout = resolve_layout(candidate, world_size, per_node, vocab, suggest=False)
                work = workload_from_config(candidate, layout, vocab)
                yield LayoutChoice(candidate, layout, work, predict_step(work, machine))


def predict_configured_layout(config: Config, machine: Machine, vocab: int) -> LayoutChoice:
    """Return the config's own layout with its prediction. Raises LayoutError if the layout is invalid."""
    layout = resolve_layout(config, vocab_size=vocab)
    work = workload_from_config(config, layout, vocab)
    return LayoutChoice(config, layout, work, predict_step(work, machine.with_gpus_per_node(layout.ranks_per_node)))


def _divisors(number: int, maximum: int) -> list[int]:
    """Return the divisors of a number that are at most `maximum`."""
    return [size for size in range(1, min(number, maximum) + 1) if number % size == 0]


def find_fastest_fitting(
    choices: Sequence[LayoutChoice], limit: float, max_count: int = MAX_SHOWN
) -> tuple[list[LayoutChoice], list[LayoutChoice]]:
    """Return the fastest layouts that fit, and the layouts that do not fit but are faster than the slowest of these.

    If fewer than `max_count` layouts fit, return all layouts that do not fit.

    Args:
        choices: Layouts in any order.
        limit: Memory of a GPU in bytes.
        max_count: Maximum number of layouts that fit.
    """
    fitting: list[LayoutChoice] = []
    too_large: list[LayoutChoice] = []
    for choice in sorted(choices, key=lambda choice: -choice.prediction.tokens_per_gpu):
        (fitting if choice.bytes_needed <= limit else too_large).append(choice)
        if len(fitting) == max_count:
            break
    return fitting, too_large


def search_layouts(
    config: Config, machine: Machine, vocab: int, nodes: Sequence[int], configured: LayoutChoice | None = None
) -> tuple[list[str], LayoutChoice]:
    """Return the lines of `plan --best`, and the layout with the most tokens per second on all GPUs.

    For one number of nodes, list the `MAX_SHOWN` fastest layouts that fit. Of the layouts that do not fit but are at
    least as fast as one of these, list those that need least memory. For several numbers of nodes, list the fastest
    layout that fits for each number.

    Args:
        config: The config.
        machine: The machine.
        vocab: Size of the vocabulary.
        nodes: Numbers of nodes.
        configured: The config's own layout, which is always listed and marked; None if it is invalid.

    Raises:
        UserError: No layout fits on any of the numbers of nodes.
    """
    limit = (config.site.gpu_memory_gib or machine.memory_gib) * 2**30
    lines: list[str] = []
    fastest: list[LayoutChoice] = []
    is_configured_shown = False

    def format_choice(choice: LayoutChoice) -> str:
        """Return the line of a layout, with a remark if it does not fit or is the config's own layout."""
        nonlocal is_configured_shown
        is_configured = configured is not None and (choice.layout, choice.work) == (configured.layout, configured.work)
        is_configured_shown |= is_configured
        excess = choice.bytes_needed - limit
        text = _format_line(choice) + (f": {excess / GB:.1f} GB too large" if excess > 0 else "")
        return text + f"  {CONFIGURED_LAYOUT_MARK}" * is_configured

    for count in nodes:
        choices = list(enumerate_layouts(config, machine, vocab, count))
        fitting, too_large = find_fastest_fitting(choices, limit, MAX_SHOWN if len(nodes) == 1 else 1)
        if fitting:
            fastest.append(fitting[0])
        lines += [format_choice(choice) for choice in fitting] or [
            f"{count} nodes: none of {len(choices)} layouts fits"
        ]
        if len(nodes) == 1 and too_large:
            smallest = sorted(too_large, key=lambda choice: choice.bytes_needed)[: MAX_SHOWN // 2]
            lines += ["", f"faster or equally fast layouts that do not fit into {limit / GB:.1f} GB"]
            lines += [format_choice(choice) for choice in smallest]
    if not fastest:
        raise UserError(
            "plan.no_layout_fits",
            f"no layout on {', '.join(map(str, nodes))} nodes fits into {limit / GB:.1f} GB: use more nodes (--nodes), "
            "change train.global_batch, or set train.loss_chunk or optimizer.state",
        )
    if configured is not None and not is_configured_shown:
        lines += ["", format_choice(configured)]
    columns = f"{'nodes':>5} {'step s':>8} {'tokens/s':>9} {'MFU':>5} {'GB':>6}"
    header = f"{columns}   layout (shares of the step other than computation)"
    best = max(fastest, key=lambda choice: choice.prediction.tokens_per_gpu * choice.layout.world_size)
    return [header, *lines], best


def _format_line(choice: LayoutChoice) -> str:
    """Return the line of the table for a layout."""
    step = choice.prediction
    nodes = choice.layout.world_size // choice.layout.ranks_per_node
    speed = f"{nodes:>5} {step.step:>8.3f} {step.tokens_per_gpu:>9,.0f} {100 * step.mfu:>4.0f}%"
    layout = f"{choice.work.describe_layout()} ({choice.describe_overhead()})"
    return f"{speed} {choice.bytes_needed / GB:>6.1f}   {layout}"


def parse_node_counts(text: str) -> list[int]:
    """Parse numbers of nodes: `16,2048`, or `2..64` for 2, 4, 8, …, 64. The last number is always included.

    Raises UserError for malformed text.
    """
    counts: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\.\.(\d{1,9}))?\s*", part)
        if ends is None or not 1 <= int(ends[1]) <= int(ends[2] or ends[1]) <= _MAX_NODES:
            raise UserError(
                "plan.invalid_nodes",
                make_printable(f"--nodes {text}: write numbers from 1 to {_MAX_NODES:,} such as 16,2048, or 2..64"),
            )
        count = int(ends[1])
        last = int(ends[2] or ends[1])
        while count < last:
            counts.append(count)
            count *= 2
        counts.append(last)
    return counts


def write_choice(choice: LayoutChoice, path: Path, overrides: Sequence[str]) -> Path:
    """Write a config `NAME-best.yaml` next to `path` that extends `path` by a layout. Return its path.

    Args:
        choice: The layout.
        path: The config `NAME.yaml`.
        overrides: Changes to the config as `KEY=VALUE`, which are also written to the new config.

    Raises:
        UserError: The file exists.
    """
    changes = apply_overrides({}, overrides)
    if not any(override.startswith("run.root=") for override in overrides):
        # apply_overrides() adds a default `run.root`, which would replace the `run.root` of `path`.
        changes.get("run", {}).pop("root", None)
    values = merge_values(merge_values({"extends": path.name}, changes), choice.config_values())
    target = path.with_name(f"{path.stem}-best.yaml")
    try:
        with target.open("x") as file:
            file.write(f"# Chosen by `plan {path.name} --best`: {choice.work.describe_layout()}\n")
            file.write(dump_yaml(json.loads(json.dumps(values))))  # `dump_yaml` needs plain values.
    except FileExistsError:
        raise UserError(
            "plan.file_exists", make_printable(f"{target} exists: move it, and run the command again")
        ) from None
    return target
