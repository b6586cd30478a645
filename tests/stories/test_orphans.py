"""Jobs that submit.py submitted and could not record are found, whenever it is killed or the controller hangs."""

from __future__ import annotations

import os
import re
import shutil
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
limited = cluster_fixture(accounting=True, enforce_limits=True)

pytestmark = pytest.mark.timeout(900)

HELD = "site.sbatch={hold: true}"
CHAIN = [
    ("prepare", ""),
    ("shard", "afterok 0"),
    ("shard", "afterany 1"),
    ("train", "afterok 2"),
    ("evaluate", "afterok 3"),
]
"""The jobs of a run, in the order of their ids, and what each waits for."""
SBATCH = """#!/bin/sh
# sbatch, which does something else too at the call whose number is in the file `at`.
cd "{folder}" && echo call >> calls
number=$(wc -l < calls)
if [ "$number" = "$(cat at)" ]; then
    case "$(cat what)" in
        kill) {sbatch} "$@"; kill -9 $PPID; exit 0 ;;
        freeze) touch reached; while [ ! -e frozen ]; do sleep 0.05; done ;;
    esac
fi
exec {sbatch} "$@"
"""


class Sbatch:
    """A directory for PATH whose sbatch is disturbed at one call."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster
        folder.mkdir()
        (folder / "sbatch").write_text(SBATCH.format(folder=folder, sbatch=shutil.which("sbatch")))
        (folder / "sbatch").chmod(0o755)
        conf = Path(cluster.environment()["SLURM_CONF"]).read_text()
        self.conf = folder / "slurm.conf"  # the clients of this test give up after two seconds instead of ten
        self.conf.write_text(re.sub(r"^MessageTimeout=.*", "MessageTimeout=2", conf, flags=re.M))
        self.plan("nothing", 0)

    def plan(self, what: str, at: int) -> None:
        for name in ("reached", "frozen", "calls"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "what").write_text(what)
        (self.folder / "at").write_text(str(at))

    def calls(self) -> int:
        """How often sbatch was called since the last plan."""
        calls = self.folder / "calls"
        return len(calls.read_text().split()) if calls.exists() else 0

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start submit.py beside this directory."""
        more = {"SLURM_CONF": str(self.conf), "PATH": f"{self.folder}:{os.environ['PATH']}", "COLUMNS": "200"}
        command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder.parent,
            env={**os.environ, **more},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def submit(self, *arguments: str) -> tuple[int, str]:
        """Run submit.py; its exit code and output."""
        with self.start(*arguments) as process:
            try:
                output = process.communicate(timeout=120)[0]
            finally:
                process.kill()
        return process.returncode, output


@pytest.fixture
def sbatch(tmp_path: Path, cluster: Cluster) -> Iterator[Sbatch]:
    yield Sbatch(tmp_path / "bin", cluster)
    cluster.clear()


def queue(cluster: Cluster) -> list[tuple[str, str]]:
    """Stage and dependency of all jobs, oldest first; ids are replaced by places in this list."""
    rows = [line.split("|") for line in cluster.output(["squeue", "-h", "-o", "%A|%j|%E"]).splitlines()]
    rows.sort(key=lambda row: int(row[0]))
    places = {row[0]: str(place) for place, row in enumerate(rows)}
    found = []
    for _, name, dependency in rows:
        match = re.match(r"(\w+):(\d+)", dependency)
        found.append((name.split("-")[0], f"{match[1]} {places.get(match[2], match[2])}" if match else ""))
    return found


def test_a_submit_that_is_killed_after_any_sbatch_leaves_no_job_that_is_lost(
    tmp_path: Path, cluster: Cluster, sbatch: Sbatch
) -> None:
    config = str(write_config(tmp_path))
    for number in range(1, len(CHAIN) + 1):
        words = (config, f"run.name=killed-{number}", HELD)
        for following in ("submit", "cancel"):
            sbatch.plan("kill", number)
            code, said = sbatch.submit(*words)
            assert code == -9 and len(queue(cluster)) == number, said
            sbatch.plan("nothing", 0)
            status = sbatch.submit("status", f"runs/killed-{number}")[1]
            stage = CHAIN[number - 1][0]
            assert re.search(rf"^{stage} +held", status, re.M), status
            if following == "submit":
                code, said = sbatch.submit(*words)
                assert code == 0 and queue(cluster) == CHAIN, (number, said)
                assert sbatch.calls() == len(CHAIN) - number, "none is made twice"
                assert sbatch.submit(*words)[0] == 0 and queue(cluster) == CHAIN
            assert sbatch.submit("cancel", f"runs/killed-{number}")[0] == 0
            assert queue(cluster) == [], (number, following)
            shutil.rmtree(tmp_path / "runs")


def test_a_controller_that_hangs_at_any_sbatch_gets_one_chain(tmp_path: Path, cluster: Cluster, sbatch: Sbatch) -> None:
    """sbatch gives up; the controller takes the job all the same when it goes on, and submit.py finds that."""
    config = str(write_config(tmp_path))
    for number in range(1, len(CHAIN) + 1):
        name = f"hung-{number}"
        sbatch.plan("freeze", number)
        with sbatch.start(config, f"run.name={name}", HELD) as process:
            try:
                wait_for("the call", (sbatch.folder / "reached").exists, 60)
                with cluster.frozen():
                    (sbatch.folder / "frozen").touch()
                    time.sleep(6)  # longer than sbatch waits
                    assert process.poll() is None, process.communicate()
                output = process.communicate(timeout=120)[0]
            finally:
                process.kill()
        assert process.returncode == 0 and "asking Slurm whether it has the job" in output, output
        assert queue(cluster) == CHAIN, (number, output)
        assert sbatch.submit("cancel", f"runs/{name}")[0] == 0
        assert queue(cluster) == [], number


@pytest.mark.parametrize("following", ["submit", "cancel"])
def test_a_submit_that_is_killed_while_the_controller_hangs(
    tmp_path: Path, cluster: Cluster, sbatch: Sbatch, following: str
) -> None:
    """Its sbatch lives on, and the controller may take the job later: the next command waits for what comes of it."""
    config = str(write_config(tmp_path))
    sbatch.plan("freeze", 4)
    with sbatch.start(config, HELD) as process:
        try:
            wait_for("the call", (sbatch.folder / "reached").exists, 60)
            with cluster.frozen():
                (sbatch.folder / "frozen").touch()
                time.sleep(1)
                process.kill()
                refused = sbatch.submit(config, HELD)
                assert refused[0] == ExitCode.USER_ERROR and "no Slurm controller answers" in refused[1], refused
        finally:
            process.kill()
    code, said = sbatch.submit(*((config, HELD) if following == "submit" else ("cancel", "runs/tiny")))
    assert code == 0 and queue(cluster) == (CHAIN if following == "submit" else []), said
    if following == "submit":
        assert sbatch.submit("cancel", "runs/tiny")[0] == 0 and queue(cluster) == []


def test_limits_are_asked_for_before_a_chain_and_half_a_chain_is_completed(tmp_path: Path, limited: Cluster) -> None:
    """The limit of the user is known beforehand. That of the whole account is not: others' jobs count, too."""
    words = (str(write_config(tmp_path)), HELD)

    def limit(*change: str) -> None:
        limited.output(["sacctmgr", "--immediate", "modify", *change])
        time.sleep(1)  # slurmdbd tells the controller

    limit("user", "root", "set", "MaxSubmitJobs=5")
    done = run_submit(limited, tmp_path, *words)
    assert done.returncode == ExitCode.USER_ERROR and "allows you 5 jobs" in done.stderr, done.stdout + done.stderr
    assert queue(limited) == [] and "sbatch" not in done.stderr
    limit("user", "root", "set", "MaxSubmitJobs=-1")
    limit("account", "root", "set", "GrpSubmitJobs=4")
    done = run_submit(limited, tmp_path, *words)
    assert done.returncode == ExitCode.USER_ERROR and queue(limited) == CHAIN[:3], done.stdout + done.stderr
    for said in (done.stderr, run_submit(limited, tmp_path, "status", "runs/tiny").stdout):
        assert re.search("train: .*sbatch refused the job: .*Limit", said), said
        assert "submit.py resume runs/tiny" in said, said
    limit("account", "root", "set", "GrpSubmitJobs=-1")
    assert run_submit(limited, tmp_path, "resume", "runs/tiny").returncode == 0 and queue(limited) == CHAIN
    assert run_submit(limited, tmp_path, "cancel", "runs/tiny").returncode == 0 and queue(limited) == []
