"""Tests of report.html: its figures, their units, the size of the page, and the escaping of text from the run."""

from __future__ import annotations

import base64
import html
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
from pipeline.run.images import ImageWriter
from pipeline.run.ledger import CATEGORIES, AttemptTimes
from pipeline.run.lines import LineHistory
from pipeline.run.lines import read_valid_lines as read_lines
from pipeline.run.metrics import is_step_line
from tests.support.events import write_event
from tests.support.tiny import make_run, write_config
from tracking.report import draw_mesh, draw_sweep_points, draw_timeline, draw_training, print_report

MALICIOUS = "</title><script>alert(1)</script>\"'&<b>"
"""Text that would run a script if the page contained it unescaped."""
_TAGS_WITHOUT_END = {"meta", "img"}
"""Elements without an end tag."""


class Document(HTMLParser):
    """A parsed page: the names of its elements and attributes, and its figures by heading.

    The constructor checks that all elements are closed, and that the drawing of each figure is valid XML.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tag_names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)
        assert self.open_tags == []
        self.figures: dict[str, str] = {}
        for figure in re.findall(r"<figure.*?</figure>", text, re.DOTALL):
            heading = re.search(r"<b>(.*?)</b>", figure)
            drawing = re.search(r'<svg role="img".*</svg>|<img.*(?=</div>)', figure, re.DOTALL)
            assert heading and drawing
            ElementTree.fromstring(drawing[0].replace('">', '"/>') if drawing[0].startswith("<img") else drawing[0])
            self.figures[heading[1]] = figure

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tag_names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in _TAGS_WITHOUT_END:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run without data and without a copy of the code. Each test writes the files that the report reads."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    return Run.create(load_config(write_config(tmp_path)))


def write_report(run: Run) -> tuple[str, Document]:
    """Write the report of a run, and return the page as text and parsed."""
    print_report(run, PlainConsole(file=io.StringIO(), width=200))
    text = (run.path / "report.html").read_text()
    return text, Document(text)


def make_step_line(step: int, **values: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl; `values` replaces or adds values."""
    return {"step": step, "loss": 2 + 5 / step, "step_time_s": 1.0, "tokens_per_s": 100.0 + step % 7, **values}


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    """Write each dictionary as a line of JSON."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_telemetry_line(second: int, **gpu: Any) -> dict[str, Any]:
    """Return a sample of a host with two GPUs; `gpu` replaces or adds values of both GPUs."""
    gpus = [{"index": n, "utilization_percent": 90 + n, "power_w": 600, "throttled": ["x"], **gpu} for n in range(2)]
    return {"time": 1.79e9 + second, "host": "n1", "cpu_percent": 20, "gpus": gpus}


def test_metrics_of_callbacks_have_a_figure_for_each_name_before_a_dot(run: Run) -> None:
    values = {"grad_norm": 1.0, "gradient.layers.0": 2.0, "gradient.layers.1": 3.0, f"a{MALICIOUS}": 4.0, "wait_s": 1.0}
    write_lines(run.metrics_file, [make_step_line(step, **values) for step in (1, 2, 3)])
    text, page = write_report(run)
    assert {"gradient", f"a{html.escape(MALICIOUS)}"} <= page.figures.keys() and "wait_s" not in page.figures
    assert all(label in page.figures["gradient"] for label in ("layers.0", "layers.1"))
    assert "<script>alert" not in text


def test_images_are_in_the_page_with_name_and_step(run: Run) -> None:
    """Of each name, the first and the last image and some of the others are shown. A damaged file is left out."""
    writer = ImageWriter(run.path, print)
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    for step in range(1, 16):
        writer.write("confusion", step, svg)
    writer.write("small", 7, bytes(range(4)), (2, 2), "uint8")
    (run.path / "images/small/step-00000008.png").write_bytes(b"damaged")
    text, page = write_report(run)
    shown_steps = sorted(int(step) for step in re.findall(r"<b>confusion</b> step (\d+)<", text))
    assert len(shown_steps) == 6 and {1, 15} <= set(shown_steps)
    assert re.findall(r"<b>small</b> step (\d+)<", text) == ["7"]
    sources = re.findall(r'src="data:(image/[a-z+]+);base64,([^"]+)"', text)
    assert [kind for kind, _ in sources] == ["image/svg+xml"] * 6 + ["image/png"]
    assert {base64.b64decode(content) for kind, content in sources if kind == "image/svg+xml"} == {svg}
    assert "alert" not in text and "9 more images" in text
    assert "img" in page.tag_names


def test_the_page_of_a_run_with_all_metrics_has_all_figures_with_their_units(run: Run) -> None:
    shares = {"compute": 0.7, "communication_exposed": 0.1, "copy": 0.05, "idle": 0.1, "bubble": 0.05}
    values = {
        "grad_norm": 1.0, "lr": 1e-3, "tokens": 9000, "data_wait_s": 0.1, "exposed_comm_s": 0.2, "memory_gb": 1.0,
        "memory_reserved_gb": 2.0, "held_out_loss": 3.0, "held_out_accuracy": 0.5, "profile": shares,
    }  # fmt: skip
    write_lines(run.metrics_file, [make_step_line(step, **values) for step in range(1, 31)])
    for attempt, cause in ((1, "preempted"), (2, "done")):  # the event of the end has the same name as the cause
        write_event(run, "started", "train", job_id="1", attempt=attempt, task=None, ranks=2, host="n1")
        write_event(run, "restored", "train", step=10 * attempt - 5)
        write_event(run, cause, "train", cause=cause, exit_code=0)
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
    write_lines(run.path / "telemetry-n1.jsonl", [make_telemetry_line(second) for second in (0, 10, 20)])
    text, page = write_report(run)
    expected_texts = {
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
    (hours_heading,) = page.figures.keys() - expected_texts.keys()
    assert hours_heading.startswith("Hours by part")
    assert "since the start of the run" in page.figures[hours_heading]
    assert expected_texts.keys() <= page.figures.keys()
    for heading, texts in expected_texts.items():
        ticks = re.findall(r'<text class="tick"[^>]*>([^<]+)', page.figures[heading])
        assert all(text in page.figures[heading] for text in texts) and len(ticks) >= 3, heading
    assert re.findall(r'"tick"[^>]*>(0|100)<', page.figures["CPU"]) == ["0", "100"], "the axis must show 0 to 100 %"
    assert "held out" in page.figures["Loss"] and page.figures["Loss"].count('stroke-dasharray="4"') == 2
    parts_figure = page.figures["Parts of profiled steps"]
    assert "communication, exposed" in parts_figure
    assert re.findall(r'text-anchor="end">(\d+)<', parts_figure)[-1] == "100"
    hosts_figure = page.figures["Hosts by local compute time"]
    assert "n1: 1.000" in hosts_figure
    assert 'class="c4"' in hosts_figure, "the bar of n2, which is slow, must have the color 4"
    assert re.search(r"<dt>started</dt><dd>20\d\d-\d\d-\d\d \d\d:\d\d, on n1</dd>", text), text
    for expected_text in ("<dt>trained</dt>", "9,000 tokens", "preempted 1 ×", "rank-hours", "not evaluated yet"):
        assert expected_text in text
    assert text.index("<dl>") < text.index("<figure"), "the summary must come before the figures"
    assert "http" not in text and not {"img", "link", "iframe"} & page.tag_names, "the page must not load other files"
    assert "prefers-color-scheme:dark" in text and "width=device-width" in text


def test_figures_without_data_are_left_out_of_the_page(run: Run) -> None:
    write_lines(run.metrics_file, [make_step_line(1), make_step_line(2, loss=None, skipped="bad"), make_step_line(3)])
    _, page = write_report(run)
    headings = page.figures.keys()
    assert {"Loss", "Throughput", "Parts of a step"} <= headings
    figures_without_data = {"Learning rate", "Gradient norm", "Memory", "Tasks", "GPU power"}
    assert not {*figures_without_data, "Hosts by local compute time"} & headings
    run.metrics_file.unlink()
    assert not {"Loss", "Parts of a step"} & write_report(run)[1].figures.keys()


def test_the_summary_of_a_completed_run_has_its_tokens_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_lines(run.metrics_file, [make_step_line(run.config.train.steps or 0, tokens=7680)])
    text, _ = write_report(run)
    summary = re.search(r"<dt>trained</dt><dd>(.*?)</dd>", text)
    assert summary and summary[1].count("7,680 tokens") == 1, text


def test_text_from_a_run_is_escaped(run: Run) -> None:
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, host=MALICIOUS, ranks=1)
    write_event(run, "failed", "train", job_id="1", attempt=1, cause=MALICIOUS, message=MALICIOUS, exit_code=1)
    write_lines(run.metrics_file, [make_step_line(step, **{f"held_out_{MALICIOUS}": 1.0 * step}) for step in (1, 2)])
    (run.stage_dir("train") / "own-times.json").write_text(json.dumps({MALICIOUS: 1.5}))
    write_lines(
        run.path / f"telemetry-{MALICIOUS.replace('/', '')}.jsonl",
        [make_telemetry_line(n, **{MALICIOUS: 3}) for n in (0, 1, 2)],
    )
    text, page = write_report(run)
    assert text.count("<script>") == 1 and "alert(1)" in text and "b" not in page.attributes
    figure = draw_sweep_points([{MALICIOUS: MALICIOUS}, {MALICIOUS: "x"}], f"{MALICIOUS}!", [1.0, 2.0])
    assert "<script" not in figure
    Document(figure)


@pytest.mark.parametrize("value", ["x", 3, {"a": 1}, [5], None, {"index": 0, "power_w": "much"}])
def test_malformed_telemetry_is_ignored(run: Run, value: Any) -> None:
    write_lines(run.path / "telemetry-n1.jsonl", [{"time": 1.79e9 + n, "gpus": [value]} for n in range(3)])
    assert "GPU power" not in write_report(run)[1].figures


def test_figures_of_100_000_steps_are_small_and_show_each_spike(run: Run) -> None:
    spikes = {500: 77.7, 50_001: 99.9, 99_999: 88.8}
    line = '{{"step":{},"loss":{},"grad_norm":{},"lr":1e-3,"step_time_s":1,"tokens_per_s":{},"held_out_loss":2}}\n'
    with open(run.metrics_file, "w") as file:
        for step in range(1, 100_001):
            loss = spikes.get(step, 2 + math.sin(step) / 9)
            file.write(line.format(step, loss, loss * 3, 1000 + step % 99))
    history = LineHistory(run.metrics_file, is_step_line, row_keys=("step", "step_time_s")).read_new_lines()
    figures = draw_training(run, history)
    assert sum(map(len, figures)) < 300_000, "the page may have 3 MB in total"
    # the lowest and the highest value of each axis
    x_range, y_range = (
        list(map(float, re.search(rf'data-{axis}="([^"]+)"', figures[0])[1].split()))  # type: ignore[index]
        for axis in "xy"
    )
    curve = re.search(r'points="([^"]+)"><title>training</title>', figures[0])
    assert curve
    points = [tuple(map(float, pair.split(","))) for pair in curve[1].split()]
    for step, loss in spikes.items():
        expected_x = 1000 * (step - x_range[0]) / (x_range[1] - x_range[0])
        expected_y = 1000 - 1000 * (loss - y_range[0]) / (y_range[1] - y_range[0])
        assert any(abs(x - expected_x) < 0.06 and abs(y - expected_y) < 0.06 for x, y in points), step


def test_line_history_reads_each_line_once_and_all_lines_again_after_a_restore(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    checked_lines: list[Any] = []

    def record_and_check(line: Any) -> bool:
        checked_lines.append(line)
        return is_step_line(line)

    history = LineHistory(file, record_and_check, row_keys=("step",))
    assert history.read_new_lines().curve("loss") == []
    write_lines(file, [make_step_line(1), make_step_line(2)])
    assert [step for step, _ in history.read_new_lines().curve("loss")] == [1, 2] and len(checked_lines) == 2
    with open(file, "a") as stream:
        stream.write(json.dumps(make_step_line(3)) + "\nnonsense\n" + json.dumps(make_step_line(4))[:20])
        stream.flush()
        assert [row["step"] for row in history.read_new_lines().rows] == [1, 2, 3] and history.malformed_count == 1
        assert history.malformed_description.startswith("metrics.jsonl: 1 ")
        stream.write(json.dumps(make_step_line(4))[20:] + "\n")
    checked_lines.clear()
    assert len(history.read_new_lines().rows) == 4 and [line["step"] for line in checked_lines] == [4]
    assert history.curve("loss") == [(line["step"], line["loss"]) for line in read_lines(file, is_step_line)]
    write_lines(tmp_path / "new", [make_step_line(1), *[make_step_line(step, loss=1.0) for step in range(2, 9)]])
    (tmp_path / "new").replace(file)  # a restore also replaces the file
    assert history.read_new_lines().curve("loss") == [(1, 7.0), *((step, 1.0) for step in range(2, 9))]
    assert history.malformed_count == 0
    file.write_text(json.dumps(make_step_line(1)) + "\n")
    assert history.read_new_lines().values("loss").tolist() == [7.0]  # type: ignore[attr-defined]


def test_the_timeline_names_the_cause_of_each_stop_and_limits_the_number_of_lanes() -> None:
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"compute": 600.0}
    causes = ["preempted", "hang", "time_limit", "done"]
    attempts = [
        AttemptTimes("train", None, number + 1, 2, 600.0 * number, 600.0 * number + 600, cause, seconds)
        for number, cause in enumerate(causes)
    ]
    figure = draw_timeline(attempts)
    assert re.findall(r'<text class="in[^>]*>(\w+)', figure) == causes[:-1]
    is_named = [f"train {number} ended: {cause}" in figure for number, cause in enumerate(causes, 1)]
    assert is_named == [True, True, True, False]
    assert re.findall(r'class="tick"[^>]*>(\d+)<', figure)[-1] == "40" and "minutes since" in figure
    array_attempts = [AttemptTimes("shard", task, 1, 1, 0.0, 600.0, "done", seconds) for task in range(5000)]
    array_figure = draw_timeline(array_attempts)
    assert len(array_figure) < 100_000 and "4900 more lanes" in array_figure
    assert draw_timeline([]) == "" == draw_lanes("", None, [])  # type: ignore[arg-type]


def test_each_sweep_point_is_drawn_as_a_line_through_its_values_and_its_result() -> None:
    points = [{"lr": lr, "name": name} for lr in (1e-4, 1e-3, 1e-2) for name in ("a", "b")]
    figure = draw_sweep_points(points, "bits per byte", [3.0, 2.9, 1.5, 1.4, math.inf, 2.0])
    lines = re.findall(r'class="c(\d)"[^>]* points="([^"]+)"><title>point (\d+): ([\d.]+)', figure)
    assert [(point, result) for *_, point, result in lines] == [
        ("000", "3.0000"), ("001", "2.9000"), ("005", "2.0000"), ("002", "1.5000"), ("003", "1.4000"),
    ]  # fmt: skip
    # The best point is drawn last, in its own color. It has the smallest result, so its line ends at the bottom (1000)
    # of the axis of results.
    assert lines[-1][:2] == ("2", "0.0,500.0 500.0,0.0 1000.0,1000.0")
    assert all(f">{label}<" in figure for label in ("1e-4", "0.001", "0.01", "a", "b", "lr", "name", "bits per byte"))
    # a point without a finite result is not drawn, and a single point makes no figure
    assert draw_sweep_points(points, "loss", [1.0, *[math.inf] * 5]) == ""


def test_the_mesh_figure_shows_all_ranks_and_nodes() -> None:
    from pipeline.parallel.mesh import Layout

    layout = Layout(
        pp=2,
        dp_replicate=1,
        dp_shard=2,
        tp=2,
        ranks_per_node=4,
        micro_batches=1,
        virtual_stages=1,
        zero=1,
        schedule="1f1b",
        stage_layers=(),
        fsdp=False,
        reduce_each_micro_batch=False,
        sequence_parallel=False,
    )
    figure = draw_mesh(layout)
    assert re.findall(r"rank (\d): pipeline (\d), data (\d), tensor (\d)", figure) == [
        tuple(map(str, (rank, rank // 4, rank // 2 % 2, rank % 2))) for rank in range(8)
    ]
    assert "node 0" in figure and "node 1" in figure and "node 2" not in figure
