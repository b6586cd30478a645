"""Sample the telemetry of one node every few seconds: GPUs, CPUs, memory and disks, in `telemetry-HOST.jsonl`.

One process runs on each node, in a Slurm job step that overlaps the step of the ranks (slurm/supervise/background.py).
GPUs are read through NVML, with NVIDIA's package nvidia-ml-py. Values that a GPU does not support are left out. Xids
are the error codes of NVIDIA's driver; NVML reports them as events. A line has about 300 bytes plus 200 bytes for each
GPU. A node with 8 GPUs and a sample every 10 s therefore writes about 16 MB per day.
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
_THROTTLE_REASONS = {
    "SwPowerCap": "power cap", "HwSlowdown": "hardware slowdown", "SwThermalSlowdown": "heat",
    "HwThermalSlowdown": "heat, by hardware", "HwPowerBrakeSlowdown": "power brake", "SyncBoost": "sync boost",
}  # fmt: skip
"""Descriptions of the reasons for which a GPU reduces its clock, by the suffix of NVML's constant
`nvmlClocksEventReason…` (NVML API reference)."""
_MAX_XIDS = 100
"""Maximum number of events that are read in one call."""


class GpuSampler:
    """Reads the GPUs that NVML lists. If the library or the driver is missing, there are no GPUs."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self.event_sets: dict[int, Any] = {}
        """NVML's event set of each GPU that supports Xid events, by the index of the GPU."""
        self._xids: dict[int, list[int]] = defaultdict(list)
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml
                count = pynvml.nvmlDeviceGetCount()
                self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        for index, gpu in enumerate(self._handles):
            with suppress(self._nvml.NVMLError):  # not every GPU and driver supports Xid events
                # one set per GPU, because the event of a lost GPU does not name its device
                event_set = self._nvml.nvmlEventSetCreate()
                self._nvml.nvmlDeviceRegisterEvents(gpu, self._nvml.nvmlEventTypeXidCriticalError, event_set)
                self.event_sets[index] = event_set

    def read_xids(self, index: int) -> list[int]:
        """Return the distinct Xids of a GPU since this process started.

        Call this method often: if several events are waiting, NVML returns only the Xid of the last event.
        """
        with suppress(self._nvml.NVMLError):  # NVML_ERROR_TIMEOUT if no event is waiting
            for _ in range(_MAX_XIDS):
                # the timeout of 0 ms means that the call does not wait for an event
                number = int(self._nvml.nvmlEventSetWait_v2(self.event_sets[index], 0).eventData)
                self._xids[index] += [number] if number not in self._xids[index] else []
        return self._xids[index]

    def sample(self) -> list[dict[str, Any]]:
        """Return a mapping of values for each GPU."""
        return [{"index": index, **dict(self._read_values(index, gpu))} for index, gpu in enumerate(self._handles)]

    def _read_values(self, index: int, gpu: Any) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the sensors that this GPU supports. `gpu` is the handle of NVML."""
        nvml = self._nvml
        readers: dict[str, Callable[[], Any]] = {
            "name": lambda: nvml.nvmlDeviceGetName(gpu),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "memory_gb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIGA, 3),
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "throttled": lambda: self._throttle_reasons(gpu),
            "ecc_errors": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        }
        if index in self.event_sets:
            readers["xid"] = lambda: self.read_xids(index)
        for name, read in readers.items():
            with suppress(nvml.NVMLError):  # this GPU does not support the value
                yield name, read()

    def _throttle_reasons(self, gpu: Any) -> list[str]:
        """Return the reasons for which the clock of a GPU is reduced now."""
        reasons = self._nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        # older versions of pynvml name the constants nvmlClocksThrottleReason…
        bits = {
            description: getattr(self._nvml, f"nvmlClocksEventReason{name}", 0)
            or getattr(self._nvml, f"nvmlClocksThrottleReason{name}", 0)
            for name, description in _THROTTLE_REASONS.items()
        }
        return [description for description, bit in bits.items() if reasons & bit]


class HostSampler:
    """Reads the use of this node's CPUs, memory and disks since the previous sample."""

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._psutil.cpu_percent()  # the first call only begins the measurement, and its result is meaningless
        self._previous = self._read_disk_counters()

    def _read_disk_counters(self) -> tuple[float, int, int]:
        """Return the monotonic time, and the bytes read and written so far."""
        disk = self._psutil.disk_io_counters()  # None on a machine without disks
        return time.monotonic(), getattr(disk, "read_bytes", 0), getattr(disk, "write_bytes", 0)

    def sample(self) -> dict[str, float]:
        """Return CPU use in per cent, used memory in GB, and disk throughput in MB/s."""
        previous = self._previous
        current = self._read_disk_counters()
        self._previous = current
        elapsed_s = max(current[0] - previous[0], 1e-3)  # avoids a division by zero
        memory = self._psutil.virtual_memory()
        return {
            "cpu_percent": self._psutil.cpu_percent(),
            "memory_gb": round((memory.total - memory.available) / GIGA, 3),
            "read_mb_per_s": round((current[1] - previous[1]) / elapsed_s / 1e6, 3),
            "written_mb_per_s": round((current[2] - previous[2]) / elapsed_s / 1e6, 3),
        }


def sample_telemetry(run: Run, every_s: float, flag: StopFlag) -> int:
    """Append a sample to the telemetry file of this node every `every_s` seconds until a signal arrives.

    Returns:
        The exit code 0.
    """
    host = HostSampler()
    gpus = GpuSampler()
    file = run.path / f"telemetry-{HOST}.jsonl"
    next_sample_time = time.monotonic()
    while not flag:
        next_sample_time += every_s
        while not flag and time.monotonic() < next_sample_time:
            time.sleep(min(0.5, max(0.0, next_sample_time - time.monotonic())))
            # the sampler keeps new Xids for the next sample; NVML would return only the last of several waiting events
            for index in gpus.event_sets:
                gpus.read_xids(index)
        line: dict[str, Any] = {"time": round(time.time(), 3), "host": HOST, **host.sample()}
        if gpu_values := gpus.sample():
            line["gpus"] = gpu_values
        append_line(file, json.dumps(line))
    return 0
