"""Decide which trials of a search run, from the values of the trials and nothing else.

The rule is that of ASHA (Li et al., arXiv 1810.05934, algorithm 2). When one of the workers is free, it continues a
paused trial that is among the best 1/eta of all trials at its rung so far. If there is no such trial, it starts a new
one. A trial pauses at each rung: it saves a checkpoint and exits.

In ASHA, `so far` depends on the speed of the machines, so two searches with the same seed differ. Here, a search is the
same however long its trials really take, and however often they are preempted. For this, :func:`plan` simulates the
workers. In the simulation, a step of every trial takes one unit of time. A decision uses the values of all trials that
have reached their rung by then in simulated time, and waits for these values if necessary. So if all trials are equally
fast, hardly any trial waits. Trials that reach their rungs at the same simulated time are ordered by number.

`plan` starts at the beginning in each call, so nothing depends on earlier calls, and a call may be repeated.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeline.run.trials import Result, Study, Trial

Sampler = Callable[[int, Sequence[Trial]], Mapping[str, Any]]
"""Returns the parameters of a new trial. The arguments are the number of the trial, and the trials before it with the
results that are known at this time of the simulation."""


def plan(
    rungs: Sequence[int],
    *,
    trial_count: int,
    workers: int,
    eta: int,
    results: Mapping[tuple[int, int], Result],
    sample: Sampler,
) -> Study:
    """Return the study: the trials that run or have run, and the rung to which each of them trains.

    Args:
        rungs: the steps of the rungs, ascending.
        trial_count: the number of trials of the whole search.
        workers: the number of trials that run at the same time.
        eta: one of `eta` trials continues after a rung.
        results: the results so far, by number of the trial and index of the rung.
        sample: returns the parameters of a new trial.
    """
    trials: list[Trial] = []
    running: list[tuple[int, int]] = []
    """A heap with the end in simulated time and the number of each running trial."""
    now = 0
    while True:
        while len(running) < workers:
            number = _find_promotable(trials, len(rungs), eta)
            if number is None and len(trials) < trial_count:
                number = len(trials)
                trials.append(Trial(sample(number, tuple(trials))))
            else:
                if number is None and not running:
                    number = _find_last_hope(trials, len(rungs))
                if number is None:
                    break
                trials[number] = replace(trials[number], rung=trials[number].rung + 1)
            rung = trials[number].rung
            heapq.heappush(running, (now + rungs[rung] - (rungs[rung - 1] if rung else 0), number))
        if not running:
            return Study(tuple(rungs), tuple(trials), is_finished=True)
        now = running[0][0]
        ended = [number for end, number in running if end == now]
        if any((number, trials[number].rung) not in results for number in ended):
            break
        running = [(end, number) for end, number in running if end > now]
        heapq.heapify(running)
        for number in ended:
            trials[number] = _add_result(trials[number], results[number, trials[number].rung])
    # Results that no decision has used yet belong to the study also.
    for number, trial in enumerate(trials):
        if trial.result is None and (number, trial.rung) in results:
            trials[number] = _add_result(trial, results[number, trial.rung])
    return Study(tuple(rungs), tuple(trials))


def _add_result(trial: Trial, result: Result) -> Trial:
    """Return the trial with the result at its rung."""
    return replace(trial, results={**trial.results, trial.rung: result})


def _find_promotable(trials: Sequence[Trial], rung_count: int, eta: int) -> int | None:
    """Return the number of the trial to continue, at the highest rung that has one; None if no trial continues."""
    for rung in reversed(range(rung_count - 1)):
        ranking = _rank(trials, rung)
        for number in ranking[: len(ranking) // eta]:
            trial = trials[number]
            if trial.rung == rung and not trial.results[rung].is_final:
                return number
    return None


def _find_last_hope(trials: Sequence[Trial], rung_count: int) -> int | None:
    """Return the trial to continue if no trial is running or promotable, and none is complete.

    Without this rule, a search with few trials would end without a trained model. The result is the best paused trial
    at the highest rung; None if a trial is complete, or no trial is paused.
    """
    results = [(trial.rung, trial.result) for trial in trials if trial.result is not None and not trial.has_failed]
    if any(rung == rung_count - 1 or result.is_final for rung, result in results):
        return None
    for rung in reversed(range(rung_count - 1)):
        for number in _rank(trials, rung):
            if trials[number].rung == rung:
                return number
    return None


def _rank(trials: Sequence[Trial], rung: int) -> list[int]:
    """Return the numbers of the trials with a value at a rung, the lowest value first."""
    values = [
        (result.value, number)
        for number, trial in enumerate(trials)
        if (result := trial.results.get(rung)) is not None and result.value is not None
    ]
    return [number for _, number in sorted(values)]
