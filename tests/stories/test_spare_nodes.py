"""Test on a real Slurm how a job continues after one of its nodes has failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import (
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    run_submit,
    wait_for,
    wait_for_empty_queue,
    write_config_with_copied_data,
)
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes
from tests.support.tiny import compute_run_digest, write_config

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(600)

OVERRIDES = ("stages.train.tasks_per_node=2", "checkpoint.every_steps=4", "recovery.hang_s=20")
WITH_SPARE = (*OVERRIDES, "stages.train.nodes={min: 2, max: 2, spares: 1}")


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a chain without interruptions and without agents. Return the folder with the completed run `runs/tiny`."""
    folder = tmp_path_factory.mktemp("reference")
    write_config(folder, steps=40)
    result = run_submit(cluster, folder, "tiny.yaml", *OVERRIDES, "stages.train.nodes=2", "recovery.in_place=false")
    assert result.returncode == 0, result.stdout + result.stderr
    wait_for("the evaluation", lambda: has_evaluation(folder / "runs/tiny"))
    wait_for_empty_queue(cluster)
    return folder


def start_run(cluster: Cluster, folder: Path, reference: Path, name: str, overrides: tuple[str, ...]) -> Run:
    """Submit a slow run and wait for its first save."""
    config = write_config_with_copied_data(folder, reference, name)
    run = Run(create_slow_run(folder, config, overrides))
    assert run_submit(cluster, folder, str(config), *overrides).returncode == 0
    wait_for("a save", lambda: "saved" in list_event_names(run.path, "train"))
    return run


def list_ranks_by_host(run: Run) -> list[dict[str, list[int]]]:
    """Return the ranks on each host, for each time that agents forked ranks."""
    return [
        {host: sorted(map(int, pids)) for host, pids in event["processes"].items()}
        for event in read_event_lines(run, "train", "ranks_started")
    ]


def check_result(run: Run, reference: Path, cluster: Cluster) -> None:
    """Wait for the end of a run. It must be equal to the undisturbed run."""
    wait_for("the evaluation", lambda: has_evaluation(run.path))
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, 41))
    assert compute_run_digest(run) == compute_run_digest(Run(reference / "runs/tiny"))
    wait_for_empty_queue(cluster)
    assert not find_rank_processes(run.path)


@pytest.mark.parametrize("memory_copies", [None, 1, 2])
def test_a_spare_node_replaces_a_node_that_crashes(
    tmp_path: Path, reference: Path, cluster: Cluster, memory_copies: int | None
) -> None:
    """Without copies of the snapshots on another node, the ranks load the newest checkpoint."""
    overrides: tuple[str, ...] = WITH_SPARE
    if memory_copies is not None:
        overrides += ("checkpoint.memory_every_steps=1", f"checkpoint.memory_copies={memory_copies}")
    run = start_run(cluster, tmp_path, reference, "crashed", overrides)
    job_id = get_job_id(run.path, "train")
    (started,) = read_event_lines(run, "train", "ranks_started")
    assert list_ranks_by_host(run) == [{"n1": [0, 1], "n2": [2, 3]}] and started["spares"] == ["n3"]
    assert "n3" in run_submit(cluster, tmp_path, "status", str(run.path)).stdout
    cluster.crash("n2")
    try:
        wait_for("a restart", lambda: len(list_ranks_by_host(run)) == 2)
        screen = run_submit(cluster, tmp_path, "status", str(run.path)).stdout
        assert "n2" in screen and "n3" in screen
        check_result(run, reference, cluster)
    finally:
        cluster.boot("n2")
    assert list_ranks_by_host(run)[1] == {"n1": [0, 1], "n3": [2, 3]}
    (retried,) = read_event_lines(run, "train", "retried")
    assert retried["cause"] == "node_failure"
    assert "requeued" not in list_event_names(run.path, "train")
    assert {event["slurm_job"] for event in read_event_lines(run, "train", "started")} == {job_id}
    (restored,) = read_event_lines(run, "train", "restored")
    assert (restored.get("source") == "memory") == (memory_copies == 2)
    cluster.wait_idle()


def test_a_spare_node_replaces_a_bad_node(tmp_path: Path, reference: Path, cluster: Cluster) -> None:
    """Each rank on n1 fails with an input/output error. The supervisor remains on n1."""
    config = write_config_with_copied_data(tmp_path, reference, "bad")
    run = Run(create_slow_run(tmp_path, config, WITH_SPARE))
    replace_in_file(
        run.code_dir / "pipeline/train/trainer.py",
        "        time.sleep(0.5)",
        "        time.sleep(0.5)\n        if step == 6 and os.uname().nodename == 'n1': raise OSError(5, 'broken')",
    )
    assert run_submit(cluster, tmp_path, str(config), *WITH_SPARE).returncode == 0
    check_result(run, reference, cluster)
    assert list_ranks_by_host(run) == [{"n1": [0, 1], "n2": [2, 3]}, {"n3": [0, 1], "n2": [2, 3]}]
    assert [event["cause"] for event in read_event_lines(run, "train", "retried")] == ["bad_node"]
    assert "requeued" not in list_event_names(run.path, "train")


def test_an_elastic_run_without_a_spare_continues_on_fewer_nodes(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    overrides = (*OVERRIDES, "stages.train.nodes={min: 1, max: 2}", "model.dropout=0.0")
    run = start_run(cluster, tmp_path, reference, "elastic", overrides)
    cluster.crash("n2")
    try:
        wait_for("the evaluation", lambda: has_evaluation(run.path))
        wait_for_empty_queue(cluster)
    finally:
        cluster.boot("n2")
    assert list_ranks_by_host(run) == [{"n1": [0, 1], "n2": [2, 3]}, {"n1": [0, 1]}]
    assert "requeued" not in list_event_names(run.path, "train")
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, 41))
    cluster.wait_idle()


def test_agents_requeue_the_job_if_the_node_of_the_supervisor_crashes(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    """With --no-kill, Slurm keeps the job, although its batch script has died with its node."""
    run = start_run(cluster, tmp_path, reference, "headless", WITH_SPARE)
    job_id = get_job_id(run.path, "train")
    cluster.crash("n1")
    try:
        wait_for("a second start", lambda: list_event_names(run.path, "train").count("started") == 2)
        check_result(run, reference, cluster)
    finally:
        cluster.boot("n1")
    assert {event["slurm_job"] for event in read_event_lines(run, "train", "started")} == {job_id}
    assert "n1" not in list_ranks_by_host(run)[1]
    cluster.wait_idle()
