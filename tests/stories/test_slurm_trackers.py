"""Test the curves in TensorBoard, W&B and MLflow of a sweep that is preempted and continues with fewer nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run, list_points
from tests.cluster import Cluster
from tests.cluster.config import NODES
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import count_steps, list_event_names, run_submit, wait_for
from tests.support.events import read_event_lines
from tests.support.servers import mlflow_server
from tests.support.tiny import make_run, slow_down_steps, write_config
from tests.tracking.test_followers import read_tensorboard_curve, round_to_float32
from tests.tracking.test_track_stories import find_mlflow_run, read_mlflow_curve, read_wandb_curve

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(900)

STEPS = 20


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[str]:
    """Start an MLflow server and yield its URI."""
    (tmp_path / "mlflow").mkdir()
    with mlflow_server(tmp_path / "mlflow") as uri:
        yield uri


@pytest.mark.long
def test_each_point_of_a_preempted_sweep_is_one_curve(tmp_path: Path, cluster: Cluster, mlflow: str) -> None:
    """The first of four points runs on two nodes. One of them is drained, as are the nodes that the run does not use.

    Then the point is preempted. It continues on the only node that is not drained.

    The curve of each point must have each step once, with the losses in metrics.jsonl.
    """
    overrides = [
        f"track={{tensorboard: true, wandb: {{project: p}}, mlflow: {{uri: '{mlflow}', experiment: four}}}}",
        "sweep={grid: {optimizer.lr: [0.001, 0.002], run.seed: [4, 5]}, at_most: 1}",
        "stages.train.nodes={min: 1, max: 2}",
        "stages.train.tasks_per_node=1",
    ]
    (tmp_path / "data").mkdir()
    prepared_data = make_run(tmp_path / "data").data_dir
    run = Run.create(load_config(write_config(tmp_path, steps=STEPS), overrides))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(prepared_data)
    slow_down_steps(run, 0.4)
    result = run_submit(cluster, tmp_path, str(tmp_path / "tiny.yaml"), *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    points = list_points(run)
    first_point = points[0]
    wait_for("step 4", lambda: count_steps(first_point.path) >= 4)
    host = read_event_lines(first_point, "train", "started")[0]["host"]
    for node in {*NODES} - {host}:
        cluster.drain(node)
    cluster.output(["sbatch", "-phigh", f"-w{host}", "-n1", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"])
    wait_for("the next start", lambda: list_event_names(first_point.path, "train").count("started") == 2)
    for node in {*NODES} - {host}:
        cluster.undrain(node)
    wait_for("all evaluations", lambda: all("done" in list_event_names(point.path, "evaluate") for point in points))
    assert "preempted" in list_event_names(first_point.path, "train")
    assert [event["ranks"] for event in read_event_lines(first_point, "train", "started")] == [2, 1]
    # At the end of a job, the trackers have only ten seconds to send data. `track` sends the remaining data.
    result = run_submit(cluster, tmp_path, "track", "runs/tiny")
    assert result.returncode == 0, result.stdout + result.stderr
    for point in points:
        losses = [(line["step"], line["loss"]) for line in read_jsonl(point.metrics_file)]
        assert [step for step, _ in losses] == [*range(1, STEPS + 1)]
        assert read_tensorboard_curve(point.path, "train/loss") == round_to_float32(losses)
        assert read_wandb_curve(point) == read_mlflow_curve(mlflow, point) == losses
        assert find_mlflow_run(mlflow, point)[1].data.tags["sluice.sweep"] == "tiny"
