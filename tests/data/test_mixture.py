"""The order of several sources against a plain reference, over weights, changes and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.base.errors import UserError
from pipeline.config.datasets import MixtureConfig
from pipeline.data.sample_order import WEIGHT_SCALE, GlobalOrderSampler, Mixture, permute
from pipeline.data.samples import MappedDataset

NAMES = ["web", "code", "books", "math"]


def config(weights: Sequence[tuple[int, Sequence[float]]]) -> MixtureConfig:
    names = NAMES[: len(weights[0][1])]
    phases = [{"from_step": step, "weights": dict(zip(names, values, strict=True))} for step, values in weights]
    return MixtureConfig.model_validate({"sources": {name: {"source": "x.txt"} for name in names}, "weights": phases})


def reference(seed: int, sizes: dict[str, int], wanted: MixtureConfig, batch: int, samples: int) -> list[int]:
    """Dataset indices, one sample after the other: counts are kept, nothing is looked up."""
    taken, found, names = dict.fromkeys(sizes, 0), [], list(sizes)
    first = {name: sum(list(sizes.values())[:place]) for place, name in enumerate(names)}
    for sample in range(samples):
        phase = [one for one in wanted.weights if (one.from_step - 1) * batch <= sample][-1]
        whole = sum(phase.weights.values())
        shares = [phase.weights[name] / whole * WEIGHT_SCALE for name in names]
        units = [max(round(share), int(share > 0)) for share in shares]
        inside = sample - (phase.from_step - 1) * batch
        left, rest, source = inside, sum(units), names[-1]
        for name, share in zip(names, units, strict=True):  # of those before, and with this one
            if share:
                before, after = (int(Fraction(number * share, rest) + Fraction(1, 2)) for number in (left, left + 1))
                if after > before:
                    source = name
                    break
                left -= before
            rest -= share
        epoch, place = divmod(taken[source], sizes[source])
        key = int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:8])
        found.append(first[source] + int(permute(key, epoch, np.array([place]), sizes[source])[0]))
        taken[source] += 1
    return found


@st.composite
def mixtures(draw: Any) -> tuple[dict[str, int], MixtureConfig, int]:
    count = draw(st.integers(1, 4))
    weight = st.one_of(st.integers(0, 9), st.floats(0, 1e6, allow_nan=False))
    rows = st.lists(weight, min_size=count, max_size=count).filter(lambda row: sum(row) > 0)
    steps = sorted(draw(st.sets(st.integers(2, 40), max_size=3)))
    wanted = config([(step, draw(rows)) for step in (1, *steps)])
    return {name: draw(st.integers(1, 50)) for name in NAMES[:count]}, wanted, draw(st.integers(1, 12))


@settings(max_examples=25, deadline=None)
@given(mixtures(), st.integers(0, 5))
def test_is_the_reference_at_every_index(mixture: tuple[dict[str, int], MixtureConfig, int], seed: int) -> None:
    sizes, wanted, batch = mixture
    order = Mixture(seed, sizes, wanted, batch)
    expected = reference(seed, sizes, wanted, batch, 300)
    assert order.compute_indices(np.arange(300)).tolist() == expected
    shuffled = np.random.default_rng(seed).permutation(300).reshape(20, 15)  # any positions, in any order
    assert order.compute_indices(shuffled).tolist() == np.array(expected)[shuffled].tolist()
    borders = np.cumsum([0, *sizes.values()])
    drawn = np.bincount(np.searchsorted(borders, expected, side="right") - 1, minlength=len(sizes))
    assert order.count_by_source(np.array([300]))[:, 0].tolist() == drawn.tolist()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.001, 1), min_size=2, max_size=4), st.integers(0, 10**9))
def test_no_source_is_ever_far_from_its_share(weights: list[float], samples: int) -> None:
    sizes = dict.fromkeys(NAMES[: len(weights)], 1000)
    counts = Mixture(1, sizes, config([(1, weights)]), 8).count_by_source(np.array([samples]))[:, 0]
    assert counts.sum() == samples
    for count, weight in zip(counts.tolist(), weights, strict=True):
        assert abs(count - samples * weight / sum(weights)) <= len(weights) + samples * len(weights) / WEIGHT_SCALE


class _Data(MappedDataset):
    """So many samples that nobody reads."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("begin", [0, 24, 88])
def test_ranks_and_resumes_split_the_same_order(ranks: int, begin: int) -> None:
    sizes, wanted = {"web": 30, "code": 7}, config([(1, [3, 1]), (6, [1, 1]), (12, [0, 1])])
    order = Mixture(5, sizes, wanted, 8)

    def taken(rank: int) -> list[list[int]]:
        sampler = GlobalOrderSampler(
            _Data(37), global_batch=8, seed=5, samples_consumed=begin, num_replicas=ranks, rank=rank,
            order=order.compute_indices,
        )  # fmt: skip
        steps = iter(sampler)
        return [next(steps).tolist() for _ in range(10)]

    steps = zip(*map(taken, range(ranks)), strict=True)
    expected = reference(5, sizes, wanted, 8, begin + 80)
    assert [index for parts in steps for part in parts for index in part] == expected[begin:]


def test_each_epoch_of_a_source_has_each_sample_once_and_sources_do_not_depend_on_others() -> None:
    sizes = {"web": 30, "code": 7}
    order = Mixture(3, sizes, config([(1, [3, 1])]), 8).compute_indices(np.arange(280))
    code = order[order >= 30] - 30
    assert all(sorted(code[start : start + 7]) == list(range(7)) for start in range(0, len(code) - 6, 7))
    other = Mixture(3, {**sizes, "books": 99}, config([(1, [3, 1, 2])]), 8).compute_indices(np.arange(560))
    again = other[(other >= 30) & (other < 37)] - 30
    assert again[: len(code)].tolist() == code[: len(again)].tolist()
    assert Mixture(3, sizes, config([(1, [3, 1])]), 8).count_epochs(280) == {"web": 7.0, "code": 10.0}


def test_weights_change_with_the_step_where_samples_were_left_out_too() -> None:
    """At step 6: two batches were left out before, so its first position is 56, and those before are as they were."""
    sizes, left_out = {"web": 30, "code": 7}, [(16, 16)]
    order = Mixture(5, sizes, config([(1, [3, 1]), (6, [0, 1])]), 8, left_out)
    old = Mixture(5, sizes, config([(1, [3, 1])]), 8)
    assert order.compute_indices(np.arange(56)).tolist() == old.compute_indices(np.arange(56)).tolist()
    sampler = GlobalOrderSampler(
        _Data(37), global_batch=8, seed=5, excluded_ranges=left_out, num_replicas=1, rank=0, order=order.compute_indices
    )
    steps = iter(sampler)
    web = [int((next(steps) < 30).sum()) for _ in range(7)]
    assert web == [6, 6, 6, 6, 6, 0, 0]


def test_far_positions_are_exact() -> None:
    """Products stay within 64 bits: at sample 9 * 10**11 the shares are still those of whole numbers of any size."""
    order = Mixture(1, {"web": 10**9, "code": 10**7, "books": 3}, config([(1, [3, 1, 0.1]), (10**6, [1, 1, 2])]), 512)
    far, change = 9 * 10**11, (10**6 - 1) * 512
    taken: dict[str, int] = {}
    for phase, samples in ((0, change), (1, far - change)):
        left, rest, shares = samples, sum(order._phase_shares[phase]), order._phase_shares[phase]
        for name, share in zip(order.sizes, shares, strict=True):
            count = int(Fraction(left * share, rest) + Fraction(1, 2))
            taken[name] = taken.get(name, 0) + count
            left, rest = left - count, rest - share
    assert order.count_by_source(np.array([far]))[:, 0].tolist() == list(taken.values()) and sum(taken.values()) == far
    assert len(set(order.compute_indices(np.arange(far, far + 4096)).tolist())) > 2000


def test_a_source_without_samples_and_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="source code has no training sample"):
        Mixture(1, {"web": 5, "code": 0}, config([(1, [1, 1])]), 8)
    assert Mixture(1, {"web": 5, "code": 0}, config([(1, [1, 0])]), 8).compute_indices(np.arange(50)).max() < 5
    for bad in ([(2, [1, 1])], [(1, [1, 1]), (1, [1, 2])], [(1, [0, 0])], [(1, [-1, 2])], [(1, [1e308, 1e308])]):
        with pytest.raises(ValueError, match=r"from_step|weight|greater"):
            config(bad)
