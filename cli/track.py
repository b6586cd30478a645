"""`track RUN`: send new metrics and events of a run to experiment trackers."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.common import Overrides, RunPath
from pipeline.base.console import PlainConsole
from pipeline.run.directory import Run, list_points
from planning.goodput import describe_expected_goodput
from tracking.follower import update_trackers
from tracking.report import print_report


def track(
    run_path: RunPath,
    overrides: Overrides = None,
    to: Annotated[
        str | None, typer.Option(help="one tracker, such as tensorboard; default: all trackers of the config")
    ] = None,
) -> None:
    """Send what is new in a run directory to TensorBoard, W&B, MLflow, Prometheus …"""
    run = Run.open(run_path)
    exit_codes = []
    for each in [run, *(point for point in list_points(run) if point.config_file.exists())]:
        if to == "mlflow" or (to is None and run.config.track.mlflow):  # MLflow also stores report.html
            print_report(each, PlainConsole(quiet=True), describe_expected_goodput)
        exit_codes.append(update_trackers(each, to, overrides or ()))
    raise typer.Exit(max(exit_codes))
