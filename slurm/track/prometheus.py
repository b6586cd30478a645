"""Prometheus: the newest step as gauges, on a port of this node's loopback or in a textfile for node_exporter.

Names and units are Prometheus' (https://prometheus.io/docs/practices/naming/): seconds, bytes, ratios; `_total` for
what only grows. Each has the label `run`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pipeline.base.files import last_object
from pipeline.data.manifest import steps_of
from pipeline.run.directory import Run
from pipeline.run.machines import look
from slurm.query.attempts import ENDS, GOES_ON
from slurm.show.ledger import seconds
from slurm.track.record import Line, Record
from slurm.track.sink import Memory, Sink, names

GIGA = 1e9
_OF_A_STEP = {
    "step": ("step", "Newest optimizer step", 1), "loss": ("loss", "Loss of the newest step", 1),
    "held_out_loss": ("held_out_loss", "Loss on held-out data", 1),
    "grad_norm": ("gradient_norm", "Norm of the whole gradient before clipping", 1),
    "lr": ("learning_rate", "Learning rate", 1),
    "tokens_per_s": ("tokens_per_second", "Tokens per second", 1),
    "samples_per_s": ("samples_per_second", "Samples per second", 1),
    "step_time_s": ("step_duration_seconds", "Duration of the newest step", 1),
    "data_wait_s": ("data_wait_seconds", "Time of the newest step that waited for data", 1),
    "exposed_comm_s": ("exposed_communication_seconds", "Time that waited for other ranks alone", 1),
    "checkpoint_s": ("checkpoint_seconds", "Time that a save kept the newest step waiting", 1),
    "memory_gb": ("memory_peak_bytes", "Most memory of rank 0", GIGA),
    "tflops": ("model_tflops", "Teraflops per second of the model's arithmetic, all ranks", 1),
    "time": ("step_timestamp_seconds", "When the newest step ended", 1),
}  # fmt: skip
"""Key of metrics.jsonl: name, meaning, and what one of it is in Prometheus' unit."""
_GROWING = {"tokens": ("tokens", "Tokens trained on"), "samples_consumed": ("samples", "Samples trained on")}
_OF_A_GPU = {
    "utilization_percent": ("gpu_utilization_ratio", "Time in which a kernel ran", 0.01),
    "memory_gb": ("gpu_memory_used_bytes", "Memory in use", GIGA),
    "power_w": ("gpu_power_watts", "Power", 1),
    "temperature_c": ("gpu_temperature_celsius", "Temperature", 1),
    "sm_clock_mhz": ("gpu_sm_clock_hertz", "Clock of the multiprocessors", 1e6),
    "ecc_errors": ("gpu_uncorrected_memory_errors", "Uncorrected memory errors since the driver was loaded", 1),
}
_OF_A_HOST = {
    "cpu_percent": ("cpu_utilization_ratio", "Time in which a CPU ran, of all", 0.01),
    "memory_gb": ("host_memory_used_bytes", "Memory in use", GIGA),
}


class Prometheus(Sink):
    """A collector that knows the newest step, and what ended attempts so far."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        wanted = run.config.track.prometheus
        assert wanted is not None
        called, sweep = names(run)
        self._textfile = wanted.textfile / f"sluice-{called}.prom" if wanted.textfile else None
        self._labels, self._steps = {"run": called, "sweep": sweep or ""}, steps_of(run.config, run.data)
        self._newest: Line = {}
        self._stops, self._starts, self._evaluated = Counter[str](), Counter[str](), dict[str, float]()
        self._asked = self._queue_s = 0.0
        self._slow: dict[str, Line] = {}
        memory.step = memory.events = 0  # it forgets: gauges are of now
        memory.evaluations.clear()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._server: WSGIServer | None = None
        if wanted.port is not None:
            try:
                self._server = start_http_server(wanted.port, addr="127.0.0.1", registry=self._registry)[0]
            except OSError as error:
                raise OSError(error.errno, f"track.prometheus.port {wanted.port}: {error.strerror}") from error

    def steps(self, found: Sequence[Line]) -> None:
        """Keep the last one, and of what is not in each line the newest value."""
        for line in found:
            self._newest |= line

    def event(self, event: Line) -> None:
        """Count it."""
        if event["event"] in ("submitted", "resumed", *GOES_ON, "done"):  # done: what waits for it may begin
            self._asked = seconds(event)
        elif event["event"] == "started":
            self._starts[event["stage"]] += 1
            self._queue_s += max(0.0, seconds(event) - self._asked) if self._asked else 0.0
            self._asked, self._slow = 0.0, {}
        elif event["event"] == "straggler":
            self._slow[str(event["rank"])] = event
        elif event["event"] == "recovered":
            self._slow.pop(str(event["rank"]), None)
        if event["event"] in ENDS and event["event"] != "done":
            self._stops[str(event.get("cause", event["event"]))] += 1

    def rewind(self, step: int) -> None:
        """It goes back."""
        self.memory.step = min(self.memory.step, step)

    def evaluation(self, found: Line) -> None:
        """Keep the newest."""
        self._evaluated = {key: float(value) for key, value in found.items() if key != "step"}

    def flush(self) -> None:
        """Replace the textfile."""
        if self._textfile is not None:
            self._textfile.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self._textfile), self._registry)

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """What is scraped (prometheus_client's protocol of a collector)."""
        own, values = list(self._labels), list(self._labels.values())

        def gauge(name: str, meaning: str, rows: Sequence[tuple[list[str], float]], *labels: str) -> Metric:
            family = GaugeMetricFamily(f"sluice_{name}", meaning, labels=[*own, *labels])
            for more, value in rows:
                family.add_metric([*values, *more], value)
            return family

        for key, (name, meaning, unit) in _OF_A_STEP.items():
            if (value := self._newest.get(key)) is not None:
                yield gauge(name, meaning, [([], value * unit)])
        if self._steps:
            yield gauge("steps", "Steps of the whole training", [([], self._steps)])
        for key, (name, meaning) in _GROWING.items():
            if key in self._newest:
                family = CounterMetricFamily(f"sluice_{name}", meaning, labels=own)
                family.add_metric(values, self._newest[key])
                yield family
        for name, meaning, label, counts in (
            ("stops", "Attempts that ended before they were done", "cause", self._stops),
            ("attempts", "Attempts that began", "stage", self._starts),
        ):
            family = CounterMetricFamily(f"sluice_{name}", meaning, labels=[*own, label])
            for word, number in counts.items():
                family.add_metric([*values, word], number)
            yield family
        queue = CounterMetricFamily("sluice_queue_seconds", "Time in which jobs waited to begin", labels=own)
        queue.add_metric(values, self._queue_s)
        yield queue
        slow = [([rank, event["host"]], event["ratio"]) for rank, event in self._slow.items()]
        yield gauge("straggler_ratio", "Own time of a slow rank by that of its peers", slow, "rank", "host")
        if self._evaluated:
            rows = [([key], value) for key, value in self._evaluated.items()]
            yield gauge("evaluation", "Figures of the newest evaluation", rows, "figure")
        looks = [one for path in self.run.path.glob("telemetry-*.jsonl") if (one := last_object(path, look))]
        looks = [one for one in looks if time.time() - one["time"] < 120]
        for key, (name, meaning, unit) in _OF_A_HOST.items():
            yield gauge(name, meaning, [([one["host"]], one[key] * unit) for one in looks if key in one], "host")
        gpus = [(one["host"], gpu) for one in looks for gpu in one.get("gpus", ())]
        for key, (name, meaning, unit) in _OF_A_GPU.items():
            rows = [([host, str(gpu["index"])], gpu[key] * unit) for host, gpu in gpus if gpu.get(key) is not None]
            yield gauge(name, meaning, rows, "host", "gpu")
