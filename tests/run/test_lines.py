"""Test how malformed lines in the files of a run are handled.

They are ignored and counted, except in files that affect the result of the run. There they are an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.base.errors import CheckpointError, InputError
from pipeline.base.files import add_checksum, append_line, write_json
from pipeline.checkpoint import catalog
from pipeline.config.read import load_config
from pipeline.evaluate.result import read_newest_result, result_file
from pipeline.resilience.guard import is_decision
from pipeline.run import lines
from pipeline.run.directory import Run
from pipeline.run.events import is_event
from pipeline.run.machines import get_compute_times_file
from pipeline.run.metrics import list_lost_lines, rewind_metrics
from pipeline.train.train_stage import progress
from slurm.query.status import print_status
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import write_config
from tracking.report import print_report

STEP_LINE = {"step": 1, "loss": 5.0, "step_time_s": 0.1, "tokens_per_s": 10.0}
EVALUATION = {
    "step": 1,
    "loss": 1.0,
    "perplexity": 2.7,
    "bits_per_byte": 1.4,
    "unigram_bits_per_byte": 2.0,
    "tokens": 9,
}
INVALID_EVENT_FIELDS: list[dict[str, Any]] = [
    {"time": "2026-91-01T00:00:00Z"}, {"time": 5}, {"time": "2026-01-01T00:00:00"}, {"event": None},
    {"time": "0001-01-01T00:00:00Z"}, {"time": "9999-12-31T00:00:00Z"}, {"time": "2926-01-01T00:00:00Z"},
    {"event": ["started"]}, {"stage": {}}, {"task": "x"}, {"ranks": -1}, {"ranks": 1e300}, {"attempt": -1},
    {"event": "saved"}, {"event": "saved", "step": "7"}, {"event": "lost_work", "steps": [1], "lines": [{}]},
    {"event": "straggler", "rank": 1}, {"event": "failed", "exit_code": 9999}, {"event": "done", "seconds": "x"},
    {"event": "submitted", "job_id": ["9"]}, {"event": "submitted", "job_id": "9", "kind": "afterok"},
    {"uid": []}, {"cause": {}, "event": "failed"}, {"by": [], "event": "stopping"},
]  # fmt: skip
VALID_EVENT = {"time": "2026-01-01T00:00:00Z", "event": "started", "stage": "train", "attempt": 1}
MALFORMED_EVENTS = [
    "{}", '{"step": 5}', "null", "[]", '"event"', "1e999", "{torn", '{"event": "started"}', "\x00\x1b[2J",
    '{"a": ' * 9999, *(json.dumps({**VALID_EVENT, **change}) for change in INVALID_EVENT_FIELDS),
]  # fmt: skip
INVALID_STEP_FIELDS: list[dict[str, Any]] = [
    {"step": "5"}, {"step": True}, {"step": 1.5}, {"step": 10**30}, {"loss": 10**400}, {"loss": None}, {"loss": "nan"},
    {"loss": float("nan")}, {"step_time_s": None}, {"step_time_s": -1}, {"step_time_s": 1e300},
    {"tokens_per_s": None}, {"data_wait_s": "x"}, {"checkpoint_s": []}, {"loss": None, "skipped": None},
]  # fmt: skip
MALFORMED_STEPS = [
    '{"step": 5}', "null", "{torn", "17", '{"loss": 1.0}',
    *(json.dumps({**STEP_LINE, "step": 5, **change}) for change in INVALID_STEP_FIELDS),
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a run with the events, the metrics, the checkpoint and the evaluation of one step."""
    monkeypatch.setattr(Run, "copy_code", lambda self: None)
    run = Run.create(load_config(write_config(tmp_path)))
    write_event(run, "started", "train", job_id="1", attempt=1, task=None, ranks=2)
    write_event(run, "ready", "train", step=0)
    append_line(run.metrics_file, json.dumps(STEP_LINE))
    write_event(run, "done", "train", job_id="1", attempt=1, task=None, exit_code=0)
    checkpoint = run.checkpoints_dir / catalog.checkpoint_name(1)
    checkpoint.mkdir()
    write_json(
        checkpoint / catalog.MANIFEST_FILE, add_checksum({"step": 1, "samples_consumed": 8, "layout": {}, "files": {}})
    )
    sha256 = catalog.read_checkpoint_manifest(checkpoint)["sha256"]
    write_json(result_file(run, 1), add_checksum({**EVALUATION, "checkpoint": sha256}))
    return run


def print_run(run: Run) -> str:
    """Return the output of `status` and `report`."""
    console = Console(width=200, record=True)
    print_status(Run.open(run.path), console)
    print_report(Run.open(run.path), console)
    return console.export_text()


def test_malformed_events_are_ignored_and_counted(run: Run) -> None:
    events_before = read_event_lines(run)
    for line in MALFORMED_EVENTS:
        append_line(run.events_file, line)
    assert read_event_lines(run) == events_before
    assert print_run(run).count(f"events.jsonl: {len(MALFORMED_EVENTS)} malformed lines left out") == 2


def test_malformed_steps_are_ignored_and_counted(run: Run) -> None:
    for line in MALFORMED_STEPS:
        append_line(run.metrics_file, line)
    assert progress(run).description.startswith("1/30 steps, loss 5.0000")
    assert f"metrics.jsonl: {len(MALFORMED_STEPS)} malformed lines left out" in print_run(run)
    assert list_lost_lines(run.metrics_file, 0) == [STEP_LINE] and not list_lost_lines(run.metrics_file, 1)
    rewind_metrics(run.metrics_file, 1)
    assert run.metrics_file.read_text() == json.dumps(STEP_LINE) + "\n"


def test_a_line_that_is_being_written_is_not_malformed(run: Run) -> None:
    with open(run.events_file, "a") as file:
        file.write('{"time": "20')
    assert lines.describe_malformed_lines(run.events_file, is_event) == ""
    assert lines.describe_malformed_lines(run.path / "none", is_event) == "", "a missing file must not be an error"


@pytest.mark.parametrize(
    "content",
    ["", "{torn", "null", "[]", "{}", json.dumps(EVALUATION), json.dumps(add_checksum({**EVALUATION, "checkpoint": 5})),
     "[" * 9999,
     json.dumps(add_checksum({**EVALUATION, "checkpoint": "x"})).replace('"loss": 1.0', '"loss": 1.5'),
     json.dumps({**EVALUATION, "bits_per_byte": "1.4", "checkpoint": "x"})],
)  # fmt: skip
def test_a_malformed_evaluation_is_ignored_and_reported(run: Run, content: str) -> None:
    assert read_newest_result(run) is not None
    result_file(run, 1).write_text(content)
    assert read_newest_result(run) is None
    assert "evaluation/step-00000001.json is left out" in print_run(run)


@pytest.mark.parametrize("content", ["", "{torn", "[1]", '{"n1": null}', '{"n1": "fast"}', "\xff"])
def test_malformed_compute_times_are_ignored(run: Run, content: str) -> None:
    (run.stage_dir("train") / get_compute_times_file(run.jobs_dir).name).write_text(content, encoding="latin-1")
    assert "local compute time per step by host" not in print_run(run)


@pytest.mark.parametrize("content", ["{}", '{"set": 5}', '{"set": {"train": {"steps": 50}}, }', "[]"])
def test_a_malformed_config_change_is_an_error_but_an_incomplete_line_is_ignored(run: Run, content: str) -> None:
    """A line without its end is left if a process is killed while it writes."""
    run.apply_overrides(["train.steps=40"])
    append_line(run.changes_file, '{"time": "2026-01-01T00:00:00Z", "set": {"train')
    assert Run(run.path).config.train.steps == 40
    append_line(run.changes_file, content)
    with pytest.raises(InputError) as error:
        _ = Run(run.path).config
    assert error.value.code == "run.damaged_file" and "changes.jsonl, line 3" in str(error.value)


@pytest.mark.parametrize("line", [{}, {"decision": "skip"}, {"decision": "leave_out", "position": 8, "reason": "x"}])
def test_a_malformed_decision_is_an_error(run: Run, line: dict[str, Any]) -> None:
    append_line(run.decisions_file, json.dumps({"decision": "skip", "position": 8, "reason": "x"}))
    assert len(lines.read_required_lines(run.decisions_file, is_decision)) == 1
    append_line(run.decisions_file, json.dumps(line))
    with pytest.raises(InputError) as error:
        lines.read_required_lines(run.decisions_file, is_decision)
    assert error.value.code == "run.damaged_file" and "decisions.jsonl, line 2" in str(error.value)


def test_a_checkpoint_in_the_directory_of_another_step_is_rejected(run: Run) -> None:
    (run.checkpoints_dir / catalog.checkpoint_name(1)).rename(run.checkpoints_dir / catalog.checkpoint_name(30))
    with pytest.raises(CheckpointError) as error:
        catalog.read_checkpoint_manifest(run.checkpoints_dir / catalog.checkpoint_name(30))
    assert error.value.code == "checkpoint.renamed"
    assert catalog.find_newest_step(run.checkpoints_dir) == 0
