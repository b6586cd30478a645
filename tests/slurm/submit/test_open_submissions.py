"""Jobs whose submission was not recorded are found, recorded or ended; half a chain is completed. With a fake Slurm."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.base.console import PlainConsole
from pipeline.base.errors import UserError
from pipeline.run.directory import Run, list_points
from slurm.query import job_states, slurm_commands
from slurm.query.run_jobs import (
    events_since_submission,
    find_first_submissions,
    find_run_jobs,
    job_comment,
    list_recorded_jobs,
    list_submissions,
)
from slurm.query.status import print_status
from slurm.submit import sbatch
from slurm.submit.chain import cancel_run, reset_for_resume, submit_chain
from slurm.supervise import background, succession
from slurm.supervise.succession import find_predecessor
from tests.support.events import read_event_lines, write_event
from tests.support.fake_slurm import CLUSTER, FakeSlurm
from tests.support.tiny import make_run, write_config

CHAIN = [
    ("prepare", ""), ("shard", "afterok:0"), ("shard", "afterany:1"), ("train", "afterok:2"), ("evaluate", "afterok:3"),
]  # fmt: skip
SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01, 0.1]}}"


class Killed(BaseException):
    """Stands for kill -9: nothing in the program catches it."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
    monkeypatch.setattr(slurm_commands, "_retry_times", {})
    monkeypatch.setattr(sbatch, "RECHECK_DELAYS_S", (0.1, 0.2, 0.3))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return fake


@pytest.fixture
def run(tmp_path: Path, slurm: FakeSlurm) -> Run:
    from pipeline.config.read import load_config

    return Run.create(load_config(write_config(tmp_path)))


def submit(run: Run) -> str:
    """What `submit` prints."""
    console = PlainConsole(width=200, record=True)
    with run.lock_exclusively():
        submit_chain(run, console, retries_failed=False)
    return str(console.export_text())


def status(run: Run) -> str:
    console = PlainConsole(width=200, record=True)
    print_status(run, console)
    return str(console.export_text())


def kill_at(number: int, monkeypatch: pytest.MonkeyPatch, *, accepted: bool) -> None:
    """End the program at the n-th sbatch: when it has accepted the job, or before."""
    real, calls = sbatch._call_sbatch, list[str]()

    def call(script: Path, key: str, *more: Any) -> str:
        calls.append(key)
        if len(calls) == number:
            if accepted:
                real(script, key, *more)
            raise Killed
        return real(script, key, *more)

    monkeypatch.setattr(sbatch, "_call_sbatch", call)


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("accepted", [True, False])
def test_after_a_kill_the_next_submit_makes_one_chain(run: Run, slurm: FakeSlurm, number: int, accepted: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(number, patch, accepted=accepted)
        submit(run)
    assert len(slurm.list_queue()) == number - (not accepted)
    assert ("held" in status(run) or "pending" in status(run)) == bool(slurm.list_queue())
    submit(run)
    assert slurm.list_queue() == CHAIN and slurm.count_sbatch_calls() == len(CHAIN)
    assert [one.job_id for _, one in list_recorded_jobs(run)] == ["1", "2", "3", "4", "5"]
    assert not any(one.is_open for _, one in list_submissions(run))
    submit(run)
    assert slurm.list_queue() == CHAIN


def test_a_copy_of_a_run_does_not_take_the_jobs_of_the_other(run: Run, slurm: FakeSlurm) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=True)
        submit(run)
    shutil.copytree(run.path, run.path.parent / "copy", symlinks=True)
    copy = Run(run.path.parent / "copy")
    submit(copy)
    assert [one.job_id for _, one in list_recorded_jobs(copy)] == ["2", "3", "4", "5", "6"]
    cancel_run(copy)
    assert slurm.list_queue() == CHAIN[:1]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_after_a_kill_cancel_leaves_an_empty_queue(run: Run, slurm: FakeSlurm, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(number, patch, accepted=True)
        submit(run)
    said = "\n".join(cancel_run(run))
    assert slurm.list_queue() == [] and str(number) in said, said
    with pytest.raises(UserError, match="cancelled"):
        submit(run)


@pytest.mark.parametrize("outcome", ["timeout", "late", "lose", "hang"])
def test_a_submission_without_an_answer_is_looked_for(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """Whether Slurm has taken the job, takes it a moment later, or never got it: the chain has each job once."""
    real = sbatch.submit_stage
    if outcome == "hang":
        monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda *a, **more: real(*a, **more, patience_s=1.5))
    slurm.set_sbatch_outcomes(call_4=[outcome, "0.4"])
    said = submit(run)
    assert "train     sbatch got no answer" in said, said
    assert slurm.list_queue() == CHAIN and not any(one.is_open for _, one in list_submissions(run))
    assert slurm.count_sbatch_calls() == len(CHAIN) + (outcome in ("lose", "hang"))


def test_a_controller_that_stays_away_leaves_the_outcome_open(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "wait_for_controller", lambda patience_s, check: False)
    slurm.set_sbatch_outcomes(call_4=["timeout"])
    with pytest.raises(UserError) as caught:
        submit(run)
    assert caught.value.code == "slurm.submission_unknown"
    for fact in ("resume", "prepare (1)", "shard (2, 3)", "train, evaluate"):
        assert fact in str(caught.value)
    [one] = [one for _, one in list_submissions(run) if one.is_open]
    (slurm.folder / "not_responding").touch()
    with pytest.raises(UserError, match=slurm_commands.NOT_RESPONDING):
        submit(run)
    assert [one] == [one for _, one in list_submissions(run) if one.is_open], "nothing is decided while nobody answers"
    (slurm.folder / "not_responding").unlink()
    submit(run)
    assert slurm.list_queue() == CHAIN


def test_a_job_that_appears_after_its_submission_was_given_up_ends_at_once(
    tmp_path: Path, run: Run, slurm: FakeSlurm
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=False)
        submit(run)
    [(_, one)] = list_submissions(run)
    script = sbatch.submission_script_path(run, "prepare", one.key)
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho ran >> {tmp_path}/log\n")
    program.chmod(0o755)
    text = script.read_text()
    found = next(line for line in text.splitlines() if line.startswith("exec "))
    script.write_text(text.replace(found, f"exec {program}"))

    def start(job: str) -> str:
        env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": job}
        command = ["bash", str(script), one.key]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True).stdout

    assert start("7") == "" and (tmp_path / "log").read_text() == "ran\n"
    assert (run.jobs_dir / "prepare/7_submitted.pkl").resolve() == run.jobs_dir / f"prepare/{one.key}_0_submitted.pkl"
    submit(run)
    assert "taken the place" in start("8") and (tmp_path / "log").read_text() == "ran\n"
    late = slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), command=f"{script} {one.key}")
    assert f"job {late}" in status(run)
    submit(run)
    assert slurm.list_queue() == CHAIN, "and one that waits is cancelled"


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
@pytest.mark.parametrize("does", ["submit", "resume", "cancel"])
def test_a_job_with_the_comment_of_the_run_that_it_knows_nothing_of_is_ended(
    run: Run, slurm: FakeSlurm, state: str, does: str
) -> None:
    """As an earlier version left it, or an earlier run in this directory. Those of other runs are none of ours."""
    other = slurm.add_job(name="train-tiny", comment=f"{job_comment(run.path)}/points/000", state=state)
    stray = slurm.add_job(name="train-tiny", comment=job_comment(run.path), state=state, tasks=2)
    if does == "cancel":
        cancel_run(run)
    else:
        if does == "resume":
            reset_for_resume(run, replaces_jobs=True)
        assert f"job {stray}" in submit(run) or does == "resume"
    states_ = {job["id"]: job["state"] for job in slurm.list_jobs()}
    assert (states_[other], states_[stray]) == (state, "CANCELLED")
    assert len(slurm.list_queue()) == 1 + (0 if does == "cancel" else len(CHAIN))


def test_a_job_that_has_started_without_a_record_goes_on(run: Run, slurm: FakeSlurm) -> None:
    """An earlier version noted its start only."""
    job = slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), state="RUNNING")
    write_event(run, "started", "prepare", job_id=job, slurm_job=job, cluster=CLUSTER, attempt=1, ranks=1)
    assert f"prepare   job {job} running" in submit(run)
    assert slurm.list_queue() == CHAIN and slurm.count_sbatch_calls() == len(CHAIN) - 1


def test_points_of_an_array_that_was_recorded_for_some_of_them_only(tmp_path: Path, slurm: FakeSlurm) -> None:
    swept = make_run(tmp_path, overrides=(SWEEP,))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        real, told = sbatch.record_submission, list[Run]()

        def record(target: Run, *more: Any) -> None:
            told.append(target)
            if len(told) == 2:
                raise Killed
            real(target, *more)

        patch.setattr(sbatch, "record_submission", record)
        submit(swept)
    submit(swept)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "aftercorr:0")]
    assert [list_recorded_jobs(point)[0][1].job_id for point in list_points(swept)] == ["1_0", "1_1", "1_2"]
    cancel_run(swept)
    assert slurm.list_queue() == []


def test_a_job_that_starts_records_itself_before_its_start(run: Run, slurm: FakeSlurm) -> None:
    """What it does later is then known to be its own, even if submit.py writes the record once more."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(4, patch, accepted=True)
        submit(run)
    [(event, one)] = [pair for pair in list_submissions(run) if pair[1].is_open]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sbatch.SUBMISSION_KEY_VARIABLE, one.key)
        sbatch.record_own_job(run, "train", "4")
        write_event(run, "started", "train", job_id="4", slurm_job="4", cluster=CLUSTER)
        sbatch.record_own_job(run, "train", "4")
    assert [e["job_id"] for e in read_event_lines(run, "train", "submitted")] == ["4"]
    sbatch.record_submission(run, event, "4")
    events = events_since_submission(run.read_events("train"), "4")
    assert [event.name for event in events] == ["submitted", "started", "submitted"]
    assert find_first_submissions(run.read_events("train")) == [1] and len(list_recorded_jobs(run)) == 4


def test_an_ended_job_is_found_in_accounting(run: Run, slurm: FakeSlurm) -> None:
    """By its script and key: most sites keep no comments there."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=True)
        submit(run)
    [job] = slurm.list_jobs()
    (slurm.folder / "jobs/1").unlink()
    line = f"1|FAILED|None|n1|{CLUSTER}|{os.getuid()}|{job['at']}|prepare-tiny|sbatch {job['command']}\n"
    (slurm.folder / "sacct.out").write_text(line)
    assert [(job.job_id, job.state.state) for job in find_run_jobs([run])] == [("1", "FAILED")]
    submit(run)
    assert list_recorded_jobs(run)[0][1].job_id == "1" and len(list_recorded_jobs(run)) == 1 + len(CHAIN)


def test_a_submission_that_another_process_makes_is_waited_for(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sbatch holds the lock, though submit.py may be dead."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=False)
        submit(run)
    [(_, one)] = list_submissions(run)
    script = sbatch.submission_script_path(run, "prepare", one.key)
    with open(script, "r+b") as lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is submitting prepare"):
            sbatch.resolve_open_submissions([run], print, patience_s=0.1)

        def end_of_sbatch(seconds: float) -> None:
            lock.close()
            slurm.add_job(name="prepare-tiny", comment=job_comment(run.path), command=f"{script} {one.key}")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sbatch.time, "sleep", end_of_sbatch)
            sbatch.resolve_open_submissions([run], print)
    assert [one.job_id for _, one in list_recorded_jobs(run)] == ["1"]


def test_submissions_that_appear_one_after_the_other_are_not_given_up(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds another one in flight: its process records it a moment later."""
    keys = [f"{number:012x}" for number in range(6)]

    def begin(key: str) -> None:
        write_event(run, "submitting", "train", executor="slurm", key=key, cluster=CLUSTER, job_name="train-tiny")

    def other_process(seconds: float) -> None:
        if key := next(waiting, None):
            write_event(run, "submitted", "train", executor="slurm", job_id="77", key=keys[keys.index(key) - 1])
            begin(key)

    waiting = iter(keys[1:])
    begin(keys[0])
    monkeypatch.setattr(sbatch, "time", SimpleNamespace(sleep=other_process, monotonic=time.monotonic))
    monkeypatch.setattr(sbatch, "MAX_QUERIES", 4)
    sbatch.resolve_open_submissions([run], print)
    assert read_event_lines(run, "train", "not_submitted") == []


def test_a_job_that_an_older_code_copy_is_recording_is_left_alone(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = slurm.add_job(name="evaluate-tiny", comment=job_comment(run.path))
    [seen] = find_run_jobs([run])
    assert seen.is_stray

    def record(seconds: float) -> None:
        if not read_event_lines(run, "evaluate", "submitted"):
            write_event(
                run, "submitted", "evaluate", executor="slurm", job_id=job, cluster=CLUSTER, job_name="evaluate-tiny"
            )

    monkeypatch.setattr(sbatch.time, "sleep", record)
    [found] = sbatch.resolve_open_submissions([run], print)
    assert found.job_id == job and found.is_recorded


def test_an_unknown_task_does_not_cancel_the_others_of_its_array(tmp_path: Path, slurm: FakeSlurm) -> None:
    swept = make_run(tmp_path, overrides=(SWEEP,))
    submit(swept)
    lost = list_points(swept)[2]
    lines = [line for line in lost.events_file.read_text().splitlines() if '"train"' not in line]
    lost.events_file.write_text("".join(f"{line}\n" for line in lines))
    strays = [job.job_id for job in find_run_jobs((swept, *list_points(swept))) if job.is_stray]
    assert strays == ["1_2"]


def test_the_message_of_a_sites_wrapper_is_shown_whole_and_sbatch_is_called_once(run: Run, slurm: FakeSlurm) -> None:
    slurm.set_sbatch_outcomes(call_1=["fail", "ERROR: no budget is left\nMore help: https://hpc.example"])
    with pytest.raises(UserError, match=r"no budget is left.*More help"):
        submit(run)
    assert slurm.count_sbatch_calls() == 1 and not any(one.is_open for _, one in list_submissions(run))


@pytest.fixture
def training(tmp_path: Path, slurm: FakeSlurm) -> Iterator[Run]:
    """A run without requeue whose training, job 1, runs; its successor and its evaluation wait."""
    run = make_run(tmp_path, overrides=("site.requeue=false", "evaluate.every=checkpoint"))
    submit(run)
    assert slurm.list_queue() == [("train", ""), ("train", "afternotok:0"), ("evaluate", "afterok:0")]
    yield run


def test_a_successor_without_a_record_is_not_submitted_twice(
    training: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=True)
        succession.hand_over(training, "train", "2")
    assert succession.hand_over(training, "train", "2") is None
    assert slurm.list_queue()[3:] == [("train", "afternotok:1")] and find_predecessor(training, "train", "4") == "2"


def test_an_evaluation_without_a_record_is_not_submitted_twice(
    training: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [7])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(1, patch, accepted=True)
        background.EvaluationSubmitter(training)._submit_newest()
    one = background.EvaluationSubmitter(training)
    one._submit_newest()
    assert len(slurm.list_jobs()) == 4 and one._last_step == 7 and background.evaluates_one_checkpoint(training, "4")
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [14])
    one._submit_newest()
    assert [job["dependency"] for job in slurm.list_jobs()[4:]] == ["afterany:4"]
    submit(training)
    assert len(slurm.list_jobs()) == 5, "the chain's own evaluation is in the queue"


# -- half a chain --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(1, 6))
def test_what_is_queued_is_named_if_a_job_is_refused_and_the_next_submit_completes_the_graph(
    run: Run, slurm: FakeSlurm, number: int
) -> None:
    slurm.set_sbatch_outcomes(**{f"call_{number}": ["refuse", "QOSMaxSubmitJobPerUserLimit"]})
    with pytest.raises(UserError) as caught:
        submit(run)
    refused, said = CHAIN[number - 1][0], str(caught.value)
    assert f"{refused}: sbatch refused the job" in said and "QOSMaxSubmitJobPerUserLimit" in said
    assert slurm.list_queue() == CHAIN[: number - 1]
    shown = status(run)
    assert (run.resume_command in said) == (number > 1) and run.resume_command in shown
    if number > 1:
        assert f"prepare (1{')' if number < 7 else ''}" in said and refused in said.partition("not submitted")[2]
        assert f"{refused}: " in shown and "QOSMaxSubmitJobPerUserLimit" in shown
        assert "the job that completes it is not submitted" in shown or number != 3
    slurm.set_sbatch_outcomes()
    submit(run)
    assert slurm.list_queue() == CHAIN and run.resume_command not in status(run)


def test_a_successor_that_was_refused_is_submitted_later(training: Run, slurm: FakeSlurm) -> None:
    job_states.cancel_jobs([job_states.JobState("2", "PENDING")])
    assert "train: its successor is not submitted" in status(training)
    submit(training)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "afterok:0"), ("train", "afternotok:0")]
    assert "successor is" not in status(training)


def test_points_of_which_a_part_was_refused(tmp_path: Path, slurm: FakeSlurm) -> None:
    swept = make_run(tmp_path, overrides=(SWEEP,))
    slurm.set_sbatch_outcomes(call_2=["refuse", "no more"])
    with pytest.raises(UserError, match=r"train \(1\).*evaluate"):
        submit(swept)
    shown = status(swept)
    assert "points 000, 001, 002: evaluate not submitted: " in shown and swept.resume_command in shown
    slurm.set_sbatch_outcomes()
    submit(swept)
    assert slurm.list_queue() == [("train", ""), ("evaluate", "aftercorr:0")]


def test_an_array_that_is_too_large_is_refused_before_anything_is_submitted(
    tmp_path: Path, run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", SchedulerParameters="x=1,max_array_tasks=2,y")
    submit(run)
    cancel_run(run)
    run.clear_requests()
    monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
    slurm.set_sbatch_outcomes()
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1")
    with pytest.raises(UserError, match=r"stages.shard.tasks: 2.*MaxArraySize.*stages.shard.tasks=1"):
        submit(run)
    swept = make_run(tmp_path, "swept", (SWEEP,))
    with pytest.raises(UserError, match=r"sweep: .* 3 points.*MaxArraySize"):
        submit(swept)
    assert slurm.count_sbatch_calls() == 0


def test_limits_count_for_what_is_submitted_and_where_the_shell_sends_it(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="associations,limits,qos")
    limits = slurm.folder / "sacctmgr.out"
    limits.write_text("user root|root||normal|\nqos normal|2\nqos big|100\n")
    with pytest.raises(UserError, match="QOS normal"):
        submit(run)
    monkeypatch.setenv("SBATCH_QOS", "big")
    submit(run)
    assert slurm.list_queue() == CHAIN
    limits.write_text("user root|root||normal|\nqos normal|2\nqos big|2\n")
    submit(run)  # nothing is missing
    assert slurm.list_queue() == CHAIN


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ("user root|root||normal|4\nqos normal|\n", "account root"),
        ("user root|root||normal|4\nqos normal|6\n", None),  # that of the QOS counts
        ("user root|root||normal|\nqos normal|5\n", "QOS normal"),
        ("user root|root|other|normal|1\nqos normal|\n", None),  # of another partition
        ("user root|root||normal|\nqos normal|\n", None),
        ("", None),  # sacctmgr is not allowed
    ],
)
def test_more_jobs_than_a_user_may_have_are_refused_before_anything_is_submitted(
    run: Run, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, limits: str, refused: str | None
) -> None:
    """The chain has six jobs: each task of the array counts."""
    (slurm.folder / "sacctmgr.out").write_text(limits)
    slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="associations,limits,qos")
    if refused:
        with pytest.raises(UserError, match=rf"6 more jobs \(prepare 1, shard 3, .*{refused}.*MaxSubmitJobs"):
            submit(run)
        assert slurm.count_sbatch_calls() == 0
        monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
        slurm.set_config(ClusterName=CLUSTER, MaxArraySize="1001", AccountingStorageEnforce="none")
    submit(run)
    assert slurm.list_queue() == CHAIN
