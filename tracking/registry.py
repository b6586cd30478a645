"""The table of sinks: to add one, write its file, its section in pipeline/config/track.py, and its row here."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, cast

from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.run.directory import Run
from tracking.run_reader import Record
from tracking.tracker import Memory, Sink


class _Row(NamedTuple):
    """Where a sink is, and what it needs."""

    module: str
    name: str
    imports: str | None = None
    """A package of others, and the extra of setup.cfg that brings it has the sink's name."""


SINKS = {
    "tensorboard": _Row("tensorboard", "TensorBoard", "tensorboard"),
    "wandb": _Row("wandb", "Wandb", "wandb"),
    "mlflow": _Row("mlflow", "Mlflow", "mlflow"),
    "prometheus": _Row("prometheus", "Prometheus", "prometheus_client"),
    "jsonl": _Row("jsonl_file", "LinesFile"),
    "webhook": _Row("webhook", "Webhook"),
    "mail": _Row("webhook", "Mail"),
}
"""By the keys of `track:`."""


def wanted(config: Config) -> list[str]:
    """The sinks that a config names."""
    return [name for name in SINKS if getattr(config.track, name)]


def refuse_missing(config: Config) -> None:
    """Raise UserError where a package that the config needs is not installed."""
    needs = {name: package for name in wanted(config) if (package := SINKS[name].imports)}
    if config.track.telemetry_s is not None:
        needs["telemetry"] = "psutil"
    for name, package in needs.items():
        if find_spec(package) is None:
            raise UserError(f"track.{name} needs {package}, which is not installed: pip install 'sluice[{name}]'")


def make(name: str, run: Run, memory: Memory, record: Record) -> Sink:
    """The sink of that name, connected."""
    row = SINKS[name]
    return cast(Sink, getattr(import_module(f"tracking.{row.module}"), row.name)(run, memory, record))
