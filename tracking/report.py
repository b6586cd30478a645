"""`report RUN`: account for the hours of a run, its losses and its evaluation, in the terminal and in `report.html`.

Everything is read from the run directory, so it works without Slurm. If Slurm has accounting, `sacct` provides the
exact start and end of each job. A figure without data (for example, a run without telemetry) is left out of the page.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import ceil, inf, nan
from statistics import fmean
from typing import Any

from rich.console import Console

from pipeline.base import plot
from pipeline.base.errors import UserError
from pipeline.base.files import write_atomic
from pipeline.base.html_page import (
    FIGURE_STYLE,
    MAX_LABEL_CHARACTERS,
    Bar,
    draw_curves,
    draw_lanes,
    draw_layers,
    format_figure,
    format_page,
    format_table,
)  # fmt: skip
from pipeline.base.plot import BUCKETS, GREY, PALE, Curve, Points, Scale, average_buckets, downsample, format_number
from pipeline.base.text import format_duration
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config
from pipeline.config.stages import STAGES
from pipeline.evaluate.result import (
    HELD_OUT_PREFIX,
    format_result,
    get_extra_metrics,
    get_main_metric,
    read_all_results,
    read_newest_result,
)
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.run import lines, stages
from pipeline.run.directory import Run, list_points
from pipeline.run.events import Done, Event, LostWork, Restored, Started, is_event
from pipeline.run.ledger import (
    CATEGORIES,
    PRODUCTIVE_CATEGORIES,
    STEP_TIME_KEYS,
    WAITING_CATEGORIES,
    AttemptTimes,
    JobRun,
    StepLine,
    build_ledger,
    compute_ratios,
    split_step_time,
    sum_categories,
)  # fmt: skip
from pipeline.run.lines import LineHistory, is_number
from pipeline.run.machines import (
    SENSORS,
    get_sensor_values,
    is_telemetry_line,
    list_slow_gpus,
    read_compute_times,
    sum_gpu_energy_kwh,
)
from pipeline.run.metrics import is_step_line
from pipeline.train import step_trace
from slurm.query.job_states import RecordedJob, array_job_id, query_accounting
from slurm.query.run_jobs import list_recorded_jobs, uses_slurm
from slurm.query.slurm_commands import cluster_name, parse_slurm_time
from slurm.query.status import (
    StageStatus,
    StatusPoller,
    build_table,
    describe_failures,
    describe_result,
    tabulate_points,
)

Rows = list[list[str]]
DescribeGoodput = Callable[[Config, Sequence[Event], Sequence[StepLine], Sequence[AttemptTimes]], str | None]
"""Describes the expected goodput from a config, the training's events, its lines of metrics and its attempts."""

_COLUMN_TITLES = {"startup": "start-up", "communication": "comm", "evaluation": "held-out", "checkpoint": "save"}
"""Titles of parts of the ledger, if they differ from the part's name."""
PART_COLOURS = {
    "idle": PALE, "queue": GREY, "startup": 6, "compute": 2, "data": 5, "communication": 0, "evaluation": 3,
    "checkpoint": 1, "lost": 4, "ending": 7, "communication_exposed": 0, "copy": 5, "bubble": 6,
    "profiling": 10,
}  # fmt: skip
"""Colours of the parts of the ledger and of a profiled step, the same in all figures."""
_STOP_COLOUR = 4
_MAX_EVEN_VALUES = 6
"""A swept key with at most this many values spaces them evenly on its axis."""
_STEP_AXIS = "optimizer step"
_SLICES = 150
"""The parts of a step are means over this many slices of the training."""
_MIN_SHOWN_S = 0.5
"""Shorter durations are shown as a dot."""
_SLOW_HOST_RATIO = 1.2


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass
class ReportData:
    """What the files of a run and of its sweep points contain. Of a point, only attempts and curves are kept."""

    attempts: list[AttemptTimes]
    """Attempts of the run; then those of each sweep point, with the point's number as their task."""
    steps: LineHistory
    """The run's own steps."""
    curves: dict[str, dict[str, Points]]
    """For a sweep: `loss` and `held_out_loss` over steps, by name of the point."""


def read_job_times(jobs: Iterable[RecordedJob]) -> list[JobRun]:
    """Return start and end of each run of these jobs from accounting; a requeued job has several. [] without it."""
    cluster = cluster_name()
    expected = {(array_job_id(job.job_id), job.name) for job in jobs if job.cluster in (None, cluster)}
    ids = ",".join(sorted({job_id for job_id, _ in expected})) if cluster else ""
    job_runs = []
    for line in (query_accounting(ids, "JobID,Start,End,JobName") if ids else "").splitlines():
        job_id, start, end, name = line.split("|", 3)
        if expected.isdisjoint((array_job_id(job_id), candidate) for candidate in (name, "")):
            continue  # another job that had this ID before
        if start_time := parse_slurm_time(start):  # not "Unknown": it has started
            job_runs.append(JobRun(job_id, start_time, parse_slurm_time(end) or None))
    return job_runs


def read_report_data(run: Run, rows: Iterable[StageStatus]) -> ReportData:
    """Read a run whose stages have the states `rows`, and its sweep points."""
    points = list_points(run)
    submitted = [job for each in (run, *points) for _, job in list_recorded_jobs(each)] if uses_slurm(run) else []
    jobs = read_job_times(submitted)
    now = time.time()
    events = run.read_events()
    running = [row.stage for row in rows if row.state in ("running", "completing")]
    steps = LineHistory(run.metrics_file, is_step_line, row_keys=STEP_TIME_KEYS).read_new_lines()
    data = ReportData(build_ledger(events, steps.rows, stages.list_run_stages(run), now, running, jobs), steps, {})
    shared_events = [event for event in events if isinstance(event, Done)]  # the points waited for these stages
    point_stages = stages.list_point_stages()
    for number_of_point, point in enumerate(points):
        running = [stage for stage in point_stages if point.lock_holder(stage)]
        history = LineHistory(point.metrics_file, is_step_line, row_keys=STEP_TIME_KEYS).read_new_lines()
        point_events = [*shared_events, *point.read_events()]
        for attempt in build_ledger(point_events, history.rows, point_stages, now, running, jobs):
            attempt.task = number_of_point
            data.attempts.append(attempt)
        for name in ("loss", "held_out_loss"):
            data.curves.setdefault(name, {})[point.path.name] = downsample(history.curve(name), BUCKETS)
    return data


# ------------------------------------------------------------------------------------------------------------- tables


def _attempts_table(attempts: Sequence[AttemptTimes]) -> Rows:
    """Return the hours by attempt, header first.

    Single attempts have a row each and a row with their sum; the tasks of an array, or sweep points, share one row.
    """
    parts = [part for part in CATEGORIES if any(a.seconds[part] >= _MIN_SHOWN_S for a in attempts)] or ["compute"]
    groups: list[tuple[str, str, str, str, Sequence[AttemptTimes]]] = []
    for stage in dict.fromkeys(a.stage for a in attempts):
        of_stage = [a for a in attempts if a.stage == stage]
        array = [a for a in of_stage if a.task is not None]
        single = [a for a in of_stage if a.task is None]
        if array:
            ranks = {a.task: a.ranks for a in array}  # of each task's last attempt
            name = f"{len(ranks)} points" if STAGES[stage].is_per_point else f"array of {len(ranks)}"
            causes = ", ".join(sorted({a.cause for a in array}))
            groups.append((stage, name, str(sum(ranks.values())), causes, array))
        groups += [(stage, str(a.number), str(a.ranks), a.cause, [a]) for a in single]
        if len(single) > 1:
            groups.append((stage, "all", "", "", single))
    rows = [["stage", "attempt", "ranks", "end", *(_COLUMN_TITLES.get(part, part) for part in parts), "in all"]]
    for *labels, members in groups:
        sums = sum_categories(members)
        durations = [format_duration(sums[part]) if sums[part] >= _MIN_SHOWN_S else "·" for part in parts]
        rows.append([*map(str, labels), *durations, format_duration(sum(sums.values()))])
    return rows


def _causes_table(attempts: Sequence[AttemptTimes]) -> Rows:
    """Return how often attempts ended by each cause and what that cost, header first."""
    rows = [["cause", "attempts", "lost", "ending", "in all"]]
    for cause in sorted({a.cause for a in attempts}):
        of_cause = [a for a in attempts if a.cause == cause]
        sums = sum_categories(of_cause)
        durations = [sums["lost"], sums["ending"], sum(sums.values())]
        rows.append([cause, str(len(of_cause)), *map(format_duration, durations)])
    return rows


def _evaluations_table(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Return all evaluations, header first; [] if there are none."""
    if not results:
        return []
    keys = [key for key, value in results[0].items() if isinstance(value, float)]
    header = ["step", *(key.replace("_", " ") for key in keys)]
    rows = [[str(result["step"]), *(f"{result.get(key, nan):.4f}" for key in keys)] for result in results]
    return [header, *rows]


# -------------------------------------------------------------------------------------------------------------- texts


def _summarize(
    run: Run,
    rows: Sequence[StageStatus],
    attempts: Sequence[AttemptTimes],
    steps: LineHistory,
    points: Sequence[Sequence[str]],
) -> dict[str, str]:
    """Return the summary at the top of the page: what was trained, how good it is, how long it took, what it cost.

    points: for a sweep, the header of its table and the best point.
    """
    model = run.config.model
    train = stages.load_stage_module("train")
    trained = [model.target or f"a decoder of {model.layers} layers, {model.dim} wide, {model.heads} heads"]
    if run.config.sweep is None:
        progress = train.progress(run).description
        trained.append(progress)
        if " tokens" not in progress:  # the description of a completed training contains them
            trained += [f"{tokens:,.0f} tokens" for tokens in steps.values("tokens")[-1:]]
    else:
        trained.append(f"a sweep of {len(run.config.sweep.points())} points")
    with suppress(UserError, OSError):
        trained.append(resolve_layout(run.config).describe_sizes())
    result = read_newest_result(run)
    quality = format_result(result) if result else "not evaluated yet"
    if best := points[1:2]:
        quality = "best point: " + ", ".join(f"{name} {cell}" for name, cell in zip(points[0], best[0], strict=True))
    sums = sum_categories(attempts)
    causes = Counter(a.cause for a in attempts if a.cause not in ("done", "running"))
    productive = format_duration(sum(sums[part] for part in PRODUCTIVE_CATEGORIES))
    lost = format_duration(sums["lost"])
    queue = format_duration(sums["queue"])
    rank_s = sum(
        a.ranks * (a.end_time - a.start_time - sum(a.seconds[part] for part in WAITING_CATEGORIES)) for a in attempts
    )
    spans = [(a.start_time, a.end_time) for a in attempts]
    energies = [kwh for each in (run, *list_points(run)) if (kwh := sum_gpu_energy_kwh(each.path, spans)) is not None]
    energy = f"{sum(energies):.3g} kWh of GPUs; " if energies else ""
    begin = min((a.start_time for a in attempts), default=0.0)
    duration = format_duration(max((a.end_time for a in attempts), default=0.0) - begin)
    hosts = ", ".join(sorted({event.host for event in run.read_events("train", Started) if event.host}))
    unfinished = [f"{row.stage} {row.state}" for row in rows if row.state != "done"]
    return {
        "trained": ", ".join(trained),
        "quality": quality,
        "duration": f"{duration}, of which {productive} productive",
        "started": f"{datetime.fromtimestamp(begin):%Y-%m-%d %H:%M}, on {hosts}" if hosts else "",
        "cost": f"{rank_s / 3600:.2f} rank-hours; {energy}{queue} in the queue, {lost} of lost work",
        "stopped by": ", ".join(f"{cause} {times} ×" for cause, times in causes.most_common()) or "nothing",
        "state": ", ".join(unfinished) or "all stages are done",
    }


def _describe_training(
    run: Run, data: ReportData, training: Sequence[AttemptTimes], describe_goodput: DescribeGoodput | None
) -> Iterator[str]:
    """Yield the lines about the training, the evaluation, slow hosts and GPUs, and malformed lines."""
    if run.config.sweep is None:
        repeated = sum(len(event.steps) for event in run.read_events("train", LostWork))
        progress = stages.load_stage_module("train").progress(run)
        yield f"training: {progress.description}; {repeated} steps were lost and repeated"
    if training:
        effective, forward = compute_ratios(sum_categories(training))
        yield f"effective training time ratio {effective:.3f}, forward progress {forward:.3f} (arXiv 2410.21680)"
        if run.config.sweep is None and describe_goodput is not None:
            expected = describe_goodput(run.config, run.read_events("train"), data.steps.rows, training)
            if expected is not None:
                yield expected
    if run.config.sweep is None:
        yield describe_result(run)
    if profiled := data.steps.values("profile.compute"):
        parts = {name: fmean(data.steps.values(f"profile.{name}")) for name in step_trace.STEP_PARTS}
        yield f"{len(profiled)} profiled steps: {step_trace.describe_parts(parts)}"
    if host_ratios := read_compute_times(run.jobs_dir):
        slowest = sorted(host_ratios.items(), key=lambda item: -item[1])[:8]
        hosts = ", ".join(f"{host} {ratio:.2f}" for host, ratio in slowest)
        yield f"local compute time per step by host, as a multiple of the median, slowest first: {hosts}"
    span = (
        (max(training[-1].end_time - 600, training[-1].start_time), training[-1].end_time) if training else (0.0, 0.0)
    )
    if slow_gpus := list_slow_gpus(run.path, *span, max_samples=None):
        yield f"GPUs behind others of their kind in the last 10 minutes of training: {'; '.join(slow_gpus[:8])}"
    yield from filter(
        None, (lines.describe_malformed_lines(run.events_file, is_event), data.steps.malformed_description)
    )


# ------------------------------------------------------------------------------------------------------------ figures


def pick_time_unit(duration_s: float) -> tuple[str, float]:
    """Return the unit to show such a duration in, and the unit's seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, size) for name, size in units if duration_s > 3 * size), ("seconds", 1.0))


def draw_timeline(attempts: Sequence[AttemptTimes]) -> str:
    """Draw one lane per stage, and a thin one per task of an array.

    Within an attempt, its parts follow each other in the ledger's order: the width of a part is its total duration, its
    position is not when it happened.
    """
    begin = min((a.start_time for a in attempts), default=0.0)
    end = max((a.end_time for a in attempts), default=0.0)
    unit, size = pick_time_unit(end - begin)
    x = Scale.from_values([0.0, max(end - begin, 1.0) / size], f"{unit} since the start of the run", whole=True)
    bars_by_task: dict[str, dict[int | None, list[Bar]]] = {}
    for a in attempts:
        bars = bars_by_task.setdefault(a.stage, {}).setdefault(a.task, [])
        at = (a.start_time - begin) / size
        cause = "" if a.cause in ("done", "running") else a.cause
        longest_part = max(a.seconds, key=lambda part: a.seconds[part])
        for part, duration_s in a.seconds.items():
            title = f"{a.stage} {a.number}, ended: {a.cause}; {part} {format_duration(duration_s)}"
            bars.append(
                Bar(at, at + duration_s / size, PART_COLOURS[part], title, cause if part == longest_part else "")
            )
            at += duration_s / size
        if cause:  # mark the end of an attempt that was stopped
            bars.append(Bar(at - x.high / 200, at, _STOP_COLOUR, f"{a.stage} {a.number} ended: {cause}"))
    lanes = [
        ("" if position else stage, bars)
        for stage, tasks in bars_by_task.items()
        for position, bars in enumerate(tasks.values())
    ]
    keys = [
        (part, colour) for part, colour in PART_COLOURS.items() if any(a.seconds.get(part, 0) > 0 for a in attempts)
    ]
    return draw_lanes(f"Hours by part: {format_duration(end - begin)} in all", x, lanes, [*keys, ("stopped", 4)])


def _draw_hosts(ratios_by_host: Mapping[str, float]) -> str:
    """Draw the local compute time of each host's ranks per step, relative to the others, slowest first."""
    axis_title = "local compute time per step, multiple of the median"
    x = Scale.from_values([0.0, *ratios_by_host.values()], axis_title).extend_to_round_numbers()
    slowest_first = sorted(ratios_by_host.items(), key=lambda item: -item[1])
    lanes = [
        (host, [Bar(0, ratio, 4 if ratio > _SLOW_HOST_RATIO else 0, f"{host}: {ratio:.3f}", f"{ratio:.2f}")])
        for host, ratio in slowest_first
    ]
    return draw_lanes("Hosts by local compute time", x, lanes)


def _draw_tasks(result: Mapping[str, float]) -> str:
    """Draw the accuracy of each task of an evaluation, with its standard error."""
    lanes = []
    for name, value in result.items():
        if ".accuracy" in name and not name.endswith("_stderr"):
            error = result.get(f"{name}_stderr", 0.0)
            accuracy = Bar(0, value, 0, f"{name}: {value:.4f} ± {error:.4f}", f"{value:.3f}")
            interval = Bar(max(0, value - error), min(1, value + error), 1, f"± {error:.4f}")
            lanes.append((name, [accuracy, interval]))
    return draw_lanes("Tasks", Scale(0, 1, "accuracy ± standard error"), lanes)


def draw_mesh(layout: Layout) -> str:
    """Draw a lane for each node with a box for each of its ranks, coloured by pipeline stage."""
    per_node = min(layout.ranks_per_node, layout.world_size)
    lanes: dict[str, list[Bar]] = {}
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        node, position = divmod(rank, per_node)
        title = f"rank {rank}: pipeline {at.pp}, data {at.dp}, tensor {at.tp}"
        box = Bar(position - 0.48, position + 0.48, at.pp % GREY, title, f"p{at.pp} d{at.dp} t{at.tp}")
        lanes.setdefault(f"node {node}", []).append(box)
    keys = [(f"pipeline {rank}", rank % GREY) for rank in range(layout.pp)]
    x = Scale(-0.5, per_node - 0.5, "rank on its node", whole=True)
    return draw_lanes(f"Layout: {layout.describe_sizes()}", x, [*lanes.items()], keys, min_width_rem=8 + 6 * per_node)


def draw_sweep_points(points: Sequence[Mapping[str, Any]], result_name: str, results: Sequence[float]) -> str:
    """Draw each sweep point as a line across its values up to its result (parallel coordinates), the best coloured.

    Args:
        points: The values of each point by key.
        result_name: What the results are.
        results: The result of each point, infinite if unknown; lower is better.
    """
    evaluated = sorted((result, point) for point, result in enumerate(results) if result < inf)
    if len(evaluated) < 2:
        return ""
    columns = {key: [points[point][key] for _, point in evaluated] for key in points[0]}
    columns[result_name] = [result for result, _ in evaluated]
    drawing = ""
    paths = list[list[tuple[float, float]]]([] for _ in evaluated)
    last = len(columns) - 1
    for position, (key, values) in enumerate(columns.items()):
        distinct = sorted(set(values), key=lambda value: (value if is_number(value) else inf, str(value)))
        if key != result_name and (len(distinct) <= _MAX_EVEN_VALUES or not all(map(is_number, distinct))):
            ticks = [
                (n / max(1, len(distinct) - 1), format_number(value) if is_number(value) else str(value))
                for n, value in enumerate(distinct)
            ]
            heights = [ticks[distinct.index(value)][0] for value in values]
        else:
            scale = Scale.from_values(values, key, log=key != result_name)
            ticks = [(scale.position(value), text) for value, text in scale.ticks()]
            heights = [scale.position(value) for value in values]
        for path, height in zip(paths, heights, strict=True):
            path.append((position / last, height))
        x = f"{100 * position / last:.2f}%"
        side = "end" if position == last else "start"
        drawing += plot.draw_grid_line(position / last, True)
        anchor = side if position in (0, last) else "middle"
        drawing += plot.draw_label(x, f"{-10 - 15 * (position % 2)}", key, anchor, "title")
        for height, text in ticks:
            dx = -6 if position == last else 6
            y = f"{100 - 100 * height:.2f}%"
            drawing += plot.draw_label(x, y, text[:MAX_LABEL_CHARACTERS], side, dy=".35em", dx=dx)
    best_quarter = max(1, len(evaluated) / 4)
    curves = [
        Curve(f"point {point:03}: {result:.4f}", path, GREY if order >= best_quarter else 0 if order else 2)
        for order, ((result, point), path) in enumerate(zip(evaluated, paths, strict=True))
    ]
    unit = Scale(0, 1, "")
    keys = [("best", 2), ("best quarter", 0), ("others", GREY)]
    content = plot.stretch("".join(plot.draw_curve(unit, unit, curve) for curve in reversed(curves))) + drawing
    return format_figure("Values and results", content, keys, f"{FIGURE_STYLE};padding-top:44px")


def draw_training(run: Run, steps: LineHistory) -> list[str]:
    """Draw everything over steps. Vertical lines mark steps at which an attempt resumed from a checkpoint."""
    marks = [event.step for event in run.read_events("train", Restored)]
    unit, loss_unit = ("tokens", "nats per token") if "samples_per_s" not in steps.names else ("samples", "loss")

    def draw_over_steps(heading: str, y: str, names: Mapping[str, str], *, log: str = "") -> str:
        curves = {name: steps.curve(key) for key, name in names.items()}
        return draw_curves(heading, _STEP_AXIS, y, curves, log=log, marks=marks)

    extra_metrics = [
        name for name in steps.names if name.startswith(HELD_OUT_PREFIX) and name != f"{HELD_OUT_PREFIX}loss"
    ]
    middles, parts = _mean_step_parts(steps)
    profiled_steps, profiled_shares = _profiled_shares(steps)
    return [
        draw_over_steps("Loss", loss_unit, {"loss": "training", f"{HELD_OUT_PREFIX}loss": "held out"}),
        draw_curves("Loss in the second half", _STEP_AXIS, f"{loss_unit}, mean", _late_losses(steps), marks=marks),
        *(draw_over_steps(name.replace("_", " "), "on held-out data", {name: name}) for name in extra_metrics),
        draw_over_steps(
            "Gradient norm", "of the whole model, before clipping", {"grad_norm": "gradient norm"}, log="y"
        ),
        draw_over_steps("Learning rate", "learning rate", {"lr": "learning rate"}),
        draw_over_steps("Throughput", f"{unit} per second", {f"{unit}_per_s": unit}),
        draw_layers("Parts of a step", _STEP_AXIS, "seconds per step, mean", middles, parts, PART_COLOURS),
        draw_layers(
            "Parts of profiled steps", _STEP_AXIS, "% of the step", profiled_steps, profiled_shares, PART_COLOURS
        ),
        draw_over_steps("Memory", "GB, peak of rank 0", {"memory_gb": "allocated", "memory_reserved_gb": "reserved"}),
    ]


def _mean_step_parts(steps: LineHistory) -> tuple[list[float], dict[str, list[float]]]:
    """Return the mean step of each slice of the training, and the mean seconds of each part of a step there."""
    size = max(1, ceil(len(steps.rows) / _SLICES))
    slices = [steps.rows[start : start + size] for start in range(0, len(steps.rows), size)]
    middles = [fmean(row["step"] for row in rows) for rows in slices]
    parts = defaultdict[str, list[float]](list)
    for rows in slices:
        divided = [split_step_time(row) for row in rows]
        for part in divided[0]:
            parts[part].append(fmean(step[part] for step in divided))
    return middles, parts


def _profiled_shares(steps: LineHistory) -> tuple[list[float], dict[str, list[float]]]:
    """Return the profiled steps, and the share of each part in per cent."""
    parts = {name: dict(steps.curve(f"profile.{name}")) for name in step_trace.STEP_PARTS}
    profiled = sorted({step for curve in parts.values() for step in curve})
    totals = {step: sum(curve.get(step, 0.0) for curve in parts.values()) or 1.0 for step in profiled}
    shares = {name: [100 * curve.get(step, 0.0) / totals[step] for step in profiled] for name, curve in parts.items()}
    return profiled, shares


def _late_losses(steps: LineHistory) -> dict[str, Points]:
    """Return the losses in the second half, whose detail the first steps and spikes would hide; {} if too few."""
    losses = [steps.curve(name) for name in ("loss", f"{HELD_OUT_PREFIX}loss")]
    if not losses[0]:
        return {}
    training, held_out = ([point for point in curve if 2 * point[0] > losses[0][-1][0]] for curve in losses)
    smooth = average_buckets(training)
    return {"training": smooth, "held out": held_out} if smooth else {}


def _draw_results(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw the evaluations over the checkpoints, and the tasks of the newest one."""
    if not results:
        return []
    newest = results[-1]
    name = get_main_metric(newest)[0]
    key = "bits_per_byte" if "bits_per_byte" in newest else "loss"
    curves = {name: [(result["step"], result[key]) for result in results if key in result]}
    if "bits_per_byte" in newest:
        curves["of the unigram"] = [
            (result["step"], result["unigram_bits_per_byte"]) for result in results if key in result
        ]
    metrics = {
        name: [(result["step"], result[name]) for result in results if name in result]
        for name in get_extra_metrics(newest)
    }
    task_curves = {name: points for name, points in metrics.items() if "." in name}
    return [
        draw_curves("Evaluation of checkpoints", _STEP_AXIS, name, curves),
        *(draw_curves(name, _STEP_AXIS, name, {name: points}) for name, points in metrics.items() if "." not in name),
        draw_curves("Tasks over the checkpoints", _STEP_AXIS, "accuracy", task_curves),
        _draw_tasks(newest),
    ]


def _draw_sweep(run: Run, rows: Sequence[StageStatus], curves: Mapping[str, Mapping[str, Points]]) -> list[str]:
    """Draw the points across their values, and the loss of each point, the best in front; [] if there is no sweep."""
    if run.config.sweep is None:
        return []
    newest = [read_newest_result(row.run) for row in rows]
    results = [get_main_metric(result)[1] if result else inf for result in newest]
    result_name = next((get_main_metric(result)[0] for result in newest if result), "")
    names = [row.run.path.name for _, row in sorted(zip(results, rows, strict=True), key=lambda pair: pair[0])]
    ordered = {key: {name: points[name] for name in names if name in points} for key, points in curves.items()}
    held_out = ordered.get("held_out_loss", {})
    return [
        draw_sweep_points(run.config.sweep.points(), result_name, results),
        draw_curves("Loss of the points", _STEP_AXIS, "loss in training", ordered.get("loss", {})),
        draw_curves("Held-out loss of the points", _STEP_AXIS, "loss on held-out data", held_out),
    ]


def _draw_machines(run: Run, attempts: Sequence[AttemptTimes]) -> list[str]:
    """Draw the config's layout, the hosts by local compute time, and each host's telemetry."""
    figures = [_draw_hosts(read_compute_times(run.jobs_dir))]
    with suppress(UserError, OSError):  # for example, its tokenizer was removed
        figures.append(draw_mesh(resolve_layout(run.config)))
    curves: dict[str, dict[str, Points]] = defaultdict(dict)
    begin = min((a.start_time for a in attempts), default=0.0)
    end = max((a.end_time for a in attempts), default=0.0)
    unit, size = pick_time_unit(end - begin)
    for file in sorted(run.path.glob("telemetry-*.jsonl")):
        points: dict[str, list[tuple[float, float]]] = {sensor: [] for sensor in SENSORS}
        for sample in lines.read_valid_lines(file, is_telemetry_line):
            for sensor, sensor_points in points.items():
                if values := get_sensor_values(sample, sensor):
                    sensor_points.append(((sample["time"] - begin) / size, fmean(value for _, value in values)))
        for sensor, sensor_points in points.items():
            curves[sensor][file.stem.removeprefix("telemetry-")] = average_buckets(sensor_points, 150) or sensor_points
    for sensor, (title, y, *_) in SENSORS.items():
        suffix = ", mean of the host's GPUs" if sensor.startswith("gpus.") else ""
        x = f"{unit} since the start of the run"
        figures.append(draw_curves(title[0].upper() + title[1:], x, y + suffix, curves[sensor]))
    return figures


# ------------------------------------------------------------------------------------------------------------- report


def print_report(run: Run, console: Console, describe_goodput: DescribeGoodput | None = None) -> None:
    """Print the ledger, the training and the evaluation, and write the same with figures to `report.html`.

    Args:
        run: The run.
        console: Where to print.
        describe_goodput: Returns the line that compares the measured goodput with the expected one, or None.
    """
    poller = StatusPoller(run)
    rows = poller.poll()
    data = read_report_data(run, rows)
    training = [a for a in data.attempts if a.stage == "train"]
    attempts_table = _attempts_table(data.attempts)
    causes_table = _causes_table(training) if len(training) > 1 else []
    points_table = tabulate_points(run, poller.point_statuses)
    results, damaged = read_all_results(run)
    notes = [
        *filter(None, [run.describe_changes()]),
        *describe_failures(poller.point_statuses),
        *_describe_training(run, data, training, describe_goodput),
        *(f"evaluation/{name} is left out: it is incomplete or was changed" for name in damaged),
    ]
    tables = [build_table(cells, console.width) for cells in (attempts_table, causes_table, points_table) if cells]
    for part in (run.title, *tables, *notes):
        console.print(part, soft_wrap=True)
    sections = {
        "Sweep": [*_draw_sweep(run, poller.point_statuses, data.curves), format_table(points_table)],
        "Training": draw_training(run, data.steps),
        "Hours": [draw_timeline(data.attempts), format_table(attempts_table), format_table(causes_table)],
        "Quality": [*_draw_results(results), format_table(_evaluations_table(results))],
        "Machines": _draw_machines(run, data.attempts),
    }
    summary = _summarize(run, rows, data.attempts, data.steps, points_table[:2])
    config = dump_yaml(mask_secrets(run.config.model_dump(mode="json", exclude_defaults=True)))
    file = run.path / "report.html"
    with suppress(PermissionError):  # another user's run
        write_atomic(file, format_page(run.config.run.name, run.title, summary, sections, notes, config))
        console.print(f"with figures: {file}", soft_wrap=True)
