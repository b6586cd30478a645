"""Compute the pipeline schedule of a step: the order of each rank's actions, and when each action runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeline.parallel.mesh import Layout

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ONE_STAGE_SCHEDULES = ("gpipe", "1f1b", "zb1p", "zb2p")
"""Schedules with one stage per rank.

The last two schedules (Qi et al., arXiv 2401.10241, section 2) are used only to predict published runs.
"""


class Action(NamedTuple):
    """One action of a rank for one micro-batch.

    `kind` is F (forward), B (backward), I (only gradients of inputs) or W (only gradients of weights).
    """

    kind: str
    stage: int
    """Number of the pipeline-parallel stage."""
    micro: int
    """Number of the micro-batch."""


def rank_actions(layout: Layout) -> list[list[Action]]:
    """Return the actions of each pipeline rank in one step.

    Without a pipeline, return the actions of at most two micro-batches, because further micro-batches repeat them.
    """
    if layout.pp == 1:
        return [[Action(kind, 0, micro) for micro in range(min(2, layout.micro_batches)) for kind in "FB"]]
    return build_schedule(layout.schedule, layout.pp, layout.virtual_stages, layout.micro_batches)


@lru_cache(maxsize=256)
def build_schedule(schedule: str, pipeline: int, virtual: int, batches: int) -> list[list[Action]]:
    """Return the actions of each pipeline rank in one step.

    Torch computes the schedules that split the backward pass, except zb1p and zb2p.

    Args:
        schedule: Name of the schedule.
        pipeline: Number of pipeline ranks.
        virtual: Number of stages per rank.
        batches: Number of micro-batches.
    """
    if schedule in _ONE_STAGE_SCHEDULES:
        return [_order_one_stage(schedule, pipeline, batches, rank) for rank in range(pipeline)]
    if schedule == "interleaved_1f1b":
        return [_order_interleaved(pipeline, virtual, batches, rank) for rank in range(pipeline)]
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import TORCH_SCHEDULES

    ranks = get_schedule_ops(TORCH_SCHEDULES[schedule], pipeline, batches, virtual)
    # Torch describes an action by a string such as "2F0": stage, kind, micro-batch. A string may contain two actions
    # that overlap.
    texts = (" ".join(map(str, order)) for order in ranks)
    return [[Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts]


def _order_one_stage(schedule: str, pipeline: int, batches: int, rank: int) -> list[Action]:
    """Return the actions of a rank that has one stage, in order. Arguments are those of `build_schedule`."""
    remaining_ranks = pipeline - rank  # including this rank
    # Number of forward passes before the first backward pass.
    warmup = min(batches, {"gpipe": batches, "zb2p": 2 * remaining_ranks - 1}.get(schedule, remaining_ranks))
    # W of a micro-batch runs after I of the micro-batch that is `delay` later. None: the backward pass is not split.
    delay = {"zb1p": rank, "zb2p": 2 * rank}.get(schedule)
    order = [Action("F", rank, micro) for micro in range(warmup)]
    for micro in range(batches):
        order.append(Action("B" if delay is None else "I", rank, micro))
        if delay is not None and micro >= delay:
            order.append(Action("W", rank, micro - delay))
        order += [Action("F", rank, micro + warmup)] if micro + warmup < batches else []
    # The remaining W. Without `delay`, the range is empty.
    return order + [Action("W", rank, micro) for micro in range(max(0, batches - (delay or 0)), batches)]


def _order_interleaved(pipeline: int, virtual: int, batches: int, rank: int) -> list[Action]:
    """Return the actions of a rank with several stages, in order (Narayanan et al., arXiv 2104.04473, section 2.2).

    Arguments are those of `build_schedule`.
    """
    round_size = batches // max(1, batches // pipeline)  # number of consecutive micro-batches on one stage
    # Number of forward passes before forward and backward passes alternate. A forward pass is the first of each pair.
    warmup = min(virtual * batches, (virtual - 1) * round_size + 2 * (pipeline - 1 - rank))

    def make_action(kind: str, number: int) -> Action:
        """Return the forward ("F") or backward ("B") pass that is the rank's pass number `number` of this kind."""
        round_index, position = divmod(number, round_size * virtual)
        chunk = position // round_size if kind == "F" else virtual - 1 - position // round_size
        return Action(kind, rank + pipeline * chunk, round_index * round_size + number % round_size)

    order = [make_action("F", number) for number in range(warmup)]
    for number in range(virtual * batches):
        order += [make_action("F", number + warmup)] if number + warmup < virtual * batches else []
        order.append(make_action("B", number))
    return order


def replay_schedule(
    orders: Sequence[Sequence[Action]], stages: int, duration: Callable[[Action], float]
) -> list[list[tuple[Action, float]]]:
    """Return each rank's actions with their start times.

    An action starts as soon as its rank is free and the neighbouring stages have delivered its inputs. Messages take no
    time, unless `duration` includes their time.

    Args:
        orders: The actions of each rank, in order.
        stages: Number of stages.
        duration: Returns the duration of an action.
    """
    forward_ends: list[dict[int, float]] = [{} for _ in range(stages)]  # end of the forward, by stage and micro-batch
    backward_ends: list[dict[int, float]] = [{} for _ in range(stages)]
    timed_actions: list[list[tuple[Action, float]]] = [[] for _ in orders]
    free_time = [0.0 for _ in orders]
    has_progress = True
    while has_progress:
        has_progress = False
        for rank, order in enumerate(orders):
            timed = timed_actions[rank]
            start = free_time[rank]
            for action in order[len(timed) :]:
                kind, stage, micro = action
                if kind == "F":
                    ready = forward_ends[stage - 1].get(micro) if stage else 0.0
                elif kind == "W":  # W follows I of the same micro-batch on the same rank, and needs no message.
                    ready = 0.0
                else:
                    ready = forward_ends[stage].get(micro)
                    if ready is not None and stage + 1 < stages:
                        ready = backward_ends[stage + 1].get(micro)
                if ready is None:
                    break
                start = max(start, ready)
                timed.append((action, start))
                start += duration(action)
                if kind != "W":
                    (forward_ends if kind == "F" else backward_ends)[stage][micro] = start
                has_progress = True
            free_time[rank] = start
    if any(len(timed) < len(order) for timed, order in zip(timed_actions, orders, strict=True)):
        raise RuntimeError("the schedule has a deadlock")
    return timed_actions


def draw_text_timeline(orders: Sequence[Sequence[Action]], stages: int) -> list[str]:
    """Return a row of text for each pipeline rank.

    A column is the duration of a forward pass. A whole backward pass takes two columns. `·` means that the rank waits.
    """
    rows = []
    for timed in replay_schedule(orders, stages, lambda action: 2 if action.kind == "B" else 1):
        row = ""
        for (kind, _, micro), start in timed:
            digit = str(micro % 10)
            row = row.ljust(int(start), "·") + {"F": digit, "B": f"{digit}▒", "I": "▒", "W": "▓"}[kind]
        rows.append(row)
    longest = max(map(len, rows))
    return [row.ljust(longest, "·") for row in rows]
