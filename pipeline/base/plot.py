"""Plots as SVG: scales, ticks at round numbers, axes with their units, curves thinned so that no extreme is lost.

Made here, so that a page or a model card needs neither a library nor a script. Text keeps its size and pictures fill
their place, on a phone as on a wide screen: all places are percentages of the drawing area (`area`), whose labels stand
around it (overflow), and curves lie in an inner picture of 1000 × 1000 that is stretched, their strokes are not.
`document` makes a file of its own of such an area. Colours stand in attributes, which a page's own style may overrule
by the classes c0, c1, …
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
"""By number; 8 and 9 are grey, for what is behind and for waiting."""
GREY, PALE = 8, 9
BUCKETS = 300
"""So many parts of a curve keep their least and their greatest value: more than a screen shows."""


@dataclass(frozen=True)
class Curve:
    """One curve, its name for people."""

    name: str
    points: Points
    colour: int = 0
    faint: bool = False
    """Behind the others."""
    filled: bool = False
    """Down to the axis."""
    dots: bool = False
    """Whether each point is marked: where there are few."""


@dataclass(frozen=True)
class Scale:
    """A range of values along an axis."""

    low: float
    high: float
    title: str
    """What is shown, with its unit."""
    log: bool = False
    whole: bool = False
    """Whether there is nothing between whole numbers."""

    @classmethod
    def over(cls, values: Iterable[float], title: str, *, log: bool = False, whole: bool = False) -> Scale:
        """The scale of such values; `log`: logarithmic where they are positive and differ by more than fifty times."""
        found = list(values)
        low, high = min(found), max(found)
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):
            around = max(abs(low), abs(high)) / 2
            low, high = (low - around, high + around) if around > 1e-300 else (-0.5, 0.5)
        return cls(low, high, title, log and low > 1e-300 and high / 50 > low, whole)

    def rounded(self) -> Scale:
        """The same up to the next round numbers."""
        if self.log:
            return self
        step = _step(self.high / 5 - self.low / 5)
        low, high = math.floor(self.low / step + 1e-6), math.ceil(self.high / step - 1e-6)
        return Scale(low * step, high * step, self.title)

    def at(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: of 1e308 no infinity comes

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """At most some `most` round values on it with their labels, in order."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            digits = (1, 2, 5) if math.log10(self.high) - math.log10(self.low) < 2.5 else (1,)
            values = [float(f"{digit}e{decade}") for decade in decades[:: 1 + len(decades) // most] for digit in digits]
        else:
            step = max(_step(self.high / most - self.low / most), float(self.whole))
            values = [
                n * step for n in range(math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6) + 1)
            ]
        return [(value, short(value)) for value in values if -1e-6 <= self.at(value) <= 1 + 1e-6]


def _step(least: float) -> float:
    """The least round step that is not below this one: 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(-300, math.floor(math.log10(least)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least * (1 - 1e-9))


def short(value: float) -> str:
    """A number as a tick tells it: 2e-4, 0.02, 350, 20k, 1.5M."""
    if 0 < abs(value) < 1e-3:
        digits, power = f"{value:.5e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if max(size, 1e4) <= abs(value) < 1e13:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def _parts(points: Points, number: int) -> list[Points]:
    """So many parts of equal length, one after the other."""
    return [points[n * len(points) // number : (n + 1) * len(points) // number] for n in range(number)]


def thin(points: Points, buckets: int = BUCKETS) -> Points:
    """Points in order of x, at most two for each of `buckets` parts: its least and its greatest y; and both ends."""
    if len(points) <= 2 * buckets + 2:
        return points
    kept = [sorted({min(p, key=lambda q: q[1]), max(p, key=lambda q: q[1])}) for p in _parts(points, buckets)]
    return [points[0], *(point for pair in kept for point in pair), points[-1]]


def means(points: Points, buckets: int = 100) -> Points:
    """The mean point of each of `buckets` parts; nothing where there are too few points to gain by it."""
    parts = _parts(points, buckets) if len(points) >= 4 * buckets else []
    return [(math.fsum(x / len(p) for x, _ in p), math.fsum(y / len(p) for _, y in p)) for p in parts]


def area(x: Scale, y: Scale, curves: Sequence[Curve], marks: Iterable[float] = ()) -> str:
    """Axes and curves; `marks`: where upright lines stand."""
    rows = "".join(
        rule(y.at(value), False) + label("-6", _percent(1 - y.at(value)), text, "end", dy=".35em")
        for value, text in y.ticks(7)
    )
    upright = "".join(rule(x.at(mark), True, "4") for mark in marks if x.low < mark < x.high)
    layer = stretched("".join(drawn(x, y, curve) for curve in curves))
    return axis(x) + rows + label("-52", "-12", y.title, "start", "title") + upright + layer


def axis(x: Scale) -> str:
    """The axis below, with upright lines at its ticks."""
    return label("100%", "100%", x.title, "end", "title", "2.9em") + "".join(
        rule(x.at(value), True) + label(_percent(x.at(value)), "100%", text, "middle", dy="1.5em")
        for value, text in x.ticks()
    )


def rule(at: float, upright: bool, dashes: str = "0") -> str:
    """A line across the whole area."""
    if upright:
        place = f'x1="{_percent(at)}" x2="{_percent(at)}" y1="0" y2="100%"'
    else:
        place = f'x1="0" x2="100%" y1="{_percent(1 - at)}" y2="{_percent(1 - at)}"'
    return f'<line {place} stroke="#8885" stroke-dasharray="{dashes}"/>'


def label(x: str, y: str, words: str, anchor: str, kind: str = "tick", dy: str = "0", dx: int = 0) -> str:
    """A text at some place."""
    return f'<text class="{kind}" x="{x}" y="{y}" dx="{dx}" dy="{dy}" text-anchor="{anchor}">{escape(words)}</text>'


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def drawn(x: Scale, y: Scale, curve: Curve) -> str:
    """A curve on 1000 × 1000."""
    points = [f"{1000 * x.at(a):.1f},{1000 - 1000 * y.at(b):.1f}" for a, b in curve.points]
    colour, width = COLOURS[curve.colour], 1 if curve.faint else 1.6
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


def stretched(inner: str) -> str:
    """What is drawn on 1000 × 1000 as a layer over the whole area."""
    whole = 'width="100%" height="100%" overflow="visible"'
    return f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" {whole}>{inner}</svg>'


def document(inner: str, width: int = 640, height: int = 240) -> str:
    """A whole file with one area of that many pixels, its labels around it, on white."""
    whole = f'viewBox="-60 -40 {width + 80} {height + 90}" font-family="sans-serif" font-size="12"'
    ground = '<rect x="-60" y="-40" width="100%" height="100%" fill="white"/>'
    inner = f'<svg width="{width}" height="{height}" overflow="visible">{inner}</svg>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {whole}>{ground}{inner}</svg>\n'
