"""Tests of the order of the samples of one source, a pseudorandom permutation that never changes between versions."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.sample_order import ORDER_VERSION, compute_index_range, compute_indices, permute

EDGE_SIZES = [
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    13,
    15,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    97,
    255,
    256,
    257,
    997,
    1023,
    1025,
    4097,
    65537,
]

# results of the first version, which every version must return
GOLDEN_FIRST = [294, 318, 614, 517, 177, 743, 702, 433, 848, 265, 450, 963]
GOLDEN_HASH = "e333246f93b72b9319774ee8ac00c94d3c8d139e3246d7f0447b2937169634b1"
GOLDEN_LARGE = [965273089618, 973923986883, 123771676308, 1772204661]


def permute_epoch(seed: int, epoch: int, sample_count: int) -> np.ndarray:
    """Return the order of a whole epoch."""
    return permute(seed, epoch, np.arange(sample_count, dtype=np.int64), sample_count)


def permute_one(seed: int, epoch: int, position: int, sample_count: int) -> int:
    """Return the index at a position of an epoch of `sample_count` samples, computed with Python integers.

    A Feistel network of 12 rounds is applied until the result is less than `sample_count`.
    """
    half = next(bits for bits in range(1, 64) if 4**bits >= sample_count)
    mask = 2**half - 1
    keys = [
        hashlib.sha256(f"sluice order 1 seed {seed} epoch {epoch} round {i}".encode()).digest()[:8] for i in range(12)
    ]
    while True:
        left = position >> half
        right = position & mask
        for key in keys:
            mixed = (right + int.from_bytes(key, "little")) % 2**64
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & mask)
        position = (left << half) | right
        if position < sample_count:
            return position


@settings(max_examples=60)
@given(st.data(), st.integers(1, 2**62), st.integers(0, 2**40), st.integers(0, 2**40))
def test_the_permutation_equals_one_computed_with_python_integers(
    data: st.DataObject, sample_count: int, seed: int, epoch: int
) -> None:
    positions = data.draw(st.lists(st.integers(0, sample_count - 1), min_size=1, max_size=20))
    expected = [permute_one(seed, epoch, position, sample_count) for position in positions]
    assert permute(seed, epoch, np.array(positions, dtype=np.int64), sample_count).tolist() == expected


@pytest.mark.parametrize("sample_count", EDGE_SIZES)
def test_each_index_occurs_once_at_edge_sizes(sample_count: int) -> None:
    for epoch in range(3):
        assert np.array_equal(np.sort(permute_epoch(1, epoch, sample_count)), np.arange(sample_count))


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**64), st.integers(0, 10**9))
def test_each_index_occurs_once(sample_count: int, seed: int, epoch: int) -> None:
    order = permute_epoch(seed, epoch, sample_count)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(sample_count))


def test_permuting_some_positions_returns_their_indices_in_the_whole_epoch() -> None:
    epoch_order = permute_epoch(3, 2, 1000)
    positions = np.random.default_rng(0).integers(0, 1000, (7, 11))
    assert np.array_equal(permute(3, 2, positions, 1000), epoch_order[positions])


def test_other_seeds_and_epochs_have_other_orders() -> None:
    orders = [permute_epoch(seed, epoch, 1000) for seed in range(4) for epoch in range(4)]
    for i, order in enumerate(orders):
        for earlier_order in orders[:i]:
            # Two independent orders agree at 1 position on average. The probability of more than 8 is 1e-6.
            assert np.count_nonzero(order == earlier_order) <= 8


@pytest.mark.parametrize("sample_count", [2, 3, 5, 10, 50])
def test_each_index_is_equally_likely_at_each_position(sample_count: int) -> None:
    """Chi-square test of the counts of (position, index).

    It has (sample_count - 1)^2 degrees of freedom, because the sums of rows and columns are fixed.
    """
    epochs = 2000
    counts = np.zeros((sample_count, sample_count))
    for epoch in range(epochs):
        counts[np.arange(sample_count), permute_epoch(7, epoch, sample_count)] += 1
    chi_square = ((counts - epochs / sample_count) ** 2).sum() * sample_count / epochs
    degrees_of_freedom = (sample_count - 1) ** 2
    assert abs(chi_square - degrees_of_freedom) < 5 * np.sqrt(2 * degrees_of_freedom)


def test_adjacent_positions_have_unrelated_indices() -> None:
    sample_count = 100_000
    order = permute_epoch(1, 0, sample_count)
    differences = np.diff(order)
    # In a random order, about two pairs of adjacent positions have adjacent indices.
    # Positions and indices are uncorrelated.
    assert np.count_nonzero(np.abs(differences) == 1) <= 12
    assert abs(np.corrcoef(order, np.arange(sample_count))[0, 1]) < 5 / np.sqrt(sample_count)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / np.sqrt(sample_count)
    # The indices of each tenth of the epoch are spread evenly over the dataset (chi-square, 81 degrees of freedom).
    table = np.histogram2d(np.arange(sample_count), order, bins=10)[0]
    assert ((table - sample_count / 100) ** 2).sum() / (sample_count / 100) < 81 + 6 * np.sqrt(2 * 81)


def test_a_range_may_span_several_epochs() -> None:
    sample_count = 10
    seed = 5
    orders = np.concatenate([permute_epoch(seed, epoch, sample_count) for epoch in range(4)])
    assert np.array_equal(compute_index_range(seed, 0, 40, sample_count), orders)
    assert np.array_equal(compute_index_range(seed, 8, 4, sample_count), orders[8:12])  # across the end of an epoch
    assert np.array_equal(compute_index_range(seed, 7, 25, sample_count), orders[7:32])  # larger than the dataset
    assert compute_index_range(seed, 3, 0, sample_count).shape == (0,)


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(0, 10**6), st.integers(1, 60))
def test_indices_of_sample_numbers_follow_from_epoch_and_position(sample_count: int, start: int, count: int) -> None:
    expected = [
        permute(1, number // sample_count, np.array([number % sample_count]), sample_count)[0]
        for number in range(start, start + count)
    ]
    assert compute_index_range(1, start, count, sample_count).tolist() == expected
    reversed_numbers = np.arange(start, start + count)[::-1].copy()
    assert compute_indices(1, reversed_numbers, sample_count).tolist() == expected[::-1]


def test_the_order_never_changes() -> None:
    """If this test fails, existing runs would resume with other samples. Increase ORDER_VERSION in that case."""
    assert ORDER_VERSION == 1
    assert permute(1, 0, np.arange(12), 1000).tolist() == GOLDEN_FIRST
    assert hashlib.sha256(permute_epoch(1, 0, 1000).astype("<i8").tobytes()).hexdigest() == GOLDEN_HASH
    assert permute(1, 3, np.arange(4), 10**12).tolist() == GOLDEN_LARGE


def test_memory_does_not_depend_on_the_size_of_the_dataset() -> None:
    tracemalloc.start()
    try:
        order = permute(1, 0, np.arange(10), 10**12)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(order.tolist())) == 10
    assert order.min() >= 0
    assert order.max() < 10**12
    assert peak < 1_000_000


@pytest.mark.parametrize(("positions", "sample_count"), [([0], 0), ([5], 5), ([-1], 5), ([0], 2**63)])
def test_arguments_out_of_range_are_an_error(positions: list[int], sample_count: int) -> None:
    with pytest.raises(ValueError, match=r"range|needs"):
        permute(1, 0, np.array(positions, dtype=np.int64), sample_count)
