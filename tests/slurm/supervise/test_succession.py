"""Where Slurm puts nothing back into the queue: successors take over, and nothing is left pending for ever."""

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
from tests.support.events import read_event_lines
from tests.support.tiny import compute_run_digest, write_config

cluster = cluster_fixture(grace=5, preempt="CANCEL")

pytestmark = pytest.mark.timeout(900)

WITHOUT_REQUEUE = ("site.requeue=false", "stages.train.nodes=2", "stages.train.tasks_per_node=1")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, of the same layout, on this machine; its data serve the others."""
    folder = tmp_path_factory.mktemp("calm")
    write_config(folder, steps=40)
    done = run_submit(None, folder, "tiny.yaml", "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def shared(folder: Path, calm: Path, overrides: Sequence[str] = WITHOUT_REQUEUE) -> Path:
    config = write_config(folder, steps=40)
    config.write_text(config.read_text().replace(str(folder / "corpus.jsonl"), str(calm / "corpus.jsonl")))
    (folder / "runs/tiny").mkdir(parents=True)
    (folder / "runs/tiny/data").symlink_to(calm / "runs/tiny/data")
    return create_slow_run(folder, config, overrides)


def queue(cluster: Cluster, *options: str) -> str:
    return cluster.run(["squeue", "-h", *options], timeout=60).stdout.strip()


def test_a_successor_takes_over_from_a_preempted_job(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    run = shared(tmp_path, calm)
    done = run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE)
    assert done.returncode == 0 and "takes over" in done.stdout, done.stdout + done.stderr
    first = read_event_lines(Run.open(run), "train", "submitted")[0]["job_id"]
    wait_for("step 8", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 8)
    preempt_all_nodes(cluster)
    wait_for("the successor", lambda: "took_over" in list_event_names(run, "train"), 90)
    assert "preempted" in list_event_names(run, "train") and "handed_over" in list_event_names(run, "train")
    wait_for("the evaluation", lambda: has_evaluation(run), 120)
    wait_for("an empty queue: neither the evaluation nor the last successor waits in vain", lambda: not queue(cluster))
    heirs = [e for e in read_event_lines(Run.open(run), "train") if e["event"] == "submitted"]
    assert heirs[0]["job_id"] == first and len(heirs) == 3, "the job, its successor, the successor's own"
    assert [line["step"] for line in read_jsonl(run / "metrics.jsonl")] == list(range(1, 41))
    assert compute_run_digest(Run(tmp_path / "runs/tiny")) == compute_run_digest(Run(calm / "runs/tiny"))


def test_a_successor_waits_for_a_lock_that_goes_late(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    """As of a process that hangs in the kernel: for longer than a job waits for one that is none of its own."""
    run = shared(tmp_path, calm)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    wait_for("step 8", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 8)
    preempt_all_nodes(cluster)
    with open(run / "jobs/train/lock", "r+b") as lock:
        wait_for("the first job's end", lambda: try_flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB), 60)
        wait_for("the successor", lambda: get_job_id(run, "train") in queue(cluster, "-tR"), 90)
        time.sleep(75)
        assert list_event_names(run, "train").count("started") == 1 and get_job_id(run, "evaluate") in queue(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 120)
    wait_for("an empty queue", lambda: not queue(cluster))
    assert (
        list_event_names(run, "train").count("started") == 2 and list_event_names(run, "train").count("took_over") == 1
    )


def test_a_preempted_point_of_a_sweep_gets_a_successor(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    sweep = ("sweep={grid: {optimizer.lr: [0.001, 0.01]}}", "site.requeue=false", "train.steps=24")
    overrides = (*sweep, "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1")
    run = shared(tmp_path, calm, overrides)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *overrides).returncode == 0
    both = list_points(Run.open(run))
    wait_for("step 8 of both", lambda: all(len(list(read_jsonl(point.metrics_file))) >= 8 for point in both))
    preempt_all_nodes(cluster)
    wait_for("their evaluations", lambda: all(has_evaluation(point.path) for point in both), 150)
    wait_for("an empty queue", lambda: not queue(cluster))
    for point in both:
        told = list_event_names(point.path, "train")
        assert told.count("handed_over") == told.count("took_over") == 1 and told.count("started") == 2
        assert [line["step"] for line in read_jsonl(point.metrics_file)] == list(range(1, 25))


def test_a_cancelled_job_has_no_successor(tmp_path: Path, calm: Path, cluster: Cluster) -> None:
    run = shared(tmp_path, calm)
    record_bad_node(Run.open(run), "n1", "device memory")
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    first, heir = (e["job_id"] for e in read_event_lines(Run.open(run), "train", "submitted")[:2])
    for job in (first, heir, get_job_id(run, "evaluate")):
        assert "ExcNodeList=n1\n" in cluster.output(["scontrol", "show", "job", job], timeout=60)
    wait_for("step 5", lambda: len(list(read_jsonl(run / "metrics.jsonl"))) >= 5)
    cluster.output(["scancel", first], timeout=60)
    wait_for("an empty queue", lambda: not queue(cluster), 90)
    assert "took_over" not in list_event_names(run, "train") and not has_evaluation(run)
    assert list_event_names(run, "train").count("started") == 1
    assert get_job_id(run, "evaluate")


def test_a_supervisor_that_dies_without_progress_has_no_endless_line_of_successors(
    tmp_path: Path, calm: Path, cluster: Cluster
) -> None:
    run = shared(tmp_path, calm)
    assert run_submit(cluster, tmp_path, "tiny.yaml", *WITHOUT_REQUEUE).returncode == 0
    wait_for("the start", lambda: "started" in list_event_names(run, "train"))
    words = ["-m", "slurm", "train", str(run)]
    supervisors = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-4:] == words]
    assert len(supervisors) == 1
    supervisors[0].kill()  # not by the pid in the event: that is its node's
    wait_for("an empty queue", lambda: not queue(cluster), 90)
    told = [(e["event"], e.get("cause")) for e in read_event_lines(Run.open(run), "train")]
    assert told[-1] == ("failed", "crashed") and list_event_names(run, "train").count("started") == 1, told
    assert "no new checkpoint" in read_event_lines(Run.open(run), "train")[-1]["message"] and not has_evaluation(run)
