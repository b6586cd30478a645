"""Three dimensions on four nodes: preempted, requeued, stopped, and resumed under another layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import list_event_names, run_submit, wait_for
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, slow_down_steps, write_config
from tests.support.tiny_training import resave_rank

cluster = cluster_fixture(grace=5)

STEPS = 24
LAYOUT = (
    "stages.train.nodes=4", "stages.train.tasks_per_node=2", "parallel.pipeline=2", "parallel.tensor=2",
    "train.micro_batch=2", "model.dropout=0.0", "optimizer.lr=0.001",
)  # fmt: skip
ALONE = (*LAYOUT, "stages.train.nodes=1", "stages.train.tasks_per_node=1", "parallel.pipeline=1", "parallel.tensor=1")


@pytest.mark.timeout(900)
def test_two_by_two_by_two_goes_on_as_one_by_four_by_two(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "calm").mkdir()
    write_config(tmp_path / "calm", steps=STEPS)
    calm = Run(tmp_path / "calm/runs/tiny")
    done = run_submit(None, tmp_path / "calm", "tiny.yaml", *ALONE, "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr

    config = write_config(tmp_path, steps=STEPS)
    config.write_text(config.read_text().replace(str(tmp_path / "corpus.jsonl"), str(tmp_path / "calm/corpus.jsonl")))
    run = Run.create(load_config(config, LAYOUT))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(calm.data_dir)
    slow_down_steps(run)

    def reached(step: int) -> bool:
        return len(list(read_jsonl(run.metrics_file))) >= step

    assert run_submit(cluster, tmp_path, str(config), *LAYOUT).returncode == 0
    wait_for("step 5", lambda: reached(5))
    high = ["sbatch", "--parsable", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"]
    cluster.output(high, timeout=60)
    wait_for("the requeue", lambda: list_event_names(run.path, "train").count("started") == 2)
    wait_for("step 12", lambda: reached(12))
    run.stop_file.touch()
    wait_for("the stop", lambda: "stopped" in list_event_names(run.path, "train"))
    before = compute_run_digest(Run(tmp_path / "runs/tiny"))
    moved, again = tmp_path / "moved", tmp_path / "again"
    shutil.copytree(run.path, moved, symlinks=True)
    again.mkdir()
    Run.open(moved).apply_overrides(["parallel.pipeline=1"])
    (found,) = set(run_ranks(8, resave_rank, moved, again))  # loaded under the new layout, and saved again
    assert found == before
    resumed = run_submit(cluster, tmp_path, "resume", "runs/tiny", "parallel.pipeline=1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    wait_for("the restore", lambda: list_event_names(run.path, "train").count("restored") == 2)
    wait_for("the evaluation", lambda: "done" in list_event_names(run.path, "evaluate"), 150)
    told = Run.open(run.path).read_events("train")
    assert [e["ranks"] for e in told if e["event"] == "started"] == [8, 8, 8]
    lines, undisturbed = list(read_jsonl(run.metrics_file)), list(read_jsonl(calm.metrics_file))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in undisturbed], rel=1e-4)
