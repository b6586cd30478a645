"""`report.html`: what the terminal shows, with a timeline and a loss curve, on one page that needs nothing else.

The tables are rich's own export; of the pictures only the figures are ours (slurm/show/ledger.py), the browser scales
them. Within an attempt the timeline shows its parts one after the other, in the ledger's order: how long they took in
all, not when each second of them was.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from html import escape

from rich.console import RenderableType

from pipeline.base.errors import printable
from slurm.show.console import Plain
from slurm.show.follow import clock
from slurm.show.ledger import PARTS, Attempt

_SHADES = "#f1f3f5 #dee2e6 #ffd43b #40c057 #99e9f2 #4dabf7 #b197fc #1971c2 #fa5252 #adb5bd"
COLOURS = dict(zip(PARTS, _SHADES.split(), strict=True))
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
h2 { font-size: 1.1rem; margin-top: 2rem } pre { font-size: .8rem; overflow-x: auto }
.key { margin-right: 1rem } .key i { display: inline-block; width: .8rem; height: .8rem; border: 1px solid #ced4da }
.lane { position: relative; height: 1.3rem; margin: .3rem 0 0 6rem } .lane b { position: absolute; left: -6rem }
.task { height: .4rem; margin-top: 1px } .task b { top: -.4rem } .first { margin-top: 1rem }
.attempt { position: absolute; display: flex; height: 100%; box-sizing: border-box; border-right: 2px solid #212529 }
svg { width: 100%; height: 14rem; border: solid #ced4da; border-width: 0 0 1px 1px }
"""
_POINTS = 500


def page(title: str, shown: Sequence[RenderableType], pictures: str) -> str:
    """The whole document; `shown`: what is in the terminal."""
    console = Plain(record=True, file=io.StringIO(), width=160)
    for part in shown:
        console.print(part, soft_wrap=isinstance(part, str))
    before = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>{pictures}"
    )
    code_format = before.replace("{", "{{").replace("}", "}}") + "<pre>{code}</pre></body></html>\n"
    return printable(console.export_html(code_format=code_format, inline_styles=True))


def timeline(attempts: Sequence[Attempt]) -> str:
    """One lane per stage, and a thin one per task of an array, from the first to the last moment of the run."""
    if not attempts:
        return ""
    begin = min(a.begin for a in attempts)
    whole = max(max(a.end for a in attempts) - begin, 1e-9)
    lanes: dict[tuple[str, int | None], str] = {}
    for a in attempts:
        parts = "".join(
            f'<i style="flex:{1000 * spent:.0f};background:{COLOURS[part]}" title="{part} {clock(spent)}"></i>'
            for part, spent in a.parts.items()
        )
        place = f"left:{100 * (a.begin - begin) / whole:.3f}%;width:{100 * (a.end - a.begin) / whole:.3f}%"
        name = escape(f"{a.stage} {a.number}, ended: {a.cause}")
        lane = lanes.get((a.stage, a.task), "")
        lanes[a.stage, a.task] = f'{lane}<div class="attempt" style="{place}" title="{name}">{parts}</div>'
    drawn, named = "", set[str]()
    order = list(dict.fromkeys(stage for stage, _ in lanes))
    for (stage, task), bars in sorted(lanes.items(), key=lambda lane: order.index(lane[0][0])):
        label = "" if stage in named else f"<b>{escape(stage)}</b>"
        kind = "" if task is None else " task" if stage in named else " task first"
        drawn += f'<div class="lane{kind}">{label}{bars}</div>'
        named.add(stage)
    used = [part for part in PARTS if any(a.parts[part] > 0 for a in attempts)]
    keys = "".join(f'<span class="key"><i style="background:{COLOURS[part]}"></i> {part}</span>' for part in used)
    return f"<h2>Where the time went: {clock(whole)} in all</h2>{drawn}<p>{keys}</p>"


def loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Loss over steps, (step, loss) by name, thinned to some hundred points each."""
    curves = {name: curve for name, curve in curves.items() if len(curve) > 1}
    if not curves:
        return ""
    steps, losses = zip(*(point for curve in curves.values() for point in curve), strict=True)
    low, high, first, last = min(losses), max(losses), min(steps), max(steps)
    drawn, keys = "", ""
    for number, (name, curve) in enumerate(curves.items()):
        colour = f"hsl({208 + 360 * number // len(curves)} 71% 43%)"
        thin = [*curve[:-1][:: -(-len(curve) // _POINTS)], curve[-1]]
        path = " ".join(f"{step},{-loss}" for step, loss in thin)
        drawn += (
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
            f'vector-effect="non-scaling-stroke"><title>{escape(name)}</title></polyline>'
        )
        keys += f'<span class="key"><i style="background:{colour}"></i> {escape(name)}</span>'
    return (
        f'<h2>Loss</h2>{high:.4f}<br><svg viewBox="{first} {-high} {last - first} {(high - low) or 1}" '
        f'preserveAspectRatio="none">{drawn}</svg>{low:.4f}, steps {first} to {last}'
        + (f"<p>{keys}</p>" if len(curves) > 1 else "")
    )
