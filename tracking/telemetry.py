"""The machine: what GPUs, CPUs, memory and disk of one node do, every few seconds, in `telemetry-HOST.jsonl`.

One process per node, in a step of its own that overlaps the ranks' (tracking/sidecar.py). GPUs through NVML, by
NVIDIA's own nvidia-ml-py; figures that a card does not give are left out. Xids, the driver's reports of errors, come as
NVML's events. A line is some 300 bytes and 200 more for
each GPU: 7 MB a day and node of 8 at 10 s.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pipeline.base.files import append_line
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from tracking.tracker import HOST

GIGA = 1e9
_THROTTLED = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat, by hardware", "HwPowerBrakeSlowdown": "power brake", "SyncBoost": "sync boost",
}  # fmt: skip
"""Names in nvmlClocksEventReasons* that say that a clock is lower than it could be (NVML API reference)."""
_MOST_XIDS = 100
"""So many are taken in at a time."""


class Gpus:
    """The GPUs that NVML shows; none without the library, or a driver."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self.events: dict[int, Any] = {}
        self._xids: dict[int, list[int]] = defaultdict(list)
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml
                count = pynvml.nvmlDeviceGetCount()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        for index, gpu in enumerate(self._handles):
            with suppress(self._nvml.NVMLError):  # not every card, nor every driver, tells them
                events = self._nvml.nvmlEventSetCreate()  # one for each: a GPU that is lost cannot say which it was
                self._nvml.nvmlDeviceRegisterEvents(gpu, self._nvml.nvmlEventTypeXidCriticalError, events)
                self.events[index] = events

    def xids(self, index: int) -> list[int]:
        """The Xids of a GPU since this process began, each number once; of several that wait NVML gives only the
        last one's, so ask often."""
        with suppress(self._nvml.NVMLError):  # as a rule: none came within 0 ms
            for _ in range(_MOST_XIDS):
                number = int(self._nvml.nvmlEventSetWait_v2(self.events[index], 0).eventData)
                self._xids[index] += [number] if number not in self._xids[index] else []
        return self._xids[index]

    def read(self) -> list[dict[str, Any]]:
        """A row for each."""
        return [{"index": index, **dict(self._figures(index, gpu))} for index, gpu in enumerate(self._handles)]

    def _figures(self, index: int, gpu: Any) -> Iterator[tuple[str, Any]]:
        """What this GPU says."""
        nvml = self._nvml
        ask: dict[str, Callable[[], Any]] = {
            "name": lambda: nvml.nvmlDeviceGetName(gpu),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_gb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIGA, 3),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "throttled": lambda: self._throttled(gpu),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        if index in self.events:
            ask["xid"] = lambda: self.xids(index)
        for name, question in ask.items():
            with suppress(nvml.NVMLError):  # not every card has it
                yield name, question()

    def _throttled(self, gpu: Any) -> list[str]:
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        bits = {
            words: getattr(self._nvml, f"nvmlClocksEventReason{name}", 0)
            or getattr(self._nvml, f"nvmlClocksThrottleReason{name}", 0)
            for name, words in _THROTTLED.items()
        }
        return [words for words, bit in bits.items() if reasons & bit]


class Machine:
    """CPUs, memory and disks of this node, since the look before."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._psutil.cpu_percent()
        self._before = self._moved()

    def _moved(self) -> tuple[float, int, int]:
        disk = self._psutil.disk_io_counters()
        return time.monotonic(), getattr(disk, "read_bytes", 0), getattr(disk, "write_bytes", 0)

    def read(self) -> dict[str, float]:
        """Shares, GB and MB/s."""
        before, now = self._before, self._moved()
        self._before, seconds = now, max(now[0] - before[0], 1e-3)
        memory = self._psutil.virtual_memory()
        return {
            "cpu_percent": self._psutil.cpu_percent(),
            "memory_gb": round((memory.total - memory.available) / GIGA, 3),
            "read_mb_per_s": round((now[1] - before[1]) / seconds / 1e6, 3),
            "written_mb_per_s": round((now[2] - before[2]) / seconds / 1e6, 3),
        }


def sample(run: Run, every_s: float, flag: StopFlag) -> int:
    """Write a line every so many seconds until a signal comes; the exit code."""
    machine, gpus, file = Machine(), Gpus(), run.path / f"telemetry-{HOST}.jsonl"
    due = time.monotonic()
    while not flag:
        due += every_s
        while not flag and time.monotonic() < due:
            time.sleep(min(0.5, max(0.0, due - time.monotonic())))
            for index in gpus.events:
                gpus.xids(index)
        line: dict[str, Any] = {"time": round(time.time(), 3), "host": HOST, **machine.read()}
        if found := gpus.read():
            line["gpus"] = found
        append_line(file, json.dumps(line))
    return 0
