"""Test the decisions of a search: they depend on the values of the trials, and on nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.run.trials import Result, Study, Trial
from pipeline.search.schedule import plan

RUNGS = (10, 30, 90)
Values = Callable[[int, int], Result]


def sample_history(number: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return parameters that contain all results that the sampler has seen."""
    return {"number": number, "seen": [dict(trial.results) for trial in trials]}


def decide(
    results: Mapping[tuple[int, int], Result], trials: int, workers: int, eta: int, recorded: Sequence[Trial] = ()
) -> Study:
    """Return the study after these results. The parameters of `recorded` trials are kept, as in a real search."""

    def sample(number: int, earlier: Sequence[Trial]) -> Mapping[str, Any]:
        return recorded[number].parameters if number < len(recorded) else sample_history(number, earlier)

    return plan(RUNGS, trial_count=trials, workers=workers, eta=eta, results=results, sample=sample)


def run_search(values: Values, trials: int, workers: int, eta: int, order: random.Random | None) -> list[Study]:
    """Run a search, and return the study after each decision.

    Args:
        values: returns the result of a trial at a rung.
        trials: the number of trials.
        workers: the number of trials at the same time.
        eta: one of `eta` trials continues.
        order: chooses the next trial that ends; None: the trial with the lowest number ends first.
    """
    results: dict[tuple[int, int], Result] = {}
    studies = [decide(results, trials, workers, eta)]
    while not studies[-1].is_finished:
        running = [(number, trial.rung) for number, trial in enumerate(studies[-1].trials) if trial.result is None]
        assert 0 < len(running) <= workers
        ended = running[0] if order is None else order.choice(running)
        results[ended] = values(*ended)
        studies.append(decide(results, trials, workers, eta, studies[-1].trials))
    return studies


def make_values(seed: int, failures: float = 0.0) -> Values:
    """Return a function with random values, some of them equal, of which a share of `failures` are failures."""

    def get_value(number: int, rung: int) -> Result:
        generator = random.Random(f"{seed} {number} {rung}")
        if generator.random() < failures:
            return Result(None, message="non_finite")
        return Result(generator.randrange(12) / 4, is_final=generator.random() < 0.05)

    return get_value


@settings(max_examples=150)
@given(
    st.integers(0, 10**6), st.integers(1, 14), st.integers(1, 6), st.integers(2, 4), st.sampled_from([0.0, 0.3, 1.0])
)
def test_the_order_in_which_trials_end_changes_nothing(
    seed: int, trials: int, workers: int, eta: int, failures: float
) -> None:
    """The trials, what their sampler has seen, and all results are the same, whichever trial ends first."""
    values = make_values(seed, failures)
    expected = run_search(values, trials, workers, eta, None)[-1]
    for order in (1, 2):
        assert run_search(values, trials, workers, eta, random.Random(order))[-1] == expected
    assert len(expected.trials) == trials


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 5))
def test_later_decisions_keep_earlier_ones(seed: int, trials: int, workers: int) -> None:
    """A decision never removes a trial, changes its parameters or moves it to a lower rung, so it may be repeated."""
    studies = run_search(make_values(seed, 0.2), trials, workers, 3, random.Random(seed))
    for old, new in itertools.pairwise(studies):
        assert [trial.parameters for trial in new.trials[: len(old.trials)]] == [
            trial.parameters for trial in old.trials
        ]
        for before, after in zip(old.trials, new.trials, strict=False):
            assert after.rung == before.rung or (after.rung == before.rung + 1 and before.rung in after.results)


def test_with_enough_workers_the_search_is_successive_halving() -> None:
    """Of 9 trials, the best 3 continue after the first rung, and the best one of them after the second rung."""
    losses = [5, 1, 9, 2, 8, 3, 7, 4, 6]
    study = run_search(lambda number, rung: Result(losses[number] - rung), 9, 9, 3, None)[-1]
    assert [trial.rung for trial in study.trials] == [0, 2, 0, 1, 0, 1, 0, 0, 0]
    assert study.find_best() == 1


def test_a_free_worker_continues_a_good_trial_before_it_starts_a_new_one() -> None:
    """One worker runs 4 trials. The best of the first three continues before the fourth trial is sampled."""
    losses = [3, 1, 2, 0]
    studies = run_search(lambda number, rung: Result(losses[number]), 4, 1, 3, None)
    steps = [(len(study.trials), [trial.rung for trial in study.trials]) for study in studies]
    assert steps[2:5] == [(3, [0, 0, 0]), (3, [0, 1, 0]), (4, [0, 1, 0, 0])]
    assert studies[-1].trials[3].parameters["seen"][1] == {0: Result(1), 1: Result(1)}


def test_failed_and_completed_trials_do_not_continue() -> None:
    """Trial 0 has failed. A callback has completed trial 1, which is the best one of the three with a value."""
    results = {0: Result(None), 1: Result(0.5, is_final=True), 2: Result(0.7), 3: Result(0.9)}
    study = run_search(lambda number, rung: results[number], 4, 4, 2, None)[-1]
    assert [trial.rung for trial in study.trials] == [0, 0, 0, 0]
    assert study.trials[0].has_failed and study.find_best() == 1


@pytest.mark.parametrize("trials", [1, 2, 5])
def test_one_trial_of_a_small_search_trains_to_the_last_step(trials: int) -> None:
    """With fewer than eta² trials, no trial would reach the last rung by the rule of ASHA."""
    study = run_search(lambda number, rung: Result(float(-number)), trials, 2, 3, None)[-1]
    assert study.find_best() == trials - 1 and study.trials[-1].rung == len(RUNGS) - 1
    assert sum(trial.rung == len(RUNGS) - 1 for trial in study.trials) == 1


def test_the_next_best_trial_continues_if_the_best_one_fails_later() -> None:
    """Trial 0 has the lowest loss at the first rung, and fails before the second one."""
    losses = [1.0, 3.0, 2.0]
    study = run_search(lambda number, rung: Result(losses[number] if number or not rung else None), 3, 3, 4, None)[-1]
    assert [trial.rung for trial in study.trials] == [1, 0, 2] and study.find_best() == 2


def test_a_search_in_which_all_trials_fail_ends() -> None:
    study = run_search(lambda number, rung: Result(None, message="out_of_memory"), 5, 2, 3, None)[-1]
    assert study.is_finished and study.find_best() is None and all(trial.has_failed for trial in study.trials)
