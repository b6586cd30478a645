"""What the page shows of a run: which of its figures go into which picture, and the summary above them.

A figure that a run does not have (an old run's lines lack it, nobody looked at held-out data, no telemetry) has no
picture. Telemetry is `telemetry-HOST.jsonl` in the run directory, lines with `time` in seconds since 1970.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from math import ceil, inf
from statistics import fmean
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.plot import Points, means
from pipeline.base.text import format_duration
from pipeline.evaluate.result import (
    HELD_OUT_PREFIX,
    format_result,
    get_extra_metrics,
    get_main_metric,
    read_newest_result,
)
from pipeline.parallel.mesh import resolve_layout
from pipeline.run import lines, stages
from pipeline.run.directory import Run
from pipeline.run.history import History
from pipeline.run.ledger import PRODUCTIVE_CATEGORIES, WAITING_CATEGORIES, AttemptTimes, split_step_time, sum_categories
from pipeline.run.machines import SENSORS, energy_kwh, look, readings
from pipeline.run.metrics import own_times
from pipeline.run.points import points as points_of
from pipeline.train.step_trace import STEP_PARTS
from slurm.query.status import StageStatus
from tracking.figures import curves, hosts, layers, mesh, parallel, tasks, unit_of

_STEP = "optimizer step"
_SLICES = 150
"""Parts of a step are drawn as means over so many slices of the training."""


def summary(
    run: Run,
    rows: Sequence[StageStatus],
    attempts: Sequence[AttemptTimes],
    steps: History,
    points: Sequence[Sequence[str]],
) -> dict[str, str]:
    """What was trained, how good it is, how long it took, what it cost, what stopped it; in words.

    `points`: of a sweep the header of its table and the best point.
    """
    model, train = run.config.model, stages.load("train")
    decoder = f"a decoder of {model.layers} layers, {model.dim} wide, {model.heads} heads"
    what = [model.target or decoder]
    if run.config.sweep is None:
        what += [train.progress(run).words, *(f"{tokens:,.0f} tokens" for tokens in steps.values("tokens")[-1:])]
    else:
        what.append(f"a sweep of {len(run.config.sweep.points())} points")
    with suppress(UserError, OSError):
        what.append(resolve_layout(run.config).describe_sizes())
    good, best = format_result(result) if (result := read_newest_result(run)) else "not evaluated yet", points[1:2]
    if best:
        good = "best point: " + ", ".join(f"{name} {cell}" for name, cell in zip(points[0], best[0], strict=True))
    sums, causes = sum_categories(attempts), Counter(a.cause for a in attempts if a.cause not in ("done", "running"))
    productive = format_duration(sum(sums[part] for part in PRODUCTIVE_CATEGORIES))
    lost, queue = format_duration(sums["lost"]), format_duration(sums["queue"])
    hours = (
        sum(
            a.ranks * (a.end_time - a.start_time - sum(a.seconds[part] for part in WAITING_CATEGORIES))
            for a in attempts
        )
        / 3600
    )
    spans = [(a.start_time, a.end_time) for a in attempts]
    energy = [kwh for one in (run, *points_of(run)) if (kwh := energy_kwh(one.path, spans)) is not None]
    power = f"{sum(energy):.3g} kWh of GPUs; " if energy else ""
    begin = min((a.start_time for a in attempts), default=0.0)
    whole = max((a.end_time for a in attempts), default=0.0) - begin
    on = ", ".join(sorted({str(e["host"]) for e in run.read_events("train", "started") if e.get("host")}))
    open_stages = [f"{row.stage} {row.state}" for row in rows if row.state != "done"]
    return {
        "trained": ", ".join(what),
        "how good": good,
        "how long": f"{format_duration(whole)}, of which {productive} of work that counts",
        "begun": f"{datetime.fromtimestamp(begin):%Y-%m-%d %H:%M}, on {on}" if on else "",
        "cost": f"{hours:.2f} rank-hours; {power}{queue} in the queue, {lost} lost and done again",
        "stopped by": ", ".join(f"{cause} {times} ×" for cause, times in causes.most_common()) or "nothing",
        "stands": ", ".join(open_stages) or "all stages are done",
    }


def of_training(run: Run, steps: History) -> list[str]:
    """Everything over steps. Upright lines stand where an attempt went on from a checkpoint."""
    marks = [event["step"] for event in run.read_events("train", "restored")]
    unit, of = ("tokens", "nats per token") if "samples_per_s" not in steps.names else ("samples", "loss")

    def over_steps(heading: str, words: str, named: Mapping[str, str], *, log: str = "") -> str:
        return curves(heading, _STEP, words, {n: steps.curve(key) for key, n in named.items()}, log=log, marks=marks)

    size = max(1, ceil(len(steps.rows) / _SLICES))
    slices = [steps.rows[i : i + size] for i in range(0, len(steps.rows), size)]
    middles, parts = [fmean(row["step"] for row in rows) for rows in slices], defaultdict[str, list[float]](list)
    for rows in slices:
        divided = [split_step_time(row) for row in rows]
        for part in divided[0]:
            parts[part].append(fmean(one[part] for one in divided))
    shares = {name: dict(steps.curve(f"profile.{name}")) for name in STEP_PARTS}
    at = sorted({step for of_step in shares.values() for step in of_step})
    whole = {step: sum(of.get(step, 0.0) for of in shares.values()) or 1.0 for step in at}
    profiled = {name: [100 * of.get(step, 0.0) / whole[step] for step in at] for name, of in shares.items()}
    losses = [steps.curve(name) for name in ("loss", f"{HELD_OUT_PREFIX}loss")]
    late = [[point for point in curve if 2 * point[0] > losses[0][-1][0]] for curve in losses if losses[0]]
    # what the first steps, and spikes, hide
    zoomed = {"training": smooth, "held out": late[1]} if late and (smooth := means(late[0])) else {}
    more = [name for name in steps.names if name.startswith(HELD_OUT_PREFIX) and name != f"{HELD_OUT_PREFIX}loss"]
    return [
        over_steps("Loss", of, {"loss": "training", f"{HELD_OUT_PREFIX}loss": "held out"}),
        curves("Loss in the second half", _STEP, f"{of}, mean", zoomed, marks=marks),
        *(over_steps(name.replace("_", " "), "on held-out data", {name: name}) for name in more),
        over_steps("Gradient norm", "of the whole model, before clipping", {"grad_norm": "gradient norm"}, log="y"),
        over_steps("Learning rate", "learning rate", {"lr": "learning rate"}),
        over_steps("Throughput", f"{unit} per second", {f"{unit}_per_s": unit}),
        layers("Parts of a step", _STEP, "seconds per step, mean", middles, parts),
        layers("Where profiled steps went", _STEP, "% of the step", at, profiled),
        over_steps("Memory", "GB, peak of rank 0", {"memory_gb": "allocated", "memory_reserved_gb": "reserved"}),
    ]


def of_results(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Evaluations over the checkpoints, and the tasks of the newest one."""
    if not results:
        return []
    words, key = get_main_metric(results[-1])[0], "bits_per_byte" if "bits_per_byte" in results[-1] else "loss"
    named = {words: [(one["step"], one[key]) for one in results if key in one]}
    if "bits_per_byte" in results[-1]:
        named["of the unigram"] = [(one["step"], one["unigram_bits_per_byte"]) for one in results if key in one]
    own = {
        name: [(one["step"], one[name]) for one in results if name in one] for name in get_extra_metrics(results[-1])
    }
    more = [curves(name, _STEP, name, {name: points}) for name, points in own.items() if "." not in name]
    of_tasks = {name: points for name, points in own.items() if "." in name}
    more.append(curves("Tasks over the checkpoints", _STEP, "share that is right", of_tasks))
    return [curves("Evaluation of checkpoints", _STEP, words, named), *more, tasks(results[-1])]


def of_sweep(run: Run, rows: Sequence[StageStatus], found: Mapping[str, Mapping[str, Points]]) -> list[str]:
    """The points across their values, and the curve of each, the best in front."""
    if run.config.sweep is None:
        return []
    newest = [read_newest_result(row.run) for row in rows]
    results = [get_main_metric(result)[1] if result else inf for result in newest]
    name = next((get_main_metric(result)[0] for result in newest if result), "")
    names = [row.run.path.name for _, row in sorted(zip(results, rows, strict=True), key=lambda one: one[0])]
    order = {key: {n: of[n] for n in names if n in of} for key, of in found.items()}
    return [
        parallel(run.config.sweep.points(), name, results),
        curves("Loss of the points", _STEP, "loss in training", order.get("loss", {})),
        curves("Held-out loss of the points", _STEP, "loss on held-out data", order.get("held_out_loss", {})),
    ]


def of_machines(run: Run, attempts: Sequence[AttemptTimes]) -> list[str]:
    """The layout that the config asks for, hosts by their own time, and what telemetry says of each host."""
    drawn = [hosts(own_times(run))]
    with suppress(UserError, OSError):  # a tokenizer that is gone
        drawn.append(mesh(resolve_layout(run.config)))
    found: dict[str, dict[str, Points]] = defaultdict(dict)
    begin, end = min((a.start_time for a in attempts), default=0.0), max((a.end_time for a in attempts), default=0.0)
    unit, size = unit_of(end - begin)
    for file in sorted(run.path.glob("telemetry-*.jsonl")):
        points: dict[str, list[tuple[float, float]]] = {key: [] for key in SENSORS}
        for line in lines.read(file, look):
            for key, of_key in points.items():
                if told := readings(line, key):
                    of_key.append(((line["time"] - begin) / size, fmean(value for _, value in told)))
        for key, of_key in points.items():
            found[key][file.stem.removeprefix("telemetry-")] = means(of_key, 150) or of_key
    for key, (words, y, *_) in SENSORS.items():
        mean = ", mean of the host's GPUs" if key.startswith("gpus.") else ""
        drawn.append(curves(words[0].upper() + words[1:], f"{unit} since the run began", y + mean, found[key]))
    return drawn
