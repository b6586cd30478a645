"""What nodes did while a run was on them: `telemetry-HOST.jsonl` in the run directory, a line every few seconds.

tracking/telemetry.py writes it. `time` is in seconds since 1970, `gpus` a row for each GPU of the host.
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
"""Figures of a line, those of a GPU behind `gpus.`: name, unit, Prometheus' name, and what one is in its unit."""
_BEHIND = {"sm_clock_mhz": ("clock", "MHz", 0.85), "utilization_percent": ("utilisation", "%", 0.5)}
"""Figures by which a GPU falls behind: name and unit, and the share of what is usual that is too little."""
_IN_USE = 0.1
"""With less than this share of the memory that the fullest of its kind uses, a GPU is taken for none of the job's."""
DEFAULT_SAMPLE_COUNT, _LEAST_LOOKS, _LINE = 12, 6, 2730
"""Lines of a host that are read by default; fewer than the second say nothing of how fast a GPU is; bytes of one of 8
GPUs."""
_OF_PROGRAMS = (13, 31, 43, 45, 68, 109)
"""Xids that a program causes, or that follow its end, as a rule (NVIDIA, XID Errors)."""


def is_telemetry_line(line: Any) -> bool:
    """Whether it is such a line."""
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
    """What a line says by a sensor: a value for each GPU, by its number, or one of the host, or none."""
    rows = line.get("gpus", ()) if sensor.startswith("gpus.") else [line]
    key = sensor.removeprefix("gpus.")
    return [(str(row.get("index", "")), row[key]) for row in rows if is_number(row.get(key))]


def get_compute_times_file(jobs_dir: Path) -> Path:
    """Return the path of the file in which a training compares its hosts (pipeline/resilience/stragglers.py).

    The file maps each host of the newest attempt to the mean compute time of its ranks, as a multiple of the median.
    """
    return jobs_dir / "train/own-times.json"


def read_compute_times(jobs_dir: Path) -> dict[str, float]:
    """Return the content of that file; empty if it is missing or malformed."""
    file = get_compute_times_file(jobs_dir)
    ratios = read_json(file) if file.exists() else {}
    return ratios if isinstance(ratios, dict) and all(map(is_number, ratios.values())) else {}


def sum_gpu_energy_kwh(run: Path, spans: Sequence[tuple[float, float]]) -> float | None:
    """What the GPUs took within these spans of time (seconds since 1970); None where no power was measured.

    Between two looks of a node the mean of both counts; a gap of more than 5 minutes counts nothing.
    """
    joules, measured = 0.0, False
    for file in run.glob("telemetry-*.jsonl"):
        before: tuple[float, float] | None = None
        for line in read_valid_lines(file, is_telemetry_line):
            if not (watts := get_sensor_values(line, "gpus.power_w")):
                continue
            measured, now = True, (line["time"], sum(value for _, value in watts))
            if before and 0 < now[0] - before[0] < 300 and any(begin <= now[0] <= end for begin, end in spans):
                joules += (now[0] - before[0]) * (now[1] + before[1]) / 2
            before = now
    return joules / 3.6e6 if measured else None


def list_slow_gpus(run: Path, begin: float, end: float = inf, looks: int | None = DEFAULT_SAMPLE_COUNT) -> list[str]:
    """The GPUs that fall behind those of their model between two times (seconds since 1970), in words, worst first.

    A GPU does where its median of a figure is below the share in `_BEHIND` of the median of all that are in use. Told
    of those, too: Xids since the job began, uncorrected memory errors since the driver was loaded; and of any that it
    says nothing. `looks`: of each host so many lines are read, the last ones; None: all.
    """
    rows_of: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)  # the newest first
    for file in run.glob("telemetry-*.jsonl"):
        if looks is None:
            told = reversed(
                [line for line in read_valid_lines(file, is_telemetry_line) if begin <= line["time"] <= end]
            )
        else:
            told = read_last_objects(file, is_telemetry_line, looks * _LINE)
        for line in takewhile(lambda line: line["time"] >= begin, told):
            if line["time"] <= end:
                for gpu in line.get("gpus", ()):
                    rows_of[line["host"], gpu["index"]].append(gpu)
    kinds: dict[str, dict[tuple[str, int], Mapping[str, float]]] = defaultdict(dict)
    for gpu, rows in rows_of.items():
        known = {key: [row[key] for row in rows if is_number(row.get(key))] for key in ("memory_gb", *_BEHIND)}
        enough = {key: 1 if key == "memory_gb" else _LEAST_LOOKS for key in known}
        medians = {key: median(values) for key, values in known.items() if len(values) >= enough[key]}
        kinds[next((str(row["name"]) for row in rows if "name" in row), "")][gpu] = medians
    found = []
    for kind in kinds.values():
        most = max(one.get("memory_gb", 0.0) for one in kind.values())
        used = {gpu: one for gpu, one in kind.items() if one.get("memory_gb", 0.0) >= _IN_USE * most}
        usual = {key: median([one[key] for one in used.values() if key in one] or [0.0]) for key in _BEHIND}
        for (host, index), figures in kind.items():
            newest = rows_of[host, index][0]
            lost = newest.keys() <= {"index", "xid"}
            if not lost and (host, index) not in used:
                continue
            xids, errors = newest.get("xid") or (), newest.get("ecc_errors")
            words = [f"Xid {number}" for number in xids] + ["says nothing any more"] * lost
            words += [f"{errors} uncorrected memory errors"] if errors else []
            worst = 0.0 if lost or errors or any(number not in _OF_PROGRAMS for number in xids) else 1.0
            for key, (name, unit, share) in _BEHIND.items():
                if (host, index) in used and figures.get(key, inf) < share * usual[key]:
                    why = f" ({', '.join(map(str, newest['throttled']))})" if newest.get("throttled") else ""
                    words.append(f"{name} {figures[key]:,.0f} {unit} where {usual[key]:,.0f} is usual{why}")
                    worst = min(worst, figures[key] / usual[key])
            if words:
                found.append((worst, f"GPU {index} on {host}: {', '.join(words)}"))
    return [words for _, words in sorted(found)]
