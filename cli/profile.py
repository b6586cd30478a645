"""`profile RUN`: record the next steps of a running train stage, and merge the traces of all ranks.

The ranks write the traces `profiles/step-N/rank-R.json.gz`, and `parts.json` with the time by category
(pipeline/train/profiler.py). This command runs outside of the ranks. It merges the traces into
`profiles/step-N/trace.json.gz`, in Chrome's "Trace Event Format". https://ui.perfetto.dev shows this file with one
process for each rank, and with times by the clock of rank 0.
"""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.common import RunPath, console
from pipeline.base.dist_env import expand_hostlist
from pipeline.base.errors import UserError
from pipeline.base.files import read_json, replace_atomically, write_json
from pipeline.run.directory import Run
from pipeline.train.step_trace import average_parts_over_ranks, describe_parts
from slurm.query.run_jobs import describe_running_stages

_STATUS_CHECK_S = 5.0
"""How often this command checks that the train stage is still running."""
_DAMAGE_ERRORS = (
    gzip.BadGzipFile, FileNotFoundError, zlib.error, EOFError, AttributeError, LookupError, TypeError, ValueError,
    RecursionError,
)  # fmt: skip
"""The exceptions that reading a damaged profile may raise."""


def profile(
    run_path: RunPath,
    ranks: Annotated[str, typer.Option(help="ranks to record, such as 0,4-7; default: all ranks")] = "",
    steps: Annotated[
        int, typer.Option(min=0, max=20, help="number of steps; 0: print the steps that were recorded before")
    ] = 3,
) -> None:
    """Record the next steps of a running train stage: time by category, and a trace of all ranks for Perfetto."""
    run = Run.open(run_path)
    run.config.require_pipeline("profile")
    for line in profile_steps(run, ranks, steps):
        console.print(line, soft_wrap=True)


def profile_steps(run: Run, ranks: str, steps: int) -> Iterator[str]:
    """Ask the ranks to profile steps, wait until they have, merge the traces, and yield a description of each step.

    Args:
        run: the run.
        ranks: ranks to record, such as `0,4-7`; "" for all.
        steps: number of steps; 0 to merge and describe the steps that were recorded before.

    Raises:
        UserError: if `ranks` is malformed, the train stage is not running or ends before the steps are recorded, no
            step was recorded, or a profile is damaged.
    """
    try:
        # the brackets of a host list contain numbers in the same format
        rank_numbers = [int(rank) for rank in expand_hostlist(f"[{ranks}]")] if ranks else None
    except UserError:
        raise UserError("cli.rank", f"--ranks {ranks}: must be a list of ranks, such as 0,4-7") from None
    old_times = {path: path.stat().st_mtime_ns for path in _list_profiles(run)} if steps else {}
    if steps:
        _require_training(run)
        write_json(run.profile_file, {"ranks": rank_numbers, "steps": steps})
    last_check = time.monotonic()
    # rank 0 renames the request when it accepts the request, and removes the file after the last step
    while steps and (run.profile_file.exists() or run.accepted_profile_request_file.exists()):
        time.sleep(0.2)
        if time.monotonic() > last_check + _STATUS_CHECK_S:
            _require_training(run)
            last_check = time.monotonic()
    new_profiles = [path for path in _list_profiles(run) if path.stat().st_mtime_ns != old_times.get(path)]
    if not new_profiles:
        hint = f"perhaps the ranks {ranks} do not exist; " if ranks else ""
        raise UserError("run.no_profile", f"{run.name}: no step was recorded; {hint}see the log of rank 0")
    for path in new_profiles:
        try:
            parts_by_rank = read_json(path)
            trace, clock_error_ms = merge_traces(path.parent, sorted(map(int, parts_by_rank)))
            description = describe_parts(average_parts_over_ranks(list(parts_by_rank.values())))
        except _DAMAGE_ERRORS as error:
            message = f"{path.parent} is damaged ({error!r}): remove this folder, or the damaged file in it"
            raise UserError("run.damaged_profile", message) from None
        count = len(parts_by_rank)
        yield f"{path.parent.name}: {description} (mean of {count} rank{'s' * (count > 1)})"
        yield f"  {trace} for https://ui.perfetto.dev, clocks within {clock_error_ms:.2f} ms"


def _list_profiles(run: Run) -> list[Path]:
    """Return the path of the file parts.json of each profiled step."""
    return sorted(run.profiles_dir.glob("step-*/parts.json"))


def _require_training(run: Run) -> None:
    """Raise UserError if the train stage is not running."""
    if not any(description.startswith("train") for description in describe_running_stages(run)):
        raise UserError(
            "run.not_training", f"{run.name} is not training now; --steps 0 prints the steps that were recorded before"
        )


def merge_traces(folder: Path, ranks: Sequence[int]) -> tuple[Path, float]:
    """Merge the traces of a profiled step, one rank at a time to save memory.

    Args:
        folder: the folder of the step, with the traces of the ranks.
        ranks: the ranks whose traces are merged.

    Returns:
        The path of the merged trace, and the largest possible difference between the clocks of two ranks in
        milliseconds.
    """
    origin_ns = 0  # time 0 of the merged trace is the begin of the first rank's trace
    clock_errors_ns = [0]
    last_row = 0
    compression_level = 1  # the fastest
    with replace_atomically(folder / "trace.json.gz") as new_file, gzip.open(new_file, "wt", compression_level) as file:
        for rank in ranks:
            trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
            clock_errors_ns.append(trace["clock_error_ns"])
            origin_ns = origin_ns or trace["begin_ns"]
            for event in _convert_events(trace, (trace["begin_ns"] - origin_ns) / 1000, last_row):
                last_row = max(last_row, event["tid"])
                # the beginning of the file precedes the first event, a comma every other event
                file.write(("," if file.tell() else '{"displayTimeUnit": "ms", "traceEvents": [') + json.dumps(event))
        file.write("]}\n")
    two_largest_ns = sorted(clock_errors_ns)[-2:]  # the errors of two clocks may point in opposite directions
    return folder / "trace.json.gz", sum(two_largest_ns) / 1e6


def _convert_events(trace: Mapping[str, Any], offset_us: float, last_row: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank in Chrome's format.

    Communication operations of a process group may overlap, but a row of Perfetto shows only one operation at a time.
    Such a group therefore gets several rows. Perfetto reserves process 0 for the kernel, so rank 0 is process 1.

    Args:
        trace: the trace of the rank, as the profiler wrote it.
        offset_us: the microseconds to add to all times.
        last_row: the number of rows that the traces of the previous ranks use.
    """
    coordinates = ", ".join(f"{name} {number}" for name, number in trace["place"].items())
    process_id = trace["rank"] + 1
    end_times: dict[str, float] = {}
    row_numbers: dict[str, int] = {}
    # sorted by start; of the spans with the same start, the longest is first
    for kind, row, name, start, end in sorted(trace["spans"], key=lambda span: (span[3], -span[4])):
        if kind == "communication":
            candidates = (f"communication {row}{f' ({n})' if n else ''}" for n in range(len(trace["spans"])))
            # the first row in which no operation is active at this time
            row = next(candidate for candidate in candidates if end_times.get(candidate, 0.0) <= start)
            end_times[row] = end
        number = row_numbers.setdefault(row, last_row + 1 + len(row_numbers))
        yield {
            "ph": "X", "name": name, "cat": kind, "pid": process_id, "tid": number, "ts": start + offset_us,
            "dur": end - start,
        }  # fmt: skip
    process_name = {"process_name": f"rank {trace['rank']} on {trace['host']}: {coordinates}"}
    for row, number in row_numbers.items():
        for kind, name in (process_name | {"thread_name": row}).items():
            yield {"ph": "M", "name": kind, "pid": process_id, "tid": number, "args": {"name": name}}
