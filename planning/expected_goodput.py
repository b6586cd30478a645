"""What failures are expected to cost: `plan --goodput`, and a line of `report` beside the ledger.

Every figure that goes in is, in this order, the one of the config (`goodput:`), the run's own, measured by its ledger,
or one from a paper; each is printed with where it comes from. planning/goodput.py has the formulas,
planning/simulation.py the simulation. No torch, no numpy: it runs on the login node.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console

from pipeline.config.read import config_from_mapping, load_config, overridden
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
from planning import goodput as formulas
from planning.goodput import DAY_S, Conditions, best_interval_s, effective_ratio, job_failure_rate
from planning.search import node_counts
from planning.simulation import Pool, expect, good_intervals_s
from slurm.query.status import build_table

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


class Known(NamedTuple):
    """A figure, and where it comes from."""

    value: float
    whence: str


def measured(
    events: Sequence[Event], steps: Sequence[Event], attempts: Sequence[AttemptTimes], per_node: int
) -> dict[str, Known]:
    """What the ledger of a training tells, by the keys of `goodput:`; what it cannot tell is not there.

    `per_node`: ranks of a node.
    """
    found: dict[str, Known] = {}
    node_days = sum(_node_days(one, per_node) for one in attempts)
    failed = [one for one in attempts if one.cause not in _NO_FAILURE]
    if failed and node_days:
        low, high = (1000 * bound / node_days for bound in formulas.count_bounds(len(failed)))
        words = f"measured: {len(failed)} in {node_days:.3g} node-days; 95 % between {low:.3g} and {high:.3g}"
        found["failures"] = Known(1000 * len(failed) / node_days, words)
        after = [two for one, two in pairwise(attempts) if one in failed]
        waits = [one.seconds["ending"] for one in failed] + [two.seconds["queue"] for two in after]
        found["wait_s"] = Known(sum(waits) / len(failed), f"measured: mean of {len(failed)}")
    starts = [one.seconds["startup"] for one in attempts if any(one.seconds[part] for part in PRODUCTIVE_CATEGORIES)]
    if starts:
        found["restart_s"] = Known(fmean(starts), f"measured: mean of {len(starts)}")
    if saves := [float(e["seconds"]) for e in events if e["event"] == "saved" and e.get("seconds")]:
        found["save_s"] = Known(fmean(saves), f"measured: mean of {len(saves)}")
        if waits := [float(line["checkpoint_s"]) for line in steps if line.get("checkpoint_s")]:
            found["blocked_s"] = Known(fmean(waits), f"measured: mean of {len(waits)}")
    if steps:
        productive = fmean(sum(split_step_time(line)[part] for part in PRODUCTIVE_CATEGORIES) for line in steps)
        found["step_s"] = Known(productive, f"measured: mean of {len(steps):,}")
    return found


def _node_days(attempt: AttemptTimes, per_node: int) -> float:
    ran = sum(spent for part, spent in attempt.seconds.items() if part not in WAITING_CATEGORIES)
    return ran / DAY_S * _nodes(attempt, per_node)


def _nodes(attempt: AttemptTimes, per_node: int) -> int:
    return max(1, round(attempt.ranks / per_node))


def known(config: Config, own: Mapping[str, Known]) -> dict[str, Known]:
    """Every figure that is known, by the keys of `goodput:`; `own`: what the run has measured."""
    found = {key: Known(*paper) for key, paper in _ASSUMED.items()} | dict(own)
    for key in GoodputConfig.model_fields:
        if key in (*_MEANING, "step_s") and (value := getattr(config.goodput, key)) is not None:
            found[key] = Known(value, f"goodput.{key}")
    save_s = found["save_s"].value
    if config.checkpoint.mode == "sync":
        found.setdefault("blocked_s", Known(save_s, "checkpoint.mode sync: all of it"))
    found.setdefault("blocked_s", Known(_ASYNC_BLOCKED * save_s, "assumed: a twentieth, with checkpoint.mode async"))
    if found["blocked_s"].value > save_s:  # measured in two ways, or given in part
        found["save_s"] = Known(found["blocked_s"].value, "as long as it waits")
    steps = config.train.steps
    if "gpu_hours" not in found and "step_s" in found and steps is not None:
        ranks, step_s = config.stages.train.ranks, found["step_s"].value
        words = f"{steps:,} steps of {step_s:.3g} s on {ranks} ranks"
        found["gpu_hours"] = Known(steps * step_s * ranks / 3600, words)
    return found


def conditions(config: Config, figures: Mapping[str, Known], nodes: int) -> Conditions:
    """What a training on so many nodes meets."""
    times = {key: figures[key].value for key in ("restart_s", "wait_s", "save_s", "blocked_s")}
    assumed, rate = config.goodput, job_failure_rate(figures["failures"].value, nodes)
    return Conditions(rate, **times, preemption_rate=assumed.preemptions / DAY_S, preempted_s=assumed.preempted_s)


def print_goodput(target: Path, overrides: Sequence[str], nodes: str | None, console: Console) -> None:
    """Effective time, best interval, days and cost of a training, by number of nodes; of a run, whose ledger tells.

    target: a config, or a run's directory; overrides change either for this time only. Raises UserError for both.
    """
    own: dict[str, Known] = {}
    if target.is_dir():
        run = Run.open(target)
        config = config_from_mapping(overridden(run.config.model_dump(mode="json"), overrides), "command line")
        steps = History(run.metrics, lines.metric, keep=STEP_TIME_KEYS).look().rows
        attempts = build_ledger(run.read_events(), steps, ["train"], time.time())
        own = measured(run.read_events("train"), steps, attempts, run.config.stages.train.tasks_per_node)
    else:
        config = load_config(target, overrides)
    train, figures = config.stages.train, known(config, own)
    asked = node_counts(nodes) if nodes else [train.most_nodes * factor for factor in (1, 4, 16, 64)]
    for key, meaning in _MEANING.items():
        if key in figures:
            console.print(f"{figures[key].value:>10.4g}  {meaning} ({figures[key].whence})", soft_wrap=True)
    console.print()
    rows = [_row(config, figures, size) for size in asked]
    heads = [head for head in rows[0] if any(head in row and row[head] for row in rows)]
    console.print(build_table([heads, *([row[head] for head in heads] for row in rows)]), soft_wrap=True)
    for words in _notes(config, figures, asked):
        console.print(words, soft_wrap=True)


def _row(config: Config, figures: Mapping[str, Known], nodes: int) -> dict[str, str]:
    """A line of the table, by its heads."""
    train, assumed, job = config.stages.train, config.goodput, conditions(config, figures, nodes)
    gpus, best = nodes * train.tasks_per_node, best_interval_s(job)
    ratio, every = effective_ratio(job, best), config.checkpoint.every_steps
    as_it_is, days = "", "never" if ratio < _LEAST_RATIO else ""
    if "step_s" in figures and nodes == train.most_nodes:
        as_it_is = f"{100 * effective_ratio(job, every * figures['step_s'].value):.1f} %"
    row = {"nodes": f"{nodes:,}", "GPUs": f"{gpus:,}", "a failure every": span(1 / job.failure_rate)}
    row |= {"save every": span(best), "Young": span(formulas.young_s(job)), "Daly": span(formulas.daly_s(job))}
    row |= {"simulated": "", "effective": f"{100 * ratio:.1f} %", "as it is": as_it_is, "whole training": ""}
    row |= {"waiting for nodes": "", "days": days, "95 % below": "", "cost": ""}
    if ratio < _LEAST_RATIO:
        return row
    work = figures["gpu_hours"].value * 3600 / gpus if "gpu_hours" in figures else _SIMULATED_S
    pool = Pool(assumed.spares, 3600 * assumed.repair_hours, assumed.together, assumed.nodes_together)
    found = expect(job, best, work, pool)
    good = good_intervals_s(job, best, min(work, 1000 / job.failure_rate), pool)
    row["simulated"] = f"{span(good[0])} – {span(good[1])}"
    row["whole training"] = f"{100 * found.ratio:.1f} ± {100 * found.margin:.1f} %"
    if assumed.spares is not None:
        row["waiting for nodes"] = f"{100 * found.no_node_s / found.mean_s:.1f} %"
    if "gpu_hours" in figures:
        row |= {"days": f"{found.mean_s / DAY_S:,.2f}", "95 % below": f"{found.most_s / DAY_S:,.2f}"}
        if assumed.gpu_hour is not None:
            row["cost"] = f"{assumed.gpu_hour * found.mean_s / 3600 * gpus:,.0f}"
    return row


def _notes(config: Config, figures: Mapping[str, Known], asked: Sequence[int]) -> Iterator[str]:
    yield "save every: the interval with the most effective time; simulated: intervals that do as well in a simulation"
    if "step_s" in figures and config.stages.train.most_nodes in asked:
        yield f"as it is: the effective time with checkpoint.every_steps {config.checkpoint.every_steps:,}"
    if "gpu_hours" not in figures:
        yield "whole training: of 30 days; for its own days and cost give goodput.gpu_hours or goodput.step_s, or a run"
    elif any(size != config.stages.train.most_nodes for size in asked):
        yield "days: as if twice the nodes were twice as fast; that is for the layout to show"


def expected_words(
    config: Config, events: Sequence[Event], steps: Sequence[Event], attempts: Sequence[AttemptTimes]
) -> str | None:
    """What was to be expected of a training so far, in words; None before it has saved and stepped, and in
    its first node-day: what was expected of it then, nobody can compare with anything.

    events, attempts: those of the training; steps: its lines of metrics.
    """
    per_node = config.stages.train.tasks_per_node
    own = measured(events, steps, attempts, per_node)
    counted = own.pop("failures", None)
    work = sum(sum_categories(attempts)[part] for part in PRODUCTIVE_CATEGORIES)
    node_days = sum(_node_days(one, per_node) for one in attempts)
    if not work or node_days < 1 or not {"save_s", "step_s", "restart_s"} <= own.keys():
        return None
    figures = known(config, own)
    job = conditions(config, figures, max(_nodes(one, per_node) for one in attempts))
    interval_s = config.checkpoint.every_steps * figures["step_s"].value
    seconds = work / max(_LEAST_RATIO, effective_ratio(job, interval_s)) + job.restart_s
    rate, whence = figures["failures"]
    told = f"expected {work / seconds:.3f} and {rate / 1000 * node_days:.2g} failures, there were"
    there = sum(one.cause not in _NO_FAILURE for one in attempts)
    words = f"{told} {there}: {rate:g} per 1,000 node-days ({whence})"
    return words + (f"; {counted.whence}" if counted else "")


def span(spent: float) -> str:
    """Seconds in words of two digits or three: 95 s, 14 min, 1.8 h, 9.3 days."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 5400), ("h", 3600, 2 * DAY_S)):
        if spent < most:
            return f"{spent / size:.2g} {unit}" if spent / size < 10 else f"{spent / size:.0f} {unit}"
    return f"{spent / DAY_S:.2g} days" if spent < 10 * DAY_S else f"{spent / DAY_S:,.0f} days"
