"""Test that no job is lost or submitted twice if submit.py is killed or the controller hangs during a submission."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.run.code import CODE_ROOT
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import run_submit, wait_for
from tests.support.tiny import write_config

cluster = cluster_fixture()
limited_cluster = cluster_fixture(accounting=True, enforce_limits=True)

pytestmark = pytest.mark.timeout(900)

HELD = "site.sbatch={hold: true}"
CHAIN = [
    ("prepare", ""),
    ("shard", "afterok 0"),
    ("shard", "afterany 1"),
    ("train", "afterok 2"),
    ("evaluate", "afterok 3"),
]
"""Stage and dependency of each job of a new chain, as `list_queue` returns them."""
SBATCH_SCRIPT = """#!/bin/sh
# Run sbatch. At the call with the number in the file `call_number`, also perform the action in the file `action`.
cd "{folder}" && echo call >> calls
number=$(wc -l < calls)
if [ "$number" = "$(cat call_number)" ]; then
    case "$(cat action)" in
        kill) {sbatch} "$@"; kill -9 $PPID; exit 0 ;;
        wait) touch reached; while [ ! -e frozen ]; do sleep 0.05; done ;;
    esac
fi
exec {sbatch} "$@"
"""


class DisturbedSbatch:
    """A folder for PATH with a replacement of sbatch.

    One call of the replacement kills submit.py, or waits until the test has suspended the controller.
    """

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "sbatch").write_text(SBATCH_SCRIPT.format(folder=folder, sbatch=shutil.which("sbatch")))
        (folder / "sbatch").chmod(0o755)
        slurm_conf = Path(cluster.environment()["SLURM_CONF"]).read_text()
        self.slurm_conf = folder / "slurm.conf"  # with it, Slurm commands time out after 2 s instead of 10 s
        self.slurm_conf.write_text(re.sub(r"^MessageTimeout=.*", "MessageTimeout=2", slurm_conf, flags=re.M))
        self.set_action("nothing", 0)

    def set_action(self, action: str, call_number: int) -> None:
        """Set the action (`kill`, `wait` or `nothing`) and the number of the call, from now on, at which it happens.

        `kill` kills submit.py after Slurm has accepted the job. `wait` creates the file `reached` and waits for the
        file `frozen` before it calls sbatch.
        """
        for name in ("reached", "frozen", "calls"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "action").write_text(action)
        (self.folder / "call_number").write_text(str(call_number))

    def count_calls(self) -> int:
        """Return the number of calls of sbatch since the action was set."""
        calls = self.folder / "calls"
        return len(calls.read_text().split()) if calls.exists() else 0

    def start_submit(self, *arguments: str) -> subprocess.Popen[str]:
        """Start submit.py in the parent folder, with the replacement of sbatch on PATH."""
        variables = {
            "SLURM_CONF": str(self.slurm_conf),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder.parent,
            env={**os.environ, **variables},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def run_submit(self, *arguments: str) -> tuple[int, str]:
        """Run submit.py and return its exit code and output."""
        with self.start_submit(*arguments) as process:
            try:
                output = process.communicate(timeout=120)[0]
            finally:
                process.kill()
        return process.returncode, output


@pytest.fixture
def sbatch(tmp_path: Path, cluster: Cluster) -> Iterator[DisturbedSbatch]:
    """Yield a replacement of sbatch. Cancel all jobs afterwards."""
    yield DisturbedSbatch(tmp_path / "bin", cluster)
    cluster.clear()


def list_queue(cluster: Cluster) -> list[tuple[str, str]]:
    """Return stage and dependency of all jobs, oldest first. Indices in this list replace job IDs in dependencies."""
    jobs = [line.split("|") for line in cluster.output(["squeue", "-h", "-o", "%A|%j|%E"]).splitlines()]
    jobs.sort(key=lambda job: int(job[0]))
    index_by_id = {job[0]: str(index) for index, job in enumerate(jobs)}
    queue = []
    for _, name, dependency in jobs:
        match = re.match(r"(\w+):(\d+)", dependency)
        queue.append((name.split("-")[0], f"{match[1]} {index_by_id.get(match[2], match[2])}" if match else ""))
    return queue


def test_no_job_is_lost_if_submit_is_killed_after_any_sbatch(
    tmp_path: Path, cluster: Cluster, sbatch: DisturbedSbatch
) -> None:
    """Afterwards, `status` must show the job, `submit` must complete the chain, and `cancel` must cancel all jobs."""
    config = str(write_config(tmp_path))
    for number in range(1, len(CHAIN) + 1):
        arguments = (config, f"run.name=killed-{number}", HELD)
        for next_command in ("submit", "cancel"):
            sbatch.set_action("kill", number)
            code, output = sbatch.run_submit(*arguments)
            assert code == -signal.SIGKILL and len(list_queue(cluster)) == number, output
            sbatch.set_action("nothing", 0)
            status = sbatch.run_submit("status", f"runs/killed-{number}")[1]
            stage = CHAIN[number - 1][0]
            assert re.search(rf"^{stage} +held", status, re.M), status
            if next_command == "submit":
                code, output = sbatch.run_submit(*arguments)
                assert code == 0 and list_queue(cluster) == CHAIN, (number, output)
                assert sbatch.count_calls() == len(CHAIN) - number, "no job may be submitted twice"
                assert sbatch.run_submit(*arguments)[0] == 0 and list_queue(cluster) == CHAIN
            assert sbatch.run_submit("cancel", f"runs/killed-{number}")[0] == 0
            assert list_queue(cluster) == [], (number, next_command)
            shutil.rmtree(tmp_path / "runs")


def test_one_chain_is_submitted_if_the_controller_hangs_at_any_sbatch(
    tmp_path: Path, cluster: Cluster, sbatch: DisturbedSbatch
) -> None:
    """sbatch times out, but the controller accepts the job when it responds again. submit.py must find this job."""
    config = str(write_config(tmp_path))
    for number in range(1, len(CHAIN) + 1):
        name = f"hung-{number}"
        sbatch.set_action("wait", number)
        with sbatch.start_submit(config, f"run.name={name}", HELD) as process:
            try:
                wait_for("the call of sbatch", (sbatch.folder / "reached").exists, 60)
                with cluster.suspend_controller():
                    (sbatch.folder / "frozen").touch()
                    time.sleep(6)  # longer than the time-out of sbatch
                    assert process.poll() is None, process.communicate()
                output = process.communicate(timeout=120)[0]
            finally:
                process.kill()
        assert process.returncode == 0, output
        assert list_queue(cluster) == CHAIN, (number, output)
        assert sbatch.run_submit("cancel", f"runs/{name}")[0] == 0
        assert list_queue(cluster) == [], number


@pytest.mark.parametrize("next_command", ["submit", "cancel"])
def test_no_job_is_lost_if_submit_is_killed_while_the_controller_hangs(
    tmp_path: Path, cluster: Cluster, sbatch: DisturbedSbatch, next_command: str
) -> None:
    """sbatch keeps running, and the controller may accept the job later. The next command must wait for the outcome."""
    config = str(write_config(tmp_path))
    sbatch.set_action("wait", 4)  # at the call that submits the train job
    with sbatch.start_submit(config, HELD) as process:
        try:
            wait_for("the call of sbatch", (sbatch.folder / "reached").exists, 60)
            with cluster.suspend_controller():
                (sbatch.folder / "frozen").touch()
                time.sleep(1)
                process.kill()
                code, output = sbatch.run_submit(config, HELD)
                assert code == ExitCode.USER_ERROR and "error[slurm.not_responding]" in output, output
        finally:
            process.kill()
    code, output = sbatch.run_submit(*((config, HELD) if next_command == "submit" else ("cancel", "runs/tiny")))
    assert code == 0 and list_queue(cluster) == (CHAIN if next_command == "submit" else []), output
    if next_command == "submit":
        assert sbatch.run_submit("cancel", "runs/tiny")[0] == 0 and list_queue(cluster) == []


def test_limits_are_checked_before_submission_and_an_incomplete_chain_is_completed(
    tmp_path: Path, limited_cluster: Cluster
) -> None:
    """submit.py checks the limit of the user (MaxSubmitJobs) before it submits a job.

    It cannot check the limit of the account (GrpSubmitJobs), which also counts jobs of other users. sbatch then refuses
    the fourth job, and `resume` later completes the chain. Slurm counts each of the two array tasks of shard as a job,
    so the first three jobs of the chain reach a limit of four.
    """
    arguments = (str(write_config(tmp_path)), HELD)

    def set_limit(*change: str) -> None:
        limited_cluster.output(["sacctmgr", "--immediate", "modify", *change])
        time.sleep(1)  # by then, slurmdbd has updated the controller

    set_limit("user", "root", "set", "MaxSubmitJobs=5")
    result = run_submit(limited_cluster, tmp_path, *arguments)
    assert result.returncode == ExitCode.USER_ERROR and "5 jobs" in result.stderr, result.stdout + result.stderr
    assert list_queue(limited_cluster) == [] and "sbatch" not in result.stderr
    set_limit("user", "root", "set", "MaxSubmitJobs=-1")
    set_limit("account", "root", "set", "GrpSubmitJobs=4")
    result = run_submit(limited_cluster, tmp_path, *arguments)
    assert result.returncode == ExitCode.USER_ERROR and list_queue(limited_cluster) == CHAIN[:3], (
        result.stdout + result.stderr
    )
    for output in (result.stderr, run_submit(limited_cluster, tmp_path, "status", "runs/tiny").stdout):
        assert re.search("train: .*sbatch .*Limit", output), output
        assert "resume runs/tiny" in output, output
    set_limit("account", "root", "set", "GrpSubmitJobs=-1")
    assert (
        run_submit(limited_cluster, tmp_path, "resume", "runs/tiny").returncode == 0
        and list_queue(limited_cluster) == CHAIN
    )
    assert (
        run_submit(limited_cluster, tmp_path, "cancel", "runs/tiny").returncode == 0
        and list_queue(limited_cluster) == []
    )
