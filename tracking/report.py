"""Report the hours, losses and evaluation of a run, in the terminal and in `report.html` (`report RUN`).

All data is read from the run directory, so the report also works without Slurm. If Slurm has accounting, `sacct`
provides the exact start and end of each job. A figure without data (such as telemetry that was not recorded) is left
out of the page.
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
    format_image,
    format_page,
    format_table,
)  # fmt: skip
from pipeline.base.plot import BUCKETS, GREY, PALE, Curve, Points, Scale, average_buckets, downsample, format_number
from pipeline.base.text import format_duration
from pipeline.base.yaml12 import dump_yaml
from pipeline.config.masking import mask_secrets
from pipeline.config.sections import Config
from pipeline.evaluate.result import (
    EMA_PREFIX,
    HELD_OUT_PREFIX,
    format_result,
    get_extra_metrics,
    get_main_metric,
    read_all_results,
    read_newest_result,
)
from pipeline.parallel.mesh import Layout, resolve_layout
from pipeline.run import lines, stages
from pipeline.run.directory import Run, list_point_values, list_points
from pipeline.run.events import Done, Event, LostWork, Restored, Started, is_event
from pipeline.run.images import Image, read_images
from pipeline.run.ledger import (
    CATEGORIES,
    PRODUCTIVE_CATEGORIES,
    STEP_TIME_KEYS,
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
from pipeline.run.origin import describe_origin
from pipeline.run.trials import read_study
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
    describe_study,
    tabulate_points,
)

Rows = list[list[str]]
"""The rows of a table; the first row is the header."""
DescribeGoodput = Callable[[Config, Sequence[Event], Sequence[StepLine], Sequence[AttemptTimes]], str | None]
"""A function that describes the expected goodput. Its arguments are the config, and the events, the lines of
metrics.jsonl and the attempts of the train stage."""

_COLUMN_TITLES = {"startup": "start-up", "communication": "comm", "evaluation": "held-out", "checkpoint": "save"}
"""Titles of the columns of categories, if they differ from the name of the category (pipeline/run/ledger.py)."""
PART_COLOURS = {
    "idle": PALE, "queue": GREY, "startup": 6, "compute": 2, "data": 5, "communication": 0, "evaluation": 3,
    "checkpoint": 1, "lost": 4, "ending": 7, "communication_exposed": 0, "copy": 5, "bubble": 6,
    "profiling": 10,
}  # fmt: skip
"""Colours of the categories of the ledger and of the parts of a profiled step, the same in all figures."""
_STOP_COLOUR = 4
"""Colour of the mark at the end of an attempt that stopped."""
_MAX_EVEN_VALUES = 6
"""If a swept key has at most this many values, the values are spaced evenly on the axis of the key."""
_STEP_AXIS = "optimizer step"
_SLICES = 150
"""The steps of a run are divided into at most this many slices. The figure of step times shows the mean of each
slice."""
_TELEMETRY_BUCKETS = 150
"""Number of averages in a curve of telemetry."""
_MIN_SHOWN_S = 0.5
"""Shorter durations are shown as a dot."""
_MAX_HOSTS_SHOWN = 8
"""Maximum number of slow hosts, and of slow GPUs, in the text."""
_SLOW_GPU_PERIOD_S = 600.0
"""Slow GPUs are searched in the last 10 minutes of training."""
_BAR_COLOUR = 0
_ERROR_COLOUR = 1
_BEST_COLOUR = 2
_SLOW_COLOUR = 4
"""Colours of bars, of standard errors, of the best sweep point and of slow hosts, as indices of the palette."""
_HELD_OUT_LOSSES = {
    f"{HELD_OUT_PREFIX}loss": "held out",
    f"{HELD_OUT_PREFIX}{EMA_PREFIX}loss": "held out, moving average of the weights",
}
"""Labels of the curves of the losses on held-out data, by key of metrics.jsonl."""
_SHOWN_METRICS = {
    "step", "loss", "grad_norm", "lr", "tokens", "samples", "samples_consumed", "time", "tflops", "memory_gb",
    "memory_reserved_gb", "compute_spread",
}  # fmt: skip
"""Keys of metrics.jsonl that have their own figure, or need none. Other keys come from callbacks and commands."""
_MAX_IMAGES_PER_NAME = 6
_MAX_IMAGES_SIZE = 20_000_000
"""Maximum size in bytes of all images of the page."""
_SLOW_HOST_RATIO = 1.2
"""Hosts whose local compute time is more than this multiple of the median are marked."""


# ------------------------------------------------------------------------------------------------------------ reading


@dataclass
class ReportData:
    """The data of a run and its sweep points. Of a point, only attempts and curves are kept."""

    attempts: list[AttemptTimes]
    """The attempts of the run, followed by those of the sweep points. In an attempt of a point, `task` is the number of
    the point."""
    steps: LineHistory
    """The lines of the run's metrics.jsonl. They do not include the steps of sweep points."""
    curves: dict[str, dict[str, Points]]
    """For a sweep, the curves over steps: first by key (`loss`, `held_out_loss`), then by name of the point."""


def read_job_times(jobs: Iterable[RecordedJob]) -> list[JobRun]:
    """Return the start and end of each execution of these jobs from accounting; a requeued job has several executions.

    The result is [] without accounting, or if the controller does not respond. Jobs of other clusters are left out.
    """
    cluster = cluster_name()
    expected = {(array_job_id(job.job_id), job.name) for job in jobs if job.cluster in (None, cluster)}
    ids = ",".join(sorted({job_id for job_id, _ in expected})) if cluster else ""
    job_times = []
    for line in (query_accounting(ids, "JobID,Start,End,JobName") if ids else "").splitlines():
        job_id, start, end, name = line.split("|", 3)  # the user may choose a name with `|`
        # the name in `expected` is "" if the events of the job contain no name
        if expected.isdisjoint((array_job_id(job_id), candidate) for candidate in (name, "")):
            continue  # another job that had this id before
        if start_time := parse_slurm_time(start):  # 0 for "Unknown", if the job has not started
            job_times.append(JobRun(job_id, start_time, parse_slurm_time(end) or None))
    return job_times


def read_report_data(run: Run, statuses: Iterable[StageStatus]) -> ReportData:
    """Read the data of a run and its sweep points.

    Args:
        run: the run.
        statuses: the statuses of the run's stages.
    """
    points = list_points(run)
    recorded_jobs = [job for each in (run, *points) for _, job in list_recorded_jobs(each)] if uses_slurm(run) else []
    job_times = read_job_times(recorded_jobs)
    now = time.time()
    events = run.read_events()
    running = [status.stage for status in statuses if status.state in ("running", "completing")]
    steps = LineHistory(run.metrics_file, is_step_line, row_keys=STEP_TIME_KEYS).read_new_lines()
    attempts = build_ledger(events, steps.rows, stages.list_run_stages(run), now, running, job_times)
    data = ReportData(attempts, steps, {})
    # the jobs of the points waited for the shared stages, so the ledger of a point needs the ends of these stages
    shared_events = [event for event in events if isinstance(event, Done)]
    point_stages = stages.list_point_stages(run)
    for point_number, point in enumerate(points):
        # `statuses` does not contain the stages of points, so the locks show which of these stages are running
        running = [stage for stage in point_stages if point.lock_holder(stage)]
        history = LineHistory(point.metrics_file, is_step_line, row_keys=STEP_TIME_KEYS).read_new_lines()
        point_events = [*shared_events, *point.read_events()]
        for attempt in build_ledger(point_events, history.rows, point_stages, now, running, job_times):
            attempt.task = point_number
            data.attempts.append(attempt)
        for name in ("loss", "held_out_loss"):
            data.curves.setdefault(name, {})[point.path.name] = downsample(history.curve(name), BUCKETS)
    return data


# ------------------------------------------------------------------------------------------------------------- tables


def _attempts_table(run: Run, attempts: Sequence[AttemptTimes]) -> Rows:
    """Return a table of the hours by attempt and category.

    Each attempt without a task has a row. If a stage has several such attempts, a further row contains their sum. All
    attempts of the tasks of an array, or of the sweep points, share one row.
    """
    categories = [name for name in CATEGORIES if any(a.seconds[name] >= _MIN_SHOWN_S for a in attempts)]
    categories = categories or ["compute"]  # the table has at least one column of a category
    groups: list[tuple[str, str, str, str, Sequence[AttemptTimes]]] = []
    for stage in dict.fromkeys(a.stage for a in attempts):
        stage_attempts = [a for a in attempts if a.stage == stage]
        task_attempts = [a for a in stage_attempts if a.task is not None]
        other_attempts = [a for a in stage_attempts if a.task is None]
        if task_attempts:
            ranks_by_task = {a.task: a.ranks for a in task_attempts}  # the last attempt of a task counts
            count = len(ranks_by_task)
            name = f"{count} points" if run.config.get_stage(stage).is_per_point else f"array of {count}"
            causes = ", ".join(sorted({a.cause for a in task_attempts}))
            groups.append((stage, name, str(sum(ranks_by_task.values())), causes, task_attempts))
        groups += [(stage, str(a.number), str(a.ranks), a.cause, [a]) for a in other_attempts]
        if len(other_attempts) > 1:
            groups.append((stage, "all", "", "", other_attempts))
    titles = [_COLUMN_TITLES.get(name, name) for name in categories]
    rows = [["stage", "attempt", "ranks", "end", *titles, "in all"]]
    for *labels, group_attempts in groups:
        sums = sum_categories(group_attempts)
        durations = [format_duration(sums[name]) if sums[name] >= _MIN_SHOWN_S else "·" for name in categories]
        rows.append([*map(str, labels), *durations, format_duration(sum(sums.values()))])
    return rows


def _causes_table(attempts: Sequence[AttemptTimes]) -> Rows:
    """Return a table of the causes for which attempts ended, with the number and the hours of these attempts."""
    rows = [["cause", "attempts", "lost", "ending", "in all"]]
    for cause in sorted({a.cause for a in attempts}):
        matching_attempts = [a for a in attempts if a.cause == cause]
        sums = sum_categories(matching_attempts)
        durations = [sums["lost"], sums["ending"], sum(sums.values())]
        rows.append([cause, str(len(matching_attempts)), *map(format_duration, durations)])
    return rows


def _evaluations_table(results: Sequence[Mapping[str, Any]]) -> Rows:
    """Return a table of all evaluations; [] if there are none. The columns are those of the first evaluation."""
    if not results:
        return []
    keys = [key for key, value in results[0].items() if isinstance(value, float)]
    header = ["step", *(key.replace("_", " ") for key in keys)]
    rows = [[str(result["step"]), *(f"{result.get(key, nan):.4f}" for key in keys)] for result in results]
    return [header, *rows]


# -------------------------------------------------------------------------------------------------------------- texts


def _summarize(
    run: Run,
    statuses: Sequence[StageStatus],
    attempts: Sequence[AttemptTimes],
    steps: LineHistory,
    points: Sequence[Sequence[str]],
) -> dict[str, str]:
    """Return the summary at the top of the page: the model, its quality, the duration and the cost.

    Args:
        run: the run.
        statuses: the statuses of the run's stages.
        attempts: all attempts of the run and its sweep points.
        steps: the lines of metrics.jsonl.
        points: for a sweep, the header of the table of points and the row of the best point; otherwise empty.
    """
    model = run.config.model
    stage = run.config.metrics_stage
    train = stages.load_stage_module(run, stage)
    descriptions = [model.describe()]
    if not run.config.has_pipeline:
        descriptions = [run.config.stages.commands[stage].command]
    if run.config.sweep is None:
        progress = train.progress(run).description
        descriptions.append(progress)
        if " tokens" not in progress:  # if the train stage is done, the description contains the number of tokens
            descriptions += [f"{tokens:,.0f} tokens" for tokens in steps.values("tokens")[-1:]]
    else:
        kind, noun = ("sweep", "points") if run.config.sweep.search is None else ("search", "trials")
        descriptions.append(f"a {kind} of {run.config.sweep.point_count} {noun}")
    if run.config.has_pipeline:
        with suppress(UserError, OSError):
            descriptions.append(resolve_layout(run.config).describe_sizes())
    result = read_newest_result(run)
    quality = format_result(result) if result else "not evaluated yet" * run.config.has_pipeline
    if len(points) > 1:
        best_point = zip(points[0], points[1], strict=True)
        quality = f"best {points[0][0]}: " + ", ".join(f"{name} {cell}" for name, cell in best_point)
    sums = sum_categories(attempts)
    causes = Counter(a.cause for a in attempts if a.cause not in ("done", "running"))
    productive = format_duration(sum(sums[category] for category in PRODUCTIVE_CATEGORIES))
    lost = format_duration(sums["lost"])
    queue = format_duration(sums["queue"])
    # an attempt has no ranks while it waits for its job to start
    rank_s = sum(a.ranks * a.job_seconds for a in attempts)
    spares = f"{idle}; " if (idle := _describe_idle_spares(attempts)) else ""
    periods = [(a.start_time, a.end_time) for a in attempts]
    energies = [kwh for each in (run, *list_points(run)) if (kwh := sum_gpu_energy_kwh(each.path, periods)) is not None]
    energy = f"{sum(energies):.3g} kWh of GPUs; " if energies else ""
    begin = min((a.start_time for a in attempts), default=0.0)
    duration = format_duration(max((a.end_time for a in attempts), default=0.0) - begin)
    hosts = ", ".join(sorted({event.host for event in run.read_events(stage, Started) if event.host}))
    unfinished = [f"{status.stage} {status.state}" for status in statuses if status.state != "done"]
    return {
        "trained": ", ".join(descriptions),
        "quality": quality,
        "duration": f"{duration}, of which {productive} productive",
        "started": f"{datetime.fromtimestamp(begin):%Y-%m-%d %H:%M}, on {hosts}" if hosts else "",
        "cost": f"{rank_s / 3600:.2f} rank-hours; {spares}{energy}{queue} in the queue, {lost} of lost work",
        "stopped by": ", ".join(f"{cause} {times} ×" for cause, times in causes.most_common()) or "nothing",
        "state": ", ".join(unfinished) or "all stages are done",
    }


def _describe_idle_spares(attempts: Sequence[AttemptTimes]) -> str:
    """Return how long spare nodes have waited; "" if there were none."""
    node_s = sum(a.spare_nodes * a.job_seconds for a in attempts)
    return f"{node_s / 3600:.2f} node-hours of idle spare nodes" if node_s else ""


def _describe_training(
    run: Run, data: ReportData, train_attempts: Sequence[AttemptTimes], describe_goodput: DescribeGoodput | None
) -> Iterator[str]:
    """Yield the lines about the train stage, the evaluation, slow hosts and GPUs, and malformed lines.

    For a sweep, the lines about progress, goodput and the evaluation are left out.

    Args:
        run: the run.
        data: the data of the run.
        train_attempts: the attempts of the train stage, oldest first.
        describe_goodput: as in :func:`print_report`.
    """
    if run.config.sweep is None:
        stage = run.config.metrics_stage
        lost_steps = sum(len(event.steps) for event in run.read_events(stage, LostWork))
        progress = stages.load_stage_module(run, stage).progress(run)
        heading = "training" if run.config.has_pipeline else stage
        lost = f"; {lost_steps} steps were lost and repeated" if run.config.has_pipeline or data.steps.rows else ""
        yield f"{heading}: {progress.description}{lost}"
    if train_attempts:
        time_ratio, forward_progress = compute_ratios(sum_categories(train_attempts))
        yield (
            f"effective training time ratio {time_ratio:.3f}, forward progress {forward_progress:.3f} "
            "(arXiv 2410.21680)"
        )
        if run.config.sweep is None and run.config.has_pipeline and describe_goodput is not None:
            goodput = describe_goodput(run.config, run.read_events("train"), data.steps.rows, train_attempts)
            if goodput is not None:
                yield goodput
    if run.config.sweep is None and run.config.has_pipeline:
        yield describe_result(run)
    if compute_times := data.steps.values("profile.compute"):
        parts = {name: fmean(data.steps.values(f"profile.{name}")) for name in step_trace.STEP_PARTS}
        yield f"{len(compute_times)} profiled steps: {step_trace.describe_parts(parts)}"
    if spreads := data.steps.values("compute_spread"):
        yield f"local compute time of the slowest rank: {fmean(spreads):.2f} × the mean of its peers"
    if host_ratios := read_compute_times(run.jobs_dir):
        slowest = sorted(host_ratios.items(), key=lambda item: -item[1])[:_MAX_HOSTS_SHOWN]
        hosts = ", ".join(f"{host} {ratio:.2f}" for host, ratio in slowest)
        yield f"local compute time per step by host, as a multiple of the median, slowest first: {hosts}"
    begin = 0.0
    end = 0.0  # without attempts, the period is empty, and no GPU is slow
    if train_attempts:
        end = train_attempts[-1].end_time
        begin = max(end - _SLOW_GPU_PERIOD_S, train_attempts[-1].start_time)
    if slow_gpus := list_slow_gpus(run.path, begin, end, max_samples=None):
        gpus = "; ".join(slow_gpus[:_MAX_HOSTS_SHOWN])
        yield f"GPUs behind others of their kind in the last 10 minutes of training: {gpus}"
    yield from filter(
        None, (lines.describe_malformed_lines(run.events_file, is_event), data.steps.malformed_description)
    )


# ------------------------------------------------------------------------------------------------------------ figures


def pick_time_unit(duration_s: float) -> tuple[str, float]:
    """Return the unit in which to show a duration, and how many seconds this unit has.

    The result is the largest unit of which the duration has more than three; seconds if there is no such unit.
    """
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next(((name, size) for name, size in units if duration_s > 3 * size), ("seconds", 1.0))


def draw_timeline(attempts: Sequence[AttemptTimes]) -> str:
    """Draw a timeline with one lane for each stage; for an array or a sweep, one lane for each task or point.

    An attempt is divided into its categories, in the order of the ledger. The width of a category is its total
    duration. The position of a category within the attempt does not show when this time was spent.
    """
    begin = min((a.start_time for a in attempts), default=0.0)
    end = max((a.end_time for a in attempts), default=0.0)
    unit, size = pick_time_unit(end - begin)
    x = Scale.from_values([0.0, max(end - begin, 1.0) / size], f"{unit} since the start of the run", whole=True)
    bars_by_task: dict[str, dict[int | None, list[Bar]]] = {}
    for a in attempts:
        bars = bars_by_task.setdefault(a.stage, {}).setdefault(a.task, [])
        position = (a.start_time - begin) / size
        cause = "" if a.cause in ("done", "running") else a.cause
        longest_category = max(a.seconds, key=lambda category: a.seconds[category])
        for category, duration_s in a.seconds.items():
            title = f"{a.stage} {a.number}, ended: {a.cause}; {category} {format_duration(duration_s)}"
            label = cause if category == longest_category else ""  # the widest bar has the most space for the text
            bar_end = position + duration_s / size
            bars.append(Bar(position, bar_end, PART_COLOURS[category], title, label))
            position = bar_end
        if cause:  # mark the end of an attempt that was stopped; the mark has 1/200 of the width of the figure
            bars.append(Bar(position - x.high / 200, position, _STOP_COLOUR, f"{a.stage} {a.number} ended: {cause}"))
    lanes = [
        ("" if number else stage, bars)  # only the first lane of a stage has a label
        for stage, tasks in bars_by_task.items()
        for number, bars in enumerate(tasks.values())
    ]
    keys = [
        (name, colour) for name, colour in PART_COLOURS.items() if any(a.seconds.get(name, 0) > 0 for a in attempts)
    ]
    keys.append(("stopped", _STOP_COLOUR))
    return draw_lanes(f"Hours by part: {format_duration(end - begin)} in all", x, lanes, keys)


def _draw_hosts(ratios_by_host: Mapping[str, float]) -> str:
    """Draw the local compute time per step of each host, as a multiple of the median, slowest host first."""
    axis_title = "local compute time per step, multiple of the median"
    x = Scale.from_values([0.0, *ratios_by_host.values()], axis_title).extend_to_round_numbers()
    slowest_first = sorted(ratios_by_host.items(), key=lambda item: -item[1])
    lanes = []
    for host, ratio in slowest_first:
        colour = _SLOW_COLOUR if ratio > _SLOW_HOST_RATIO else _BAR_COLOUR
        lanes.append((host, [Bar(0, ratio, colour, f"{host}: {ratio:.3f}", f"{ratio:.2f}")]))
    return draw_lanes("Hosts by local compute time", x, lanes)


def _draw_tasks(result: Mapping[str, float]) -> str:
    """Draw the accuracy of each evaluation task, with its standard error. `result` is the result of an evaluation."""
    lanes = []
    for name, value in result.items():
        if ".accuracy" in name and not name.endswith("_stderr"):
            error = result.get(f"{name}_stderr", 0.0)
            accuracy = Bar(0, value, _BAR_COLOUR, f"{name}: {value:.4f} ± {error:.4f}", f"{value:.3f}")
            interval = Bar(max(0, value - error), min(1, value + error), _ERROR_COLOUR, f"± {error:.4f}")
            lanes.append((name, [accuracy, interval]))
    return draw_lanes("Tasks", Scale(0, 1, "accuracy ± standard error"), lanes)


def draw_mesh(layout: Layout) -> str:
    """Draw a lane for each node with a box for each of its ranks, coloured by pipeline-parallel stage."""
    per_node = min(layout.ranks_per_node, layout.world_size)
    lanes: dict[str, list[Bar]] = {}
    for rank in range(layout.world_size):
        coordinates = layout.coordinates(rank)
        node, position = divmod(rank, per_node)
        places = coordinates.name_positions(layout)
        title = f"rank {rank}: {', '.join(f'{name} {position}' for name, position in places.items())}"
        label = " ".join(f"{name[0]}{position}" for name, position in places.items())
        # The width of a box is less than 1, so that there is a gap between two boxes. GREY is the number of colours
        # before the grey one, so the colours repeat without it.
        box = Bar(position - 0.48, position + 0.48, coordinates.pp % GREY, title, label)
        lanes.setdefault(f"node {node}", []).append(box)
    keys = [(f"pipeline {rank}", rank % GREY) for rank in range(layout.pp)]
    x = Scale(-0.5, per_node - 0.5, "rank on its node", whole=True)
    min_width_rem = 8 + 6 * per_node  # 6 rem for the label of each box, and 8 rem for the name of the node
    return draw_lanes(f"Layout: {layout.describe_sizes()}", x, [*lanes.items()], keys, min_width_rem=min_width_rem)


def draw_sweep_points(points: Sequence[Mapping[str, Any]], result_name: str, results: Sequence[float]) -> str:
    """Draw the sweep points as parallel coordinates.

    There is a vertical axis for each swept key and for the result, and a line for each point. The lines of the best
    points are coloured. The figure is "" if fewer than two points have a result.

    Args:
        points: the values of each point by key.
        result_name: the name of the result, such as `loss`.
        results: the result of each point, infinite if unknown; lower is better.
    """
    evaluated = sorted((result, number) for number, result in enumerate(results) if result < inf)  # the best first
    if len(evaluated) < 2:
        return ""
    columns = {key: [points[number][key] for _, number in evaluated] for key in points[0]}
    columns[result_name] = [result for result, _ in evaluated]
    drawing = ""
    paths = list[list[tuple[float, float]]]([] for _ in evaluated)
    last_position = len(columns) - 1
    for position, (key, values) in enumerate(columns.items()):
        distinct_values = sorted(set(values), key=lambda value: (value if is_number(value) else inf, str(value)))
        are_numbers = all(map(is_number, distinct_values))
        if key != result_name and (len(distinct_values) <= _MAX_EVEN_VALUES or not are_numbers):
            ticks = [
                (number / max(1, len(distinct_values) - 1), format_number(value) if is_number(value) else str(value))
                for number, value in enumerate(distinct_values)
            ]
            heights = [ticks[distinct_values.index(value)][0] for value in values]
        else:
            # many numeric values of a key, such as learning rates, are usually swept on a logarithmic scale
            scale = Scale.from_values(values, key, log=key != result_name)
            ticks = [(scale.position(value), text) for value, text in scale.ticks()]
            heights = [scale.position(value) for value in values]
        for path, height in zip(paths, heights, strict=True):
            path.append((position / last_position, height))
        x = f"{100 * position / last_position:.2f}%"
        # the labels of the last axis are to its left, and end at the axis; all others are to the right of their axis
        side = "end" if position == last_position else "start"
        drawing += plot.draw_grid_line(position / last_position, is_vertical=True)
        anchor = side if position in (0, last_position) else "middle"
        # the names of adjacent axes are at different heights, so that they do not overlap
        drawing += plot.draw_label(x, f"{-10 - 15 * (position % 2)}", key, anchor, "title")
        for height, text in ticks:
            dx = -6 if position == last_position else 6
            y = f"{100 - 100 * height:.2f}%"
            drawing += plot.draw_label(x, y, text[:MAX_LABEL_CHARACTERS], side, dy=".35em", dx=dx)
    count_in_best_quarter = max(1, len(evaluated) / 4)
    curves = []
    for order, ((result, number), path) in enumerate(zip(evaluated, paths, strict=True)):  # the best point first
        colour = _BAR_COLOUR if order < count_in_best_quarter else GREY
        curves.append(Curve(f"point {number:03}: {result:.4f}", path, _BEST_COLOUR if order == 0 else colour))
    unit_scale = Scale(0, 1, "")
    keys = [("best", _BEST_COLOUR), ("best quarter", _BAR_COLOUR), ("others", GREY)]
    # the best curve is drawn last, on top of the others
    lines_svg = "".join(plot.draw_curve(unit_scale, unit_scale, curve) for curve in reversed(curves))
    content = plot.stretch(lines_svg) + drawing
    # the padding is the space for the names above the axes
    return format_figure("Values and results", content, keys, f"{FIGURE_STYLE};padding-top:44px")


def draw_training(run: Run, steps: LineHistory) -> list[str]:
    """Draw the figures over steps: losses, metrics, gradient norm, learning rate, throughput, step times and memory.

    Vertical lines mark steps at which an attempt resumed from a checkpoint.
    """
    marks = [event.step for event in run.read_events(run.config.metrics_stage, Restored)]
    unit, loss_unit = ("tokens", "nats per token") if "samples_per_s" not in steps.names else ("samples", "loss")

    def draw_over_steps(heading: str, y: str, names: Mapping[str, str], *, log: str = "") -> str:
        """Draw curves over steps. `names` contains the label of each curve, by key of metrics.jsonl."""
        curves = {name: steps.curve(key) for key, name in names.items()}
        return draw_curves(heading, _STEP_AXIS, y, curves, log=log, marks=marks)

    extra_metrics = [name for name in steps.names if name.startswith(HELD_OUT_PREFIX) and name not in _HELD_OUT_LOSSES]
    middle_steps, parts = _mean_step_parts(steps)
    profiled_steps, profiled_shares = _profiled_shares(steps)
    return [
        draw_over_steps("Loss", loss_unit, {"loss": "training", **_HELD_OUT_LOSSES}),
        draw_curves("Loss in the second half", _STEP_AXIS, f"{loss_unit}, mean", _late_losses(steps), marks=marks),
        *(draw_over_steps(name.replace("_", " "), "on held-out data", {name: name}) for name in extra_metrics),
        draw_over_steps(
            "Gradient norm", "of the whole model, before clipping", {"grad_norm": "gradient norm"}, log="y"
        ),
        draw_over_steps("Learning rate", "learning rate", {"lr": "learning rate"}),
        draw_over_steps("Throughput", f"{unit} per second", {f"{unit}_per_s": unit}),
        draw_layers("Parts of a step", _STEP_AXIS, "seconds per step, mean", middle_steps, parts, PART_COLOURS),
        draw_layers(
            "Parts of profiled steps", _STEP_AXIS, "% of the step", profiled_steps, profiled_shares, PART_COLOURS
        ),
        draw_over_steps("Memory", "GB, peak of rank 0", {"memory_gb": "allocated", "memory_reserved_gb": "reserved"}),
        *(draw_over_steps(group, "", labels) for group, labels in list_other_metrics(steps.names).items()),
    ]


def list_other_metrics(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the metrics of callbacks and commands, for which the other figures have no place.

    Args:
        names: all keys of metrics.jsonl.

    Returns:
        For each figure, the label of each curve by key. The keys of a figure have the same text before their first dot.
    """
    figures: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        group, _, label = name.partition(".")
        is_shown = name in _SHOWN_METRICS or name.startswith((HELD_OUT_PREFIX, "profile.")) or name.endswith("_s")
        if not is_shown:
            figures[group][name] = label or name
    return figures


def _format_images(run: Run) -> tuple[list[str], list[str]]:
    """Return the figures of the run's images, and a note about images that are left out.

    Of each name, the newest image and some older ones are shown, those of the latest steps first.
    """
    by_name: dict[str, list[Image]] = defaultdict(list)
    for image in read_images(run.path):
        by_name[image.name].append(image)
    figures = []
    left_out = 0
    size = 0
    for images in by_name.values():
        count = min(len(images), _MAX_IMAGES_PER_NAME)
        # evenly spaced, with the newest one and, if there is more than one, the oldest one
        chosen = [images[-1 - number * (len(images) - 1) // max(1, count - 1)] for number in range(count)]
        left_out += len(images) - len(chosen)
        for image in chosen:
            if size + len(image.content) > _MAX_IMAGES_SIZE:
                left_out += 1
                continue
            size += len(image.content)
            note = f"step {image.step}"
            figures.append(format_image(image.name, note, image.media_type, image.content, is_small=image.is_small))
    notes = [f"{left_out} more images are in {run.path / 'images'}"] if left_out else []
    return figures, notes


def _mean_step_parts(steps: LineHistory) -> tuple[list[float], dict[str, list[float]]]:
    """Divide the steps into slices, and return the means of each slice.

    Returns:
        The mean step number of each slice, and for each part of a step, its mean duration in each slice in seconds.
    """
    size = max(1, ceil(len(steps.rows) / _SLICES))
    slices = [steps.rows[start : start + size] for start in range(0, len(steps.rows), size)]
    middle_steps = [fmean(row["step"] for row in rows) for rows in slices]
    parts = defaultdict[str, list[float]](list)
    for rows in slices:
        step_times = [split_step_time(row) for row in rows]
        for part in step_times[0]:
            parts[part].append(fmean(times[part] for times in step_times))
    return middle_steps, parts


def _profiled_shares(steps: LineHistory) -> tuple[list[float], dict[str, list[float]]]:
    """Return the numbers of the profiled steps, and for each part, its share of each of these steps in per cent."""
    parts = {name: dict(steps.curve(f"profile.{name}")) for name in step_trace.STEP_PARTS}
    profiled_steps = sorted({step for curve in parts.values() for step in curve})
    # 1.0 instead of 0 avoids a division by zero
    totals = {step: sum(curve.get(step, 0.0) for curve in parts.values()) or 1.0 for step in profiled_steps}
    shares = {
        name: [100 * curve.get(step, 0.0) / totals[step] for step in profiled_steps] for name, curve in parts.items()
    }
    return profiled_steps, shares


def _late_losses(steps: LineHistory) -> dict[str, Points]:
    """Return the curves of the losses in the second half of the steps; {} if there are too few steps.

    In a curve over all steps, the high losses of the first steps would hide the details of the second half. The
    training loss is averaged, so that spikes do not hide the details either.
    """
    all_losses = steps.curve("loss")
    if not all_losses:
        return {}
    last_step = all_losses[-1][0]
    losses = [point for point in all_losses if 2 * point[0] > last_step]
    held_out_losses = {
        name: [point for point in steps.curve(key) if 2 * point[0] > last_step]
        for key, name in _HELD_OUT_LOSSES.items()
    }
    mean_losses = average_buckets(losses)
    return {"training": mean_losses, **held_out_losses} if mean_losses else {}


def _draw_results(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Draw the evaluations of all checkpoints, and the tasks of the newest evaluation; [] without results.

    Args:
        results: the results of all evaluations, oldest first.
    """
    if not results:
        return []
    newest = results[-1]
    main_name = get_main_metric(newest)[0]
    key = "bits_per_byte" if "bits_per_byte" in newest else "loss"
    curves = {
        name: [(result["step"], result[curve_key]) for result in results if curve_key in result]
        for name, curve_key in ((main_name, key), ("moving average of the weights", f"{EMA_PREFIX}{key}"))
    }
    if "bits_per_byte" in newest:  # an evaluation with bits per byte also has those of the unigram model
        curves["unigram model"] = [
            (result["step"], result["unigram_bits_per_byte"]) for result in results if key in result
        ]
    metrics = {
        name: [(result["step"], result[name]) for result in results if name in result]
        for name in get_extra_metrics(newest)
        if name != f"{EMA_PREFIX}loss"
    }
    # the names of metrics of evaluation tasks contain a dot, such as `arc.accuracy`
    task_curves = {name: points for name, points in metrics.items() if "." in name}
    return [
        draw_curves("Evaluation of checkpoints", _STEP_AXIS, main_name, curves),
        *(draw_curves(name, _STEP_AXIS, name, {name: points}) for name, points in metrics.items() if "." not in name),
        draw_curves("Tasks over the checkpoints", _STEP_AXIS, "accuracy", task_curves),
        _draw_tasks(newest),
    ]


def _draw_sweep(
    run: Run, point_statuses: Sequence[StageStatus], curves: Mapping[str, Mapping[str, Points]]
) -> list[str]:
    """Draw the values and results of the sweep points, and the losses of each point; [] if the run is not a sweep.

    Args:
        run: the run.
        point_statuses: one status for each point, in the order of the sweep.
        curves: the curves in `ReportData`.
    """
    if run.config.sweep is None:
        return []
    newest_results = [read_newest_result(status.run) for status in point_statuses]
    main_metrics = [get_main_metric(result)[1] if result else inf for result in newest_results]
    metric_name = next((get_main_metric(result)[0] for result in newest_results if result), "")
    if (search := run.config.sweep.search) is not None:
        # All trials have reached the first rung, so their values there can be compared.
        study = read_study(run.path)
        point_statuses = point_statuses[: len(study.trials)]
        first_results = [study.trials[number].results.get(0) for number in range(len(point_statuses))]
        main_metrics = [result.value if result and result.value is not None else inf for result in first_results]
        metric_name = f"{search.metric} at step {study.rungs[0]}" if study.rungs else search.metric
    ranking = sorted(zip(main_metrics, point_statuses, strict=True), key=lambda pair: pair[0])
    names = [status.run.path.name for _, status in ranking]  # the best point first
    ordered_curves = {key: {name: points[name] for name in names if name in points} for key, points in curves.items()}
    losses = ordered_curves.get("loss", {})
    held_out_losses = ordered_curves.get("held_out_loss", {})
    return [
        draw_sweep_points(list_point_values(run)[: len(main_metrics)], metric_name, main_metrics),
        draw_curves("Loss of the points", _STEP_AXIS, "loss in training", losses),
        draw_curves("Held-out loss of the points", _STEP_AXIS, "loss on held-out data", held_out_losses),
    ]


def _draw_machines(run: Run, attempts: Sequence[AttemptTimes]) -> list[str]:
    """Draw the hosts by local compute time, the layout of the config, and the telemetry of each host."""
    figures = [_draw_hosts(read_compute_times(run.jobs_dir))]
    with suppress(UserError, OSError):  # the layout cannot be resolved if, for example, the tokenizer was removed
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
            host = file.stem.removeprefix("telemetry-")
            # if there are too few points for averages, all points are drawn
            curves[sensor][host] = average_buckets(sensor_points, _TELEMETRY_BUCKETS) or sensor_points
    for sensor, (title, y, *_) in SENSORS.items():
        suffix = ", mean of the host's GPUs" if sensor.startswith("gpus.") else ""
        x = f"{unit} since the start of the run"
        figures.append(draw_curves(title[0].upper() + title[1:], x, y + suffix, curves[sensor]))
    return figures


# ------------------------------------------------------------------------------------------------------------- report


def print_report(run: Run, console: Console, describe_goodput: DescribeGoodput | None = None) -> None:
    """Print the ledger, the training and the evaluation, and write the same with figures to `report.html`.

    If the user may not write to the run directory, only print.

    Args:
        run: the run.
        console: where to print.
        describe_goodput: returns a line that compares the measured goodput with the expected goodput, or None. If this
            argument is None, there is no such line.
    """
    poller = StatusPoller(run)
    statuses = poller.poll()
    data = read_report_data(run, statuses)
    train_attempts = [a for a in data.attempts if a.stage == run.config.metrics_stage]
    attempts_table = _attempts_table(run, data.attempts)
    causes_table = _causes_table(train_attempts) if len(train_attempts) > 1 else []
    points_table = tabulate_points(run, poller.point_statuses)
    results, damaged = read_all_results(run)
    notes = [
        *filter(None, [describe_origin(run), run.describe_changes()]),
        *describe_failures(poller.point_statuses),
        *describe_study(run),
        *_describe_training(run, data, train_attempts, describe_goodput),
        *filter(None, [_describe_idle_spares(data.attempts)]),
        *(f"evaluation/{name} is left out: it is incomplete or was changed" for name in damaged),
    ]
    images, image_notes = _format_images(run)
    notes += image_notes
    tables = [build_table(rows, console.width) for rows in (attempts_table, causes_table, points_table) if rows]
    for content in (run.title, *tables, *notes):
        console.print(content, soft_wrap=True)
    sections = {
        "Sweep": [*_draw_sweep(run, poller.point_statuses, data.curves), format_table(points_table)],
        "Training": draw_training(run, data.steps),
        "Images": images,
        "Hours": [draw_timeline(data.attempts), format_table(attempts_table), format_table(causes_table)],
        "Quality": [*_draw_results(results), format_table(_evaluations_table(results))],
        "Machines": _draw_machines(run, data.attempts),
    }
    summary = _summarize(run, statuses, data.attempts, data.steps, points_table[:2])
    config = dump_yaml(mask_secrets(run.config.model_dump(mode="json", exclude_defaults=True)))
    file = run.path / "report.html"
    with suppress(PermissionError):  # the run belongs to another user
        write_atomic(file, format_page(run.config.run.name, run.title, summary, sections, notes, config))
        console.print(f"with figures: {file}", soft_wrap=True)
