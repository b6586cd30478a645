"""Which jobs belong to a run, although other jobs have the same ids: on a real cluster, and with recorded output."""

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
from slurm.query import current_job as slurm_job
from slurm.query import job_states, run_jobs, slurm_commands
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
other = cluster_fixture()
accounted = cluster_fixture(accounting=True, min_job_age=2)

pytestmark = pytest.mark.timeout(900)

HELD = ("site.requeue=false", "site.sbatch={hold: true}")


def make_job_rank_info(job_id: str, restarts: int = 0) -> RankInfo:
    """Return the rank info of a supervisor in a job."""
    return dataclasses.replace(read_rank_info({}), job_id=job_id, restart_count=restarts)


def use_cluster(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process call the Slurm commands of a cluster."""
    for name, value in cluster.environment().items():
        monkeypatch.setenv(name, value)


def submit_held_chain(folder: Path, cluster: Cluster) -> tuple[Run, list[str]]:
    """Return a run whose training, its successor and its evaluation are held in the queue, and the ids of the jobs."""
    run = make_run(folder, overrides=HELD)
    done = run_submit(cluster, folder, "tiny.yaml", *HELD)
    assert done.returncode == 0, done.stdout + done.stderr
    return run, [one.job_id for _, one in list_recorded_jobs(run)]


def submit_jobs_of_another_run(cluster: Cluster, ids: Sequence[str], comments: Sequence[str]) -> None:
    """Submit jobs with these ids: one that runs, and jobs that wait for its end."""
    for job, comment, kind in zip(ids, comments, ("", "afternotok", "afterok"), strict=True):
        after = [f"--dependency={kind}:{ids[0]}"] if kind else []
        words = [f"--comment={comment}", "-J", "train-tiny", "-o", "/dev/null", *after, "--wrap", "sleep 600"]
        assert cluster.output(["sbatch", "--parsable", *words]) == job
    cluster.wait_job(ids[0], "RUNNING")


def list_queue(cluster: Cluster, ids: Sequence[str]) -> list[str]:
    """Return the state and dependency of jobs."""
    lines = cluster.output(["squeue", "-h", "-t", "all", "-o", "%i %T %E"]).splitlines()
    return [line for line in lines if line.split()[0] in ids]


@pytest.mark.parametrize("happened", ["the controller lost its state", "another cluster"])
def test_jobs_of_another_run_with_the_same_ids_are_not_changed(
    tmp_path: Path, cluster: Cluster, other: Cluster, monkeypatch: pytest.MonkeyPatch, happened: str
) -> None:
    lost = happened != "another cluster"
    cluster.lose_state()
    run, ids = submit_held_chain(tmp_path, cluster)
    assert ids == ["1", "2", "3"], "training, successor, evaluation"
    assert re.search(r"^train +held +1 ", run_submit(cluster, tmp_path, "status", "runs/tiny").stdout, re.M)
    here = cluster if lost else other
    here.lose_state()
    comments = ["sluice /b/runs/tiny"] * 3
    submit_jobs_of_another_run(here, ids, comments)
    before = list_queue(here, ids)
    assert [line.split()[1] for line in before].count("PENDING") == 2

    status = run_submit(here, tmp_path, "status", "runs/tiny").stdout
    assert not re.search(r"^(train|evaluate) +(running|pending|held)", status, re.M), status
    use_cluster(here, monkeypatch)
    assert succession.take_over(run, "train", make_job_rank_info("2", 1)) is None
    assert [e["children"] for e in read_event_lines(run, "train", "took_over")] == ([[]] if lost else [])
    succession.cancel_unneeded_jobs(run, "train", make_job_rank_info("1"), is_done=False)
    succession.cancel_unneeded_jobs(run, "train", make_job_rank_info("1"), is_done=True)
    assert run_submit(here, tmp_path, "cancel", "runs/tiny").returncode == 0
    assert list_queue(here, ids) == before
    done = run_submit(here, tmp_path, "resume", "runs/tiny", "stages.train.time=00:20:00")
    assert done.returncode == 0, done.stdout + done.stderr
    new = [one.job_id for _, one in list_recorded_jobs(run)][3:]
    assert new == ["4", "5", "6"] and "after 4" in done.stdout, done.stdout
    assert list_queue(here, ids) == before
    done = run_submit(here, tmp_path, "cancel", "runs/tiny")
    assert {line.split()[1] for line in list_queue(here, new)} == {"CANCELLED"} and list_queue(here, ids) == before
    if not lost:
        names = [c.output(["scontrol", "show", "config"]).split("ClusterName")[1].split()[1] for c in (cluster, other)]
        assert f"jobs of cluster {names[0]} are not visible on {names[1]}" in done.stdout
        assert {line.split()[1] for line in list_queue(cluster, ids)} == {"PENDING"}
        assert run_submit(cluster, tmp_path, "cancel", "runs/tiny").returncode == 0
        assert {line.split()[1] for line in list_queue(cluster, ids)} == {"CANCELLED"}, "there they are ours"
    here.clear()


@pytest.mark.parametrize("cut", [True, False])
def test_a_job_that_lost_its_comment_is_not_changed_but_reported(tmp_path: Path, cluster: Cluster, cut: bool) -> None:
    run, (train, successor, evaluate) = submit_held_chain(tmp_path, cluster)
    comment = f"sluice {run.path}"[:12] if cut else "a plugin was here"
    cluster.output(["scontrol", "update", f"JobId={train}", f"Comment={comment}"])
    done = run_submit(cluster, tmp_path, "cancel", "runs/tiny")
    assert f"to end it: scancel {train}" in done.stdout and f"(sluice {run.path})" in done.stdout, done.stdout
    assert [cluster.job_state(job) for job in (train, successor, evaluate)] == ["PENDING", "CANCELLED", "CANCELLED"]
    assert f"scancel {train}" in run_submit(cluster, tmp_path, "status", "runs/tiny").stdout
    assert f"scancel {train}" in run_submit(cluster, tmp_path, "resume", "runs/tiny").stdout
    assert cluster.job_state(train) == "PENDING"
    cluster.clear()


def test_a_requeued_job_is_still_recognized(
    tmp_path: Path, accounted: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submit time is that of the requeue. Accounting, which has no comment here, shows each run of the job."""
    use_cluster(accounted, monkeypatch)
    monkeypatch.setattr(job_states, "SUBMIT_TIME_TOLERANCE_S", 3.0)
    run = Run.create(load_config(write_config(tmp_path, "a")))
    script = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then sleep 600; fi'
    words = [f"--comment=sluice {run.path}", "-J", "a-train", "-o", "/dev/null", "--requeue", "--wrap", script]
    job = accounted.output(["sbatch", "--parsable", *words])
    write_event(run, "submitted", "train", job_id=job, executor="slurm", after=[], **run_jobs.job_identity("a-train"))
    [(_, one)] = list_recorded_jobs(run)
    accounted.wait_job(job, "RUNNING")
    wait_for("more than the tolerance", lambda: (datetime.now(UTC).timestamp() - one.submit_time) > 4)
    accounted.output(["scontrol", "requeue", job])
    assert query_job_states([one])[one].is_active, "by id and comment"
    wait_for("squeue to forget it", lambda: job not in accounted.output(["squeue", "-h", "-t", "all", "-o", "%A"]), 90)
    assert len(accounted.output(["sacct", "-nXDP", "-j", job, "-o", "Submit"]).splitlines()) == 2
    wait_for("accounting", lambda: query_job_states([one])[one].state == "COMPLETED", 30)
    accounted.lose_state()
    for number in range(int(job)):
        words = ["-J", "a-train", "-o", "/dev/null", "--wrap", f"exit {number + 1}"]
        last = accounted.output(["sbatch", "--parsable", *words])
    assert last == job
    wait_for("its end", lambda: "FAILED" in accounted.output(["sacct", "-nXP", "-j", job, "-o", "State"]), 60)
    assert query_job_states([one])[one].state == "COMPLETED", (
        "the newest row is of another job of that id, name and user"
    )


# -- with recorded answers ------------------------------------------------------------------------------------

AT = "2026-11-22T11:51:43"
OURS = RecordedJob("1", ("sluice /r",), "here", 1000, "r-train", datetime.fromisoformat(AT).timestamp())
LISTED = "1|{state}|None|n1|here|1000|{at}|r-train|{comment}\n"


def set_slurm_output(monkeypatch: pytest.MonkeyPatch, squeue: str = "", sacct: str = "", of_all: str = "") -> None:
    """Set the output of squeue for this user's jobs, of accounting, and of squeue for a single job (`of_all`)."""

    def call(*command: str, **_: Any) -> str | None:
        return sacct if command[0] == "sacct" else squeue if "--me" in command else of_all

    monkeypatch.setattr(slurm_commands, "run_slurm_command", call)
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
        (["1|RUNNING|None|n1|here|1000|2026-11-22T11:51:44|r-train"], UNKNOWN),  # lost with the controller's state
        (
            [
                "1|REQUEUED|None|n1|here|1000|2026-11-22T11:51:44|r-train",
                "1|NODE_FAIL|None|n1|here|1000|2026-11-22T13:00:00|r-train",
                "1|TIMEOUT|BeginTime|n1|here|1000|2026-11-22T14:00:00|r-train",
                "1|FAILED|None|n1|here|1000|2026-11-23T09:00:00|r-train",  # an id again
            ],
            "TIMEOUT",
        ),
    ],
)
def test_a_final_state_is_read_from_accounting_if_all_but_the_comment_agrees(
    monkeypatch: pytest.MonkeyPatch, rows: list[str], state: str
) -> None:
    set_slurm_output(monkeypatch, sacct="\n".join(f"{row}|" for row in rows))
    found = query_job_states([OURS])[OURS]
    assert found.state == state and not found.is_active


@pytest.mark.parametrize(
    ("claim", "comment", "state"),
    [
        (OURS, "sluice /r", "RUNNING"),
        (OURS, "sluice /r/s", UNKNOWN),
        (dataclasses.replace(OURS, cluster="there"), "sluice /r", UNKNOWN),
        (RecordedJob("1", ("sluice /r",)), "sluice /r", "RUNNING"),  # of before: an event that names no cluster
        (RecordedJob("1", ("sluice /r",)), "sluice /s", UNKNOWN),
        (RecordedJob("1", ("sluice /a|b c",)), "sluice /a|b c", "RUNNING"),
    ],
)
def test_an_active_job_is_recognized_by_cluster_id_and_comment(
    monkeypatch: pytest.MonkeyPatch, claim: RecordedJob, comment: str, state: str
) -> None:
    late = LISTED.format(state="RUNNING", at="2026-11-23T09:00:00", comment=comment)
    for said in ({"squeue": late}, {"of_all": late}):
        set_slurm_output(monkeypatch, **said)
        assert query_job_states([claim])[claim].state == state, said


def test_of_two_jobs_with_one_id_the_newer_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    older = dataclasses.replace(OURS, name="r-prepare", submit_time=OURS.submit_time - 1e6)
    shown = LISTED.format(state="RUNNING", at=AT, comment="sluice /r")
    set_slurm_output(monkeypatch, squeue=shown, of_all=shown)
    found = query_job_states([older, OURS])
    assert (found[older].state, found[OURS].state) == (UNKNOWN, "RUNNING")


def test_a_job_without_its_comment_is_only_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, ...]] = []
    for state, expected in (("PENDING", UNKNOWN), ("FAILED", "FAILED")):
        set_slurm_output(monkeypatch, squeue=LISTED.format(state=state, at=AT, comment="(null)"))
        found = query_job_states([OURS])[OURS]
        assert found.state == expected and ("scancel 1" in found.reason) == (state == "PENDING")
    monkeypatch.setattr(slurm_commands, "run_slurm_command", lambda *command: said.append(command))
    job_states.cancel_jobs([found, JobState("2", UNKNOWN), JobState("3", "COMPLETED"), JobState("4", "PENDING")])
    assert said == [("scancel", "4")]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "here")
    return make_run(tmp_path)


def record_submitted(run: Run, stage: str, job: str, kind: str = "afterok", *after: str, **more: Any) -> None:
    """Record a submitted job in the events of a run."""
    fields = {"cluster": "here", "uid": 1000, "job_name": f"{stage}-tiny"} | more
    write_event(run, "submitted", stage, job_id=job, executor="slurm", after=after, kind=kind, **fields)


def test_a_point_has_the_comment_of_its_sweep_or_its_own_but_a_copy_has_neither(run: Run) -> None:
    record_submitted(run, "train", "7")
    point = Run(run.path / "points/000")
    [(event, one)] = list_recorded_jobs(run)
    assert one.comments == (f"sluice {run.path}",)
    assert run_jobs.read_recorded_job(point, event).comments == (f"sluice {point.path}", f"sluice {run.path}")
    assert run_jobs.read_recorded_job(Run(run.path.parent / "copy"), event).comments == (
        f"sluice {run.path.parent}/copy",
    )


@pytest.mark.parametrize("now", ["requeued", "submitted again", "another cluster"])
def test_only_a_requeued_job_continues_its_attempt(run: Run, now: str) -> None:
    record_submitted(run, "train", "6")
    before = {"cluster": "there"} if now == "another cluster" else {"cluster": "here"}
    write_event(run, "started", "train", job_id="6", slurm_job="6", attempt=1, restarts=0, standing="step 0", **before)
    if now == "submitted again":
        record_submitted(run, "train", "6")
    attempt_end.close_open_attempt(run, "train", make_job_rank_info("6", 1), None)
    assert bool(read_event_lines(run, "train", "requeued")) == (now == "requeued")


def test_the_end_of_an_open_attempt_is_not_read_from_another_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other job with this id may be of Sluice or of the user."""
    identity = {"uid": 1000, "job_name": "r-train", "job_submitted": OURS.submit_time}
    for comment, name, cluster, cause in (
        (f"sluice {run.path}", "any", "here", ExitCode.TIME_LIMIT), ("", "r-train", "here", ExitCode.TIME_LIMIT),
        ("sluice /b", "r-train", "here", ExitCode.CRASHED), ("", "other", "here", ExitCode.CRASHED),
        (f"sluice {run.path}", "any", "there", ExitCode.CRASHED), ("", "r-train", "there", ExitCode.CRASHED),
    ):  # fmt: skip
        set_slurm_output(
            monkeypatch, of_all=LISTED.format(state="TIMEOUT", at=AT, comment=comment).replace("r-train", name)
        )
        facts = {"attempt": 1, "restarts": 0, "standing": "", "cluster": cluster, **identity}
        write_event(run, "started", "train", job_id="1", slurm_job="1", **facts)
        attempt_end.close_open_attempt(run, "train", make_job_rank_info("9"), None)
        assert read_event_lines(run, "train")[-1]["cause"] == cause.name.lower(), (comment, name, cluster)


def test_the_exit_code_of_another_job_with_the_same_id_is_not_used(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounting has the end of the job; the controller shows another job with this id, by its submit time."""
    identity = {"cluster": "here", "uid": 1000, "job_name": "r-train", "job_submitted": OURS.submit_time}
    set_slurm_output(monkeypatch, sacct=LISTED.format(state="FAILED", at=AT, comment=""))
    for at, cause in ((AT, ExitCode.STORAGE), ("2026-11-23T09:00:00", ExitCode.CRASHED)):
        shown = f"JobId=1 JobName=r-train\n   JobState=FAILED ExitCode={int(ExitCode.STORAGE)}:0\n   SubmitTime={at}\n"
        monkeypatch.setattr(slurm_job, "run_slurm_command", lambda *command, shown=shown: shown)
        write_event(run, "started", "train", job_id="1", slurm_job="1", attempt=1, restarts=0, standing="", **identity)
        attempt_end.close_open_attempt(run, "train", make_job_rank_info("9"), None)
        assert read_event_lines(run, "train")[-1]["cause"] == cause.name.lower()


def test_a_successor_is_distinguished_from_other_jobs_with_its_id(run: Run) -> None:
    record_submitted(run, "train", "4")
    record_submitted(run, "train", "5", "afternotok", "4")
    assert succession.find_predecessor(run, "train", "5") == "4"
    record_submitted(run, "evaluate", "5", cluster="there")
    assert succession.find_predecessor(run, "train", "5") == "4"
    record_submitted(run, "train", "5")
    assert succession.find_predecessor(run, "train", "5") is None


def test_a_job_that_waited_for_an_earlier_job_with_the_id_does_not_wait_for_this_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an evaluation of the same run that was submitted again for another training."""
    record_submitted(run, "train", "4")
    record_submitted(run, "evaluate", "6", "afterok", "4")
    record_submitted(run, "train", "4")
    record_submitted(run, "train", "5", "afternotok", "4")
    monkeypatch.setattr(
        succession.job_states, "query_job_states", lambda jobs: {one: JobState(one.job_id, "PENDING") for one in jobs}
    )
    assert [state.job_id for state, _ in succession._list_waiting_jobs(run, "4")] == ["5"]
    write_event(run, "failed", "train", job_id="4", cause="crashed")
    assert run_jobs.is_job_ending(run, "train", JobState("4", "RUNNING"))
    record_submitted(run, "train", "4")
    assert not run_jobs.is_job_ending(run, "train", JobState("4", "RUNNING")), "that was said by the one before"


def test_events_of_an_earlier_job_with_the_id_are_ignored(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    record_submitted(run, "train", "4")
    record_submitted(run, "train", "5", "afternotok", "4")
    write_event(run, "cancelled", "train", job_id="4", cause="cancelled")
    successors: list[str] = []
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda run, stage, after, **more: successors.extend(after))
    set_slurm_output(monkeypatch)
    assert succession.hand_over(run, "train", "4") is None and successors == []
    assert succession._was_cancelled(run, "train", "4")
    record_submitted(run, "train", "4")
    assert succession.hand_over(run, "train", "4") is None and successors == ["4"]
    assert not succession._was_cancelled(run, "train", "4")


def test_the_time_of_another_job_with_the_id_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    times = "2026-11-22T11:51:43|2026-11-22T11:51:44"
    monkeypatch.setattr(report, "query_accounting", lambda *asked: f"1|{times}|s-train\n1_0|{times}|r-train\n")
    monkeypatch.setattr(report, "cluster_name", lambda: "here")
    assert [ran.job_id for ran in report.read_job_times([OURS])] == ["1_0"]
    assert report.read_job_times([dataclasses.replace(OURS, cluster="there")]) == []


@pytest.mark.parametrize("ours", [True, False])
def test_an_evaluation_of_a_checkpoint_waits_only_for_jobs_of_its_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    record_submitted(run, "evaluate", "7", step=1)
    comment = f"sluice {run.path}" if ours else "sluice /b"
    set_slurm_output(monkeypatch, squeue=f"7|RUNNING|None|n1|here|1000|{AT}|tiny-evaluate|{comment}\n")
    asked: list[Sequence[str]] = []
    monkeypatch.setattr("slurm.submit.sbatch.submit_stage", lambda run, stage, after, **more: asked.append(after))
    monkeypatch.setattr(background, "list_checkpoint_steps", lambda folder: [2])
    one = background.EvaluationSubmitter(run)
    one.is_enabled = True
    one.poll()
    assert asked == [["7"] if ours else []]
    assert background.evaluates_one_checkpoint(run, "7")
    record_submitted(run, "evaluate", "7")
    assert not background.evaluates_one_checkpoint(run, "7"), "the chain's own, of an id that came again"
