"""The order in which pipeline ranks work through a step's micro-batches, and when each piece of work is done."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeline.parallel.mesh import Layout

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ONE_STAGE = ("gpipe", "1f1b", "zb1p", "zb2p")
"""Schedules with one stage per rank. The last two, of Qi et al. (arXiv 2401.10241, section 2), are only predicted."""


class Action(NamedTuple):
    """One box of the timeline. `kind`: F forward, B backward, I its part for inputs, W its part for weights."""

    kind: str
    stage: int
    micro: int


def rank_actions(layout: Layout) -> list[list[Action]]:
    """What each pipeline rank does in one step, in order; without a pipeline of two micro-batches, as all are."""
    if layout.pp == 1:
        return [[Action(kind, 0, micro) for micro in range(min(2, layout.micro_batches)) for kind in "FB"]]
    return build_schedule(layout.schedule, layout.pp, layout.virtual_stages, layout.micro_batches)


@lru_cache(maxsize=256)
def build_schedule(schedule: str, pipeline: int, virtual: int, batches: int) -> list[list[Action]]:
    """What each of `pipeline` ranks does in one step, in order. Schedules that split backward are torch's own."""
    if schedule in _ONE_STAGE:
        return [_one_stage(schedule, pipeline, batches, rank) for rank in range(pipeline)]
    if schedule == "interleaved_1f1b":
        return [_interleaved(pipeline, virtual, batches, rank) for rank in range(pipeline)]
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import TORCH_SCHEDULES

    found = get_schedule_ops(TORCH_SCHEDULES[schedule], pipeline, batches, virtual)
    # an action prints as "2F0": stage, kind, micro-batch; overlapping ones as a pair of those
    texts = (" ".join(map(str, order)) for order in found)
    return [[Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts]


def _one_stage(schedule: str, pipeline: int, batches: int, rank: int) -> list[Action]:
    left = pipeline - rank
    ahead = min(batches, {"gpipe": batches, "zb2p": 2 * left - 1}.get(schedule, left))
    later = {"zb1p": rank, "zb2p": 2 * rank}.get(schedule)  # micro-batches by which W is later than I; None: no split
    order = [Action("F", rank, micro) for micro in range(ahead)]
    for micro in range(batches):
        order.append(Action("B" if later is None else "I", rank, micro))
        if later is not None and micro >= later:
            order.append(Action("W", rank, micro - later))
        order += [Action("F", rank, micro + ahead)] if micro + ahead < batches else []
    return order + [Action("W", rank, micro) for micro in range(max(0, batches - (later or 0)), batches)]


def _interleaved(pipeline: int, virtual: int, batches: int, rank: int) -> list[Action]:
    """Several stages per rank in turns of so many micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    turn = batches // max(1, batches // pipeline)
    ahead = min(virtual * batches, (virtual - 1) * turn + 2 * (pipeline - 1 - rank))

    def work(kind: str, number: int) -> Action:
        rounds, place = divmod(number, turn * virtual)
        chunk = place // turn if kind == "F" else virtual - 1 - place // turn
        return Action(kind, rank + pipeline * chunk, rounds * turn + number % turn)

    order = [work("F", number) for number in range(ahead)]
    for number in range(virtual * batches):
        order += [work("F", number + ahead)] if number + ahead < virtual * batches else []
        order.append(work("B", number))
    return order


def replay_schedule(
    orders: Sequence[Sequence[Action]], stages: int, duration: Callable[[Action], float]
) -> list[list[tuple[Action, float]]]:
    """Each rank's actions with their starts: as soon as it is free and the neighbouring stages have delivered."""
    ahead: list[dict[int, float]] = [{} for _ in range(stages)]  # micro-batch -> when its forward is done
    back: list[dict[int, float]] = [{} for _ in range(stages)]
    done: list[list[tuple[Action, float]]] = [[] for _ in orders]
    free = [0.0 for _ in orders]
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            made, start = done[rank], free[rank]
            for action in order[len(made) :]:
                kind, stage, micro = action
                if kind == "F":
                    ready = ahead[stage - 1].get(micro) if stage else 0.0
                elif kind == "W":
                    ready = 0.0
                else:
                    ready = ahead[stage].get(micro)
                    if ready is not None and stage + 1 < stages:
                        ready = back[stage + 1].get(micro)
                if ready is None:
                    break
                start = max(start, ready)
                made.append((action, start))
                start += duration(action)
                if kind != "W":
                    (ahead if kind == "F" else back)[stage][micro] = start
                moved = True
            free[rank] = start
    if any(len(made) < len(order) for made, order in zip(done, orders, strict=True)):
        raise RuntimeError("the schedule waits for itself")
    return done


def draw_text_timeline(orders: Sequence[Sequence[Action]], stages: int) -> list[str]:
    """A row of text per pipeline rank, a column per time of one forward (a whole backward takes two)."""
    rows = []
    for made in replay_schedule(orders, stages, lambda action: 2 if action.kind == "B" else 1):
        row = ""
        for (kind, _, micro), start in made:
            letter = str(micro % 10)
            row = row.ljust(int(start), "·") + {"F": letter, "B": f"{letter}▒", "I": "▒", "W": "▓"}[kind]
        rows.append(row)
    longest = max(map(len, rows))
    return [row.ljust(longest, "·") for row in rows]
