"""What failures cost a training on average, in closed form, and how often it should save.

The *effective training time ratio* (ETTR; Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
Research Clusters", HPCA 2025, arXiv 2410.21680, section II) is the time of steps that count over all time, waiting
included. A training on many nodes lives from restart to restart:

    wait │ restart │ work τ ┃ blocked b │ work τ ┃ blocked b │ work …  ✗ failure
                            └──── save s ────┘ from here on these τ are safe

Failures come at random with a constant rate (λ for the whole job: they add up over nodes), in a restart, too. A save
keeps the loop waiting for b seconds and is valid after s; where it is synchronous both are the same. A save waits for
the one before it, so the cycle is c = max(τ + b, s) and the k-th one is valid after τ + s + (k − 1)·c. Of a life that
ends after an exponential time, τ·e^(−λ(τ+s)) / (1 − e^(−λc)) seconds of work are kept on average; it takes 1/λ, and the
way to it e^(λR)·w + (e^(λR) − 1)/λ with restarts of R seconds and waits of w. With s = b, w = 0 this is Daly's
exact expectation (J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22, 2006, equation 20: the complete cost function). Preemptions are a second kind of end:
they give time to save, so nothing is done again.

Spare nodes, repairs and failures of several nodes have no such form: planning/simulation.py simulates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

DAY_S = 86400.0
_SHORTEST_S, _LONGEST_S = 0.1, 30 * DAY_S
"""Between these the best interval is sought."""


@dataclass(frozen=True)
class Conditions:
    """What a training of one size meets. Times are in seconds, rates in events per second of the whole job."""

    failure_rate: float
    restart_s: float
    """From the start of the job to its first step; a failure in it begins it anew."""
    wait_s: float
    """Between a failure and that start: noticing it, and the queue."""
    save_s: float
    """Until a checkpoint is valid."""
    blocked_s: float
    """What of that the training waits."""
    preemption_rate: float = 0.0
    preempted_s: float = 0.0
    """Between a preemption, once it has saved, and the next start."""

    @property
    def rate(self) -> float:
        """Of all that ends a life of the job."""
        return self.failure_rate + self.preemption_rate

    def cycle_s(self, interval_s: float) -> float:
        """From one save to the next, where there are `interval_s` seconds of work between two."""
        return max(interval_s + self.blocked_s, self.save_s)


def job_failure_rate(per_1000_node_days: float, nodes: int) -> float:
    """Failures per second of a job on so many nodes, from failures per 1,000 node-days."""
    return per_1000_node_days / 1000 * nodes / DAY_S


def effective_ratio(job: Conditions, interval_s: float) -> float:
    """Expected share of productive time, 0 to 1, of a long training with `interval_s` seconds of work between saves."""
    cycle, all_ends = job.cycle_s(interval_s), job.rate
    if all_ends == 0:
        return interval_s / cycle
    if all_ends * max(job.restart_s, interval_s + job.save_s) > 500:
        return 0.0  # it never comes to a checkpoint
    cycles = -math.expm1(-all_ends * cycle)
    failing = job.failure_rate / all_ends
    kept = failing * interval_s * math.exp(-all_ends * (interval_s + job.save_s)) / cycles
    first = -math.expm1(-all_ends * interval_s) / all_ends
    kept += (1 - failing) * first * (1 + math.exp(-all_ends * (interval_s + job.blocked_s)) / cycles)
    starts = math.exp(all_ends * job.restart_s)
    waits = failing * job.wait_s + (1 - failing) * job.preempted_s
    return kept / (starts * (1 / all_ends + waits) + (1 - failing) * job.save_s)


def young_s(job: Conditions) -> float:
    """First-order best interval, seconds of work: J. W. Young, Communications of the ACM 17 (9), 1974."""
    return math.sqrt(2 * job.blocked_s / job.failure_rate)


def daly_s(job: Conditions) -> float:
    """Best interval by Daly's series (2006, equation 37), seconds of work; for saves that block all the time."""
    part = job.blocked_s * job.failure_rate / 2
    if part >= 1:
        return 1 / job.failure_rate
    return young_s(job) * (1 + math.sqrt(part) / 3 + part / 9) - job.blocked_s


def best_interval_s(job: Conditions) -> float:
    """The interval, seconds of work, with the highest `effective_ratio`."""
    return least(lambda interval_s: -effective_ratio(job, interval_s), _SHORTEST_S, _LONGEST_S)


def least(function: Callable[[float], float], lowest: float, highest: float) -> float:
    """Where a function with one valley is least: golden section over the logarithm; the lower one of equals."""
    low, high, shrink = math.log(lowest), math.log(highest), (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - shrink * (high - low), low + shrink * (high - low)
        if function(math.exp(left)) <= function(math.exp(right)):
            high = right  # of equals, too: an interval at which all is lost may be too long
        else:
            low = left
    return math.exp((low + high) / 2)


def count_bounds(count: int) -> tuple[float, float]:
    """95 % bounds of the mean of a Poisson count, by Wilson and Hilferty's cube (PNAS 17 (12), 1931)."""

    def cube(n: int, sign: float) -> float:
        return n * (1 - 1 / (9 * n) + sign * 1.96 / (3 * math.sqrt(n))) ** 3

    return (cube(count, -1) if count else 0.0), cube(count + 1, 1)
