"""`plan --measure` on a real Slurm: a job of two nodes times the links inside them and between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from planning.machine import load_machine
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.stories.test_slurm import submit, wait_for
from tests.support.tiny import write_config

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(600)


def test_a_job_times_its_nodes(tmp_path: Path, cluster: Cluster) -> None:
    write_config(tmp_path)
    file, words = tmp_path / "own.yaml", ("stages.train.nodes=2", "stages.train.tasks_per_node=2")
    done = submit(cluster, tmp_path, "plan", "tiny.yaml", "--measure", str(file), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measure   job " in done.stdout and f"--machine {file}" in done.stdout
    wait_for("the machine file", file.exists)
    machine = load_machine(str(file))
    assert machine.gpus_per_node == 2 and machine.timings is not None
    assert {(one.ranks, one.between) for one in machine.timings.exchanges} == {(2, False), (2, True)}
    told = submit(cluster, tmp_path, "plan", "tiny.yaml", f"--machine={file}", "stages.train.nodes=4").stdout
    assert "predicted for CPU" in told
    again = submit(cluster, tmp_path, "plan", "tiny.yaml", "--measure", str(file), *words)
    assert again.returncode == 2 and "name a file that does not exist yet" in again.stderr
