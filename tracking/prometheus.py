"""Export the newest values of a run to Prometheus.

The metrics are served on a port of this node's loopback interface, or written to a textfile for node_exporter. Names
and units follow Prometheus' conventions (https://prometheus.io/docs/practices/naming/): seconds, bytes, ratios, and the
suffix `_total` for counters. Each metric has the labels `run` and `sweep`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pipeline.base.files import read_last_object, replace_atomically
from pipeline.data.manifest import count_training_steps
from pipeline.run.directory import Run
from pipeline.run.events import (
    Done,
    EndEvent,
    Event,
    LostWork,
    Resumed,
    RetryEvent,
    Started,
    Submitted,
    find_current_stragglers,
    parse_event,
)
from pipeline.run.machines import SENSORS, get_sensor_values, is_telemetry_line
from tracking.tracker import Line, RunReader, Tracker, TrackerState, display_names

GIGA = 1e9
MAX_SAMPLE_AGE_S = 120.0
"""Telemetry samples that are older than this are not exported."""
_FILE_MODES = {"private": 0o600, "group": 0o640, "all": 0o644}
"""File mode of the textfile, by the value of `textfile_sharing`. If this key is not set, `run.sharing` decides."""
_GAUGES = {
    "step": ("step", "Newest optimizer step", 1), "loss": ("loss", "Loss of the newest step", 1),
    "held_out_loss": ("held_out_loss", "Loss on held-out data", 1),
    "held_out_ema_loss": ("held_out_ema_loss", "Loss of the moving average of the weights on held-out data", 1),
    "grad_norm": ("gradient_norm", "Norm of the whole gradient before clipping", 1),
    "lr": ("learning_rate", "Learning rate", 1),
    "tokens_per_s": ("tokens_per_second", "Tokens per second", 1),
    "samples_per_s": ("samples_per_second", "Samples per second", 1),
    "step_time_s": ("step_duration_seconds", "Duration of the newest step", 1),
    "data_wait_s": ("data_wait_seconds", "Time of the newest step that waited for data", 1),
    "exposed_comm_s": ("exposed_communication_seconds", "Time of the newest step that waited only for other ranks", 1),
    "checkpoint_s": ("checkpoint_seconds", "Time that a save blocked the newest step", 1),
    "memory_gb": ("memory_peak_bytes", "Peak memory of rank 0", GIGA),
    "tflops": ("model_tflops", "Model FLOP/s of all ranks, in 10^12", 1),
    "time": ("step_timestamp_seconds", "Time when the newest step ended", 1),
}  # fmt: skip
"""Name and description of a gauge, and the factor that converts a value to its unit, by key of metrics.jsonl."""
_COUNTERS = {"tokens": ("tokens", "Tokens trained on"), "samples_consumed": ("samples", "Samples trained on")}
"""Name and description of a counter, by key of metrics.jsonl."""


class Prometheus(Tracker):
    """Exports the newest step and evaluation, numbers of attempts and stops, stragglers and telemetry."""

    def __init__(self, run: Run, state: TrackerState, reader: RunReader) -> None:
        super().__init__(run, state, reader)
        config = run.config.track.prometheus
        assert config is not None
        name, sweep = display_names(run)
        # `config.textfile` is the folder that node_exporter reads
        self._textfile = config.textfile / f"sluice-{name}.prom" if config.textfile else None
        self._textfile_mode = _FILE_MODES[config.textfile_sharing or run.config.run.sharing]
        self._labels = {"run": name, "sweep": sweep or ""}
        self._total_steps = count_training_steps(run.config, run.data_dir)
        self._newest_values: Line = {}
        """The newest value of each key of metrics.jsonl."""
        self._events: list[Event] = []
        self._evaluation: dict[str, float] = {}
        # the values are only in the memory of this process, so each new process reads all files from the beginning
        state.step = 0
        state.events = 0
        state.evaluations.clear()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: WSGIServer | None = None
        if config.port is not None:
            try:
                self._server = start_http_server(config.port, addr="127.0.0.1", registry=self._registry)[0]
            except OSError as error:
                raise OSError(error.errno, f"track.prometheus.port {config.port}: {error.strerror}") from error

    def on_steps(self, steps: Sequence[Line]) -> None:
        """Keep the newest value of each key."""
        for line in steps:
            self._newest_values |= line

    def on_event(self, event: Line) -> None:
        """Keep the event. `lost_work` events are not kept, because they are long and not needed."""
        parsed = parse_event(event)
        if parsed is not None and not isinstance(parsed, LostWork):
            self._events.append(parsed)

    def _queue_s(self) -> float:
        """Return how long the jobs of the run have waited to start, in seconds in total."""
        queued_since = 0.0
        total = 0.0
        for event in self._events:
            # an event after which a job waits to start; after `done`, this is the next job of the chain
            if isinstance(event, Submitted | Resumed | RetryEvent | Done):
                queued_since = event.timestamp
            elif isinstance(event, Started):
                total += max(0.0, event.timestamp - queued_since) if queued_since else 0.0
                queued_since = 0.0
        return total

    def rewind(self, step: int) -> None:
        """Set `state.step` back, so that the reader returns the steps after `step` again."""
        self.state.step = min(self.state.step, step)

    def on_evaluation(self, result: Line) -> None:
        """Keep the newest evaluation."""
        self._evaluation = {key: float(value) for key, value in result.items() if key != "step"}

    def flush(self) -> None:
        """Write the metrics to the textfile, if the config has one."""
        if self._textfile is not None:
            self._textfile.parent.mkdir(parents=True, exist_ok=True)
            with replace_atomically(self._textfile) as new_file:
                new_file.write_bytes(generate_latest(self._registry))
                new_file.chmod(self._textfile_mode)

    def close(self) -> None:
        """Stop the server, which frees the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics to export; prometheus_client calls this for each scrape."""
        for key, (name, description, factor) in _GAUGES.items():
            if (value := self._newest_values.get(key)) is not None:
                yield self._make_metric(name, description, [([], value * factor)])
        for key, (name, description) in _COUNTERS.items():
            if (value := self._newest_values.get(key)) is not None:
                yield self._make_metric(name, description, [([], value)], is_counter=True)
        if self._total_steps:
            yield self._make_metric("steps", "Steps of the whole training", [([], self._total_steps)])
        ends = [event for event in self._events if isinstance(event, EndEvent) and not isinstance(event, Done)]
        stops = Counter(event.cause or event.name for event in ends)
        starts = Counter(event.stage for event in self._events if isinstance(event, Started))
        for name, description, label, counts in (
            ("stops", "Attempts that ended before the stage was done", "cause", stops),
            ("attempts", "Attempts that started", "stage", starts),
        ):
            samples = [([value], count) for value, count in counts.items()]
            yield self._make_metric(name, description, samples, label, is_counter=True)
        queue_s = self._queue_s()
        yield self._make_metric("queue_seconds", "Time that jobs waited to start", [([], queue_s)], is_counter=True)
        stragglers = [([str(event.rank), event.host], event.ratio) for event in find_current_stragglers(self._events)]
        yield self._make_metric(
            "straggler_ratio", "Local compute time of a slow rank divided by its peers'", stragglers, "rank", "host"
        )
        if self._evaluation:
            figures = [([key], value) for key, value in self._evaluation.items()]
            yield self._make_metric("evaluation", "Figures of the newest evaluation", figures, "figure")
        yield from self._collect_telemetry()

    def _collect_telemetry(self) -> Iterator[Metric]:
        """Yield a metric for each sensor, with the newest values of all hosts and GPUs."""
        samples = [
            sample
            for path in self.run.path.glob("telemetry-*.jsonl")
            if (sample := read_last_object(path, is_telemetry_line))
        ]
        samples = [sample for sample in samples if time.time() - sample["time"] < MAX_SAMPLE_AGE_S]
        for sensor, (description, _, name, factor) in SENSORS.items():
            values = [
                ([sample["host"], gpu], value * factor)
                for sample in samples
                for gpu, value in get_sensor_values(sample, sensor)
            ]
            if sensor.startswith("gpus."):
                yield self._make_metric(name, description, values, "host", "gpu")
            else:
                yield self._make_metric(name, description, [([host], value) for (host, _), value in values], "host")

    def _make_metric(
        self,
        name: str,
        description: str,
        samples: Iterable[tuple[list[str], float]],
        *labels: str,
        is_counter: bool = False,
    ) -> Metric:
        """Return a metric with its samples.

        Args:
            name: the name of the metric, without the prefix `sluice_`.
            description: the description of the metric.
            samples: pairs of label values and a value of the metric. The label values are in the order of `labels`.
            labels: names of labels, in addition to `run` and `sweep`.
            is_counter: whether the metric is a counter; otherwise it is a gauge.
        """
        family_class = CounterMetricFamily if is_counter else GaugeMetricFamily
        family = family_class(f"sluice_{name}", description, labels=[*self._labels, *labels])
        for label_values, value in samples:
            family.add_metric([*self._labels.values(), *label_values], value)
        return family
