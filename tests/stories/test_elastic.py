"""Test a run that uses another number of nodes in each attempt. It must train the same batches in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.parallel.mesh import count_usable_nodes
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import count_steps, list_event_names, run_submit, wait_for
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.tiny import slow_down_steps, write_config

cluster = cluster_fixture(grace=5)

ELASTIC = (
    "stages.train.nodes={min: 2, max: 4}", "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1",
    "model.dropout=0.0",
)  # fmt: skip


@pytest.mark.parametrize(("granted_nodes", "used_nodes"), [(1, 2), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_the_largest_usable_number_of_nodes_is_used(tmp_path: Path, granted_nodes: int, used_nodes: int) -> None:
    """Three nodes are not usable, because the global batch of eight samples is not divisible by three ranks.

    If fewer nodes are granted than the config allows, the result is the minimum in the config.
    """
    assert count_usable_nodes(load_config(write_config(tmp_path), ELASTIC), granted_nodes) == used_nodes


def preempt(cluster: Cluster, nodes: int) -> None:
    """Submit a job of higher priority that needs `nodes` nodes for two seconds."""
    command = ["sbatch", "--parsable", "-phigh", f"-N{nodes}", "-c4", "-o", "/dev/null", "--wrap", "sleep 2"]
    cluster.output(command, timeout=60)


@pytest.mark.timeout(900)
def test_a_run_shrinks_and_grows_with_the_available_nodes(tmp_path: Path, cluster: Cluster) -> None:
    """The attempts use four, two and four nodes. Their steps must be those of an undisturbed run on this machine."""
    (tmp_path / "reference").mkdir()
    write_config(tmp_path / "reference", steps=40)
    reference = Run(tmp_path / "reference/runs/tiny")
    result = run_submit(None, tmp_path / "reference", "tiny.yaml", *ELASTIC, "--executor", "local")
    assert result.returncode == 0, result.stdout + result.stderr

    config = write_config(tmp_path, steps=40)
    replace_in_file(config, str(tmp_path / "corpus.jsonl"), str(tmp_path / "reference/corpus.jsonl"))
    run = Run.create(load_config(config, ELASTIC))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(reference.data_dir)
    slow_down_steps(run)
    result = run_submit(cluster, tmp_path, str(tmp_path / "tiny.yaml"), *ELASTIC)
    assert result.returncode == 0, result.stdout + result.stderr
    wait_for("step 5", lambda: count_steps(run.path) >= 5)
    cluster.drain("n3")  # three nodes remain, of which the next attempt can use two
    preempt(cluster, 3)
    wait_for("the second start", lambda: list_event_names(run.path, "train").count("started") == 2)
    wait_for("step 14", lambda: count_steps(run.path) >= 14)
    cluster.undrain("n3")
    preempt(cluster, 4)
    wait_for("the evaluation", lambda: "done" in list_event_names(run.path, "evaluate"), 150)
    assert [event["ranks"] for event in read_event_lines(Run.open(run.path), "train", "started")] == [4, 2, 4]
    lines = list(read_jsonl(run.metrics_file))
    reference_lines = list(read_jsonl(reference.metrics_file))
    assert [(line["step"], line["samples_consumed"]) for line in lines] == [
        (line["step"], line["samples_consumed"]) for line in reference_lines
    ]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in reference_lines], rel=1e-4)
