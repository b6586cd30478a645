"""The order in which pipeline ranks work through a step's micro-batches, and what that looks like over time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from pipeline.config.layout import Layout

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One box of the timeline. `kind`: F forward, B backward, I its part for inputs, W its part for weights."""

    kind: str
    stage: int
    micro: int


def actions(layout: Layout) -> list[list[Action]]:
    """What each pipeline rank does in one step, in order. The schedules of several stages are torch's own."""
    ranks, batches = range(layout.pipeline), layout.micro_batches
    if layout.schedule in ("gpipe", "1f1b"):
        orders = []
        for rank in ranks:
            ahead = batches if layout.schedule == "gpipe" else min(batches, layout.pipeline - rank)
            order = [Action("F", rank, micro) for micro in range(ahead)]
            for micro in range(batches):
                order.append(Action("B", rank, micro))
                order += [Action("F", rank, micro + ahead)] if micro + ahead < batches else []
            orders.append(order)
        return orders
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    from pipeline.parallel.pipeline_parallel import NAMES

    found = get_schedule_ops(NAMES[layout.schedule], layout.pipeline, batches, layout.virtual_stages)
    # an action prints as "2F0": stage, kind, micro-batch; overlapping ones as a pair of those
    texts = (" ".join(map(str, order)) for order in found)
    return [[Action(kind, int(stage), int(micro)) for stage, kind, micro in _ACTION.findall(text)] for text in texts]


def timeline(orders: Sequence[Sequence[Action]], stages: int) -> list[str]:
    """A row of text per pipeline rank, a column per time of one forward (a whole backward takes two).

    Each rank begins an action as soon as it is free and the neighbouring stages have delivered.
    """
    ends: dict[tuple[bool, int, int], int] = {}  # (forward?, stage, micro-batch) -> when it is done
    rows, at = ["" for _ in orders], [0 for _ in orders]
    while any(at[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(at)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind, stage, micro = order[at[rank]]
                needs = []
                if kind == "F" and stage:
                    needs = [(True, stage - 1, micro)]
                elif kind in "BI":
                    needs = [(True, stage, micro)] + ([(False, stage + 1, micro)] if stage + 1 < stages else [])
                if any(need not in ends for need in needs):
                    break
                start = max([len(rows[rank]), *(ends[need] for need in needs)])
                width = 2 if kind == "B" else 1
                letter = str(micro % 10)
                box = {"F": letter, "B": f"{letter}▒", "I": "▒", "W": "▓"}[kind]
                rows[rank] = rows[rank].ljust(start, "·") + box
                if kind != "W":
                    ends[(kind == "F", stage, micro)] = start + width
                at[rank] += 1
        if sum(at) == before:
            raise RuntimeError("the schedule waits for itself")
    longest = max(map(len, rows))
    return [row.ljust(longest, "·") for row in rows]
