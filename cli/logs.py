"""`logs`: what a rank, or the supervisor, of a stage has written; readable from the login node while it runs.

`jobs/STAGE/rank-N.log` grows over all attempts of the stage (in the array of shard N is the task). The supervisor's
own words are in the log of its job, `JOB_0_log.out`: one file per job, appended to when the job is requeued.
"""

from __future__ import annotations

import io
import sys
import time
from contextlib import suppress
from pathlib import Path

from pipeline.base.command import command
from pipeline.base.errors import UserError, printable
from pipeline.base.files import open_regular
from pipeline.run import stages
from pipeline.run.directory import Run
from slurm.query.status import MAX_IDLE_POLLS, POLL_INTERVAL_S, StageStatus, StatusPoller

SUPERVISOR = "supervisor"
POLL_S = 0.3


def log_file(run: Run, stage: str, who: str) -> Path | None:
    """The newest log of a rank (its number), or of the supervisor; None where there is none yet.

    Raises UserError where `who` is neither.
    """
    if who != SUPERVISOR and not who.isdecimal():
        raise UserError(f"--rank {who}: give a rank's number, or {SUPERVISOR}")
    names = "*_log.out" if who == SUPERVISOR else f"rank-{int(who)}.log"
    return max((run.jobs_dir / stage).glob(names), key=lambda path: path.stat().st_mtime_ns, default=None)


def show(run: Run, stage: str, who: str, follow: bool) -> None:
    """Print a log; with `follow` go on as it grows, over requeues and successors, until the stage has ended.

    Raises UserError, saying how the stage stands, where there is nothing to print.
    """
    stages.load(stage)  # refuses what is none
    if stage not in stages.own_stages(run):
        raise UserError(
            f"each point of the sweep has its own {stage}: {command('logs', f'{run.name}/points/000', stage)}"
        )
    poller = StatusPoller(run)
    if log_file(run, stage, who) is None:
        words = _nothing(run, stage, who, rows := poller.poll())
        if not (follow and _goes_on(rows, stage)):
            raise UserError(words)
        print(words, file=sys.stderr)
    shown, at, quiet, look_at = None, 0, 0, 0.0
    with suppress(KeyboardInterrupt):
        while True:
            if follow and time.monotonic() >= look_at:
                look_at = time.monotonic() + POLL_INTERVAL_S
                quiet = 0 if _goes_on(poller.poll(), stage) else quiet + 1
            newest = log_file(run, stage, who)  # after the look: what was written before the end is shown
            for path in filter(None, dict.fromkeys((shown, newest))):
                if path != shown:
                    if shown is not None:
                        print(f"--- {path}", flush=True)
                    shown, at = path, 0
                at = _print_from(path, at)
            if not follow or quiet >= MAX_IDLE_POLLS:
                return
            time.sleep(POLL_S)


def _print_from(path: Path, start: int) -> int:
    """Print what a file holds from byte `start` on, without commands to the terminal; where it ended."""
    with open_regular(path) as file:
        file.seek(start)
        text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n")
        while part := text.read(1 << 16):
            sys.stdout.buffer.write("\r".join(map(printable, part.split("\r"))).encode())
        sys.stdout.flush()
        return file.tell()


def _goes_on(rows: list[StageStatus], stage: str) -> bool:
    """Whether the stage runs, or may still begin."""
    row = next(row for row in rows if row.stage == stage)
    return row.is_active or (row.state == "waiting" and any(other.is_active for other in rows))


def _nothing(run: Run, stage: str, who: str, rows: list[StageStatus]) -> str:
    """Why there is no such log."""
    row = next(row for row in rows if row.stage == stage)
    if there := sorted(path.name for path in (run.jobs_dir / stage).glob("rank-*.log")):
        return f"{stage} has no log of rank {who}; there are: {', '.join(there)}"
    job, reason = row.cells["job"], row.cells["reason"]
    if row.is_active and job:
        return f"{stage} has not begun: job {job} is {row.state}" + (f" ({reason})" if reason else "")
    started = row.cells["attempts"] != "0"
    where = " (submitted by hand? its log is where sbatch put it)" if who == SUPERVISOR and started else ""
    return f"{stage} has no log of {who if who == SUPERVISOR else f'rank {who}'}: it is {row.state}{where}"
