"""Test how jobs of a run are distinguished from other jobs with the same IDs.

The first tests use test clusters. The others use recorded output of Slurm commands.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo, read_rank_info
from pipeline.base.errors import ExitCode
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from slurm.query import current_job, job_states, run_jobs, slurm_commands
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob, query_job_states
from slurm.query.run_jobs import list_recorded_jobs
from slurm.supervise import attempt_end, background, succession
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import run_submit, wait_for
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import make_run, write_config
from tracking import report

cluster = cluster_fixture()
other_cluster = cluster_fixture()
accounting_cluster = cluster_fixture(accounting=True, min_job_age=2)

pytestmark = pytest.mark.timeout(900)

HELD = ("site.requeue=false", "site.sbatch={hold: true}")
"""Overrides with which the jobs of a chain stay in the queue, and the train job has a successor."""


def make_job_rank_info(job_id: str, restarts: int = 0) -> RankInfo:
    """Return the RankInfo of the supervisor in job `job_id`, which was requeued `restarts` times."""
    return dataclasses.replace(read_rank_info({}), job_id=job_id, restart_count=restarts)


def use_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change the environment of this process so that it calls the Slurm commands of this cluster."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)


def submit_held_chain(folder: Path, cluster: Cluster) -> tuple[Run, list[str]]:
    """Submit a chain whose jobs are on hold. Return the run and the IDs of train, its successor, and evaluate."""
    run = make_run(folder, overrides=HELD)
    result = run_submit(cluster, folder, "tiny.yaml", *HELD)
    assert result.returncode == 0, result.stdout + result.stderr
    return run, [job.job_id for _, job in list_recorded_jobs(run)]


def submit_jobs_of_another_run(cluster: Cluster, ids: Sequence[str], comments: Sequence[str]) -> None:
    """Submit a job that runs, and two jobs that depend on it. Check that they get these IDs."""
    for job_id, comment, dependency_type in zip(ids, comments, ("", "afternotok", "afterok"), strict=True):
        dependency = [f"--dependency={dependency_type}:{ids[0]}"] if dependency_type else []
        options = [f"--comment={comment}", "-J", "train-tiny", "-o", "/dev/null", *dependency, "--wrap", "sleep 600"]
        assert cluster.output(["sbatch", "--parsable", *options]) == job_id
    cluster.wait_job(ids[0], "RUNNING")


def list_queue(cluster: Cluster, ids: Sequence[str]) -> list[str]:
    """Return a line with ID, state and dependency for each of these jobs."""
    lines = cluster.output(["squeue", "-h", "-t", "all", "-o", "%i %T %E"]).splitlines()
    return [line for line in lines if line.split()[0] in ids]


@pytest.mark.parametrize("reason", ["the controller lost its state", "another cluster"])
def test_jobs_of_another_run_with_the_same_ids_are_not_changed(
    tmp_path: Path, cluster: Cluster, other_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A controller that lost its state, or another cluster, gives IDs that jobs of the run already have.

    `status`, `cancel`, `resume` and the supervisor must not report or change these jobs.
    """
    is_same_cluster = reason != "another cluster"
    cluster.restart_controller_without_state()
    run, ids = submit_held_chain(tmp_path, cluster)
    assert ids == ["1", "2", "3"]
    assert re.search(r"^train +held +1 ", run_submit(cluster, tmp_path, "status", "runs/tiny").stdout, re.M)
    second_cluster = cluster if is_same_cluster else other_cluster
    second_cluster.restart_controller_without_state()
    comments = ["sluice /b/runs/tiny"] * 3
    submit_jobs_of_another_run(second_cluster, ids, comments)
    queue_before = list_queue(second_cluster, ids)
    assert [line.split()[1] for line in queue_before].count("PENDING") == 2

    status = run_submit(second_cluster, tmp_path, "status", "runs/tiny").stdout
    assert not re.search(r"^(train|evaluate) +(running|pending|held)", status, re.M), status
    use_cluster(second_cluster, monkeypatch)
    assert succession.take_over(run, "train", make_job_rank_info("2", 1)) is None
    children = [event["children"] for event in read_event_lines(run, "train", "took_over")]
    # On the same cluster, job 2 takes over but must find no waiting jobs. On another cluster, job 2 is no successor.
    assert children == ([[]] if is_same_cluster else [])
    succession.cancel_unneeded_jobs(run, "train", make_job_rank_info("1"), is_done=False)
    succession.cancel_unneeded_jobs(run, "train", make_job_rank_info("1"), is_done=True)
    assert run_submit(second_cluster, tmp_path, "cancel", "runs/tiny").returncode == 0
    assert list_queue(second_cluster, ids) == queue_before
    result = run_submit(second_cluster, tmp_path, "resume", "runs/tiny", "stages.train.time=00:20:00")
    assert result.returncode == 0, result.stdout + result.stderr
    new_ids = [job.job_id for _, job in list_recorded_jobs(run)][3:]
    assert new_ids == ["4", "5", "6"] and "after 4" in result.stdout, result.stdout
    assert list_queue(second_cluster, ids) == queue_before
    result = run_submit(second_cluster, tmp_path, "cancel", "runs/tiny")
    assert {line.split()[1] for line in list_queue(second_cluster, new_ids)} == {"CANCELLED"}
    assert list_queue(second_cluster, ids) == queue_before
    if not is_same_cluster:
        settings = [each.output(["scontrol", "show", "config"]) for each in (cluster, other_cluster)]
        name, other_name = (text.split("ClusterName")[1].split()[1] for text in settings)
        assert f"jobs of cluster {name} are not visible on {other_name}" in result.stdout
        assert {line.split()[1] for line in list_queue(cluster, ids)} == {"PENDING"}
        assert run_submit(cluster, tmp_path, "cancel", "runs/tiny").returncode == 0
        assert {line.split()[1] for line in list_queue(cluster, ids)} == {"CANCELLED"}, (
            "on the first cluster, the jobs must be recognized and cancelled"
        )
    second_cluster.clear()


@pytest.mark.parametrize("is_truncated", [True, False])
def test_a_job_that_lost_its_comment_is_not_changed_but_reported(
    tmp_path: Path, cluster: Cluster, is_truncated: bool
) -> None:
    """The comment may be truncated, or replaced by a plugin of the site. Then a user must cancel the job."""
    run, ids = submit_held_chain(tmp_path, cluster)
    train_id = ids[0]
    comment = f"sluice {run.path}"[:12] if is_truncated else "comment of a plugin"
    cluster.output(["scontrol", "update", f"JobId={train_id}", f"Comment={comment}"])
    result = run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    assert f"to end it: scancel {train_id}" in result.stdout and f"(sluice {run.path})" in result.stdout, result.stdout
    assert [cluster.job_state(job_id) for job_id in ids] == ["PENDING", "CANCELLED", "CANCELLED"]
    assert f"scancel {train_id}" in run_submit(cluster, tmp_path, "status", "runs/tiny").stdout
    assert f"scancel {train_id}" in run_submit(cluster, tmp_path, "resume", "runs/tiny").stdout
    assert cluster.job_state(train_id) == "PENDING"
    cluster.clear()


def test_a_requeued_job_is_still_recognized(
    tmp_path: Path, accounting_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accounting has no comments, and one row for each start of a job. A requeue changes the submit time.

    At the end, another job gets the same ID. The run must not take the state of this job.
    """
    use_cluster(accounting_cluster, monkeypatch)
    monkeypatch.setattr(job_states, "SUBMIT_TIME_TOLERANCE_S", 3.0)
    run = Run.create(load_config(write_config(tmp_path, "a")))
    script = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then sleep 600; fi'
    options = [f"--comment=sluice {run.path}", "-J", "a-train", "-o", "/dev/null", "--requeue", "--wrap", script]
    job_id = accounting_cluster.output(["sbatch", "--parsable", *options])
    identity = run_jobs.job_identity("a-train")
    write_event(run, "submitted", "train", job_id=job_id, executor="slurm", after=[], **identity)
    [(_, job)] = list_recorded_jobs(run)
    accounting_cluster.wait_job(job_id, "RUNNING")
    wait_for("a submit time before the tolerance", lambda: (datetime.now(UTC).timestamp() - job.submit_time) > 4)
    accounting_cluster.output(["scontrol", "requeue", job_id])
    assert query_job_states([job])[job].is_active
    list_all = ["squeue", "-h", "-t", "all", "-o", "%A"]
    wait_for("squeue to forget the job", lambda: job_id not in accounting_cluster.output(list_all), 90)
    assert len(accounting_cluster.output(["sacct", "-nXDP", "-j", job_id, "-o", "Submit"]).splitlines()) == 2
    wait_for("accounting", lambda: query_job_states([job])[job].state == "COMPLETED", 30)
    accounting_cluster.restart_controller_without_state()
    for number in range(int(job_id)):
        options = ["-J", "a-train", "-o", "/dev/null", "--wrap", f"exit {number + 1}"]
        last_id = accounting_cluster.output(["sbatch", "--parsable", *options])
    assert last_id == job_id
    query_state = ["sacct", "-nXP", "-j", job_id, "-o", "State"]
    wait_for("the end of the other job", lambda: "FAILED" in accounting_cluster.output(query_state), 60)
    # the newest row in accounting is now that of another job with the same ID, name and user
    assert query_job_states([job])[job].state == "COMPLETED"


# -- with recorded output ----------------------------------------------------------------------------------------------

SUBMIT_TIME = "2026-11-22T11:51:43"
JOB = RecordedJob("1", ("sluice /r",), "here", 1000, "r-train", datetime.fromisoformat(SUBMIT_TIME).timestamp())
SQUEUE_ROW = "1|{state}|None|n1|here|1000|{submit_time}|r-train|{comment}\n"


def set_slurm_output(
    monkeypatch: pytest.MonkeyPatch, squeue: str = "", sacct: str = "", squeue_all_users: str = ""
) -> None:
    """Set the output of squeue for jobs of this user, of sacct, and of squeue for jobs of all users."""

    def run_command(*command: str, **_: Any) -> str | None:
        return sacct if command[0] == "sacct" else squeue if "--me" in command else squeue_all_users

    monkeypatch.setattr(slurm_commands, "run_slurm_command", run_command)
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")


@pytest.mark.parametrize(
    ("rows", "state"),
    [
        (["1|COMPLETED|None|n1|here|1000|2026-11-22T11:51:44|r-train"], "COMPLETED"),
        (["1|CANCELLED by 0|None|n1|here|1000|2026-11-22T11:51:44|r-train"], "CANCELLED"),
        (["1|COMPLETED|None|n1|there|1000|2026-11-22T11:51:44|r-train"], UNKNOWN),
        (["1|COMPLETED|None|n1|here|1001|2026-11-22T11:51:44|r-train"], UNKNOWN),
        (["1|COMPLETED|None|n1|here|1000|2026-11-22T11:51:44|s-train"], UNKNOWN),
        (["1|COMPLETED|None|n1|here|1000|2026-11-22T12:51:44|r-train"], UNKNOWN),
        (["1|RUNNING|None|n1|here|1000|2026-11-22T11:51:44|r-train"], UNKNOWN),  # squeue no longer shows this job
        (
            [
                "1|REQUEUED|None|n1|here|1000|2026-11-22T11:51:44|r-train",
                "1|NODE_FAIL|None|n1|here|1000|2026-11-22T13:00:00|r-train",
                "1|TIMEOUT|BeginTime|n1|here|1000|2026-11-22T14:00:00|r-train",
                "1|FAILED|None|n1|here|1000|2026-11-23T09:00:00|r-train",  # another job with the same ID
            ],
            "TIMEOUT",
        ),
    ],
)
def test_a_final_state_is_read_from_accounting_if_cluster_user_time_and_name_match(
    monkeypatch: pytest.MonkeyPatch, rows: list[str], state: str
) -> None:
    """Accounting has no comments. Further rows with a later time follow after requeues of the job."""
    set_slurm_output(monkeypatch, sacct="\n".join(f"{row}|" for row in rows))
    job_state = query_job_states([JOB])[JOB]
    assert job_state.state == state and not job_state.is_active


@pytest.mark.parametrize(
    ("job", "comment", "state"),
    [
        (JOB, "sluice /r", "RUNNING"),
        (JOB, "sluice /r/s", UNKNOWN),
        (dataclasses.replace(JOB, cluster="there"), "sluice /r", UNKNOWN),
        (RecordedJob("1", ("sluice /r",)), "sluice /r", "RUNNING"),  # events of older versions name no cluster
        (RecordedJob("1", ("sluice /r",)), "sluice /s", UNKNOWN),
        (RecordedJob("1", ("sluice /a|b c",)), "sluice /a|b c", "RUNNING"),
    ],
)
def test_an_active_job_is_recognized_by_cluster_id_and_comment(
    monkeypatch: pytest.MonkeyPatch, job: RecordedJob, comment: str, state: str
) -> None:
    """The submit time does not matter, because a requeue changes it."""
    row = SQUEUE_ROW.format(state="RUNNING", submit_time="2026-11-23T09:00:00", comment=comment)
    for output in ({"squeue": row}, {"squeue_all_users": row}):
        set_slurm_output(monkeypatch, **output)
        assert query_job_states([job])[job].state == state, output


def test_the_state_belongs_to_the_newer_of_two_jobs_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    older_job = dataclasses.replace(JOB, name="r-prepare", submit_time=JOB.submit_time - 1e6)
    row = SQUEUE_ROW.format(state="RUNNING", submit_time=SUBMIT_TIME, comment="sluice /r")
    set_slurm_output(monkeypatch, squeue=row, squeue_all_users=row)
    states = query_job_states([older_job, JOB])
    assert (states[older_job].state, states[JOB].state) == (UNKNOWN, "RUNNING")


def test_a_job_without_its_comment_is_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, expected in (("PENDING", UNKNOWN), ("FAILED", "FAILED")):
        row = SQUEUE_ROW.format(state=state, submit_time=SUBMIT_TIME, comment="(null)")
        set_slurm_output(monkeypatch, squeue=row)
        job_state = query_job_states([JOB])[JOB]
        assert job_state.state == expected and ("scancel 1" in job_state.reason) == (state == "PENDING")
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command: commands.append(command))
    job_states.cancel_jobs([job_state, JobState("2", UNKNOWN), JobState("3", "COMPLETED"), JobState("4", "PENDING")])
    assert commands == [("scancel", "4")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a tiny run for which the prepare and shard stages are done. The current cluster is `here`."""
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    return make_run(tmp_path)


def write_submitted(
    run: Run, stage: str, job_id: str, dependency_type: str = "afterok", *after: str, **fields: Any
) -> None:
    """Write the event `submitted` of a job on the cluster `here` that depends on the jobs `after`."""
    identity = {"cluster": "here", "uid": 1000, "job_name": f"{stage}-tiny"}
    fields = {"job_id": job_id, "after": after, "kind": dependency_type, **identity, **fields}
    write_event(run, "submitted", stage, executor="slurm", **fields)


def test_jobs_of_a_point_have_the_comment_of_the_point_or_its_sweep(run: Run) -> None:
    """The comment contains the path, so a copy of the run has another comment."""
    write_submitted(run, "train", "7")
    point = Run(run.path / "points/000")
    [(event, job)] = list_recorded_jobs(run)
    assert job.comments == (f"sluice {run.path}",)
    assert run_jobs.read_recorded_job(point, event).comments == (f"sluice {point.path}", f"sluice {run.path}")
    assert run_jobs.read_recorded_job(Run(run.path.parent / "copy"), event).comments == (
        f"sluice {run.path.parent}/copy",
    )


@pytest.mark.parametrize("case", ["requeued", "submitted again", "another cluster"])
def test_only_a_requeued_job_is_a_retry_of_the_previous_attempt(run: Run, case: str) -> None:
    """Job 6 has an attempt without an end. Another job with the ID 6 must not write that the attempt was requeued."""
    write_submitted(run, "train", "6")
    fields = {"attempt": 1, "restarts": 0, "standing": "step 0"}
    fields["cluster"] = "there" if case == "another cluster" else "here"
    write_event(run, "started", "train", job_id="6", slurm_job="6", **fields)
    if case == "submitted again":
        write_submitted(run, "train", "6")
    attempt_end.end_unfinished_attempt(run, "train", make_job_rank_info("6", 1), None)
    assert bool(read_event_lines(run, "train", "requeued")) == (case == "requeued")


def test_the_end_of_an_open_attempt_is_not_read_from_another_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job with this ID may belong to another run, or a user may have submitted it.

    The job that squeue shows is the job of the attempt if its comment matches, or if it has no comment and the same
    name. The cluster must also match.
    """
    identity = {"uid": 1000, "job_name": "r-train", "job_submitted": JOB.submit_time}
    for comment, name, cluster, cause in (
        (f"sluice {run.path}", "any", "here", ExitCode.TIME_LIMIT), ("", "r-train", "here", ExitCode.TIME_LIMIT),
        ("sluice /b", "r-train", "here", ExitCode.CRASHED), ("", "other", "here", ExitCode.CRASHED),
        (f"sluice {run.path}", "any", "there", ExitCode.CRASHED), ("", "r-train", "there", ExitCode.CRASHED),
    ):  # fmt: skip
        row = SQUEUE_ROW.format(state="TIMEOUT", submit_time=SUBMIT_TIME, comment=comment).replace("r-train", name)
        set_slurm_output(monkeypatch, squeue_all_users=row)
        fields = {"attempt": 1, "restarts": 0, "standing": "", "cluster": cluster, **identity}
        write_event(run, "started", "train", job_id="1", slurm_job="1", **fields)
        attempt_end.end_unfinished_attempt(run, "train", make_job_rank_info("9"), None)
        assert read_event_lines(run, "train")[-1]["cause"] == cause.name.lower(), (comment, name, cluster)


def test_the_exit_code_of_another_job_with_the_same_id_is_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounting says that the job has failed. The controller may show another job with this ID and a later time."""
    identity = {"cluster": "here", "uid": 1000, "job_name": "r-train", "job_submitted": JOB.submit_time}
    set_slurm_output(monkeypatch, sacct=SQUEUE_ROW.format(state="FAILED", submit_time=SUBMIT_TIME, comment=""))
    for submit_time, cause in ((SUBMIT_TIME, ExitCode.STORAGE), ("2026-11-23T09:00:00", ExitCode.CRASHED)):
        fields = f"JobState=FAILED ExitCode={int(ExitCode.STORAGE)}:0\n   SubmitTime={submit_time}"
        output = f"JobId=1 JobName=r-train\n   {fields}\n"
        monkeypatch.setattr(current_job, "run_slurm_command", lambda *command, output=output: output)
        write_event(run, "started", "train", job_id="1", slurm_job="1", attempt=1, restarts=0, standing="", **identity)
        attempt_end.end_unfinished_attempt(run, "train", make_job_rank_info("9"), None)
        assert read_event_lines(run, "train")[-1]["cause"] == cause.name.lower()


def test_a_successor_is_distinguished_from_other_jobs_with_its_id(run: Run) -> None:
    """A job of another stage and cluster with the ID 5 changes nothing. A new train job 5 is no successor."""
    write_submitted(run, "train", "4")
    write_submitted(run, "train", "5", "afternotok", "4")
    assert succession.find_predecessor(run, "train", "5") == "4"
    write_submitted(run, "evaluate", "5", cluster="there")
    assert succession.find_predecessor(run, "train", "5") == "4"
    write_submitted(run, "train", "5")
    assert succession.find_predecessor(run, "train", "5") is None


def test_jobs_that_depended_on_an_earlier_job_with_the_same_id_are_not_waiting_jobs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job 6 depends on the first job with the ID 4. Then a different train job gets the ID 4; job 5 depends on it."""
    write_submitted(run, "train", "4")
    write_submitted(run, "evaluate", "6", "afterok", "4")
    write_submitted(run, "train", "4")
    write_submitted(run, "train", "5", "afternotok", "4")
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {job: JobState(job.job_id, "PENDING") for job in jobs}
    )
    assert [state.job_id for state, _ in succession._list_waiting_jobs(run, "4")] == ["5"]
    write_event(run, "failed", "train", job_id="4", cause="crashed")
    assert run_jobs.is_job_ending(run, "train", JobState("4", "RUNNING"))
    write_submitted(run, "train", "4")
    assert not run_jobs.is_job_ending(run, "train", JobState("4", "RUNNING")), (
        "the event belongs to the earlier job with this ID"
    )


def test_events_of_an_earlier_job_with_the_same_id_are_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first job 4 has a successor and was cancelled. The second job 4 has no successor and was not cancelled."""
    write_submitted(run, "train", "4")
    write_submitted(run, "train", "5", "afternotok", "4")
    write_event(run, "cancelled", "train", job_id="4", cause="cancelled")
    predecessors: list[str] = []  # the job after which each new successor starts
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda run, stage, after, **_: predecessors.extend(after))
    set_slurm_output(monkeypatch)
    assert succession.hand_over(run, "train", "4") is None and predecessors == []
    assert succession._was_cancelled(run, "train", "4")
    write_submitted(run, "train", "4")
    assert succession.hand_over(run, "train", "4") is None and predecessors == ["4"]
    assert not succession._was_cancelled(run, "train", "4")


def test_the_time_of_another_job_with_the_same_id_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = "2026-11-22T11:51:43|2026-11-22T11:51:44"
    monkeypatch.setattr(report, "query_accounting", lambda *_: f"1|{times}|s-train\n1_0|{times}|r-train\n")
    monkeypatch.setattr(report, "cluster_name", lambda: "here")
    assert [job_run.job_id for job_run in report.read_job_times([JOB])] == ["1_0"]
    assert report.read_job_times([dataclasses.replace(JOB, cluster="there")]) == []


@pytest.mark.parametrize("is_job_of_run", [True, False])
def test_an_evaluation_of_a_checkpoint_waits_only_for_jobs_of_its_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, is_job_of_run: bool
) -> None:
    """Job 7 evaluated the checkpoint of step 1. The running job 7 may belong to this run or to another run."""
    write_submitted(run, "evaluate", "7", step=1)
    comment = f"sluice {run.path}" if is_job_of_run else "sluice /b"
    set_slurm_output(monkeypatch, squeue=f"7|RUNNING|None|n1|here|1000|{SUBMIT_TIME}|tiny-evaluate|{comment}\n")
    dependencies: list[Sequence[str]] = []
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda run, stage, after, **_: dependencies.append(after))
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [2])
    submitter = background.EvaluationSubmitter(run)
    submitter.is_enabled = True
    submitter.poll()
    assert dependencies == [["7"] if is_job_of_run else []]
    assert background.was_submitted_for_checkpoint(run, "7")
    write_submitted(run, "evaluate", "7")
    # the newest job with the ID 7 is now the evaluate job of the chain
    assert not background.was_submitted_for_checkpoint(run, "7")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [(" 0123456789ab", "0123456789ab"), ("", "0123456789ab"), (" abcdefabcdef", ""), (" 0123456789ab x", "")],
)
def test_key_is_read_from_commands_of_all_versions_of_slurm(arguments: str, key: str) -> None:
    """Slurm 22.05 shows the argument of the script, which is the key; 24.11 does not."""
    command = f"/runs/tiny/jobs/train/0123456789ab_submission.sh{arguments}"
    assert JobState("1", "PENDING", command=command).key == key
