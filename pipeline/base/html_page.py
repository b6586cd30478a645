"""A self-contained HTML page of SVG figures and tables, used for `report.html` and for `plan --html`.

The page needs no other file and no network. It follows the reader's light or dark mode. On a narrow screen, figures are
stacked and text keeps its size. The script only shows the values under the pointer; everything is visible without it.
All text is escaped, because names and messages come from runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from pipeline.base import plot
from pipeline.base.errors import make_printable
from pipeline.base.plot import BUCKETS, COLOURS, GREY, PALE, Curve, Points, Scale

FIGURE_STYLE = "height:19rem"
MAX_LABEL_CHARACTERS = 18
"""Longer names of lanes and ticks are shortened."""
_MAX_MARKED_POINTS = 30
"""Curves with at most this many points mark each point."""
_MAX_LANES = 100
_ASSETS = Path(__file__).parent
"""Folder of report.css and report.js."""


@dataclass(frozen=True)
class Bar:
    """A bar of a horizontal lane. Start and end are values of the x axis."""

    start: float
    end: float
    colour: int
    title: str
    text: str = ""
    """Text inside the bar, shown if the bar is wide enough."""


def format_table(cells: Sequence[Sequence[str]]) -> str:
    """Return an HTML table whose first row is the header; "" if there are no rows."""
    if not cells:
        return ""
    tags = ["th"] + ["td"] * (len(cells) - 1)
    rows = ("".join(f"<{t}>{escape(cell)}</{t}>" for cell in row) for t, row in zip(tags, cells, strict=True))
    return f'<div class="table"><table><tr>{"</tr><tr>".join(rows)}</tr></table></div>'


def format_page(
    name: str,
    title: str,
    summary: Mapping[str, str],
    sections: Mapping[str, Sequence[str]],
    notes: Sequence[str],
    config: str,
) -> str:
    """Return the whole HTML document.

    Args:
        name: Name of the run.
        title: What the run is, in one line.
        summary: Facts by label; empty ones are left out.
        sections: Figures and tables by heading; empty ones are left out.
        notes: Paragraphs after the sections.
        config: The config as YAML.
    """
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in summary.items() if text)
    body = ""
    for heading, parts in sections.items():
        figures = "".join(part for part in parts if part.startswith("<figure"))
        tables = "".join(part for part in parts if not part.startswith("<figure"))
        grid = f'<div class="grid">{figures}</div>' if figures else ""
        body += f"<h2>{escape(heading)}</h2>{grid}{tables}" if figures or tables else ""
    paragraphs = "".join(f"<p>{escape(line)}</p>" for line in notes)
    colours = "".join(f".c{number}{{--c:{colour}}}" for number, colour in enumerate(COLOURS))
    style = (_ASSETS / "report.css").read_text()
    script = (_ASSETS / "report.js").read_text()
    return make_printable(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{colours}{style}</style></head>'
        f"<body><h1>{escape(name)}</h1><p>{escape(title)}</p><dl>{facts}</dl>{body}{paragraphs}"
        f"<details><summary>The config</summary><pre>{escape(config)}</pre></details>"
        f"<script>{script}</script></body></html>\n"
    )


def format_figure(
    heading: str, drawing: str, keys: Iterable[tuple[str, int]], style: str, scales: Sequence[Scale] = ()
) -> str:
    """Return a <figure> with a heading and a colour key.

    Args:
        heading: Its title.
        drawing: SVG content.
        keys: Names and colour numbers of the key.
        style: CSS of the SVG element.
        scales: The x and y scales, from which the script computes the values under the pointer.
    """
    key = "".join(f'<span class="key"><i class="c{colour}"></i>{escape(name)}</span> ' for name, colour in keys)
    data = "".join(f' data-{axis}="{s.low} {s.high} {int(s.log)}"' for axis, s in zip("xy", scales, strict=False))
    return (
        f"<figure{data}><figcaption><b>{escape(heading)}</b> {key}<output></output></figcaption>"
        f'<div><svg role="img" aria-label="{escape(heading)}" style="{style}">{drawing}</svg></div></figure>'
    )


def draw_curves(
    heading: str, x: str, y: str, points_by_name: Mapping[str, Points], *, log: str = "", marks: Sequence[float] = ()
) -> str:
    """Return a figure of curves; "" if no curve has two points.

    A long curve is reduced to its extremes. If there are at most two curves, each long one gets a curve of means.

    Args:
        heading: Its title.
        x: Title of the x axis.
        y: Title of the y axis; for `%`, the axis covers at least 0 to 100.
        points_by_name: Points by the curve's name.
        log: The axes that are logarithmic if their values differ much: `x`, `y` or `xy`.
        marks: x values of vertical lines.
    """
    points_by_name = {name: points for name, points in points_by_name.items() if points}
    if max(map(len, points_by_name.values()), default=0) < 2:
        return ""
    all_points = [point for points in points_by_name.values() for point in points]
    x_scale = Scale.over((point[0] for point in all_points), x, log="x" in log, whole="x" not in log)
    ends = [0.0, 100.0] if y == "%" else []
    y_scale = Scale.over([*ends, *(point[1] for point in all_points)], y, log="y" in log).rounded()
    drawn: list[Curve] = []
    buckets = min(BUCKETS, max(8, 6000 // len(points_by_name)))
    for number, (name, points) in enumerate(points_by_name.items()):
        colour = min(number, GREY)
        smooth = plot.average_buckets(points) if len(points_by_name) <= 2 else ()
        is_marked = len(points) <= _MAX_MARKED_POINTS
        drawn.append(Curve(name, plot.downsample(points, buckets), colour, bool(smooth), dots=is_marked))
        if smooth:
            drawn.append(Curve(f"{name}, mean", smooth, colour))
    front = sorted(drawn, key=lambda curve: curve.faint)[::-1]
    keys = []
    if len(points_by_name) > 1:
        keys = [(name, number) for number, name in enumerate(points_by_name) if number < GREY]
    if len(points_by_name) > GREY:
        keys.append((f"{len(points_by_name) - GREY} more", GREY))
    return format_figure(
        heading, plot.draw_area(x_scale, y_scale, front, marks), keys, FIGURE_STYLE, (x_scale, y_scale)
    )


def draw_layers(
    heading: str,
    x: str,
    y: str,
    x_values: Sequence[float],
    y_values_by_name: Mapping[str, Sequence[float]],
    colours: Mapping[str, int],
) -> str:
    """Return a figure of stacked areas; layers that are zero everywhere are left out. "" if nothing remains."""
    layers = {name: values for name, values in y_values_by_name.items() if any(value > 0 for value in values)}
    if len(x_values) < 2 or not layers:
        return ""
    tops = [*accumulate(layers.values(), lambda below, values: [a + b for a, b in zip(below, values, strict=True)])]
    x_scale = Scale.over(x_values, x, whole=True)
    y_scale = Scale.over([0.0, *tops[-1]], y).rounded()
    keys = [(name.replace("_", ", "), colours[name]) for name in layers]
    drawn = [
        Curve(name, [*zip(x_values, top, strict=True)], colour, filled=True)
        for (name, colour), top in zip(keys, tops, strict=True)
    ]
    return format_figure(heading, plot.draw_area(x_scale, y_scale, drawn[::-1]), keys, FIGURE_STYLE)


def draw_lanes(
    heading: str,
    x: Scale,
    lanes: Sequence[tuple[str, Sequence[Bar]]],
    keys: Sequence[tuple[str, int]] = (),
    min_width_rem: int = 0,
) -> str:
    """Return a figure of named lanes of bars over one axis; "" if there are no lanes.

    Args:
        heading: Its title.
        x: Scale of the axis.
        lanes: Name and bars of each lane. Lanes without a name are thin.
        keys: Names and colour numbers of the key.
        min_width_rem: Minimum width in rem; a narrower screen scrolls.
    """
    drawing = ""
    down = 4
    for name, bars in lanes[:_MAX_LANES]:
        height = 22 if name else 7
        middle = f"{down + height / 2}"
        label = name if len(name) <= MAX_LABEL_CHARACTERS else f"{name[: MAX_LABEL_CHARACTERS - 1]}…"
        drawing += plot.draw_label("-8", middle, label, "end", dy=".35em")
        for bar in bars:
            start = 100 * x.at(bar.start)
            width = 100 * (x.at(bar.end) - x.at(bar.start))
            if width < 0.03:
                continue  # too narrow to be visible
            drawing += (
                f'<rect class="c{bar.colour}" fill="{COLOURS[bar.colour]}" x="{start:.3f}%" width="{width:.3f}%" '
                f'y="{down}" height="{height}"><title>{escape(bar.title)}</title></rect>'
            )
            # a character takes 0.7 % of a wide screen's width, and three times as much of a phone's width
            if bar.text and width > 0.7 * len(bar.text):
                kind = "in" if min_width_rem or width > 2.2 * len(bar.text) else "in wide"
                drawing += plot.draw_label(f"{start:.3f}%", middle, bar.text, "start", kind, ".35em", 4)
        down += height + (6 if name else 2)
    left = 1.5 + 0.55 * max((min(len(name), MAX_LABEL_CHARACTERS) for name, _ in lanes), default=0)
    omitted = [(f"{len(lanes) - _MAX_LANES} more lanes are left out", PALE)] if len(lanes) > _MAX_LANES else []
    size = f"height:calc({down}px + 4.5rem);padding-left:{left:.1f}rem;min-width:{min_width_rem}rem"
    return format_figure(heading, plot.draw_axis(x) + drawing, [*keys, *omitted], size) if lanes else ""
