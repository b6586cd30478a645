"""Tests of the telemetry of nodes with a fake NVML, and of the detection of slow GPUs."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.signals import StopFlag
from pipeline.run.directory import Run
from pipeline.run.machines import list_slow_gpus, sum_gpu_energy_kwh
from slurm.query.status import print_status
from tests.support.events import write_event
from tests.support.fake_run import read_json_lines
from tests.support.tiny import make_run
from tracking import telemetry
from tracking.report import print_report
from tracking.telemetry import GpuSampler


class NVMLError(Exception):
    """The error of NVML: a value is not supported, the GPU is lost, or no event is pending."""


class FakeNvml(SimpleNamespace):
    """The NVML library of a node. A test sets the values of its GPUs; missing values and lost GPUs raise an error."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    # older versions of pynvml have the constant ...ThrottleReason... instead of ...EventReason...; here, one of each
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, cards: int) -> None:
        # as NVML returns them: bytes used, milliwatts, degrees Celsius, MHz
        values = {"name": "NVIDIA H200", "use": 97, "used": 120e9, "power": 651_500, "temperature": 66, "clock": 1785}
        self.cards: list[dict[str, Any]] = [{**values, "throttle_bits": 0, "xids": []} for _ in range(cards)]
        self.event_sets: list[int | None] = []  # the GPU that is registered in each event set

    def __getattr__(self, name: str) -> Callable[..., Any]:
        key = {
            "nvmlDeviceGetName": "name", "nvmlDeviceGetPowerUsage": "power", "nvmlDeviceGetTemperature": "temperature",
            "nvmlDeviceGetClockInfo": "clock", "nvmlDeviceGetCurrentClocksEventReasons": "throttle_bits",
            "nvmlDeviceGetTotalEccErrors": "ecc",
        }.get(name)  # fmt: skip
        if key is None:
            raise AttributeError(name)
        return lambda card, *_: self.read_value(card, key)

    def read_value(self, card: int, key: str) -> Any:
        """Return a value of a GPU."""
        if key not in self.cards[card] or self.cards[card].get("lost"):
            raise NVMLError(key)
        return self.cards[card][key]

    def nvmlInit(self) -> None:
        """Succeed, as with a driver."""

    def nvmlDeviceGetCount(self) -> int:
        """Return the number of GPUs."""
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """Return the handle of a GPU."""
        return index

    def nvmlDeviceGetUtilizationRates(self, card: int) -> SimpleNamespace:
        """Return the utilization in per cent."""
        return SimpleNamespace(gpu=self.read_value(card, "use"))

    def nvmlDeviceGetMemoryInfo(self, card: int) -> SimpleNamespace:
        """Return the used memory in bytes."""
        return SimpleNamespace(used=self.read_value(card, "used"))

    def nvmlEventSetCreate(self) -> int:
        """Return an event set without GPUs."""
        self.event_sets.append(None)
        return len(self.event_sets) - 1

    def nvmlDeviceRegisterEvents(self, card: int, kinds: int, events: int) -> None:
        """Register a GPU; raise an error if it supports no events."""
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.read_value(card, "xids")
        self.event_sets[events] = card

    def nvmlEventSetWait_v2(self, events: int, milliseconds: int) -> SimpleNamespace:
        """Return the next event; raise an error if there is none."""
        card = self.event_sets[events]
        assert card is not None and milliseconds == 0, "the call must not wait"
        pending = self.cards[card]["xids"]
        if not pending:
            raise NVMLError("timeout")
        return SimpleNamespace(eventData=pending.pop(0))


def install_fake_nvml(patch: pytest.MonkeyPatch, cards: int) -> FakeNvml:
    """Make `import pynvml` return a fake NVML with this number of GPUs."""
    fake_nvml = FakeNvml(cards)
    patch.setitem(sys.modules, "pynvml", cast(Any, fake_nvml))
    return fake_nvml


def test_a_sample_has_the_values_that_a_gpu_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml = install_fake_nvml(monkeypatch, 2)
    fake_nvml.cards[0]["throttle_bits"] = 0x24  # the power cap and the thermal slowdown
    del fake_nvml.cards[0]["xids"]
    fake_nvml.cards[1] |= {"ecc": 2, "xids": [31, 79, 31]}
    values = {"name": "NVIDIA H200", "utilization_percent": 97, "memory_gb": 120.0, "power_w": 651.5}
    values |= {"temperature_c": 66, "sm_clock_mhz": 1785}
    sampler = GpuSampler()
    assert sampler.sample() == [
        {"index": 0, **values, "throttled": ["power cap", "heat"]},
        {"index": 1, **values, "throttled": [], "ecc_errors": 2, "xid": [31, 79]},
    ]
    fake_nvml.cards[1] |= {"lost": True, "xids": [154]}
    assert sampler.sample()[1] == {"index": 1, "xid": [31, 79, 154]}


def test_an_xid_between_two_samples_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If several events are pending, NVML returns only the last one. Events are therefore read between samples."""
    fake_nvml = install_fake_nvml(monkeypatch, 1)
    flag = StopFlag()
    run = make_run(tmp_path)
    monkeypatch.setattr(telemetry, "HOST", "n1")
    sampler = threading.Thread(target=telemetry.sample_telemetry, args=(run, 1.0, flag))
    sampler.start()
    time.sleep(0.1)
    fake_nvml.cards[0]["xids"].append(63)
    time.sleep(0.6)
    assert fake_nvml.cards[0]["xids"] == [] and not (run.path / "telemetry-n1.jsonl").exists()
    while sampler.is_alive() and not (run.path / "telemetry-n1.jsonl").exists():
        time.sleep(0.05)
    flag.signal_time = time.monotonic()
    flag.reason = "SIGTERM"
    sampler.join(20)
    assert read_json_lines(run.path / "telemetry-n1.jsonl")[0]["gpus"][0]["xid"] == [63]


class Node:
    """A node with a fake NVML, which writes a line of telemetry every `every_s` seconds."""

    every_s = 10.0

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, host: str, cards: int = 4) -> None:
        self.folder = folder
        self.patch = patch
        self.host = host
        self.fake = FakeNvml(cards)

    def write_samples(self, count: int = 12, age_s: float = 0.0) -> None:
        """Append `count` lines as telemetry.py writes them. The last one is `age_s` seconds old."""
        self.patch.setitem(sys.modules, "pynvml", cast(Any, self.fake))
        sampler = GpuSampler()
        last_time = time.time() - age_s
        with open(self.folder / f"telemetry-{self.host}.jsonl", "a") as file:
            for index in range(count):
                line = {
                    "time": last_time - self.every_s * (count - 1 - index),
                    "host": self.host,
                    "cpu_percent": 9.0,
                    "gpus": sampler.sample(),
                }
                file.write(json.dumps(line) + "\n")


def find_slow_gpus(folder: Path, last_s: float = 120.0) -> list[str]:
    """Return the descriptions of GPUs that were slow in the last `last_s` seconds."""
    return list_slow_gpus(folder, time.time() - last_s)


def test_a_slow_gpu_is_compared_with_gpus_of_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node1, node2, t4_node = (Node(tmp_path, monkeypatch, host) for host in ("n1", "n2", "t4"))
    for card in t4_node.fake.cards:  # equal to each other, and slower than the other model
        card |= {"name": "Tesla T4", "clock": 900, "used": 10e9}
    node2.fake.cards[3] |= {"use": 0, "used": 0.5e9, "clock": 345, "ecc": 7, "xids": [31, 94]}  # not used by the job
    node2.fake.cards[2]["clock"] = 1600  # within the normal range
    node1.fake.cards[1] |= {"clock": 1200, "throttle_bits": 0x20}
    node1.fake.cards[2]["use"] = 40
    node2.fake.cards[0] |= {"ecc": 3, "xids": [94]}
    for node in (node1, node2, t4_node):
        node.write_samples()
    assert find_slow_gpus(tmp_path) == [
        "GPU 0 on n2: Xid 94, 3 uncorrected memory errors",
        "GPU 2 on n1: utilisation 40 %, usual: 97 %",
        "GPU 1 on n1: clock 1,200 MHz, usual: 1,785 MHz (heat)",
    ]
    node2.fake.cards[1]["lost"] = True
    node2.write_samples(1)
    node2.fake.cards[3]["lost"] = True
    node2.write_samples(1)
    descriptions = [description for description in find_slow_gpus(tmp_path) if " on n2: " in description]
    # the lost GPUs are also listed
    assert {description.split(":")[0] for description in descriptions} >= {"GPU 1 on n2", "GPU 3 on n2"}


def test_xids_that_programs_cause_are_listed_after_a_slow_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs cause Xid 13 and 45; the end of a job causes Xid 45 on all its GPUs. Xid 48 is a fault of the GPU."""
    node = Node(tmp_path, monkeypatch, "n1", 8)
    for card in node.fake.cards:
        card["xids"] = [45, 13]
    node.fake.cards[7]["clock"] = 1000
    node.fake.cards[6]["xids"] = [45, 48]
    node.write_samples(7)
    gpus = [description.split(":")[0] for description in find_slow_gpus(tmp_path)]  # the worst first
    assert gpus[:3] == ["GPU 6 on n1", "GPU 7 on n1", "GPU 0 on n1"]


def test_a_single_slow_sample_and_old_samples_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path, monkeypatch, "n1")
    node.fake.cards[0]["clock"] = 600
    node.write_samples(10, age_s=200)
    node.fake.cards[0]["clock"] = 1785
    node.write_samples(11)
    node.fake.cards[1]["clock"] = 600
    node.write_samples(1)
    assert find_slow_gpus(tmp_path) == []
    assert find_slow_gpus(tmp_path, 1000) == [], "the median of 22 samples is normal"
    assert find_slow_gpus(tmp_path, 5) == [], "one sample is too few"


def test_a_gpu_is_reported_as_slow_only_with_six_or_more_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sample_count, slow_gpus in ((5, 0), (6, 1)):
        (folder := tmp_path / str(sample_count)).mkdir()
        node = Node(folder, monkeypatch, "n1")
        node.fake.cards[1]["clock"] = 600
        node.write_samples(sample_count)
        assert len(find_slow_gpus(folder)) == slow_gpus


def test_only_the_last_32_kib_of_each_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(64):
        node = Node(tmp_path, monkeypatch, f"n{n:02}", 8)
        if n == 17:
            node.fake.cards[5]["clock"] = 1100
        node.write_samples(13)
    long_file = tmp_path / "telemetry-n17.jsonl"
    long_file.write_text("x" * 10_000_000 + "\n" + long_file.read_text())
    read_sizes: list[int] = []
    with count_reads(monkeypatch, read_sizes):
        (description,) = find_slow_gpus(tmp_path)
    assert "GPU 5 on n17" in description and "1,100 MHz" in description and "1,785" in description
    assert len(read_sizes) == 64 and max(read_sizes) <= 1 << 15


@contextmanager
def count_reads(patch: pytest.MonkeyPatch, read_sizes: list[int]) -> Iterator[None]:
    """Append the size of each read from a regular file to `read_sizes`."""
    from pipeline.base import files

    open_regular_file = files.open_regular_file

    class CountingReader(io.BufferedReader):
        """Append the size of each read."""

        def read(self, size: int | None = -1, /) -> bytes:
            content = super().read(size)
            read_sizes.append(len(content))
            return content

    with patch.context() as patched:
        patched.setattr(files, "open_regular_file", lambda path: CountingReader(open_regular_file(path).detach()))
        yield


@pytest.mark.parametrize(
    "malformed", [{"xid": 7}, {"throttled": "x"}, {"name": {}}, {"sm_clock_mhz": "fast"}, {"xid": ["x"]}]
)
def test_malformed_lines_raise_no_error(tmp_path: Path, malformed: dict[str, Any]) -> None:
    rows = [{"index": n, "name": "x", "sm_clock_mhz": 1000, "memory_gb": 1} for n in range(3)]
    lines = [{"time": time.time(), "host": "n1", "gpus": [{**rows[0], **malformed}, *rows[1:]]}, {"time": None}, 3]
    (tmp_path / "telemetry-n1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    find_slow_gpus(tmp_path)


@pytest.fixture
def running_run(tmp_path: Path) -> Iterator[Run]:
    """Yield a run with a running train stage: this process holds the lock."""
    run = make_run(tmp_path)
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "ready", "train", step=0)
    yield run
    os.close(lock)


def test_status_and_report_name_slow_gpus_of_a_running_attempt(
    running_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(running_run.path, monkeypatch, "n1", 8)
    for card in node.fake.cards[3:]:
        card["clock"] = 100  # five of eight GPUs: if these samples counted, the median would change
    node.write_samples(3, age_s=60)
    assert "GPU" not in print_to_text(print_status, running_run), "the samples of the previous attempt must not count"
    for card in node.fake.cards[3:]:
        card["clock"] = 1785
    for card in node.fake.cards[:4]:
        card |= {"clock": 1785, "xids": [79]}
    time.sleep(0.05)
    node.write_samples(1)
    status = print_to_text(print_status, running_run)
    assert all(f"GPU {index} on n1: Xid 79" in status for index in range(3))
    assert "1 more GPU" in status and "GPU 3" not in status
    assert "GPU 0 on n1: Xid 79" in print_to_text(print_report, running_run)
    assert "GPU 3 on n1: Xid 79" in (running_run.path / "report.html").read_text()


@pytest.mark.parametrize("every_s", [1.0, 60.0])
def test_status_reads_two_minutes_of_telemetry_or_twelve_samples(
    tmp_path: Path, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is slow in the first 60 % of this time: two minutes, or twelve samples if they take longer."""
    run = make_run(tmp_path, overrides=(f"track.telemetry_s={every_s}",))
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    line = json.loads(run.events_file.read_text().splitlines()[-1])
    run.events_file.write_text(run.events_file.read_text().replace(line["time"], "2020-01-01T00:00:00Z"))
    node = Node(run.path, monkeypatch, "n1", 8)
    node.every_s = every_s
    count = int(max(120, 12 * every_s) / every_s)
    node.fake.cards[3]["clock"] = 1000
    node.write_samples(count, age_s=0.4 * count * every_s)
    node.fake.cards[3]["clock"] = 1785
    node.write_samples(int(0.4 * count))
    assert "GPU 3 on n1: clock 1,000 MHz" in print_to_text(print_status, run)
    os.close(lock)


def test_the_report_reads_telemetry_of_the_train_stage_before_that_of_long_later_stages(
    running_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(running_run.path, monkeypatch, "n1", 8)
    node.fake.cards[3]["xids"] = [79]
    time.sleep(0.05)
    node.write_samples(1)
    time.sleep(0.05)
    write_event(running_run, "done", "train", job_id="1")
    node.fake.cards[3]["xids"] = []
    with open(running_run.path / "telemetry-n1.jsonl", "a") as file:
        for n in range(1000):  # 2 MB
            gpus = [{"index": index, "name": "NVIDIA H200", "memory_gb": 1.0, "pad": "x" * 200} for index in range(8)]
            file.write(json.dumps({"time": time.time() + 10 * (n + 1), "host": "n1", "gpus": gpus}) + "\n")
    assert "GPU 3 on n1: Xid 79" in print_to_text(print_report, running_run)


def print_to_text(print_function: Callable[[Run, PlainConsole], None], run: Run) -> str:
    """Return the text that `print_function` prints about a run."""
    console = PlainConsole(file=io.StringIO(), width=300)
    print_function(run, console)
    return cast(io.StringIO, console.file).getvalue()


def test_energy_is_power_times_the_time_between_samples(tmp_path: Path) -> None:
    """Two GPUs use 100 W and 300 W for an hour: 0.4 kWh, and 0.2 kWh in two quarters of it."""
    for host, watts in (("a", 100.0), ("b", 300.0)):
        samples = [
            {"time": 1000.0 + 10 * n, "host": host, "gpus": [{"index": 0, "power_w": watts}]} for n in range(361)
        ]
        samples[200:200] = [{"time": "x"}]  # a malformed line
        (tmp_path / f"telemetry-{host}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert sum_gpu_energy_kwh(tmp_path, [(0.0, 1e10)]) == pytest.approx(0.4)
    assert sum_gpu_energy_kwh(tmp_path, [(1000.0, 1000.0 + 900), (1000.0 + 1800, 1000.0 + 2700)]) == pytest.approx(
        0.2, rel=0.01
    )
    assert sum_gpu_energy_kwh(tmp_path / "none", [(0.0, 1e10)]) is None
