"""Scales, ticks and thinning work for any finite numbers; no extreme is lost; labels are round."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.base.plot import Curve, Scale, average_buckets, downsample, draw_area, format_number, svg_document

finite = st.floats(-1e300, 1e300)
usual = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@settings(max_examples=200, deadline=None)
@given(st.lists(usual, min_size=1, max_size=400), st.integers(2, 40))
def test_thin_keeps_the_extremes_of_each_part_and_both_ends(values: list[float], buckets: int) -> None:
    points = [*enumerate(values)]
    kept = downsample(points, buckets)
    assert set(kept) <= set(points) and list(kept) == sorted(kept, key=lambda p: p[0])
    assert kept[0] == points[0] and kept[-1] == points[-1] and len(kept) <= max(2 * buckets + 2, 2)
    for number in range(buckets):
        part = values[number * len(values) // buckets : (number + 1) * len(values) // buckets]
        inside = [y for x, y in kept if number * len(values) // buckets <= x < (number + 1) * len(values) // buckets]
        assert not part or (min(part) == min(inside) and max(part) == max(inside))


def test_means_averages_equal_parts() -> None:
    assert average_buckets([(n, n % 2) for n in range(40)], 10) == [(4 * n + 1.5, 0.5) for n in range(10)]
    assert average_buckets([(n, n) for n in range(39)], 10) == []


@settings(max_examples=150, deadline=None)
@example([2.2250738585072014e-308], False, True)
@given(st.one_of(st.lists(finite, min_size=1), st.lists(usual, min_size=1)), st.booleans(), st.booleans())
def test_a_scale_exists_for_any_finite_values(values: list[float], log: bool, rounded: bool) -> None:
    scale = Scale.over(values, "x", log=log)
    scale = scale.rounded() if rounded else scale
    ticks = scale.ticks()
    assert all(-1e-6 <= scale.at(value) <= 1 + 1e-6 for value in values)
    assert len(ticks) <= 14 and [v for v, _ in ticks] == sorted({v for v, _ in ticks})
    drawn = svg_document(draw_area(scale, scale, [Curve("c", [(v, v) for v in values])]))
    assert "nan" not in drawn and "inf" not in drawn
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize(
    ("low", "high", "log", "labels"),
    [
        (1, 100_000, False, ["20k", "40k", "60k", "80k", "100k"]),
        (2.07, 10.4, False, ["4", "6", "8", "10"]),
        (0, 3e-4, False, ["0", "5e-5", "1e-4", "1.5e-4", "2e-4", "2.5e-4", "3e-4"]),
        (0.2, 45, True, ["0.2", "0.5", "1", "2", "5", "10", "20"]),
        (1e-4, 45, True, ["1e-4", "0.01", "1"]),
        (20, 1100, True, ["20", "50", "100", "200", "500", "1000"]),
        (3, 4, False, ["3", "3.2", "3.4", "3.6", "3.8", "4"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, log: bool, labels: list[str]) -> None:
    assert [label for _, label in Scale.over([low, high], "x", log=log).ticks()] == labels


def test_a_whole_scale_has_ticks_at_integers_only() -> None:
    assert [label for _, label in Scale.over([1, 3], "step", whole=True).ticks()] == ["1", "2", "3"]


@given(st.floats(1e-9, 1e12))
def test_a_formatted_number_reads_back_as_the_number(value: float) -> None:
    words = format_number(value).replace("k", "e3").replace("M", "e6").replace("G", "e9")
    assert math.isclose(float(words), value, rel_tol=1e-4)
