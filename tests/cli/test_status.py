"""Test the states of stages and the tables that `status` shows, and how often it queries Slurm."""

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
from tests.support.tiny import CONFIG, PassiveStopFlag, make_run
from tracking.report import print_report

STARTED = {"event": "started"}
DONE = {"event": "done"}
FAILED = {"event": "failed", "cause": "hang", "message": "rank 3"}


@pytest.mark.parametrize(
    ("missing_outputs", "is_locked", "events", "job_state", "state", "problem", "is_active"),
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
def test_the_state_of_a_stage_follows_from_its_outputs_lock_events_and_job(
    missing_outputs: str | None,
    is_locked: bool,
    events: list[dict[str, Any]],
    job_state: str | None,
    state: str,
    problem: str,
    is_active: bool,
) -> None:
    """`missing_outputs` describes which outputs are missing (None: none), `job_state` is the state of job 9."""
    job = JobState("9", job_state) if job_state else None
    summary = status.determine_state(missing_outputs, is_locked, parse_events(events), job)
    assert (summary.state, summary.is_active) == (state, is_active)
    assert problem in summary.problem and bool(problem) == bool(summary.problem), summary


def test_the_state_of_jobs_with_an_unsatisfiable_dependency_is_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dependency of train can never be satisfied, so evaluate, which depends on train, can never start either."""
    run = make_run(tmp_path)
    jobs = [
        SubmittedJob(run.path, "train", "3", JobState("3", "PENDING", "DependencyNeverSatisfied")),
        SubmittedJob(run.path, "evaluate", "4", JobState("4", "PENDING", "Dependency")),
    ]
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, final_states: jobs)
    rows = {row.stage: row for row in status.StatusPoller(run).poll()}
    assert rows["train"].state == rows["evaluate"].state == "never"
    assert rows["evaluate"].problem == "job 4 waits for train"
    console = Console(width=150, record=True)
    status.print_status(run, console)
    assert "to continue: python submit.py resume" in console.export_text()


@pytest.mark.parametrize(
    ("reason", "hint"), [("JobHeldUser", ""), ("JobHeldAdmin", "; only an administrator can do this")]
)
def test_the_state_of_a_held_job_has_the_command_that_releases_it(reason: str, hint: str) -> None:
    summary = status.determine_state("x", False, [], JobState("9", "PENDING", reason))
    assert summary == ("held", f"until scontrol release 9 ({reason}{hint})", True)


def test_the_state_of_a_waiting_stage_names_a_missing_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` checks the input files only of stages that wait for them, because there may be 100,000 files."""
    run = make_run(tmp_path)
    (run.data_dir / "manifest.json").unlink()
    checked_inputs: list[Input] = []
    find_problem = Input.find_problem

    def record_check(source: Input) -> str | None:
        checked_inputs.append(source)
        return find_problem(source)

    monkeypatch.setattr(Input, "find_problem", record_check)
    rows = status.StatusPoller(run).poll()[:2]
    assert [(row.state, row.problem) for row in rows] == [("done", ""), ("waiting", "")]
    assert len(checked_inputs) == 1, "the corpus must be checked once"
    corpus = tmp_path / "corpus.jsonl"
    corpus.unlink()
    rows = status.StatusPoller(run).poll()[:2]
    assert [row.state for row in rows] == ["done", "waiting"]
    for problem in (rows[1].problem, str(load_stage_module(run, "prepare").describe_missing_outputs(run))):
        assert problem.startswith(f"input {corpus} has been removed")
    checked_inputs.clear()
    write_event(run, "submitted", "shard", job_id="1", executor="local")
    write_event(run, "started", "shard", job_id="1")
    assert status.StatusPoller(run).poll()[1].state == "died"
    assert not checked_inputs, "`status` must not check the inputs of a stage that has started"


def test_at_most_100_of_many_inputs_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of all 250 files could be slow on a busy file system. About every third file is checked."""
    names = [f"{number:03}.txt" for number in range(250)]
    checked_paths: list[Path] = []

    def record_stat(path: Path) -> os.stat_result:
        checked_paths.append(path)
        return os.stat(path)

    inputs = [Input(str(tmp_path / name), 0, 0, "text") for name in names]
    for source in inputs:
        Path(source.path).touch()
        os.utime(source.path, ns=(0, 0))
    folder = SimpleNamespace(path=tmp_path, inputs=inputs)
    monkeypatch.setattr("data_prep.shard.open_finished_data_folder", lambda run: folder)
    monkeypatch.setattr("data_prep.documents.os", SimpleNamespace(stat=record_stat))
    assert missing_inputs(Run(tmp_path)) is None and 80 < len(checked_paths) <= 100
    for name in names[100:110]:  # some of ten consecutive files are checked
        (tmp_path / name).unlink()
    assert "removed" in str(missing_inputs(Run(tmp_path)))


def test_a_token_file_with_many_parts_is_checked_once_and_named_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run reads an existing token file without a copy of it. Each work unit is a part of this file.

    The file has 20,000 tokens: 20 parts of at most 1,024 tokens for training, and one held-out part.
    """
    text = "data: {{source: {0}/tokens.bin, records: tokens, tokenizer: {{kind: file, path: {0}/tokenizer.json}},"
    text += " sequence_length: 32, shard_tokens: 1024}}\nrun: {{name: tokens, root: {0}}}\n"
    (tmp_path / "tokens.yaml").write_text(text.format(tmp_path) + CONFIG[CONFIG.index("model:") :].format(steps=2))
    (tmp_path / "tokenizer.json").write_text(train_bpe(["a step, then another"] * 9, 300, "<|endoftext|>"))
    path = tmp_path / "tokens.bin"
    np.tile(np.array([5, 6, 7, 0], "<u2"), 5000).tofile(path)
    run = Run.create(load_config(tmp_path / "tokens.yaml"))
    for stage in ("prepare", "shard"):
        load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
    checked_paths: list[Path] = []
    find_problem = FileEntry.find_problem

    def record_check(entry: FileEntry, path: Path, hashes: bool = True) -> str | None:
        checked_paths.append(path)
        return find_problem(entry, path, hashes)

    monkeypatch.setattr(FileEntry, "find_problem", record_check)
    row = status.StatusPoller(run).poll()[1]
    assert (row.state, row.cells["step"]) == ("done", "21/21 units") and checked_paths.count(path) == 1
    path.unlink()
    row = status.StatusPoller(run).poll()[1]
    assert row.state == "waiting" and row.problem.startswith(f"{path} is missing")


def test_a_failed_job_without_a_log_gets_the_advice_to_check_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log may be missing because the node cannot access the run directory."""
    run = make_run(tmp_path)
    jobs = [SubmittedJob(run.path, "train", "3", JobState("3", "FAILED"))]
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, final_states: jobs)
    hint = f"python submit.py doctor {run.path.parent} --check-nodes"
    assert hint in status.StatusPoller(run).poll()[2].problem
    (run.stage_dir("train") / "3_0_log.out").touch()
    assert hint not in status.StatusPoller(run).poll()[2].problem


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_the_reason_of_a_job_is_not_truncated_on_a_narrow_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Instead, the table omits columns such as `attempts`."""
    run = make_run(tmp_path)
    reason = "ReqNodeNotAvail, UnavailableNodes:n1"
    jobs = [
        SubmittedJob(run.path, "train", "1234567", JobState("1234567", "PENDING", reason, "node[0001-0002]")),
        SubmittedJob(run.path, "evaluate", "1234568", JobState("1234568", "PENDING", "Dependency")),
    ]
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", lambda run, final_states: jobs)
    console = Console(width=width, record=True)
    status.print_status(run, console)
    lines = console.export_text().splitlines()
    assert all(len(line) <= width for line in lines[1:]), lines
    assert any("train" in line and "pending" in line and reason in line for line in lines), lines
    assert ("attempts" in lines[1]) == (width == 160)


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_a_narrow_table_omits_columns_instead_of_truncating_cells(width: int) -> None:
    """If the remaining columns are still too wide, the terminal wraps each line."""
    durations = ["idle", "queue", "start-up", "compute", "comm", "save", "ending", "in all"]
    head = ["stage", "attempt", "ranks", "end", *durations]
    rows = [head, ["evaluate", "array of 12", "8", "done", *["11:22:33"] * 8]]
    console = Console(width=width, record=True)
    console.print(status.build_table(rows, width), soft_wrap=True)
    lines = console.export_text().splitlines()
    printed_columns = [(name, cell) for name, cell in zip(*rows, strict=True) if name in lines[0]]
    assert lines[1].split() == " ".join(cell for _, cell in printed_columns).split() and "…" not in "".join(lines)
    printed_names = {name for name, _ in printed_columns}
    assert {"stage", "attempt", "end", "queue", "start-up", "compute", "in all"} <= printed_names
    assert ("idle" in printed_names) == (width == 120)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_watch_prints_the_table_after_each_change_if_the_output_is_no_terminal_or_a_dumb_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """A dumb terminal (TERM=dumb) cannot overwrite lines."""
    run = make_run(tmp_path)
    query_count = 0

    def find_jobs(runs: Sequence[Run], final_states: dict[RecordedJob, JobState]) -> list[SubmittedJob]:
        nonlocal query_count
        query_count += 1
        state = "PENDING" if query_count < 4 else "RUNNING" if query_count < 8 else "CANCELLED"
        return [SubmittedJob(run.path, "train", "3", JobState("3", state))]

    monkeypatch.setattr(status, "uses_slurm", lambda run: True)
    monkeypatch.setattr(status, "find_run_jobs", find_jobs)
    monkeypatch.setattr(status, "QUERY_INTERVALS_S", (0.0, 0.0))
    monkeypatch.setattr(status_command, "POLL_INTERVAL_S", 0.001)
    file = io.StringIO()
    status_command.watch(run, PlainConsole(file=file, width=150, force_terminal=is_terminal, _environ={"TERM": "dumb"}))
    assert re.findall(r"^train +(\w+)", file.getvalue(), re.M) == ["pending", "running", "cancelled"]


def test_slurm_is_queried_less_and_less_often_until_an_event_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses between the queries grow from 2 s to 30 s."""
    run = make_run(tmp_path)
    now = 1000.0
    query_times: list[float] = []
    monkeypatch.setattr(status.time, "monotonic", lambda: now)
    monkeypatch.setattr(status, "uses_slurm", lambda run: True)

    def find_jobs(run: Run, final_states: dict[RecordedJob, JobState]) -> list[SubmittedJob]:
        query_times.append(now)
        return []

    monkeypatch.setattr(status, "find_run_jobs", find_jobs)
    poller = status.StatusPoller(run)
    for _ in range(100):
        poller.poll()
        now += status.POLL_INTERVAL_S
    pauses_s = [round(next_time - time) for time, next_time in itertools.pairwise(query_times)]
    assert pauses_s[0] == 2 and pauses_s[-1] == 30 and pauses_s == sorted(pauses_s) and len(pauses_s) < 15
    write_event(run, "requeued", "train")
    poller.poll()
    assert query_times[-1] == now, "the event must cause a query at once"
    now += status.POLL_INTERVAL_S
    poller.poll()
    assert query_times[-1] == now, "after an event, the pauses must be short again"


def test_all_jobs_are_queried_at_once_and_ended_jobs_are_not_queried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Job 1 has ended and is only in accounting. Job 2 is an array with a running and a pending task."""
    commands: list[tuple[str, ...]] = []
    identity = "cluster1|0|1970-01-01T00:00:00|a-train|"

    def run_command(*command: str, **_: Any) -> str | None:
        commands.append(command)
        return {
            "squeue": f"2_0|RUNNING|None|n1|{identity}sluice /a\n2_1|PENDING|Resources||{identity}sluice /a\n",
            "sacct": f"1|COMPLETED|None|n1|{identity}\n",
        }.get(command[0])

    monkeypatch.setattr(slurm_commands, "run_slurm_command", run_command)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "cluster1")
    submit_time = datetime(1970, 1, 1).timestamp()
    ended_job, running_job = (
        RecordedJob(job_id, ("sluice /a",), "cluster1", 0, "a-train", submit_time) for job_id in ("1", "2")
    )
    final_states: dict[RecordedJob, JobState] = {}
    for _ in range(2):
        states = job_states.query_job_states([ended_job, running_job], final_states)
        assert (states[ended_job].state, states[running_job].state) == ("COMPLETED", "RUNNING")
    assert [command[0] for command in commands] == ["squeue", "sacct", "squeue"]
    assert "--me" in commands[0] and "1,2" in commands[0] and "2" in commands[2]


@pytest.mark.parametrize(
    ("is_responding", "expected_commands"), [(True, ["squeue", "sacct", "squeue"]), (False, ["squeue", "squeue"])]
)
def test_an_unknown_job_is_queried_again_only_if_slurm_does_not_respond(
    monkeypatch: pytest.MonkeyPatch, is_responding: bool, expected_commands: list[str]
) -> None:
    """A query calls squeue for the jobs of this user, then sacct, then squeue for the jobs of other users."""
    commands: list[str] = []

    def run_command(*command: str, **_: Any) -> str | None:
        commands.append(command[0])
        return "" if is_responding and command[0] == "squeue" else None

    monkeypatch.setattr(slurm_commands, "run_slurm_command", run_command)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "cluster1")
    final_states: dict[RecordedJob, JobState] = {}
    for _ in range(2):
        state = job_states.query_job_states([RecordedJob("1")], final_states)[RecordedJob("1")]
        assert state.state == job_states.UNKNOWN
        assert (state.reason == slurm_commands.NOT_RESPONDING) == (not is_responding)
    assert [name for name in commands if is_responding or name == "squeue"] == expected_commands


def test_stragglers_are_reported_until_they_recover_or_a_new_attempt_starts() -> None:
    started = make_event("started")
    slow_rank = make_event("straggler", rank=2, host="n3", ratio=1.6)
    slower_rank = make_event("straggler", rank=0, host="n1", ratio=2.5)
    assert find_current_stragglers([started, slow_rank]) == [slow_rank]
    assert find_current_stragglers([started, slow_rank, slower_rank])[0] == slower_rank, "the slowest must be first"
    assert find_current_stragglers([started, slow_rank, make_event("recovered", rank=2)]) == []
    assert find_current_stragglers([started, slow_rank, started]) == []


def test_status_and_report_work_for_a_run_without_events_and_a_cancelled_run(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.events_file.unlink()  # as if submit.py was killed after it wrote config.yaml
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
        (JobState("4", "COMPLETED"), "waiting"),  # the job evaluated only an earlier checkpoint
        (JobState("4", "PENDING", "Dependency"), "pending"),
        (JobState("4", "PENDING", "DependencyNeverSatisfied"), "never"),
        (JobState("4", "RUNNING"), "running"),
    ],
)
def test_evaluate_is_not_done_before_train_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobState | None, state: str
) -> None:
    """All checkpoints so far are evaluated, but the train stage will save more."""
    run = make_run(tmp_path)
    monkeypatch.setattr(load_stage_module(run, "evaluate"), "describe_missing_outputs", lambda run: None)
    train_job = SubmittedJob(run.path, "train", "3", JobState("3", "RUNNING"))
    jobs = [train_job] if job is None else [train_job, SubmittedJob(run.path, "evaluate", "4", job)]
    poller = status.StatusPoller(run)
    assert [row.state for row in poller.read_statuses(jobs)] == ["done", "done", "running", state]
    if job is None:
        run.write_request(run.cancelled_file)
        assert [row.state for row in poller.read_statuses([])] == ["done", "done", "cancelled", "cancelled"]
        monkeypatch.setattr(load_stage_module(run, "train"), "describe_missing_outputs", lambda run: None)
        assert [row.state for row in poller.read_statuses([])] == ["done"] * 4


def test_the_report_in_the_terminal_counts_attempts_by_cause(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for attempt, (event, cause) in enumerate([("preempted", "preempted"), ("failed", "node_failure")] * 2):
        write_event(run, "started", "train", job_id="1", attempt=attempt + 1, task=None, ranks=2)
        write_event(run, event, "train", job_id="1", attempt=attempt + 1, task=None, cause=cause, exit_code=1)
    console = Console(width=150, record=True)
    print_report(run, console)
    assert re.search(r"^cause +attempts .*\n(.*\n)*node_failure +2 .*\npreempted +2 ", console.export_text(), re.M)
