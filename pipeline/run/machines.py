"""What nodes did while a run was on them: `telemetry-HOST.jsonl` in the run directory, a line every few seconds.

slurm/track/telemetry.py writes it. `time` is in seconds since 1970, `gpus` a row for each GPU of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.run import lines


def look(line: Any) -> bool:
    """Whether it is such a line."""
    return (
        isinstance(line, dict)
        and lines.number(line.get("time"))
        and lines.text(line.get("host"))
        and all(lines.number(line.get(key, 0)) for key in ("cpu_percent", "memory_gb", "energy_j"))
        and isinstance(line.get("gpus", []), list)
        and all(isinstance(gpu, dict) and lines.count(gpu.get("index")) for gpu in line.get("gpus", []))
    )


def energy_kwh(run: Path, spans: Sequence[tuple[float, float]]) -> float | None:
    """What the GPUs took within these spans of time (seconds since 1970); None where no power was measured.

    Between two looks of a node the mean of both counts; a gap of more than 5 minutes counts nothing.
    """
    joules, measured = 0.0, False
    for file in run.glob("telemetry-*.jsonl"):
        before: tuple[float, float] | None = None
        for line in lines.read(file, look):
            watts = [gpu["power_w"] for gpu in line.get("gpus", ()) if lines.number(gpu.get("power_w"))]
            if not watts:
                continue
            measured, now = True, (line["time"], sum(watts))
            if before and 0 < now[0] - before[0] < 300 and any(begin <= now[0] <= end for begin, end in spans):
                joules += (now[0] - before[0]) * (now[1] + before[1]) / 2
            before = now
    return joules / 3.6e6 if measured else None
