"""Test `drill`: real faults in a copy of a run, on this machine and on a real Slurm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.run.directory import Run
from slurm.drill.faults import FAULTS
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import run_submit
from tests.support.edits import replace_in_file
from tests.support.ranks import find_rank_processes
from tests.support.tiny import make_run, slow_down_steps

cluster = cluster_fixture(grace=5)

pytestmark = pytest.mark.timeout(900)

OPTIONS = ("train.steps=2000", "stages.train.tasks_per_node=2", "--every", "4", "--hang-s", "8")


@pytest.fixture
def prepared_run(tmp_path: Path) -> Run:
    """Return a run for which the prepare and shard stages are done."""
    return make_run(tmp_path)


def run_drill(run: Run, *arguments: str, cluster: Cluster | None = None) -> subprocess.CompletedProcess[str]:
    """Run `submit.py drill`."""
    return run_submit(cluster, run.path.parent, "drill", str(run.path), *OPTIONS, *arguments)


def read_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of each fault in the table of a page, by the name of the fault."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.mark.story
def test_a_run_on_this_machine_survives_the_faults_of_a_drill(prepared_run: Run) -> None:
    events_before = prepared_run.events_file.read_bytes()
    faults = "kill-rank,remove-checkpoint-file,full-disk,requeue"
    result = run_drill(prepared_run, "--executor", "local", "--faults", faults)
    assert result.returncode == 0, result.stdout + result.stderr
    copy = prepared_run.path.with_name(f"{prepared_run.path.name}-drill")
    page = (copy / "drill.md").read_text()
    assert page.strip() in result.stdout
    rows = read_rows(page)
    assert {name: cells[0] for name, cells in rows.items()} == {
        "kill-rank": "crashed", "remove-checkpoint-file": "crashed", "full-disk": "storage"
    }  # fmt: skip
    assert all(float(cells[2]) > 0 for cells in rows.values())
    assert "requeue** was not caused" in page
    assert prepared_run.events_file.read_bytes() == events_before
    assert not find_rank_processes(copy)
    again = run_drill(prepared_run, "--executor", "local")
    assert again.returncode == 2 and "error[drill.exists]" in again.stderr


@pytest.mark.story
def test_a_drill_finds_that_a_restart_changes_the_result(prepared_run: Run) -> None:
    """The run's copy of the code has a defect: after a restart, the learning rate is another one."""
    replace_in_file(
        prepared_run.code_dir / "pipeline/train/trainer.py",
        "        set_learning_rate(engine.optimizer, lr)\n",
        "        is_restarted = self.run.events_file.read_text().count('\"started\"') > 1\n"
        "        set_learning_rate(engine.optimizer, lr * (1.01 if is_restarted else 1.0))\n",
    )
    result = run_drill(prepared_run, "--executor", "local", "--faults", "kill-rank")
    assert result.returncode == 1, result.stdout + result.stderr
    copies = [
        prepared_run.path.with_name(f"{prepared_run.path.name}-{suffix}") for suffix in ("drill", "drill-reference")
    ]
    assert "differ" in (copies[0] / "drill.md").read_text()
    assert all(Run.open(copy).lock_holder("train") is None for copy in copies)


def test_an_unknown_fault_and_a_run_without_data_are_errors(tmp_path: Path, prepared_run: Run) -> None:
    unknown = run_drill(prepared_run, "--faults", "kill-rank,earthquake")
    assert unknown.returncode == 2 and "error[drill.unknown_fault]" in unknown.stderr and "earthquake" in unknown.stderr
    for file in prepared_run.data_dir.iterdir():
        file.unlink() if file.is_file() else None
    empty = run_drill(prepared_run)
    assert empty.returncode == 2 and "error[drill.not_prepared]" in empty.stderr


@pytest.mark.story
@pytest.mark.parametrize(
    "faults",
    [
        [name for name in FAULTS if name != "time-limit"],
        pytest.param(list(FAULTS), marks=pytest.mark.long),  # A time limit takes minutes.
    ],
    ids=["without time limit", "all"],
)
def test_a_run_on_slurm_survives_the_faults_of_a_drill(prepared_run: Run, cluster: Cluster, faults: list[str]) -> None:
    slow_down_steps(prepared_run, 0.1)
    options = ["--executor", "slurm", "stages.train.nodes=2", "stages.train.time=00:10:00", "site.signal_s=10"]
    result = run_drill(prepared_run, *options, "--faults", ",".join(faults), cluster=cluster)
    assert result.returncode == 0, result.stdout + result.stderr
    copy = prepared_run.path.with_name(f"{prepared_run.path.name}-drill")
    rows = read_rows((copy / "drill.md").read_text())
    assert list(rows) == faults
    continuations = {name: cells[1] for name, cells in rows.items()}
    in_place = ("kill-rank", "stop-rank", "damage-checkpoint", "remove-checkpoint-file")
    assert {continuations[name] for name in in_place} == {"restarted in place"}
    requeued = [name for name in ("signal", "requeue", "time-limit") if name in faults]
    assert {continuations[name] for name in requeued} == {"requeued"}
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    assert len({event["job_id"] for event in events if event["event"] == "submitted"}) == 2  # full-disk needs a resume
    cluster.wait_idle()
