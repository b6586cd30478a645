"""Submit runs to the test cluster, wait for them, and preempt them. Used by tests with the marker `story`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.support.events import read_event_lines
from tests.support.tiny import slow_down_steps, write_config

TRAIN_ON_4_NODES = ("stages.train.nodes=4", "stages.train.tasks_per_node=1", "stages.evaluate.nodes=2")


def run_submit(cluster: Cluster | None, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run submit.py in `folder`. If `cluster` is given, submit.py finds the Slurm commands of this cluster."""
    command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
    environment = {**os.environ, **(cluster.environment() if cluster else {}), "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def wait_for(description: str, condition: Callable[[], Any], timeout: float = 300) -> None:
    """Wait until `condition` returns a true value; fail after `timeout` seconds.

    The default of `timeout` is long, because the machine may be busy.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{description} did not happen within {timeout:.0f} s"
        time.sleep(0.3)


def wait_for_empty_queue(cluster: Cluster, timeout: float = 240) -> None:
    """Wait until no job is pending or running."""
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), timeout)


def list_event_names(run: Path, stage: str | None = None) -> list[str]:
    """Return the names of the events of a run, or only of one stage, oldest first."""
    return [event["event"] for event in read_event_lines(Run.open(run), stage)]


def count_steps(run: Path) -> int:
    """Return the number of steps in metrics.jsonl."""
    return len(list(read_jsonl(run / "metrics.jsonl")))


def has_evaluation(run: Path) -> bool:
    """Return True if at least one checkpoint was evaluated."""
    return any((run / "evaluation").glob("step-*.json"))


def get_job_id(run: Path, stage: str) -> str:
    """Return the ID of the newest job of a stage."""
    return str(read_event_lines(Run.open(run), stage, "submitted")[-1]["job_id"])


def write_config_with_copied_data(folder: Path, undisturbed: Path, name: str) -> Path:
    """Write the config of a run of 40 steps and copy prepared data into its run directory.

    Args:
        folder: where to write the config and the run directory.
        undisturbed: folder of a finished run `runs/tiny` and of its corpus. The data is copied from this run.
        name: name of the new run.

    Returns:
        The path of the config.
    """
    text = write_config(folder, name, steps=40).read_text()
    path = folder / f"{name}.yaml"
    path.write_text(text.replace(str(folder / "corpus.jsonl"), str(undisturbed / "corpus.jsonl")))
    (folder / "runs" / name).mkdir(parents=True)
    subprocess.run(["cp", "-r", str(undisturbed / "runs/tiny/data"), str(folder / "runs" / name / "data")], check=True)
    return path


def create_slow_run(folder: Path, config: Path, overrides: Sequence[str] = TRAIN_ON_4_NODES) -> Path:
    """Create the run directory of a config, slow down the steps in its copy of the code, and return its path."""
    return slow_down_steps(Run.create(load_config(config, overrides))).path


def submit_template(cluster: Cluster, *arguments: str) -> str:
    """Submit a batch script of slurm/templates and return the job ID.

    Args:
        cluster: cluster for the job.
        arguments: arguments of sbatch: options, the path of the script, and the arguments of the script.
    """
    environment = {**os.environ, **cluster.environment(), "PYTHON": sys.executable}
    command = ["sbatch", "--parsable", *arguments]
    result = subprocess.run(command, cwd=CODE_ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def preempt_all_nodes(cluster: Cluster) -> None:
    """Submit a job of 3 s to the partition `high`, which preempts the jobs of the other partitions on all 4 nodes."""
    command = ["sbatch", "--parsable", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 3"]
    submitted = cluster.run(command, timeout=60)
    assert submitted.returncode == 0, submitted.stderr
