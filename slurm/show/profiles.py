"""`profile RUN`: ask the ranks of a training for profiled steps, and put the traces of all ranks into one.

The ranks leave `profiles/step-N/rank-R.json.gz` and `parts.json` (pipeline/train/profiler.py). Here, outside of them,
they become `profiles/step-N/trace.json.gz`, which https://ui.perfetto.dev opens: a process for each rank, times by the
clock of rank 0 (Chrome's "Trace Event Format").
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from pipeline.base.errors import UserError
from pipeline.base.files import read_json, replacing, write_json
from pipeline.run.directory import Run
from slurm.query.jobs import running

ASK_S = 5.0
"""How often it is looked whether the training still runs."""


def rank_numbers(text: str) -> list[int] | None:
    """The ranks of a list such as 0,4-7; None, meaning all, for "". Raises UserError for other text."""
    if text and not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", text):
        raise UserError(f"--ranks {text}: write ranks as 0,4-7")
    ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
    return sorted({rank for pair in ends for rank in range(pair[0], pair[-1] + 1)}) or None if text else None


def ask(run: Run, ranks: str, steps: int) -> Iterator[str]:
    """Have the next steps profiled, wait for them, merge them; says what came of it, step by step.

    Raises UserError where no training runs, or it ends before they are there.
    """
    wanted, before = rank_numbers(ranks), {folder.name for folder in run.profiles.glob("step-*")}
    if steps:
        _need_training(run)
        write_json(run.profile_file, {"ranks": wanted, "steps": steps})
        looked = time.monotonic()
        while run.profile_file.exists():
            if time.monotonic() > looked + ASK_S:
                _need_training(run)
                looked = time.monotonic()
            time.sleep(0.2)
    found = [folder for folder in sorted(run.profiles.glob("step-*")) if (folder / "parts.json").exists()]
    fresh = [folder for folder in found if folder.name not in before or not steps]
    if not fresh:
        some = f"none of the ranks {ranks} is there" if ranks else f"logs {run.name} train says why"
        raise UserError(f"{run.name}: no step was profiled" + (f": {some}" if steps else " yet"))
    for folder in fresh:
        known, (trace, error_ms) = read_json(folder / "parts.json"), merge(folder)
        yield f"{folder.name}: {words(known)}"
        yield f"  {trace} for https://ui.perfetto.dev, clocks within {error_ms:.2f} ms"


def _need_training(run: Run) -> None:
    if not any(name.startswith("train") for name in running(run)):
        run.profile_file.unlink(missing_ok=True)
        raise UserError(f"{run.name} is not training now; --steps 0 merges what was profiled before")


def words(known: dict[str, dict[str, Any]]) -> str:
    """Where the step of these ranks went, from what each says of its own."""
    figures = [{name: one for name, one in parts.items() if not isinstance(one, dict)} for parts in known.values()]
    means = {name: fmean(one[name] for one in figures) for name in figures[0]}
    whole = sum(means.values()) or 1.0
    shares = ", ".join(f"{name.replace('_', ' ')} {100 * one / whole:.0f} %" for name, one in means.items())
    return f"{1000 * whole:.1f} ms, mean of {len(known)} rank{'s' * (len(known) > 1)}: {shares}"


def merge(folder: Path) -> tuple[Path, float]:
    """One trace of all ranks of a profiled step; its path, and how far their clocks may be apart, in milliseconds.

    Rank after rank, so that one is in memory at a time.
    """
    ranks = sorted(folder.glob("rank-*.json.gz"), key=lambda path: int(path.name.split(".")[0][5:]))
    origin, errors, number, first = 0, [0], 0, True
    with replacing(folder / "trace.json.gz") as new, gzip.open(new, "wt", 1) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for path in ranks:
            told = json.loads(gzip.decompress(path.read_bytes()))
            errors, origin = [*errors, told["clock_error_ns"]], origin or told["begin_ns"]
            for event in _events(told, (told["begin_ns"] - origin) / 1000, number):
                number = max(number, event["tid"])
                file.write(("" if first else ",\n") + json.dumps(event))
                first = False
        file.write("\n]}\n")
    return folder / "trace.json.gz", sum(sorted(errors)[-2:]) / 1e6


def _events(told: dict[str, Any], later_us: float, taken: int) -> Iterator[dict[str, Any]]:
    """A rank's events, `later_us` than its own times; numbers of threads begin behind `taken`.

    Operations of a group may overlap: as many rows as are under way at once, for a row cannot show that.
    """
    place = ", ".join(f"{name} {number}" for name, number in told["place"].items())
    rank, free, rows = told["rank"], dict[str, list[float]](), dict[str, int]()

    def named(kind: str, name: str, tid: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}}

    yield named("process_name", f"rank {rank} on {told['host']}: {place}", taken + 1)
    for kind, name, row, start, end in sorted(told["spans"], key=lambda span: (span[3], -span[4])):
        label = row
        if kind == "communication":
            ends = free.setdefault(row, [])
            lane = next((n for n, until in enumerate(ends) if until <= start), len(ends))
            ends[lane : lane + 1] = [end]
            label = f"communication {row}" + f" ({lane + 1})" * (lane > 0)
        if label not in rows:
            rows[label] = taken + 1 + len(rows)
            yield named("thread_name", label, rows[label])
        times = {"ts": round(start + later_us, 3), "dur": round(end - start, 3)}
        yield {"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": rows[label], **times}
