"""Read the telemetry of a run's nodes: energy, and GPUs that are slow or report errors.

Every few seconds, tracking/telemetry.py appends a line (a sample) to `telemetry-HOST.jsonl` in the run directory. In a
line, `time` is in seconds since 1970, and `gpus` has an object for each GPU of the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.base.files import read_json, read_last_objects
from pipeline.run.lines import is_count, is_number, is_text, read_valid_lines

SENSORS = {
    "gpus.utilization_percent": ("GPU utilisation", "%", "gpu_utilization_ratio", 0.01),
    "gpus.memory_gb": ("GPU memory", "GB", "gpu_memory_used_bytes", 1e9),
    "gpus.power_w": ("GPU power", "W", "gpu_power_watts", 1.0),
    "gpus.temperature_c": ("GPU temperature", "°C", "gpu_temperature_celsius", 1.0),
    "gpus.sm_clock_mhz": ("GPU clock", "MHz", "gpu_sm_clock_hertz", 1e6),
    "cpu_percent": ("CPU", "%", "cpu_utilization_ratio", 0.01),
    "memory_gb": ("host memory", "GB", "host_memory_used_bytes", 1e9),
    "read_mb_per_s": ("read", "MB/s", "host_read_bytes_per_second", 1e6),
    "written_mb_per_s": ("written", "MB/s", "host_written_bytes_per_second", 1e6),
}
"""Key of a line (with the prefix `gpus.` for the values of each GPU) → displayed name, unit, name of the Prometheus
metric, and the factor that converts a value to the unit of Prometheus."""
_SLOW_LIMITS = {"sm_clock_mhz": ("clock", "MHz", 0.85), "utilization_percent": ("utilisation", "%", 0.5)}
"""Key of a GPU value → displayed name, unit, and share. A GPU is slow if its value is below this share of the median of
all GPUs of the same GPU model that the run uses."""
_MIN_MEMORY_SHARE = 0.1
"""A GPU counts as unused if it uses less memory than this share of the largest used memory in its GPU model."""
DEFAULT_SAMPLE_COUNT = 12
"""The approximate number of lines that `list_slow_gpus` reads for each host by default."""
_MIN_SAMPLES = 6
"""The minimum number of samples from which the speed of a GPU is determined."""
_BYTES_PER_LINE = 2730
"""The approximate size of a line of a host with 8 GPUs."""
_PROGRAM_XIDS = (13, 31, 43, 45, 68, 109)
"""Xids (error numbers of the NVIDIA driver) that usually result from an error or the end of a program, not from
hardware. Source: NVIDIA, "XID Errors"."""
_MAX_GAP_S = 300.0
"""If the time between two samples is at least this long, the energy between them is not counted."""


def is_telemetry_line(line: Any) -> bool:
    """Return True if a JSON value is a valid line of telemetry."""
    return (
        isinstance(line, dict)
        and is_number(line.get("time"))
        and is_text(line.get("host"))
        and all(is_number(line.get(key, 0)) for key in ("cpu_percent", "memory_gb", "energy_j"))
        and isinstance(line.get("gpus", []), list)
        and all(isinstance(gpu, dict) and is_count(gpu.get("index")) for gpu in line.get("gpus", []))
        and all(isinstance(gpu.get(key, []), list) for gpu in line.get("gpus", []) for key in ("throttled", "xid"))
    )


def get_sensor_values(line: Mapping[str, Any], sensor: str) -> list[tuple[str, float]]:
    """Return the values of a sensor in a line of telemetry.

    Args:
        line: the line.
        sensor: a key of `SENSORS`.

    Returns:
        Pairs of GPU index and value, or one pair of "" and the value of the host; empty if the line has no value.
    """
    devices = line.get("gpus", ()) if sensor.startswith("gpus.") else [line]
    key = sensor.removeprefix("gpus.")
    return [(str(device.get("index", "")), device[key]) for device in devices if is_number(device.get(key))]


def get_compute_times_file(jobs_dir: Path) -> Path:
    """Return the path of the file with the relative compute times of the hosts (pipeline/resilience/stragglers.py).

    The file maps each host of the newest attempt to the compute time of its ranks, divided by the median compute time
    of their peers, the ranks of the same pipeline-parallel stage.
    """
    return jobs_dir / "train/own-times.json"


def read_compute_times(jobs_dir: Path) -> dict[str, float]:
    """Return the content of :func:`get_compute_times_file`; empty if the file is missing or malformed."""
    file = get_compute_times_file(jobs_dir)
    ratios = read_json(file) if file.exists() else {}
    return ratios if isinstance(ratios, dict) and all(map(is_number, ratios.values())) else {}


def sum_gpu_energy_kwh(run_dir: Path, spans: Sequence[tuple[float, float]]) -> float | None:
    """Return the energy that the GPUs used, in kWh; None if no power was measured.

    The power between two samples of a host is estimated as the mean of the two values.

    Args:
        run_dir: the run directory.
        spans: pairs of start and end time in seconds since 1970. The energy before a sample counts if the sample is
            within one of these time spans.
    """
    joules = 0.0
    is_measured = False
    for file in run_dir.glob("telemetry-*.jsonl"):
        previous: tuple[float, float] | None = None
        for line in read_valid_lines(file, is_telemetry_line):
            powers = get_sensor_values(line, "gpus.power_w")
            if not powers:
                continue
            is_measured = True
            time = line["time"]
            power_w = sum(value for _, value in powers)
            if previous is not None:
                duration_s = time - previous[0]
                if 0 < duration_s < _MAX_GAP_S and any(begin <= time <= end for begin, end in spans):
                    joules += duration_s * (power_w + previous[1]) / 2
            previous = (time, power_w)
    return joules / 3.6e6 if is_measured else None  # 3.6e6 J are 1 kWh


def list_slow_gpus(
    run_dir: Path, begin: float, end: float = inf, max_samples: int | None = DEFAULT_SAMPLE_COUNT
) -> list[str]:
    """Return descriptions of the GPUs that are slow or report errors, worst first.

    A GPU is slow if the median of a value is too low, compared with all GPUs of the same GPU model that the run uses
    (`_SLOW_LIMITS`). Errors are Xids since the start of the job and uncorrected memory errors since the driver was
    loaded. A GPU that no longer reports anything is listed even if it counts as unused.

    Args:
        run_dir: the run directory.
        begin: start of the time span in seconds since 1970.
        end: end of the time span in seconds since 1970.
        max_samples: the approximate number of lines to read for each host, from the end of its file; None for all
            lines.
    """
    samples = _read_gpu_samples(run_dir, begin, end, max_samples)
    # GPU model → (host, index of the GPU) → key → median
    medians_by_model: dict[str, dict[tuple[str, int], dict[str, float]]] = defaultdict(dict)
    for gpu, gpu_samples in samples.items():
        gpu_model = next((str(sample["name"]) for sample in gpu_samples if "name" in sample), "")
        medians_by_model[gpu_model][gpu] = _compute_medians(gpu_samples)
    descriptions: list[tuple[float, str]] = []
    for medians_by_gpu in medians_by_model.values():
        max_memory_gb = max(medians.get("memory_gb", 0.0) for medians in medians_by_gpu.values())
        used_gpus = {
            gpu: medians
            for gpu, medians in medians_by_gpu.items()
            if medians.get("memory_gb", 0.0) >= _MIN_MEMORY_SHARE * max_memory_gb
        }
        model_medians = {
            key: median([medians[key] for medians in used_gpus.values() if key in medians] or [0.0])
            for key in _SLOW_LIMITS
        }
        for gpu in medians_by_gpu:
            newest = samples[gpu][0]
            is_lost = newest.keys() <= {"index", "xid"}  # these are known even if no sensor of the GPU can be read
            if is_lost or gpu in used_gpus:
                severity, problems = _find_gpu_problems(newest, used_gpus.get(gpu, {}), model_medians, is_lost)
                if problems:
                    host, index = gpu
                    descriptions.append((severity, f"GPU {index} on {host}: {', '.join(problems)}"))
    return [description for _, description in sorted(descriptions)]


def _read_gpu_samples(
    run_dir: Path, begin: float, end: float, max_samples: int | None
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Return the samples of each GPU, newest first. The key of a GPU is its host and its index on this host.

    The arguments are the same as for :func:`list_slow_gpus`.
    """
    samples: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for file in run_dir.glob("telemetry-*.jsonl"):
        if max_samples is None:
            valid_lines = read_valid_lines(file, is_telemetry_line)
            newest_first = reversed([line for line in valid_lines if begin <= line["time"] <= end])
        else:
            newest_first = read_last_objects(file, is_telemetry_line, max_samples * _BYTES_PER_LINE)
        for line in takewhile(lambda line: line["time"] >= begin, newest_first):
            if line["time"] <= end:
                for gpu in line.get("gpus", ()):
                    samples[line["host"], gpu["index"]].append(gpu)
    return samples


def _compute_medians(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the medians of the used memory, clock and utilisation of a GPU.

    Medians of clock and utilisation need `_MIN_SAMPLES` samples. One sample of the used memory is enough, because it
    only shows whether the run uses the GPU.
    """
    medians: dict[str, float] = {}
    for key in ("memory_gb", *_SLOW_LIMITS):
        values = [sample[key] for sample in samples if is_number(sample.get(key))]
        if len(values) >= (1 if key == "memory_gb" else _MIN_SAMPLES):
            medians[key] = median(values)
    return medians


def _find_gpu_problems(
    newest: Mapping[str, Any], medians: Mapping[str, float], model_medians: Mapping[str, float], is_lost: bool
) -> tuple[float, list[str]]:
    """Return the problems of one GPU.

    Args:
        newest: the newest sample of the GPU.
        medians: the medians of the GPU's values; empty if the run does not use the GPU.
        model_medians: the medians over all GPUs of the same GPU model that the run uses.
        is_lost: whether the GPU no longer reports anything.

    Returns:
        The severity, from 0 (worst) to 1, and a description of each problem.
    """
    xids = newest.get("xid") or ()
    errors = newest.get("ecc_errors")
    problems = [f"Xid {number}" for number in xids]
    if is_lost:
        problems.append("no longer reports anything")
    if errors:
        problems.append(f"{errors} uncorrected memory errors")
    is_hardware_error = is_lost or bool(errors) or any(number not in _PROGRAM_XIDS for number in xids)
    severity = 0.0 if is_hardware_error else 1.0
    for key, (name, unit, share) in _SLOW_LIMITS.items():
        value = medians.get(key, inf)
        if value < share * model_medians[key]:
            reasons = f" ({', '.join(map(str, newest['throttled']))})" if newest.get("throttled") else ""
            problems.append(f"{name} {value:,.0f} {unit}, usual: {model_medians[key]:,.0f} {unit}{reasons}")
            severity = min(severity, value / model_medians[key])
    return severity, problems
