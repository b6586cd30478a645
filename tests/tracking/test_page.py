"""`report.html`, read back as a browser does: what is there, its units, its size; no text of a run is markup."""

from __future__ import annotations

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.files import add_checksum
from pipeline.base.html_page import draw_lanes
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from pipeline.run.ledger import CATEGORIES, AttemptTimes
from pipeline.run.lines import LineHistory
from pipeline.run.lines import read_valid_lines as read_lines
from pipeline.run.metrics import is_step_line
from tests.support.events import write_event
from tests.support.tiny import write_config
from tracking.report import draw_mesh, draw_sweep_points, draw_timeline, draw_training, print_report

EVIL = "</title><script>alert(1)</script>\"'&<b>"
_VOID = {"meta"}


class Document(HTMLParser):
    """A page as a browser takes it: whether its elements close, their names, and its figures by heading."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        assert self.open == []
        self.figures: dict[str, str] = {}
        for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
            heading = re.search(r"<b>(.*?)</b>", figure)
            drawn = re.search(r'<svg role="img".*</svg>', figure, re.DOTALL)
            assert heading and drawn
            ElementTree.fromstring(drawn[0])
            self.figures[heading[1]] = figure

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run without data: what is read of it lies in its files."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    return Run.create(load_config(write_config(tmp_path)))


def report(run: Run) -> tuple[str, Document]:
    print_report(run, PlainConsole(file=io.StringIO(), width=200))
    text = (run.path / "report.html").read_text()
    return text, Document(text)


def step_line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 2 + 5 / step, "step_time_s": 1.0, "tokens_per_s": 100.0 + step % 7, **more}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def telemetry(second: int, **gpu: Any) -> dict[str, Any]:
    gpus = [{"index": n, "utilization_percent": 90 + n, "power_w": 600, "throttled": ["x"], **gpu} for n in range(2)]
    return {"time": 1.79e9 + second, "host": "n1", "cpu_percent": 20, "gpus": gpus}


def test_a_run_with_everything_has_every_picture_with_its_units(run: Run) -> None:
    shares = {"compute": 0.7, "communication_exposed": 0.1, "copy": 0.05, "idle": 0.1, "bubble": 0.05}
    more = {
        "grad_norm": 1.0, "lr": 1e-3, "tokens": 9000, "data_wait_s": 0.1, "exposed_comm_s": 0.2, "memory_gb": 1.0,
        "memory_reserved_gb": 2.0, "held_out_loss": 3.0, "held_out_accuracy": 0.5, "profile": shares,
    }  # fmt: skip
    write_lines(run.metrics_file, [step_line(step, **more) for step in range(1, 31)])
    for attempt, cause in ((1, "preempted"), (2, "done")):
        write_event(run, "started", "train", job_id="1", attempt=attempt, task=None, ranks=2, host="n1")
        write_event(run, "restored", "train", step=10 * attempt - 5)
        write_event(run, "done" if cause == "done" else cause, "train", cause=cause, exit_code=0)
    for step in (10, 20):
        result: dict[str, Any] = {
            "step": step,
            "loss": 2.0,
            "perplexity": 7.4,
            "bits_per_byte": 1.0,
            "unigram_bits_per_byte": 2.0,
        }
        result |= {"arc.accuracy": 0.4, "arc.accuracy_stderr": 0.1, "tokens": 9, "bytes": 9, "checkpoint": "x"}
        (run.evaluation_dir / f"step-{step:08}.json").write_text(json.dumps(add_checksum(result)))
    (run.stage_dir("train") / "own-times.json").write_text(json.dumps({"n1": 1.0, "n2": 1.5}))
    write_lines(run.path / "telemetry-n1.jsonl", [telemetry(second) for second in (0, 10, 20)])
    text, page = report(run)
    units = {
        "Loss": ("nats per token", "optimizer step"), "held out accuracy": ("on held-out data", "optimizer step"),
        "Gradient norm": ("whole model, before clipping", "optimizer step"),
        "Learning rate": ("learning rate", "optimizer step"), "Throughput": ("tokens per second", "optimizer step"),
        "Parts of a step": ("seconds per step, mean", "optimizer step"), "Memory": ("GB, peak of rank 0",),
        "Parts of profiled steps": ("% of the step", "optimizer step"),
        "Evaluation of checkpoints": ("bits per byte", "optimizer step"), "Tasks": ("± standard error",),
        "Tasks over the checkpoints": ("accuracy", "optimizer step"),
        "Hosts by local compute time": ("multiple of the median",),
        "GPU utilisation": ("%", "since the start of the run"),
        "GPU power": ("W, mean", "seconds since the start of the run"), "CPU": ("%",),
        "Layout: pipeline 1 × data 2 × tensor 1": ("rank on its node",),
    }  # fmt: skip
    (hours,) = page.figures.keys() - units.keys()
    assert hours.startswith("Hours by part") and "since the start of the run" in page.figures[hours]
    assert units.keys() <= page.figures.keys()
    for heading, words in units.items():
        ticks = re.findall(r'<text class="tick"[^>]*>([^<]+)', page.figures[heading])
        assert all(word in page.figures[heading] for word in words) and len(ticks) >= 3, heading
    assert re.findall(r'"tick"[^>]*>(0|100)<', page.figures["CPU"]) == ["0", "100"], "of the whole, not of 20 %"
    assert "held out" in page.figures["Loss"] and page.figures["Loss"].count('stroke-dasharray="4"') == 2
    shown = page.figures["Parts of profiled steps"]
    assert "communication, exposed" in shown and re.findall(r'text-anchor="end">(\d+)<', shown)[-1] == "100"
    assert (
        "n1: 1.000" in page.figures["Hosts by local compute time"]
        and 'class="c4"' in page.figures["Hosts by local compute time"]
    )
    assert re.search(r"<dt>started</dt><dd>20\d\d-\d\d-\d\d \d\d:\d\d, on n1</dd>", text), text
    for told in ("<dt>trained</dt>", "9,000 tokens", "preempted 1 ×", "rank-hours", "not evaluated yet"):
        assert told in text
    assert text.index("<dl>") < text.index("<figure"), "summary first"
    assert "http" not in text and not {"img", "link", "iframe"} & page.names, "it needs nothing from elsewhere"
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text


def test_a_run_whose_lines_have_little_has_a_page_without_those_pictures(run: Run) -> None:
    write_lines(run.metrics_file, [step_line(1), step_line(2, loss=None, skipped="bad"), step_line(3)])
    _, page = report(run)
    drawn = page.figures.keys()
    assert {"Loss", "Throughput", "Parts of a step"} <= drawn
    assert not {"Learning rate", "Gradient norm", "Memory", "Tasks", "GPU power", "Hosts by local compute time"} & drawn
    run.metrics_file.unlink()
    assert not {"Loss", "Parts of a step"} & report(run)[1].figures.keys()


def test_what_comes_from_a_run_is_no_markup(run: Run) -> None:
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, host=EVIL, ranks=1)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause=EVIL, message=EVIL, exit_code=1)
    write_lines(run.metrics_file, [step_line(step, **{f"held_out_{EVIL}": 1.0 * step}) for step in (1, 2)])
    (run.stage_dir("train") / "own-times.json").write_text(json.dumps({EVIL: 1.5}))
    write_lines(run.path / f"telemetry-{EVIL.replace('/', '')}.jsonl", [telemetry(n, **{EVIL: 3}) for n in (0, 1, 2)])
    text, page = report(run)
    assert text.count("<script>") == 1 and "alert(1)" in text and "b" not in page.attributes
    shown = draw_sweep_points([{EVIL: EVIL}, {EVIL: "x"}], f"{EVIL}!", [1.0, 2.0])
    assert "<script" not in shown
    Document(shown)


@pytest.mark.parametrize("value", ["x", 3, {"a": 1}, [5], None, {"index": 0, "power_w": "much"}])
def test_telemetry_that_is_none_leaves_the_page_whole(run: Run, value: Any) -> None:
    write_lines(run.path / "telemetry-n1.jsonl", [{"time": 1.79e9 + n, "gpus": [value]} for n in range(3)])
    assert "GPU power" not in report(run)[1].figures


def test_a_hundred_thousand_steps_are_less_than_3_mb_and_keep_their_spikes(run: Run) -> None:
    spike = {500: 77.7, 50_001: 99.9, 99_999: 88.8}
    line = '{{"step":{},"loss":{},"grad_norm":{},"lr":1e-3,"step_time_s":1,"tokens_per_s":{},"held_out_loss":2}}\n'
    with open(run.metrics_file, "w") as file:
        for step in range(1, 100_001):
            loss = spike.get(step, 2 + math.sin(step) / 9)
            file.write(line.format(step, loss, loss * 3, 1000 + step % 99))
    history = LineHistory(run.metrics_file, is_step_line, row_keys=("step", "step_time_s")).read_new_lines()
    drawn = draw_training(run, history)
    assert sum(map(len, drawn)) < 3_000_000 / 10, "ten times as much is allowed for the page"
    (x, y) = (list(map(float, re.search(rf'data-{axis}="([^"]+)"', drawn[0])[1].split())) for axis in "xy")  # type: ignore[index]
    raw = re.search(r'points="([^"]+)"><title>training</title>', drawn[0])
    assert raw
    points = [tuple(map(float, pair.split(","))) for pair in raw[1].split()]
    for step, loss in spike.items():
        at, height = 1000 * (step - x[0]) / (x[1] - x[0]), 1000 - 1000 * (loss - y[0]) / (y[1] - y[0])
        assert any(abs(a - at) < 0.06 and abs(b - height) < 0.06 for a, b in points), step


def test_history_reads_each_line_once_and_all_again_after_a_restore(tmp_path: Path) -> None:
    file, parsed = tmp_path / "metrics.jsonl", list[Any]()

    def fits(line: Any) -> bool:
        parsed.append(line)
        return is_step_line(line)

    history = LineHistory(file, fits, row_keys=("step",))
    assert history.read_new_lines().curve("loss") == []
    write_lines(file, [step_line(1), step_line(2)])
    assert [step for step, _ in history.read_new_lines().curve("loss")] == [1, 2] and len(parsed) == 2
    with open(file, "a") as more:
        more.write(json.dumps(step_line(3)) + "\nnonsense\n" + json.dumps(step_line(4))[:20])
        more.flush()
        assert [row["step"] for row in history.read_new_lines().rows] == [1, 2, 3] and history.malformed_count == 1
        assert history.malformed_description.startswith("metrics.jsonl: 1 ")
        more.write(json.dumps(step_line(4))[20:] + "\n")
    parsed.clear()
    assert len(history.read_new_lines().rows) == 4 and [line["step"] for line in parsed] == [4]
    assert history.curve("loss") == [(line["step"], line["loss"]) for line in read_lines(file, is_step_line)]
    write_lines(tmp_path / "new", [step_line(1), *[step_line(step, loss=1.0) for step in range(2, 9)]])
    (tmp_path / "new").replace(file)  # as a restore does
    assert (
        history.read_new_lines().curve("loss") == [(1, 7.0), *((step, 1.0) for step in range(2, 9))]
        and history.malformed_count == 0
    )
    file.write_text(json.dumps(step_line(1)) + "\n")
    assert history.read_new_lines().values("loss").tolist() == [7.0]  # type: ignore[attr-defined]


def test_the_timeline_names_every_stop_and_many_lanes_stay_small() -> None:
    spent = dict.fromkeys(CATEGORIES, 0.0) | {"compute": 600.0}
    causes = ["preempted", "hang", "time_limit", "done"]
    attempts = [
        AttemptTimes("train", None, n + 1, 2, 600.0 * n, 600.0 * n + 600, c, spent) for n, c in enumerate(causes)
    ]
    drawn = draw_timeline(attempts)
    assert re.findall(r'<text class="in[^>]*>(\w+)', drawn) == causes[:-1]
    assert [f"train {n} ended: {c}" in drawn for n, c in enumerate(causes, 1)] == [True] * 3 + [False]
    assert re.findall(r'class="tick"[^>]*>(\d+)<', drawn)[-1] == "40" and "minutes since" in drawn
    many = draw_timeline([AttemptTimes("shard", n, 1, 1, 0.0, 600.0, "done", spent) for n in range(5000)])
    assert len(many) < 100_000 and "4900 more lanes" in many
    assert draw_timeline([]) == "" == draw_lanes("", None, [])  # type: ignore[arg-type]


def test_the_points_of_a_sweep_cross_their_values() -> None:
    points = [{"lr": lr, "name": name} for lr in (1e-4, 1e-3, 1e-2) for name in ("a", "b")]
    drawn = draw_sweep_points(points, "bits per byte", [3.0, 2.9, 1.5, 1.4, math.inf, 2.0])
    ways = re.findall(r'class="c(\d)"[^>]* points="([^"]+)"><title>point (\d+): ([\d.]+)', drawn)
    assert [(n, value) for *_, n, value in ways] == [
        ("000", "3.0000"), ("001", "2.9000"), ("005", "2.0000"), ("002", "1.5000"), ("003", "1.4000"),
    ]  # fmt: skip
    assert ways[-1][:2] == ("2", "0.0,500.0 500.0,0.0 1000.0,1000.0"), "the best: in front, at its values, lowest"
    assert all(f">{word}<" in drawn for word in ("1e-4", "0.001", "0.01", "a", "b", "lr", "name", "bits per byte"))
    assert draw_sweep_points(points, "loss", [1.0, *[math.inf] * 5]) == ""


def test_the_layout_shows_each_rank_on_its_node() -> None:
    from pipeline.parallel.mesh import Layout

    sizes = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "tp": 2, "ranks_per_node": 4}
    rest = dict.fromkeys(("micro_batches", "virtual_stages", "zero"), 1) | {"schedule": "1f1b", "stage_layers": ()}
    drawn = draw_mesh(Layout(**sizes, **rest, fsdp=False, reduce_each_micro_batch=False, sequence_parallel=False))  # type: ignore[arg-type]
    assert re.findall(r"rank (\d): pipeline (\d), data (\d), tensor (\d)", drawn) == [
        tuple(map(str, (rank, rank // 4, rank // 2 % 2, rank % 2))) for rank in range(8)
    ]
    assert "node 0" in drawn and "node 1" in drawn and "node 2" not in drawn
