"""The verdict on a stage, and how often Slurm is asked; without a cluster."""

from __future__ import annotations

import io
import itertools
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cli import status as status_command
from data_prep.documents import Input
from data_prep.shard import missing_inputs
from data_prep.tokenizer import train_bpe
from pipeline.base.console import PlainConsole
from pipeline.config.read import load_config
from pipeline.data.manifest import FileEntry
from pipeline.run.directory import Run
from pipeline.run.events import find_current_stragglers
from pipeline.run.stages import load_stage_module
from slurm.query import job_states, slurm_commands, status
from slurm.query.job_states import JobState, RecordedJob
from slurm.query.run_jobs import SubmittedJob
from tests.support.events import make_event, parse_events, write_event
from tests.support.ranks import make_rank_info
from tests.support.tiny import CONFIG, HarmlessFlag, make_run
from tracking.report import print_report

STARTED = {"event": "started"}
DONE = {"event": "done"}
FAILED = {"event": "failed", "cause": "hang", "message": "rank 3"}


@pytest.mark.parametrize(
    ("missing", "held", "events", "job", "state", "why", "going"),
    [
        (None, False, [STARTED, DONE], "COMPLETED", "done", "", False),
        (None, False, [], None, "done", "", False),
        (None, True, [STARTED], None, "running", "", True),
        ("x is missing", False, [STARTED, DONE], "COMPLETED", "incomplete", "COMPLETED, but x", False),
        ("x is missing", False, [STARTED, DONE], None, "incomplete", "reported done, but x", False),
        ("x", False, [STARTED, FAILED], "FAILED", "failed", "(hang): rank 3", False),
        ("x", False, [STARTED, FAILED], "PENDING", "pending", "", True),
        ("x", False, [STARTED], "NODE_FAIL", "died", "NODE_FAIL: its supervisor wrote no final event", False),
        ("x", False, [], "FAILED", "failed", "before its supervisor started", False),
        ("x", False, [], "CANCELLED", "cancelled", "", False),
        ("x", False, [], job_states.UNKNOWN, "unknown", "does not know job 9", False),
        ("x", False, [STARTED], job_states.UNKNOWN, "died", "without a final event", False),
        ("x", True, [STARTED], job_states.UNKNOWN, "running", "", True),
        ("x", False, [], None, "waiting", "", False),
    ],
)
def test_the_verdict(
    missing: str | None, held: bool, events: list[dict[str, Any]], job: str | None, state: str, why: str, going: bool
) -> None:
    found = status.determine_state(missing, held, parse_events(events), JobState("9", job) if job else None)
    assert (found[0], found[2]) == (state, going) and (why in found[1] if why else not found[1]), found


def test_a_job_that_waits_in_vain_and_what_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    jobs = [
        SubmittedJob(run.path, "train", "3", JobState("3", "PENDING", "DependencyNeverSatisfied")),
        SubmittedJob(run.path, "evaluate", "4", JobState("4", "PENDING", "Dependency")),
    ]
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, forgotten: jobs)
    rows = {row.stage: row for row in status.StatusPoller(run).poll()}
    assert rows["train"].state == rows["evaluate"].state == "never"
    assert rows["evaluate"].problem == "job 4 waits for train"
    console = Console(width=150, record=True)
    status.print_status(run, console)
    assert "to continue: python submit.py resume" in console.export_text()


@pytest.mark.parametrize(
    ("reason", "who"), [("JobHeldUser", ""), ("JobHeldAdmin", "; only an administrator can do this")]
)
def test_a_held_job_says_who_lets_it_go(reason: str, who: str) -> None:
    found = status.determine_state("x", False, [], JobState("9", "PENDING", reason))
    assert found == ("held", f"until scontrol release 9 ({reason}{who})", True)


def test_of_a_stage_that_has_not_begun_what_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others nobody asks who only looks: there may be 100,000 inputs."""
    run = make_run(tmp_path)
    (run.data_dir / "manifest.json").unlink()
    asked: list[Input] = []
    problem = Input.find_problem

    def ask(one: Input) -> str | None:
        asked.append(one)
        return problem(one)

    monkeypatch.setattr(Input, "find_problem", ask)
    found = status.StatusPoller(run).poll()[:2]
    assert [(row.state, row.problem) for row in found] == [("done", ""), ("waiting", "")] and len(asked) == 1
    (corpus := tmp_path / "corpus.jsonl").unlink()
    found = status.StatusPoller(run).poll()[:2]
    gone = f"input {corpus} has been removed"
    assert [row.state for row in found] == ["done", "waiting"] and found[1].problem.startswith(gone)
    assert str(load_stage_module("prepare").missing_outputs(run)).startswith(gone)
    asked.clear()
    write_event(run, "submitted", "shard", job_id="1", executor="local")
    write_event(run, "started", "shard", job_id="1")
    assert status.StatusPoller(run).poll()[1].state == "died" and not asked, "one that began says so itself"


def test_of_many_inputs_some_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:03}.txt" for number in range(250)]
    asked: list[Path] = []

    def stat(path: Path) -> os.stat_result:
        asked.append(path)
        return os.stat(path)

    inputs = [Input(str(tmp_path / name), 0, 0, "text") for name in names]
    for source in inputs:
        Path(source.path).touch()
        os.utime(source.path, ns=(0, 0))
    folder = SimpleNamespace(path=tmp_path, inputs=inputs)
    monkeypatch.setattr("data_prep.shard.open_finished_data_folder", lambda run: folder)
    monkeypatch.setattr("data_prep.documents.os", SimpleNamespace(stat=stat))
    assert missing_inputs(Run(tmp_path)) is None and 80 < len(asked) <= 100
    for name in names[100:110]:
        (tmp_path / name).unlink()
    assert "removed" in str(missing_inputs(Run(tmp_path)))


def test_parts_of_a_file_are_asked_for_once_and_what_is_gone_of_a_finished_stage_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are used where they lie; nobody's supervisor ever said a word."""
    text = "data: {{source: {0}/n.bin, records: tokens, tokenizer: {{kind: file, path: {0}/tokenizer.json}},"
    text += " sequence_length: 32, shard_tokens: 1024}}\nrun: {{name: one, root: {0}}}\n"
    (tmp_path / "one.yaml").write_text(text.format(tmp_path) + CONFIG[CONFIG.index("model:") :].format(steps=2))
    (tmp_path / "tokenizer.json").write_text(train_bpe(["a step, then another"] * 9, 300, "<|endoftext|>"))
    path = tmp_path / "n.bin"
    np.tile(np.array([5, 6, 7, 0], "<u2"), 5000).tofile(path)
    run = Run.create(load_config(tmp_path / "one.yaml"))
    for stage in ("prepare", "shard"):
        load_stage_module(stage).run_stage(run, make_rank_info(0, 1, 1), {}, HarmlessFlag())
    asked: list[Path] = []
    real = FileEntry.find_problem

    def problem(entry: FileEntry, path: Path, hashes: bool = True) -> str | None:
        asked.append(path)
        return real(entry, path, hashes)

    monkeypatch.setattr(FileEntry, "find_problem", problem)
    row = status.StatusPoller(run).poll()[1]
    assert (row.state, row.cells["step"]) == (
        "done",
        "21/21 units",
    ) and asked.count(path) == 1
    path.unlink()
    row = status.StatusPoller(run).poll()[1]
    assert row.state == "waiting" and row.problem.startswith(f"{path} is missing")


def test_a_job_that_left_not_even_a_log_may_not_see_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    jobs = [SubmittedJob(run.path, "train", "3", JobState("3", "FAILED"))]
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, forgotten: jobs)
    hint = f"python submit.py doctor {run.path.parent} --check-nodes"
    assert hint in status.StatusPoller(run).poll()[2].problem
    (run.stage_dir("train") / "3_0_log.out").touch()
    assert hint not in status.StatusPoller(run).poll()[2].problem


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_reason_of_a_job_is_whole_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    run, reason = make_run(tmp_path), "ReqNodeNotAvail, UnavailableNodes:n1"
    jobs = [SubmittedJob(run.path, "train", "1234567", JobState("1234567", "PENDING", reason, "node[0001-0002]"))]
    jobs.append(SubmittedJob(run.path, "evaluate", "1234568", JobState("1234568", "PENDING", "Dependency")))
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, forgotten: jobs)
    console = Console(width=width, record=True)
    status.print_status(run, console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines[1:]), lines
    assert any("train" in line and "pending" in line and reason in line for line in lines), lines
    assert ("attempts" in lines[1]) == (width == 160)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_no_cell_is_cut(width: int) -> None:
    """Columns go that are least wanted; what is wider than the terminal then is wrapped by it, line by line."""
    parts = ["idle", "queue", "start-up", "compute", "comm", "save", "ending", "in all"]
    cells = [["stage", "attempt", "ranks", "end", *parts], ["evaluate", "array of 12", "8", "done", *["11:22:33"] * 8]]
    console = Console(width=width, record=True)
    console.print(status.build_table(cells, width), soft_wrap=True)
    lines = console.export_text().splitlines()
    shown = [(name, cell) for name, cell in zip(*cells, strict=True) if name in lines[0]]
    assert lines[1].split() == " ".join(cell for _, cell in shown).split() and "…" not in "".join(lines)
    assert {"stage", "attempt", "end", "queue", "start-up", "compute", "in all"} <= {name for name, _ in shown}
    assert (("idle", "11:22:33") in shown) == (width == 120)


@pytest.mark.parametrize("terminal", [False, True])
def test_where_no_line_can_be_overwritten_the_table_comes_as_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    run, looks = make_run(tmp_path), 0

    def jobs_of(runs: Sequence[Run], forgotten: dict[RecordedJob, JobState]) -> list[SubmittedJob]:
        nonlocal looks
        looks += 1
        state = "PENDING" if looks < 4 else "RUNNING" if looks < 8 else "CANCELLED"
        return [SubmittedJob(run.path, "train", "3", JobState("3", state))]

    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", jobs_of)
    monkeypatch.setattr(status, "QUERY_INTERVALS_S", (0.0, 0.0))
    monkeypatch.setattr(status_command, "POLL_INTERVAL_S", 0.001)
    text = io.StringIO()
    status_command.watch(run, PlainConsole(file=text, width=150, force_terminal=terminal, _environ={"TERM": "dumb"}))
    assert re.findall(r"^train +(\w+)", text.getvalue(), re.M) == ["pending", "running", "cancelled"]


def test_slurm_is_asked_less_and_less_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = make_run(tmp_path), 1000.0
    asked: list[float] = []
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)

    def jobs_of(run: Run, forgotten: dict[RecordedJob, JobState]) -> list[SubmittedJob]:
        asked.append(now)
        return []

    monkeypatch.setattr(status, "find_run_jobs", jobs_of)
    poller = status.StatusPoller(run)
    for _ in range(100):
        poller.poll()
        now += status.POLL_INTERVAL_S
    pauses = [round(b - a) for a, b in itertools.pairwise(asked)]
    assert pauses[0] == 2 and pauses[-1] == 30 and pauses == sorted(pauses) and len(pauses) < 15
    write_event(run, "requeued", "train")
    poller.poll()
    assert asked[-1] == now, "the run directory shows something new"
    now += status.POLL_INTERVAL_S
    poller.poll()
    assert asked[-1] == now


def test_one_question_for_all_jobs_and_none_for_those_long_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, told = [], "here|0|1970-01-01T00:00:00|a-train|"

    def call(*command: str, **_: Any) -> str | None:
        calls.append(command)
        return {
            "squeue": f"2_0|RUNNING|None|n1|{told}sluice /a\n2_1|PENDING|Resources||{told}sluice /a\n",
            "sacct": f"1|COMPLETED|None|n1|{told}\n",
        }.get(command[0])

    monkeypatch.setattr(slurm_commands, "run_slurm_command", call)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    submitted = datetime(1970, 1, 1).timestamp()
    one, two = (RecordedJob(job, ("sluice /a",), "here", 0, "a-train", submitted) for job in "12")
    kept: dict[RecordedJob, JobState] = {}
    for _ in range(2):
        found = job_states.query_job_states([one, two], kept)
        assert (found[one].state, found[two].state) == ("COMPLETED", "RUNNING")
    assert [c[0] for c in calls] == ["squeue", "sacct", "squeue"]
    assert "--me" in calls[0] and "1,2" in calls[0] and "2" in calls[2]


@pytest.mark.parametrize(("answers", "asked"), [(True, ["squeue", "sacct", "squeue"]), (False, ["squeue"] * 2)])
def test_what_nobody_knows_is_asked_once_where_slurm_answers(
    monkeypatch: pytest.MonkeyPatch, answers: bool, asked: list[str]
) -> None:
    calls: list[str] = []

    def call(*command: str, **_: Any) -> str | None:
        calls.append(command[0])
        return "" if answers and command[0] == "squeue" else None

    monkeypatch.setattr(slurm_commands, "run_slurm_command", call)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    kept: dict[RecordedJob, JobState] = {}
    for _ in range(2):
        found = job_states.query_job_states([RecordedJob("1")], kept)[RecordedJob("1")]
        assert found.state == job_states.UNKNOWN and (found.reason == slurm_commands.NOT_RESPONDING) == (not answers)
    assert [name for name in calls if answers or name == "squeue"] == asked


def test_slow_ranks_are_named_until_they_recover_or_start_again() -> None:
    started = make_event("started")
    slow = make_event("straggler", rank=2, host="n3", ratio=1.6)
    worse = make_event("straggler", rank=0, host="n1", ratio=2.5)
    assert find_current_stragglers([started, slow]) == [slow]
    assert find_current_stragglers([started, slow, worse])[0] == worse
    assert find_current_stragglers([started, slow, make_event("recovered", rank=2)]) == []
    assert find_current_stragglers([started, slow, started]) == []


def test_a_run_that_was_cancelled_or_left_half_made_can_be_looked_at(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.events_file.unlink()  # killed between config.yaml and the first event
    assert [row.state for row in status.StatusPoller(run).poll()] == ["done", "done", "waiting", "waiting"]
    console = Console(width=150, record=True)
    print_report(run, console)
    assert "0/30" in console.export_text()
    run.write_request(run.cancelled_file)
    assert [row.state for row in status.StatusPoller(run).poll()] == ["done", "done", "cancelled", "cancelled"]


@pytest.mark.parametrize(
    ("job", "state"),
    [
        (None, "waiting"),
        (JobState("4", "CANCELLED"), "cancelled"),
        (JobState("4", "COMPLETED"), "waiting"),  # of an earlier checkpoint
        (JobState("4", "PENDING", "Dependency"), "pending"),
        (JobState("4", "PENDING", "DependencyNeverSatisfied"), "never"),
        (JobState("4", "RUNNING"), "running"),
    ],
)
def test_an_evaluation_is_not_done_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobState | None, state: str
) -> None:
    """Each checkpoint so far has its evaluation, and more checkpoints are to come."""
    run = make_run(tmp_path)
    monkeypatch.setattr(load_stage_module("evaluate"), "missing_outputs", lambda run: None)
    trains = SubmittedJob(run.path, "train", "3", JobState("3", "RUNNING"))
    jobs = [trains] if job is None else [trains, SubmittedJob(run.path, "evaluate", "4", job)]
    poller = status.StatusPoller(run)
    assert [row.state for row in poller.statuses_from(jobs)] == ["done", "done", "running", state]
    if job is None:
        run.write_request(run.cancelled_file)
        assert [row.state for row in poller.statuses_from([])] == ["done", "done", "cancelled", "cancelled"]
        monkeypatch.setattr(load_stage_module("train"), "missing_outputs", lambda run: None)
        assert [row.state for row in poller.statuses_from([])] == ["done"] * 4


def test_the_report_in_the_terminal_counts_the_causes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, (event, cause) in enumerate([("preempted", "preempted"), ("failed", "node_failure")] * 2):
        write_event(run, "started", "train", job_id="1", attempt=attempt + 1, task=None, ranks=2)
        write_event(run, event, "train", job_id="1", attempt=attempt + 1, task=None, cause=cause, exit_code=1)
    console = Console(width=150, record=True)
    print_report(run, console)
    assert re.search(r"^cause +attempts .*\n(.*\n)*node_failure +2 .*\npreempted +2 ", console.export_text(), re.M)
