"""Tests of the order of the samples of a mixture, which is compared with a simple implementation that uses counters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.datasets import MixtureConfig
from pipeline.data.sample_order import WEIGHT_SCALE, GlobalOrderSampler, Mixture, permute
from pipeline.data.samples import MappedDataset
from tests.support.errors import raises_error

SOURCE_NAMES = ["web", "code", "books", "math"]


def make_config(weights: Sequence[tuple[int, Sequence[float]]]) -> MixtureConfig:
    """Return a mixture. Each pair of `weights` has a step, and the weights of the sources from this step on."""
    names = SOURCE_NAMES[: len(weights[0][1])]
    phases = [{"from_step": step, "weights": dict(zip(names, values, strict=True))} for step, values in weights]
    return MixtureConfig.model_validate({"sources": {name: {"source": "x.txt"} for name in names}, "weights": phases})


def list_indices(seed: int, sizes: dict[str, int], config: MixtureConfig, global_batch: int, samples: int) -> list[int]:
    """Return the dataset indices of the first `samples` samples, computed one after another with counters.

    `sizes` has the number of samples of each source.
    """
    counts = dict.fromkeys(sizes, 0)
    indices = []
    names = list(sizes)
    first_indices = {name: sum(list(sizes.values())[:number]) for number, name in enumerate(names)}
    for sample in range(samples):
        phase = [phase for phase in config.weights if (phase.from_step - 1) * global_batch <= sample][-1]
        total = sum(phase.weights.values())
        exact_shares = [phase.weights[name] / total * WEIGHT_SCALE for name in names]
        shares = [max(round(share), int(share > 0)) for share in exact_shares]
        # The position of the sample in its phase. Each source takes its share of the positions that are not yet taken.
        remaining = sample - (phase.from_step - 1) * global_batch
        remaining_share = sum(shares)
        source = names[-1]
        for name, share in zip(names, shares, strict=True):
            if share:
                count_before, count_after = (
                    int(Fraction(number * share, remaining_share) + Fraction(1, 2))
                    for number in (remaining, remaining + 1)
                )
                if count_after > count_before:
                    source = name
                    break
                remaining -= count_before
            remaining_share -= share
        epoch, position = divmod(counts[source], sizes[source])
        key = int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:8])
        indices.append(first_indices[source] + int(permute(key, epoch, np.array([position]), sizes[source])[0]))
        counts[source] += 1
    return indices


@st.composite
def generate_mixtures(draw: Any) -> tuple[dict[str, int], MixtureConfig, int]:
    """Generate the sizes of sources, a mixture with their weights, and a global batch."""
    source_count = draw(st.integers(1, 4))
    weight = st.one_of(st.integers(0, 9), st.floats(0, 1e6, allow_nan=False))
    weight_lists = st.lists(weight, min_size=source_count, max_size=source_count).filter(lambda row: sum(row) > 0)
    steps = sorted(draw(st.sets(st.integers(2, 40), max_size=3)))
    config = make_config([(step, draw(weight_lists)) for step in (1, *steps)])
    return {name: draw(st.integers(1, 50)) for name in SOURCE_NAMES[:source_count]}, config, draw(st.integers(1, 12))


@settings(max_examples=25)
@given(generate_mixtures(), st.integers(0, 5))
def test_indices_and_counts_equal_those_computed_with_counters(
    mixture: tuple[dict[str, int], MixtureConfig, int], seed: int
) -> None:
    sizes, config, global_batch = mixture
    order = Mixture(seed, sizes, config, global_batch)
    expected = list_indices(seed, sizes, config, global_batch, 300)
    assert order.compute_indices(np.arange(300)).tolist() == expected
    shuffled_positions = np.random.default_rng(seed).permutation(300).reshape(20, 15)
    assert order.compute_indices(shuffled_positions).tolist() == np.array(expected)[shuffled_positions].tolist()
    first_indices = np.cumsum([0, *sizes.values()])
    counts = np.bincount(np.searchsorted(first_indices, expected, side="right") - 1, minlength=len(sizes))
    assert order.count_by_source(np.array([300]))[:, 0].tolist() == counts.tolist()


@settings(max_examples=60)
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=4), st.integers(0, 10**9))
def test_the_count_of_each_source_is_close_to_its_share(weights: list[float], samples: int) -> None:
    sizes = dict.fromkeys(SOURCE_NAMES[: len(weights)], 1000)
    counts = Mixture(1, sizes, make_config([(1, weights)]), 8).count_by_source(np.array([samples]))[:, 0]
    assert counts.sum() == samples
    for count, weight in zip(counts.tolist(), weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) <= len(weights) + samples * len(weights) / WEIGHT_SCALE


class UnreadDataset(MappedDataset):
    """A dataset of a given size that is never read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("samples_consumed", [0, 24, 88])
def test_any_number_of_ranks_reads_the_same_order_after_a_resume(ranks: int, samples_consumed: int) -> None:
    sizes = {"web": 30, "code": 7}
    config = make_config([(1, [3, 1]), (6, [1, 1]), (12, [0, 1])])
    order = Mixture(5, sizes, config, 8)

    def read_steps(rank: int) -> list[list[int]]:
        sampler = GlobalOrderSampler(
            UnreadDataset(37), global_batch=8, seed=5, samples_consumed=samples_consumed, num_replicas=ranks, rank=rank,
            order=order.compute_indices,
        )  # fmt: skip
        steps = iter(sampler)
        return [next(steps).tolist() for _ in range(10)]

    steps = zip(*map(read_steps, range(ranks)), strict=True)
    expected = list_indices(5, sizes, config, 8, samples_consumed + 80)
    assert [index for step in steps for indices in step for index in indices] == expected[samples_consumed:]


def test_each_source_has_independent_epochs_with_each_sample_once() -> None:
    sizes = {"web": 30, "code": 7}
    order = Mixture(3, sizes, make_config([(1, [3, 1])]), 8).compute_indices(np.arange(280))
    code = order[order >= 30] - 30  # samples of `code`, which follow the 30 samples of `web` in the dataset
    assert all(sorted(code[start : start + 7]) == list(range(7)) for start in range(0, len(code) - 6, 7))
    # An additional source does not change the order of the samples of `code`.
    with_books = Mixture(3, {**sizes, "books": 99}, make_config([(1, [3, 1, 2])]), 8).compute_indices(np.arange(560))
    code_with_books = with_books[(with_books >= 30) & (with_books < 37)] - 30
    assert code_with_books[: len(code)].tolist() == code[: len(code_with_books)].tolist()
    assert Mixture(3, sizes, make_config([(1, [3, 1])]), 8).count_epochs(280) == {"web": 7.0, "code": 10.0}


def test_weights_change_at_the_same_step_if_samples_are_excluded() -> None:
    """Two batches of 8 before step 6 are excluded, so the first sample of step 6 has the position 56 instead of 40.

    The samples at earlier positions do not change.
    """
    sizes = {"web": 30, "code": 7}
    excluded_ranges = [(16, 16)]  # first position and number of samples
    order = Mixture(5, sizes, make_config([(1, [3, 1]), (6, [0, 1])]), 8, excluded_ranges)
    order_without_change = Mixture(5, sizes, make_config([(1, [3, 1])]), 8)
    positions = np.arange(56)
    assert order.compute_indices(positions).tolist() == order_without_change.compute_indices(positions).tolist()
    sampler = GlobalOrderSampler(
        UnreadDataset(37),
        global_batch=8,
        seed=5,
        excluded_ranges=excluded_ranges,
        num_replicas=1,
        rank=0,
        order=order.compute_indices,
    )
    steps = iter(sampler)
    web_samples_per_step = [int((next(steps) < 30).sum()) for _ in range(7)]
    assert web_samples_per_step == [6, 6, 6, 6, 6, 0, 0]


def test_counts_are_exact_at_large_sample_numbers() -> None:
    """At sample 9 * 10**11, the products of sample numbers and shares still fit into 64 bits.

    Counts therefore equal those computed with Python's integers.
    """
    order = Mixture(
        1, {"web": 10**9, "code": 10**7, "books": 3}, make_config([(1, [3, 1, 0.1]), (10**6, [1, 1, 2])]), 512
    )
    sample = 9 * 10**11
    change = (10**6 - 1) * 512  # The weights change at this sample.
    counts: dict[str, int] = {}
    for phase, samples in ((0, change), (1, sample - change)):
        shares = order._phase_shares[phase]
        remaining = samples
        remaining_share = sum(shares)
        for name, share in zip(order.sizes, shares, strict=True):
            count = int(Fraction(remaining * share, remaining_share) + Fraction(1, 2))
            counts[name] = counts.get(name, 0) + count
            remaining -= count
            remaining_share -= share
    assert order.count_by_source(np.array([sample]))[:, 0].tolist() == list(counts.values())
    assert sum(counts.values()) == sample
    # Half of the 4096 samples are from `books`, which has 3 samples. Almost all others must be different.
    assert len(set(order.compute_indices(np.arange(sample, sample + 4096)).tolist())) > 2000


def test_a_source_without_samples_is_an_error_unless_its_weight_is_0() -> None:
    with raises_error("data.empty_source", "data.mixture", "code"):
        Mixture(1, {"web": 5, "code": 0}, make_config([(1, [1, 1])]), 8)
    assert Mixture(1, {"web": 5, "code": 0}, make_config([(1, [1, 0])]), 8).compute_indices(np.arange(50)).max() < 5


@pytest.mark.parametrize(
    "weights",
    [
        [(2, [1, 1])],
        [(1, [1, 1]), (1, [1, 2])],
        [(1, [0, 0])],
        [(1, [-1, 2])],
        [(1, [1e308, 1e308])],
    ],
)
def test_invalid_weights_are_an_error(weights: list[tuple[int, list[float]]]) -> None:
    with pytest.raises(ValueError, match=r"from_step|weight|greater"):
        make_config(weights)
