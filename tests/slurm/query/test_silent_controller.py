"""A controller that does not answer is waited for once; nothing is said of its jobs, or done in their place."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.base.errors import ExitCode, UserError
from pipeline.config.read import load_config
from pipeline.run.directory import Run, create_points
from slurm.query import job_states, run_jobs, slurm_commands
from slurm.query.job_states import UNKNOWN, JobState, RecordedJob
from slurm.query.run_jobs import list_recorded_jobs
from slurm.query.slurm_commands import NOT_RESPONDING, is_slurm_responding
from slurm.query.status import print_status
from slurm.submit.chain import submit_chain
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.slurm.query.test_job_identity import HELD, queue
from tests.support.cluster_runs import run_submit
from tests.support.events import write_event
from tests.support.tiny import make_run, write_config

cluster = cluster_fixture()

pytestmark = pytest.mark.timeout(900)


def test_a_frozen_controller(tmp_path: Path, cluster: Cluster) -> None:
    run = make_run(tmp_path, overrides=HELD)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *HELD).returncode == 0
    ids = [one.job_id for _, one in list_recorded_jobs(run)]
    before = queue(cluster, ids)
    with cluster.frozen():
        status = run_submit(cluster, tmp_path, "status", "runs/tiny")
        assert (
            status.returncode == 0
            and f"train unknown {NOT_RESPONDING}" in status.stdout
            and "resume" not in status.stdout
        )
        for again in (
            ["tiny.yaml", *HELD],
            ["resume", "runs/tiny"],
            ["resume", "runs/tiny", "stages.train.time=1:00:00"],
        ):
            refused = run_submit(cluster, tmp_path, *again)
            assert refused.returncode == ExitCode.USER_ERROR and NOT_RESPONDING in refused.stderr, (
                again,
                refused.stdout,
            )
        assert not run.metrics_file.exists() and not run.changes_file.exists(), "nothing was trained here, or changed"
        cancelled = run_submit(cluster, tmp_path, "cancel", "runs/tiny").stdout
        assert "they stay in the queue" in cancelled and NOT_RESPONDING in cancelled
    assert queue(cluster, ids) == before and len(cluster.output(["squeue", "-h"]).splitlines()) == len(ids)
    assert "jobs" in run_submit(cluster, tmp_path, "cancel", "runs/tiny").stdout
    assert {line.split()[1] for line in queue(cluster, ids)} == {"CANCELLED"}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Slurm's commands, fake: each notes that it was asked, and does what the test writes behind that."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "squeue", "sacct", "sbatch"):
        (folder / name).write_text(f'#!/bin/sh\necho {name} >> "{folder}/log"\nexec /bin/sleep 100\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(slurm_commands, "INTERACTIVE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(slurm_commands, "_settings_by_conf", {})
    monkeypatch.setattr(slurm_commands, "_retry_times", {})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return folder


def answers(folder: Path, name: str, says: str, code: int = 0) -> None:
    words = f'echo "{says}"\necho "{says}" >&2\nexit {code}\n'
    (folder / name).write_text(f'#!/bin/sh\necho {name} >> "{folder}/log"\n{words}')


def submitted(folder: Path, count: int) -> Run:
    run = make_run(folder)
    for job in range(count):
        write_event(
            run, "submitted", "train", job_id=str(job + 1), executor="slurm", cluster="here", job_name="train-tiny"
        )
    return run


def test_it_is_waited_for_once(tmp_path: Path, asked: Path) -> None:
    run, shown = submitted(tmp_path, 20), io.StringIO()
    for _ in range(3):
        print_status(run, Console(file=shown, width=200))
    assert (asked / "log").read_text().split() == ["scontrol"]
    assert shown.getvalue().count(f"train unknown {NOT_RESPONDING}") == 3
    with pytest.raises(UserError, match=NOT_RESPONDING):
        run_jobs.list_running_work(run)


def test_where_all_jobs_are_forgotten_a_look_costs_no_question_for_each(tmp_path: Path, asked: Path) -> None:
    """Without accounting, and with jobs of another user, too."""
    answers(asked, "scontrol", "ClusterName = here")
    answers(asked, "squeue", "")
    answers(asked, "sacct", "Slurm accounting storage is disabled", 1)
    wanted = [
        RecordedJob(str(job), cluster="here", uid=uid) for uid in (job_states.os.getuid(), 12345) for job in range(50)
    ]
    found = job_states.query_job_states(wanted)
    assert {state.state for state in found.values()} == {job_states.UNKNOWN}
    assert (asked / "log").read_text().split() == ["scontrol", "squeue", "sacct", "squeue"]


@pytest.mark.parametrize("says", ["slurm_load_jobs error: Socket timed out on send/recv operation", None])
@pytest.mark.parametrize("count", [1, 4])
def test_a_squeue_that_fails_says_nothing_of_jobs_that_may_be_there(
    tmp_path: Path, asked: Path, says: str | None, count: int
) -> None:
    """Whatever the controller answered before, and though it would take new jobs."""
    answers(asked, "scontrol", "ClusterName = here")
    answers(asked, "sbatch", "105")
    if says is not None:
        answers(asked, "squeue", says, 1)
    run, shown = submitted(tmp_path, count), io.StringIO()
    print_status(run, Console(file=shown, width=200))
    assert f"train unknown {NOT_RESPONDING}" in shown.getvalue() and "resume" not in shown.getvalue()
    before = run.events_file.read_bytes()
    with pytest.raises(UserError, match=NOT_RESPONDING):
        submit_chain(run, Console(file=shown), retries_failed=True)
    assert run.events_file.read_bytes() == before and "sbatch" not in (asked / "log").read_text()


def test_nor_of_the_jobs_of_a_sweeps_points(tmp_path: Path, asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = JobState("1", UNKNOWN, NOT_RESPONDING)
    monkeypatch.setattr(run_jobs, "find_jobs", lambda claims, *_: (dict.fromkeys(claims, silent), None))
    run = Run.create(load_config(write_config(tmp_path), ["sweep.grid={optimizer.lr: [0.1, 0.2]}"]))
    for point in create_points(run):
        write_event(point, "submitted", "train", job_id="1", executor="slurm", cluster="here", job_name="train-tiny")
    with pytest.raises(UserError, match=NOT_RESPONDING):
        submit_chain(run, Console(file=io.StringIO()), retries_failed=True)


def test_a_job_that_the_controller_does_not_know_is_forgotten(asked: Path) -> None:
    """squeue fails where it is asked for a single job that is gone: that is an answer."""
    answers(asked, "scontrol", "ClusterName = here")
    answers(asked, "squeue", "slurm_load_jobs error: Invalid job id specified", 1)
    answers(asked, "sacct", "")
    one = RecordedJob("1", cluster="here", uid=job_states.os.getuid())
    assert job_states.query_job_states([one])[one] == JobState("1", UNKNOWN)


def test_all_questions_of_a_look_share_one_time_limit(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounting that hangs leaves time for one more squeue, of jobs of another user."""
    answers(asked, "scontrol", "ClusterName = here")
    answers(asked, "squeue", "")
    limits: list[tuple[str, float]] = []
    ask = slurm_commands.run_slurm_command

    def note(*command: str, timeout_s: float, **more: Any) -> str | None:
        limits.append((command[0], timeout_s))
        return ask(*command, timeout_s=timeout_s, **more)

    slurm_commands.cluster_name()
    monkeypatch.setattr(slurm_commands, "run_slurm_command", note)
    one = RecordedJob("1", cluster="here", uid=12345)
    assert job_states.query_job_states([one])[one] == JobState("1", UNKNOWN), "squeue has answered twice"
    assert [name for name, _ in limits] == ["squeue", "sacct", "squeue"]
    (_, first), (_, half), (_, rest) = limits
    assert 0.5 >= first >= 2 * half and half + rest <= first


@pytest.mark.parametrize(
    ("says", "there"),
    [
        ("Slurmctld(primary) at here is UP", True),
        ("Slurmctld(primary) at here is DOWN", None),
        ("Slurmctld(primary) at here is DOWN\nSlurmctld(backup) at there is UP", True),
        ("scontrol: fatal: Could not establish a configuration source", False),
        (None, None),
    ],
)
def test_this_machine_does_not_take_the_place_of_a_cluster_that_is_silent(
    asked: Path, says: str | None, there: bool | None
) -> None:
    if says is not None:
        answers(asked, "scontrol", says, int(not there))
    if there is None:
        with pytest.raises(UserError, match="--executor local"):
            is_slurm_responding()
    else:
        assert is_slurm_responding() == there


def test_sbatch_without_scontrol_is_no_cluster(asked: Path) -> None:
    (asked / "scontrol").unlink()
    assert not is_slurm_responding()
