"""The `track:` section of the config, and the table of trackers that receive a run's metrics and events.

Training does not call trackers. For each enabled tracker, a follower process (tracking/follower.py) reads
metrics.jsonl, events.jsonl and evaluation/ and passes on what is new. A tracker that is not enabled costs nothing, and
its package need not be installed. To add a tracker, write its class and add its key with a `TrackerEntry` to
:class:`TrackConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.types import Policy, PositiveFloat, Section, must_match

URL = re.compile(r"https?://\S+")
_Url = Annotated[str, must_match(URL, "write a URL such as https://host/path")]


@dataclass(frozen=True)
class TrackerEntry:
    """Where a tracker is implemented, and what it needs."""

    module: str
    """Module of its class."""
    class_name: str
    package: str | None = None
    """The package that it imports. The extra in setup.cfg that installs it has the tracker's name."""


class WandbConfig(Section):
    """A run in Weights & Biases, one for all attempts."""

    project: str
    """Name of the project."""
    entity: str | None = None
    """Name of the team; null: your own account."""
    mode: Literal["offline", "online"] = "offline"
    """`offline`: for compute nodes without internet access. `wandb sync` uploads the run later; its command line is
    printed."""


class MlflowConfig(Section):
    """A run on an MLflow server, one for all attempts."""

    uri: str
    """URI of the tracking server, such as http://host:5000."""
    experiment: str = "sluice"
    """Name of the experiment."""


class PrometheusConfig(Section):
    """The newest step as gauges, in a textfile, on a port, or both."""

    textfile: Annotated[Path | None, Policy.PATH] = None
    """Folder of node_exporter's textfile collector; sluice-RUN.prom is written there."""
    textfile_sharing: Literal["private", "group", "all"] | None = None
    """Who may read that file; null: as `run.sharing`. A collector that runs as another user needs `group` or `all`."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on 127.0.0.1 to scrape while a job runs. Each run on the same node needs its own port."""

    @model_validator(mode="after")
    def _has_an_output(self) -> PrometheusConfig:
        if self.textfile is None and self.port is None:
            raise ValueError("set textfile, port or both")
        return self


class WebhookConfig(Section):
    """Messages to a chat if a stage fails or stalls, and when the run ends, in Slack's format: {"text": …}."""

    url: Annotated[_Url | None, Policy.SECRET_VALUE] = None
    """URL of the webhook. Anybody who knows it can post there."""
    variable: str | None = None
    """The environment variable of the job that contains the URL (see site.pass, site.secrets), instead of `url`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> WebhookConfig:
        if (self.url is None) == (self.variable is None):
            raise ValueError("set either url or variable")
        return self


class TrackConfig(Section):
    """Trackers that receive the run's metrics and events."""

    tensorboard: Annotated[bool, TrackerEntry("tracking.tensorboard", "TensorBoard", "tensorboard")] = False
    """Write event files to the run's folder `tensorboard`; show them with `tensorboard --logdir runs`."""
    wandb: Annotated[WandbConfig | None, TrackerEntry("tracking.wandb", "Wandb", "wandb")] = None
    """Weights & Biases."""
    mlflow: Annotated[MlflowConfig | None, TrackerEntry("tracking.mlflow", "Mlflow", "mlflow")] = None
    """MLflow."""
    prometheus: Annotated[
        PrometheusConfig | None, TrackerEntry("tracking.prometheus", "Prometheus", "prometheus_client")
    ] = None
    """Prometheus."""
    jsonl: Annotated[Annotated[Path | None, TrackerEntry("tracking.jsonl_file", "JsonlFile")], Policy.PATH] = None
    """A file for log collectors, which several runs may share. It receives each line of metrics.jsonl and
    events.jsonl, with the run, job and attempt that it belongs to."""
    webhook: Annotated[WebhookConfig | None, TrackerEntry("tracking.webhook", "Webhook")] = None
    """A chat."""
    mail: Annotated[str | None, TrackerEntry("tracking.webhook", "Mail")] = None
    """Mail address. Slurm writes to it if a job fails or can never start, and when the last stage ends. If the training
    stalls, the job's first node writes to it with its sendmail."""
    telemetry_s: PositiveFloat | None = None
    """Seconds between two samples of each node's GPUs, CPUs, memory and disk, in telemetry-HOST.jsonl; null: no
    samples. A sample takes a few milliseconds of one core. 10 is a good value."""

    @property
    def enabled(self) -> list[str]:
        """Names of the trackers that this config enables."""
        return [name for name in TRACKERS if getattr(self, name)]


TRACKERS: Mapping[str, TrackerEntry] = {
    name: entry
    for name, field in TrackConfig.model_fields.items()
    for entry in field.metadata
    if isinstance(entry, TrackerEntry)
}
"""The trackers by their keys in `track:`."""
