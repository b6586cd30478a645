"""Test stages that run a command on a real Slurm: preemption, kills, arrays, sweeps and MPI."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipeline.run.directory import Run
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.command.scripts import SCRIPTS
from tests.support.cluster_runs import (
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
    wait_for_empty_queue,
)
from tests.support.events import read_event_lines
from tests.support.ranks import find_rank_processes

cluster = cluster_fixture(grace=15)

pytestmark = [pytest.mark.story, pytest.mark.timeout(600)]

MPI_PROGRAM = """
#include <mpi.h>
#include <stdio.h>
int main(int argc, char **argv) {
    int rank, size, sum;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    MPI_Reduce(&rank, &sum, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD);
    if (rank == 0) { FILE *file = fopen("sum.txt", "w"); fprintf(file, "%d of %d", sum, size); fclose(file); }
    MPI_Finalize();
    return 0;
}
"""


def write_project(folder: Path, stages: Mapping[str, object], files: dict[str, str], **sections: object) -> Path:
    """Write the files of a user and a config with these stages. Return the path of the future run."""
    for name, content in files.items():
        (folder / name).write_text(content)
    config = {"run": {"name": "commands"}, "stages": stages, **sections}
    (folder / "config.yaml").write_text(json.dumps(config))
    return folder / "runs/commands"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_survives_preemptions_and_a_kill(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The weights are those of an undisturbed run on this machine, bit for bit."""
    stages = {
        "train": {
            "command": f"{sys.executable} train_script.py", "nodes": 2, "tasks_per_node": 2, "partition": "low",
            "outputs": ["result.txt"], "progress": "checkpoints/*",
        }
    }  # fmt: skip
    paths = {}
    for kind, executor, step_s in (("undisturbed", "local", "0"), ("disturbed", "slurm", "0.4")):
        (tmp_path / kind).mkdir()
        paths[kind] = write_project(tmp_path / kind, stages, {"train_script.py": SCRIPTS[name]})
        monkeypatch.setenv("STEP_S", step_s)
        submitted = run_submit(cluster, tmp_path / kind, "config.yaml", "--executor", executor)
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    path = paths["disturbed"]
    run = Run.open(path)

    def count_events(name: str) -> int:
        return list_event_names(path, "train").count(name)

    for number in (1, 2, 3):
        wait_for("a start", lambda: count_events("ranks_started") == number)  # noqa: B023
        saved_count = count_events("saved")
        wait_for("a save", lambda: count_events("saved") > saved_count)  # noqa: B023
        if number < 3:
            preempt_all_nodes(cluster)
    find_rank_processes(path)[2].kill()
    wait_for("the end", lambda: {"done", "failed"} <= {*list_event_names(path, "train")})
    assert [event["cause"] for event in read_event_lines(run, "train", "requeued")] == ["preempted", "preempted"]
    retries, failures = (read_event_lines(run, "train", name) for name in ("retried", "failed"))
    assert [event["cause"] for event in retries] == ["crashed"], (retries, failures)
    assert len({event["slurm_job"] for event in read_event_lines(run, "train", "started")}) == 1
    assert failures[0]["rank"] == 2
    steps = [json.loads(line)["step"] for line in run.metrics_file.read_text().splitlines()]
    assert steps == list(range(1, 31))
    report = run_submit(cluster, tmp_path / "disturbed", "report", "runs/commands")
    assert report.returncode == 0 and "preempted" in report.stdout and "crashed" in report.stdout
    assert len({(path / "work/result.txt").read_text() for path in paths.values()}) == 1
    wait_for_empty_queue(cluster)


def test_an_array_and_a_sweep_of_commands(tmp_path: Path, cluster: Cluster) -> None:
    """A shell script makes the input, each point of the sweep uses it, and an array runs in another run."""
    stages = {
        "fetch": {"command": "mkdir -p $SLUICE_RUN/data && echo 5 > $SLUICE_RUN/data/number"},
        "square": {
            "command": "echo $(( {factor} * $(cat $SLUICE_RUN/data/number) )) > result.txt",
            "needs": ["fetch"], "outputs": ["result.txt"],
        },
    }  # fmt: skip
    sweep = {"grid": {"parameters.factor": [1, 2, 3, 4]}}
    path = write_project(tmp_path, stages, {}, parameters={"factor": 0}, sweep=sweep)
    submitted = run_submit(cluster, tmp_path, "config.yaml", "--executor", "slurm")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    points = [path / "points" / f"{number:03d}" for number in range(4)]
    wait_for("all points", lambda: all("done" in list_event_names(point, "square") for point in points))
    assert [(point / "work/result.txt").read_text().strip() for point in points] == ["5", "10", "15", "20"]
    assert list_event_names(path, "fetch").count("started") == 1
    wait_for_empty_queue(cluster)
    folder = tmp_path / "array"
    folder.mkdir()
    command = "echo $SLUICE_TASK >> task-$SLUICE_TASK.txt"
    path = write_project(folder, {"main": {"command": command, "tasks": 8, "outputs": ["task-7.txt"]}}, {})
    assert run_submit(cluster, folder, "config.yaml", "--executor", "slurm").returncode == 0
    wait_for("all tasks", lambda: len(list((path / "work").glob("task-*.txt"))) == 8)
    wait_for_empty_queue(cluster)
    status = run_submit(cluster, folder, "status", "runs/commands")
    assert status.returncode == 0 and "8/8" in status.stdout, status.stdout + status.stderr
    assert {file.read_text() for file in (path / "work").glob("task-*.txt")} == {f"{task}\n" for task in range(8)}


def test_an_mpi_program_in_c(tmp_path: Path, cluster: Cluster) -> None:
    compiler = Path(sys.executable).parent / "mpicc"  # that of the MPI library which starts the program
    stages = {
        "build": {"command": f"{compiler} -o program program.c && cp program $SLUICE_RUN/data/"},
        "run": {
            "command": "$SLUICE_RUN/data/program", "needs": ["build"], "mpi": True, "nodes": 2, "tasks_per_node": 2,
            "outputs": ["sum.txt"],
        },
    }  # fmt: skip
    path = write_project(tmp_path, stages, {"program.c": MPI_PROGRAM})
    submitted = run_submit(cluster, tmp_path, "config.yaml", "--executor", "slurm")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    wait_for("the end", lambda: {"done", "failed"} & {*list_event_names(path, "run")})
    assert (path / "work/sum.txt").read_text() == "6 of 4", read_event_lines(Run.open(path), "run", "failed")
    wait_for_empty_queue(cluster)


def test_one_command_line_runs_a_script_as_a_job(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "hello.sh").write_text("echo rank $RANK of $WORLD_SIZE > hello-$RANK.txt\n")
    submitted = run_submit(
        cluster, tmp_path, "run", "--name", "hello", "-N", "2", "--ntasks-per-node", "1", "--time", "00:05:00",
        "--output", "hello-*.txt", "--executor", "slurm", "--", "sh", "hello.sh",
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    path = tmp_path / "runs/hello"
    wait_for("the end", lambda: "done" in list_event_names(path, "run"))
    texts = sorted(file.read_text() for file in (path / "work").glob("hello-*.txt"))
    assert texts == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert {host for event in read_event_lines(Run.open(path), "run", "ranks_started") for host in event["processes"]}
    logs = run_submit(cluster, tmp_path, "logs", "runs/hello", "run")
    assert logs.returncode == 0
    wait_for_empty_queue(cluster)
