"""`report`: what a run came to. The ledger of its hours, attempt by attempt, its loss and its evaluation.

Shown in the terminal, and written to `report.html` in the run directory. Read from that directory alone, so that it
works without Slurm; where there is accounting, `sacct` says when each job really began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from statistics import fmean
from typing import Any

from rich.console import Console, Group, RenderableType

from cli import profile
from pipeline.base.files import write_atomic
from pipeline.base.plot import BUCKETS, Points, thin
from pipeline.base.text import format_duration
from pipeline.base.yaml12 import dump
from pipeline.config.masking import masked
from pipeline.config.stages import STAGES
from pipeline.evaluate.result import format_result, read_all_results, read_newest_result
from pipeline.run import lines, stages
from pipeline.run import points as sweep
from pipeline.run.directory import Run
from pipeline.run.history import History
from pipeline.run.ledger import (
    CATEGORIES,
    STEP_TIME_KEYS,
    AttemptTimes,
    JobRun,
    build_ledger,
    compute_ratios,
    sum_categories,
)
from pipeline.run.machines import gpus_behind
from pipeline.run.metrics import own_times
from pipeline.train import step_trace
from planning.expected_goodput import expected_words
from slurm.query.job_states import Claim, accounted, array_of, claims, cluster_name, seconds
from slurm.query.run_jobs import uses_slurm
from slurm.query.status import StageStatus, StatusPoller, build_table, describe_failures, tabulate_points
from tracking import report_sections
from tracking.figures import timeline
from tracking.html_page import page, table

Rows = list[list[str]]
_NAMES = {"startup": "start-up", "communication": "comm", "evaluation": "held-out", "checkpoint": "save"}


def outcome(run: Run) -> RenderableType:
    """What the newest evaluation says; of a sweep, all points, and what is wrong with them."""
    if run.config.sweep is not None:
        poller = StatusPoller(run)
        poller.poll()
        return Group(
            *describe_failures(poller.point_statuses), build_table(tabulate_points(run, poller.point_statuses))
        )
    return judgement(run)


def judgement(run: Run) -> str:
    """What the newest evaluation says, in words."""
    if result := read_newest_result(run):
        return format_result(result)
    return "not evaluated yet" if run.config.data.held_out else stages.load("evaluate").progress(run).words


def job_runs(jobs: Iterable[Claim]) -> list[JobRun]:
    """When each run of these jobs began and ended, a requeued job having several; nothing without accounting."""
    here = cluster_name()
    known = {(array_of(one.job_id), one.name) for one in jobs if one.cluster in (None, here)}
    ids, columns = ",".join(sorted({job for job, _ in known})) if here else "", "JobID,Start,End,JobName"
    found = []
    for line in (accounted(ids, columns) if ids else "").splitlines():
        job, start, end, name = line.split("|", 3)
        if known.isdisjoint((array_of(job), which) for which in (name, "")):
            continue  # another one that had this id
        if begun := seconds(start):  # else Unknown: not begun
            found.append(JobRun(job, begun, seconds(end) or None))
    return found


@dataclass
class Gathered:
    """What the files of a run, and of a sweep's points, say; those of a point are forgotten but for its curves."""

    attempts: list[AttemptTimes]
    steps: History
    """The run's own."""
    curves: dict[str, dict[str, Points]]
    """Of a sweep: loss and held_out_loss over steps, by the names of the points."""


def gather(run: Run, rows: Iterable[StageStatus]) -> Gathered:
    """Read a run whose stages stand so. Its attempts, and those of a sweep's points, the point's number for a task."""
    points = sweep.points(run)
    submitted = [one for each in (run, *points) for _, one in claims(each)] if uses_slurm(run) else []
    jobs, now, events = job_runs(submitted), time.time(), run.read_events()
    going = [row.stage for row in rows if row.state in ("running", "completing")]
    steps = History(run.metrics, lines.metric, keep=STEP_TIME_KEYS).look()
    found = Gathered(build_ledger(events, steps.rows, stages.own_stages(run), now, going, jobs), steps, {})
    shared = [e for e in events if e["event"] == "done"]  # what the points waited for
    swept = stages.point_stages()
    for number, point in enumerate(points):
        going = [stage for stage in swept if point.holder(stage)]
        history = History(point.metrics, lines.metric, keep=STEP_TIME_KEYS).look()
        for attempt in build_ledger([*shared, *point.read_events()], history.rows, swept, now, going, jobs):
            attempt.task = number
            found.attempts.append(attempt)
        for name in ("loss", "held_out_loss"):
            found.curves.setdefault(name, {})[point.path.name] = thin(history.curve(name), BUCKETS)
    return found


def _accounts(attempts: Sequence[AttemptTimes]) -> Rows:
    """The ledger as a table, header first: attempts one by one, tasks of an array or points together, sums by stage."""
    parts = [part for part in CATEGORIES if any(a.seconds[part] >= 0.5 for a in attempts)] or ["compute"]
    lines: list[tuple[str, str, str, str, Sequence[AttemptTimes]]] = []
    for stage in dict.fromkeys(a.stage for a in attempts):
        own = [a for a in attempts if a.stage == stage]
        array, single = [a for a in own if a.task is not None], [a for a in own if a.task is None]
        if array:
            ranks = {a.task: a.ranks for a in array}  # of the last attempt
            name = f"{len(ranks)} points" if STAGES[stage].per_point else f"array of {len(ranks)}"
            lines.append((stage, name, str(sum(ranks.values())), ", ".join(sorted({a.cause for a in array})), array))
        lines += [(stage, str(a.number), str(a.ranks), a.cause, [a]) for a in single]
        if len(single) > 1:
            lines.append((stage, "all", "", "", single))
    rows = [["stage", "attempt", "ranks", "end", *(_NAMES.get(part, part) for part in parts), "in all"]]
    for *words, members in lines:
        sums = sum_categories(members)
        spent = [format_duration(sums[part]) if sums[part] >= 0.5 else "·" for part in parts]
        rows.append([*map(str, words), *spent, format_duration(sum(sums.values()))])
    return rows


def _causes(attempts: Sequence[AttemptTimes]) -> Rows:
    """How attempts ended, and what that cost, as a table."""
    rows = [["cause", "attempts", "lost", "ending", "in all"]]
    for cause in sorted({a.cause for a in attempts}):
        own = [a for a in attempts if a.cause == cause]
        sums = sum_categories(own)
        rows.append(
            [
                cause,
                str(len(own)),
                format_duration(sums["lost"]),
                format_duration(sums["ending"]),
                format_duration(sum(sums.values())),
            ]
        )
    return rows


def _evaluations(results: Sequence[Mapping[str, Any]]) -> Rows:
    """All evaluations, as a table; empty where there are none."""
    if not results:
        return []
    keys = [key for key, value in results[0].items() if isinstance(value, float)]
    names = [key.replace("_", " ") for key in keys]
    return [["step", *names], *([str(one["step"]), *(f"{one.get(key, nan):.4f}" for key in keys)] for one in results)]


def _told(run: Run, found: Gathered, training: Sequence[AttemptTimes]) -> Iterator[str]:
    """What is to be said of the training and the evaluation."""
    if run.config.sweep is None:
        redone = sum(len(e.get("steps", ())) for e in run.read_events("train", "lost_work"))
        yield f"training: {stages.load('train').progress(run).words}; {redone} steps were lost and done again"
    if training:
        ettr, progress = compute_ratios(sum_categories(training))
        yield f"effective training time ratio {ettr:.3f}, forward progress {progress:.3f} (arXiv 2410.21680)"
        if run.config.sweep is None:
            yield from filter(None, [expected_words(run.config, run.read_events("train"), found.steps.rows, training)])
    if run.config.sweep is None:
        yield judgement(run)
    if profiled := found.steps.values("profile.compute"):
        parts = {name: fmean(found.steps.values(f"profile.{name}")) for name in step_trace.STEP_PARTS}
        yield f"{len(profiled)} profiled steps: {profile.words(parts)}"
    if ratio_of := own_times(run):
        slowest = sorted(ratio_of.items(), key=lambda item: -item[1])[:8]
        hosts = ", ".join(f"{host} {ratio:.2f}" for host, ratio in slowest)
        yield f"hosts by their own time in a step, 1 being the median, slowest first: {hosts}"
    span = (
        (max(training[-1].end_time - 600, training[-1].start_time), training[-1].end_time) if training else (0.0, 0.0)
    )
    if gpus := gpus_behind(run.path, *span, looks=None):
        yield f"GPUs behind the others of their kind in the last 10 minutes of training: {'; '.join(gpus[:8])}"
    yield from filter(None, (lines.odd(run.events, lines.event), found.steps.odd_words))


def print_report(run: Run, console: Console) -> None:
    """The ledger, training and evaluation in the terminal, and the same with pictures in `report.html`."""
    poller = StatusPoller(run)
    rows = poller.poll()
    found = gather(run, rows)
    training = [a for a in found.attempts if a.stage == "train"]
    accounts, causes = _accounts(found.attempts), _causes(training) if len(training) > 1 else []
    points = tabulate_points(run, poller.point_statuses)
    results, odd = read_all_results(run)
    told = [
        *filter(None, [run.describe_changes()]),
        *describe_failures(poller.point_statuses),
        *_told(run, found, training),
    ]
    told += [f"evaluation/{name} is left out: torn, or altered" for name in odd]
    for part in (
        run.title,
        *(build_table(cells, console.width) for cells in (accounts, causes, points) if cells),
        *told,
    ):
        console.print(part, soft_wrap=True)
    summary = report_sections.summary(run, rows, found.attempts, found.steps, points[:2])
    shown = {
        "The sweep": [*report_sections.of_sweep(run, poller.point_statuses, found.curves), table(points)],
        "The training": report_sections.of_training(run, found.steps),
        "The hours": [timeline(found.attempts), table(accounts), table(causes)],
        "How good it is": [*report_sections.of_results(results), table(_evaluations(results))],
        "The machines": report_sections.of_machines(run, found.attempts),
    }
    config = dump(masked(run.config.model_dump(mode="json", exclude_defaults=True)))
    file = run.path / "report.html"
    with suppress(PermissionError):  # somebody else's run
        write_atomic(file, page(run.config.run.name, run.title, summary, shown, told, config))
        console.print(f"with pictures: {file}", soft_wrap=True)
