"""Send a run to MLflow: one run on the server for all attempts, through MLflow's own client.

Metrics are sent in batches, and a batch is one transaction on the server. The newest step with a `step_time_s` on the
server is therefore the last step that the server has received.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import datetime

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the follower itself retries
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from pipeline.evaluate.result import HELD_OUT_PREFIX, result_file
from pipeline.run.directory import Run
from pipeline.run.events import Done, Started
from tracking.tracker import (
    Line,
    RunReader,
    Tracker,
    TrackerState,
    display_names,
    flat_config,
    flatten_numbers,
    is_late_held_out,
    last_stage,
    tracker_run_id,
)  # fmt: skip

_MAX_METRICS = 1000
"""Maximum number of metrics in a request (mlflow/utils/validation.py)."""
_MAX_PARAMS = 100
"""Maximum number of parameters in a request (mlflow/utils/validation.py)."""
_MAX_PARAM_CHARACTERS = 500
"""Maximum length of a parameter on servers before 2.8."""
_STATUS_BY_EVENT = {"done": "FINISHED", "failed": "FAILED", "cancelled": "KILLED", "stopped": "KILLED"}
"""MLflow's status of the run after an event."""


class Mlflow(Tracker):
    """Sends metrics, the config as parameters, and files as artifacts.

    Metrics of steps have the names of metrics.jsonl, those of evaluations are called `evaluation/NAME`.
    """

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        config = run.config.track.mlflow
        assert config is not None
        self._client = MlflowClient(tracking_uri=config.uri)
        experiment = self._client.get_experiment_by_name(config.experiment)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        run_id = tracker_run_id(run)
        matches = self._client.search_runs([experiment_id], f"tags.`sluice.run` = '{run_id}'", max_results=1)
        name, sweep = display_names(run)
        tags = {"sluice.run": run_id, "sluice.path": str(run.path)} | ({"sluice.sweep": sweep} if sweep else {})
        server_run = matches[0] if matches else self._client.create_run(experiment_id, tags=tags, run_name=name)
        self._server_run_id = server_run.info.run_id
        if not server_run.data.params:  # parameters are sent only once
            params = [Param(key, str(value)[:_MAX_PARAM_CHARACTERS]) for key, value in flat_config(run).items()]
            for start in range(0, len(params), _MAX_PARAMS):
                self._client.log_batch(self._server_run_id, params=params[start : start + _MAX_PARAMS])
        # the public attribute `server_run.data.metrics` contains no steps
        newest_steps = {metric.key: metric.step for metric in server_run.to_proto().data.metrics}
        state.step = newest_steps.get("step_time_s", 0)
        state.evaluations = []
        if "evaluation/loss" in newest_steps:
            state.evaluations = [
                metric.step for metric in self._client.get_metric_history(self._server_run_id, "evaluation/loss")
            ]

    def _log(self, lines: Sequence[Line], prefix: str) -> None:
        """Send the numbers of lines, in requests of at most `_MAX_METRICS` metrics.

        All numbers of a line are in one request.

        Args:
            lines: the lines; each has a `step`, and maybe a `time` in seconds since 1970.
            prefix: the prefix of the metrics' names.
        """
        batch: list[Metric] = []
        for line in lines:
            time_ms = int(1000 * (line.get("time") or time.time()))
            metrics = [
                Metric(prefix + name, value, time_ms, int(line["step"])) for name, value in flatten_numbers(line)
            ]
            if len(batch) + len(metrics) > _MAX_METRICS:
                self._client.log_batch(self._server_run_id, batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._server_run_id, batch)

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Send the steps' metrics."""
        self._log(steps, "")

    def on_evaluation(self, result: Line) -> None:
        """Send the file of the evaluation, then its metrics.

        In this order, a server that has the metrics also has the file.
        """
        self._client.log_artifact(self._server_run_id, str(result_file(self.run, int(result["step"]))), "evaluation")
        self._log([result], "evaluation/")

    def on_event(self, event: Line) -> None:
        """Update the status of the run on the server. Of the events `done`, only that of the last stage does this.

        If the event has late results on held-out data for a step that was already sent, send the results, unless the
        server has them.
        """
        if is_late_held_out(event) and event["step"] <= self.state.step:
            history = self._client.get_metric_history(self._server_run_id, f"{HELD_OUT_PREFIX}loss")
            if event["step"] not in [metric.step for metric in history]:
                time_s = datetime.fromisoformat(event["time"]).timestamp()
                self._log([event | {"time": time_s}], "")  # in an event, `time` is a text
        elif event["event"] == Started.NAME:
            self._client.update_run(self._server_run_id, status="RUNNING")
        elif event["event"] in _STATUS_BY_EVENT and (
            event["event"] != Done.NAME or event.get("stage") == last_stage(self.run)
        ):
            self._client.set_terminated(self._server_run_id, _STATUS_BY_EVENT[event["event"]])

    def close(self) -> None:
        """Send the current config and the report, if they exist."""
        for file in (self.run.config_file, self.run.path / "report.html"):
            if file.exists():
                self._client.log_artifact(self._server_run_id, str(file))
