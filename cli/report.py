"""`report RUN`: summarize a run in the terminal and in report.html."""

from __future__ import annotations

from cli.common import RunPath, console
from pipeline.run.directory import Run
from planning.goodput import describe_expected_goodput
from tracking.report import print_report


def report(run_path: RunPath) -> None:
    """Summarize a run: attempts, hours, losses and evaluation. Charts are in the run's report.html."""
    print_report(Run.open(run_path), console, describe_expected_goodput)
