"""`report.html`: a run on one page that needs nothing else: tables, a timeline and a loss curve as inline SVG.

Only drawing; the figures come from slurm/show/ledger.py. Within an attempt the timeline shows its parts one after the
other, in the ledger's order: how long they took in all, not when each second of them was.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from slurm.show.follow import clock
from slurm.show.ledger import PARTS, Attempt

_SHADES = "#f1f3f5 #dee2e6 #ffd43b #40c057 #99e9f2 #4dabf7 #1971c2 #fa5252 #adb5bd"
COLOURS = dict(zip(PARTS, _SHADES.split(), strict=True))
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } svg { width: 100%; height: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .85rem }
td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid #e9ecef }
td:first-child, th:first-child { text-align: left; padding-left: 0 } th { font-weight: 600 }
text { font: 11px system-ui, sans-serif; fill: #495057 } .key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8rem; height: .8rem; border: 1px solid #ced4da; vertical-align: -.1rem }
"""
_WIDTH, _LEFT, _LANE, _BAR = 960, 90, 34, 20
_POINTS = 500


def page(title: str, lines: Sequence[str], tables: Sequence[tuple[str, Sequence[Sequence[str]]]], pictures: str) -> str:
    """The whole document; each of `tables` is a heading and rows, the first of them the header."""
    shown = "".join(f"<h2>{escape(heading)}</h2>{_table(rows)}" for heading, rows in tables)
    words = "".join(f"<p>{escape(line)}</p>" for line in lines)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{words}{pictures}{shown}</body></html>\n"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(rows[0], "th") + "".join(line(cells, "td") for cells in rows[1:]) + "</table>"


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(words)}</text>'


def timeline(attempts: Sequence[Attempt]) -> str:
    """One lane per stage (tasks of an array share it), from the first to the last moment of the run."""
    if not attempts:
        return ""
    begin, end = min(a.begin for a in attempts), max(a.end for a in attempts)
    scale = (_WIDTH - _LEFT) / max(end - begin, 1e-9)
    lanes = list(dict.fromkeys(a.stage for a in attempts))
    drawn = [_text(0, 8 + number * _LANE + 14, stage) for number, stage in enumerate(lanes)]
    tasks = {stage: sorted({a.task for a in attempts if a.stage == stage and a.task is not None}) for stage in lanes}
    for attempt in attempts:
        x, y = _LEFT + (attempt.begin - begin) * scale, 8 + lanes.index(attempt.stage) * _LANE
        thin, top = float(_BAR), float(y)
        if attempt.task is not None:
            thin /= len(tasks[attempt.stage])
            top += thin * tasks[attempt.stage].index(attempt.task)
        for part, spent in attempt.parts.items():
            if spent > 0:
                name = f"{attempt.stage} {attempt.number}: {part} {clock(spent)}; ended: {attempt.cause}"
                drawn.append(
                    f'<rect x="{x:.2f}" y="{top:.2f}" width="{spent * scale:.2f}" height="{thin:.2f}" '
                    f'fill="{COLOURS[part]}"><title>{escape(name)}</title></rect>'
                )
                x += spent * scale
        if attempt.task is None:
            drawn.append(f'<path d="M{x:.2f} {y - 3}v{_BAR + 6}" stroke="#212529"/>')
            if attempt.cause != "done" and x > _LEFT + 60:
                drawn.append(_text(x - 3, y + _BAR + 10, attempt.cause, "end"))
    height = 8 + len(lanes) * _LANE + 14
    drawn += [_text(_LEFT, height - 2, "0"), _text(_WIDTH, height - 2, clock(end - begin), "end")]
    used = [part for part in PARTS if any(a.parts[part] > 0 for a in attempts)]
    keys = "".join(f'<span class="key"><i style="background:{COLOURS[part]}"></i> {part}</span>' for part in used)
    return f'<h2>Where the time went</h2><svg viewBox="0 0 {_WIDTH} {height}">{"".join(drawn)}</svg><p>{keys}</p>'


def loss_curve(steps: Sequence[int], losses: Sequence[float]) -> str:
    """Loss over steps, thinned to some hundred points."""
    if len(steps) < 2:
        return ""
    points = [*zip(steps, losses, strict=True)]
    points = [*points[:-1][:: -(-len(steps) // _POINTS)], points[-1]]
    low, high = min(losses), max(losses)
    width, height = _WIDTH - _LEFT, 200
    across, down = width / (steps[-1] - steps[0]), height / ((high - low) or 1)
    path = " ".join(f"{_LEFT + (x - steps[0]) * across:.1f},{10 + (high - y) * down:.1f}" for x, y in points)
    words = _text(_LEFT - 8, 16, f"{high:.4f}", "end") + _text(_LEFT - 8, height + 10, f"{low:.4f}", "end")
    words += _text(_LEFT, height + 28, f"step {steps[0]}") + _text(_WIDTH, height + 28, f"step {steps[-1]}", "end")
    return (
        f'<h2>Loss</h2><svg viewBox="0 0 {_WIDTH} {height + 34}">'
        f'<path d="M{_LEFT} 10v{height}h{width}" fill="none" stroke="#ced4da"/>'
        f'<polyline points="{path}" fill="none" stroke="#1971c2" stroke-width="1.5"/>{words}</svg>'
    )
