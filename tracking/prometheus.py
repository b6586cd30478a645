"""Prometheus: the newest step as gauges, on a port of this node's loopback or in a textfile for node_exporter.

Names and units are Prometheus' (https://prometheus.io/docs/practices/naming/): seconds, bytes, ratios; `_total` for
what only grows. Each has the label `run`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pipeline.base.files import last_object, replacing
from pipeline.data.manifest import steps_of
from pipeline.run.attempts import ENDS, GOES_ON
from pipeline.run.directory import Run
from pipeline.run.ledger import event_timestamp
from pipeline.run.machines import SENSORS, look, readings
from slurm.query.status import find_current_stragglers
from tracking.run_reader import Line, Record
from tracking.tracker import Memory, Sink, names

GIGA = 1e9
_MODES = {"private": 0o600, "group": 0o640, "all": 0o644}
"""Modes of the textfile, by who may read it."""
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


class Prometheus(Sink):
    """A collector that knows the newest step, and what ended attempts so far."""

    def __init__(self, run: Run, memory: Memory, record: Record) -> None:
        super().__init__(run, memory, record)
        wanted = run.config.track.prometheus
        assert wanted is not None
        called, sweep = names(run)
        self._textfile = wanted.textfile / f"sluice-{called}.prom" if wanted.textfile else None
        self._textfile_mode = _MODES[wanted.textfile_sharing or run.config.run.sharing]
        self._labels, self._steps = {"run": called, "sweep": sweep or ""}, steps_of(run.config, run.data)
        self._newest: Line = {}
        self._events, self._evaluated = list[Line](), dict[str, float]()
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
        """Keep it, without the lines that it says were lost: they are many."""
        self._events.append({key: value for key, value in event.items() if key not in ("lines", "steps")})

    def _queue_s(self) -> float:
        """How long jobs have waited to begin."""
        asked = found = 0.0
        for event in self._events:
            if event["event"] in ("submitted", "resumed", *GOES_ON, "done"):  # done: what waits for it may begin
                asked = event_timestamp(event)
            elif event["event"] == "started":
                found += max(0.0, event_timestamp(event) - asked) if asked else 0.0
                asked = 0.0
        return found

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
            with replacing(self._textfile) as new:
                new.write_bytes(generate_latest(self._registry))
                new.chmod(self._textfile_mode)

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """What is scraped (prometheus_client's protocol of a collector)."""
        own, values = list(self._labels), list(self._labels.values())

        def family(
            name: str, meaning: str, rows: Iterable[tuple[list[str], float]], *labels: str, grows: bool = False
        ) -> Metric:
            found = (CounterMetricFamily if grows else GaugeMetricFamily)(
                f"sluice_{name}", meaning, labels=[*own, *labels]
            )
            for more, value in rows:
                found.add_metric([*values, *more], value)
            return found

        newest = [(key, *row, False) for key, row in _OF_A_STEP.items()]
        newest += [(key, *row, 1, True) for key, row in _GROWING.items()]
        for key, name, meaning, unit, grows in newest:
            if (value := self._newest.get(key)) is not None:
                yield family(name, meaning, [([], value * unit)], grows=grows)
        if self._steps:
            yield family("steps", "Steps of the whole training", [([], self._steps)])
        ends = [event for event in self._events if event["event"] in ENDS and event["event"] != "done"]
        stops = Counter(str(event.get("cause", event["event"])) for event in ends)
        starts = Counter(event["stage"] for event in self._events if event["event"] == "started")
        for name, meaning, label, counted in (
            ("stops", "Attempts that ended before they were done", "cause", stops),
            ("attempts", "Attempts that began", "stage", starts),
        ):
            yield family(name, meaning, [([word], n) for word, n in counted.items()], label, grows=True)
        yield family("queue_seconds", "Time in which jobs waited to begin", [([], self._queue_s())], grows=True)
        slow = [
            ([str(event["rank"]), event["host"]], event["ratio"]) for event in find_current_stragglers(self._events)
        ]
        yield family("straggler_ratio", "Own time of a slow rank by that of its peers", slow, "rank", "host")
        if self._evaluated:
            found = [([key], value) for key, value in self._evaluated.items()]
            yield family("evaluation", "Figures of the newest evaluation", found, "figure")
        looks = [one for path in self.run.path.glob("telemetry-*.jsonl") if (one := last_object(path, look))]
        looks = [one for one in looks if time.time() - one["time"] < 120]
        for sensor, (meaning, _, name, unit) in SENSORS.items():
            told = [([one["host"], gpu], value * unit) for one in looks for gpu, value in readings(one, sensor)]
            if sensor.startswith("gpus."):
                yield family(name, meaning, told, "host", "gpu")
            else:
                yield family(name, meaning, [([host], value) for (host, _), value in told], "host")
