"""`logs RUN STAGE`: print the log of a rank, or of the supervisor, also while the stage runs.

`jobs/STAGE/rank-N.log` contains the output of rank N in all attempts of the stage. In the job array of the stage shard,
N is the index of the task. The log of a supervisor is the output file of its job, `JOB_0_log.out`. If the job is
requeued, Slurm appends to this file.
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from cli.common import RunPath
from pipeline.base.command import format_command
from pipeline.base.errors import UserError, make_printable
from pipeline.base.files import open_regular_file
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.status import MAX_IDLE_POLLS, POLL_INTERVAL_S, StageStatus, StatusPoller

SUPERVISOR = "supervisor"
_READ_INTERVAL_S = 0.3
"""Pause between two checks for new output, with `--follow`."""


def logs(
    run_path: RunPath,
    stage: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="a stage of the run, such as train; not needed if it has one")
    ] = None,
    rank: Annotated[str, typer.Option(help="a rank (in shard: a task of the array), or `supervisor`")] = "0",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="keep printing until the stage ends")] = False,
) -> None:
    """Print the log of one rank of a stage, or of its supervisor."""
    run = Run.open(run_path)
    run_stages = list(run.config.active_stages)
    if stage is None and len(run_stages) > 1:
        raise UserError("cli.usage", f"name a stage: {format_command('logs', run.name, '|'.join(run_stages))}")
    print_log(run, stage or run_stages[0], rank, follow)


def find_log_file(run: Run, stage: str, source: str) -> Path | None:
    """Return the newest log of a rank or of the supervisor; None if there is no such log yet.

    Args:
        run: the run.
        stage: the stage.
        source: the number of a rank, or `supervisor`.

    Raises:
        UserError: if `source` is neither a number nor `supervisor`.
    """
    if source != SUPERVISOR and not source.isdecimal():
        raise UserError("cli.rank", f"--rank {source}: must be the number of a rank, or {SUPERVISOR}")
    pattern = "*_log.out" if source == SUPERVISOR else f"rank-{int(source)}.log"
    return max((run.jobs_dir / stage).glob(pattern), key=lambda path: path.stat().st_mtime_ns, default=None)


def print_log(run: Run, stage: str, source: str, follow: bool) -> None:
    """Print a log of a stage.

    Args:
        run: the run.
        stage: the stage.
        source: the number of a rank, or `supervisor`.
        follow: whether to keep printing until the stage ends, also after a requeue or in a successor job.

    Raises:
        UserError: if there is no such stage, the stage runs only in the points of a sweep, `source` is invalid, or
            there is no log. With `follow`, a missing log is only an error if the stage neither runs nor may still
            start.
    """
    run.config.get_stage(stage)  # raises UserError for an unknown stage
    if stage not in stages.list_run_stages(run):
        example = format_command("logs", f"{run.name}/points/000", stage)
        raise UserError("cli.sweep_stage", f"{stage} has a log for each point of the sweep, for example: {example}")
    poller = StatusPoller(run)
    if find_log_file(run, stage, source) is None:
        statuses = poller.poll()
        reason = _explain_missing_log(run, stage, source, statuses)
        if not (follow and _can_continue(statuses, stage)):
            raise UserError("cli.no_log", reason)
        print(reason, file=sys.stderr)
    printed_file: Path | None = None
    offset = 0
    idle_polls = 0
    next_poll_time = 0.0
    with suppress(KeyboardInterrupt):
        while True:
            if follow and time.monotonic() >= next_poll_time:
                next_poll_time = time.monotonic() + POLL_INTERVAL_S
                idle_polls = 0 if _can_continue(poller.poll(), stage) else idle_polls + 1
            # the log is read after the poll, so that all output from before the poll is printed
            newest_file = find_log_file(run, stage, source)
            # print the rest of the previous log, then the newest log, which may be the same file
            for path in filter(None, dict.fromkeys((printed_file, newest_file))):
                if path != printed_file:
                    if printed_file is not None:
                        print(f"--- {path}", flush=True)
                    printed_file = path
                    offset = 0
                offset = _print_from(path, offset)
            if not follow or idle_polls >= MAX_IDLE_POLLS:
                return
            time.sleep(_READ_INTERVAL_S)


def _print_from(path: Path, offset: int) -> int:
    """Print a file from byte `offset` to its end, without control characters. Return the offset of the end."""
    with open_regular_file(path) as file:
        file.seek(offset)
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        while block := text.read(1 << 16):
            # carriage returns are kept, because progress bars use them
            sys.stdout.buffer.write("\r".join(map(make_printable, block.split("\r"))).encode())
        sys.stdout.flush()
        return file.tell()


def _can_continue(statuses: list[StageStatus], stage: str) -> bool:
    """Return True if the stage is active, or if it waits and any other stage is active."""
    status = next(status for status in statuses if status.stage == stage)
    return status.is_active or (status.state == "waiting" and any(other.is_active for other in statuses))


def _explain_missing_log(run: Run, stage: str, source: str, statuses: list[StageStatus]) -> str:
    """Return a message that says why there is no log of a rank or of the supervisor.

    Args:
        run: the run.
        stage: the stage.
        source: the number of a rank, or `supervisor`.
        statuses: the statuses of all stages of the run.
    """
    status = next(status for status in statuses if status.stage == stage)
    name = source if source == SUPERVISOR else f"rank {source}"
    if existing := sorted(path.name for path in (run.jobs_dir / stage).glob("rank-*.log")):
        return f"{stage} has no log of {name}; existing logs: {', '.join(existing)}"
    job = status.cells["job"]
    if status.is_active and job:
        reason = status.cells["reason"]
        return f"{stage} has not started: job {job} is {status.state}" + (f" ({reason})" if reason else "")
    has_started = status.cells["attempts"] != "0"
    hint = ""
    if source == SUPERVISOR and has_started:
        hint = " (if you submitted the job by hand, its log is where your sbatch command put it)"
    return f"{stage} has no log of {name}; its state is {status.state}{hint}"
