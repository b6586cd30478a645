"""The pipeline schedule of a step: the order of each rank's actions, and when each action runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeline.parallel.mesh import Layout

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ONE_STAGE = ("gpipe", "1f1b", "zb1p", "zb2p")
"""Schedules with one stage per rank. The last two (Qi et al., arXiv 2401.10241, section 2) are only predicted."""


class Action(NamedTuple):
    """One action of a rank. `kind`: F forward, B backward, I gradients of inputs only, W gradients of weights only."""

    kind: str
    stage: int
    micro: int


def rank_actions(layout: Layout) -> list[list[Action]]:
    """Return the actions of each pipeline rank in one step; without a pipeline, those of two micro-batches."""
    if layout.pp == 1:
        return [[Action(kind, 0, micro) for micro in range(min(2, layout.micro_batches)) for kind in "FB"]]
    return build_schedule(layout.schedule, layout.pp, layout.virtual_stages, layout.micro_batches)


@lru_cache(maxsize=256)
def build_schedule(schedule: str, pipeline: int, virtual: int, batches: int) -> list[list[Action]]:
    """Return the actions of each pipeline rank in one step. Schedules that split the backward are torch's own."""
    if schedule in _ONE_STAGE:
        return [_order_one_stage(schedule, pipeline, batches, rank) for rank in range(pipeline)]
    if schedule == "interleaved_1f1b":
        return [_order_interleaved(pipeline, virtual, batches, rank) for rank in range(pipeline)]
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import TORCH_SCHEDULES

    ranks = get_schedule_ops(TORCH_SCHEDULES[schedule], pipeline, batches, virtual)
    # an action prints as "2F0": stage, kind, micro-batch; overlapping actions print as a pair
    texts = (" ".join(map(str, order)) for order in ranks)
    return [[Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts]


def _order_one_stage(schedule: str, pipeline: int, batches: int, rank: int) -> list[Action]:
    """Return the actions of a rank that has one stage, in order."""
    following = pipeline - rank
    ahead = min(batches, {"gpipe": batches, "zb2p": 2 * following - 1}.get(schedule, following))
    later = {"zb1p": rank, "zb2p": 2 * rank}.get(schedule)  # how many micro-batches W follows I; None: no split
    order = [Action("F", rank, micro) for micro in range(ahead)]
    for micro in range(batches):
        order.append(Action("B" if later is None else "I", rank, micro))
        if later is not None and micro >= later:
            order.append(Action("W", rank, micro - later))
        order += [Action("F", rank, micro + ahead)] if micro + ahead < batches else []
    return order + [Action("W", rank, micro) for micro in range(max(0, batches - (later or 0)), batches)]


def _order_interleaved(pipeline: int, virtual: int, batches: int, rank: int) -> list[Action]:
    """Return the actions of a rank with several stages (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    turn = batches // max(1, batches // pipeline)
    ahead = min(virtual * batches, (virtual - 1) * turn + 2 * (pipeline - 1 - rank))

    def make_action(kind: str, number: int) -> Action:
        rounds, position = divmod(number, turn * virtual)
        chunk = position // turn if kind == "F" else virtual - 1 - position // turn
        return Action(kind, rank + pipeline * chunk, rounds * turn + number % turn)

    order = [make_action("F", number) for number in range(ahead)]
    for number in range(virtual * batches):
        order += [make_action("F", number + ahead)] if number + ahead < virtual * batches else []
        order.append(make_action("B", number))
    return order


def replay_schedule(
    orders: Sequence[Sequence[Action]], stages: int, duration: Callable[[Action], float]
) -> list[list[tuple[Action, float]]]:
    """Return each rank's actions with their start times.

    An action starts as soon as its rank is free and the neighbouring stages have delivered its inputs.

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
                elif kind == "W":
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
    """Return a row of text per pipeline rank. A column is the duration of a forward; a whole backward takes two."""
    rows = []
    for timed in replay_schedule(orders, stages, lambda action: 2 if action.kind == "B" else 1):
        row = ""
        for (kind, _, micro), start in timed:
            digit = str(micro % 10)
            row = row.ljust(int(start), "·") + {"F": digit, "B": f"{digit}▒", "I": "▒", "W": "▓"}[kind]
        rows.append(row)
    longest = max(map(len, rows))
    return [row.ljust(longest, "·") for row in rows]
