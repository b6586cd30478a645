"""A self-contained HTML page of SVG figures and tables, used for `report.html` and for `plan --html`.

The page needs no other file and no network. The page follows the reader's light or dark mode. On a narrow screen,
figures are stacked and text keeps its size. The script only shows the values at the mouse pointer; the page also works
without the script. All text is escaped, because names and messages come from runs.

A lane is a row of bars over a horizontal axis. A key explains the colours of a figure.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from pathlib import Path

from pipeline.base import plot
from pipeline.base.errors import make_printable
from pipeline.base.plot import BUCKETS, COLOURS, GREY, PALE, Curve, Points, Scale

FIGURE_STYLE = "height:19rem"
"""The CSS of the SVG element of a figure of curves."""
MAX_LABEL_CHARACTERS = 18
"""Longer names of lanes and ticks are shortened."""
_MAX_MARKED_POINTS = 30
"""If a curve has at most this many points, each point is marked."""
_MAX_BUCKETS_OF_FIGURE = 6000
"""The number of parts into which all curves of a figure together are divided. Each curve has at least 8 and at most
`BUCKETS` parts. Each part keeps its minimum and maximum."""
_MAX_LANES = 100
"""The number of lanes that a figure shows. The figure says how many lanes are left out."""
_ASSETS = Path(__file__).parent
"""Folder of report.css and report.js."""


@dataclass(frozen=True)
class Bar:
    """A bar of a lane. Start and end are values of the x axis."""

    start: float
    end: float
    colour: int
    """The index of its colour in `plot.COLOURS`."""
    title: str
    """The text that appears at the mouse pointer."""
    text: str = ""
    """The text inside the bar, which is shown only if the bar is wide enough."""


def format_table(cells: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with the row `cells[0]` as its header; "" if `cells` is empty."""
    if not cells:
        return ""
    tags = ["th"] + ["td"] * (len(cells) - 1)
    rows = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, cells, strict=True))
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
        summary: Label → fact. Empty facts are left out.
        sections: Heading → figures and tables as HTML. Sections without figures and tables are left out.
        notes: Paragraphs after the sections.
        config: The config as YAML.
    """
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in summary.items() if text)
    body = ""
    for heading, elements in sections.items():
        figures = "".join(element for element in elements if element.startswith("<figure"))
        tables = "".join(element for element in elements if not element.startswith("<figure"))
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
    """Return a <figure> with a heading and keys.

    Args:
        heading: The title of the figure.
        drawing: The SVG elements of the figure.
        keys: Pairs of a name and the number of its colour.
        style: The CSS of the SVG element.
        scales: The x and y scales, from which the script computes the values at the mouse pointer. Without scales, the
            script shows no values.
    """
    keys_html = "".join(f'<span class="key"><i class="c{colour}"></i>{escape(name)}</span> ' for name, colour in keys)
    attributes = "".join(
        f' data-{axis}="{scale.low} {scale.high} {int(scale.log)}"' for axis, scale in zip("xy", scales, strict=False)
    )
    return (
        f"<figure{attributes}><figcaption><b>{escape(heading)}</b> {keys_html}<output></output></figcaption>"
        f'<div><svg role="img" aria-label="{escape(heading)}" style="{style}">{drawing}</svg></div></figure>'
    )


def format_image(heading: str, note: str, media_type: str, content: bytes, *, is_small: bool = False) -> str:
    """Return a <figure> with an image. Browsers run no scripts in such an image, and load nothing for it.

    Args:
        heading: The title of the figure.
        note: A text after the title.
        media_type: The MIME type of the image.
        content: The file of the image.
        is_small: Whether the image is enlarged, with visible pixels.
    """
    css_class = ' class="small"' if is_small else ""
    source = f"data:{media_type};base64,{b64encode(content).decode()}"
    return (
        f"<figure><figcaption><b>{escape(heading)}</b> {escape(note)}</figcaption>"
        f'<div><img{css_class} alt="{escape(heading)}, {escape(note)}" src="{escape(source)}"></div></figure>'
    )


def draw_curves(
    heading: str, x: str, y: str, points_by_name: Mapping[str, Points], *, log: str = "", marks: Sequence[float] = ()
) -> str:
    """Return a figure of curves; "" if no curve has two points.

    Of a long curve, only the extremes of each part are drawn. If there are at most two curves, a curve of means is
    added to each long curve.

    Args:
        heading: The title of the figure.
        x: The title of the x axis.
        y: The title of the y axis. If it is `%`, the axis covers at least 0 to 100.
        points_by_name: Name of a curve → its points. Curves without points are left out.
        log: The axes that may be logarithmic (`Scale.from_values`): `x`, `y` or `xy`.
        marks: The x values of vertical lines.
    """
    points_by_name = {name: points for name, points in points_by_name.items() if points}
    if max(map(len, points_by_name.values()), default=0) < 2:
        return ""
    all_points = [point for points in points_by_name.values() for point in points]
    # an x axis that is never logarithmic shows steps or a time, so whole ticks are enough
    x_scale = Scale.from_values((point[0] for point in all_points), x, log="x" in log, whole="x" not in log)
    y_values = [*([0.0, 100.0] if y == "%" else []), *(point[1] for point in all_points)]
    y_scale = Scale.from_values(y_values, y, log="y" in log).extend_to_round_numbers()
    curves: list[Curve] = []
    buckets = min(BUCKETS, max(8, _MAX_BUCKETS_OF_FIGURE // len(points_by_name)))
    for number, (name, points) in enumerate(points_by_name.items()):
        colour = min(number, GREY)  # the curves after the first `GREY` curves are grey
        means = plot.average_buckets(points) if len(points_by_name) <= 2 else ()
        has_dots = len(points) <= _MAX_MARKED_POINTS
        curves.append(Curve(name, plot.downsample(points, buckets), colour, is_faint=bool(means), has_dots=has_dots))
        if means:
            curves.append(Curve(f"{name}, mean", means, colour))
    back_to_front = sorted(curves, key=lambda curve: curve.is_faint)[::-1]
    keys = []
    if len(points_by_name) > 1:
        keys = [(name, number) for number, name in enumerate(points_by_name) if number < GREY]
    if len(points_by_name) > GREY:
        keys.append((f"{len(points_by_name) - GREY} more", GREY))
    drawing = plot.draw_area(x_scale, y_scale, back_to_front, marks)
    return format_figure(heading, drawing, keys, FIGURE_STYLE, (x_scale, y_scale))


def draw_layers(
    heading: str,
    x: str,
    y: str,
    x_values: Sequence[float],
    y_values_by_name: Mapping[str, Sequence[float]],
    colours: Mapping[str, int],
) -> str:
    """Return a figure of stacked layers; "" if there are fewer than two x values or no layer has a positive value.

    Args:
        heading: The title of the figure.
        x: The title of the x axis.
        y: The title of the y axis.
        x_values: The x values.
        y_values_by_name: Name of a layer → its height at each x value. Layers without a positive value are left out.
        colours: Name of a layer → number of its colour.
    """
    layers = {name: values for name, values in y_values_by_name.items() if any(value > 0 for value in values)}
    if len(x_values) < 2 or not layers:
        return ""
    # the upper edge of each layer, from the lowest layer to the highest
    tops = [*accumulate(layers.values(), lambda below, values: [a + b for a, b in zip(below, values, strict=True)])]
    x_scale = Scale.from_values(x_values, x, whole=True)
    y_scale = Scale.from_values([0.0, *tops[-1]], y).extend_to_round_numbers()
    # a name such as `communication_exposed` is shown as "communication, exposed"
    keys = [(name.replace("_", ", "), colours[name]) for name in layers]
    curves = [
        Curve(name, [*zip(x_values, top, strict=True)], colour, is_filled=True)
        for (name, colour), top in zip(keys, tops, strict=True)
    ]
    drawing = plot.draw_area(x_scale, y_scale, curves[::-1])  # the highest layer is drawn first, so it is behind
    return format_figure(heading, drawing, keys, FIGURE_STYLE)


def draw_lanes(
    heading: str,
    x: Scale,
    lanes: Sequence[tuple[str, Sequence[Bar]]],
    keys: Sequence[tuple[str, int]] = (),
    min_width_rem: int = 0,
) -> str:
    """Return a figure of lanes over one horizontal axis; "" if there are no lanes.

    Args:
        heading: The title of the figure.
        x: The scale of the axis.
        lanes: The name and the bars of each lane. Lanes without a name are thin.
        keys: Pairs of a name and the number of its colour.
        min_width_rem: The minimum width in rem. A narrower screen scrolls.
    """
    drawing = ""
    top_px = 4
    # a lane with a name is 22 px high, a thin lane 7 px; the gap after it is 6 px or 2 px
    for name, bars in lanes[:_MAX_LANES]:
        height_px = 22 if name else 7
        middle = f"{top_px + height_px / 2}"
        label = name if len(name) <= MAX_LABEL_CHARACTERS else f"{name[: MAX_LABEL_CHARACTERS - 1]}…"
        drawing += plot.draw_label("-8", middle, label, "end", dy=".35em")
        for bar in bars:
            start = 100 * x.position(bar.start)
            width = 100 * (x.position(bar.end) - x.position(bar.start))
            if width < 0.03:
                continue  # too narrow to be visible
            drawing += (
                f'<rect class="c{bar.colour}" fill="{COLOURS[bar.colour]}" x="{start:.3f}%" width="{width:.3f}%" '
                f'y="{top_px}" height="{height_px}"><title>{escape(bar.title)}</title></rect>'
            )
            # A character takes 0.7 % of a wide screen's width, and three times as much of a phone's width. On a narrow
            # screen, report.css hides text of the class `wide`. A figure with a minimum width keeps its width instead.
            if bar.text and width > 0.7 * len(bar.text):
                css_class = "in" if min_width_rem or width > 2.2 * len(bar.text) else "in wide"
                drawing += plot.draw_label(f"{start:.3f}%", middle, bar.text, "start", css_class, ".35em", 4)
        top_px += height_px + (6 if name else 2)
    # the names are to the left of the lanes; a character takes about 0.55 rem
    left_rem = 1.5 + 0.55 * max((min(len(name), MAX_LABEL_CHARACTERS) for name, _ in lanes), default=0)
    note = [(f"{len(lanes) - _MAX_LANES} more lanes are left out", PALE)] if len(lanes) > _MAX_LANES else []
    # 4.5rem is about the padding that report.css adds above and below the drawing area, for the labels of the axis
    style = f"height:calc({top_px}px + 4.5rem);padding-left:{left_rem:.1f}rem;min-width:{min_width_rem}rem"
    return format_figure(heading, plot.draw_axis(x) + drawing, [*keys, *note], style) if lanes else ""
