"""Test planning.calibrate in an allocation of a real Slurm. Two nodes measure the links inside and between nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from planning.machine import load_machine
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import run_submit
from tests.support.tiny import write_config

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(600)


def test_calibrate_measures_the_nodes_of_its_allocation(tmp_path: Path, cluster: Cluster) -> None:
    config = write_config(tmp_path)
    file = tmp_path / "machine.yaml"
    overrides = ("stages.train.nodes=2", "stages.train.tasks_per_node=2")
    command = [sys.executable, "-m", "planning.calibrate", str(config), "--out", str(file), *overrides]
    result = cluster.run(["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *command], timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    machine = load_machine(str(file))
    assert machine.gpus_per_node == 2 and machine.timings is not None
    # two ranks each time: of one node (False), and of different nodes (True)
    assert {(exchange.ranks, exchange.between) for exchange in machine.timings.exchanges} == {(2, False), (2, True)}
    plan = run_submit(cluster, tmp_path, "plan", "tiny.yaml", f"--machine={file}", "stages.train.nodes=4")
    assert plan.returncode == 0 and "CPU" in plan.stdout, plan.stdout + plan.stderr
