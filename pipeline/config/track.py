"""The `track:` section of the config: who else is told what a run's files say (tracking/).

Nothing of it is in the training: a follower process reads metrics.jsonl, events.jsonl and evaluation/, and feeds one
sink. A sink that is not named here costs nothing, and its library need not be installed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.types import PositiveFloat, Section, matching

URL = re.compile(r"https?://\S+")
_Url = Annotated[str, matching(URL, "write a URL such as https://host/path")]


class WandbConfig(Section):
    """A run in Weights & Biases, one over all attempts."""

    project: str
    """The project that it belongs to."""
    entity: str | None = None
    """The team; null: the user's own."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` for compute nodes without a way out: `wandb sync` sends it later, the line is printed."""


class MlflowConfig(Section):
    """A run on an MLflow server, one over all attempts."""

    uri: str
    """Of the tracking server, such as http://host:5000."""
    experiment: str = "sluice"
    """The experiment that it belongs to."""


class PrometheusConfig(Section):
    """The newest step as gauges; at least one of the two ways."""

    textfile: Path | None = None
    """Folder of node_exporter's textfile collector: sluice-RUN.prom is written there."""
    textfile_sharing: Literal["private", "group", "all"] | None = None
    """Who may read that file; null: as `run.sharing`. A collector that runs as another user needs `group` or `all`."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on 127.0.0.1 that can be scraped while a job runs; another run on the same node needs another one."""

    @model_validator(mode="after")
    def _one_way(self) -> PrometheusConfig:
        if self.textfile is None and self.port is None:
            raise ValueError("give textfile, port or both")
        return self


class WebhookConfig(Section):
    """Words to a chat at a failure, a stall (while it lasts) and the end, in the form that Slack takes: {"text": …}."""

    url: _Url | None = None
    """Where to; whoever knows it can write there."""
    variable: str | None = None
    """The environment variable that holds the URL, of the job (site.pass, site.secrets), in place of `url`."""

    @model_validator(mode="after")
    def _one_place(self) -> WebhookConfig:
        if (self.url is None) == (self.variable is None):
            raise ValueError("give url, or variable")
        return self


class TrackConfig(Section):
    """Who is told; each key a sink."""

    tensorboard: bool = False
    """Event files in the run's folder `tensorboard`: `tensorboard --logdir runs`."""
    wandb: WandbConfig | None = None
    """Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """MLflow."""
    prometheus: PrometheusConfig | None = None
    """Prometheus."""
    jsonl: Path | None = None
    """A file, of this and other runs, that gets each line of metrics.jsonl and events.jsonl with run, job and attempt
    in it, for log collectors."""
    webhook: WebhookConfig | None = None
    """A chat."""
    mail: str | None = None
    """Address that Slurm writes to when a job fails or can never start, and when the last stage ends; and at a stall
    the job's first node, by its sendmail."""
    telemetry_s: PositiveFloat | None = None
    """Seconds between two looks at each node of a job: GPUs, CPUs, memory and disk, in telemetry-HOST.jsonl; null:
    none. A look takes some milliseconds of one core; 10 is a good figure."""
