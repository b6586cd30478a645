"""MLflow: one run over all attempts on a server, by MLflow's own client.

A batch is one request, and there one transaction, so the server can say how far it was told: by the newest step that
has a `step_time_s`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the follower tries again by itself
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from pipeline.evaluate.result import HELD_OUT_PREFIX, result_file
from pipeline.run.directory import Run
from pipeline.run.ledger import event_timestamp
from tracking.run_reader import Line, Record, late
from tracking.tracker import Memory, Sink, figures, identity, last_stage, names, shown_config

_MOST_METRICS, _MOST_PARAMS, _LONGEST = 1000, 100, 500
"""What a request may hold (mlflow/utils/validation.py), and a parameter on servers before 2.8."""
_STATUS = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "stopped": "KILLED"}


class Mlflow(Sink):
    """Metrics by the names of metrics.jsonl, and `evaluation/NAME`; the config as parameters; files as artifacts."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        wanted = run.config.track.mlflow
        assert wanted is not None
        self._client = MlflowClient(tracking_uri=wanted.uri)
        there = self._client.get_experiment_by_name(wanted.experiment)
        experiment = there.experiment_id if there else self._client.create_experiment(wanted.experiment)
        name = identity(run)
        found = self._client.search_runs([experiment], f"tags.`sluice.run` = '{name}'", max_results=1)
        called, sweep = names(run)
        tags = {"sluice.run": name, "sluice.path": str(run.path)} | ({"sluice.sweep": sweep} if sweep else {})
        mine = found[0] if found else self._client.create_run(experiment, tags=tags, run_name=called)
        self._id = mine.info.run_id
        if not mine.data.params:
            params = [Param(key, str(value)[:_LONGEST]) for key, value in shown_config(run).items()]
            for at in range(0, len(params), _MOST_PARAMS):
                self._client.log_batch(self._id, params=params[at : at + _MOST_PARAMS])
        told = {one.key: one.step for one in mine.to_proto().data.metrics}
        memory.step = told.get("step_time_s", 0)
        memory.evaluations = []
        if "evaluation/loss" in told:
            memory.evaluations = [one.step for one in self._client.get_metric_history(self._id, "evaluation/loss")]

    def _log(self, found: Sequence[Line], group: str) -> None:
        """Send whole lines, so many as a request may hold."""
        batch: list[Metric] = []
        for line in found:
            at = int(1000 * (line.get("time") or time.time()))
            metrics = [Metric(group + name, value, at, int(line["step"])) for name, value in figures(line)]
            if len(batch) + len(metrics) > _MOST_METRICS:
                self._client.log_batch(self._id, batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._id, batch)

    def steps(self, found: Sequence[Line]) -> None:
        """Send them."""
        self._log(found, "")

    def evaluation(self, found: Line) -> None:
        """Send its file, then its figures: those say that all is there."""
        self._client.log_artifact(self._id, str(result_file(self.run, int(found["step"]))), "evaluation")
        self._log([found], "evaluation/")

    def event(self, event: Line) -> None:
        """Follow how the run stands; take what is said late of a step."""
        if late(event) and event["step"] <= self.memory.step:
            told = self._client.get_metric_history(self._id, f"{HELD_OUT_PREFIX}loss")
            if event["step"] not in [one.step for one in told]:
                self._log(
                    [{key: value for key, value in event.items() if key != "time"} | {"time": event_timestamp(event)}],
                    "",
                )
        elif event["event"] == "started":
            self._client.update_run(self._id, status="RUNNING")
        elif event["event"] in _STATUS and (event["event"] != "done" or event.get("stage") == last_stage(self.run)):
            self._client.set_terminated(self._id, _STATUS[event["event"]])

    def close(self) -> None:
        """Send what there is now of the files that people look at."""
        for file in (self.run.config_file, self.run.path / "report.html"):
            if file.exists():
                self._client.log_artifact(self._id, str(file))
