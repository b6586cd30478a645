"""`profile RUN`: ask the ranks of a training for profiled steps, and put the traces of all ranks into one.

The ranks leave `profiles/step-N/rank-R.json.gz` and `parts.json` (pipeline/train/profiler.py). Here, outside of them,
they become `profiles/step-N/trace.json.gz`, which https://ui.perfetto.dev opens: a process for each rank, times by the
clock of rank 0 (Chrome's "Trace Event Format").
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.dist_env import expand_hostlist
from pipeline.base.errors import UserError
from pipeline.base.files import read_json, replacing, write_json
from pipeline.run.directory import Run
from pipeline.train.step_trace import average_ranks, describe_parts
from slurm.query.run_jobs import list_running_work

LOOK_S = 5.0
"""How often it is looked whether the training still runs."""


def ask(run: Run, ranks: str, steps: int) -> Iterator[str]:
    """Have the next steps profiled, wait for them, merge them; says what came of it, step by step.

    ranks: such as 0,4-7; "" for all. Without steps: what was profiled before. Raises UserError where no training runs,
    or it ends before they are there.
    """
    try:
        wanted = [int(rank) for rank in expand_hostlist(f"[{ranks}]")] if ranks else None
    except UserError:
        raise UserError(f"--ranks {ranks}: write ranks as 0,4-7") from None
    before = {path: path.stat().st_mtime_ns for path in _profiled(run)} if steps else {}
    if steps:
        _need_training(run)
        write_json(run.profile_file, {"ranks": wanted, "steps": steps})
    looked = time.monotonic()
    while steps and (run.profile_file.exists() or run.profile_taken_file.exists()):
        time.sleep(0.2)
        if time.monotonic() > looked + LOOK_S:
            _need_training(run)
            looked = time.monotonic()
    fresh = [path for path in _profiled(run) if path.stat().st_mtime_ns != before.get(path)]
    if not fresh:
        who = f"maybe none of the ranks {ranks} is there; " if ranks else ""
        raise UserError(f"{run.name}: no step was profiled; {who}the log of rank 0 may say why")
    for path in fresh:
        try:
            known = read_json(path)
            trace, error_ms = merge(path.parent, sorted(map(int, known)))
            parts = describe_parts(average_ranks(list(known.values())))
            said = f"{parts} (mean of {len(known)} rank{'s' * (len(known) > 1)})"
        except (
            gzip.BadGzipFile,
            FileNotFoundError,
            zlib.error,
            EOFError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            raise UserError(f"{path.parent} is damaged ({error!r}): remove it, or the file that is") from None
        yield f"{path.parent.name}: {said}"
        yield f"  {trace} for https://ui.perfetto.dev, clocks within {error_ms:.2f} ms"


def _profiled(run: Run) -> list[Path]:
    return sorted(run.profiles_dir.glob("step-*/parts.json"))


def _need_training(run: Run) -> None:
    if not any(name.startswith("train") for name in list_running_work(run)):
        raise UserError(f"{run.name} is not training now; --steps 0 shows what was profiled before")


def merge(folder: Path, ranks: Sequence[int]) -> tuple[Path, float]:
    """One trace of these ranks of a profiled step; its path, and how far their clocks may be apart, in milliseconds.

    Rank after rank, so that one is in memory at a time.
    """
    origin, errors, rows = 0, [0], 0
    with replacing(folder / "trace.json.gz") as new, gzip.open(new, "wt", 1) as file:
        for rank in ranks:
            told = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
            errors, origin = [*errors, told["clock_error_ns"]], origin or told["begin_ns"]
            for event in _events(told, (told["begin_ns"] - origin) / 1000, rows):
                rows = max(rows, event["tid"])
                file.write(("," if file.tell() else '{"displayTimeUnit": "ms", "traceEvents": [') + json.dumps(event))
        file.write("]}\n")
    return folder / "trace.json.gz", sum(sorted(errors)[-2:]) / 1e6


def _events(told: Mapping[str, Any], later_us: float, taken: int) -> Iterator[dict[str, Any]]:
    """A rank's events, `later_us` than its own times; numbers of rows begin behind `taken`.

    Operations of a group may overlap: they get as many rows as are under way at once, for a row cannot show that.
    Process 0 is the kernel's own for Perfetto, so rank 0 is process 1.
    """
    place = ", ".join(f"{name} {number}" for name, number in told["place"].items())
    pid, ends, rows = told["rank"] + 1, dict[str, float](), dict[str, int]()
    whose = {"process_name": f"rank {told['rank']} on {told['host']}: {place}"}
    for kind, row, name, start, end in sorted(told["spans"], key=lambda span: (span[3], -span[4])):
        if kind == "communication":
            lanes = (f"communication {row}{f' ({n})' if n else ''}" for n in range(len(told["spans"])))
            row = next(lane for lane in lanes if ends.get(lane, 0.0) <= start)
            ends[row] = end
        tid = rows.setdefault(row, taken + 1 + len(rows))
        yield {
            "ph": "X", "name": name, "cat": kind, "pid": pid, "tid": tid, "ts": start + later_us, "dur": end - start
        }  # fmt: skip
    for row, tid in rows.items():
        for what, called in (whose | {"thread_name": row}).items():
            yield {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": called}}
