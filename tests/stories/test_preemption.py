"""Test that a job that is preempted with a grace period starts exactly once more.

Versions of Slurm treat a job that ends in its grace period differently (slurm/query/preemption.py).
`make test-debian13` runs these tests with Slurm 24.11.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from slurm.query import current_job, preemption
from slurm.query.current_job import JobInfo, parse_job_info
from slurm.supervise.attempt_end import read_progress_marker
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.slurm.query.test_causes import make_job_info
from tests.slurm.supervise.test_attempt_end import close_attempt, exit_for_retry, make_run_with_open_attempt
from tests.support.cluster_runs import (
    get_job_id,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
    wait_for_empty_queue,
)
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import make_run, slow_down_steps, write_config

cluster = cluster_fixture(accounting=True, grace=20)
"""The grace period of 20 s is long enough for the jobs of these tests to exit.

In Slurm 22.05, a job that exits with 0 after its grace period has the state TIMEOUT instead of COMPLETED.
"""

pytestmark = pytest.mark.timeout(900)

NODES = ("stages.train.nodes=2", "stages.train.tasks_per_node=1")
JOB_IN_GRACE_PERIOD = replace(make_job_info(preempt="2026-11-21T05:42:25"), partition="low", qos="normal")


# -- the decision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "mode", "job_changes", "should_exit"),
    [
        ("22.05.8", "REQUEUE", {}, False),
        ("23.11.10", "REQUEUE", {}, False),
        ("24.05.0", "REQUEUE", {}, True),
        ("24.11.5", "REQUEUE", {}, True),
        ("24.11.5", "GANG,REQUEUE", {}, True),
        ("25.05.0-0rc1", "REQUEUE", {}, True),
        ("26.05.4", "REQUEUE", {}, True),
        ("24.11.5", "CANCEL", {}, False),
        ("24.11.5", "", {}, False),  # no mode is configured
        ("", "REQUEUE", {}, False),
        ("24.11.5", "REQUEUE", {"is_preempted": False}, False),
        ("24.11.5", "REQUEUE", {"may_requeue": False}, False),
        ("24.11.5", "REQUEUE", {"restarts": 2}, True),
        # After MaxBatchRequeue exits, Slurm holds the job. One exit is kept in reserve.
        ("24.11.5", "REQUEUE", {"restarts": 3}, False),
    ],
)
def test_the_supervisor_exits_only_if_slurm_then_requeues_the_job(
    version: str, mode: str, job_changes: dict[str, int], should_exit: bool
) -> None:
    config = {"SLURM_VERSION": version, "MaxBatchRequeue": "5"}
    info = replace(JOB_IN_GRACE_PERIOD, **job_changes)  # type: ignore[arg-type]
    assert preemption.should_exit_to_requeue(config, mode, info) == should_exit
    if not job_changes:
        assert not preemption.should_exit_to_requeue({**config, "MaxBatchRequeue": "2"}, mode, info)


def replace_controller(
    monkeypatch: pytest.MonkeyPatch, version: str, preempt_type: str = "preempt/partition_prio"
) -> None:
    """Replace the queries of `preemption` by the output of a controller of this version of Slurm.

    The partition `low` and the QOS `scavenger` requeue preempted jobs. The QOS `normal` uses the mode of the cluster,
    which also requeues them. Other partitions cancel preempted jobs, and other QOS do not exist.
    """

    def run_command(*command: str) -> str | None:
        if command[:2] == ("scontrol", "--oneliner"):
            return f"PartitionName={command[-1]} PreemptMode={'REQUEUE' if command[-1] == 'low' else 'CANCEL'}"
        assert command[0] == "sacctmgr"
        return {"normal": "cluster\n", "scavenger": "requeue\n"}.get(command[5])  # the name of the QOS

    config = {"SLURM_VERSION": version, "PreemptType": preempt_type, "PreemptMode": "REQUEUE"}
    monkeypatch.setattr(preemption, "read_slurm_config", lambda: config)
    monkeypatch.setattr(preemption, "run_slurm_command", run_command)


@pytest.mark.parametrize(
    ("preempt_type", "partition", "qos", "is_requeued"),
    [
        ("preempt/partition_prio", "low", "", True), ("preempt/partition_prio", "gone", "", False),
        ("preempt/qos", "gone", "normal", True), ("preempt/qos", "gone", "scavenger", True),
        ("preempt/qos", "low", "unknown", False), ("preempt/none", "low", "normal", False),
    ],
)  # fmt: skip
def test_the_preempt_mode_is_that_of_the_partition_or_the_qos(
    monkeypatch: pytest.MonkeyPatch, preempt_type: str, partition: str, qos: str, is_requeued: bool
) -> None:
    replace_controller(monkeypatch, "24.11.5", preempt_type)
    info = replace(JOB_IN_GRACE_PERIOD, partition=partition, qos=qos)
    assert preemption.is_requeued_on_exit(info, None) == is_requeued
    assert not preemption.is_requeued_on_exit(info, "n3"), "to exclude a node, the supervisor must request the requeue"


@pytest.mark.parametrize(
    ("version", "info", "exclude", "requests"),
    [
        ("22.05.8", JOB_IN_GRACE_PERIOD, None, ["requeue"]),
        ("24.11.5", JOB_IN_GRACE_PERIOD, None, []),
        ("24.11.5", JOB_IN_GRACE_PERIOD, "n1", ["requeue"]),
        ("24.11.5", make_job_info(), None, ["requeue"]),
    ],
)
def test_the_supervisor_requests_a_requeue_unless_slurm_requeues_the_job_on_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, info: JobInfo, exclude: str | None,
    requests: list[str],
) -> None:  # fmt: skip
    run = Run.create(load_config(write_config(tmp_path)))
    replace_controller(monkeypatch, version)
    monkeypatch.setattr(current_job, "excluded_nodes_at_requeue", lambda *_: exclude)
    # `exit_for_retry` simulates ranks that ran out of memory
    assert exit_for_retry(run, [info], monkeypatch) == (ExitCode.OUT_OF_MEMORY, requests)
    event = read_event_lines(run, "train")[-1]
    assert event["event"] == "requeued" and event.get("by") == (None if requests else "slurm")


@pytest.mark.parametrize(("batch_flag", "is_batch"), [(0, False), (1, True), (2, True), (5, True)])
def test_any_nonzero_batch_flag_means_a_batch_job(batch_flag: int, is_batch: bool) -> None:
    """In Slurm 24.11, `BatchFlag` counts the requeues by Slurm."""
    info = parse_job_info(f"JobId=1\n   JobState=RUNNING\n   Requeue=1 Restarts=1 BatchFlag={batch_flag}")
    assert info.is_batch == is_batch


END_EVENTS = [
    ("done", {"exit_code": 0}, ExitCode.DONE),
    ("stopped", {"cause": "stop file", "exit_code": int(ExitCode.STOPPED)}, ExitCode.STOPPED),
    ("failed", {"cause": "crashed", "exit_code": int(ExitCode.CRASHED)}, ExitCode.CRASHED),
]


@pytest.mark.parametrize(("event", "fields", "code"), END_EVENTS)
def test_an_attempt_that_has_ended_does_not_continue_if_only_slurm_requeued_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, fields: dict[str, object], code: ExitCode
) -> None:
    """Slurm 24.11 requeues a preempted job even if its stage is done, was stopped or has failed permanently.

    `close_attempt` takes the job ID and the number of requeues. It returns the exit code, the reason and the new
    events. The exit code is None if the stage may start.
    """
    replace_controller(monkeypatch, "24.11.5")
    run = make_run_with_open_attempt(tmp_path / "grace", (event, {**fields, "in_grace": True}))
    assert close_attempt(run, "6", 1)[::2] == (code, [])
    assert close_attempt(run, "6", 2)[0] is None, "a user must have requested the second requeue"
    replace_controller(monkeypatch, "22.05.8")
    assert close_attempt(run, "6", 1)[0] is None, "this version of Slurm does not requeue the job by itself"
    replace_controller(monkeypatch, "24.11.5")
    undisturbed_run = make_run_with_open_attempt(tmp_path / "undisturbed", (event, fields))
    assert close_attempt(undisturbed_run, "6", 1)[0] is None, "Slurm requeues only jobs that were preempted"
    preempted_run = make_run_with_open_attempt(
        tmp_path / "preempted", ("preempted", {"cause": "preempted"}), ("requeued", {"cause": "preempted"})
    )
    write_event(
        preempted_run,
        "started",
        "train",
        job_id="6",
        slurm_job="6",
        attempt=2,
        restarts=1,
        standing=read_progress_marker(preempted_run, "train"),
    )
    write_event(preempted_run, event, "train", job_id="6", **fields)
    # Slurm still treats the job as preempted, because its first start was preempted.
    assert close_attempt(preempted_run, "6", 2)[::2] == (code, [])
    if event != "done":
        write_event(preempted_run, "resumed")
        assert close_attempt(preempted_run, "6", 2)[0] is None, "a run that the user resumed must continue"


# -- on a real Slurm ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def submit_slow_run(
    folder: Path, data: Path, cluster: Cluster, steps: int, step_delay_s: float, requests_requeue: bool = False
) -> Path:
    """Submit a run with slow steps.

    Args:
        folder: folder for the config and the run.
        data: data directory of another run.
        cluster: the test cluster.
        steps: number of steps.
        step_delay_s: seconds to add to each step.
        requests_requeue: the supervisor always requests a requeue, even if Slurm would requeue the job by itself.

    Returns:
        The path of the run directory.
    """
    cluster.clear()  # removes jobs of an earlier test that failed
    config = write_config(folder, steps=steps)
    run = slow_down_steps(Run.create(load_config(config, NODES)), step_delay_s)
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    if requests_requeue:
        module = run.code_dir / "slurm/query/preemption.py"
        replace_in_file(module, "MIN_REMAINING_EXITS = 2\n", "MIN_REMAINING_EXITS = 99\n")
    result = run_submit(cluster, folder, str(config), *NODES)
    assert result.returncode == 0, result.stdout + result.stderr
    return run.path


def read_steps(run: Path) -> list[int]:
    """Return the steps in metrics.jsonl, in the order of its lines."""
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl")]


def query_accounting(cluster: Cluster, job_id: str) -> tuple[str, str]:
    """Wait until accounting has the end of a job. Return the state and the exit code of its last start."""
    command = ["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode"]
    wait_for(
        "accounting", lambda: cluster.output(command).split("|")[0] not in ("RUNNING", "PENDING", "COMPLETING"), 30
    )
    state, code = cluster.output(command).split("|")
    return state, code


@pytest.mark.parametrize(
    ("preemption_count", "requests_requeue"), [(2, False), (1, True), pytest.param(6, False, marks=pytest.mark.long)]
)
def test_a_run_starts_once_more_after_each_preemption(
    tmp_path: Path, data: Path, cluster: Cluster, preemption_count: int, requests_requeue: bool
) -> None:
    """With `requests_requeue`, Slurm 24.11 starts the job again after its end. The train stage must not run again."""
    run = submit_slow_run(tmp_path, data, cluster, 8 * preemption_count + 8, 0.5, requests_requeue)
    for number in range(preemption_count):
        wait_for(
            "some steps",
            lambda: len(read_steps(run)) >= 8 * number + 4 and list_event_names(run, "train")[-1] != "requeued",  # noqa: B023
        )
        preempt_all_nodes(cluster)
        wait_for("the requeue", lambda: list_event_names(run, "train").count("requeued") > number, 60)  # noqa: B023
        wait_for("the next start", lambda: list_event_names(run, "train").count("started") > number + 1, 120)  # noqa: B023
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    wait_for_empty_queue(cluster)
    names = list_event_names(run, "train")
    counts = [names.count(name) for name in ("started", "requeued", "done")]
    assert counts == [preemption_count + 1, preemption_count, 1], names
    assert read_steps(run) == list(range(1, 8 * preemption_count + 9))
    assert query_accounting(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


@pytest.mark.long
def test_a_run_that_exceeds_its_grace_period_starts_once_more(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    """A step takes 40 s, longer than the grace period. Slurm kills and requeues the job.

    Slurm still reports the preemption after that.
    """
    run = submit_slow_run(tmp_path, data, cluster, steps=2, step_delay_s=40.0)
    wait_for("the first step", lambda: "ready" in list_event_names(run, "train"))
    preempt_all_nodes(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 300)
    wait_for_empty_queue(cluster)
    names = [event["event"] for event in read_event_lines(Run.open(run), "train", "started", "done", "requeued")]
    assert names == ["started", "requeued", "started", "done"], names
    assert query_accounting(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


def test_a_run_that_ends_in_its_grace_period_does_not_start_again(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    run = submit_slow_run(tmp_path, data, cluster, steps=4, step_delay_s=4.0)
    wait_for("step 3 of 4", lambda: len(read_steps(run)) == 3)
    preempt_all_nodes(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    wait_for_empty_queue(cluster)
    started, done = read_event_lines(Run.open(run), "train", "started", "done", "requeued")
    assert (started["event"], done["event"]) == ("started", "done")
    assert done["in_grace"], "the stage must end in the grace period"
    assert query_accounting(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


def test_a_run_that_the_user_stops_in_its_grace_period_does_not_start_again(
    tmp_path: Path, data: Path, cluster: Cluster
) -> None:
    """The user creates the stop file after the preemption has begun."""
    run = submit_slow_run(tmp_path, data, cluster, steps=40, step_delay_s=4.0)
    wait_for("a step", lambda: read_steps(run))
    preempt_all_nodes(cluster)
    (run / "stop").touch()
    wait_for("the stop", lambda: "stopped" in list_event_names(run, "train"), 60)
    wait_for_empty_queue(cluster)
    started, stopped = read_event_lines(Run.open(run), "train", "started", "requeued", "stopped")
    assert (started["event"], stopped["event"]) == ("started", "stopped")
    assert stopped["in_grace"], "the stage must stop in the grace period"
    assert query_accounting(cluster, get_job_id(run, "train")) == ("FAILED", f"{int(ExitCode.STOPPED)}:0")
    assert not has_evaluation(run)


def test_a_requeue_by_an_administrator_is_not_a_preemption(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    """`scontrol requeue` and a preemption are distinguished in the events and in the output of `status`."""
    run = submit_slow_run(tmp_path, data, cluster, steps=60, step_delay_s=0.5)
    wait_for("step 3", lambda: len(read_steps(run)) >= 3)
    cluster.output(["scontrol", "requeue", get_job_id(run, "train")])
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    stops = read_event_lines(Run.open(run), "train", "stopped", "preempted", "failed")
    assert [event["cause"] for event in stops] == ["requeued"], stops
    status = run_submit(cluster, tmp_path, "status", str(run)).stdout
    assert re.search(r"^train .*requeued at step \d+ \(1 attempt\)$", status, re.M), status
    wait_for("the next start", lambda: list_event_names(run, "train").count("started") == 2, 120)
    preempt_all_nodes(cluster)
    wait_for("the preemption", lambda: "preempted" in list_event_names(run, "train"), 60)
    status = run_submit(cluster, tmp_path, "status", str(run)).stdout
    assert re.search(r"^train .*preemption .*\(2 attempts\)$", status, re.M), status
    cluster.clear()
