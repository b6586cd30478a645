"""Test commands while the Slurm controller does not respond: they wait only once, and do not guess states of jobs."""

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
from tests.slurm.query.test_job_identity import HELD, list_queue
from tests.support.cluster_runs import run_submit
from tests.support.events import write_event
from tests.support.tiny import make_run, write_config

cluster = cluster_fixture()

pytestmark = pytest.mark.timeout(900)


def test_commands_do_nothing_while_the_controller_is_frozen(tmp_path: Path, cluster: Cluster) -> None:
    """The jobs of a run are on hold. While the controller is suspended, no command may change or submit a job.

    Afterwards, `cancel` must cancel all jobs.
    """
    run = make_run(tmp_path, overrides=HELD)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *HELD).returncode == 0
    ids = [job.job_id for _, job in list_recorded_jobs(run)]
    queue_before = list_queue(cluster, ids)
    with cluster.suspend_controller():
        status = run_submit(cluster, tmp_path, "status", "runs/tiny")
        assert status.returncode == 0
        assert f"train unknown {NOT_RESPONDING}" in status.stdout and "resume" not in status.stdout
        for arguments in (
            ["tiny.yaml", *HELD],
            ["resume", "runs/tiny"],
            ["resume", "runs/tiny", "stages.train.time=1:00:00"],
        ):
            result = run_submit(cluster, tmp_path, *arguments)
            assert result.returncode == ExitCode.USER_ERROR, (arguments, result.stdout)
            assert NOT_RESPONDING in result.stderr, (arguments, result.stdout)
        assert not run.metrics_file.exists(), "nothing must be trained on this machine"
        assert not run.changes_file.exists()
        output = run_submit(cluster, tmp_path, "cancel", "runs/tiny").stdout
        assert "stay in the queue" in output and NOT_RESPONDING in output
    assert list_queue(cluster, ids) == queue_before and len(cluster.output(["squeue", "-h"]).splitlines()) == len(ids)
    assert "jobs" in run_submit(cluster, tmp_path, "cancel", "runs/tiny").stdout
    assert {line.split()[1] for line in list_queue(cluster, ids)} == {"CANCELLED"}


@pytest.fixture
def fake_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the Slurm commands by programs that write their names to the file `log` and hang. Return their folder."""
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


def set_output(folder: Path, name: str, output: str, code: int = 0) -> None:
    """Change a fake command: it prints `output` to stdout and stderr, and exits with `code`."""
    script = f'echo "{output}"\necho "{output}" >&2\nexit {code}\n'
    (folder / name).write_text(f'#!/bin/sh\necho {name} >> "{folder}/log"\n{script}')


def make_submitted_run(folder: Path, job_count: int) -> Run:
    """Return a run with `job_count` submitted train jobs."""
    run = make_run(folder)
    fields = {"executor": "slurm", "cluster": "a", "job_name": "train-tiny"}
    for number in range(1, job_count + 1):
        write_event(run, "submitted", "train", job_id=str(number), **fields)
    return run


def test_status_waits_for_the_controller_once(tmp_path: Path, fake_commands: Path) -> None:
    """The run has 20 jobs, and this process prints the status three times. Slurm is called only once."""
    run = make_submitted_run(tmp_path, 20)
    output = io.StringIO()
    for _ in range(3):
        print_status(run, Console(file=output, width=200))
    assert (fake_commands / "log").read_text().split() == ["scontrol"]
    assert output.getvalue().count(f"train unknown {NOT_RESPONDING}") == 3
    with pytest.raises(UserError) as error:
        run_jobs.describe_running_stages(run)
    assert error.value.code == "slurm.not_responding"


def test_one_query_covers_many_jobs_that_slurm_no_longer_knows(tmp_path: Path, fake_commands: Path) -> None:
    """Half of the jobs belong to another user, and the cluster has no accounting.

    The second call of squeue is for jobs of other users.
    """
    set_output(fake_commands, "scontrol", "ClusterName = a")
    set_output(fake_commands, "squeue", "")
    set_output(fake_commands, "sacct", "Slurm accounting storage is disabled", 1)
    uids = (job_states.os.getuid(), 12345)
    jobs = [RecordedJob(str(number), cluster="a", uid=uid) for uid in uids for number in range(50)]
    states = job_states.query_job_states(jobs)
    assert {state.state for state in states.values()} == {job_states.UNKNOWN}
    assert (fake_commands / "log").read_text().split() == ["scontrol", "squeue", "sacct", "squeue"]


@pytest.mark.parametrize("error_output", ["slurm_load_jobs error: Socket timed out on send/recv operation", None])
@pytest.mark.parametrize("job_count", [1, 4])
def test_jobs_are_unknown_if_squeue_fails(
    tmp_path: Path, fake_commands: Path, error_output: str | None, job_count: int
) -> None:
    """squeue prints an error, or hangs if `error_output` is None. sbatch would accept jobs, but must not be called."""
    set_output(fake_commands, "scontrol", "ClusterName = a")
    set_output(fake_commands, "sbatch", "105")
    if error_output is not None:
        set_output(fake_commands, "squeue", error_output, 1)
    run = make_submitted_run(tmp_path, job_count)
    output = io.StringIO()
    print_status(run, Console(file=output, width=200))
    assert f"train unknown {NOT_RESPONDING}" in output.getvalue() and "resume" not in output.getvalue()
    events_before = run.events_file.read_bytes()
    with pytest.raises(UserError) as error:
        submit_chain(run, Console(file=output), resubmit_failed=True)
    assert error.value.code == "slurm.not_responding"
    assert run.events_file.read_bytes() == events_before and "sbatch" not in (fake_commands / "log").read_text()


def test_jobs_of_sweep_points_are_unknown_if_the_controller_does_not_respond(
    tmp_path: Path, fake_commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = JobState("1", UNKNOWN, NOT_RESPONDING)
    monkeypatch.setattr(run_jobs, "find_jobs", lambda jobs, *_: (dict.fromkeys(jobs, unknown), None))
    run = Run.create(load_config(write_config(tmp_path), ["sweep.grid={optimizer.lr: [0.1, 0.2]}"]))
    for point in create_points(run):
        write_event(point, "submitted", "train", job_id="1", executor="slurm", cluster="a", job_name="train-tiny")
    with pytest.raises(UserError) as error:
        submit_chain(run, Console(file=io.StringIO()), resubmit_failed=True)
    assert error.value.code == "slurm.not_responding"


def test_an_error_about_an_unknown_job_id_counts_as_a_response(fake_commands: Path) -> None:
    """squeue fails if its only argument is the ID of a job that the controller no longer knows."""
    set_output(fake_commands, "scontrol", "ClusterName = a")
    set_output(fake_commands, "squeue", "slurm_load_jobs error: Invalid job id specified", 1)
    set_output(fake_commands, "sacct", "")
    job = RecordedJob("1", cluster="a", uid=job_states.os.getuid())
    assert job_states.query_job_states([job])[job] == JobState("1", UNKNOWN)


def test_all_commands_of_a_query_share_one_time_limit(fake_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sacct hangs here. Its limit leaves time for the second squeue, which queries jobs of other users."""
    set_output(fake_commands, "scontrol", "ClusterName = a")
    set_output(fake_commands, "squeue", "")
    limits_s: list[tuple[str, float]] = []
    run_slurm_command = slurm_commands.run_slurm_command

    def record_limit(*command: str, timeout_s: float, **options: Any) -> str | None:
        limits_s.append((command[0], timeout_s))
        return run_slurm_command(*command, timeout_s=timeout_s, **options)

    slurm_commands.cluster_name()  # calls scontrol now, so that only the commands of the query are recorded
    monkeypatch.setattr(slurm_commands, "run_slurm_command", record_limit)
    job = RecordedJob("1", cluster="a", uid=12345)
    assert job_states.query_job_states([job])[job] == JobState("1", UNKNOWN), (
        "the state must have no reason, because squeue responded"
    )
    assert [name for name, _ in limits_s] == ["squeue", "sacct", "squeue"]
    (_, first_squeue_s), (_, sacct_s), (_, second_squeue_s) = limits_s
    assert 0.5 >= first_squeue_s >= 2 * sacct_s, "sacct must get at most half of the remaining time"
    assert sacct_s + second_squeue_s <= first_squeue_s


@pytest.mark.parametrize(
    ("ping_output", "is_responding"),
    [
        ("Slurmctld(primary) at a is UP", True),
        ("Slurmctld(primary) at a is DOWN", None),
        ("Slurmctld(primary) at a is DOWN\nSlurmctld(backup) at b is UP", True),
        ("scontrol: fatal: Could not establish a configuration source", False),
        (None, None),
    ],
)
def test_a_cluster_that_does_not_respond_is_not_replaced_by_this_machine(
    fake_commands: Path, ping_output: str | None, is_responding: bool | None
) -> None:
    """If the controller does not respond, expect an error, because the stages must not run on this machine instead.

    `ping_output` is the output of `scontrol ping`; None: the command hangs. `is_responding` None: expect the error.
    """
    if ping_output is not None:
        set_output(fake_commands, "scontrol", ping_output, int(not is_responding))
    if is_responding is None:
        with pytest.raises(UserError) as error:
            is_slurm_responding()
        assert error.value.code == "slurm.not_responding" and "--executor local" in str(error.value)
    else:
        assert is_slurm_responding() == is_responding


def test_slurm_is_not_responding_if_scontrol_is_missing(fake_commands: Path) -> None:
    (fake_commands / "scontrol").unlink()
    assert not is_slurm_responding()
