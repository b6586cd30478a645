"""Preempted in the grace time: started once more, whatever Slurm makes of a job that ends in it
(slurm/query/preemption.py).

The cluster tests are the same for every version of Slurm; `make test-debian13` runs them under 24.11.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.directory import Run
from slurm.query import current_job, preemption
from slurm.query.current_job import JobInfo, parse_job_info
from slurm.supervise.attempt_end import read_progress_marker
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.slurm.query.test_causes import close, leave, shown, silent
from tests.support.cluster_runs import (
    get_job_id,
    has_evaluation,
    list_event_names,
    preempt_all_nodes,
    run_submit,
    wait_for,
)
from tests.support.tiny import make_run, slow_down_steps, write_config

cluster = cluster_fixture(accounting=True, grace=20)  # a job that ends with 0 later than that is a TIMEOUT for 22.05

pytestmark = pytest.mark.timeout(900)

NODES = ("stages.train.nodes=2", "stages.train.tasks_per_node=1")
IN_GRACE = replace(shown(preempt="2026-11-21T05:42:25"), partition="low", qos="normal")


# -- the decision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "mode", "more", "leaves"),
    [
        ("22.05.8", "REQUEUE", {}, False),
        ("23.11.10", "REQUEUE", {}, False),
        ("24.05.0", "REQUEUE", {}, True),
        ("24.11.5", "REQUEUE", {}, True),
        ("24.11.5", "GANG,REQUEUE", {}, True),
        ("25.05.0-0rc1", "REQUEUE", {}, True),
        ("26.05.4", "REQUEUE", {}, True),
        ("24.11.5", "CANCEL", {}, False),
        ("24.11.5", "", {}, False),  # nobody said
        ("", "REQUEUE", {}, False),
        ("24.11.5", "REQUEUE", {"is_preempted": False}, False),
        ("24.11.5", "REQUEUE", {"may_requeue": False}, False),
        ("24.11.5", "REQUEUE", {"restarts": 2}, True),
        ("24.11.5", "REQUEUE", {"restarts": 3}, False),  # the fourth such end is kept, the fifth holds the job
    ],
)
def test_who_puts_a_preempted_job_back(version: str, mode: str, more: dict[str, int], leaves: bool) -> None:
    config = {"SLURM_VERSION": version, "MaxBatchRequeue": "5"}
    facts = replace(IN_GRACE, **more)  # type: ignore[arg-type]
    assert preemption.should_exit_to_requeue(config, mode, facts) == leaves
    if not more:
        assert not preemption.should_exit_to_requeue({**config, "MaxBatchRequeue": "2"}, mode, facts)


def slurm_is(monkeypatch: pytest.MonkeyPatch, version: str, by: str = "preempt/partition_prio") -> None:
    """Let a controller of this version answer."""

    def call(*command: str) -> str | None:
        if command[:2] == ("scontrol", "--oneliner"):
            return f"PartitionName={command[-1]} PreemptMode={'REQUEUE' if command[-1] == 'low' else 'CANCEL'}"
        assert command[0] == "sacctmgr"
        return {"normal": "cluster\n", "scavenger": "requeue\n"}.get(command[5])

    config = {"SLURM_VERSION": version, "PreemptType": by, "PreemptMode": "REQUEUE"}
    monkeypatch.setattr(preemption, "read_slurm_config", lambda: config)
    monkeypatch.setattr(preemption, "run_slurm_command", call)


@pytest.mark.parametrize(
    ("by", "partition", "qos", "leaves"),
    [
        ("preempt/partition_prio", "low", "", True), ("preempt/partition_prio", "gone", "", False),
        ("preempt/qos", "gone", "normal", True), ("preempt/qos", "gone", "scavenger", True),
        ("preempt/qos", "low", "unknown", False), ("preempt/none", "low", "normal", False),
    ],
)  # fmt: skip
def test_the_mode_is_that_of_the_partition_or_the_qos(
    monkeypatch: pytest.MonkeyPatch, by: str, partition: str, qos: str, leaves: bool
) -> None:
    slurm_is(monkeypatch, "24.11.5", by)
    facts = replace(IN_GRACE, partition=partition, qos=qos)
    assert preemption.is_requeued_on_exit(facts, None) == leaves
    assert not preemption.is_requeued_on_exit(facts, "n3"), "its list of nodes can only be changed after a requeue"


@pytest.mark.parametrize(
    ("version", "facts", "exclude", "asked"),
    [
        ("22.05.8", IN_GRACE, None, ["requeue"]),
        ("24.11.5", IN_GRACE, None, []),
        ("24.11.5", IN_GRACE, "n1", ["requeue"]),
        ("24.11.5", shown(), None, ["requeue"]),
    ],
)
def test_a_supervisor_leaves_or_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, facts: JobInfo, exclude: str | None,
    asked: list[str],
) -> None:  # fmt: skip
    run = Run.create(load_config(write_config(tmp_path)))
    slurm_is(monkeypatch, version)
    monkeypatch.setattr(current_job, "excluded_nodes_at_requeue", lambda *words: exclude)
    assert leave(run, [facts], monkeypatch) == (ExitCode.OUT_OF_MEMORY, asked)
    told = run.read_events("train")[-1]
    assert told["event"] == "requeued" and told.get("by") == (None if asked else "slurm")


@pytest.mark.parametrize(("flag", "batch"), [(0, False), (1, True), (2, True), (5, True)])
def test_a_batch_job_that_slurm_put_back_is_one_still(flag: int, batch: bool) -> None:
    """`BatchFlag` counts those requeues, as seen on 24.11."""
    assert parse_job_info(f"JobId=1\n   JobState=RUNNING\n   Requeue=1 Restarts=1 BatchFlag={flag}").is_batch == batch


ENDED = [
    ("done", {"exit_code": 0}, ExitCode.DONE),
    ("stopped", {"cause": "stop file", "exit_code": int(ExitCode.STOPPED)}, ExitCode.STOPPED),
    ("failed", {"cause": "crashed", "exit_code": int(ExitCode.CRASHED)}, ExitCode.CRASHED),
]


@pytest.mark.parametrize(("event", "more", "code"), ENDED)
def test_what_slurm_alone_puts_back_after_its_end_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, more: dict[str, object], code: ExitCode
) -> None:
    slurm_is(monkeypatch, "24.11.5")
    run = silent(tmp_path / "grace", (event, {**more, "in_grace": True}))
    assert close(run, "6", 1)[::2] == (code, []), "nothing new is told"
    assert close(run, "6", 2)[0] is None, "a person put it back again"
    slurm_is(monkeypatch, "22.05.8")
    assert close(run, "6", 1)[0] is None, "a person, for this Slurm does not"
    slurm_is(monkeypatch, "24.11.5")
    undisturbed = silent(tmp_path / "calm", (event, more))
    assert close(undisturbed, "6", 1)[0] is None, "a person, for it was never preempted"
    earlier = silent(tmp_path / "earlier", ("preempted", {"cause": "preempted"}), ("requeued", {"cause": "preempted"}))
    earlier.event(
        "started",
        "train",
        job_id="6",
        slurm_job="6",
        attempt=2,
        restarts=1,
        standing=read_progress_marker(earlier, "train"),
    )
    earlier.event(event, "train", job_id="6", **more)
    assert close(earlier, "6", 2)[::2] == (code, []), "the mark of the first preemption is still there"
    if event != "done":
        earlier.event("resumed")
        assert close(earlier, "6", 2)[0] is None, "a person said go on"


# -- on a real Slurm -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def submitted(folder: Path, data: Path, cluster: Cluster, steps: int, seconds: float, asks: bool = False) -> Path:
    """A training of slow steps on this data; `asks`: it never leaves the requeue to Slurm."""
    cluster.clear()  # of what a test before left that failed
    config = write_config(folder, steps=steps)
    run = slow_down_steps(Run.create(load_config(config, NODES)), seconds)
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    if asks:
        rule = run.code_dir / "slurm/query/preemption.py"
        text = rule.read_text()
        assert text.count("MIN_REMAINING_EXITS = 2\n") == 1
        rule.write_text(text.replace("MIN_REMAINING_EXITS = 2\n", "MIN_REMAINING_EXITS = 99\n"))
    done = run_submit(cluster, folder, str(config), *NODES)
    assert done.returncode == 0, done.stdout + done.stderr
    return run.path


def steps_of(run: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(run / "metrics.jsonl")]


def at_rest(cluster: Cluster) -> None:
    wait_for("an empty queue", lambda: not cluster.run(["squeue", "-h"], timeout=60).stdout.strip(), 120)


def accounted(cluster: Cluster, job: str) -> tuple[str, str]:
    """The state and exit code of a job's last start, as accounting has them a moment after its end."""
    command = ["sacct", "-n", "-P", "-X", "-j", job, "-o", "State,ExitCode"]
    wait_for(
        "accounting", lambda: cluster.output(command).split("|")[0] not in ("RUNNING", "PENDING", "COMPLETING"), 30
    )
    state, code = cluster.output(command).split("|")
    return state, code


@pytest.mark.parametrize(("times", "asks"), [(2, False), (1, True), pytest.param(6, False, marks=pytest.mark.long)])
def test_a_preempted_training_starts_once_more_each_time(
    tmp_path: Path, data: Path, cluster: Cluster, times: int, asks: bool
) -> None:
    """It must not even where a requeue that it asked for in its grace time lets Slurm start it after its end."""
    run = submitted(tmp_path, data, cluster, 8 * times + 8, 0.5, asks)
    for number in range(times):
        wait_for(
            "some steps",
            lambda: len(steps_of(run)) >= 8 * number + 4 and list_event_names(run, "train")[-1] != "requeued",  # noqa: B023
        )
        preempt_all_nodes(cluster)
        wait_for("the requeue", lambda: list_event_names(run, "train").count("requeued") > number, 60)  # noqa: B023
        wait_for("the next start", lambda: list_event_names(run, "train").count("started") > number + 1, 120)  # noqa: B023
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    at_rest(cluster)
    told = list_event_names(run, "train")
    assert (told.count("started"), told.count("requeued"), told.count("done")) == (times + 1, times, 1), told
    assert steps_of(run) == list(range(1, 8 * times + 9))
    assert accounted(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


@pytest.mark.long
def test_a_training_that_is_still_at_work_when_its_grace_time_ends(
    tmp_path: Path, data: Path, cluster: Cluster
) -> None:
    """Slurm ends it and puts it back: the mark stays, too."""
    run = submitted(tmp_path, data, cluster, 2, 40.0)
    wait_for("its work", lambda: "ready" in list_event_names(run, "train"))
    preempt_all_nodes(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 300)
    at_rest(cluster)
    train = Run.open(run).read_events("train")
    told = [e["event"] for e in train if e["event"] in ("started", "done", "requeued")]
    assert told == ["started", "requeued", "started", "done"], told
    assert accounted(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


def test_a_training_that_ends_in_its_grace_time_does_not_start_again(
    tmp_path: Path, data: Path, cluster: Cluster
) -> None:
    run = submitted(tmp_path, data, cluster, 4, 4.0)
    wait_for("its last step", lambda: len(steps_of(run)) == 3)
    preempt_all_nodes(cluster)
    wait_for("the evaluation", lambda: has_evaluation(run), 150)
    at_rest(cluster)
    train = Run.open(run).read_events("train")
    assert [e["event"] for e in train if e["event"] in ("started", "done", "requeued")] == ["started", "done"]
    assert next(e for e in train if e["event"] == "done")["in_grace"], "the test came too late"
    assert accounted(cluster, get_job_id(run, "train")) == ("COMPLETED", "0:0")


def test_a_training_that_a_person_stops_in_its_grace_time_does_not_start_again(
    tmp_path: Path, data: Path, cluster: Cluster
) -> None:
    run = submitted(tmp_path, data, cluster, 40, 4.0)
    wait_for("a step", lambda: steps_of(run))
    preempt_all_nodes(cluster)
    (run / "stop").touch()
    wait_for("its end", lambda: "stopped" in list_event_names(run, "train"), 60)
    at_rest(cluster)
    train = Run.open(run).read_events("train")
    assert [e["event"] for e in train if e["event"] in ("started", "requeued", "stopped")] == ["started", "stopped"]
    assert next(e for e in train if e["event"] == "stopped")["in_grace"], "it had left before it was preempted"
    assert accounted(cluster, get_job_id(run, "train")) == ("FAILED", f"{int(ExitCode.STOPPED)}:0")
    assert not has_evaluation(run)


def test_a_requeue_that_an_administrator_asks_for_is_not_called_a_preemption(
    tmp_path: Path, data: Path, cluster: Cluster
) -> None:
    run = submitted(tmp_path, data, cluster, 60, 0.5)
    wait_for("some steps", lambda: len(steps_of(run)) >= 3)
    cluster.output(["scontrol", "requeue", get_job_id(run, "train")])
    wait_for("the requeue", lambda: "requeued" in list_event_names(run, "train"), 60)
    told = Run.open(run).read_events("train")
    assert [e["cause"] for e in told if e["event"] in ("stopped", "preempted", "failed")] == ["requeued"], told
    shown = run_submit(cluster, tmp_path, "status", str(run)).stdout
    assert re.search(r"^train \w+( \(\w+\))?, requeued at step \d+ \(1 attempt\)$", shown, re.M), shown
    wait_for("the next start", lambda: list_event_names(run, "train").count("started") == 2, 120)
    preempt_all_nodes(cluster)
    wait_for("the preemption", lambda: "preempted" in list_event_names(run, "train"), 60)
    shown = run_submit(cluster, tmp_path, "status", str(run)).stdout
    assert re.search(r"^train \w+.* after preemption .*\(2 attempts\)$", shown, re.M), shown
    cluster.clear()
