"""Tests of submissions that were interrupted, with fake Slurm commands.

A submission is unconfirmed if no event says whether Slurm accepted the job. The next command finds such jobs, and
records or cancels them. It also completes an incomplete chain.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.config.read import load_config
from pipeline.run.directory import Run, list_points
from slurm.query import job_states, slurm_commands
from slurm.query.job_states import RecordedJob
from slurm.query.run_jobs import (
    events_since_submission,
    find_run_jobs,
    find_submission_indices,
    job_comment,
    list_recorded_jobs,
    list_submissions,
)
from slurm.query.status import print_status
from slurm.submit import sbatch
from slurm.submit.chain import cancel_run, reset_for_resume, submit_chain
from slurm.supervise import background, succession
from slurm.supervise.succession import find_predecessor
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.events import read_event_lines, write_event
from tests.support.fake_slurm import CLUSTER, FakeSlurm
from tests.support.tiny import make_run, write_config

CHAIN = [
    ("prepare", ""), ("shard", "afterok:0"), ("shard", "afterany:1"), ("train", "afterok:2"), ("evaluate", "afterok:3"),
]  # fmt: skip
"""Stage and dependency of each job of a new chain, as `FakeSlurm.list_queue` returns them."""
SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01, 0.1]}}"


class Killed(BaseException):
    """An exception that the product code does not catch, in place of SIGKILL."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Put the commands of a FakeSlurm on PATH and return the FakeSlurm."""
    fake_slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake_slurm.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
    monkeypatch.setattr(slurm_commands, "_retry_times", {})
    monkeypatch.setattr(sbatch, "RECHECK_DELAYS_S", (0.1, 0.2, 0.3))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return fake_slurm


@pytest.fixture
def run(tmp_path: Path, slurm: FakeSlurm) -> Run:
    """Return a run for which no stage is done."""
    return Run.create(load_config(write_config(tmp_path)))


def submit(run: Run) -> str:
    """Submit the chain of a run and return the output."""
    console = PlainConsole(width=200, record=True)
    with run.lock_exclusively():
        submit_chain(run, console, resubmit_failed=False)
    return str(console.export_text())


def read_status(run: Run) -> str:
    """Return the output of `status`."""
    console = PlainConsole(width=200, record=True)
    print_status(run, console)
    return str(console.export_text())


@contextmanager
def kill_at_sbatch_call(call_number: int, *, is_accepted: bool) -> Iterator[None]:
    """Interrupt the block, as SIGKILL would, at call number `call_number` of sbatch.

    If `is_accepted`, Slurm accepts the job of this call before the interruption.
    """
    call_sbatch = sbatch._call_sbatch
    call_count = 0

    def call_sbatch_and_die(script: Path, key: str, *arguments: Any) -> str:
        nonlocal call_count
        call_count += 1
        if call_count == call_number:
            if is_accepted:
                call_sbatch(script, key, *arguments)
            raise Killed
        return call_sbatch(script, key, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(sbatch, "_call_sbatch", call_sbatch_and_die)
        yield


def list_recorded_ids(run: Run) -> list[str]:
    """Return the ID of each job that the events of the run record."""
    return [job.job_id for _, job in list_recorded_jobs(run)]


def list_unconfirmed_submissions(run: Run) -> list[RecordedJob]:
    """Return the submissions whose outcome is not recorded."""
    return [submission for _, submission in list_submissions(run) if submission.is_unconfirmed]


@pytest.mark.parametrize("call_number", range(1, 6))
@pytest.mark.parametrize("is_accepted", [True, False])
def test_submit_completes_the_chain_after_a_kill(
    run: Run, slurm: FakeSlurm, call_number: int, is_accepted: bool
) -> None:
    """The program is killed at any of the five calls of sbatch, after or before Slurm has accepted the job."""
    with kill_at_sbatch_call(call_number, is_accepted=is_accepted):
        submit(run)
    assert len(slurm.list_queue()) == (call_number if is_accepted else call_number - 1)
    assert ("held" in read_status(run) or "pending" in read_status(run)) == bool(slurm.list_queue())
    submit(run)
    assert slurm.list_queue() == CHAIN and slurm.count_sbatch_calls() == len(CHAIN)
    assert list_recorded_ids(run) == ["1", "2", "3", "4", "5"]
    assert list_unconfirmed_submissions(run) == []
    submit(run)
    assert slurm.list_queue() == CHAIN, "another call must submit nothing"


def test_a_copy_of_a_run_does_not_record_or_cancel_jobs_of_the_original(run: Run, slurm: FakeSlurm) -> None:
    """Job 1 belongs to the original, whose unconfirmed submission is also in the events of the copy."""
    with kill_at_sbatch_call(1, is_accepted=True):
        submit(run)
    shutil.copytree(run.path, run.path.parent / "copy", symlinks=True)
    copy = Run(run.path.parent / "copy")
    submit(copy)
    assert list_recorded_ids(copy) == ["2", "3", "4", "5", "6"]
    cancel_run(copy)
    assert slurm.list_queue() == CHAIN[:1]


@pytest.mark.parametrize("call_number", [1, 2, 4])
def test_cancel_also_cancels_an_unrecorded_job(run: Run, slurm: FakeSlurm, call_number: int) -> None:
    with kill_at_sbatch_call(call_number, is_accepted=True):
        submit(run)
    output = "\n".join(cancel_run(run))
    assert slurm.list_queue() == [] and str(call_number) in output, output
    with raises_error("run.cancelled", run.path, run.resume_command):
        submit(run)


@pytest.mark.parametrize("outcome", ["timeout", "late", "lose", "hang"])
def test_a_job_is_submitted_once_if_sbatch_does_not_respond(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Slurm may have accepted the job, accept it 0.4 s later, or never receive it."""
    submit_stage = sbatch.submit_stage
    if outcome == "hang":
        monkeypatch.setattr(
            sbatch, "submit_stage", lambda *arguments, **options: submit_stage(*arguments, **options, timeout_s=1.5)
        )
    slurm.set_sbatch_outcomes(call_4=[outcome, "0.4"])
    output = submit(run)
    assert re.search(r"^train +sbatch got no response", output, re.MULTILINE), output
    assert slurm.list_queue() == CHAIN and list_unconfirmed_submissions(run) == []
    # if Slurm did not accept the job, sbatch is called once more
    assert slurm.count_sbatch_calls() == len(CHAIN) + (outcome in ("lose", "hang"))


def test_a_submission_stays_unconfirmed_while_the_controller_does_not_respond(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the controller responds, it is unknown whether the train job exists. Nothing else may be submitted."""
    monkeypatch.setattr(sbatch, "wait_for_controller", lambda timeout_s, check: False)
    slurm.set_sbatch_outcomes(call_4=["timeout"])
    with raises_error("slurm.submission_unknown", run.resume_command, "prepare (1)", "shard (2, 3)", "train, evaluate"):
        submit(run)
    [submission] = list_unconfirmed_submissions(run)
    (slurm.folder / "not_responding").touch()
    with raises_error("slurm.not_responding", slurm_commands.NOT_RESPONDING):
        submit(run)
    assert list_unconfirmed_submissions(run) == [submission]
    (slurm.folder / "not_responding").unlink()
    submit(run)
    assert slurm.list_queue() == CHAIN


def test_a_job_whose_submission_was_marked_as_failed_exits_without_work(
    tmp_path: Path, run: Run, slurm: FakeSlurm
) -> None:
    """A job appears after the next `submit` has marked its submission as failed and replaced it.

    The batch script runs the stage only if the submission is not marked. Here, a fake Python writes a log instead.
    """
    with kill_at_sbatch_call(1, is_accepted=False):
        submit(run)
    [(_, submission)] = list_submissions(run)
    script = sbatch.submission_script_path(run, "prepare", submission.key)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho started >> {tmp_path}/log\n")
    program.chmod(0o755)
    command_line = next(line for line in script.read_text().splitlines() if line.startswith("exec "))
    replace_in_file(script, command_line, f"exec {program}")

    def start_job(job_id: str) -> str:
        """Run the batch script as a job would and return its output."""
        environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": job_id}
        command = ["bash", str(script), submission.key]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
        return result.stdout

    assert start_job("7") == "" and (tmp_path / "log").read_text() == "started\n"
    link = run.jobs_dir / "prepare/7_submitted.pkl"
    assert link.resolve() == run.jobs_dir / f"prepare/{submission.key}_0_submitted.pkl"
    submit(run)
    assert start_job("8") != "", "a job that was replaced must explain why it exits"
    assert (tmp_path / "log").read_text() == "started\n", "a job that was replaced must not run the stage"
    late_job = slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), command=f"{script} {submission.key}")
    assert f"job {late_job}" in read_status(run)
    submit(run)
    assert slurm.list_queue() == CHAIN, "the late job must be cancelled, because its submission was replaced"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
@pytest.mark.parametrize("command", ["submit", "resume", "cancel"])
def test_a_job_with_the_comment_of_a_run_but_no_record_is_cancelled(
    run: Run, slurm: FakeSlurm, state: str, command: str
) -> None:
    """An earlier version of Sluice, or an earlier run in the same directory, may leave such a job in the queue.

    The other job has the comment of another run, so it is kept.
    """
    other_job = slurm.add_job(name="train-tiny", comment=f"{job_comment(run.path)}/points/000", state=state)
    stray_job = slurm.add_job(name="train-tiny", comment=job_comment(run.path), state=state, tasks=2)
    if command == "cancel":
        cancel_run(run)
    elif command == "resume":
        reset_for_resume(run, replaces_jobs=True)
        submit(run)
    else:
        assert f"job {stray_job}" in submit(run)
    state_by_id = {job["id"]: job["state"] for job in slurm.list_jobs()}
    assert (state_by_id[other_job], state_by_id[stray_job]) == (state, "CANCELLED")
    assert len(slurm.list_queue()) == (1 if command == "cancel" else 1 + len(CHAIN))


def test_a_running_job_without_a_recorded_submission_is_kept(run: Run, slurm: FakeSlurm) -> None:
    """Earlier versions of Sluice recorded the start of a job, but not its submission."""
    job_id = slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), state="RUNNING")
    write_event(run, "started", "prepare", job_id=job_id, slurm_job=job_id, cluster=CLUSTER, attempt=1, ranks=1)
    assert f"prepare   job {job_id} running" in submit(run)
    assert slurm.list_queue() == CHAIN and slurm.count_sbatch_calls() == len(CHAIN) - 1


def test_an_array_is_recorded_for_all_points_after_a_kill(tmp_path: Path, slurm: FakeSlurm) -> None:
    """The program is killed after it has recorded the array for the first of three points."""
    sweep = make_run(tmp_path, overrides=(SWEEP,))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        record_submission = sbatch.record_submission
        targets: list[Run] = []

        def record_one_point_and_die(target: Run, *arguments: Any) -> None:
            targets.append(target)
            if len(targets) == 2:
                raise Killed
            record_submission(target, *arguments)

        patch.setattr(sbatch, "record_submission", record_one_point_and_die)
        submit(sweep)
    submit(sweep)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "aftercorr:0")]
    assert [list_recorded_jobs(point)[0][1].job_id for point in list_points(sweep)] == ["1_0", "1_1", "1_2"]
    cancel_run(sweep)
    assert slurm.list_queue() == []


def test_a_job_records_its_submission_before_its_start(run: Run, slurm: FakeSlurm) -> None:
    """The supervisor writes `submitted` if the event is missing, so that the later events belong to this job.

    A second `submitted` event by submit.py, which records the submission later, must not change this.
    """
    with kill_at_sbatch_call(4, is_accepted=True):
        submit(run)
    [(submitting_event, submission)] = [pair for pair in list_submissions(run) if pair[1].is_unconfirmed]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sbatch.SUBMISSION_KEY_VARIABLE, submission.key)
        sbatch.record_own_job(run, "train", "4")
        write_event(run, "started", "train", job_id="4", slurm_job="4", cluster=CLUSTER)
        sbatch.record_own_job(run, "train", "4")
    assert [line["job_id"] for line in read_event_lines(run, "train", "submitted")] == ["4"]
    sbatch.record_submission(run, submitting_event, "4")
    events = events_since_submission(run.read_events("train"), "4")
    assert [event.name for event in events] == ["submitted", "started", "submitted"]
    assert find_submission_indices(run.read_events("train")) == [1] and len(list_recorded_jobs(run)) == 4


def test_an_ended_job_is_found_in_accounting(run: Run, slurm: FakeSlurm) -> None:
    """Most sites store no comments in accounting. The job is recognized by the path and the argument of its script."""
    with kill_at_sbatch_call(1, is_accepted=True):
        submit(run)
    [job] = slurm.list_jobs()
    (slurm.folder / "jobs/1").unlink()
    line = f"1|FAILED|None|n1|{CLUSTER}|{os.getuid()}|{job['submit_time']}|prepare-tiny|sbatch {job['command']}\n"
    (slurm.folder / "sacct.out").write_text(line)
    assert [(job.job_id, job.reported_job.state) for job in find_run_jobs([run])] == [("1", "FAILED")]
    submit(run)
    assert list_recorded_ids(run)[0] == "1" and len(list_recorded_ids(run)) == 1 + len(CHAIN)


def test_submit_waits_for_the_sbatch_of_another_process(run: Run, slurm: FakeSlurm) -> None:
    """While sbatch runs, it holds a lock on the batch script, even if the submit.py that started it was killed."""
    with kill_at_sbatch_call(1, is_accepted=False):
        submit(run)
    [(_, submission)] = list_submissions(run)
    script = sbatch.submission_script_path(run, "prepare", submission.key)
    with open(script, "r+b") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        with raises_error("slurm.submission_in_progress", "prepare", run.path):
            sbatch.confirm_submissions([run], print, timeout_s=0.1)

        def finish_sbatch(seconds: float) -> None:
            lock.close()
            slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), command=f"{script} {submission.key}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sbatch.time, "sleep", finish_sbatch)
            sbatch.confirm_submissions([run], print)
    assert list_recorded_ids(run) == ["1"]


def test_a_sweep_with_many_points_waits_for_the_sbatch_of_another_process(tmp_path: Path, slurm: FakeSlurm) -> None:
    """All points share one submission, which counts as failed if several queries show no job.

    A query that shows the submission for six points must count as one query.
    """
    sweep = make_run(tmp_path, overrides=("sweep={grid: {optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]}}",))
    with kill_at_sbatch_call(1, is_accepted=False):
        submit(sweep)
    points = list_points(sweep)
    [(_, submission)] = list_submissions(points[0])
    with open(sbatch.submission_script_path(sweep, "train", submission.key), "r+b") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        with raises_error("slurm.submission_in_progress", "train"):
            sbatch.confirm_submissions((sweep, *points), print, timeout_s=0.1)
    assert read_event_lines(points[0], "train", "not_submitted") == []


def test_submissions_that_another_process_is_recording_are_not_marked_as_failed(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query finds a new unconfirmed submission, which the other process then records before it starts another."""
    keys = [f"{number:012x}" for number in range(6)]

    def write_submitting(key: str) -> None:
        write_event(run, "submitting", "train", executor="slurm", key=key, cluster=CLUSTER, job_name="train-tiny")

    def record_and_submit(seconds: float) -> None:
        """Do in place of a sleep what the other process does: record the previous submission and start the next."""
        if key := next(later_keys, None):
            previous_key = keys[keys.index(key) - 1]
            write_event(run, "submitted", "train", executor="slurm", job_id="77", key=previous_key)
            write_submitting(key)

    later_keys = iter(keys[1:])
    write_submitting(keys[0])
    monkeypatch.setattr(sbatch, "time", SimpleNamespace(sleep=record_and_submit, monotonic=time.monotonic))
    monkeypatch.setattr(sbatch, "MAX_QUERIES", 4)
    sbatch.confirm_submissions([run], print)
    assert read_event_lines(run, "train", "not_submitted") == []


def test_a_job_that_an_older_code_copy_is_recording_is_kept(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of an older version writes no event before it calls sbatch. It records the job shortly afterwards."""
    job_id = slurm.add_job(name="evaluate-tiny", comment=job_comment(run.path))
    [job] = find_run_jobs([run])
    assert job.is_stray

    def record_job(seconds: float) -> None:
        if not read_event_lines(run, "evaluate", "submitted"):
            write_event(
                run, "submitted", "evaluate", executor="slurm", job_id=job_id, cluster=CLUSTER, job_name="evaluate-tiny"
            )

    monkeypatch.setattr(sbatch.time, "sleep", record_job)
    [job] = sbatch.confirm_submissions([run], print)
    assert job.job_id == job_id and job.is_recorded


def test_only_the_array_task_without_a_record_is_a_stray_job(tmp_path: Path, slurm: FakeSlurm) -> None:
    """The events of the third point do not record its train task, 1_2."""
    sweep = make_run(tmp_path, overrides=(SWEEP,))
    submit(sweep)
    events_file = list_points(sweep)[2].events_file
    lines = [line for line in events_file.read_text().splitlines() if '"train"' not in line]
    events_file.write_text("".join(f"{line}\n" for line in lines))
    stray_ids = [job.job_id for job in find_run_jobs((sweep, *list_points(sweep))) if job.is_stray]
    assert stray_ids == ["1_2"]


def test_a_failure_of_a_wrapper_of_sbatch_is_reported_completely_and_not_retried(run: Run, slurm: FakeSlurm) -> None:
    """Some sites replace sbatch by a wrapper that can reject a job with its own messages."""
    slurm.set_sbatch_outcomes(call_1=["fail", "ERROR: no budget is left\nMore help: https://hpc.example"])
    with raises_error("slurm.sbatch_failed", "prepare", "no budget is left", "https://hpc.example"):
        submit(run)
    assert slurm.count_sbatch_calls() == 1 and list_unconfirmed_submissions(run) == []


@pytest.fixture
def run_in_training(tmp_path: Path, slurm: FakeSlurm) -> Run:
    """Return a run of a site that does not requeue jobs. Job 1 trains, job 2 is its successor, and job 3 evaluates."""
    run = make_run(tmp_path, overrides=("site.requeue=false", "evaluate.every=checkpoint"))
    submit(run)
    assert slurm.list_queue() == [("train", ""), ("train", "afternotok:0"), ("evaluate", "afterok:0")]
    return run


def test_a_successor_without_a_record_is_not_submitted_twice(run_in_training: Run, slurm: FakeSlurm) -> None:
    """Job 2 is killed while it submits its successor, job 4."""
    with kill_at_sbatch_call(1, is_accepted=True):
        succession.hand_over(run_in_training, "train", "2")
    assert succession.hand_over(run_in_training, "train", "2") is None
    assert slurm.list_queue()[3:] == [("train", "afternotok:1")]
    assert find_predecessor(run_in_training, "train", "4") == "2"


def test_an_evaluation_without_a_record_is_not_submitted_twice(
    run_in_training: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job 1 is killed while it submits job 4, which evaluates the checkpoint of step 7. Job 5 is for step 14."""
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [7])
    with kill_at_sbatch_call(1, is_accepted=True):
        background.EvaluationSubmitter(run_in_training)._submit_newest()
    submitter = background.EvaluationSubmitter(run_in_training)
    submitter._submit_newest()
    assert len(slurm.list_jobs()) == 4 and submitter._last_submitted_step == 7
    assert background.was_submitted_for_checkpoint(run_in_training, "4")
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [14])
    submitter._submit_newest()
    assert [job["dependency"] for job in slurm.list_jobs()[4:]] == ["afterany:4"]
    submit(run_in_training)
    assert len(slurm.list_jobs()) == 5, (
        "`submit` must add nothing, because the evaluate job of the chain is in the queue"
    )


# -- incomplete chains -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call_number", range(1, 6))
def test_submit_completes_the_chain_after_sbatch_refused_a_job(run: Run, slurm: FakeSlurm, call_number: int) -> None:
    """The error names the refused job, the submitted jobs, the missing stages, and the command that continues."""
    slurm.set_sbatch_outcomes(**{f"call_{call_number}": ["refuse", "QOSMaxSubmitJobPerUserLimit"]})
    with pytest.raises(UserError) as raised:
        submit(run)
    refused_stage = CHAIN[call_number - 1][0]
    message = str(raised.value)
    assert raised.value.code == "slurm.job_refused" and message.startswith(f"{refused_stage}: ")
    assert "QOSMaxSubmitJobPerUserLimit" in message
    assert slurm.list_queue() == CHAIN[: call_number - 1]
    status = read_status(run)
    assert (run.resume_command in message) == (call_number > 1) and run.resume_command in status
    if call_number > 1:
        submitted_part, _, missing_part = message.partition("not submitted")
        assert "prepare (1)" in submitted_part and refused_stage in missing_part
        assert f"{refused_stage}: " in status and "QOSMaxSubmitJobPerUserLimit" in status
    slurm.set_sbatch_outcomes()
    submit(run)
    assert slurm.list_queue() == CHAIN and run.resume_command not in read_status(run)


def test_submit_replaces_a_missing_successor(run_in_training: Run, slurm: FakeSlurm) -> None:
    job_states.cancel_jobs([job_states.JobState("2", "PENDING")])
    assert "train: its successor" in read_status(run_in_training)
    submit(run_in_training)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "afterok:0"), ("train", "afternotok:0")]
    assert "successor is" not in read_status(run_in_training)


def test_submit_completes_the_chain_of_a_sweep_after_sbatch_refused_an_array(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep = make_run(tmp_path, overrides=(SWEEP,))
    slurm.set_sbatch_outcomes(call_2=["refuse", "no more"])
    with raises_error("slurm.job_refused", "train (1)", "evaluate", sweep.resume_command):
        submit(sweep)
    status = read_status(sweep)
    assert "points 000, 001, 002: evaluate" in status and sweep.resume_command in status
    slurm.set_sbatch_outcomes()
    submit(sweep)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "aftercorr:0")]


def test_an_array_that_is_too_large_is_an_error_before_any_submission(
    tmp_path: Path, run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", SchedulerParameters="x=1,max_array_tasks=2,y")
    submit(run)
    cancel_run(run)
    run.clear_requests()
    monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
    slurm.set_sbatch_outcomes()
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1")
    with raises_error("slurm.array_too_large", "stages.shard.tasks: 2", "MaxArraySize", "stages.shard.tasks=1"):
        submit(run)
    sweep = make_run(tmp_path, "sweep", (SWEEP,))
    with raises_error("slurm.array_too_large", "sweep", "3 points", "MaxArraySize"):
        submit(sweep)
    assert slurm.count_sbatch_calls() == 0


def test_an_exceeded_limit_names_only_the_stages_to_which_it_applies(tmp_path: Path, slurm: FakeSlurm) -> None:
    """The QOS `normal` allows two jobs per user. The train job has the QOS `big` and does not count."""
    run = Run.create(load_config(write_config(tmp_path), ["stages.train.qos=big"]))
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="associations,limits,qos")
    (slurm.folder / "sacctmgr.out").write_text("user root|root||normal|\nqos normal|2\nqos big|100\n")
    with raises_error("slurm.too_many_jobs", "5 more jobs (prepare 1, shard 3, evaluate 1;", "QOS normal"):
        submit(run)


def test_limits_apply_to_missing_jobs_and_to_the_qos_of_the_environment(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SBATCH_QOS selects the QOS if the config does not set one. The QOS `normal` allows two jobs per user."""
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="associations,limits,qos")
    limits = slurm.folder / "sacctmgr.out"
    limits.write_text("user root|root||normal|\nqos normal|2\nqos big|100\n")
    with raises_error("slurm.too_many_jobs", "QOS normal", "MaxSubmitJobs"):
        submit(run)
    monkeypatch.setenv("SBATCH_QOS", "big")
    submit(run)
    assert slurm.list_queue() == CHAIN
    limits.write_text("user root|root||normal|\nqos normal|2\nqos big|2\n")
    submit(run)  # no job is missing, so the limits do not matter
    assert slurm.list_queue() == CHAIN


@pytest.mark.parametrize(
    ("limits", "limited_by"),
    [
        ("user root|root||normal|4\nqos normal|\n", "account root"),
        ("user root|root||normal|4\nqos normal|6\n", None),  # the limit of the QOS overrides that of the account
        ("user root|root||normal|\nqos normal|5\n", "QOS normal"),
        ("user root|root|other|normal|1\nqos normal|\n", None),  # the limit of another partition
        ("user root|root||normal|\nqos normal|\n", None),
        ("", None),  # sacctmgr is not allowed
    ],
)
def test_more_jobs_than_a_user_may_have_are_an_error_before_any_submission(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, limits: str, limited_by: str | None
) -> None:
    """The chain has six jobs, because each array task counts as one job.

    Each line of `limits` is an entity of sacctmgr and its output.
    """
    (slurm.folder / "sacctmgr.out").write_text(limits)
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="associations,limits,qos")
    if limited_by:
        with raises_error("slurm.too_many_jobs", "6 more jobs", "prepare 1, shard 3", limited_by, "MaxSubmitJobs"):
            submit(run)
        assert slurm.count_sbatch_calls() == 0
        monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
        slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="none")
    submit(run)
    assert slurm.list_queue() == CHAIN
