"""Test a run with pipeline, tensor and data parallelism that is preempted and later continues with another layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import count_steps, list_event_names, preempt_all_nodes, run_submit, wait_for
from tests.support.edits import replace_in_file
from tests.support.events import read_event_lines
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, slow_down_steps, write_config
from tests.support.tiny_training import resave_on_rank

cluster = cluster_fixture(grace=5)

STEPS = 24
LAYOUT = (
    "stages.train.nodes=4", "stages.train.tasks_per_node=2", "parallel.pipeline=2", "parallel.tensor=2",
    "train.micro_batch=2", "model.dropout=0.0", "optimizer.lr=0.001",
)  # fmt: skip
ONE_RANK = (
    *LAYOUT, "stages.train.nodes=1", "stages.train.tasks_per_node=1", "parallel.pipeline=1", "parallel.tensor=1",
)  # fmt: skip


@pytest.mark.timeout(900)
def test_a_run_resumes_with_another_layout_on_the_cluster(tmp_path: Path, cluster: Cluster) -> None:
    """The run starts with 2 pipeline × 2 data × 2 tensor parallel ranks, and continues with 1 × 4 × 2.

    Losses and gradient norms must be close to those of one rank. A copy of the run, restored with the new layout and
    saved again, must have the same digest.
    """
    (tmp_path / "reference").mkdir()
    write_config(tmp_path / "reference", steps=STEPS)
    reference = Run(tmp_path / "reference/runs/tiny")
    result = run_submit(None, tmp_path / "reference", "tiny.yaml", *ONE_RANK, "--executor", "local")
    assert result.returncode == 0, result.stdout + result.stderr

    config = write_config(tmp_path, steps=STEPS)
    replace_in_file(config, str(tmp_path / "corpus.jsonl"), str(tmp_path / "reference/corpus.jsonl"))
    run = Run.create(load_config(config, LAYOUT))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(reference.data_dir)
    slow_down_steps(run)
    assert run_submit(cluster, tmp_path, str(config), *LAYOUT).returncode == 0
    wait_for("step 5", lambda: count_steps(run.path) >= 5)
    preempt_all_nodes(cluster)
    wait_for("the requeue", lambda: list_event_names(run.path, "train").count("started") == 2)
    wait_for("step 12", lambda: count_steps(run.path) >= 12)
    run.stop_file.touch()
    wait_for("the stop", lambda: "stopped" in list_event_names(run.path, "train"))
    saved_digest = compute_run_digest(Run(tmp_path / "runs/tiny"))
    copy_path = tmp_path / "copy"
    shutil.copytree(run.path, copy_path, symlinks=True)
    Run.open(copy_path).apply_overrides(["parallel.pipeline=1"])
    checkpoints = tmp_path / "resaved"
    checkpoints.mkdir()
    (resaved_digest,) = set(run_ranks(8, resave_on_rank, copy_path, checkpoints))
    assert resaved_digest == saved_digest
    result = run_submit(cluster, tmp_path, "resume", "runs/tiny", "parallel.pipeline=1")
    assert result.returncode == 0, result.stdout + result.stderr
    wait_for("the restore", lambda: list_event_names(run.path, "train").count("restored") == 2)
    wait_for("the evaluation", lambda: "done" in list_event_names(run.path, "evaluate"), 150)
    assert [event["ranks"] for event in read_event_lines(Run.open(run.path), "train", "started")] == [8, 8, 8]
    lines = list(read_jsonl(run.metrics_file))
    reference_lines = list(read_jsonl(reference.metrics_file))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in reference_lines], rel=1e-4)
