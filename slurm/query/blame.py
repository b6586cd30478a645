"""Who is to blame for a hang: told from what each rank's watchdog wrote (pipeline/resilience/watchdog.py)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any


def blame(hangs: Iterable[Mapping[str, Any]], hosts: Sequence[str], heard: Container[int]) -> tuple[int, str, str]:
    """Who did not arrive: rank, host and a sentence. `hosts`: one for each rank; `heard`: ranks that left other words.

    A rank without a sign of life comes first, then the one that is furthest behind. Raises ValueError without hangs.
    """
    by_rank = {int(hang["rank"]): hang for hang in hangs}
    if not by_rank:
        raise ValueError("no rank reported a hang")
    front = max(by_rank.values(), key=lambda hang: (hang["step"], hang["number"]))
    others = f"the others were in phase '{front['phase']}' of step {front['step']}"
    silent = [rank for rank in range(len(hosts)) if rank not in by_rank and rank not in heard]
    if silent:
        names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in silent)
        return silent[0], hosts[silent[0]], f"{names} gave no sign of life; {others}"
    last = min(by_rank.values(), key=lambda hang: (hang["step"], hang["number"], hang["rank"]))
    where = f"rank {last['rank']} on {last['host']}"
    if (last["step"], last["number"]) == (front["step"], front["number"]):
        words = f"all ranks were stuck in phase '{last['phase']}' of step {last['step']}; {where}"
    else:
        words = f"{where} did not arrive: it was in phase '{last['phase']}' of step {last['step']}; {others}"
    if collectives := last["collectives"]:
        words += f"; its last collective was {collectives[-1]['operation']} number {collectives[-1]['number']}"
    return last["rank"], last["host"], f"{words}\n{last['stacks']}"
