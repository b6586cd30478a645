"""Tests of `plan --goodput` and of the expected goodput in the report, with measured, assumed and invalid inputs."""

from __future__ import annotations

import io
import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from planning import goodput
from planning.goodput import GoodputAssumptions, format_span, load_assumptions, print_goodput
from tests.support.tiny import write_config
from tracking.report import print_report


def print_goodput_to_text(
    target: Path, *overrides: str, nodes: str | None = None, assumptions: Path | None = None
) -> str:
    """Return what `plan --goodput` prints for `target`, which is a config file or a run directory."""
    file = io.StringIO()
    print_goodput(target, overrides, nodes, PlainConsole(file=file, width=200), assumptions)
    return file.getvalue()


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Return the rows of the table by their first cell, and the cells of a row by column title."""
    lines = [line for line in text.splitlines() if "  " in line.strip()]
    header = next(line for line in lines if line.lstrip().startswith("nodes"))
    table_lines = lines[lines.index(header) :]
    # a column starts where all lines have two spaces before it
    starts = [0] + [
        position
        for position in range(1, len(header))
        if all(len(line) <= position or line[position - 2 : position] == "  " for line in table_lines)
    ]
    ends = [*starts[1:], None]
    rows = [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in table_lines]
    titles = rows[0]
    rows = [[cell for cell, title in zip(row, titles, strict=True) if title] for row in rows]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run of almost two days on two ranks of one node. Three of its four attempts ended with a failure."""
    monkeypatch.setattr(Run, "copy_code", lambda self, **more: None)
    run = Run.create(load_config(write_config(tmp_path, steps=400), ["checkpoint.every_steps=10"]))
    clock = time.time() - 3 * 86400
    step = 0
    events: list[dict[str, object]] = []
    metrics = []

    def add_event(name: str, **fields: object) -> None:
        stamp = datetime.fromtimestamp(clock, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        events.append({"time": stamp, "event": name, "stage": "train", **fields})

    add_event("submitted", job_id="1")
    for attempt in range(4):
        add_event("started", job_id="1", task=None, attempt=attempt + 1, ranks=2)
        clock += 600
        add_event("restored", step=step, seconds=1.0)
        add_event("ready", step=step)
        for _ in range(100):
            step += 1
            checkpoint_s = 4.0 if step % 10 == 0 else 0.0
            metrics.append(
                {
                    "step": step,
                    "loss": 1.0,
                    "tokens_per_s": 1.0,
                    "step_time_s": 360.0 + checkpoint_s,
                    "checkpoint_s": checkpoint_s,
                }
            )
            clock += 360 + checkpoint_s
            if step % 10 == 0:
                add_event("saved", step=step, seconds=50.0)
        clock += 100
        if attempt < 3:
            add_event("failed", job_id="1", task=None, cause=("crashed", "node_failure", "hang")[attempt], exit_code=1)
            add_event("requeued", task=None)
            clock += 200
        else:
            add_event("done", task=None, exit_code=0)
    for file, lines in ((run.path / "events.jsonl", events), (run.metrics_file, metrics)):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_measured_inputs_of_a_run_are_used(run: Run) -> None:
    text = print_goodput_to_text(run.path)
    # each of the four attempts has a start, 100 steps, 10 saves, and the time from the last step to its end
    days = 4 * (600 + 100 * 360 + 10 * 4 + 100) / 86400
    assert f"{3000 / days:>10.4g}  failures per 1,000 node-days (measured: 3 in {days:.3g} node-days; 95 %" in text
    assert "600  seconds from start to first step (measured: mean of 4)" in text
    assert "300  seconds from a failure to that start (measured: mean of 3)" in text
    assert "50  seconds until a checkpoint is valid (measured: mean of 40)" in text
    assert "4  seconds of these that block the training (measured: mean of 40)" in text
    assert "80  GPU-hours of the whole training without failures (400 steps of 360 s on 2 ranks)" in text
    rows = read_table(text)
    first_nodes = next(iter(rows))
    assert (first_nodes, rows["1"]["GPUs"], rows["1"]["a failure every"]) == ("1", "2", "14 h")
    goodput_as_configured = float(rows["1"]["as configured"].rstrip(" %"))
    assert goodput_as_configured < float(rows["1"]["effective"].rstrip(" %")), "more frequent saves would be better"


def test_assumptions_replace_measured_inputs(run: Run) -> None:
    text = print_goodput_to_text(
        run.path, "goodput.failures=6.5", "goodput.gpu_hours=10", "goodput.gpu_hour=2", nodes="1"
    )
    assert "6.5  failures per 1,000 node-days (goodput.failures)" in text
    cost = float(read_table(text)["1"]["cost"])
    assert 20 <= cost < 24, "ten GPU-hours at a price of 2 each, and the hours that failures add"


def print_report_to_text(run: Run) -> str:
    """Return the printed report of a run, with its expected goodput."""
    file = io.StringIO()
    print_report(run, PlainConsole(file=file, width=200), goodput.describe_expected_goodput)
    return file.getvalue()


def test_report_compares_with_the_expected_goodput(run: Run) -> None:
    (line,) = [line for line in print_report_to_text(run).splitlines() if line.startswith("expected ")]
    assert "0.011 failures (there were 3): 6.5 per 1,000 node-days (assumed" in line and "measured: 3 in" in line
    ratio = float(line.split()[1])
    assert 0.99 < ratio < 0.997, "the losses are a start of 10 minutes in 40 hours, and 4 s of each hour for a save"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(goodput, "_node_days", lambda attempt, per_node: 0.24)
        assert "expected" not in print_report_to_text(run), "four attempts of 0.24 node-days are less than a node-day"
    run.metrics_file.write_text("")
    assert "expected" not in print_report_to_text(run), "without steps, nothing can be expected"


def test_without_a_run_the_inputs_are_from_papers(tmp_path: Path) -> None:
    text = print_goodput_to_text(write_config(tmp_path), "stages.train.tasks_per_node=8", nodes="2048,16384")
    assert "6.5  failures per 1,000 node-days (assumed: RSC-1's, arXiv 2410.21680)" in text
    rows = read_table(text)
    assert (rows["2,048"]["GPUs"], rows["2,048"]["a failure every"]) == ("16,384", "1.8 h")
    assert (rows["16,384"]["GPUs"], rows["16,384"]["a failure every"]) == ("131,072", "14 min")
    assert "waiting for nodes" not in text and "cost" not in rows["2,048"]


def test_a_run_that_would_never_end_is_marked(tmp_path: Path) -> None:
    text = print_goodput_to_text(
        write_config(tmp_path), "goodput.failures=1000", "goodput.save_s=3600", nodes="1,16384"
    )
    assert read_table(text)["16,384"]["days"] == "never"


def test_an_assumptions_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "assumptions.yaml"
    file.write_text("failures: 3.0\nspares: 2\n")  # failures per 1,000 node-days, and spare nodes
    text = print_goodput_to_text(write_config(tmp_path), assumptions=file, nodes="64")
    assert "         3  failures per 1,000 node-days" in text
    assert "waiting for nodes" in text, "a column that exists only if spare nodes are given"


def test_the_example_of_an_assumptions_file_is_valid() -> None:
    assert load_assumptions(CODE_ROOT / "configs/planning/assumptions.yaml") == GoodputAssumptions()
    keys = re.findall(r"^#? ?(\w+):", (CODE_ROOT / "configs/planning/assumptions.yaml").read_text(), re.MULTILINE)
    assert keys == list(GoodputAssumptions.model_fields)


@pytest.mark.parametrize(
    ("content", "expected_text"), [("failure: 3", "did you mean failures"), ("spares: -1", "spares"), ("5", "")]
)
def test_invalid_assumptions_are_an_error(tmp_path: Path, content: str, expected_text: str) -> None:
    file = tmp_path / "assumptions.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=expected_text) as error:
        load_assumptions(file)
    assert error.value.code == "plan.invalid_assumptions" and str(file) in str(error.value)
    with pytest.raises(UserError, match="did you mean failures"):
        print_goodput_to_text(write_config(tmp_path), "goodput.failure=3")


def test_format_span_uses_two_or_three_digits() -> None:
    assert [format_span(seconds) for seconds in (0.5, 95, 811, 6490, 166154, 3e5, 9e6)] == [
        "0.5 s", "95 s", "14 min", "1.8 h", "46 h", "3.5 days", "104 days",
    ]  # fmt: skip
