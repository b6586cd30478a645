"""Tests of MPI ranks that mpirun or srun starts: with and without a supervisor, on one machine and in a Slurm job."""

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
from tests.support.mpirun import find_processes, list_remaining_processes, run_mpirun
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank, slow_down_steps

pytestmark = [pytest.mark.timeout(900), pytest.mark.story]
cluster = cluster_fixture()


def start_supervisor(run: Run, stage: str = "train") -> subprocess.Popen[str]:
    """Start the supervisor of a stage on this machine."""
    command = [sys.executable, "-m", "slurm", stage, str(run.path)]
    return subprocess.Popen(command, cwd=CODE_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_losses_and_norms(run: Run) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in read_jsonl(run.metrics_file)]


def check_equal_results(run: Run, expected_run: Run) -> None:
    """Check that two runs have the same losses, gradient norms, weights and optimizer state."""
    assert read_losses_and_norms(run) == read_losses_and_norms(expected_run)
    assert compute_run_digest(run) == compute_run_digest(expected_run)


@pytest.fixture(scope="module")
def gloo_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return an undisturbed run over Gloo.

    Over MPI, a run must give the same bits, because the sum over two ranks has only one order.
    """
    run = make_run(tmp_path_factory.mktemp("gloo"))
    assert run_ranks(2, run_stage_on_rank, run.path, "train") == [0, 0]
    return run


@pytest.mark.story
def test_mpirun_without_a_supervisor_gives_the_same_result_as_gloo(gloo_run: Run, tmp_path: Path) -> None:
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=gloo_run.data_dir)
    result = run_mpirun(2, "pipeline", "train", str(run.path))
    assert result.returncode == 0, result.stdout
    check_equal_results(run, gloo_run)


@pytest.mark.story
def test_killed_rank_is_reported_and_the_run_continues(gloo_run: Run, tmp_path: Path) -> None:
    """The supervisor restarts the ranks after the crash. The result must equal that of an undisturbed run."""
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=gloo_run.data_dir)
    supervisor = start_supervisor(run)
    deadline = time.monotonic() + 240
    # Wait for the event `saved`, not for the checkpoint, because the supervisor counts the event as progress.
    while not read_event_lines(run, "train", "saved") or not (pids := find_rank_processes(run)):
        assert time.monotonic() < deadline and supervisor.poll() is None, "no checkpoint was saved"
        time.sleep(0.01)
    os.kill(pids[1], signal.SIGKILL)
    assert supervisor.wait(240) == ExitCode.DONE, supervisor.communicate()
    failed = read_event_lines(run, "train", "failed")[0]
    assert failed["rank"] == 1 and "SIGKILL" in failed["message"], failed
    check_equal_results(run, gloo_run)
    assert not list_remaining_processes(str(run.path), 5)


def wait_for_step(run: Run, step: int, is_running: Callable[[], bool]) -> None:
    """Wait until metrics.jsonl has `step` steps. Fail if `is_running` returns False before."""
    deadline = time.monotonic() + 240
    while len(read_losses_and_norms(run)) < step:
        assert time.monotonic() < deadline and is_running(), f"step {step} was not reached"
        time.sleep(0.05)


REDUCTION_METHODS = {
    "powersgd": "parallel.hook={kind: powersgd, rank: 2, warmup_steps: 3}",
    "topk": "parallel.hook={kind: topk, ratio: 0.02, warmup_steps: 12}",
    "bf16": "parallel.hook.kind=bf16",
    "local_sgd": "parallel.local_sgd={every: 16, outer_lr: 0.7, outer_momentum: 0.9}",
}
"""Methods that reduce the communication of gradients, and the override that selects each method."""


@pytest.mark.story
@pytest.mark.parametrize(
    "method",
    [method if method == "powersgd" else pytest.param(method, marks=pytest.mark.long) for method in REDUCTION_METHODS],
)
def test_four_ranks_give_the_same_result_after_a_stop(gloo_run: Run, tmp_path: Path, method: str) -> None:
    """A run that stops after a signal and continues equals an undisturbed run with four ranks over MPI.

    mpirun forwards the signal to the ranks, and returns their exit code, 75. The runs are not compared with Gloo,
    because the sum over four ranks has several orders.
    """
    overrides = ("parallel.backend=mpi", "stages.train.tasks_per_node=4", REDUCTION_METHODS[method])
    undisturbed = make_run(tmp_path, "undisturbed", overrides, gloo_run.data_dir)
    run = make_run(tmp_path, "stopped", overrides, gloo_run.data_dir)
    result = run_mpirun(4, "pipeline", "train", str(undisturbed.path))
    assert result.returncode == 0, result.stdout
    first_supervisor = start_supervisor(slow_down_steps(run, 0.1))
    wait_for_step(run, 8, lambda: first_supervisor.poll() is None)
    first_supervisor.send_signal(signal.SIGTERM)
    assert first_supervisor.wait(240) == ExitCode.STOPPED, first_supervisor.communicate()
    assert 8 <= len(read_losses_and_norms(run)) < 30
    second_supervisor = start_supervisor(run)
    assert second_supervisor.wait(240) == ExitCode.DONE, second_supervisor.communicate()
    restored = read_event_lines(run, "train", "restored")
    assert [(event["lost_steps"], event.get("replicas")) for event in restored] == [(0, None)]
    check_equal_results(run, undisturbed)
    assert len(read_losses_and_norms(run)) == 30


def find_rank_processes(run: Run) -> dict[int, int]:
    """Return the PIDs of the two ranks of the train stage, by rank. The result is empty until both ranks run."""
    pid_by_rank = {}
    for pid in find_processes(f"-m\0pipeline\0train\0{run.path}"):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        rank = re.search(r"(?:OMPI_COMM_WORLD_RANK|PMI_RANK)=(\d+)", environment)
        if rank and command.startswith(sys.executable.encode()):
            pid_by_rank[int(rank[1])] = pid
    return pid_by_rank if len(pid_by_rank) == 2 else {}


def test_ranks_that_mpi_did_not_start_fail(tmp_path: Path, gloo_run: Run) -> None:
    """The variables say that there are two ranks, as if torchrun had started them. MPI sees only one."""
    run = make_run(tmp_path, overrides=("parallel.backend=mpi",), data=gloo_run.data_dir)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "pipeline", "train", str(run.path)]
    environment = {**os.environ, **variables}
    result = subprocess.run(command, cwd=CODE_ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == ExitCode.USER_ERROR, result.stderr
    assert "error[mpi.rank_mismatch]" in result.stderr
    assert "rank 0 of 1" in result.stderr and "rank 0 of 2" in result.stderr


@pytest.mark.parametrize(
    ("messages", "rank_exit"),
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
        ("a message about another problem", None),
    ],
)
def test_failed_rank_is_found_in_the_messages_of_mpirun(messages: str, rank_exit: RankExit | None) -> None:
    """Open MPI 5 and Open MPI 4 print these messages."""
    assert launch.MpirunLauncher.find_first_failure(messages, 1) == rank_exit


def test_mpi_plugins_are_tried_unless_the_environment_selects_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake srun has three MPI plugins. Ranks start only with the plugin in the variable WORKING_PLUGIN."""
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\ncase "$*" in\n--mpi=list) echo "pmix pmi2 none";;\n'
        "*--mpi=$WORKING_PLUGIN*) exit 0;;\n*) exit 1;;\nesac\n"
    )
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for working_plugin, expected_plugin in (("pmix", "pmix"), ("pmi2", "pmi2"), ("nothing", None)):
        monkeypatch.setenv("WORKING_PLUGIN", working_plugin)
        assert launch.find_mpi_plugin(RankCommand((sys.executable,))) == expected_plugin
    for selected_plugin, expected_plugin in (("none", None), ("pmix_v4", "pmix_v4")):
        monkeypatch.setenv("SLURM_MPI_TYPE", selected_plugin)
        assert launch.find_mpi_plugin(RankCommand((sys.executable,))) == expected_plugin


@pytest.mark.parametrize("message", ["   Process name: [x@1,0]\\n   Exit code:    75", ""])
def test_mpirun_is_killed_if_it_keeps_running_after_its_ranks(
    gloo_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, message: str
) -> None:
    """A fake mpirun has a child process for 1.5 s, prints `message`, and does not exit, as Open MPI sometimes does.

    The exit code of the rank is taken from the message. Without a message, the rank counts as successful.
    """
    fake_mpirun = tmp_path / "fake-mpirun"
    fake_mpirun.write_text(f"#!/bin/sh\nsleep 1.5 & wait $!\nprintf '{message}'\nexec sleep 1000\n")
    fake_mpirun.chmod(0o755)
    monkeypatch.setattr(launch, "build_mpirun_command", lambda *_: ([str(fake_mpirun)], {}))
    monkeypatch.setattr(launch, "MPIRUN_CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(launch, "MPIRUN_EXIT_TIMEOUT_S", 2.0)
    launcher = launch.MpirunLauncher(gloo_run, "train", 1, os.open(tmp_path, os.O_RDONLY), local=True)
    launcher.start()
    start_time = time.monotonic()
    exits: list[RankExit] = []
    while launcher.is_running and time.monotonic() < start_time + 60:
        exits += launcher.poll()
        time.sleep(0.05)
    assert [(rank_exit.rank, rank_exit.code) for rank_exit in exits] == [(0, 75 if message else 0)]
    assert not launcher.is_running
    assert time.monotonic() - start_time > 3, "mpirun was killed earlier than 2 s after the end of its child"


def test_missing_mpirun_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError) as raised:
        launch.build_mpirun_command(2)
    assert raised.value.code == "mpi.no_mpirun"


def submit_template(
    name: str, cluster: Cluster, run: Run, folder: Path, variables: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Submit slurm/templates/NAME.sbatch for `run` on two nodes, and wait until the job has ended.

    Args:
        name: name of the template, without `.sbatch`.
        cluster: the test cluster.
        run: the run.
        folder: folder for the log of the job.
        variables: further environment variables of the job.

    Returns:
        The result of sbatch, and the log of the job.
    """
    command = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={folder}/job.log"]
    command += [str(CODE_ROOT / f"slurm/templates/{name}.sbatch"), str(run.path)]
    environment = {**os.environ, **cluster.environment(), "PYTHON": sys.executable, **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    log = folder / "job.log"
    return result, log.read_text() if log.exists() else ""


TWO_NODES = ("parallel.backend=mpi", "stages.train.nodes=2", "stages.train.tasks_per_node=1")
SHORT_LIMITS = ("recovery.start_s=90", "recovery.hang_s=60")
"""With these limits, ranks that hang print their stacks before the test times out."""


def submit_and_preempt(
    name: str, cluster: Cluster, run: Run, folder: Path
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Submit a batch template, preempt its job once after step 5, and return the results of `submit_template`."""
    with ThreadPoolExecutor(1) as pool:
        submission = pool.submit(submit_template, name, cluster, slow_down_steps(run, 0.25), folder, {})
        wait_for_step(run, 5, lambda: not submission.done())
        cluster.output(["sbatch", "-phigh", "-N4", "-c4", "-o", "/dev/null", "--wrap", "sleep 1"])
        result, log = submission.result()
    events = [event["event"] for event in read_event_lines(run, "train")]
    assert events.count("started") == 2 and events.count("restored") == 1 and "lost_work" not in events, log
    return result, log


def test_mpirun_template_continues_on_two_nodes_after_a_preemption(
    cluster: Cluster, gloo_run: Run, tmp_path: Path
) -> None:
    run = make_run(tmp_path, overrides=(*TWO_NODES, *SHORT_LIMITS), data=gloo_run.data_dir)
    result, log = submit_and_preempt("mpirun", cluster, run, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr + log
    check_equal_results(run, gloo_run)


@pytest.mark.parametrize(("plugin", "launcher"), [("", "srun"), ("none", "mpirun")])
def test_supervisor_starts_mpi_ranks_on_two_nodes(
    cluster: Cluster, gloo_run: Run, tmp_path: Path, plugin: str, launcher: str
) -> None:
    """The variable SLURM_MPI_TYPE selects the MPI plugin of srun. With "none", mpirun starts the ranks.

    Without the variable, srun starts the ranks with its pmix plugin. This job is also preempted once.
    """
    run = make_run(tmp_path, overrides=TWO_NODES, data=gloo_run.data_dir)
    if plugin:
        result, log = submit_template("train", cluster, run, tmp_path, {"SLURM_MPI_TYPE": plugin})
    else:
        result, log = submit_and_preempt("train", cluster, run, tmp_path)
    logs = {path.name: path.read_text() for path in (run.path / "jobs/train").glob("*.log")}
    assert result.returncode == 0, result.stdout + result.stderr + log + "".join(logs.values())
    assert f"{launcher}.log" in logs and {"srun", "mpirun"} & {name[:-4] for name in logs} == {launcher}
    check_equal_results(run, gloo_run)
