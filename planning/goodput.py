"""Estimate how much time a run loses by failures, for `plan --goodput` and for a line of `report`.

The *effective training time ratio* (ETTR) is the productive time (steps and evaluations that were not lost), divided by
all time, including waiting. It is defined in section II of Kokolis et al., "Revisiting Reliability in Large-Scale
Machine Learning Research Clusters" (HPCA 2025, arXiv 2410.21680). `effective_ratio` computes the ratio in closed form.
A discrete-event simulation (`simulate_run`) adds spare nodes, repairs and failures of several nodes at once, which have
no closed form.

Each input comes from the assumptions file, otherwise from the run's ledger, otherwise from a paper. The source is
printed. This module imports neither torch nor numpy, because it runs on the login node.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, quantiles, stdev
from typing import Annotated, NamedTuple

from pydantic import Field, PositiveInt, ValidationError
from rich.console import Console

from pipeline.base.errors import ConfigError, UserError, make_printable
from pipeline.base.yaml12 import parse_yaml
from pipeline.config.read import COMMAND_LINE, apply_overrides, dump_values, load_config, parse_config, parse_overrides
from pipeline.config.sections import Config
from pipeline.config.types import Fraction, NonNegativeInt, PositiveFloat, Section
from pipeline.run.directory import Run
from pipeline.run.events import Event, Saved
from pipeline.run.ledger import (
    PRODUCTIVE_CATEGORIES,
    STEP_TIME_KEYS,
    WAITING_CATEGORIES,
    AttemptTimes,
    StepLine,
    build_ledger,
    split_step_time,
    sum_categories,
)  # fmt: skip
from pipeline.run.lines import LineHistory
from pipeline.run.metrics import is_step_line
from planning.search import parse_node_counts
from slurm.query.status import build_table

DAY_S = 86400.0
HOUR_S = 3600.0
_MIN_INTERVAL_S = 0.1
_MAX_INTERVAL_S = 30 * DAY_S
"""The best interval is searched between `_MIN_INTERVAL_S` and `_MAX_INTERVAL_S`."""
_MAX_EXPONENT = 500.0
"""If the product of failure rate and required time is larger, practically no attempt reaches a valid checkpoint."""
_MIN_RATIO = 0.01
"""If the ratio is lower, the table shows that the run never ends."""

SIMULATED_RUNS = 40
"""Number of simulated runs for each number of nodes."""
_INTERVAL_RUNS = 10
"""Number of simulated runs for each interval of `find_good_intervals_s`."""
_MAX_STARTS = 200_000
"""The simulation of a run ends after this number of starts, even if the run has not ended."""
_INTERVAL_FACTORS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Multiples of the best interval that are simulated."""
_DEFAULT_WORK_S = 30 * DAY_S
"""Productive time that is simulated if the length of the run is unknown."""

_NON_FAILURE_CAUSES = (
    "done", "running", "preempted", "time_limit", "stopped", "cancelled", "stop file", "user_error", "bad_input",
    "storage", "bad_checkpoint", "requeued",
)  # fmt: skip
"""Causes of an attempt's end that the failure rate does not count. All other causes are failures."""
_DEFAULT_FIGURES: dict[str, tuple[float, str]] = {
    "failures": (6.5, "assumed: RSC-1's, arXiv 2410.21680"),
    "restart_s": (600.0, "assumed: 5 to 20 minutes on RSC-1, arXiv 2410.21680"),
    "wait_s": (60.0, "assumed: the job keeps its nodes"),
    "save_s": (60.0, "assumed"),
}
"""Value and source of the inputs that neither the assumptions nor the run's ledger contains."""
_ASYNC_BLOCKED_SHARE = 0.05
"""Share of an asynchronous save that blocks training: 6.3 of 148.8 s in PyTorch's blog of 2024-06-12, rounded."""
_DESCRIPTIONS = {
    "failures": "failures per 1,000 node-days", "restart_s": "seconds from start to first step",
    "wait_s": "seconds from a failure to that start", "save_s": "seconds until a checkpoint is valid",
    "blocked_s": "seconds of these that block the training",
    "gpu_hours": "GPU-hours of the whole training without failures",
}  # fmt: skip
"""Descriptions of the printed inputs, by the keys of `GoodputAssumptions`."""

NonNegativeNumber = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


# --------------------------------------------------------------------------------------------------------- assumptions


class GoodputAssumptions(Section):
    """The content of an assumptions file.

    If a value is null, the run's measurement is used. Without a measurement, a figure from a paper is used.
    """

    failures: PositiveFloat | None = None
    """Failures that stop the job, per 1,000 node-days."""
    restart_s: NonNegativeNumber | None = None
    """Seconds from the start of a job to its first step."""
    wait_s: NonNegativeNumber | None = None
    """Seconds from a failure to the next start of the job: detecting the failure, and waiting in the queue."""
    save_s: NonNegativeNumber | None = None
    """Seconds from the start of a save until its checkpoint is valid."""
    blocked_s: NonNegativeNumber | None = None
    """Seconds of a save that block training."""
    step_s: PositiveFloat | None = None
    """Seconds per step on the config's number of nodes. Together with train.steps, it gives the length of the run."""
    gpu_hours: PositiveFloat | None = None
    """The length of the run in GPU-hours (rank-hours without GPUs), for any number of nodes."""
    preemptions: NonNegativeNumber = 0.0
    """Preemptions of the job per day. The job can save a checkpoint before each preemption."""
    preempted_s: NonNegativeNumber = 3600.0
    """Seconds from a preemption to the next start."""
    spares: NonNegativeInt | None = None
    """Number of spare nodes that replace failed nodes; null: there are always enough. This key and the next three keys
    affect only the simulation."""
    repair_hours: PositiveFloat = 24.0
    """Mean hours until a failed node is repaired."""
    together: Fraction = 0.0
    """Share of failures that affect several nodes at once, such as failures of a switch or of a rack's power."""
    nodes_together: PositiveInt = 1
    """Number of nodes that a failure of several nodes affects."""
    gpu_hour: PositiveFloat | None = None
    """Price of one GPU-hour (rank-hour without GPUs), in any currency."""


def load_assumptions(path: Path | None, overrides: Sequence[str] = ()) -> GoodputAssumptions:
    """Load an assumptions file (YAML).

    Args:
        path: The file; None for the defaults.
        overrides: Values that replace those of the file, as `goodput.KEY=VALUE`.

    Raises:
        UserError: The file cannot be read, or a key is unknown, or a value is invalid.
    """
    source = COMMAND_LINE if path is None else str(path)
    try:
        values = (parse_yaml(path.read_text(), str(path)) or {}) if path is not None else {}
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise UserError("plan.unreadable_file", make_printable(f"--assumptions {path}: {error}")) from None
    if not isinstance(values, dict):
        raise UserError(
            "plan.invalid_assumptions", make_printable(f"{path}: write keys and values such as `failures: 6.5`")
        )
    values |= parse_overrides(overrides).get("goodput", {})
    try:
        return GoodputAssumptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = f"{source}: {key}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, GoodputAssumptions.model_fields, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            message = (
                f"{source}: there is no key {key}; {hint}The keys are {', '.join(GoodputAssumptions.model_fields)}"
            )
        raise UserError("plan.invalid_assumptions", make_printable(message)) from None


# --------------------------------------------------------------------------------------------------------- closed form


@dataclass(frozen=True)
class JobConditions:
    """Failure rates and durations of one job. Times are in seconds, rates in events per second of the whole job."""

    failure_rate: float
    restart_s: float
    """Time from the start of the job to its first step. If a failure occurs in this time, the job starts again."""
    wait_s: float
    """Time from a failure to the next start: detecting the failure, and waiting in the queue."""
    save_s: float
    """Time from the start of a save until its checkpoint is valid."""
    blocked_s: float
    """Time for which a save blocks training."""
    preemption_rate: float = 0.0
    preempted_s: float = 0.0
    """Time from the end of the save before a preemption to the next start."""

    @property
    def rate(self) -> float:
        """Rate of failures and preemptions."""
        return self.failure_rate + self.preemption_rate

    def cycle_s(self, interval_s: float) -> float:
        """Return the seconds from one save to the next if there are `interval_s` seconds of work between the saves."""
        return max(interval_s + self.blocked_s, self.save_s)


def job_failure_rate(per_1000_node_days: float, nodes: int) -> float:
    """Return the failures per second of a job on `nodes` nodes, from failures per 1,000 node-days."""
    return per_1000_node_days / 1000 * nodes / DAY_S


def effective_ratio(job: JobConditions, interval_s: float) -> float:
    """Return the expected share of productive time, 0 to 1, of a long run.

    A run on many nodes consists of attempts that each end by a failure:

        wait │ restart │ work τ ┃ blocked b │ work τ ┃ blocked b │ work …  ✗ failure
                                └──── save s ────┘ the first τ seconds of work are now saved

    Failures are random with a constant rate λ of the whole job, and also occur during a restart. A save blocks training
    for b seconds and is valid after s seconds. For synchronous saves, b and s are equal. A save waits for the previous
    save, so a cycle takes c = max(τ + b, s), and the k-th save is valid after τ + s + (k − 1)·c. If an attempt ends
    after an exponentially distributed time, τ·e^(−λ(τ+s)) / (1 − e^(−λc)) seconds of work are saved on average. The
    attempt takes 1/λ seconds on average. Restarts of R seconds and waits of w seconds before the attempt take
    e^(λR)·w + (e^(λR) − 1)/λ seconds.

    With s = b and w = 0, this is Daly's exact expectation (J. T. Daly, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", Future Generation Computer Systems 22, 2006, equation 20: the complete cost
    function). An attempt can also end by a preemption. The job saves before a preemption, so no work is lost.

    Args:
        job: Rates and durations.
        interval_s: Seconds of work τ between two saves.
    """
    cycle = job.cycle_s(interval_s)
    rate = job.rate
    if rate == 0:
        return interval_s / cycle
    if rate * max(job.restart_s, interval_s + job.save_s) > _MAX_EXPONENT:
        return 0.0
    p_end_in_cycle = -math.expm1(-rate * cycle)
    failure_share = job.failure_rate / rate  # share of attempts that end by a failure, not by a preemption
    saved_s = failure_share * interval_s * math.exp(-rate * (interval_s + job.save_s)) / p_end_in_cycle
    # All work before a preemption is saved. It is the expected work in an interval that an attempt starts (the attempt
    # may end in this interval), times the expected number of such intervals.
    work_per_interval_s = -math.expm1(-rate * interval_s) / rate
    started_intervals = 1 + math.exp(-rate * (interval_s + job.blocked_s)) / p_end_in_cycle
    saved_s += (1 - failure_share) * work_per_interval_s * started_intervals
    starts = math.exp(rate * job.restart_s)  # expected number of starts until a restart succeeds
    wait_s = failure_share * job.wait_s + (1 - failure_share) * job.preempted_s
    # The divisor is the time of the waits and starts, (e^(λR) − 1)/λ + e^(λR)·w, of the attempt, 1/λ, and of the save
    # before a preemption.
    return saved_s / (starts * (1 / rate + wait_s) + (1 - failure_share) * job.save_s)


def young_interval_s(job: JobConditions) -> float:
    """Return Young's first-order estimate of the best interval in seconds of work.

    Source: J. W. Young, Communications of the ACM 17 (9), 1974.
    """
    return math.sqrt(2 * job.blocked_s / job.failure_rate)


def daly_interval_s(job: JobConditions) -> float:
    """Return the best interval by Daly's series (2006, equation 37) in seconds of work, for synchronous saves.

    If a save takes at least twice the mean time between failures, the result is this mean time.
    """
    ratio = job.blocked_s * job.failure_rate / 2  # duration of a save, divided by twice the mean time between failures
    if ratio >= 1:
        return 1 / job.failure_rate
    return young_interval_s(job) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - job.blocked_s


def best_interval_s(job: JobConditions) -> float:
    """Return the interval, in seconds of work, with the highest `effective_ratio`."""
    return minimize(lambda interval_s: -effective_ratio(job, interval_s), _MIN_INTERVAL_S, _MAX_INTERVAL_S)


def minimize(function: Callable[[float], float], lowest: float, highest: float) -> float:
    """Return the argument between `lowest` and `highest` at which a function with one minimum is lowest.

    This is a golden section search over the logarithm of the argument.
    """
    low = math.log(lowest)
    high = math.log(highest)
    shrink = (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left = high - shrink * (high - low)
        right = low + shrink * (high - low)
        if function(math.exp(left)) <= function(math.exp(right)):
            # If both are equal, the search also continues on the left. `effective_ratio` is 0 for all intervals that
            # are much too long.
            high = right
        else:
            low = left
    return math.exp((low + high) / 2)


def count_bounds(count: int) -> tuple[float, float]:
    """Return 95 % bounds of the mean of a Poisson distribution from which `count` was observed.

    They use the approximation of Wilson and Hilferty (PNAS 17 (12), 1931).
    """

    def compute_bound(n: int, sign: float) -> float:
        """Return the lower bound if `sign` is -1, the upper bound if `sign` is 1."""
        return n * (1 - 1 / (9 * n) + sign * 1.96 / (3 * math.sqrt(n))) ** 3

    return (compute_bound(count, -1) if count else 0.0), compute_bound(count + 1, 1)


# ---------------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class NodePool:
    """Spare nodes and repairs. If there is no spare for a failed node, the job waits for a repair."""

    spares: int | None = None
    """Number of spare nodes; None: there are always enough."""
    repair_s: float = 0.0
    """Mean time until a failed node is repaired."""
    together: float = 0.0
    """Share of failures that affect several nodes at once, 0 to 1."""
    nodes_together: int = 1
    """Number of nodes that a failure of several nodes affects."""


@dataclass(frozen=True)
class SimulatedRun:
    """The result of one simulated run. Times are in seconds."""

    seconds: float
    """Time from the first start to the last step; infinite if the simulation stopped earlier."""
    failures: int
    """Number of failures."""
    lost_s: float
    """Time of work that was lost because no checkpoint contains it."""
    no_node_s: float
    """Time of waiting until a failed node is repaired."""


@dataclass(frozen=True)
class Expectation:
    """Statistics of many simulated runs."""

    ratio: float
    """Mean share of productive time, 0 to 1."""
    margin: float
    """Half of the 95 % confidence interval of `ratio`."""
    mean_s: float
    """Mean seconds until the end."""
    p95_s: float
    """Seconds in which 95 % of the runs end."""
    no_node_s: float
    """Mean seconds of waiting until a failed node is repaired."""


def simulate_run(job: JobConditions, interval_s: float, work_s: float, pool: NodePool, seed: int) -> SimulatedRun:
    """Simulate one run from failure to failure. The same seed gives the same result.

    This is a discrete-event simulation: the clock jumps from one event (a failure, a preemption, a repair) to the next,
    and the work saved in between is computed. Failures have a constant rate, so one random number gives the time of the
    next failure of all nodes, even of 16,384. Simulating a run of 54 days with 5,700 failures takes about 20
    milliseconds. Repair times are distributed exponentially.

    Args:
        job: Rates and durations.
        interval_s: Seconds of work between two saves.
        work_s: Productive seconds of the whole run.
        pool: Spare nodes and repairs.
        seed: Seed of the random numbers.

    Returns:
        The result. Its `seconds` are infinite if the run has not ended after `_MAX_STARTS` starts.
    """
    random = Random(seed)
    cycle = job.cycle_s(interval_s)
    clock = 0.0
    done_s = 0.0
    lost_s = 0.0
    no_node_s = 0.0
    failures = 0
    spares = pool.spares or 0  # negative if nodes are missing
    repairs: list[float] = []  # heap of the times at which failed nodes are repaired
    for _ in range(_MAX_STARTS):
        # Take repaired nodes back. If nodes are missing, wait for the next repair.
        while repairs and (repairs[0] <= clock or spares < 0):
            repair_time = heappop(repairs)
            no_node_s += max(0.0, repair_time - clock)
            clock = max(clock, repair_time)
            spares += 1
        attempt_s = random.expovariate(job.rate) if job.rate else math.inf
        ran_s = attempt_s - job.restart_s  # negative if the attempt ends during the restart
        # After the last interval, the run ends without waiting for another save. 1e-9 allows for rounding errors.
        saves = math.ceil((work_s - done_s) / interval_s - 1e-9) - 1
        # The first save only blocks. Every further save may also have to wait for the previous save.
        remaining_s = (work_s - done_s) + (saves > 0) * job.blocked_s + max(0, saves - 1) * (cycle - interval_s)
        if ran_s >= remaining_s:
            return SimulatedRun(clock + job.restart_s + remaining_s, failures, lost_s, no_node_s)
        clock += attempt_s
        worked_s = _work_after_restart(job, interval_s, ran_s)
        if random.random() * job.rate < job.preemption_rate:  # A preemption ended the attempt, not a failure.
            # The job saves before the preemption, unless it was still starting.
            done_s += worked_s
            clock += job.preempted_s + (job.save_s if ran_s >= 0 else 0.0)
            continue
        failures += 1
        is_saved = ran_s >= interval_s + job.save_s
        valid_saves = 1 + math.floor((ran_s - interval_s - job.save_s) / cycle) if is_saved else 0
        done_s += valid_saves * interval_s
        lost_s = lost_s + worked_s - valid_saves * interval_s
        clock += job.wait_s
        if pool.spares is not None:
            # The repairs start at the failure, not after the wait, which is already added to `clock`.
            for _ in range(pool.nodes_together if random.random() < pool.together else 1):
                spares -= 1
                repair_s = random.expovariate(1 / pool.repair_s) if pool.repair_s else 0.0
                heappush(repairs, clock - job.wait_s + repair_s)
    return SimulatedRun(math.inf, failures, lost_s, no_node_s)


def _work_after_restart(job: JobConditions, interval_s: float, ran_s: float) -> float:
    """Return the seconds of work in the first `ran_s` seconds after a restart."""
    if ran_s <= interval_s + job.blocked_s:
        return min(max(0.0, ran_s), interval_s)
    cycles, remainder_s = divmod(ran_s - interval_s - job.blocked_s, job.cycle_s(interval_s))
    return (1 + cycles) * interval_s + min(remainder_s, interval_s)


def simulate_runs(
    job: JobConditions, interval_s: float, work_s: float, pool: NodePool, runs: int = SIMULATED_RUNS, seed: int = 1
) -> Expectation:
    """Simulate `runs` runs (at least 2), each with a different seed, and return their statistics.

    The other arguments are those of `simulate_run`.
    """
    # With this factor, calls with different seeds share no seed of a run.
    simulated = [simulate_run(job, interval_s, work_s, pool, seed * 1_000_003 + number) for number in range(runs)]
    ratios = [work_s / run.seconds for run in simulated]
    durations = [run.seconds for run in simulated]
    margin = 1.96 * stdev(ratios) / math.sqrt(runs)
    no_node_s = fmean(run.no_node_s for run in simulated)
    p95_s = quantiles(durations, n=20)[-1] if max(durations) < math.inf else math.inf
    return Expectation(fmean(ratios), margin, fmean(durations), p95_s, no_node_s)


def find_good_intervals_s(
    job: JobConditions, near_s: float, work_s: float, pool: NodePool, runs: int = _INTERVAL_RUNS
) -> tuple[float, float]:
    """Return the shortest and longest interval near `near_s` that the simulation cannot distinguish from the best.

    All intervals are simulated with the same seeds. An interval is good if its mean ratio is within the margin of the
    highest mean ratio.
    """
    simulated = [
        (factor * near_s, simulate_runs(job, factor * near_s, work_s, pool, runs)) for factor in _INTERVAL_FACTORS
    ]
    best = max((expectation for _, expectation in simulated), key=lambda expectation: expectation.ratio)
    good = [interval_s for interval_s, expectation in simulated if expectation.ratio >= best.ratio - best.margin]
    return min(good), max(good)


# -------------------------------------------------------------------------------------------------------------- inputs


class GoodputFigure(NamedTuple):
    """The value of an input, and the source of the value."""

    value: float
    source: str


def measure_goodput_figures(
    events: Sequence[Event], steps: Sequence[StepLine], attempts: Sequence[AttemptTimes], ranks_per_node: int
) -> dict[str, GoodputFigure]:
    """Return the figures that a run has measured, by the keys of `GoodputAssumptions`.

    Args:
        events: Events of the train stage.
        steps: Lines of metrics of the run.
        attempts: Attempts of the train stage.
        ranks_per_node: Number of ranks per node.
    """
    figures: dict[str, GoodputFigure] = {}
    node_days = sum(_node_days(attempt, ranks_per_node) for attempt in attempts)
    failed = [attempt for attempt in attempts if attempt.cause not in _NON_FAILURE_CAUSES]
    if failed and node_days:
        low, high = (1000 * bound / node_days for bound in count_bounds(len(failed)))
        source = f"measured: {len(failed)} in {node_days:.3g} node-days; 95 % between {low:.3g} and {high:.3g}"
        figures["failures"] = GoodputFigure(1000 * len(failed) / node_days, source)
        next_attempts = [later for earlier, later in pairwise(attempts) if earlier in failed]
        waits = [attempt.seconds["ending"] for attempt in failed]
        waits += [attempt.seconds["queue"] for attempt in next_attempts]
        figures["wait_s"] = GoodputFigure(sum(waits) / len(failed), f"measured: mean of {len(failed)}")
    starts = [
        attempt.seconds["startup"]
        for attempt in attempts
        if any(attempt.seconds[category] for category in PRODUCTIVE_CATEGORIES)
    ]
    if starts:
        figures["restart_s"] = GoodputFigure(fmean(starts), f"measured: mean of {len(starts)}")
    if saves := [event.seconds for event in events if isinstance(event, Saved) and event.seconds]:
        figures["save_s"] = GoodputFigure(fmean(saves), f"measured: mean of {len(saves)}")
        if blocked := [float(line["checkpoint_s"]) for line in steps if line.get("checkpoint_s")]:
            figures["blocked_s"] = GoodputFigure(fmean(blocked), f"measured: mean of {len(blocked)}")
    if steps:
        step_s = fmean(sum(split_step_time(line)[category] for category in PRODUCTIVE_CATEGORIES) for line in steps)
        figures["step_s"] = GoodputFigure(step_s, f"measured: mean of {len(steps):,}")
    return figures


def _node_days(attempt: AttemptTimes, ranks_per_node: int) -> float:
    """Return the time of an attempt without waiting, in days, times its number of nodes."""
    ran_s = sum(spent for category, spent in attempt.seconds.items() if category not in WAITING_CATEGORIES)
    return ran_s / DAY_S * _count_nodes(attempt, ranks_per_node)


def _count_nodes(attempt: AttemptTimes, ranks_per_node: int) -> int:
    """Return the number of nodes of an attempt, at least 1."""
    return max(1, round(attempt.ranks / ranks_per_node))


def collect_goodput_figures(
    config: Config, measured: Mapping[str, GoodputFigure], assumptions: GoodputAssumptions
) -> dict[str, GoodputFigure]:
    """Return all known inputs by the keys of `GoodputAssumptions`. Assumptions replace measured figures.

    Missing inputs are computed from the others or have defaults. Only `step_s` and `gpu_hours` may remain unknown.
    """
    figures = {key: GoodputFigure(*figure) for key, figure in _DEFAULT_FIGURES.items()} | dict(measured)
    for key in (*_DESCRIPTIONS, "step_s"):
        if (value := getattr(assumptions, key)) is not None:
            figures[key] = GoodputFigure(value, f"goodput.{key}")
    save_s = figures["save_s"].value
    if config.checkpoint.mode == "sync":
        figures.setdefault("blocked_s", GoodputFigure(save_s, "checkpoint.mode sync: the whole save"))
    assumed_blocked = GoodputFigure(_ASYNC_BLOCKED_SHARE * save_s, "assumed: 5 %, with checkpoint.mode async")
    figures.setdefault("blocked_s", assumed_blocked)
    if figures["blocked_s"].value > save_s:  # This can happen if the two figures have different sources.
        figures["save_s"] = GoodputFigure(figures["blocked_s"].value, "raised to the seconds that block the training")
    steps = config.train.steps
    if "gpu_hours" not in figures and "step_s" in figures and steps is not None:
        ranks = config.stages.train.ranks
        step_s = figures["step_s"].value
        source = f"{steps:,} steps of {step_s:.3g} s on {ranks} ranks"
        figures["gpu_hours"] = GoodputFigure(steps * step_s * ranks / 3600, source)
    return figures


def job_conditions(figures: Mapping[str, GoodputFigure], assumptions: GoodputAssumptions, nodes: int) -> JobConditions:
    """Return the conditions of a run's job on `nodes` nodes."""
    times = {key: figures[key].value for key in ("restart_s", "wait_s", "save_s", "blocked_s")}
    rate = job_failure_rate(figures["failures"].value, nodes)
    preemption_rate = assumptions.preemptions / DAY_S
    return JobConditions(rate, **times, preemption_rate=preemption_rate, preempted_s=assumptions.preempted_s)


# -------------------------------------------------------------------------------------------------------------- output


def print_goodput(
    target: Path, overrides: Sequence[str], nodes: str | None, console: Console, assumptions_file: Path | None = None
) -> None:
    """Print the ratio, the best interval, the days and the cost of a run for several numbers of nodes.

    Args:
        target: A config or a run directory. The ledger of a run provides measured inputs.
        overrides: Changes to the config as `KEY=VALUE`, and assumptions as `goodput.KEY=VALUE`.
        nodes: Numbers of nodes such as `16,2048` or `2..64`; None for 1, 4, 16 and 64 times the config's number.
        console: Where to print.
        assumptions_file: A file with the keys of `GoodputAssumptions`.

    Raises:
        UserError: The config, the run, the assumptions or `nodes` are invalid.
    """
    goodput_overrides = [override for override in overrides if override.startswith("goodput.")]
    assumptions = load_assumptions(assumptions_file, goodput_overrides)
    overrides = [override for override in overrides if not override.startswith("goodput.")]
    measured: dict[str, GoodputFigure] = {}
    if target.is_dir():
        run = Run.open(target)
        config = parse_config(apply_overrides(dump_values(run.config), overrides), COMMAND_LINE)
        steps = LineHistory(run.metrics_file, is_step_line, row_keys=STEP_TIME_KEYS).read_new_lines().rows
        attempts = build_ledger(run.read_events(), steps, {"train": run.config.get_stage("train")}, time.time())
        # Without `overrides`, because the run was measured without them.
        ranks_per_node = run.config.stages.train.tasks_per_node
        measured = measure_goodput_figures(run.read_events("train"), steps, attempts, ranks_per_node)
    else:
        config = load_config(target, overrides)
    train = config.stages.train
    figures = collect_goodput_figures(config, measured, assumptions)
    node_counts = parse_node_counts(nodes) if nodes else [train.max_nodes * factor for factor in (1, 4, 16, 64)]
    for key, meaning in _DESCRIPTIONS.items():
        if key in figures:
            console.print(f"{figures[key].value:>10.4g}  {meaning} ({figures[key].source})", soft_wrap=True)
    console.print()
    rows = [_build_row(config, figures, assumptions, count) for count in node_counts]
    titles = [title for title in rows[0] if any(title in row and row[title] for row in rows)]
    console.print(build_table([titles, *([row[title] for title in titles] for row in rows)]), soft_wrap=True)
    for note in _explain_columns(config, figures, node_counts):
        console.print(note, soft_wrap=True)


def _build_row(
    config: Config, figures: Mapping[str, GoodputFigure], assumptions: GoodputAssumptions, nodes: int
) -> dict[str, str]:
    """Return a row of the table by column title. A value is "" if it is unknown. Empty columns are not printed."""
    train = config.stages.train
    job = job_conditions(figures, assumptions, nodes)
    gpus = nodes * train.tasks_per_node
    best_s = best_interval_s(job)
    ratio = effective_ratio(job, best_s)
    configured_ratio = ""
    if "step_s" in figures and nodes == train.max_nodes:
        interval_s = config.checkpoint.every_steps * figures["step_s"].value
        configured_ratio = f"{100 * effective_ratio(job, interval_s):.1f} %"
    row = {
        "nodes": f"{nodes:,}", "GPUs": f"{gpus:,}", "a failure every": format_span(1 / job.failure_rate),
        "save every": format_span(best_s), "Young": format_span(young_interval_s(job)),
        "Daly": format_span(daly_interval_s(job)), "simulated": "", "effective": f"{100 * ratio:.1f} %",
        "as configured": configured_ratio, "whole training": "", "waiting for nodes": "",
        "days": "never" if ratio < _MIN_RATIO else "", "95 % below": "", "cost": "",
    }  # fmt: skip
    if ratio < _MIN_RATIO:
        return row
    work_s = figures["gpu_hours"].value * HOUR_S / gpus if "gpu_hours" in figures else _DEFAULT_WORK_S
    repair_s = HOUR_S * assumptions.repair_hours
    pool = NodePool(assumptions.spares, repair_s, assumptions.together, assumptions.nodes_together)
    expectation = simulate_runs(job, best_s, work_s, pool)
    # To limit the time of the simulation, the intervals are compared over about 1,000 failures at most.
    shortest, longest = find_good_intervals_s(job, best_s, min(work_s, 1000 / job.failure_rate), pool)
    row["simulated"] = f"{format_span(shortest)} – {format_span(longest)}"
    row["whole training"] = f"{100 * expectation.ratio:.1f} ± {100 * expectation.margin:.1f} %"
    if assumptions.spares is not None:
        row["waiting for nodes"] = f"{100 * expectation.no_node_s / expectation.mean_s:.1f} %"
    if "gpu_hours" in figures:
        row["days"] = f"{expectation.mean_s / DAY_S:,.2f}"
        row["95 % below"] = f"{expectation.p95_s / DAY_S:,.2f}"
        if assumptions.gpu_hour is not None:
            row["cost"] = f"{assumptions.gpu_hour * expectation.mean_s / HOUR_S * gpus:,.0f}"
    return row


def _explain_columns(config: Config, figures: Mapping[str, GoodputFigure], node_counts: Sequence[int]) -> Iterator[str]:
    """Yield explanations of the table's columns."""
    configured_nodes = config.stages.train.max_nodes
    yield "save every: the interval with the highest ratio; simulated: intervals that are as good in a simulation"
    if "step_s" in figures and configured_nodes in node_counts:
        yield f"as configured: the ratio with checkpoint.every_steps {config.checkpoint.every_steps:,}"
    if "gpu_hours" not in figures:
        yield "whole training: of 30 days; for the days and cost of your run, set gpu_hours or step_s, or name a run"
    elif any(count != configured_nodes for count in node_counts):
        yield "days: assuming that twice the nodes are twice as fast; `plan --best` predicts how much faster they are"


def describe_expected_goodput(
    config: Config, events: Sequence[Event], steps: Sequence[StepLine], attempts: Sequence[AttemptTimes]
) -> str | None:
    """Describe the expected goodput of a run so far, to compare it with the measured goodput.

    Return None if the run has no step or no save yet. Also return None if the run has used less than one node-day,
    because this time is too short for a comparison.

    Args:
        config: The run's config.
        events: Events of the train stage.
        steps: Lines of metrics of the run.
        attempts: Attempts of the train stage.
    """
    ranks_per_node = config.stages.train.tasks_per_node
    measured = measure_goodput_figures(events, steps, attempts, ranks_per_node)
    # The expectation uses the assumed failure rate. The measured rate is only printed.
    measured_failures = measured.pop("failures", None)
    productive_s = sum(sum_categories(attempts)[category] for category in PRODUCTIVE_CATEGORIES)
    node_days = sum(_node_days(attempt, ranks_per_node) for attempt in attempts)
    if not productive_s or node_days < 1 or not {"save_s", "step_s", "restart_s"} <= measured.keys():
        return None
    assumptions = GoodputAssumptions()
    figures = collect_goodput_figures(config, measured, assumptions)
    job = job_conditions(figures, assumptions, max(_count_nodes(attempt, ranks_per_node) for attempt in attempts))
    interval_s = config.checkpoint.every_steps * figures["step_s"].value
    # `effective_ratio` counts one restart per failure or preemption, but a run also starts once if nothing fails.
    expected_s = productive_s / max(_MIN_RATIO, effective_ratio(job, interval_s)) + job.restart_s
    rate, source = figures["failures"]
    count = sum(attempt.cause not in _NON_FAILURE_CAUSES for attempt in attempts)
    comparison = (
        f"expected {productive_s / expected_s:.3f} and {rate / 1000 * node_days:.2g} failures (there were {count}): "
        f"{rate:g} per 1,000 node-days ({source})"
    )
    return comparison + (f"; {measured_failures.source}" if measured_failures else "")


def format_span(seconds: float) -> str:
    """Format a duration in a suitable unit: 95 s, 14 min, 1.8 h, 9.3 days."""
    for unit, size, limit_s in (("s", 1, 120), ("min", 60, 5400), ("h", 3600, 2 * DAY_S)):
        if seconds < limit_s:
            return f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:.0f} {unit}"
    return f"{seconds / DAY_S:.2g} days" if seconds < 10 * DAY_S else f"{seconds / DAY_S:,.0f} days"
