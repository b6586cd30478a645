"""Tests of successor jobs on a test cluster that does not requeue jobs (`site.requeue: false`)."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from pipeline.base.files import read_jsonl, try_flock
from pipeline.run.directory import Run, list_points
from slurm.query.current_job import record_bad_node
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import (
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
)
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.tiny import compute_run_digest, write_config

cluster = cluster_fixture(grace=5, preempt="CANCEL")

pytestmark = pytest.mark.timeout(900)

WITHOUT_REQUEUE = ("site.requeue=false", "stages.train.nodes=2", "stages.train.tasks_per_node=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an undisturbed run on this machine and return the folder with its config and its `runs`.

    It has the same layout as the runs of the tests, which use its data.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    write_config(folder, steps=40)
    result = run_submit(None, folder, "tiny.yaml", "--executor", "local")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def create_run_with_shared_data(folder: Path, undisturbed: Path, overrides: Sequence[str] = WITHOUT_REQUEUE) -> Path:
    """Create a run whose data directory is a link to that of the undisturbed run. Return its run directory."""
    config = write_config(folder, steps=40)
    replace_in_file(config, str(folder / "corpus.jsonl"), str(undisturbed / "corpus.jsonl"))
    (folder / "runs/tiny").mkdir(parents=True)
    (folder / "runs/tiny/data").symlink_to(undisturbed / "runs/tiny/data")
    return create_slow_run(folder, config, overrides)


def query_queue(cluster: Cluster, *options: str) -> str:
    """Return the output of squeue without its header: "" if there is no job."""
    return cluster.run(["squeue", "-h", *options], timeout=60).stdout.strip()


def count_steps(run: Path) -> int:
    """Return the number of steps in metrics.jsonl."""
    return len(list(read_jsonl(run / "metrics.jsonl")))


def test_successor_takes_over_from_a_preempted_job(tmp_path: Path, undisturbed: Path, cluster: Cluster) -> None:
    """With preempt=CANCEL, Slurm cancels preempted jobs. The result must equal that of an undisturbed run."""
    run = create_run_with_shared_data(tmp_path, undisturbed)
    result = run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE)
    assert result.returncode == 0 and "continues if 1 does not succeed" in result.stdout, result.stdout + result.stderr
    first_job = read_event_lines(Run.open(run), "train", "submitted")[0]["job_id"]
    wait_for("step 8", lambda: count_steps(run) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the successor", lambda: "took_over" in list_event_names(run, "train"), 90)
    assert "preempted" in list_event_names(run, "train") and "handed_over" in list_event_names(run, "train")
    wait_for("the evaluation", lambda: has_evaluation(run), 120)
    wait_for("an empty queue", lambda: not query_queue(cluster))
    submissions = read_event_lines(Run.open(run), "train", "submitted")
    assert submissions[0]["job_id"] == first_job
    assert len(submissions) == 3, "expected the first job, its successor, and the successor of the successor"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == compute_run_digest(Run(undisturbed / "runs/tiny"))


def test_successor_waits_for_a_lock_that_is_released_late(tmp_path: Path, undisturbed: Path, cluster: Cluster) -> None:
    """The test holds the lock for 75 s, as if a rank of the first job hung in the kernel.

    A job that is not a successor would wait only 60 s for the lock.
    """
    run = create_run_with_shared_data(tmp_path, undisturbed)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    wait_for("step 8", lambda: count_steps(run) >= 8)
    preempt_all_nodes(cluster)
    with open(run / "jobs/train/lock", "r+b") as lock:
        wait_for("the end of the first job", lambda: try_flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB), 60)
        wait_for("the successor", lambda: get_job_id(run, "train") in query_queue(cluster, "-tR"), 90)
        time.sleep(75)
        assert list_event_names(run, "train").count("started") == 1
        assert get_job_id(run, "evaluate") in query_queue(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 120)
    wait_for("an empty queue", lambda: not query_queue(cluster))
    events = list_event_names(run, "train")
    assert events.count("started") == 2 and events.count("took_over") == 1


def test_preempted_sweep_points_get_successors(tmp_path: Path, undisturbed: Path, cluster: Cluster) -> None:
    sweep = ("sweep={grid: {optimizer.lr: [0.001, 0.01]}}", "site.requeue=false", "train.steps=24")
    overrides = (*sweep, "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1")
    run = create_run_with_shared_data(tmp_path, undisturbed, overrides)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *overrides).returncode == 0
    points = list_points(Run.open(run))
    wait_for("step 8 of both points", lambda: all(count_steps(point.path) >= 8 for point in points))
    preempt_all_nodes(cluster)
    wait_for("both evaluations", lambda: all(has_evaluation(point.path) for point in points), 150)
    wait_for("an empty queue", lambda: not query_queue(cluster))
    for point in points:
        events = list_event_names(point.path, "train")
        assert events.count("handed_over") == events.count("took_over") == 1 and events.count("started") == 2
        assert [line["step"] for line in read_jsonl(point.metrics_file)] == list(range(1, 25))


def test_successor_of_a_cancelled_job_is_cancelled(tmp_path: Path, undisturbed: Path, cluster: Cluster) -> None:
    """Also, all jobs of the run exclude a bad node."""
    run = create_run_with_shared_data(tmp_path, undisturbed)
    record_bad_node(Run.open(run), "n1", "device memory")
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    first_job, successor = (event["job_id"] for event in read_event_lines(Run.open(run), "train", "submitted")[:2])
    for job_id in (first_job, successor, get_job_id(run, "evaluate")):
        assert "ExcNodeList=n1\n" in cluster.output(["scontrol", "show", "job", job_id], timeout=60)
    wait_for("step 5", lambda: count_steps(run) >= 5)
    cluster.output(["scancel", first_job], timeout=60)
    wait_for("an empty queue", lambda: not query_queue(cluster), 90)
    assert "took_over" not in list_event_names(run, "train") and not has_evaluation(run)
    assert list_event_names(run, "train").count("started") == 1


def test_no_successor_continues_after_a_killed_supervisor_without_progress(
    tmp_path: Path, undisturbed: Path, cluster: Cluster
) -> None:
    """The supervisor is killed before the first checkpoint. The successor ends the stage and starts no ranks."""
    run = create_run_with_shared_data(tmp_path, undisturbed)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    wait_for("the start", lambda: "started" in list_event_names(run, "train"))
    # The PID in the event belongs to the PID namespace of the node, so the test finds the process by its command line.
    arguments = ["-m", "slurm", "train", str(run)]
    processes = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-4:] == arguments]
    # A child that has not started its program yet has the same command line as the supervisor.
    (supervisor,) = (process for process in processes if process.parent() not in processes)
    supervisor.kill()
    wait_for("an empty queue", lambda: not query_queue(cluster), 90)
    events = read_event_lines(Run.open(run), "train")
    assert (events[-1]["event"], events[-1]["cause"]) == ("failed", "crashed"), events
    assert list_event_names(run, "train").count("started") == 1, events
    assert "nothing new" in events[-1]["message"] and not has_evaluation(run)
