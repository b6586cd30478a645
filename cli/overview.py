"""`status` without a RUN: the runs below a folder, a line for each, the one that changed last at the end.

What is done is seen in the run directory. Slurm is asked once, for the jobs of all runs that are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from pipeline.base.command import command
from pipeline.base.errors import UserError, storage_error
from pipeline.run.directory import Run
from pipeline.run.points import points
from slurm.query.run_jobs import SubmittedJob, find_run_jobs, uses_slurm
from slurm.query.status import StageStatus, StatusPoller, build_table


def print_runs(root: Path, console: Console) -> None:
    """How each run below `root` stands now; one that cannot be read is named, with the reason.

    Raises OSError if `root` exists and cannot be listed.
    """
    found: dict[Run, list[StageStatus]] = {}
    broken: list[Text] = []
    for folder in _folders(root):
        try:
            run = Run(folder)
            if run.config_file.exists():
                found[run] = _rows(run, [])
        except (UserError, OSError) as error:
            broken.append(Text(f"{folder} cannot be read: {storage_error(error) or error}", style="red"))
    asked = [run for run, rows in found.items() if uses_slurm(run) and any(row.state != "done" for row in rows)]
    jobs = find_run_jobs([one for run in asked for one in (run, *points(run))])
    found |= {run: _rows(run, jobs) for run in asked}
    cells = [_cells(run, found[run]) for run in sorted(found, key=_changed)]
    if cells:
        head = ["run", "stage", "state", "step", "loss", "last stop", "changed"]
        shown = [column for column in zip(head, *cells, strict=True) if any(column[1:]) or column[0] != "last stop"]
        console.print(build_table([*zip(*shown, strict=True)], console.width), soft_wrap=True)
    elif not broken:
        console.print(f"no runs below {root}; to make one: {command('CONFIG.yaml')}", soft_wrap=True)
    for words in broken:
        console.print(words, soft_wrap=True)


def _folders(root: Path) -> list[Path]:
    """The folders and links in `root`; none if there is no `root`. `Path.glob` would hide that it cannot be read."""
    try:
        return sorted(path for path in root.iterdir() if not path.is_file())
    except FileNotFoundError:
        return []


def _rows(run: Run, jobs: Sequence[SubmittedJob]) -> list[StageStatus]:
    """Its stages, and of a sweep a row for each point."""
    poller = StatusPoller(run)
    return [*poller.statuses_from(jobs), *poller.point_statuses]


def _cells(run: Run, rows: Sequence[StageStatus]) -> list[str]:
    """The first stage that is not done, else the last one; of a sweep's points, how many are done."""
    row = next((row for row in rows if row.state != "done"), rows[-1])
    step, of_points = row.cells["step"], [row for row in rows if row.run is not run]
    if row in of_points:
        step = f"{sum(point.state == 'done' for point in of_points)}/{len(of_points)} points"
    changed = datetime.fromtimestamp(_changed(run)).strftime("%Y-%m-%d %H:%M")
    return [run.name, row.stage, row.state, step, row.cells["loss"], row.last_stop_summary, changed]


def _changed(run: Run) -> float:
    """When something was last said of it."""
    return (run.events_file if run.events_file.exists() else run.config_file).stat().st_mtime
