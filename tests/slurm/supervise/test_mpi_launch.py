"""Starting MPI ranks: the supervisor on one machine and in a Slurm job, a killed rank's name, mpirun by hand."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from slurm.supervise import launch
from slurm.supervise.launch import RankCommand, RankExit
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.events import read_event_lines
from tests.support.mpirun import find_processes, run_mpirun, wait_until_processes_exit
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, slow_down_steps, stage_rank

pytestmark = pytest.mark.timeout(900)
cluster = cluster_fixture()


def supervise(run: Run, stage: str = "train") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "slurm", stage, str(run.path)]
    return subprocess.Popen(command, cwd=CODE_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def numbers(run: Run) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_jsonl(run.metrics_file)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An undisturbed run over Gloo. With two ranks any sum has one order, so MPI must give the same bits."""
    run = make_run(tmp_path_factory.mktemp("gloo"))
    assert run_ranks(2, stage_rank, run.path, "train") == [0, 0]
    return run


def test_mpirun_by_hand_trains_as_gloo_does(calm: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=calm.data_dir)
    done = run_mpirun(2, "pipeline", "train", str(run.path))
    assert done.returncode == 0, done.stdout
    assert numbers(run) == numbers(calm) and compute_run_digest(run) == compute_run_digest(calm)


@pytest.mark.story
def test_a_killed_rank_is_named_and_training_goes_on(calm: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=calm.data_dir)
    supervisor = supervise(run)
    deadline = time.monotonic() + 240
    # the event, which the supervisor takes for progress, comes a moment after the checkpoint
    while not any(e["event"] == "saved" for e in read_event_lines(run, "train")) or not (ranks := rank_processes(run)):
        assert time.monotonic() < deadline and supervisor.poll() is None, "no checkpoint to kill after"
        time.sleep(0.01)
    os.kill(ranks[1], signal.SIGKILL)
    assert supervisor.wait(240) == ExitCode.DONE, supervisor.communicate()
    failed = next(event for event in read_event_lines(run, "train") if event["event"] == "failed")
    assert failed["rank"] == 1 and "SIGKILL" in failed["message"], failed
    assert numbers(run) == numbers(calm) and compute_run_digest(run) == compute_run_digest(calm)
    assert not wait_until_processes_exit(str(run.path), 5)


def wait_for_step(run: Run, step: int, still_runs: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while len(numbers(run)) < step:
        assert time.monotonic() < deadline and still_runs(), f"step {step} was not reached"
        time.sleep(0.05)


WAYS = {
    "powersgd": "parallel.hook={kind: powersgd, rank: 2, warmup_steps: 3}",
    "topk": "parallel.hook={kind: topk, ratio: 0.02, warmup_steps: 12}",
    "bf16": "parallel.hook.kind=bf16",
    "local_sgd": "parallel.local_sgd={every: 16, outer_lr: 0.7, outer_momentum: 0.9}",
}


@pytest.mark.story
@pytest.mark.parametrize(
    "way", [way if way == "powersgd" else pytest.param(way, marks=pytest.mark.long) for way in WAYS]
)
def test_four_ranks_stopped_and_resumed_are_undisturbed(calm: Run, tmp_path: Path, way: str) -> None:
    """Through mpirun: the request by USR2, the code 75. With four ranks a sum has many orders."""
    more = ("parallel.backend=mpi", "stages.train.tasks_per_node=4", WAYS[way])
    undisturbed, run = (make_run(tmp_path, name, more, calm.data_dir) for name in ("undisturbed", "stopped"))
    done = run_mpirun(4, "pipeline", "train", str(undisturbed.path))
    assert done.returncode == 0, done.stdout
    first = supervise(slow_down_steps(run, 0.1))
    wait_for_step(run, 8, lambda: first.poll() is None)
    first.send_signal(signal.SIGTERM)
    assert first.wait(240) == ExitCode.STOPPED, first.communicate()
    assert 8 <= len(numbers(run)) < 30
    second = supervise(run)
    assert second.wait(240) == ExitCode.DONE, second.communicate()
    restored = [event for event in read_event_lines(run, "train") if event["event"] == "restored"]
    assert [(event["lost_steps"], event.get("replicas")) for event in restored] == [(0, None)]
    assert numbers(run) == numbers(undisturbed) and compute_run_digest(run) == compute_run_digest(undisturbed)
    assert len(numbers(run)) == 30


def rank_processes(run: Run) -> dict[int, int]:
    """Processes of the ranks of a run's training, by rank."""
    found = {}
    for pid in find_processes(f"-m\0pipeline\0train\0{run.path}"):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        rank = re.search(r"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", environment)
        if rank and command.startswith(sys.executable.encode()):
            found[int(rank[1])] = pid
    return found if len(found) == 2 else {}


def test_ranks_that_mpi_did_not_start_are_an_error(tmp_path: Path, calm: Run) -> None:
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=calm.data_dir)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "pipeline", "train", str(run.path)]
    done = subprocess.run(
        command, cwd=CODE_ROOT, env={**os.environ, **place}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == ExitCode.USER_ERROR, done.stderr
    assert "error[mpi.rank_mismatch]" in done.stderr and "rank 0 of 1" in done.stderr and "rank 0 of 2" in done.stderr


@pytest.mark.parametrize(
    ("messages", "left"),
    [
        (
            "prterun noticed that process rank 1 with PID 271 on node n2 exited on\nsignal 9 (Killed).",
            RankExit(1, -9, "n2"),
        ),
        (
            "mpirun noticed that process rank 3 with PID 0 on node vm exited on signal 11 (Segm).",
            RankExit(3, -11, "vm"),
        ),
        ("to do so was:\n\n   Process name: [prterun-vm-27247@1,1]\n   Exit code:    3\n---", RankExit(1, 3)),
        ("to do so was:\n\n  Process name: [[390,1],2]\n  Exit code:    21\n---", RankExit(2, 21)),
        ("nothing of the kind", None),
    ],
)
def test_what_mpirun_says_about_a_dead_rank(messages: str, left: RankExit | None) -> None:
    """Words of Open MPI 5 and 4."""
    assert launch.MpirunLauncher.find_first_failure(messages, 1) == left


def test_the_way_to_start_is_tried_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\ncase "$*" in --mpi=list) echo "pmix pmi2 none";; *--mpi=$WORKS*) exit 0;; *) exit 1;; esac\n'
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for works, plugin in (("pmix", "pmix"), ("pmi2", "pmi2"), ("nothing", None)):
        monkeypatch.setenv("WORKS", works)
        assert launch.find_mpi_plugin(RankCommand((sys.executable,))) == plugin
    for chosen, plugin in (("none", None), ("pmix_v4", "pmix_v4")):
        monkeypatch.setenv("SLURM_MPI_TYPE", chosen)
        assert launch.find_mpi_plugin(RankCommand((sys.executable,))) == plugin


@pytest.mark.parametrize("said", ["   Process name: [x@1,0]\\n   Exit code:    75", ""])
def test_an_mpirun_that_does_not_end_after_its_ranks_is_killed(
    calm: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str
) -> None:
    """A fake one, which has a rank for a second and then only waits, as Open MPI's does now and then."""
    fake = tmp_path / "fake-mpirun"
    fake.write_text(f"#!/bin/sh\nsleep 1.5 & wait $!\nprintf '{said}'\nexec sleep 1000\n")
    fake.chmod(0o755)
    monkeypatch.setattr(launch, "build_mpirun_command", lambda *_: ([str(fake)], {}))
    monkeypatch.setattr(launch, "MPIRUN_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(launch, "MPIRUN_EXIT_TIMEOUT_S", 2.0)
    ranks = launch.MpirunLauncher(calm, "train", 1, os.open(tmp_path, os.O_RDONLY), local=True)
    ranks.start()
    started, gone = time.monotonic(), list[RankExit]()
    while ranks.is_running and time.monotonic() < started + 60:
        gone += ranks.poll()
        time.sleep(0.05)
    assert [(left.rank, left.code) for left in gone] == [(0, 75 if said else 0)] and not ranks.is_running
    assert time.monotonic() - started > 3, "its rank was let alone"


def test_no_mpirun_is_a_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=re.escape("no mpirun on PATH")):
        launch.build_mpirun_command(2)


def submit_template(
    name: str, cluster: Cluster, run: Run, folder: Path, more: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Submit a template for `run` on two nodes and wait for its end; sbatch's result, and the job's log."""
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/job.log"]
    command += [str(CODE_ROOT / f"slurm/templates/{name}.sbatch"), str(run.path)]
    environment = {**os.environ, **cluster.environment(), "PYTHON": sys.executable, **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    log = folder / "job.log"
    return done, log.read_text() if log.exists() else ""


TWO_NODES = ("parallel.backend=mpi", "stages.train.nodes=2", "stages.train.tasks_per_node=1")
SOON = ("recovery.start_s=90", "recovery.hang_s=60")
"""Ranks that wait for ever tell their stacks before the test's time is up: under the template nobody else watches."""


def preempted(name: str, cluster: Cluster, run: Run, folder: Path) -> tuple[subprocess.CompletedProcess[str], str]:
    """`submit_template`, and its job is preempted once, in the middle."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(submit_template, name, cluster, slow_down_steps(run, 0.25), folder, {})
        wait_for_step(run, 5, lambda: not job.done())
        cluster.output(["sbatch", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"])
        done, log = job.result()
    told = [event["event"] for event in read_event_lines(run, "train")]
    assert told.count("started") == 2 and told.count("restored") == 1 and "lost_work" not in told, log
    return done, log


def test_the_template_trains_on_two_nodes_and_comes_back(cluster: Cluster, calm: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=(*TWO_NODES, *SOON), data=calm.data_dir)
    done, log = preempted("mpirun", cluster, run, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr + log
    assert numbers(run) == numbers(calm) and compute_run_digest(run) == compute_run_digest(calm)


@pytest.mark.parametrize(("chosen", "launcher"), [("", "srun"), ("none", "mpirun")])
def test_the_supervisor_trains_on_two_nodes(
    cluster: Cluster, calm: Run, tmp_path: Path, chosen: str, launcher: str
) -> None:
    """By srun's pmix plugin, which a trial finds to work, preempted once; or by mpirun inside the job."""
    run = make_run(tmp_path, overrides=TWO_NODES, data=calm.data_dir)
    if chosen:
        done, log = submit_template("train", cluster, run, tmp_path, {"SLURM_MPI_TYPE": chosen})
    else:
        done, log = preempted("train", cluster, run, tmp_path)
    logs = {path.name: path.read_text() for path in (run.path / "jobs/train").glob("*.log")}
    assert done.returncode == 0, done.stdout + done.stderr + log + "".join(logs.values())
    assert f"{launcher}.log" in logs and {"srun", "mpirun"} & {name[:-4] for name in logs} == {launcher}
    assert numbers(run) == numbers(calm) and compute_run_digest(run) == compute_run_digest(calm)
