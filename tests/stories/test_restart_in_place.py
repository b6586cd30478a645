"""Test restarts within the same job on a real Slurm: ranks, agents and whole nodes fail while a run trains."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
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
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes
from tests.support.tiny import compute_run_digest, write_config

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(600)

ON_TWO_NODES = (
    "stages.train.nodes=2", "stages.train.tasks_per_node=2", "checkpoint.every_steps=4", "recovery.budgets.crash=9"
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a chain without interruptions and without agents. Return the folder with the completed run `runs/tiny`."""
    folder = tmp_path_factory.mktemp("reference")
    write_config(folder, steps=40)
    result = run_submit(cluster, folder, "tiny.yaml", *ON_TWO_NODES, "recovery.in_place=false")
    assert result.returncode == 0, result.stdout + result.stderr
    wait_for("the evaluation", lambda: has_evaluation(folder / "runs/tiny"))
    wait_for_empty_queue(cluster)
    return folder


def kill_rank(run: Run) -> None:
    """Kill rank 2, which runs on the second node."""
    find_rank_processes(run.path)[2].kill()


def hang_rank(run: Run) -> None:
    """Stop rank 1."""
    find_rank_processes(run.path)[1].send_signal(signal.SIGSTOP)


def kill_agent(run: Run) -> None:
    """Kill the agent of the second node."""
    parent = find_rank_processes(run.path)[3].parent()
    assert parent is not None
    parent.kill()


@pytest.mark.parametrize(("fault", "cause"), [(kill_rank, "crashed"), (hang_rank, "hang"), (kill_agent, "crashed")])
def test_a_fault_restarts_the_ranks_in_the_same_job(
    tmp_path: Path, reference: Path, cluster: Cluster, fault: Callable[[Run], None], cause: str
) -> None:
    config = write_config_with_copied_data(tmp_path, reference, "faulty")
    overrides = (*ON_TWO_NODES, "recovery.hang_s=8")
    run = Run(create_slow_run(tmp_path, config, overrides))
    assert run_submit(cluster, tmp_path, str(config), *overrides).returncode == 0
    wait_for("a save", lambda: "saved" in list_event_names(run.path, "train"))
    job_id = get_job_id(run.path, "train")
    hosts = read_event_lines(run, "train", "ranks_started")[0]["processes"]
    assert [sorted(map(int, pids)) for pids in hosts.values()] == [[0, 1], [2, 3]]
    fault(run)
    wait_for("the evaluation", lambda: has_evaluation(run.path))
    names = list_event_names(run.path, "train")
    assert names.count("retried") == 1 and "requeued" not in names
    assert read_event_lines(run, "train", "retried")[0]["cause"] == cause
    assert {event["slurm_job"] for event in read_event_lines(run, "train", "started")} == {job_id}
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == list(range(1, 41))
    assert compute_run_digest(run) == compute_run_digest(Run(reference / "runs/tiny"))
    wait_for_empty_queue(cluster)
    assert not find_rank_processes(run.path)


def test_in_place_false_requeues_the_job(tmp_path: Path, reference: Path, cluster: Cluster) -> None:
    config = write_config_with_copied_data(tmp_path, reference, "old")
    overrides = (*ON_TWO_NODES, "recovery.in_place=false")
    run = Run(create_slow_run(tmp_path, config, overrides))
    assert run_submit(cluster, tmp_path, str(config), *overrides).returncode == 0
    wait_for("a save", lambda: "saved" in list_event_names(run.path, "train"))
    ranks = [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[-4:] == ["-m", "pipeline", "train", str(run.path)]
    ]
    os.kill(ranks[-1].pid, signal.SIGKILL)
    wait_for("the evaluation", lambda: has_evaluation(run.path))
    names = list_event_names(run.path, "train")
    assert "requeued" in names and "retried" not in names and "ranks_started" not in names
    assert compute_run_digest(run) == compute_run_digest(Run(reference / "runs/tiny"))
    wait_for_empty_queue(cluster)


SHOW_RANK = (
    "import json, os, sys; names = ('PROCID', 'LOCALID', 'NODEID', 'NTASKS', 'CPUS_PER_TASK', 'STEP_NUM_TASKS', "
    "'STEP_TASKS_PER_NODE', 'STEP_NODELIST', 'NTASKS_PER_NODE'); "
    "json.dump([{name: os.environ.get('SLURM_' + name) for name in names}, sorted(os.sched_getaffinity(0)), "
    "os.environ.get('CUDA_VISIBLE_DEVICES')], open(sys.argv[1] + os.environ['SLURM_PROCID'], 'w'))"
)
"""A program that writes the variables and the CPUs of a task to a file."""


def test_forked_ranks_have_the_variables_and_devices_that_srun_would_give_them(
    tmp_path: Path, reference: Path, cluster: Cluster
) -> None:
    """The ranks write the same facts as tasks that srun starts in an equal allocation."""
    config = write_config_with_copied_data(tmp_path, reference, "bound")
    overrides = (*ON_TWO_NODES, "site.gpus_per_node=2", "site.cpus_per_task=2", "site.distribution=cyclic",
                 "parallel.tensor=1")  # fmt: skip
    run = Run(create_slow_run(tmp_path, config, overrides))
    main = run.code_dir / "pipeline/__main__.py"
    program = SHOW_RANK.replace("sys.argv[1]", repr(f"{tmp_path}/rank-"))
    main.write_text(main.read_text().replace("    flag = flag or", f"    exec({program!r})\n    flag = flag or", 1))
    assert run_submit(cluster, tmp_path, str(config), *overrides).returncode == 0
    wait_for("the facts of the ranks", lambda: len(list(tmp_path.glob("rank-*"))) == 4)
    run_submit(cluster, tmp_path, "cancel", "runs/bound")
    wait_for_empty_queue(cluster)
    script = tmp_path / "tasks.sh"
    script.write_text(
        f'#!/bin/bash\nsrun --ntasks=4 --nodes=2 --cpus-per-task=2 {sys.executable} -c "{SHOW_RANK}" {tmp_path}/task-\n'
    )
    options = ["-N2", "--ntasks-per-node=2", "-c2", "--gpus-per-node=2", "--distribution=cyclic", "-o", "/dev/null"]
    cluster.output(["sbatch", "--wait", *options, str(script)])
    for rank in range(4):
        assert (tmp_path / f"rank-{rank}").read_text() == (tmp_path / f"task-{rank}").read_text()
