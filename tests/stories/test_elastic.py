"""A training whose number of nodes changes with each start of its job: same batches in the same order."""

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
from tests.support.events import read_event_lines
from tests.support.tiny import slow_down_steps, write_config

cluster = cluster_fixture(grace=5)

ELASTIC = (
    "stages.train.nodes={min: 2, max: 4}", "stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1",
    "model.dropout=0.0",
)  # fmt: skip


@pytest.mark.parametrize(("granted", "used"), [(1, 2), (2, 2), (3, 2), (4, 4), (9, 4)])
def test_the_largest_usable_number_of_nodes_is_used(tmp_path: Path, granted: int, used: int) -> None:
    """Three ranks are not usable, because eight sequences per step are not divisible by three."""
    assert count_usable_nodes(load_config(write_config(tmp_path), ELASTIC), granted) == used


def preempt(cluster: Cluster, nodes: int) -> None:
    """Submit a job of higher priority that needs `nodes` nodes."""
    command = ["sbatch", "--parsable", "-phigh", f"-N{nodes}", "-c4", "-o", "/dev/null", "--wrap", "sleep 2"]
    cluster.output(command, timeout=60)


@pytest.mark.timeout(900)
def test_a_training_shrinks_and_grows_with_the_available_nodes(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "calm").mkdir()
    write_config(tmp_path / "calm", steps=40)
    calm = Run(tmp_path / "calm/runs/tiny")
    done = run_submit(None, tmp_path / "calm", "tiny.yaml", *ELASTIC, "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr

    config = write_config(tmp_path, steps=40)
    config.write_text(config.read_text().replace(str(tmp_path / "corpus.jsonl"), str(tmp_path / "calm/corpus.jsonl")))
    run = Run.create(load_config(config, ELASTIC))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(calm.data_dir)
    slow_down_steps(run)
    done = run_submit(cluster, tmp_path, str(tmp_path / "tiny.yaml"), *ELASTIC)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for("step 5", lambda: count_steps(run.path) >= 5)
    cluster.drain("n3")
    preempt(cluster, 3)
    wait_for("the second start", lambda: list_event_names(run.path, "train").count("started") == 2)
    wait_for("step 14", lambda: count_steps(run.path) >= 14)
    cluster.undrain("n3")
    preempt(cluster, 4)
    wait_for("the evaluation", lambda: "done" in list_event_names(run.path, "evaluate"), 150)
    assert [event["ranks"] for event in read_event_lines(Run.open(run.path), "train", "started")] == [4, 2, 4]
    lines = list(read_jsonl(run.metrics_file))
    undisturbed = list(read_jsonl(calm.metrics_file))
    assert [(line["step"], line["samples_consumed"]) for line in lines] == [
        (line["step"], line["samples_consumed"]) for line in undisturbed
    ]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in undisturbed], rel=1e-4)
