"""Draw plots as SVG: scales, round ticks, axes with units, and curves reduced without losing their extremes.

A page or a model card can embed the result without a library or a script. Positions are percentages of the drawing
area, so text keeps its size while the plot fills its place. Labels are outside the area (overflow). Curves are in an
inner SVG of 1000 × 1000 that is stretched without stretching its strokes. Colours are attributes, which the style of a
page may override with the classes c0, c1, …
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]
COLOURS = (
    "#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#a16207", "#db2777", "#94a3b8", "#dde3ea",
    "#4d7c0f",
)  # fmt: skip
"""Colours by number. 8 and 9 are grey: for background curves and for waiting."""
GREY = 8
PALE = 9
BUCKETS = 300
"""Parts of a curve that each keep their minimum and maximum; more than a screen can show."""


@dataclass(frozen=True)
class Curve:
    """One named curve."""

    name: str
    points: Points
    colour: int = 0
    faint: bool = False
    """Whether it is drawn behind the others."""
    filled: bool = False
    """Whether the area below it is filled."""
    dots: bool = False
    """Whether each point is marked; useful if there are few."""


@dataclass(frozen=True)
class Scale:
    """The range of values along an axis."""

    low: float
    high: float
    title: str
    """The quantity, with its unit."""
    log: bool = False
    whole: bool = False
    """Whether ticks are whole numbers only."""

    @classmethod
    def over(cls, values: Iterable[float], title: str, *, log: bool = False, whole: bool = False) -> Scale:
        """Return a scale that covers `values`. With `log`, it is logarithmic if they span more than a factor of 50."""
        values = list(values)
        low = min(values)
        high = max(values)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
            margin = max(abs(low), abs(high)) / 2
            low, high = (low - margin, high + margin) if margin > 1e-300 else (-0.5, 0.5)
        return cls(low, high, title, log and low > 1e-300 and high / 50 > low, whole)

    def rounded(self) -> Scale:
        """Return the scale extended to the next round numbers."""
        if self.log:
            return self
        step = _round_step_up(self.high / 5 - self.low / 5)
        first = math.floor(self.low / step + 1e-6)
        last = math.ceil(self.high / step - 1e-6)
        return Scale(first * step, last * step, self.title)

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves avoid infinity near 1e308

    def ticks(self, max_count: int = 6) -> list[tuple[float, str]]:
        """Return about `max_count` round values with their labels, in order."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if math.log10(self.high) - math.log10(self.low) < 2.5 else (1,)
            shown_decades = decades[:: 1 + len(decades) // max_count]
            values = [float(f"{digit}e{decade}") for decade in shown_decades for digit in digits]
        else:
            step = max(_round_step_up(self.high / max_count - self.low / max_count), float(self.whole))
            first = math.ceil(self.low / step - 1e-6)
            last = math.floor(self.high / step + 1e-6)
            values = [n * step for n in range(first, last + 1)]
        return [(value, format_number(value)) for value in values if -1e-6 <= self.at(value) <= 1 + 1e-6]


def _round_step_up(step: float) -> float:
    """Return the smallest round step that is at least `step`: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(-300, math.floor(math.log10(step)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= step * (1 - 1e-9))


def format_number(value: float) -> str:
    """Return a number as a tick label: 2e-4, 0.02, 350, 20k, 1.5M."""
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.5e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(size, 1e4) <= abs(value) < 1e13:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def _split_evenly(points: Points, count: int) -> list[Points]:
    return [points[n * len(points) // count : (n + 1) * len(points) // count] for n in range(count)]


def downsample(points: Points, buckets: int = BUCKETS) -> Points:
    """Return at most two points for each of `buckets` parts, its minimum and maximum, and both ends.

    Args:
        points: Points in order of x.
        buckets: Number of parts.
    """
    if len(points) <= 2 * buckets + 2:
        return points
    parts = _split_evenly(points, buckets)
    extremes = [sorted({min(part, key=lambda q: q[1]), max(part, key=lambda q: q[1])}) for part in parts]
    return [points[0], *(point for pair in extremes for point in pair), points[-1]]


def average_buckets(points: Points, buckets: int = 100) -> Points:
    """Return the mean point of each of `buckets` parts; nothing if the parts have fewer than four points."""
    parts = _split_evenly(points, buckets) if len(points) >= 4 * buckets else []
    return [(math.fsum(x / len(p) for x, _ in p), math.fsum(y / len(p) for _, y in p)) for p in parts]


def draw_area(x: Scale, y: Scale, curves: Sequence[Curve], marks: Iterable[float] = ()) -> str:
    """Draw axes and curves, and vertical dashed lines at the x values `marks`."""
    rows = "".join(
        draw_grid_line(y.at(value), False) + draw_label("-6", _percent(1 - y.at(value)), text, "end", dy=".35em")
        for value, text in y.ticks(7)
    )
    mark_lines = "".join(draw_grid_line(x.at(mark), True, "4") for mark in marks if x.low < mark < x.high)
    layer = stretch("".join(draw_curve(x, y, curve) for curve in curves))
    return draw_axis(x) + rows + draw_label("-52", "-12", y.title, "start", "title") + mark_lines + layer


def draw_axis(x: Scale) -> str:
    """Draw the x axis, with vertical lines at its ticks."""
    return draw_label("100%", "100%", x.title, "end", "title", "2.9em") + "".join(
        draw_grid_line(x.at(value), True) + draw_label(_percent(x.at(value)), "100%", text, "middle", dy="1.5em")
        for value, text in x.ticks()
    )


def draw_grid_line(at: float, is_vertical: bool, dashes: str = "0") -> str:
    """Draw a line across the whole area at the position `at`, from 0 to 1."""
    if is_vertical:
        position = f'x1="{_percent(at)}" x2="{_percent(at)}" y1="0" y2="100%"'
    else:
        position = f'x1="0" x2="100%" y1="{_percent(1 - at)}" y2="{_percent(1 - at)}"'
    return f'<line {position} stroke="#8885" stroke-dasharray="{dashes}"/>'


def draw_label(x: str, y: str, text: str, anchor: str, kind: str = "tick", dy: str = "0", dx: int = 0) -> str:
    """Draw a text; `kind` is its CSS class."""
    return f'<text class="{kind}" x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{escape(text)}</text>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def draw_curve(x: Scale, y: Scale, curve: Curve) -> str:
    """Draw a curve on 1000 × 1000."""
    points = [f"{1000 * x.at(a):.1f},{1000 - 1000 * y.at(b):.1f}" for a, b in curve.points]
    colour = COLOURS[curve.colour]
    width = 1 if curve.faint else 1.6
    if curve.filled:
        points = ["0,1000", *points, "1000,1000"]
    style = (
        f'class="c{curve.colour}" fill="{colour if curve.filled else "none"}" stroke="{colour}" '
        f'stroke-linejoin="round" stroke-linecap="round" stroke-opacity="{0.35 if curve.faint else 1}" '
        'vector-effect="non-scaling-stroke"'
    )
    dots = "".join(f"M{point}h0" for point in points) if curve.dots else ""
    title = f"<title>{escape(curve.name)}</title>"
    line = f'<polyline {style} stroke-width="{width}" points="{" ".join(points)}">{title}</polyline>'
    return line + (f'<path {style} stroke-width="6" d="{dots}"/>' if dots else "")


def stretch(content: str) -> str:
    """Stretch a drawing of 1000 × 1000 over the whole area."""
    size = 'width="100%" height="100%" overflow="visible"'
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" {size}>{content}</svg>'


def svg_document(content: str, width: int = 640, height: int = 240) -> str:
    """Return a standalone SVG file with one area of this many pixels, its labels around it, on white."""
    view = f'viewBox="-60 -40 {width + 80} {height + 90}" font-family="sans-serif" font-size="12"'
    background = '<rect x="-60" y="-40" width="100%" height="100%" fill="white"/>'
    inner = f'<svg width="{width}" height="{height}" overflow="visible">{content}</svg>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{background}{inner}</svg>\n'
