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

Spare nodes, repairs and failures of several nodes have no such form: planning/goodput.py simulates them.

Whole trainings, simulated from failure to failure: nodes that break, spares, repairs, preemption.

A discrete-event simulation: the clock jumps from one event to the next (a node fails, a group of nodes fails together,
the job is preempted, a repair is done), repairs wait in a heap. Between two events nothing is simulated: what was saved
by then is arithmetic (planning/goodput.py has the picture). Ends come at random with a constant rate, so those
of 16,384 nodes are drawn as one; a training of 54 days with 5,700 failures takes some 20 milliseconds. Times of repair
are exponential, too.

Many trainings, each with a seed of its own, give the mean with its 95 % confidence interval, and what most of them
(95 %) stay below. The same seed gives the same training.

What failures are expected to cost: `plan --goodput`, and a line of `report` beside the ledger.

Every figure that goes in is, in this order, the one of the config (`goodput:`), the run's own, measured by its ledger,
or one from a paper; each is printed with where it comes from. planning/goodput.py has the formulas,
planning/goodput.py the simulation. No torch, no numpy: it runs on the login node.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, quantiles, stdev
from typing import NamedTuple

from rich.console import Console

from pipeline.config.read import apply_overrides, load_config, parse_config
from pipeline.config.recovery import GoodputConfig
from pipeline.config.sections import Config
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.history import History
from pipeline.run.ledger import (
    PRODUCTIVE_CATEGORIES,
    STEP_TIME_KEYS,
    WAITING_CATEGORIES,
    AttemptTimes,
    Event,
    build_ledger,
    split_step_time,
    sum_categories,
)
from planning.search import parse_node_counts
from slurm.query.status import build_table

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
    return minimize(lambda interval_s: -effective_ratio(job, interval_s), _SHORTEST_S, _LONGEST_S)


def minimize(function: Callable[[float], float], lowest: float, highest: float) -> float:
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


def simulate_training(job: Conditions, interval_s: float, work_s: float, pool: Pool, seed: int) -> Training:
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


def simulate_trainings(
    job: Conditions, interval_s: float, work_s: float, pool: Pool, trainings: int = TRAININGS, seed: int = 1
) -> Expectation:
    """What so many trainings come to; `trainings` is 2 or more."""
    found = [simulate_training(job, interval_s, work_s, pool, seed * 1_000_003 + number) for number in range(trainings)]
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
    tried = [(part * around_s, simulate_trainings(job, part * around_s, work_s, pool, trainings)) for part in _AROUND]
    best = max((found for _, found in tried), key=lambda found: found.ratio)
    good = [interval for interval, found in tried if found.ratio >= best.ratio - best.margin]
    return min(good), max(good)


_NO_FAILURE = (
    "done", "running", "preempted", "time_limit", "stopped", "cancelled", "stop file", "user_error", "bad_input",
    "storage", "bad_checkpoint", "requeued",
)  # fmt: skip
"""Ends of attempts that are planned, a person's, or a person's to mend; all others count as failures."""
_ASSUMED: dict[str, tuple[float, str]] = {
    "failures": (6.5, "assumed: RSC-1's, arXiv 2410.21680"),
    "restart_s": (600.0, "assumed: 5 to 20 minutes on RSC-1, arXiv 2410.21680"),
    "wait_s": (60.0, "assumed: the nodes are kept"),
    "save_s": (60.0, "assumed"),
}
_ASYNC_BLOCKED = 0.05
"""Part of an asynchronous save that a training waits: 6.3 of 148.8 s in PyTorch's blog of 2024-06-12, rounded up."""
_LEAST_RATIO = 0.01
_SIMULATED_S = 30 * DAY_S
"""Productive time that is simulated where nobody knows how long the training is."""
_MEANING = {
    "failures": "failures per 1,000 node-days", "restart_s": "seconds from start to first step",
    "wait_s": "seconds from a failure to that start", "save_s": "seconds until a checkpoint is valid",
    "blocked_s": "seconds of these that the training waits",
    "gpu_hours": "GPU-hours of the whole training, undisturbed",
}  # fmt: skip


class GoodputFigure(NamedTuple):
    """A figure, and where it comes from."""

    value: float
    whence: str


def measure_goodput_figures(
    events: Sequence[Event], steps: Sequence[Event], attempts: Sequence[AttemptTimes], per_node: int
) -> dict[str, GoodputFigure]:
    """What the ledger of a training tells, by the keys of `goodput:`; what it cannot tell is not there.

    `per_node`: ranks of a node.
    """
    found: dict[str, GoodputFigure] = {}
    node_days = sum(_node_days(one, per_node) for one in attempts)
    failed = [one for one in attempts if one.cause not in _NO_FAILURE]
    if failed and node_days:
        low, high = (1000 * bound / node_days for bound in count_bounds(len(failed)))
        words = f"measured: {len(failed)} in {node_days:.3g} node-days; 95 % between {low:.3g} and {high:.3g}"
        found["failures"] = GoodputFigure(1000 * len(failed) / node_days, words)
        after = [two for one, two in pairwise(attempts) if one in failed]
        waits = [one.seconds["ending"] for one in failed] + [two.seconds["queue"] for two in after]
        found["wait_s"] = GoodputFigure(sum(waits) / len(failed), f"measured: mean of {len(failed)}")
    starts = [one.seconds["startup"] for one in attempts if any(one.seconds[part] for part in PRODUCTIVE_CATEGORIES)]
    if starts:
        found["restart_s"] = GoodputFigure(fmean(starts), f"measured: mean of {len(starts)}")
    if saves := [float(e["seconds"]) for e in events if e["event"] == "saved" and e.get("seconds")]:
        found["save_s"] = GoodputFigure(fmean(saves), f"measured: mean of {len(saves)}")
        if waits := [float(line["checkpoint_s"]) for line in steps if line.get("checkpoint_s")]:
            found["blocked_s"] = GoodputFigure(fmean(waits), f"measured: mean of {len(waits)}")
    if steps:
        productive = fmean(sum(split_step_time(line)[part] for part in PRODUCTIVE_CATEGORIES) for line in steps)
        found["step_s"] = GoodputFigure(productive, f"measured: mean of {len(steps):,}")
    return found


def _node_days(attempt: AttemptTimes, per_node: int) -> float:
    ran = sum(spent for part, spent in attempt.seconds.items() if part not in WAITING_CATEGORIES)
    return ran / DAY_S * _nodes(attempt, per_node)


def _nodes(attempt: AttemptTimes, per_node: int) -> int:
    return max(1, round(attempt.ranks / per_node))


def collect_goodput_figures(config: Config, own: Mapping[str, GoodputFigure]) -> dict[str, GoodputFigure]:
    """Every figure that is known, by the keys of `goodput:`; `own`: what the run has measured."""
    found = {key: GoodputFigure(*paper) for key, paper in _ASSUMED.items()} | dict(own)
    for key in GoodputConfig.model_fields:
        if key in (*_MEANING, "step_s") and (value := getattr(config.goodput, key)) is not None:
            found[key] = GoodputFigure(value, f"goodput.{key}")
    save_s = found["save_s"].value
    if config.checkpoint.mode == "sync":
        found.setdefault("blocked_s", GoodputFigure(save_s, "checkpoint.mode sync: all of it"))
    found.setdefault(
        "blocked_s", GoodputFigure(_ASYNC_BLOCKED * save_s, "assumed: a twentieth, with checkpoint.mode async")
    )
    if found["blocked_s"].value > save_s:  # measured in two ways, or given in part
        found["save_s"] = GoodputFigure(found["blocked_s"].value, "as long as it waits")
    steps = config.train.steps
    if "gpu_hours" not in found and "step_s" in found and steps is not None:
        ranks, step_s = config.stages.train.ranks, found["step_s"].value
        words = f"{steps:,} steps of {step_s:.3g} s on {ranks} ranks"
        found["gpu_hours"] = GoodputFigure(steps * step_s * ranks / 3600, words)
    return found


def job_conditions(config: Config, figures: Mapping[str, GoodputFigure], nodes: int) -> Conditions:
    """What a training on so many nodes meets."""
    times = {key: figures[key].value for key in ("restart_s", "wait_s", "save_s", "blocked_s")}
    assumed, rate = config.goodput, job_failure_rate(figures["failures"].value, nodes)
    return Conditions(rate, **times, preemption_rate=assumed.preemptions / DAY_S, preempted_s=assumed.preempted_s)


def print_goodput(target: Path, overrides: Sequence[str], nodes: str | None, console: Console) -> None:
    """Effective time, best interval, days and cost of a training, by number of nodes; of a run, whose ledger tells.

    target: a config, or a run's directory; overrides change either for this time only. Raises UserError for both.
    """
    own: dict[str, GoodputFigure] = {}
    if target.is_dir():
        run = Run.open(target)
        config = parse_config(apply_overrides(run.config.model_dump(mode="json"), overrides), "command line")
        steps = History(run.metrics_file, lines.metric, keep=STEP_TIME_KEYS).look().rows
        attempts = build_ledger(run.read_events(), steps, ["train"], time.time())
        own = measure_goodput_figures(run.read_events("train"), steps, attempts, run.config.stages.train.tasks_per_node)
    else:
        config = load_config(target, overrides)
    train, figures = config.stages.train, collect_goodput_figures(config, own)
    asked = parse_node_counts(nodes) if nodes else [train.max_nodes * factor for factor in (1, 4, 16, 64)]
    for key, meaning in _MEANING.items():
        if key in figures:
            console.print(f"{figures[key].value:>10.4g}  {meaning} ({figures[key].whence})", soft_wrap=True)
    console.print()
    rows = [_row(config, figures, size) for size in asked]
    heads = [head for head in rows[0] if any(head in row and row[head] for row in rows)]
    console.print(build_table([heads, *([row[head] for head in heads] for row in rows)]), soft_wrap=True)
    for words in _notes(config, figures, asked):
        console.print(words, soft_wrap=True)


def _row(config: Config, figures: Mapping[str, GoodputFigure], nodes: int) -> dict[str, str]:
    """A line of the table, by its heads."""
    train, assumed, job = config.stages.train, config.goodput, job_conditions(config, figures, nodes)
    gpus, best = nodes * train.tasks_per_node, best_interval_s(job)
    ratio, every = effective_ratio(job, best), config.checkpoint.every_steps
    as_it_is, days = "", "never" if ratio < _LEAST_RATIO else ""
    if "step_s" in figures and nodes == train.max_nodes:
        as_it_is = f"{100 * effective_ratio(job, every * figures['step_s'].value):.1f} %"
    row = {"nodes": f"{nodes:,}", "GPUs": f"{gpus:,}", "a failure every": format_span(1 / job.failure_rate)}
    row |= {
        "save every": format_span(best),
        "Young": format_span(young_s(job)),
        "Daly": format_span(daly_s(job)),
    }
    row |= {"simulated": "", "effective": f"{100 * ratio:.1f} %", "as it is": as_it_is, "whole training": ""}
    row |= {"waiting for nodes": "", "days": days, "95 % below": "", "cost": ""}
    if ratio < _LEAST_RATIO:
        return row
    work = figures["gpu_hours"].value * 3600 / gpus if "gpu_hours" in figures else _SIMULATED_S
    pool = Pool(assumed.spares, 3600 * assumed.repair_hours, assumed.together, assumed.nodes_together)
    found = simulate_trainings(job, best, work, pool)
    good = good_intervals_s(job, best, min(work, 1000 / job.failure_rate), pool)
    row["simulated"] = f"{format_span(good[0])} – {format_span(good[1])}"
    row["whole training"] = f"{100 * found.ratio:.1f} ± {100 * found.margin:.1f} %"
    if assumed.spares is not None:
        row["waiting for nodes"] = f"{100 * found.no_node_s / found.mean_s:.1f} %"
    if "gpu_hours" in figures:
        row |= {"days": f"{found.mean_s / DAY_S:,.2f}", "95 % below": f"{found.most_s / DAY_S:,.2f}"}
        if assumed.gpu_hour is not None:
            row["cost"] = f"{assumed.gpu_hour * found.mean_s / 3600 * gpus:,.0f}"
    return row


def _notes(config: Config, figures: Mapping[str, GoodputFigure], asked: Sequence[int]) -> Iterator[str]:
    yield "save every: the interval with the most effective time; simulated: intervals that do as well in a simulation"
    if "step_s" in figures and config.stages.train.max_nodes in asked:
        yield f"as it is: the effective time with checkpoint.every_steps {config.checkpoint.every_steps:,}"
    if "gpu_hours" not in figures:
        yield "whole training: of 30 days; for its own days and cost give goodput.gpu_hours or goodput.step_s, or a run"
    elif any(size != config.stages.train.max_nodes for size in asked):
        yield "days: as if twice the nodes were twice as fast; that is for the layout to show"


def describe_expected_goodput(
    config: Config, events: Sequence[Event], steps: Sequence[Event], attempts: Sequence[AttemptTimes]
) -> str | None:
    """What was to be expected of a training so far, in words; None before it has saved and stepped, and in
    its first node-day: what was expected of it then, nobody can compare with anything.

    events, attempts: those of the training; steps: its lines of metrics.
    """
    per_node = config.stages.train.tasks_per_node
    own = measure_goodput_figures(events, steps, attempts, per_node)
    counted = own.pop("failures", None)
    work = sum(sum_categories(attempts)[part] for part in PRODUCTIVE_CATEGORIES)
    node_days = sum(_node_days(one, per_node) for one in attempts)
    if not work or node_days < 1 or not {"save_s", "step_s", "restart_s"} <= own.keys():
        return None
    figures = collect_goodput_figures(config, own)
    job = job_conditions(config, figures, max(_nodes(one, per_node) for one in attempts))
    interval_s = config.checkpoint.every_steps * figures["step_s"].value
    seconds = work / max(_LEAST_RATIO, effective_ratio(job, interval_s)) + job.restart_s
    rate, whence = figures["failures"]
    told = f"expected {work / seconds:.3f} and {rate / 1000 * node_days:.2g} failures, there were"
    there = sum(one.cause not in _NO_FAILURE for one in attempts)
    words = f"{told} {there}: {rate:g} per 1,000 node-days ({whence})"
    return words + (f"; {counted.whence}" if counted else "")


def format_span(spent: float) -> str:
    """Seconds in words of two digits or three: 95 s, 14 min, 1.8 h, 9.3 days."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 5400), ("h", 3600, 2 * DAY_S)):
        if spent < most:
            return f"{spent / size:.2g} {unit}" if spent / size < 10 else f"{spent / size:.0f} {unit}"
    return f"{spent / DAY_S:.2g} days" if spent < 10 * DAY_S else f"{spent / DAY_S:,.0f} days"
