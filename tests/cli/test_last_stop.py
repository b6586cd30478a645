"""Test how `status` describes the last stop of a stage. The description follows from the events of the stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli import status as status_command
from pipeline.base.console import PlainConsole
from pipeline.config.read import load_config
from pipeline.run.directory import Run, create_points
from slurm.query import status
from slurm.query.job_states import JobState
from slurm.query.run_jobs import SubmittedJob
from slurm.query.status import find_last_stop
from tests.support.events import parse_events, write_event
from tests.support.tiny import make_run, write_config

SUBMITTED: dict[str, Any] = {"event": "submitted", "job_id": "3", "kind": "afterok", "after": []}
STARTED: dict[str, Any] = {"event": "started", "task": None, "job_id": "3", "slurm_job": "3"}
SAVED_AT_1210 = {"event": "saved", "step": 1210}
STOP_AT_1215 = {"event": "stop_requested", "step": 1215, "signal": "SIGUSR2"}
REQUEUED = {"event": "requeued", "task": None}


def make_end(event: str, cause: str) -> dict[str, Any]:
    """Return the name and the fields of an event that ends an attempt."""
    return {"event": event, "task": None, "cause": cause}


PREEMPTED_ATTEMPT: list[dict[str, Any]] = [
    SUBMITTED,
    STARTED,
    SAVED_AT_1210,
    STOP_AT_1215,
    make_end("preempted", "preempted"),
    REQUEUED,
]
RESTORED_ATTEMPT: list[dict[str, Any]] = [STARTED, {"event": "restored", "step": 1215}]


@pytest.mark.parametrize(
    ("events", "job_state", "description"),
    [
        (PREEMPTED_ATTEMPT, "PENDING", "train pending (Priority), requeued after preemption at step 1215 (1 attempt)"),
        (
            [*PREEMPTED_ATTEMPT, *RESTORED_ATTEMPT],
            "RUNNING",
            "train running, requeued after preemption at step 1215 (2 attempts)",
        ),
        (
            [*PREEMPTED_ATTEMPT, *RESTORED_ATTEMPT, make_end("failed", "node_failure"), REQUEUED],
            "PENDING",
            "train pending (Priority), requeued after a node failure with a checkpoint of step 1215 (2 attempts)",
        ),
        (
            [SUBMITTED, STARTED, STOP_AT_1215, make_end("stopped", "requeued"), REQUEUED],
            "PENDING",
            "train pending (Priority), requeued at step 1215 (1 attempt)",
        ),
        (  # the supervisor wrote the event `stopping`, and was then killed
            [
                SUBMITTED,
                STARTED,
                SAVED_AT_1210,
                {"event": "stopping", "task": None, "by": "SIGTERM", "cause": "preempted"},
            ],
            "PENDING",
            "train pending (Priority), requeued after preemption with a checkpoint of step 1210 (1 attempt)",
        ),
        (  # the supervisor was killed with its node
            [SUBMITTED, STARTED, SAVED_AT_1210],
            "PENDING",
            "train pending (Priority), requeued with a checkpoint of step 1210 (1 attempt)",
        ),
        ([SUBMITTED, STARTED, SAVED_AT_1210], "RUNNING", None),
        ([SUBMITTED], "PENDING", None),
        (
            [
                SUBMITTED,
                STARTED,
                STOP_AT_1215,
                make_end("stopped", "time_limit"),
                {"event": "handed_over", "task": None},
            ],
            "PENDING",
            "train pending (Priority), handed over to the next job after its time limit at step 1215 (1 attempt)",
        ),
        (
            [SUBMITTED, STARTED, SAVED_AT_1210, make_end("failed", "crashed"), SUBMITTED],
            "PENDING",
            "train pending (Priority), submitted again after a crash with a checkpoint of step 1210 (1 attempt)",
        ),
        (
            [SUBMITTED, STARTED, STOP_AT_1215, make_end("stopped", "SIGTERM"), REQUEUED],
            "PENDING",
            "train pending (Priority), requeued after a signal (SIGTERM) at step 1215 (1 attempt)",
        ),
        (
            [SUBMITTED, STARTED, STOP_AT_1215, make_end("stopped", "stop file")],
            "CANCELLED",
            "train stopped after a stop request at step 1215 (1 attempt)",
        ),
        (
            [SUBMITTED, STARTED, STOP_AT_1215, make_end("cancelled", "cancelled")],
            "CANCELLED",
            "train cancelled at step 1215 (1 attempt)",
        ),
    ],
)
def test_status_describes_the_last_stop(
    tmp_path: Path, events: list[dict[str, Any]], job_state: str, description: str | None
) -> None:
    """The step of a stop is in the events. If the attempt was killed, only the step of its checkpoint is known."""
    run = Run.create(load_config(write_config(tmp_path)))
    for event in events:
        write_event(run, event["event"], "train", **{key: value for key, value in event.items() if key != "event"})
    reason = "Priority" if job_state == "PENDING" else "None"
    poller = status.StatusPoller(run)
    rows = poller.read_statuses([SubmittedJob(run.path, "train", "3", JobState("3", job_state, reason))])
    console = Console(width=200, record=True)
    console.print(status.render_status(run, rows, width=200), soft_wrap=True)
    lines = [line for line in console.export_text().splitlines() if re.search(r"\(\d+ attempts?\)$", line)]
    assert lines == ([description] if description else [])


def test_a_stage_that_is_done_has_no_last_stop() -> None:
    """If an end event follows the event `done`, there is a last stop again."""
    events = [*PREEMPTED_ATTEMPT, *RESTORED_ATTEMPT, {"event": "done", "task": None}]
    assert find_last_stop(parse_events(events), None) is None
    assert find_last_stop(parse_events([*events, make_end("stopped", "requeued")]), None) is not None


def test_the_tasks_of_an_array_have_separate_attempts() -> None:
    tasks: list[dict[str, Any]] = [{"event": "started", "task": task, "job_id": f"3_{task}"} for task in (0, 1)]
    events = [SUBMITTED, *tasks, {**make_end("preempted", "preempted"), "task": 1}, {**REQUEUED, "task": 1}]
    stop = find_last_stop(parse_events(events), None)
    assert stop is not None and (stop.cause, stop.attempts, stop.continuation) == ("preempted", 1, "requeued")
    task_1_is_done = [{"event": "started", "task": 1}, {"event": "done", "task": 1}]
    assert find_last_stop(parse_events([*events, *task_1_is_done]), None) is None
    # job 4 waits for the array, whose tasks are still running
    assert find_last_stop(parse_events([SUBMITTED, *tasks]), "4") is None


def test_the_last_stop_is_short_for_points_and_in_the_list_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points 000 and 002 were preempted. An administrator requeued point 001."""
    monkeypatch.chdir(tmp_path)
    data_dir = make_run(tmp_path).data_dir
    sweep = make_run(tmp_path, "sweep", ("sweep={grid: {optimizer.lr: [0.001, 0.01, 0.1]}}",), data_dir)
    points = create_points(sweep)
    jobs = []
    for number, point in enumerate(points):
        job = {"job_id": f"3_{number}", "executor": "slurm"}
        write_event(point, "submitted", "train", kind="afterok", after=[], **job)
        write_event(point, "started", "train", task=None, **job)
        jobs.append(SubmittedJob(point.path, "train", f"3_{number}", JobState(f"3_{number}", "PENDING", "Priority")))
    for point in points[::2]:
        write_event(point, "preempted", "train", task=None, cause="preempted")
        write_event(point, "requeued", "train", task=None, cause="preempted")
    write_event(points[1], "stopped", "train", task=None, cause="requeued")
    write_event(points[1], "requeued", "train", task=None, cause="requeued")
    poller = status.StatusPoller(sweep)
    rows = poller.read_statuses(jobs)
    console = Console(width=200, record=True)
    console.print(status.render_status(sweep, rows, poller.point_statuses, width=200), soft_wrap=True)
    text = console.export_text()
    assert "points 000, 002: train pending, requeued after preemption\n" in text
    assert "point 001: train pending, requeued\n" in text
    monkeypatch.setattr(status_command, "find_run_jobs", lambda runs: jobs)
    plain_console = PlainConsole(width=160, record=True)
    status_command.print_runs(Path("runs"), plain_console)
    assert re.search("^runs/sweep +train +pending .*requeued after preemption ", plain_console.export_text(), re.M)
