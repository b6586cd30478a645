"""From timings to a machine: `plan CONFIG --measure FILE`, without torch. measure_stage.py takes the timings.

Rates are those of the operators of the timed step's shapes; links are α and β of the collectives (collectives.py) by
least squares, each timing with the same relative weight. What then is left of real steps is two figures: how many times
unfused operators move their bytes, which each step tells, and what a collective costs beyond its link, which the
difference of two layouts tells. They are taken where the predicted steps are nearest to the timed ones, as ratios.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.errors import UserError, printable
from pipeline.base.files import write_atomic
from pipeline.base.yaml12 import dump
from planning.goodput import least
from planning.machine import Attention, Exchange, Link, Machine, Overheads, Timings
from planning.predict import TILE, predict, rank_of
from planning.workload import Workload

_LEAST = 1e-9
"""Seconds of a latency that timings do not show."""
_EAGER, _CALL_S = (0.1, 50.0), (1e-7, 0.1)
"""Between these the fit looks."""
POOR = 0.15
"""A step that is predicted no nearer than that tells that the machine was busy, or is no such machine."""
WARNING = "POOR FIT:"
"""Before what is said of such a step."""


def shapes(work: Workload) -> list[tuple[int, int, int]]:
    """Rows, columns, inner size of a rank's matrix products: a block and the output layer, forward and backward."""
    forward = [(int(m), int(n), int(k)) for m, n, k, _ in work.products]
    forward.append((work.micro_batch * work.sequence, work.vocab // work.tensor, work.hidden))
    return [shape for m, n, k in forward for shape in ((m, n, k), (m, k, n), (k, n, m))]


def line(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """a, b ≥ 0 of seconds = a·x + b·y, for rows (x, y, seconds), by least squares of relative errors."""
    scaled = [(x / seconds, y / seconds) for x, y, seconds in rows]
    xx, yy = (math.fsum(one[at] ** 2 for one in scaled) for at in (0, 1))
    xy, x, y = math.fsum(a * b for a, b in scaled), math.fsum(a for a, _ in scaled), math.fsum(b for _, b in scaled)
    det = xx * yy - xy * xy
    a, b = ((x * yy - y * xy) / det, (y * xx - x * xy) / det) if det > 1e-12 * xx * yy else (0.0, y / yy)
    if b <= 0:
        return (x / xx, 0.0)
    return (a, b) if a >= 0 else (0.0, y / yy)


def hops_and_bytes(one: Exchange) -> tuple[float, float]:
    """How often its time has the latency in it, and how many bytes pass a link: as collectives.py counts them."""
    if one.kind == "send":
        return 1.0, float(one.size)
    times = 2 if one.kind == "all_reduce" else 1
    hops = math.ceil(math.log2(one.ranks)) if one.between else one.ranks - 1
    return float(times * hops), times * one.size * (one.ranks - 1) / one.ranks


def link_of(exchanges: Iterable[Exchange], crowd: float = 1.0) -> Link | None:
    """Latency and bandwidth that fit; None where nothing was exchanged. `crowd`: ranks that shared a core."""
    rows = [(*hops_and_bytes(one), one.seconds / crowd) for one in exchanges]
    if not rows:
        return None
    latency, per_byte = line(rows)
    return Link(latency=max(_LEAST, latency), bandwidth=1 / max(_LEAST**2, per_byte))


def fitted(timings: Timings, gpu: str, memory_gib: float, multiprocessors: int, cores: int | None) -> Machine:
    """The machine that was timed. `cores`: of CPUs, how many ranks a node runs at full speed."""
    work, per_node = timings.steps[0].work, timings.steps[0].ranks_per_node
    crowd = max(1.0, per_node / cores) if cores else 1.0
    half_wave = 0.5 * multiprocessors * TILE
    done = math.fsum(2 * (half_wave + m * n) * k for m, n, k, _ in timings.products)
    rate = crowd * done / math.fsum(seconds for *_, seconds in timings.products)
    fastest = crowd * max(2 * m * n * k / seconds for m, n, k, seconds in timings.products)
    copied, copying = timings.copied
    inside = link_of((one for one in timings.exchanges if not one.between), crowd)
    between = link_of((one for one in timings.exchanges if one.between), crowd)
    nobody = Link(latency=_LEAST, bandwidth=1 / _LEAST**2)
    machine = Machine(
        gpu=gpu, memory_gib=memory_gib, bandwidth=2 * copied * crowd / copying, multiprocessors=multiprocessors,
        peak={work.precision: max(rate, fastest)}, achievable={work.precision: rate},
        attention=Attention(portable=1.0, native=1.0), gpus_per_node=per_node, inside=inside or between or nobody,
        between=between or inside or nobody, cores=cores,
        measured=Overheads(eager=1.0, call=0.0), timings=timings,
    )  # fmt: skip
    attention = crowd * rank_of(work, machine).attention() / timings.attention
    machine = machine.model_copy(update={"attention": Attention(portable=attention, native=attention)})
    return machine.model_copy(update={"measured": _overheads(machine, timings)})


def _overheads(machine: Machine, timings: Timings) -> Overheads:
    """Those that come nearest to the machine's steps, as ratios."""

    def error(eager: float, call: float) -> float:
        tried = machine.model_copy(update={"measured": Overheads(eager=eager, call=call)})
        found = (predict(one.work, tried.in_nodes_of(one.ranks_per_node)).step / one.seconds for one in timings.steps)
        return math.fsum(math.log(ratio) ** 2 for ratio in found)

    def eager_with(call: float) -> float:
        return least(lambda eager: error(eager, call), *_EAGER)

    calls = [0.0]
    if len(timings.steps) > 1:  # one step cannot tell the two apart
        calls.append(least(lambda call: error(eager_with(call), call), *_CALL_S))
    call = min(calls, key=lambda call: error(eager_with(call), call))
    return Overheads(eager=eager_with(call), call=call)


def compared(machine: Machine) -> Iterator[str]:
    """Each timed step beside what is predicted of it; with a warning where that is no fit."""
    for one in machine.timings.steps if machine.timings else ():
        found = predict(one.work, machine.in_nodes_of(one.ranks_per_node)).step
        told = f"{one.work.words()}: predicted {found:.3g} s, timed {one.seconds:.3g} s"
        poor = abs(found / one.seconds - 1) > POOR
        yield f"{WARNING} {told}: measure again on a quiet machine" if poor else told


def write_machine(machine: Machine, file: Path, told: Sequence[str]) -> None:
    """Write `file`, whole or not at all, with comments. Raises UserError where it exists: it is not replaced."""
    comments = "".join(f"# {printable(' '.join(words.split()))}\n" for words in told if words)
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write_atomic(temporary, comments + dump(_short(json.loads(machine.model_dump_json(exclude_none=True)))))
        os.link(temporary, file)
    except FileExistsError:
        raise UserError(printable(f"{file} exists, and is not replaced: move it away, or name another file")) from None
    finally:
        temporary.unlink(missing_ok=True)


def _short(value: Any) -> Any:
    """Plain values with as many digits as a timing is worth."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list) else value
