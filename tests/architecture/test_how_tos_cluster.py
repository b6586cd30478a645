"""Tests that a stage added by its how-to runs on a real Slurm, in the chain of a run and of a sweep."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.test_how_tos import apply_how_to, read_token_count
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.tiny import write_config

cluster = cluster_fixture()

pytestmark = pytest.mark.timeout(900)

SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01]}}"
SHORT_RUN = ("train.steps=4", "stages.train.tasks_per_node=1")


def test_a_new_stage_runs_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    code = apply_how_to("Add a stage", tmp_path / "code")
    folder = tmp_path / "work"
    folder.mkdir()
    write_config(folder)

    def run_submit(*arguments: str) -> str:
        """Run submit.py of the copy on the cluster, and return its output."""
        environment = {**os.environ, **cluster.environment(), "PYTHONPATH": str(code), "COLUMNS": "200"}
        command = [sys.executable, str(code / "submit.py"), *arguments]
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    chain_output = run_submit("tiny.yaml", *SHORT_RUN)
    assert re.search(r"^count +job \d+, after \d+$", chain_output, re.M), chain_output
    sweep_output = run_submit("tiny.yaml", *SHORT_RUN, SWEEP, "run.name=swept")
    assert re.search(r"^count +job \d+, after \d+$", sweep_output, re.M), sweep_output
    deadline = time.monotonic() + 600
    for run in ("tiny", "swept"):
        while not re.search(r"^count +done", status := run_submit("status", f"runs/{run}"), re.M):
            assert time.monotonic() < deadline, status
            time.sleep(1)
        assert read_token_count(folder / "runs" / run)
        assert "tokens of 1 files" in status and "count" in run_submit("report", f"runs/{run}")
