"""`plan --goodput` and the report's expectation: what a run has measured, where figures come from, what is refused."""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from planning import goodput
from planning.goodput import format_span, print_goodput
from tests.support.tiny import write_config
from tracking.report import print_report

HOUR = 3600.0


def told(target: Path, *overrides: str, nodes: str | None = None) -> str:
    file = io.StringIO()
    print_goodput(target, overrides, nodes, PlainConsole(file=file, width=200))
    return file.getvalue()


def table(text: str) -> dict[str, dict[str, str]]:
    """The rows by their first cell, cells by their heads: columns begin where the head, or a number's end, is."""
    rows = [line for line in text.splitlines() if "  " in line.strip()]
    heads = next(line for line in rows if line.lstrip().startswith("nodes"))
    rows = rows[rows.index(heads) + 1 :]
    edges = [0] + [
        at for at in range(1, len(heads)) if all(len(r) <= at or r[at - 2 : at] == "  " for r in [heads, *rows])
    ]
    cut = [[line[a:b].strip() for a, b in zip(edges, [*edges[1:], None], strict=True)] for line in [heads, *rows]]
    cut = [[cell for cell, head in zip(row, cut[0], strict=True) if head] for row in cut]
    return {row[0]: dict(zip(cut[0], row, strict=True)) for row in cut[1:]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two days of two ranks on a node: 4 attempts, of which 3 end with a failure; known starts, saves and steps."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    run = Run.create(load_config(write_config(tmp_path, steps=400), ["checkpoint.every_steps=10"]))
    clock, step, events, steps = time.time() - 3 * 86400, 0, [], []

    def event(name: str, **more: object) -> None:
        stamp = datetime.fromtimestamp(clock, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        events.append({"time": stamp, "event": name, "stage": "train", **more})

    event("submitted", job_id="1")
    for attempt in range(4):
        event("started", job_id="1", task=None, attempt=attempt + 1, ranks=2)
        clock += 600
        event("restored", step=step, seconds=1.0)
        event("ready", step=step)
        for _ in range(100):
            step += 1
            due = step % 10 == 0
            steps.append(
                {
                    "step": step,
                    "loss": 1.0,
                    "tokens_per_s": 1.0,
                    "step_time_s": 360.0 + due * 4,
                    "checkpoint_s": 4.0 * due,
                }
            )
            clock += 360 + due * 4
            if due:
                event("saved", step=step, seconds=50.0)
        clock += 100
        if attempt < 3:
            event("failed", job_id="1", task=None, cause=("crashed", "node_failure", "hang")[attempt], exit_code=1)
            event("requeued", task=None)
            clock += 200
        else:
            event("done", task=None, exit_code=0)
    for file, found in ((run.path / "events.jsonl", events), (run.metrics_file, steps)):
        file.write_text("".join(json.dumps(line) + "\n" for line in found))
    return run


def test_a_run_tells_its_own_figures(run: Run) -> None:
    text = told(run.path)
    days = 4 * (600 + 100 * 360 + 10 * 4 + 100) / 86400
    assert f"{3000 / days:>10.4g}  failures per 1,000 node-days (measured: 3 in {days:.3g} node-days; 95 %" in text
    assert "600  seconds from start to first step (measured: mean of 4)" in text
    assert "300  seconds from a failure to that start (measured: mean of 3)" in text
    assert "50  seconds until a checkpoint is valid (measured: mean of 40)" in text
    assert "4  seconds of these that the training waits (measured: mean of 40)" in text
    assert "80  GPU-hours of the whole training, undisturbed (400 steps of 360 s on 2 ranks)" in text
    (first, *_), rows = table(text), table(text)
    assert (first, rows["1"]["GPUs"], rows["1"]["a failure every"]) == ("1", "2", "14 h")
    assert float(rows["1"]["as it is"].rstrip(" %")) < float(rows["1"]["effective"].rstrip(" %")), "hourly is too rare"


def test_the_config_comes_before_the_run(run: Run) -> None:
    text = told(run.path, "goodput.failures=6.5", "goodput.gpu_hours=10", "goodput.gpu_hour=2", nodes="1")
    assert "6.5  failures per 1,000 node-days (goodput.failures)" in text
    cost = float(table(text)["1"]["cost"])
    assert 20 <= cost < 24, "ten hours at two, and what failures add"


def test_report_says_what_was_expected(run: Run) -> None:
    file = io.StringIO()
    print_report(run, PlainConsole(file=file, width=200), goodput.describe_expected_goodput)
    (line,) = [line for line in file.getvalue().splitlines() if line.startswith("expected ")]
    assert "0.011 failures, there were 3: 6.5 per 1,000 node-days (assumed" in line and "measured: 3 in" in line
    ratio = float(line.split()[1])
    assert 0.99 < ratio < 0.997, "a start in forty hours, 4 s of an hour"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(goodput, "_node_days", lambda attempt, per_node: 0.24)
        file = io.StringIO()
        print_report(run, PlainConsole(file=file, width=200), goodput.describe_expected_goodput)
        assert "expected" not in file.getvalue(), "four attempts, and not a node-day"
    run.metrics_file.write_text("")
    file = io.StringIO()
    print_report(run, PlainConsole(file=file, width=200), goodput.describe_expected_goodput)
    assert "expected" not in file.getvalue(), "without steps nothing is known"


def test_without_a_run_figures_are_assumed_and_say_so(tmp_path: Path) -> None:
    text = told(write_config(tmp_path), "stages.train.tasks_per_node=8", nodes="2048,16384")
    assert "6.5  failures per 1,000 node-days (assumed: RSC-1's, arXiv 2410.21680)" in text
    rows = table(text)
    assert (rows["2,048"]["GPUs"], rows["2,048"]["a failure every"]) == ("16,384", "1.8 h")
    assert (rows["16,384"]["GPUs"], rows["16,384"]["a failure every"]) == ("131,072", "14 min")
    assert "waiting for nodes" not in text and "cost" not in rows["2,048"]


def test_what_never_ends_is_said(tmp_path: Path) -> None:
    text = told(write_config(tmp_path), "goodput.failures=1000", "goodput.save_s=3600", nodes="1,16384")
    assert table(text)["16,384"]["days"] == "never"


def test_typos_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"goodput.failure: .*did you mean failures"):
        told(write_config(tmp_path), "goodput.failure=3")


def test_spans() -> None:
    assert [format_span(s) for s in (0.5, 95, 811, 6490, 166154, 3e5, 9e6)] == [
        "0.5 s", "95 s", "14 min", "1.8 h", "46 h", "3.5 days", "104 days",
    ]  # fmt: skip
