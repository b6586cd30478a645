"""The pictures of a report: each takes figures and gives a <figure> for the page, "" where there is nothing to draw.

Four kinds serve for all: curves over an axis (`curves`), layers that add up (`layers`), bars in lanes (`lanes`:
attempts, hosts, tasks, ranks), and the points of a sweep across their values (`parallel`). Within an attempt the
timeline shows its parts one after the other, in the ledger's order: how long they took in all, not when each second of
them was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import inf
from typing import Any

from pipeline.base import plot
from pipeline.base.plot import BUCKETS, COLOURS, GREY, PALE, Curve, Points, Scale, short
from pipeline.base.text import format_duration
from pipeline.parallel.mesh import Layout
from pipeline.run.ledger import AttemptTimes
from pipeline.run.lines import number

PART_COLOURS = {
    "idle": PALE, "queue": GREY, "startup": 6, "compute": 2, "data": 5, "communication": 0, "evaluation": 3,
    "checkpoint": 1, "lost": 4, "ending": 7, "communication_exposed": 0, "copy": 5, "bubble": 6,
    "profiling": 10,
}  # fmt: skip
"""Parts of the ledger, and of a profiled step, which have the same colour in all pictures."""
_HEIGHT = "height:19rem"
_FEW = 30
"""Up to so many points of a curve are marked one by one."""
_FEW_VALUES = 6
"""Up to so many values of a sweep stand evenly on their axis."""
_MOST_LANES = 100
_WIDEST_NAME = 18
"""Characters of a lane's name that are shown beside it."""


@dataclass(frozen=True)
class Bar:
    """A part of a lane, in the values of its axis."""

    start: float
    end: float
    colour: int
    title: str
    words: str = ""
    """Written into it where it is wide enough."""


def _figure(heading: str, drawn: str, keys: Iterable[tuple[str, int]], style: str, scales: Sequence[Scale] = ()) -> str:
    """`scales`: of x and y, for the few lines of script that read values under the pointer."""
    shown = "".join(f'<span class="key"><i class="c{colour}"></i>{escape(name)}</span> ' for name, colour in keys)
    data = "".join(f' data-{axis}="{s.low} {s.high} {int(s.log)}"' for axis, s in zip("xy", scales, strict=False))
    return (
        f"<figure{data}><figcaption><b>{escape(heading)}</b> {shown}<output></output></figcaption>"
        f'<div><svg role="img" aria-label="{escape(heading)}" style="{style}">{drawn}</svg></div></figure>'
    )


def curves(
    heading: str, x: str, y: str, named: Mapping[str, Points], *, log: str = "", marks: Sequence[float] = ()
) -> str:
    """Curves over one axis, by name. Where there are many points, each one's extremes, and the mean of its parts.

    `log`: the axes that are logarithmic where values differ much: x, y or xy.
    """
    named = {name: points for name, points in named.items() if points}
    if max(map(len, named.values()), default=0) < 2:
        return ""
    across = Scale.over((p[0] for points in named.values() for p in points), x, log="x" in log, whole="x" not in log)
    ends = [0.0, 100.0] if y == "%" else []
    up = Scale.over([*ends, *(p[1] for points in named.values() for p in points)], y, log="y" in log).rounded()
    drawn: list[Curve] = []
    few = min(BUCKETS, max(8, 6000 // len(named)))
    for place, (name, points) in enumerate(named.items()):
        colour, smooth = min(place, GREY), plot.means(points) if len(named) <= 2 else ()
        drawn.append(Curve(name, plot.thin(points, few), colour, bool(smooth), dots=len(points) <= _FEW))
        if smooth:
            drawn.append(Curve(f"{name}, mean", smooth, colour))
    front = sorted(drawn, key=lambda curve: curve.faint)[::-1]
    keys = [(name, place) for place, name in enumerate(named) if place < GREY] if len(named) > 1 else []
    keys += [(f"{len(named) - GREY} more", GREY)] if len(named) > GREY else []
    return _figure(heading, plot.area(across, up, front, marks), keys, _HEIGHT, (across, up))


def layers(heading: str, x: str, y: str, at: Sequence[float], named: Mapping[str, Sequence[float]]) -> str:
    """What adds up, one layer above the other, at the places `at`; layers that are nothing everywhere are left out."""
    named = {name: values for name, values in named.items() if any(value > 0 for value in values)}
    if len(at) < 2 or not named:
        return ""
    tops = [*accumulate(named.values(), lambda below, values: [a + b for a, b in zip(below, values, strict=True)])]
    across, up = Scale.over(at, x, whole=True), Scale.over([0.0, *tops[-1]], y).rounded()
    keys = [(name.replace("_", ", "), PART_COLOURS[name]) for name in named]
    drawn = [Curve(n, [*zip(at, top, strict=True)], c, filled=True) for (n, c), top in zip(keys, tops, strict=True)]
    return _figure(heading, plot.area(across, up, drawn[::-1]), keys, _HEIGHT)


def lanes(
    heading: str,
    x: Scale,
    rows: Sequence[tuple[str, Sequence[Bar]]],
    keys: Sequence[tuple[str, int]] = (),
    rem: int = 0,
) -> str:
    """Bars in lanes with names, over one axis; lanes without a name are thin. `rem`: narrower, it is scrolled."""
    drawn, down = "", 4
    for name, bars in rows[:_MOST_LANES]:
        height = 22 if name else 7
        middle = f"{down + height / 2}"
        shown = name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"
        drawn += plot.label("-8", middle, shown, "end", dy=".35em")
        for bar in bars:
            start, wide = 100 * x.at(bar.start), 100 * (x.at(bar.end) - x.at(bar.start))
            if wide < 0.03:
                continue  # nothing that could be seen
            drawn += (
                f'<rect class="c{bar.colour}" fill="{COLOURS[bar.colour]}" x="{start:.3f}%" width="{wide:.3f}%" '
                f'y="{down}" height="{height}"><title>{escape(bar.title)}</title></rect>'
            )
            if bar.words and wide > 0.7 * len(bar.words):  # so much of a wide screen takes a letter, thrice of a phone
                kind = "in" if rem or wide > 2.2 * len(bar.words) else "in wide"
                drawn += plot.label(f"{start:.3f}%", middle, bar.words, "start", kind, ".35em", 4)
        down += height + (6 if name else 2)
    left = 1.5 + 0.55 * max((min(len(name), _WIDEST_NAME) for name, _ in rows), default=0)
    more = [(f"{len(rows) - _MOST_LANES} more lanes are left out", PALE)] if len(rows) > _MOST_LANES else []
    size = f"height:calc({down}px + 4.5rem);padding-left:{left:.1f}rem;min-width:{rem}rem"
    return _figure(heading, plot.axis(x) + drawn, [*keys, *more], size) if rows else ""


def unit_of(seconds: float) -> tuple[str, float]:
    """The unit that such a time is told in, and its seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, size) for name, size in units if seconds > 3 * size), ("seconds", 1.0))


def timeline(attempts: Sequence[AttemptTimes]) -> str:
    """One lane per stage, and a thin one per task of an array, from the first to the last moment of the run."""
    begin, end = min((a.start_time for a in attempts), default=0.0), max((a.end_time for a in attempts), default=0.0)
    unit, size = unit_of(end - begin)
    x = Scale.over([0.0, max(end - begin, 1.0) / size], f"{unit} since the run began", whole=True)
    stages: dict[str, dict[int | None, list[Bar]]] = {}
    for a in attempts:
        bars, at = stages.setdefault(a.stage, {}).setdefault(a.task, []), (a.start_time - begin) / size
        cause = "" if a.cause in ("done", "running") else a.cause
        widest = max(a.seconds, key=lambda part: a.seconds[part])
        for part, spent in a.seconds.items():
            title = f"{a.stage} {a.number}, ended: {a.cause}; {part} {format_duration(spent)}"
            bars.append(Bar(at, at + spent / size, PART_COLOURS[part], title, cause if part == widest else ""))
            at += spent / size
        if cause:  # the end of what was stopped is seen
            bars.append(Bar(at - x.high / 200, at, 4, f"{a.stage} {a.number} ended: {cause}"))
    rows = [("" if n else stage, bars) for stage, of in stages.items() for n, bars in enumerate(of.values())]
    keys = [
        (part, colour) for part, colour in PART_COLOURS.items() if any(a.seconds.get(part, 0) > 0 for a in attempts)
    ]
    return lanes(f"Where the time went: {format_duration(end - begin)} in all", x, rows, [*keys, ("stopped", 4)])


def hosts(ratios: Mapping[str, float]) -> str:
    """The own time of each host's ranks in a step, divided by that of the others, slowest first."""
    x = Scale.over([0.0, *ratios.values()], "own time in a step, in medians of all hosts").rounded()
    slowest = sorted(ratios.items(), key=lambda item: -item[1])
    rows = [(host, [Bar(0, r, 4 if r > 1.2 else 0, f"{host}: {r:.3f}", f"{r:.2f}")]) for host, r in slowest]
    return lanes("Hosts by their own time", x, rows)


def tasks(result: Mapping[str, float]) -> str:
    """What the tasks of an evaluation came to, each with its standard error."""
    rows = []
    for name, value in result.items():
        if ".accuracy" in name and not name.endswith("_stderr"):
            error = result.get(f"{name}_stderr", 0.0)
            bars = [Bar(0, value, 0, f"{name}: {value:.4f} ± {error:.4f}", f"{value:.3f}")]
            rows.append((name, [*bars, Bar(max(0, value - error), min(1, value + error), 1, f"± {error:.4f}")]))
    return lanes("Tasks", Scale(0, 1, "share that is right, ± standard error"), rows)


def mesh(layout: Layout) -> str:
    """Which rank does what: a lane for each node, a box for each of its ranks, coloured by pipeline stage."""
    per_node, rows = min(layout.ranks_per_node, layout.world_size), dict[str, list[Bar]]()
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        node, place = divmod(rank, per_node)
        title = f"rank {rank}: pipeline {at.pp}, data {at.dp}, tensor {at.tp}"
        box = Bar(place - 0.48, place + 0.48, at.pp % GREY, title, f"p{at.pp} d{at.dp} t{at.tp}")
        rows.setdefault(f"node {node}", []).append(box)
    keys = [(f"pipeline {rank}", rank % GREY) for rank in range(layout.pp)]
    x = Scale(-0.5, per_node - 0.5, "rank on its node", whole=True)
    return lanes(f"Layout: {layout.describe_sizes()}", x, [*rows.items()], keys, rem=8 + 6 * per_node)


def parallel(points: Sequence[Mapping[str, Any]], figure: str, results: Sequence[float]) -> str:
    """A sweep: each point a line across the values that it was given, up to what it came to; the best in colour.

    `results`: what the points came to, infinite where that is not known; the less the better.
    """
    known = sorted((r, n) for n, r in enumerate(results) if r < inf)
    if len(known) < 2:
        return ""
    columns = {key: [points[n][key] for _, n in known] for key in points[0]} | {figure: [r for r, _ in known]}
    drawn, ways, last = "", list[list[tuple[float, float]]]([] for _ in known), len(columns) - 1
    for place, (key, values) in enumerate(columns.items()):
        few = sorted(set(values), key=lambda v: (v if number(v) else inf, str(v)))
        if key != figure and (len(few) <= _FEW_VALUES or not all(map(number, few))):  # evenly, in their order
            ticks = [(n / max(1, len(few) - 1), short(v) if number(v) else str(v)) for n, v in enumerate(few)]
            heights = [ticks[few.index(value)][0] for value in values]
        else:
            scale = Scale.over(values, key, log=key != figure)
            ticks = [(scale.at(value), word) for value, word in scale.ticks()]
            heights = [scale.at(value) for value in values]
        for way, height in zip(ways, heights, strict=True):
            way.append((place / last, height))
        x, side = f"{100 * place / last:.2f}%", "end" if place == last else "start"
        drawn += plot.rule(place / last, True)
        drawn += plot.label(x, f"{-10 - 15 * (place % 2)}", key, side if place in (0, last) else "middle", "title")
        for height, word in ticks:
            dx = -6 if place == last else 6
            drawn += plot.label(x, f"{100 - 100 * height:.2f}%", word[:_WIDEST_NAME], side, dy=".35em", dx=dx)
    lines = [
        Curve(f"point {n:03}: {result:.4f}", way, GREY if place >= max(1, len(known) / 4) else 0 if place else 2)
        for place, ((result, n), way) in enumerate(zip(known, ways, strict=True))
    ]
    whole = Scale(0, 1, "")
    keys = [("best", 2), ("best quarter", 0), ("others", GREY)]
    shown = plot.stretched("".join(plot.drawn(whole, whole, line) for line in reversed(lines))) + drawn
    return _figure("Values and what they came to", shown, keys, f"{_HEIGHT};padding-top:44px")
