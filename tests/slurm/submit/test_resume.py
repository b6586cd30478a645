"""What `resume` submits, ties together and replaces, with a Slurm that only pretends; and on a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from pipeline.config.read import ConfigError, load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run, list_points
from slurm.query import capacity, run_jobs, slurm_commands
from slurm.query.job_states import JobState, RecordedJob
from slurm.query.status import StatusPoller
from slurm.submit import chain, sbatch
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import (
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    run_submit,
    wait_for,
)
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import make_run, write_config

cluster = cluster_fixture()

SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01]}}"


class Queue:
    """A Slurm that takes every job; `states` says how they stand, `after` what each waits for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[str, JobState] = {}
        self.after: dict[str, str] = {}
        monkeypatch.setattr(run_jobs, "find_jobs", self.look_up)
        monkeypatch.setattr(slurm_commands, "run_slurm_command", self.call)
        monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "pretended")
        monkeypatch.setattr(capacity, "cluster_settings", dict)
        monkeypatch.setattr(sbatch, "_write_submission", self.write)
        monkeypatch.setattr(sbatch, "_call_sbatch", lambda *_: max(self.after))

    def look_up(
        self, asked: Iterable[RecordedJob], comments: Set[str], kept: dict[RecordedJob, JobState] | None = None
    ) -> tuple[dict[RecordedJob, JobState], list[JobState]]:
        return {one: self.states[one.job_id] for one in asked}, []

    def write(
        self, run: Run, stage: str, key: str, after: Sequence[str], kind: str, targets: Sequence[Run]
    ) -> tuple[Path, list[str]]:
        array = str(100 + len(self.after))
        self.after[array] = f"{kind}:{':'.join(after)}" if after else ""
        ids = [f"{array}_{n}" for n in range(len(targets))] if len(targets) > 1 and targets[0] is not run else [array]
        for job in ids:
            self.set(job, "PENDING", "Dependency" if after else "Priority")
        script = run.stage_dir(stage) / f"{key}_submission.sh"
        script.touch()
        return script, []

    def set(self, job: str, state: str, reason: str = "None") -> None:
        self.states[job] = JobState(job, state, reason)

    def call(self, *words: str) -> str:
        assert words[0] == "scancel"
        for job in words[1:]:
            self.set(job, "CANCELLED")
        return ""

    def resume(self, run: Run) -> str:
        """What it prints, without a real one's names of runs."""
        console = Console(width=200, record=True)
        write_event(run, "resumed")
        chain.submit_chain(run, console, retries_failed=True)
        return console.export_text()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Its shards are done."""
    return make_run(tmp_path)


def submitted(run: Run, stage: str, job: str, kind: str = "afterok", *after: str, **more: object) -> None:
    write_event(run, "submitted", stage, job_id=job, executor="slurm", after=after, kind=kind, **more)


def test_an_evaluation_of_one_checkpoint_is_not_the_last_one(run: Run, queue: Queue) -> None:
    submitted(run, "train", "1")
    submitted(run, "evaluate", "7", step=7)
    queue.set("1", "FAILED")
    queue.set("7", "RUNNING")
    queue.resume(run)
    assert queue.after == {"100": "", "101": "afterok:100"}, "a training, and the evaluation behind it"
    assert queue.states["7"].state == "RUNNING"


def test_an_evaluation_waits_for_the_training_and_not_for_its_successor(run: Run, queue: Queue) -> None:
    submitted(run, "train", "1")
    submitted(run, "train", "2", "afternotok", "1")
    queue.set("1", "RUNNING")
    queue.set("2", "PENDING", "Dependency")
    assert "train     job 1 running" in queue.resume(run)
    assert queue.after == {"100": "afterok:1"}


@pytest.mark.parametrize(
    ("state", "last", "facts", "ends"),
    [
        ("RUNNING", "stopping", {"by": "cancelled"}, True),
        ("RUNNING", "stopping", {"by": "stop file"}, True),
        ("RUNNING", "failed", {"cause": "user_error"}, True),
        ("COMPLETING", "started", {}, True),
        ("RUNNING", "stopping", {"by": "SIGUSR2", "cause": "preempted"}, False),
        ("COMPLETING", "requeued", {"by": "slurm"}, False),
        ("PENDING", "preempted", {"cause": "preempted"}, False),
        ("RUNNING", "started", {}, False),
    ],
)
def test_a_job_that_still_saves_has_another_one_behind_it(
    run: Run, queue: Queue, state: str, last: str, facts: dict[str, str], ends: bool
) -> None:
    submitted(run, "train", "1")
    submitted(run, "evaluate", "2", "afterok", "1")
    write_event(run, "started", "train", job_id="1")
    write_event(run, last, "train", job_id="1", **facts)
    queue.set("1", state)
    queue.set("2", "PENDING", "Dependency")
    shown = queue.resume(run)
    assert queue.states["1"].state == state, "it saves"
    if ends:
        assert "train     job 100, after 1" in shown and queue.after == {"100": "afterany:1", "101": "afterok:100"}
        assert queue.states["2"].state == "CANCELLED", "it waits for the job that ends"
    else:
        assert not queue.after and queue.states["2"].state == "PENDING"


def test_points_wait_for_new_shards_and_behind_those_that_still_save(tmp_path: Path, queue: Queue) -> None:
    run = Run.create(load_config(write_config(tmp_path), [SWEEP]))
    queue.resume(run)
    assert list(queue.after.values()) == ["", "afterok:100", "afterany:101", "afterok:102", "aftercorr:103"]
    queue.set("100", "FAILED")
    queue.set("101", "PENDING", "DependencyNeverSatisfied")
    assert "0 done, 0 under way" in queue.resume(run), "for Slurm the rest only waits, as before"
    assert list(queue.after.values())[5:] == ["", "afterok:105", "afterany:106", "afterok:107", "aftercorr:108"]
    old = [state.state for job, state in queue.states.items() if job.split("_")[0] in ("101", "102", "103", "104")]
    assert old == ["CANCELLED"] * 6
    assert "0 done, 2 under way" in queue.resume(run), "once is enough"


def test_points_that_were_stopped_are_submitted_behind_their_end(tmp_path: Path, run: Run, queue: Queue) -> None:
    swept = make_run(tmp_path, "swept", (SWEEP,), run.data_dir)
    queue.resume(swept)
    first, second = list_points(swept)
    for job, point in (("100_0", first), ("100_1", second)):
        write_event(point, "started", "train", job_id=job)
        queue.set(job, "RUNNING")
    write_event(first, "stopping", "train", job_id="100_0", by="cancelled")
    assert "0 done, 1 under way" in queue.resume(swept)
    assert list(queue.after.values())[2:] == ["afterany:100_0", "afterok:102"]
    assert queue.states["101_0"].state == "CANCELLED" and queue.states["101_1"].state == "PENDING"


def test_points_are_arrays_as_far_as_they_wait_for_one(tmp_path: Path, run: Run, queue: Queue) -> None:
    """One trains on, two are submitted again: their evaluations are tied to them task by task."""
    swept = make_run(tmp_path, "swept", ("sweep={grid: {optimizer.lr: [0.001, 0.01, 0.1]}}",), run.data_dir)
    queue.resume(swept)
    assert list(queue.after.values()) == ["", "aftercorr:100"]
    queue.set("100_0", "RUNNING")
    for job in ("100_1", "100_2", "101_0", "101_1", "101_2"):
        queue.set(job, "FAILED")
    assert "3 points: 0 done, 0 under way" in queue.resume(swept), "the first one lacks its evaluation"
    assert list(queue.after.values())[2:] == ["", "afterok:100_0", "aftercorr:102"]
    submitted = [
        e["job_id"] for point in list_points(swept) for e in read_event_lines(point, "evaluate", "submitted")[1:]
    ]
    assert submitted == ["103", "104_0", "104_1"] and queue.states["100_0"].state == "RUNNING"
    assert "0 done, 3 under way" in queue.resume(swept) and len(queue.after) == 5


def test_everything_that_runs_is_found(tmp_path: Path, run: Run, queue: Queue) -> None:
    """Tasks of the array of shard have locks of their own, and so have the points of a sweep, which share the code."""
    swept = make_run(tmp_path, "swept", (SWEEP,), run.data_dir)
    assert run_jobs.list_running_work(swept) == []
    queue.resume(swept)
    assert run_jobs.list_running_work(swept) == [], "what waits does not run"
    queue.set("100_1", "RUNNING")
    assert run_jobs.list_running_work(swept) == ["train (job 100_1)"], "its supervisor has no lock yet"
    lock = list_points(swept)[1].lock_stage("train")
    assert lock is not None and run_jobs.list_running_work(swept) == [f"train of {list_points(swept)[1].name}"]
    os.close(lock)
    lock = run.lock_stage("shard", 1)
    assert lock is not None and run_jobs.list_running_work(run) == [f"shard of {run.name}"]
    done = run_submit(None, tmp_path, "resume", "runs/tiny", "--update-code")
    assert done.returncode == ExitCode.USER_ERROR and "shard of runs/tiny is running" in done.stderr
    os.close(lock)
    assert run_jobs.list_running_work(run) == []


def test_a_second_resume_builds_on_what_the_first_one_changed(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path)))
    (run.checkpoints_dir / "step-00000007").mkdir()  # else fewer would do
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "resume", str(run.path), "train.steps=40"]
    with run.lock_exclusively():
        second = subprocess.Popen([*command, "--executor=local"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with suppress(subprocess.TimeoutExpired):
            second.wait(4)  # long enough to have read the config of 30 steps
        run.apply_overrides(["train.steps=50"])
    try:
        errors = second.communicate(timeout=240)[1].decode()
    finally:
        second.kill()
    assert second.returncode == ExitCode.USER_ERROR and "train.steps: 50 → 40: resume cannot change it" in errors
    assert Run.open(run.path).config.train.steps == 50


def test_a_sweep_and_its_points_are_one_question(
    tmp_path: Path, run: Run, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = make_run(tmp_path, "swept", (SWEEP,), run.data_dir)
    queue.resume(swept)
    asked: list[set[str]] = []

    def look_up(
        jobs: Iterable[RecordedJob], comments: Set[str], kept: dict[RecordedJob, JobState]
    ) -> tuple[dict[RecordedJob, JobState], list[JobState]]:
        found = {job: queue.states[job.job_id] for job in jobs}
        asked.append({job.job_id for job in found})
        return found, []

    monkeypatch.setattr(run_jobs, "find_jobs", look_up)
    poller = StatusPoller(swept)
    poller.poll()
    assert asked == [{"100_0", "100_1", "101_0", "101_1"}] and poller.has_active_point


def test_a_wrong_point_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    write_config(tmp_path)
    for more in ([], ["--dry-run"]):
        done = run_submit(None, tmp_path, "tiny.yaml", "sweep={grid: {optimizer.lrr: [1, 2]}}", *more)
        assert done.returncode == ExitCode.USER_ERROR and "point 000 (optimizer.lrr=1)" in done.stderr, done.stderr
    assert not (tmp_path / "runs").exists()
    overrides = ["model.kv_heads=4", "sweep={grid: {model.kv_heads: [4, 2]}}", "stages.train.tasks_per_node=4"]
    run = Run.create(load_config(tmp_path / "tiny.yaml", overrides))
    with pytest.raises(ConfigError, match=r"point 001 .*kv_heads"):
        run.apply_overrides(["parallel.tensor=4"])
    assert not run.changes_file.exists() and len(list_points(run)) == 2


@pytest.mark.timeout(900)
def test_new_values_reach_what_waits_and_a_save_is_waited_for(tmp_path: Path, run: Run, cluster: Cluster) -> None:
    config = write_config(tmp_path, "held", steps=60)
    held = ("stages.train.nodes=4", "site.sbatch={hold: true}")
    path = create_slow_run(tmp_path, config, held)
    (path / "data").rmdir()
    (path / "data").symlink_to(run.data_dir)
    trainer = path / "code/pipeline/train/trainer.py"  # a save takes long enough to come in between
    save = "        if skip_reason is None:\n            self.save(step)\n"
    assert trainer.read_text().count(save) == 1
    slow = save.replace("self.save", "time.sleep(4)\n            self.save")
    trainer.write_text(trainer.read_text().replace(save, slow))
    assert run_submit(cluster, tmp_path, "held.yaml", *held).returncode == 0
    old = [get_job_id(path, stage) for stage in ("train", "evaluate")]
    done = run_submit(cluster, tmp_path, "resume", "runs/held", "stages.train.nodes=2", "site.sbatch={hold: false}")
    assert done.returncode == 0, done.stdout + done.stderr
    job = get_job_id(path, "train")
    assert [cluster.job_state(one) for one in old] == ["CANCELLED"] * 2 and job not in old
    wait_for("step 3", lambda: len(list(read_jsonl(path / "metrics.jsonl"))) >= 3)
    done = run_submit(cluster, tmp_path, "resume", "runs/held", "stages.train.nodes=4")
    assert done.returncode == ExitCode.USER_ERROR and "cancel runs/held" in done.stderr
    assert Run.open(path).config.stages.train.nodes == 2
    assert run_submit(cluster, tmp_path, "cancel", "runs/held").returncode == 0
    wait_for("the save", lambda: "stopping" in list_event_names(path, "train"))
    trainer.write_text(trainer.read_text().replace("time.sleep(0.5)", "pass"))  # fast from here on
    done = run_submit(cluster, tmp_path, "resume", "runs/held")
    assert f"after {job}\n" in done.stdout, done.stdout + done.stderr
    wait_for("the evaluation", lambda: has_evaluation(path))
    wait_for("an empty queue", lambda: not cluster.output(["squeue", "-h"]))
    assert list_event_names(path, "train").count("started") == 2 and "stopped" in list_event_names(path, "train")
    assert [line["step"] for line in read_jsonl(path / "metrics.jsonl")] == list(range(1, 61))


@pytest.mark.timeout(900)
def test_a_sweep_whose_first_job_died_is_mended(tmp_path: Path, cluster: Cluster) -> None:
    write_config(tmp_path)
    small = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", "train.steps=6")
    setup = f"site.setup=[test -e {tmp_path}/mended || exit 9]"
    assert run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *small, setup).returncode == 0
    path = tmp_path / "runs/tiny"
    wait_for("the death", lambda: cluster.job_state(get_job_id(path, "prepare")) == "FAILED")
    (tmp_path / "mended").touch()
    done = run_submit(cluster, tmp_path, "resume", "runs/tiny")
    assert "0 done, 0 under way" in done.stdout, done.stdout + done.stderr
    wait_for("both evaluations", lambda: all(map(has_evaluation, (path / "points/000", path / "points/001"))))
    wait_for("an empty queue", lambda: not cluster.output(["squeue", "-h"]))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sweep", [(), (SWEEP,)], ids=["chain", "sweep"])
def test_a_corrected_config_replaces_what_waits(tmp_path: Path, cluster: Cluster, sweep: tuple[str, ...]) -> None:
    write_config(tmp_path, steps=6)
    small = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", *sweep)
    held = run_submit(cluster, tmp_path, "tiny.yaml", *small, "optimizer.weight_decay=0.5", "site.sbatch={hold: true}")
    assert held.returncode == 0, held.stdout + held.stderr
    waiting = set(cluster.output(["squeue", "-h", "--format=%A"]).split())
    done = run_submit(cluster, tmp_path, "tiny.yaml", *small, "optimizer.weight_decay=0.25")
    assert "corrected optimizer.weight_decay: 0.5 → 0.25" in done.stdout, done.stdout + done.stderr
    assert len(waiting) >= 4 and {*" ".join(map(cluster.job_state, waiting)).split()} == {"CANCELLED"}
    path = tmp_path / "runs/tiny"
    trained = [path / "points/000", path / "points/001"] if sweep else [path]
    wait_for("the evaluation", lambda: all(map(has_evaluation, trained)))
    assert {Run.open(run).config.optimizer.weight_decay for run in trained} == {0.25}
    wait_for("an empty queue", lambda: not cluster.output(["squeue", "-h"]))
