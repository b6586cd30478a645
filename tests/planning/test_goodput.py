"""Tests of the goodput estimate, compared with Daly's formula, the simulation and published figures."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planning.goodput import (
    DAY_S,
    JobConditions,
    NodePool,
    best_interval_s,
    count_bounds,
    daly_interval_s,
    effective_ratio,
    find_good_intervals_s,
    job_failure_rate,
    simulate_run,
    simulate_runs,
    young_interval_s,
)

RSC1_FAILURES = 6.5
"""Failures per 1,000 node-days on Meta's cluster RSC-1 (arXiv 2410.21680)."""
LLAMA3_FAILURES = 419 / 54 / 2.048
"""Unexpected stops per 1,000 node-days: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""


def make_conditions(
    mttf_s: float, save_s: float, blocked_s: float, restart_s: float = 300.0, **fields: float
) -> JobConditions:
    """Return the conditions of a job with the mean time to failure `mttf_s`. `fields` are further fields."""
    return JobConditions(1 / mttf_s, restart_s, fields.pop("wait_s", 0.0), save_s, blocked_s, **fields)


# -- published figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "hours"), [(8, 3692.3), (1024, 28.8), (16_384, 1.8), (131_072, 14 / 60)])
def test_the_mean_time_to_failure_on_rsc_1_equals_the_published_one(gpus: int, hours: float) -> None:
    assert 1 / job_failure_rate(RSC1_FAILURES, gpus // 8) / 3600 == pytest.approx(hours, rel=0.04)


def test_the_estimate_agrees_with_llama_3() -> None:
    """The run of Llama 3 took 54 days, had 419 unexpected stops, and was more than 90 % effective.

    A restart is assumed to take 10 minutes, because restarts on RSC-1 take 5 to 20 minutes.
    """
    rate = job_failure_rate(LLAMA3_FAILURES, 2048)
    assert 1 / rate / 3600 == pytest.approx(3.09, rel=0.01)
    conditions = JobConditions(rate, restart_s=600, wait_s=60, save_s=60, blocked_s=3)
    interval_s = best_interval_s(conditions)
    work_s = 54 * DAY_S * effective_ratio(conditions, interval_s)
    simulated = simulate_runs(conditions, interval_s, work_s, NodePool())
    assert simulated.mean_s / DAY_S == pytest.approx(54, rel=0.02)
    failures = [simulate_run(conditions, interval_s, work_s, NodePool(), seed).failures for seed in range(20)]
    assert fmean(failures) == pytest.approx(419, rel=0.1)
    assert simulated.ratio > 0.9


@pytest.mark.parametrize(("failures_per_1000_node_days", "save_s"), [(1.0, 300.0), (RSC1_FAILURES, 10.0)])
def test_the_estimate_agrees_with_the_projection_for_12000_gpus(
    failures_per_1000_node_days: float, save_s: float
) -> None:
    """12,000 GPUs have an effective ratio of 0.9 if there is one failure per 1,000 node-days, or if saves take 10 s.

    The ratio is the ETTR of arXiv 2410.21680, section III.
    """
    conditions = JobConditions(
        job_failure_rate(failures_per_1000_node_days, 1500), restart_s=300, wait_s=0, save_s=save_s, blocked_s=save_s
    )
    assert effective_ratio(conditions, best_interval_s(conditions)) == pytest.approx(0.9, abs=0.03)


def test_the_estimate_agrees_with_hourly_saves_on_rsc_1() -> None:
    """The largest long jobs on RSC-1, with 2,048 to 4,096 GPUs, had ratios from 0.85 to 0.9."""
    conditions = JobConditions(job_failure_rate(RSC1_FAILURES, 256), restart_s=600, wait_s=0, save_s=300, blocked_s=300)
    assert 0.83 < effective_ratio(conditions, 3600) < 0.92


# -- closed forms ----------------------------------------------------------------------------------------

intervals_s = st.floats(1, 1e4)
random_conditions = st.builds(
    make_conditions,
    st.floats(600, 1e7),
    save_s=st.floats(10, 600),
    blocked_s=st.floats(0.1, 10),
    restart_s=st.floats(0, 1200),
    wait_s=st.floats(0, 3600),
)


@given(st.floats(600, 1e7), st.floats(0.1, 600), st.floats(0, 1200), intervals_s)
def test_the_ratio_equals_dalys_formula_for_synchronous_saves(
    mttf_s: float, save_s: float, restart_s: float, interval_s: float
) -> None:
    # the expected time for an interval of work, by Daly's equation 20
    expected_s = mttf_s * math.exp(restart_s / mttf_s) * math.expm1((interval_s + save_s) / mttf_s)
    ratio = effective_ratio(make_conditions(mttf_s, save_s, save_s, restart_s), interval_s)
    assert ratio == pytest.approx(interval_s / expected_s, rel=1e-6)


@given(random_conditions, intervals_s)
def test_longer_durations_and_higher_rates_do_not_increase_the_ratio(
    conditions: JobConditions, interval_s: float
) -> None:
    ratio = effective_ratio(conditions, interval_s)
    assert 0 <= ratio <= 1
    for key in ("failure_rate", "restart_s", "wait_s", "save_s", "blocked_s"):
        worse_conditions = JobConditions(**{**vars(conditions), key: 1.5 * getattr(conditions, key) + 1e-6})
        assert effective_ratio(worse_conditions, interval_s) <= ratio * (1 + 1e-9), key


@given(random_conditions, st.floats(0.2, 5))
def test_the_best_interval_has_the_highest_ratio(conditions: JobConditions, factor: float) -> None:
    best_s = best_interval_s(conditions)  # found by a search with a relative precision of 1e-4
    assert effective_ratio(conditions, best_s) >= effective_ratio(conditions, best_s * factor) - 1e-5


@given(st.floats(2e4, 1e7), st.floats(0.1, 600), st.floats(0, 300))
def test_youngs_and_dalys_intervals_are_close_to_the_best_one(mttf_s: float, save_s: float, restart_s: float) -> None:
    conditions = make_conditions(mttf_s, save_s, save_s, restart_s)
    assert daly_interval_s(conditions) == pytest.approx(best_interval_s(conditions), rel=2e-3)
    assert young_interval_s(conditions) == pytest.approx(best_interval_s(conditions), rel=0.2)


def test_without_failures_only_saves_reduce_the_ratio() -> None:
    assert effective_ratio(
        JobConditions(failure_rate=0, restart_s=300, wait_s=0, save_s=60, blocked_s=5), 95
    ) == pytest.approx(0.95)
    # with saves of 200 s and an interval of 95 s, each save waits until the previous one has finished
    assert effective_ratio(
        JobConditions(failure_rate=0, restart_s=300, wait_s=0, save_s=200, blocked_s=5), 95
    ) == pytest.approx(95 / 200)


def test_the_confidence_bounds_of_a_count_are_close_to_the_exact_ones() -> None:
    """The exact 95 % bounds (Garwood 1936) are 0 to 3.69 for 0 events, 1.62 to 11.67 for 5, and 380 to 461 for 419."""
    for count, low, high in ((0, 0.0, 3.69), (5, 1.62, 11.67), (419, 379.8, 461.1)):
        assert list(count_bounds(count)) == pytest.approx([low, high], abs=0.5 if count > 100 else 0.05)


# -- the simulation --------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.floats(1800, 20_000), st.floats(10, 900), st.floats(0.05, 1), st.floats(0, 600), st.floats(0, 600),
    st.floats(60, 2000), st.sampled_from([0.0, 0.5, 3.0]),
)  # fmt: skip
def test_the_simulation_agrees_with_the_closed_form(
    mttf_s: float,
    save_s: float,
    blocked_fraction: float,
    restart_s: float,
    wait_s: float,
    interval_s: float,
    preemptions_per_failure: float,
) -> None:
    """The cases include saves that are longer than the interval, and preemptions."""
    conditions = make_conditions(
        mttf_s,
        save_s,
        blocked_fraction * save_s,
        restart_s,
        wait_s=wait_s,
        preemption_rate=preemptions_per_failure / mttf_s,
        preempted_s=1000.0,
    )
    ratio = effective_ratio(conditions, interval_s)
    work_s = max(300 * mttf_s * ratio, interval_s)
    simulated = simulate_runs(conditions, interval_s, work_s, NodePool(), runs=20)
    # `margin` is half the width of a 95 % confidence interval, which is 1.96 standard errors
    assert simulated.ratio == pytest.approx(ratio, abs=4 / 1.96 * simulated.margin + 0.01)


def test_the_parts_of_a_simulated_run_add_up_to_its_duration() -> None:
    conditions = make_conditions(mttf_s=5000, save_s=60, blocked_s=10, restart_s=300, wait_s=30)
    work_s = 2e6
    interval_s = 400
    pool = NodePool(spares=1, repair_s=20_000, together=0.2, nodes_together=3)
    simulated = simulate_run(conditions, interval_s, work_s, pool, seed=7)
    waits_s = 30 * simulated.failures
    remaining_s = simulated.seconds - work_s - simulated.lost_s - simulated.no_node_s - waits_s
    saves_s = 10 * work_s / interval_s
    starts_s = 300 * (simulated.failures + 1)
    assert simulated.no_node_s > 0 and simulated.failures > 300
    assert remaining_s == pytest.approx(saves_s + starts_s, rel=0.1)


def test_a_simulation_depends_only_on_its_seed() -> None:
    conditions = make_conditions(mttf_s=5000, save_s=60, blocked_s=10, restart_s=300, wait_s=30)
    results = [simulate_run(conditions, 400, 2e6, NodePool(), seed) for seed in (7, 7, 8)]
    assert results[0] == results[1] and results[1] != results[2]


def test_waiting_depends_on_spares_as_queueing_theory_predicts() -> None:
    """With enough spares, the number of nodes in repair is Poisson-distributed (Palm's theorem for M/G/∞ queues)."""
    conditions = make_conditions(mttf_s=3600, save_s=30, blocked_s=2, restart_s=120)
    mean_in_repair = 24.0  # there are 24 failures per day, and a repair takes a day

    def compute_waiting_ratio(spares: int, **fields: float) -> float:
        """Return the part of the time in which the job waits for a node. `fields` are further fields of the pool."""
        pool = NodePool(spares, DAY_S, **fields)  # type: ignore[arg-type]
        simulated = simulate_runs(conditions, 300, 30 * DAY_S, pool, runs=5)
        return simulated.no_node_s / simulated.mean_s

    assert compute_waiting_ratio(round(mean_in_repair + 5 * math.sqrt(mean_in_repair))) < 1e-3
    assert compute_waiting_ratio(10) > 0.2
    # failures of several nodes at once, such as of a rack, need more spares
    assert compute_waiting_ratio(35) < compute_waiting_ratio(35, together=0.1, nodes_together=8)


def test_without_spares_repairs_limit_the_ratio() -> None:
    """The job runs for an hour on average, and then waits half an hour for the repair (a renewal process)."""
    conditions = JobConditions(1 / 3600, restart_s=0, wait_s=0, save_s=1e-3, blocked_s=1e-3)
    simulated = simulate_runs(conditions, 5, 400 * 3600, NodePool(spares=0, repair_s=1800), runs=20)
    assert simulated.ratio == pytest.approx(2 / 3, abs=0.02)


def test_a_run_on_131072_gpus_never_ends_if_failures_are_more_frequent_than_saves() -> None:
    conditions = JobConditions(
        job_failure_rate(RSC1_FAILURES, 16_384), restart_s=3600, wait_s=600, save_s=900, blocked_s=900
    )
    assert effective_ratio(conditions, best_interval_s(conditions)) < 0.01
    assert simulate_run(conditions, 600, 1e9, NodePool(), 1).seconds == math.inf


def test_the_good_intervals_include_the_best_one() -> None:
    conditions = JobConditions(job_failure_rate(RSC1_FAILURES, 2048), restart_s=600, wait_s=60, save_s=60, blocked_s=60)
    best_s = best_interval_s(conditions)
    low_s, high_s = find_good_intervals_s(conditions, best_s, 20 * DAY_S, NodePool())
    assert 0.5 * best_s < low_s <= 1.1 * best_s
    assert 0.9 * best_s <= high_s < 2 * best_s
