"""What nodes say of themselves, by a fake NVML, for no GPU is here; and which GPU falls behind those of its kind."""

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
    """What NVML raises: not supported, lost, or no event in time."""


class FakeNvml(SimpleNamespace):
    """A node's NVML: cards with figures that a test sets; one that knows nothing of ECC, or is lost, raises."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 1, 0
    nvmlClocksEventReasonSwPowerCap, nvmlClocksThrottleReasonSwThermalSlowdown = 0x4, 0x20
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, cards: int) -> None:
        usual = {"name": "NVIDIA H200", "use": 97, "used": 120e9, "power": 651_500, "heat": 66, "clock": 1785}
        self.cards: list[dict[str, Any]] = [{**usual, "why": 0, "xids": []} for _ in range(cards)]
        self.sets: list[int | None] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        key = {
            "nvmlDeviceGetName": "name", "nvmlDeviceGetPowerUsage": "power", "nvmlDeviceGetTemperature": "heat",
            "nvmlDeviceGetClockInfo": "clock", "nvmlDeviceGetCurrentClocksEventReasons": "why",
            "nvmlDeviceGetTotalEccErrors": "ecc",
        }.get(name)  # fmt: skip
        if key is None:
            raise AttributeError(name)
        return lambda card, *_: self.ask(card, key)

    def ask(self, card: int, key: str) -> Any:
        """A figure of a card."""
        if key not in self.cards[card] or self.cards[card].get("lost"):
            raise NVMLError(key)
        return self.cards[card][key]

    def nvmlInit(self) -> None:
        """There is a driver."""

    def nvmlDeviceGetCount(self) -> int:
        """So many."""
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        """A handle."""
        return index

    def nvmlDeviceGetUtilizationRates(self, card: int) -> SimpleNamespace:
        """In percent."""
        return SimpleNamespace(gpu=self.ask(card, "use"))

    def nvmlDeviceGetMemoryInfo(self, card: int) -> SimpleNamespace:
        """In bytes."""
        return SimpleNamespace(used=self.ask(card, "used"))

    def nvmlEventSetCreate(self) -> int:
        """A set without cards."""
        self.sets.append(None)
        return len(self.sets) - 1

    def nvmlDeviceRegisterEvents(self, card: int, kinds: int, events: int) -> None:
        """Of a card that tells none it raises."""
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.ask(card, "xids")
        self.sets[events] = card

    def nvmlEventSetWait_v2(self, events: int, milliseconds: int) -> SimpleNamespace:
        """The next event; raises where none comes in time."""
        card = self.sets[events]
        assert card is not None and milliseconds == 0, "a set that waits"
        waiting = self.cards[card]["xids"]
        if not waiting:
            raise NVMLError("timeout")
        return SimpleNamespace(eventData=waiting.pop(0))


def nvml(patch: pytest.MonkeyPatch, cards: int) -> FakeNvml:
    fake = FakeNvml(cards)
    patch.setitem(sys.modules, "pynvml", cast(Any, fake))
    return fake


def test_a_gpu_says_what_it_has_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = nvml(monkeypatch, 2)
    fake.cards[0]["why"] = 0x24
    del fake.cards[0]["xids"]
    fake.cards[1] |= {"ecc": 2, "xids": [31, 79, 31]}
    told = {"name": "NVIDIA H200", "utilization_percent": 97, "memory_gb": 120.0, "power_w": 651.5}
    told |= {"temperature_c": 66, "sm_clock_mhz": 1785}
    gpus = GpuSampler()
    assert gpus.sample() == [
        {"index": 0, **told, "throttled": ["power cap", "heat"]},
        {"index": 1, **told, "throttled": [], "ecc_errors": 2, "xid": [31, 79]},
    ]
    fake.cards[1] |= {"lost": True, "xids": [154]}
    assert gpus.sample()[1] == {"index": 1, "xid": [31, 79, 154]}


def test_an_xid_between_two_looks_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML gives of events that wait only the last one's number, so it is asked more often than a line is written."""
    fake, flag, run = nvml(monkeypatch, 1), StopFlag(), make_run(tmp_path)
    monkeypatch.setattr(telemetry, "HOST", "n1")
    process = threading.Thread(target=telemetry.sample_telemetry, args=(run, 1.0, flag))
    process.start()
    time.sleep(0.1)
    fake.cards[0]["xids"].append(63)
    time.sleep(0.6)
    assert fake.cards[0]["xids"] == [] and not (run.path / "telemetry-n1.jsonl").exists()
    while process.is_alive() and not (run.path / "telemetry-n1.jsonl").exists():
        time.sleep(0.05)
    flag.signal_time, flag.reason = time.monotonic(), "SIGTERM"
    process.join(20)
    assert read_json_lines(run.path / "telemetry-n1.jsonl")[0]["gpus"][0]["xid"] == [63]


class Node:
    """A node whose sampler has looked every 10 s until now."""

    every_s = 10.0

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, host: str, cards: int = 4) -> None:
        self.folder, self.patch, self.host, self.fake = folder, patch, host, FakeNvml(cards)

    def looks(self, number: int = 12, ended_s: float = 0.0) -> None:
        """So many lines as telemetry.py writes them."""
        self.patch.setitem(sys.modules, "pynvml", cast(Any, self.fake))
        gpus, now = GpuSampler(), time.time() - ended_s
        with open(self.folder / f"telemetry-{self.host}.jsonl", "a") as file:
            for n in range(number):
                line = {
                    "time": now - self.every_s * (number - 1 - n),
                    "host": self.host,
                    "cpu_percent": 9.0,
                    "gpus": gpus.sample(),
                }
                file.write(json.dumps(line) + "\n")


def behind(folder: Path, last_s: float = 120.0) -> list[str]:
    return list_slow_gpus(folder, time.time() - last_s)


def test_a_slow_gpu_is_told_and_those_of_another_kind_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, old = (Node(tmp_path, monkeypatch, host) for host in ("n1", "n2", "old"))
    for card in old.fake.cards:  # all alike, and slower than the others
        card |= {"name": "Tesla T4", "clock": 900, "used": 10e9}
    two.fake.cards[3] |= {"use": 0, "used": 0.5e9, "clock": 345, "ecc": 7, "xids": [31, 94]}  # none of the job's
    two.fake.cards[2]["clock"] = 1600  # within what is usual
    one.fake.cards[1] |= {"clock": 1200, "why": 0x20}
    one.fake.cards[2]["use"] = 40
    two.fake.cards[0] |= {"ecc": 3, "xids": [94]}
    for node in (one, two, old):
        node.looks()
    assert behind(tmp_path) == [
        "GPU 0 on n2: Xid 94, 3 uncorrected memory errors",
        "GPU 2 on n1: utilisation 40 % where 97 is usual",
        "GPU 1 on n1: clock 1,200 MHz where 1,785 is usual (heat)",
    ]
    two.fake.cards[1]["lost"] = True
    two.looks(1)
    two.fake.cards[3]["lost"] = True
    two.looks(1)
    told = behind(tmp_path)
    assert "GPU 1 on n2: says nothing any more" in told and "GPU 3 on n2: says nothing any more" in told


def test_what_programs_do_hides_no_slow_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is ended leaves Xid 45 on all of them."""
    node = Node(tmp_path, monkeypatch, "n1", 8)
    for card in node.fake.cards:
        card["xids"] = [45, 13]
    node.fake.cards[7]["clock"] = 1000
    node.fake.cards[6]["xids"] = [45, 48]
    node.looks(7)
    assert [words[:13] for words in behind(tmp_path)][:3] == ["GPU 6 on n1: ", "GPU 7 on n1: ", "GPU 0 on n1: "]


def test_one_slow_look_of_many_is_nothing_and_old_ones_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path, monkeypatch, "n1")
    node.fake.cards[0]["clock"] = 600
    node.looks(10, ended_s=200)
    node.fake.cards[0]["clock"] = 1785
    node.looks(11)
    node.fake.cards[1]["clock"] = 600
    node.looks(1)
    assert behind(tmp_path) == []
    assert behind(tmp_path, 1000) == [], "of 22 looks the median"
    assert behind(tmp_path, 5) == [], "one is not enough"


def test_five_looks_accuse_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, told in ((5, 0), (6, 1)):
        (folder := tmp_path / str(number)).mkdir()
        node = Node(folder, monkeypatch, "n1")
        node.fake.cards[1]["clock"] = 600
        node.looks(number)
        assert len(behind(folder)) == told


def test_of_512_gpus_only_the_ends_of_the_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(64):
        node = Node(tmp_path, monkeypatch, f"n{n:02}", 8)
        if n == 17:
            node.fake.cards[5]["clock"] = 1100
        node.looks(13)
    before, held = "x" * 10_000_000, tmp_path / "telemetry-n17.jsonl"
    held.write_text(before + "\n" + held.read_text())
    read: list[int] = []
    with counted_reads(monkeypatch, read):
        assert behind(tmp_path) == ["GPU 5 on n17: clock 1,100 MHz where 1,785 is usual"]
    assert len(read) == 64 and max(read) <= 1 << 15


@contextmanager
def counted_reads(patch: pytest.MonkeyPatch, read: list[int]) -> Iterator[None]:
    """How many bytes each file gives that is opened to look at."""
    from pipeline.base import files

    open_regular_file = files.open_regular_file

    class Counted(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            read.append(len(found))
            return found

    with patch.context() as patched:
        patched.setattr(files, "open_regular_file", lambda path: Counted(open_regular_file(path).detach()))
        yield


@pytest.mark.parametrize(
    "odd", [{"xid": 7}, {"throttled": "x"}, {"name": {}}, {"sm_clock_mhz": "fast"}, {"xid": ["x"]}]
)
def test_what_no_sampler_wrote_harms_nobody(tmp_path: Path, odd: dict[str, Any]) -> None:
    rows = [{"index": n, "name": "x", "sm_clock_mhz": 1000, "memory_gb": 1} for n in range(3)]
    lines = [{"time": time.time(), "host": "n1", "gpus": [{**rows[0], **odd}, *rows[1:]]}, {"time": None}, 3]
    (tmp_path / "telemetry-n1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "{")
    behind(tmp_path)


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Run]:
    """A training that runs: this process holds its lock."""
    run = make_run(tmp_path)
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "ready", "train", step=0)
    yield run
    os.close(lock)


def test_status_and_report_tell_it_while_it_runs(going: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(going.path, monkeypatch, "n1", 8)
    for card in node.fake.cards[3:]:
        card["clock"] = 100  # five of eight of the attempt before: what is usual is otherwise now
    node.looks(3, ended_s=60)
    assert "GPU" not in shown(print_status, going), "the attempt before"
    for card in node.fake.cards[3:]:
        card["clock"] = 1785
    for card in node.fake.cards[:4]:
        card |= {"clock": 1785, "xids": [79]}
    time.sleep(0.05)
    node.looks(1)
    told = shown(print_status, going)
    assert "train: GPU 0 on n1: Xid 79; GPU 1 on n1: Xid 79; GPU 2 on n1: Xid 79; and 1 more GPUs" in told
    told = shown(print_report, going)
    assert "last 10 minutes of training: GPU 0 on n1: Xid 79; " in told
    assert "GPU 3 on n1: Xid 79" in (going.path / "report.html").read_text()


@pytest.mark.parametrize("every_s", [1.0, 60.0])
def test_status_reads_as_far_back_as_telemetry_needs(
    tmp_path: Path, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two minutes half; of looks each minute, twelve."""
    run = make_run(tmp_path, overrides=(f"track.telemetry_s={every_s}",))
    lock = run.lock_stage("train")
    assert lock is not None
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    line = json.loads(run.events_file.read_text().splitlines()[-1])
    run.events_file.write_text(run.events_file.read_text().replace(line["time"], "2020-01-01T00:00:00Z"))
    node = Node(run.path, monkeypatch, "n1", 8)
    node.every_s, looks = every_s, int(max(120, 12 * every_s) / every_s)
    node.fake.cards[3]["clock"] = 1000
    node.looks(looks, ended_s=0.4 * looks * every_s)
    node.fake.cards[3]["clock"] = 1785
    node.looks(int(0.4 * looks))
    assert "GPU 3 on n1: clock 1,000 MHz" in shown(print_status, run)
    os.close(lock)


def test_report_tells_of_the_training_though_other_stages_ran_long(going: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(going.path, monkeypatch, "n1", 8)
    node.fake.cards[3]["xids"] = [79]
    time.sleep(0.05)
    node.looks(1)
    time.sleep(0.05)
    write_event(going, "done", "train", job_id="1")
    node.fake.cards[3]["xids"] = []
    with open(going.path / "telemetry-n1.jsonl", "a") as file:
        for n in range(1000):  # 2 MB
            gpus = [{"index": g, "name": "NVIDIA H200", "memory_gb": 1.0, "pad": "x" * 200} for g in range(8)]
            file.write(json.dumps({"time": time.time() + 10 * (n + 1), "host": "n1", "gpus": gpus}) + "\n")
    assert "last 10 minutes of training: GPU 3 on n1: Xid 79" in shown(print_report, going)


def shown(show: Callable[[Run, PlainConsole], None], run: Run) -> str:
    console = PlainConsole(file=io.StringIO(), width=300)
    show(run, console)
    return cast(io.StringIO, console.file).getvalue()


def test_energy_is_the_power_between_looks(tmp_path: Path) -> None:
    for host, watts in (("a", 100.0), ("b", 300.0)):
        looks = [{"time": 1000.0 + 10 * n, "host": host, "gpus": [{"index": 0, "power_w": watts}]} for n in range(361)]
        looks[200:200] = [{"time": "x"}]
        (tmp_path / f"telemetry-{host}.jsonl").write_text("".join(json.dumps(look) + "\n" for look in looks))
    assert sum_gpu_energy_kwh(tmp_path, [(0.0, 1e10)]) == pytest.approx(0.4)
    assert sum_gpu_energy_kwh(tmp_path, [(1000.0, 1000.0 + 900), (1000.0 + 1800, 1000.0 + 2700)]) == pytest.approx(
        0.2, rel=0.01
    )
    assert sum_gpu_energy_kwh(tmp_path / "none", [(0.0, 1e10)]) is None
