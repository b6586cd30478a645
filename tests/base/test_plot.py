"""Tests of scales, ticks, downsampling and number labels of plots."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.base.plot import Curve, Scale, average_buckets, downsample, draw_area, format_number, svg_document

FINITE_NUMBERS = st.floats(-1e300, 1e300)
ROUNDED_NUMBERS = st.floats(-1e9, 1e9).map(lambda x: round(x, 6))


@settings(max_examples=200)
@given(st.lists(ROUNDED_NUMBERS, min_size=1, max_size=400), st.integers(2, 40))
def test_downsample_keeps_the_extremes_of_each_bucket_and_both_ends(values: list[float], bucket_count: int) -> None:
    points = [*enumerate(values)]
    kept_points = downsample(points, bucket_count)
    assert set(kept_points) <= set(points) and list(kept_points) == sorted(kept_points, key=lambda point: point[0])
    assert kept_points[0] == points[0] and kept_points[-1] == points[-1]
    assert len(kept_points) <= 2 * bucket_count + 2
    for number in range(bucket_count):
        start = number * len(values) // bucket_count
        end = (number + 1) * len(values) // bucket_count
        bucket = values[start:end]
        kept_bucket_values = [y for x, y in kept_points if start <= x < end]
        assert not bucket or (min(bucket) == min(kept_bucket_values) and max(bucket) == max(kept_bucket_values))


def test_average_buckets_returns_means_unless_a_bucket_has_fewer_than_four_points() -> None:
    assert average_buckets([(n, n % 2) for n in range(40)], 10) == [(4 * n + 1.5, 0.5) for n in range(10)]
    assert average_buckets([(n, n) for n in range(39)], 10) == []


@settings(max_examples=150)
@example([2.2250738585072014e-308], False, True)  # the smallest normal number
@given(
    st.one_of(st.lists(FINITE_NUMBERS, min_size=1), st.lists(ROUNDED_NUMBERS, min_size=1)), st.booleans(), st.booleans()
)
def test_any_finite_values_can_be_drawn(values: list[float], is_logarithmic: bool, is_extended: bool) -> None:
    scale = Scale.from_values(values, "x", log=is_logarithmic)
    scale = scale.extend_to_round_numbers() if is_extended else scale
    ticks = scale.ticks()
    assert all(-1e-6 <= scale.position(value) <= 1 + 1e-6 for value in values)
    assert len(ticks) <= 14 and [value for value, _ in ticks] == sorted({value for value, _ in ticks})
    document = svg_document(draw_area(scale, scale, [Curve("c", [(value, value) for value in values])]))
    assert "nan" not in document and "inf" not in document
    ElementTree.fromstring(document)


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
def test_ticks_have_round_numbers_as_labels(low: float, high: float, log: bool, labels: list[str]) -> None:
    assert [label for _, label in Scale.from_values([low, high], "x", log=log).ticks()] == labels


def test_a_scale_of_integers_has_ticks_only_at_integers() -> None:
    assert [label for _, label in Scale.from_values([1, 3], "step", whole=True).ticks()] == ["1", "2", "3"]


@given(st.floats(1e-9, 1e12))
def test_format_number_has_a_relative_error_below_1e_4(value: float) -> None:
    text = format_number(value).replace("k", "e3").replace("M", "e6").replace("G", "e9")
    assert math.isclose(float(text), value, rel_tol=1e-4)
