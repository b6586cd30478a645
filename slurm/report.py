"""`report`: what a run came to. The ledger of its hours, attempt by attempt, its loss and its evaluation.

Shown in the terminal, and written to `report.html` in the run directory. Read from that directory alone, so that it
works without Slurm; where there is accounting, `sacct` says when each job really began and ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime

from rich.console import Console

from pipeline import stages, sweep
from pipeline.checkpoint_files import saved_steps
from pipeline.files import read_jsonl, write_atomic
from pipeline.metrics import own_times_file
from pipeline.run import Run
from pipeline.stages.evaluate import read_result, result_words
from slurm import html
from slurm.cluster import uses_slurm
from slurm.follow import clock
from slurm.ledger import PARTS, Attempt, JobRun, ledger, ratios, total
from slurm.states import Claim, call, claims, cluster_name
from slurm.status import Lookout, grid
from slurm.sweeps import point_table

_NAMES = {"startup": "start-up", "communication": "comm", "checkpoint": "save"}


def outcome(run: Run) -> str:
    """What the newest evaluation says."""
    for step in saved_steps(run.checkpoints):
        result = read_result(run, step)
        if result is not None:
            return result_words(result)
    return "not evaluated yet"


def job_runs(jobs: Iterable[Claim]) -> list[JobRun]:
    """When each run of these jobs began and ended, a requeued job having several; nothing without accounting."""
    here = cluster_name()
    known = {(one.job_id.split("_")[0], one.name) for one in jobs if one.cluster in (None, here)}
    ids, columns = ",".join(sorted({job for job, _ in known})), "JobID,Start,End,JobName"
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


def attempts_of(run: Run) -> list[Attempt]:
    """The ledger of a run as it stands now; those of a sweep's points follow, the point's number for a task."""
    points = sweep.points(run)
    submitted = [one for each in (run, *points) for _, one in claims(each)] if uses_slurm(run) else []
    jobs, now, events = job_runs(submitted), time.time(), run.read_events()
    needs = {stage: stages.load(stage).NEEDS for stage in stages.STAGES}
    own = {stage: needs[stage] for stage in sweep.own_stages(run)}
    going = [row.stage for row in Lookout(run).look() if row.state in ("running", "completing")]
    found = ledger(events, list(read_jsonl(run.metrics)), own, now, going, jobs)
    shared = [e for e in events if e["event"] == "done"]  # what the points waited for
    for number, point in enumerate(points):
        going = [stage for stage in sweep.STAGES if point.holder(stage)]
        swept, lines = {stage: needs[stage] for stage in sweep.STAGES}, list(read_jsonl(point.metrics))
        for attempt in ledger([*shared, *point.read_events()], lines, swept, now, going, jobs):
            attempt.task = number
            found.append(attempt)
    return found


def _accounts(attempts: Sequence[Attempt]) -> list[list[str]]:
    """The ledger as a table, header first: attempts one by one, tasks of an array or points together, sums by stage."""
    parts = [part for part in PARTS if any(a.parts[part] >= 0.5 for a in attempts)] or ["compute"]
    rows = [["stage", "attempt", "ranks", "end", *(_NAMES.get(part, part) for part in parts), "in all"]]

    def add(stage: str, number: str, ranks: str, end: str, members: Sequence[Attempt]) -> None:
        sums = total(members)
        spent = [clock(sums[part]) if sums[part] >= 0.5 else "·" for part in parts]
        rows.append([stage, number, ranks, end, *spent, clock(sum(sums.values()))])

    for stage in dict.fromkeys(a.stage for a in attempts):
        own = [a for a in attempts if a.stage == stage]
        array, single = [a for a in own if a.task is not None], [a for a in own if a.task is None]
        if array:
            ends = ", ".join(sorted({a.cause for a in array}))
            ranks = {a.task: a.ranks for a in array}  # of the last attempt
            name = f"{len(ranks)} points" if stage in sweep.STAGES else f"array of {len(ranks)}"
            add(stage, name, str(sum(ranks.values())), ends, array)
        for a in single:
            add(stage, str(a.number), str(a.ranks), a.cause, [a])
        if len(single) > 1:
            add(stage, "all", "", "", single)
    return rows


def _causes(attempts: Sequence[Attempt]) -> list[list[str]]:
    """How attempts ended, and what that cost, as a table."""
    rows = [["cause", "attempts", "lost", "ending", "in all"]]
    for cause in sorted({a.cause for a in attempts}):
        own = [a for a in attempts if a.cause == cause]
        sums = total(own)
        rows.append([cause, str(len(own)), clock(sums["lost"]), clock(sums["ending"]), clock(sum(sums.values()))])
    return rows


def print_report(run: Run, console: Console) -> None:
    """The ledger, training and evaluation in the terminal, and the same with pictures in `report.html`."""
    attempts = attempts_of(run)
    training = [a for a in attempts if a.stage == "train"]
    title = f"run {run.name}" + (f"  code {run.commit[:12]}" if run.commit else "")
    metrics = list(read_jsonl(run.metrics))
    redone = sum(len(e.get("steps", ())) for e in run.read_events("train", "lost_work"))
    points, steps = point_table(run), stages.load("train").progress(run)
    lines = [] if points else [f"training: {steps}; {redone} steps were lost and done again", outcome(run)]
    if training:
        ettr, progress = ratios(total(training))
        ratio = f"effective training time ratio {ettr:.3f}, forward progress {progress:.3f} (arXiv 2410.21680)"
        lines.insert(1, ratio)
    if (own_times := own_times_file(run)).exists():
        ratios_of = sorted(json.loads(own_times.read_bytes()).items(), key=lambda item: -item[1])
        slowest = ", ".join(f"{host} {ratio:.2f}" for host, ratio in ratios_of[:8])
        lines.append(f"hosts by their own time in a step, 1 being the median, slowest first: {slowest}")
    accounts = _accounts(attempts)
    console.print(title, highlight=False)
    console.print(grid(accounts, left=(0, 1, 3)))
    if len(training) > 1:
        console.print(grid(_causes(training)))
    if points:
        console.print(grid(points))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    known = [m for m in metrics if m["loss"] is not None]
    pictures = html.timeline(attempts) + html.loss_curve([m["step"] for m in known], [m["loss"] for m in known])
    tables = [("The ledger", accounts)]
    if training:
        tables.append(("Attempts of training by cause", _causes(training)))
    if points:
        tables.append(("Points of the sweep, the best first", points))
    if results := _evaluations(run):
        tables.append(("Evaluation", results))
    page = run.path / "report.html"
    try:
        write_atomic(page, html.page(title, lines, tables, pictures))
    except PermissionError:  # somebody else's run
        return
    console.print(f"with pictures: {page}", highlight=False, soft_wrap=True)


def _evaluations(run: Run) -> list[list[str]]:
    found = [json.loads(path.read_bytes()) for path in sorted(run.evaluation.glob("step-*.json"))]
    shown = ("loss", "perplexity", "bits_per_byte") if run.config.model.target is None else found[0] if found else ()
    keys = [key for key in shown if key not in ("step", "samples", "entries", "checkpoint")]
    rows = [[str(result["step"]), *(f"{result[key]:.4f}" for key in keys)] for result in found]
    return [["step", *keys], *rows] if rows else []
