"""`report`: what a run came to. The ledger of its hours, attempt by attempt, its loss and its evaluation.

Shown in the terminal, and written to `report.html` in the run directory. Read from that directory alone, so that it
works without Slurm; where there is accounting, `sacct` says when each job really began and ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from math import nan
from typing import Any

from rich.console import Console, Group, RenderableType

from pipeline.base.files import write_atomic
from pipeline.config.stages import STAGES
from pipeline.evaluate.result import all_results, newest_result, result_words
from pipeline.run import lines, stages
from pipeline.run import points as sweep
from pipeline.run.directory import Run
from pipeline.run.metrics import own_times
from slurm.query.jobs import uses_slurm
from slurm.query.states import Claim, call, claims, cluster_name
from slurm.show import html
from slurm.show.follow import clock
from slurm.show.ledger import PARTS, Attempt, JobRun, ledger, ratios, total
from slurm.show.status import Lookout, Row, failures, grid, point_table

Rows = list[list[str]]
_NAMES = {"startup": "start-up", "communication": "comm", "evaluation": "held-out", "checkpoint": "save"}


def outcome(run: Run) -> RenderableType:
    """What the newest evaluation says; of a sweep, all points, and what is wrong with them."""
    if run.config.sweep is not None:
        lookout = Lookout(run)
        lookout.look()
        return Group(*failures(lookout.points), grid(point_table(run, lookout.points)))
    if result := newest_result(run):
        return result_words(result)
    return "not evaluated yet" if run.config.data.held_out else stages.load("evaluate").progress(run).words


def job_runs(jobs: Iterable[Claim]) -> list[JobRun]:
    """When each run of these jobs began and ended, a requeued job having several; nothing without accounting."""
    here = cluster_name()
    known = {(one.job_id.split("_")[0], one.name) for one in jobs if one.cluster in (None, here)}
    ids, columns = ",".join(sorted({job for job, _ in known})) if here else "", "JobID,Start,End,JobName"
    listed = call("sacct", "-n", "-P", "-X", "-D", "-j", ids, "-o", columns) if ids else None
    found = []
    for line in (listed or "").splitlines():
        job, start, end, name = line.split("|", 3)
        if known.isdisjoint((job.split("_")[0], which) for which in (name, "")):
            continue  # another one that had this id
        with suppress(ValueError):  # Unknown: not begun
            begun = datetime.fromisoformat(start).timestamp()  # local time, as sacct writes it
            found.append(JobRun(job, begun, None if end == "Unknown" else datetime.fromisoformat(end).timestamp()))
    return found


def attempts_of(run: Run, rows: Iterable[Row]) -> list[Attempt]:
    """The ledger of a run whose stages stand so; those of a sweep's points follow, the point's number for a task."""
    points = sweep.points(run)
    submitted = [one for each in (run, *points) for _, one in claims(each)] if uses_slurm(run) else []
    jobs, now, events = job_runs(submitted), time.time(), run.read_events()
    going = [row.stage for row in rows if row.state in ("running", "completing")]
    found = ledger(events, list(lines.read(run.metrics, lines.metric)), stages.own_stages(run), now, going, jobs)
    shared = [e for e in events if e["event"] == "done"]  # what the points waited for
    swept = stages.point_stages()
    for number, point in enumerate(points):
        going = [stage for stage in swept if point.holder(stage)]
        metrics = list(lines.read(point.metrics, lines.metric))
        for attempt in ledger([*shared, *point.read_events()], metrics, swept, now, going, jobs):
            attempt.task = number
            found.append(attempt)
    return found


def _accounts(attempts: Sequence[Attempt]) -> Rows:
    """The ledger as a table, header first: attempts one by one, tasks of an array or points together, sums by stage."""
    parts = [part for part in PARTS if any(a.parts[part] >= 0.5 for a in attempts)] or ["compute"]
    lines: list[tuple[str, str, str, str, Sequence[Attempt]]] = []
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
        sums = total(members)
        spent = [clock(sums[part]) if sums[part] >= 0.5 else "·" for part in parts]
        rows.append([*map(str, words), *spent, clock(sum(sums.values()))])
    return rows


def _causes(attempts: Sequence[Attempt]) -> Rows:
    """How attempts ended, and what that cost, as a table."""
    rows = [["cause", "attempts", "lost", "ending", "in all"]]
    for cause in sorted({a.cause for a in attempts}):
        own = [a for a in attempts if a.cause == cause]
        sums = total(own)
        rows.append([cause, str(len(own)), clock(sums["lost"]), clock(sums["ending"]), clock(sum(sums.values()))])
    return rows


def _evaluations(results: Sequence[Mapping[str, Any]]) -> Rows:
    """All evaluations, as a table; empty where there are none."""
    if not results:
        return []
    keys = [key for key, value in results[0].items() if isinstance(value, float)]
    return [["step", *keys], *([str(one["step"]), *(f"{one.get(key, nan):.4f}" for key in keys)] for one in results)]


def _lines(run: Run, training: Sequence[Attempt]) -> Iterator[RenderableType]:
    """What is to be said of the training and the evaluation."""
    if run.config.sweep is None:
        redone = sum(len(e.get("steps", ())) for e in run.read_events("train", "lost_work"))
        yield f"training: {stages.load('train').progress(run).words}; {redone} steps were lost and done again"
    if training:
        ettr, progress = ratios(total(training))
        yield f"effective training time ratio {ettr:.3f}, forward progress {progress:.3f} (arXiv 2410.21680)"
    if run.config.sweep is None:
        yield outcome(run)
    if ratio_of := own_times(run):
        slowest = sorted(ratio_of.items(), key=lambda item: -item[1])[:8]
        hosts = ", ".join(f"{host} {ratio:.2f}" for host, ratio in slowest)
        yield f"hosts by their own time in a step, 1 being the median, slowest first: {hosts}"
    yield from filter(None, (lines.odd(run.events, lines.event), lines.odd(run.metrics, lines.metric)))


def print_report(run: Run, console: Console) -> None:
    """The ledger, training and evaluation in the terminal, and the same with pictures in `report.html`."""
    lookout = Lookout(run)
    attempts = attempts_of(run, lookout.look())
    training = [a for a in attempts if a.stage == "train"]
    tables = [_accounts(attempts), _causes(training) if len(training) > 1 else [], point_table(run, lookout.points)]
    results, odd = all_results(run)
    told = [*failures(lookout.points), *_lines(run, training)]
    told += [f"evaluation/{name} is left out: torn, or altered" for name in odd]
    for part in (run.title, *(grid(cells, console.width) for cells in tables if cells), *told):  # the page has all
        console.print(part, soft_wrap=True)
    curves = {
        f"{one.path.name}{of}": [
            (m["step"], m[key]) for m in lines.read(one.metrics, lines.metric) if m.get(key) is not None
        ]
        for one in sweep.points(run) or [run]
        for key, of in (("loss", ""), ("held_out_loss", ", held out"))
    }
    pictures = html.timeline(attempts) + html.loss_curves(curves)
    page = run.path / "report.html"
    everything = [run.title, *map(grid, filter(None, tables)), *told]
    everything += map(grid, filter(None, [_evaluations(results)]))
    with suppress(PermissionError):  # somebody else's run
        write_atomic(page, html.page(run.title, everything, pictures))
        console.print(f"with pictures: {page}", soft_wrap=True)
