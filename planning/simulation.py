"""Whole trainings, simulated from failure to failure: nodes that break, spares, repairs, preemption.

A discrete-event simulation: the clock jumps from one event to the next (a node fails, a group of nodes fails together,
the job is preempted, a repair is done), repairs wait in a heap. Between two events nothing is simulated: what was saved
by then is arithmetic (planning/goodput.py has the picture). Ends come at random with a constant rate, so those
of 16,384 nodes are drawn as one; a training of 54 days with 5,700 failures takes some 20 milliseconds. Times of repair
are exponential, too.

Many trainings, each with a seed of its own, give the mean with its 95 % confidence interval, and what most of them
(95 %) stay below. The same seed gives the same training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from statistics import fmean, quantiles, stdev

from planning.goodput import Conditions

TRAININGS = 40
"""So many are simulated."""
_MOST_STARTS = 200_000
"""A training that has not ended after so many is given up."""
_AROUND = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Parts of the best interval that are tried."""


@dataclass(frozen=True)
class Pool:
    """The nodes behind a job: without spares for what fails it waits for a repair."""

    spares: int | None = None
    """Nodes that stand by; None: there are always enough."""
    repair_s: float = 0.0
    """Mean time until a failed node is back."""
    together: float = 0.0
    """Share of failures that take several nodes at once, 0 to 1."""
    nodes_together: int = 1
    """How many these take."""


@dataclass(frozen=True)
class Training:
    """One simulated training; times in seconds."""

    seconds: float
    """From its first start to its last step; infinite where it was given up."""
    failures: int
    lost_s: float
    """Work that was done again."""
    no_node_s: float
    """Waiting for nodes to be repaired."""


@dataclass(frozen=True)
class Expectation:
    """What many simulated trainings come to."""

    ratio: float
    """Mean share of productive time, 0 to 1."""
    margin: float
    """Half of its 95 % confidence interval."""
    mean_s: float
    most_s: float
    """Seconds until the end: on average, and what 95 % of the trainings stay below."""
    no_node_s: float
    """Mean time without enough nodes."""


def simulate(job: Conditions, interval_s: float, work_s: float, pool: Pool, seed: int) -> Training:
    """One training of `work_s` productive seconds, with `interval_s` of them between two saves."""
    draw, cycle = Random(seed), job.cycle_s(interval_s)
    clock = done = lost = no_node = 0.0
    failures, spares = 0, pool.spares or 0
    repairs: list[float] = []
    for _ in range(_MOST_STARTS):
        while repairs and (repairs[0] <= clock or spares < 0):
            back = heappop(repairs)
            no_node += max(0.0, back - clock)
            clock, spares = max(clock, back), spares + 1
        ends = draw.expovariate(job.rate) if job.rate else math.inf
        ran = ends - job.restart_s
        saves = math.ceil((work_s - done) / interval_s - 1e-9) - 1  # the last one is the end
        left = (work_s - done) + (saves > 0) * job.blocked_s + max(0, saves - 1) * (cycle - interval_s)
        if ran >= left:
            return Training(clock + job.restart_s + left, failures, lost, no_node)
        clock += ends
        worked = _worked(job, interval_s, ran)
        if draw.random() * job.rate < job.preemption_rate:
            done += worked
            clock += job.preempted_s + (job.save_s if ran >= 0 else 0.0)
            continue
        failures += 1
        valid = 1 + math.floor((ran - interval_s - job.save_s) / cycle) if ran >= interval_s + job.save_s else 0
        done, lost, clock = done + valid * interval_s, lost + worked - valid * interval_s, clock + job.wait_s
        if pool.spares is not None:
            for _ in range(pool.nodes_together if draw.random() < pool.together else 1):
                spares -= 1
                heappush(repairs, clock - job.wait_s + (draw.expovariate(1 / pool.repair_s) if pool.repair_s else 0.0))
    return Training(math.inf, failures, lost, no_node)


def _worked(job: Conditions, interval_s: float, ran_s: float) -> float:
    """Seconds of work in the first `ran_s` seconds after a restart."""
    if ran_s <= interval_s + job.blocked_s:
        return min(max(0.0, ran_s), interval_s)
    cycles, rest = divmod(ran_s - interval_s - job.blocked_s, job.cycle_s(interval_s))
    return (1 + cycles) * interval_s + min(rest, interval_s)


def expect(
    job: Conditions, interval_s: float, work_s: float, pool: Pool, trainings: int = TRAININGS, seed: int = 1
) -> Expectation:
    """What so many trainings come to; `trainings` is 2 or more."""
    found = [simulate(job, interval_s, work_s, pool, seed * 1_000_003 + number) for number in range(trainings)]
    ratios = [work_s / one.seconds for one in found]
    seconds = [one.seconds for one in found]
    margin, waited = 1.96 * stdev(ratios) / math.sqrt(trainings), fmean(one.no_node_s for one in found)
    most = quantiles(seconds, n=20)[-1] if max(seconds) < math.inf else math.inf
    return Expectation(fmean(ratios), margin, fmean(seconds), most, waited)


def good_intervals_s(
    job: Conditions, around_s: float, work_s: float, pool: Pool, trainings: int = 10
) -> tuple[float, float]:
    """The shortest and the longest interval near `around_s` that the simulation cannot tell from the best one.

    All are tried with the same seeds; their means lie within the margin of the highest.
    """
    tried = [(part * around_s, expect(job, part * around_s, work_s, pool, trainings)) for part in _AROUND]
    best = max((found for _, found in tried), key=lambda found: found.ratio)
    good = [interval for interval, found in tried if found.ratio >= best.ratio - best.margin]
    return min(good), max(good)
