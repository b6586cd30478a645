"""Draw plots as SVG: scales, round ticks, axes with units, and curves with fewer points but the same extremes.

A page or a model card can embed the result without a library or a script. Positions are percentages of the drawing
area, so the plot adapts to any size and text keeps its size. Labels are outside the area (overflow). Curves are in an
inner SVG of 1000 × 1000 units, which is stretched without stretching its strokes. Colours are attributes. The style of
a page may override them with the classes c0, c1, …
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
"""Pairs of x and y."""
COLOURS = (
    "#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#db2777", "#94a3b8", "#dde3ea",
    "#4d7c0f",
)  # fmt: skip
"""Colours by number."""
GREY = 8
"""The number of the grey colour, for curves in the background."""
PALE = 9
"""The number of the pale colour, for waiting time and for notes."""
BUCKETS = 300
"""Number of parts into which a long curve is divided. Each part keeps its minimum and maximum."""


@dataclass(frozen=True)
class Curve:
    """One named curve."""

    name: str
    points: Points
    colour: int = 0
    """The index of its colour in `COLOURS`."""
    is_faint: bool = False
    """Whether the curve is drawn thin and half transparent, behind the other curves."""
    is_filled: bool = False
    """Whether the area below the curve is filled."""
    has_dots: bool = False
    """Whether each point has a dot. Dots are useful if there are few points."""


@dataclass(frozen=True)
class Scale:
    """The range of values along an axis."""

    low: float
    high: float
    title: str
    """The quantity, with its unit."""
    log: bool = False
    """Whether the scale is logarithmic."""
    whole: bool = False
    """Whether ticks are whole numbers only."""

    @classmethod
    def from_values(cls, values: Iterable[float], title: str, *, log: bool = False, whole: bool = False) -> Scale:
        """Return a scale from the smallest to the largest of `values`. If all are nearly equal, the scale is wider.

        Args:
            values: the values to show.
            title: the quantity, with its unit.
            log: whether the scale is logarithmic if the values are positive and span more than a factor of 50.
            whole: whether ticks are whole numbers only.
        """
        values = list(values)
        low = min(values)
        high = max(values)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
            margin = max(abs(low), abs(high)) / 2
            low, high = (low - margin, high + margin) if margin > 1e-300 else (-0.5, 0.5)  # all values are about 0
        return cls(low, high, title, log and low > 1e-300 and high / 50 > low, whole)

    def extend_to_round_numbers(self) -> Scale:
        """Return this scale, extended to round numbers at both ends. A logarithmic scale is returned unchanged.

        Ticks of the result need not be whole numbers (`whole`).
        """
        if self.log:
            return self
        step = _round_step_up(self.high / 5 - self.low / 5)
        # 1e-6: a bound that is round except for a rounding error is not moved to the next round number
        first = math.floor(self.low / step + 1e-6)
        last = math.ceil(self.high / step - 1e-6)
        return Scale(first * step, last * step, self.title)

    def position(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves avoid an overflow near 1e308

    def ticks(self, max_count: int = 6) -> list[tuple[float, str]]:
        """Return about `max_count` round values in the range with their labels, in order."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if math.log10(self.high) - math.log10(self.low) < 2.5 else (1,)
            shown_decades = decades[:: 1 + len(decades) // max_count]
            values = [float(f"{digit}e{decade}") for decade in shown_decades for digit in digits]
        else:
            step = max(_round_step_up(self.high / max_count - self.low / max_count), float(self.whole))
            # 1e-6: a tick at a bound is kept in spite of rounding errors
            first = math.ceil(self.low / step - 1e-6)
            last = math.floor(self.high / step + 1e-6)
            values = [n * step for n in range(first, last + 1)]
        return [(value, format_number(value)) for value in values if -1e-6 <= self.position(value) <= 1 + 1e-6]


def _round_step_up(step: float) -> float:
    """Return the smallest round step that is at least `step`: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(-300, math.floor(math.log10(step)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= step * (1 - 1e-9))


def format_number(value: float) -> str:
    """Return a number as a tick label: 2e-4, 0.02, 350, 5000, 20k, 1.5M. From 10,000 on, k, M and G shorten numbers."""
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.5e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(size, 1e4) <= abs(value) < 1e13:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def _split_evenly(points: Points, count: int) -> list[Points]:
    """Return `points` as `count` parts, which differ in length by at most one."""
    return [points[n * len(points) // count : (n + 1) * len(points) // count] for n in range(count)]


def downsample(points: Points, buckets: int = BUCKETS) -> Points:
    """Return the first and last point, and the points with the minimum and maximum y of each part of a curve.

    Args:
        points: The points in order of x. If there are at most `2 * buckets + 2`, all are returned.
        buckets: The number of parts into which the points are divided.
    """
    if len(points) <= 2 * buckets + 2:
        return points
    parts = _split_evenly(points, buckets)
    extremes = [sorted({min(part, key=lambda xy: xy[1]), max(part, key=lambda xy: xy[1])}) for part in parts]
    return [points[0], *(point for pair in extremes for point in pair), points[-1]]


def average_buckets(points: Points, buckets: int = 100) -> Points:
    """Return the mean point of each of `buckets` parts; nothing if there are fewer than four points for each part."""
    parts = _split_evenly(points, buckets) if len(points) >= 4 * buckets else []
    return [(math.fsum(x / len(part) for x, _ in part), math.fsum(y / len(part) for _, y in part)) for part in parts]


def draw_area(x: Scale, y: Scale, curves: Sequence[Curve], marks: Iterable[float] = ()) -> str:
    """Return the SVG elements of the axes, the curves, and vertical dashed lines at the x values `marks`."""
    y_ticks = "".join(
        draw_grid_line(y.position(value), is_vertical=False)
        + draw_label("-6", _format_percent(1 - y.position(value)), text, "end", dy=".35em")
        for value, text in y.ticks(7)
    )
    y_title = draw_label("-52", "-12", y.title, "start", "title")
    mark_lines = "".join(
        draw_grid_line(x.position(mark), is_vertical=True, dashes="4") for mark in marks if x.low < mark < x.high
    )
    curves_svg = stretch("".join(draw_curve(x, y, curve) for curve in curves))
    return draw_axis(x) + y_ticks + y_title + mark_lines + curves_svg


def draw_axis(x: Scale) -> str:
    """Return the SVG elements of the x axis, with vertical lines at its ticks."""
    return draw_label("100%", "100%", x.title, "end", "title", "2.9em") + "".join(
        draw_grid_line(x.position(value), is_vertical=True)
        + draw_label(_format_percent(x.position(value)), "100%", text, "middle", dy="1.5em")
        for value, text in x.ticks()
    )


def draw_grid_line(position: float, is_vertical: bool, dashes: str = "0") -> str:
    """Return a line across the whole area.

    Args:
        position: The position of the line from 0 to 1: from left to right, or from bottom to top.
        is_vertical: Whether the line is vertical.
        dashes: The SVG attribute `stroke-dasharray`.
    """
    if is_vertical:
        x = _format_percent(position)
        ends = f'x1="{x}" x2="{x}" y1="0" y2="100%"'
    else:
        y = _format_percent(1 - position)
        ends = f'x1="0" x2="100%" y1="{y}" y2="{y}"'
    return f'<line {ends} stroke="#8885" stroke-dasharray="{dashes}"/>'


def draw_label(x: str, y: str, text: str, anchor: str, css_class: str = "tick", dy: str = "0", dx: int = 0) -> str:
    """Return an SVG element with a text.

    Args:
        x, y, dx, dy: the attributes of the same name.
        text: the text.
        anchor: the attribute `text-anchor`.
        css_class: the attribute `class`.
    """
    return f'<text class="{css_class}" x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{escape(text)}</text>'


def _format_percent(share: float) -> str:
    """Return a share from 0 to 1 as a percentage with two decimals."""
    return f"{100 * share:.2f}%"


def draw_curve(x: Scale, y: Scale, curve: Curve) -> str:
    """Return the SVG elements of a curve, in an area of 1000 × 1000 units."""
    points = [f"{1000 * x.position(a):.1f},{1000 - 1000 * y.position(b):.1f}" for a, b in curve.points]
    colour = COLOURS[curve.colour]
    width = 1 if curve.is_faint else 1.6
    if curve.is_filled:  # close the outline along the x axis; the curve begins and ends at the ends of the axis
        points = ["0,1000", *points, "1000,1000"]
    style = (
        f'class="c{curve.colour}" fill="{colour if curve.is_filled else "none"}" stroke="{colour}" '
        f'stroke-linejoin="round" stroke-linecap="round" stroke-opacity="{0.35 if curve.is_faint else 1}" '
        'vector-effect="non-scaling-stroke"'
    )
    # a line of length 0 with round ends is drawn as a dot
    dots = "".join(f"M{point}h0" for point in points) if curve.has_dots else ""
    title = f"<title>{escape(curve.name)}</title>"
    line = f'<polyline {style} stroke-width="{width}" points="{" ".join(points)}">{title}</polyline>'
    return line + (f'<path {style} stroke-width="6" d="{dots}"/>' if dots else "")


def stretch(content: str) -> str:
    """Return an SVG element that stretches `content`, a drawing of 1000 × 1000 units, over the whole area."""
    size = 'width="100%" height="100%" overflow="visible"'
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" {size}>{content}</svg>'


def svg_document(content: str, width: int = 640, height: int = 240) -> str:
    """Return a standalone SVG file with a white background.

    Args:
        content: The SVG elements of the drawing area.
        width: The width of the drawing area in pixels. The labels are outside this area.
        height: The height of the drawing area in pixels.
    """
    # labels need 60 px to the left of the area, 20 to the right, 40 above and 50 below
    view = f'viewBox="-60 -40 {width + 80} {height + 90}" font-family="sans-serif" font-size="12"'
    background = '<rect x="-60" y="-40" width="100%" height="100%" fill="white"/>'
    inner = f'<svg width="{width}" height="{height}" overflow="visible">{content}</svg>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{background}{inner}</svg>\n'
