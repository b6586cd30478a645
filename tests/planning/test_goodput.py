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

RSC1 = 6.5
LLAMA3 = 419 / 54 / 2.048
"""Unexpected stops per 1,000 node-days: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783, section 3.3.4)."""


def job(mttf_s: float, save_s: float, blocked_s: float, restart_s: float = 300.0, **more: float) -> JobConditions:
    return JobConditions(1 / mttf_s, restart_s, more.pop("wait_s", 0.0), save_s, blocked_s, **more)


# -- published figures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "hours"), [(8, 3692.3), (1024, 28.8), (16_384, 1.8), (131_072, 14 / 60)])
def test_mean_time_to_failure_of_rsc_1(gpus: int, hours: float) -> None:
    assert 1 / job_failure_rate(RSC1, gpus // 8) / 3600 == pytest.approx(hours, rel=0.04)


def test_the_estimate_agrees_with_llama_3() -> None:
    """54 days, 419 unexpected stops, more than 90 % effective; restarts of 5 to 20 minutes as on RSC-1."""
    rate = job_failure_rate(LLAMA3, 2048)
    assert 1 / rate / 3600 == pytest.approx(3.09, rel=0.01)
    meta = JobConditions(rate, 600, 60, 60, 3)
    best = best_interval_s(meta)
    work = 54 * DAY_S * effective_ratio(meta, best)
    found = simulate_runs(meta, best, work, NodePool())
    assert found.mean_s / DAY_S == pytest.approx(54, rel=0.02)
    assert fmean(simulate_run(meta, best, work, NodePool(), seed).failures for seed in range(20)) == pytest.approx(
        419, rel=0.1
    )
    assert found.ratio > 0.9


@pytest.mark.parametrize(("per_1000", "save_s"), [(1.0, 300.0), (RSC1, 10.0)])
def test_the_estimate_agrees_with_the_projection_for_12000_gpus(per_1000: float, save_s: float) -> None:
    """12,000 GPUs reach an ETTR of 0.9 with a rate of 1, or with saves of 10 s (arXiv 2410.21680, section III)."""
    asked = JobConditions(job_failure_rate(per_1000, 1500), 300, 0, save_s, save_s)
    assert effective_ratio(asked, best_interval_s(asked)) == pytest.approx(0.9, abs=0.03)


def test_the_estimate_agrees_with_hourly_saves_on_rsc_1() -> None:
    """The largest long jobs on RSC-1, with 2,048 to 4,096 GPUs, had ratios from 0.85 to 0.9."""
    asked = JobConditions(job_failure_rate(RSC1, 256), 600, 0, 300, 300)
    assert 0.83 < effective_ratio(asked, 3600) < 0.92


# -- closed forms ----------------------------------------------------------------------------------------

spans = st.floats(1, 1e4)
jobs = st.builds(
    job, st.floats(600, 1e7), save_s=st.floats(10, 600), blocked_s=st.floats(0.1, 10), restart_s=st.floats(0, 1200),
    wait_s=st.floats(0, 3600),
)  # fmt: skip


@given(st.floats(600, 1e7), st.floats(0.1, 600), st.floats(0, 1200), spans)
def test_the_ratio_equals_dalys_formula_for_synchronous_saves(
    mttf: float, save: float, restart: float, interval: float
) -> None:
    wall = mttf * math.exp(restart / mttf) * math.expm1((interval + save) / mttf)  # equation 20, per interval
    assert effective_ratio(job(mttf, save, save, restart), interval) == pytest.approx(interval / wall, rel=1e-6)


@given(jobs, spans)
def test_longer_durations_and_higher_rates_do_not_increase_the_ratio(one: JobConditions, interval: float) -> None:
    ratio = effective_ratio(one, interval)
    assert 0 <= ratio <= 1
    for key in ("failure_rate", "restart_s", "wait_s", "save_s", "blocked_s"):
        worse = JobConditions(**{**vars(one), key: 1.5 * getattr(one, key) + 1e-6})
        assert effective_ratio(worse, interval) <= ratio * (1 + 1e-9), key


@given(jobs, st.floats(0.2, 5))
def test_the_best_interval_has_the_highest_ratio(one: JobConditions, factor: float) -> None:
    best = best_interval_s(one)
    assert effective_ratio(one, best) >= effective_ratio(one, best * factor) - 1e-5  # searched to 1e-4 of it


@given(st.floats(2e4, 1e7), st.floats(0.1, 600), st.floats(0, 300))
def test_youngs_and_dalys_intervals_are_close_to_the_best_one(mttf: float, save: float, restart: float) -> None:
    one = job(mttf, save, save, restart)
    assert daly_interval_s(one) == pytest.approx(best_interval_s(one), rel=2e-3)
    assert young_interval_s(one) == pytest.approx(best_interval_s(one), rel=0.2)


def test_without_failures_only_saves_reduce_the_ratio() -> None:
    assert effective_ratio(JobConditions(0, 300, 0, 60, 5), 95) == pytest.approx(0.95)
    assert effective_ratio(JobConditions(0, 300, 0, 200, 5), 95) == pytest.approx(95 / 200), "a save waits for the last"


def test_bounds_of_a_count_are_close_to_the_exact_ones() -> None:
    """Exact bounds (Garwood 1936): 0 to 3.69 for 0 events, 1.62 to 11.67 for 5, and 380 to 461 for 419 (Llama 3)."""
    for count, low, high in ((0, 0.0, 3.69), (5, 1.62, 11.67), (419, 379.8, 461.1)):
        assert list(count_bounds(count)) == pytest.approx([low, high], abs=0.5 if count > 100 else 0.05)


# -- the simulation --------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    st.floats(1800, 20_000), st.floats(10, 900), st.floats(0.05, 1), st.floats(0, 600), st.floats(0, 600),
    st.floats(60, 2000), st.sampled_from([0.0, 0.5, 3.0]),
)  # fmt: skip
def test_the_simulation_agrees_with_the_closed_form(
    mttf: float, save: float, part: float, restart: float, wait: float, interval: float, preempted: float
) -> None:
    """The cases include saves that are longer than the interval, and preemptions."""
    one = job(mttf, save, part * save, restart, wait_s=wait, preemption_rate=preempted / mttf, preempted_s=1000.0)
    ratio = effective_ratio(one, interval)
    found = simulate_runs(one, interval, max(300 * mttf * ratio, interval), NodePool(), runs=20)
    assert found.ratio == pytest.approx(ratio, abs=4 / 1.96 * found.margin + 0.01)


def test_the_parts_of_a_simulated_training_add_up_to_its_duration() -> None:
    one, work = job(5000, 60, 10, 300, wait_s=30), 2e6
    found = simulate_run(one, 400, work, NodePool(spares=1, repair_s=20_000, together=0.2, nodes_together=3), seed=7)
    kept = found.seconds - work - found.lost_s - found.no_node_s - 30 * found.failures
    saves, starts = 10 * work / 400, 300 * (found.failures + 1)
    assert found.no_node_s > 0 and found.failures > 300
    assert kept == pytest.approx(saves + starts, rel=0.1), "the remaining time consists of saves and restarts"
    assert (
        simulate_run(one, 400, work, NodePool(), 7)
        == simulate_run(one, 400, work, NodePool(), 7)
        != simulate_run(one, 400, work, NodePool(), 8)
    )


def test_waiting_depends_on_spares_as_queueing_theory_predicts() -> None:
    """With enough spares, the number of nodes in repair is Poisson-distributed (Palm's theorem for M/G/∞ queues)."""
    one = job(3600, 30, 2, 120)
    repairing = 24.0  # failures of a day, each a day in repair

    def waits(spares: int, **more: float) -> float:
        pool = NodePool(spares, DAY_S, **more)  # type: ignore[arg-type]
        found = simulate_runs(one, 300, 30 * DAY_S, pool, runs=5)
        return found.no_node_s / found.mean_s

    assert waits(round(repairing + 5 * math.sqrt(repairing))) < 1e-3
    assert waits(10) > 0.2
    assert waits(35) < waits(35, together=0.1, nodes_together=8), "failures of whole racks want more spares"


def test_without_spares_repairs_limit_the_ratio() -> None:
    """The job runs only while no node is in repair: an alternating renewal process, 1/λ running and 1/μ in repair."""
    one = JobConditions(1 / 3600, 0, 0, 1e-3, 1e-3)
    found = simulate_runs(one, 5, 400 * 3600, NodePool(spares=0, repair_s=1800), runs=20)
    assert found.ratio == pytest.approx(2 / 3, abs=0.02)


def test_a_training_of_131072_gpus_without_valid_saves_never_ends() -> None:
    one = JobConditions(job_failure_rate(RSC1, 16_384), 3600, 600, 900, 900)
    assert effective_ratio(one, best_interval_s(one)) < 0.01
    assert simulate_run(one, 600, 1e9, NodePool(), 1).seconds == math.inf


def test_the_good_intervals_include_the_best_one() -> None:
    one = JobConditions(job_failure_rate(RSC1, 2048), 600, 60, 60, 60)
    low, high = find_good_intervals_s(one, best_interval_s(one), 20 * DAY_S, NodePool())
    assert 0.5 * best_interval_s(one) < low <= 1.1 * best_interval_s(one)
    assert 0.9 * best_interval_s(one) <= high < 2 * best_interval_s(one)
