"""Test which jobs `resume` submits and replaces, and their dependencies.

Most tests replace the functions that call Slurm. The tests with the fixture `cluster` use a real Slurm.
"""

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
    count_steps,
    create_slow_run,
    get_job_id,
    has_evaluation,
    list_event_names,
    run_submit,
    wait_for,
    wait_for_empty_queue,
)
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import make_run, write_config

cluster = cluster_fixture()

SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01]}}"


class FakeQueue:
    """A queue in memory, which replaces the functions that call Slurm. It accepts every job.

    Attributes:
        states: state of each job and array task, by ID. A test may change the states.
        dependencies: value of --dependency by job ID, in the order of submission; "" if there is none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states: dict[str, JobState] = {}
        self.dependencies: dict[str, str] = {}
        monkeypatch.setattr(run_jobs, "find_jobs", self.find_jobs)
        monkeypatch.setattr(slurm_commands, "run_slurm_command", self.run_slurm_command)
        monkeypatch.setattr(slurm_commands, "cluster_name", lambda: "fake")
        monkeypatch.setattr(capacity, "cluster_settings", dict)
        monkeypatch.setattr(sbatch, "_write_submission", self.write_submission)
        # sbatch returns the ID of the newest job, which `write_submission` has added
        monkeypatch.setattr(sbatch, "_call_sbatch", lambda *_: max(self.dependencies))

    def find_jobs(
        self, jobs: Iterable[RecordedJob], comments: Set[str], final_states: dict[RecordedJob, JobState] | None = None
    ) -> tuple[dict[RecordedJob, JobState], list[JobState]]:
        """Return the states of the jobs. Replaces `slurm.query.job_states.find_jobs`."""
        return {job: self.states[job.job_id] for job in jobs}, []

    def write_submission(
        self, run: Run, stage: str, key: str, after: Sequence[str], dependency_type: str, targets: Sequence[Run]
    ) -> tuple[Path, list[str]]:
        """Add the job to `dependencies` and `states`, and write an empty script. Replaces `_write_submission`."""
        job_id = str(100 + len(self.dependencies))
        self.dependencies[job_id] = f"{dependency_type}:{':'.join(after)}" if after else ""
        is_array = len(targets) > 1 and targets[0] is not run
        for task_id in [f"{job_id}_{task}" for task in range(len(targets))] if is_array else [job_id]:
            self.set_state(task_id, "PENDING", "Dependency" if after else "Priority")
        script = run.stage_dir(stage) / f"{key}_submission.sh"
        script.touch()
        return script, []

    def set_state(self, job_id: str, state: str, reason: str = "None") -> None:
        """Set the state that Slurm reports for a job or an array task."""
        self.states[job_id] = JobState(job_id, state, reason)

    def run_slurm_command(self, *command: str) -> str:
        """Cancel jobs as scancel does. No other command is expected."""
        assert command[0] == "scancel"
        for job_id in command[1:]:
            self.set_state(job_id, "CANCELLED")
        return ""

    def resume(self, run: Run) -> str:
        """Submit jobs for the unfinished stages of a run, as `submit.py resume` does. Return the printed output."""
        console = Console(width=200, record=True)
        write_event(run, "resumed")
        chain.submit_chain(run, console, resubmit_failed=True)
        return console.export_text()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeQueue:
    """Replace Slurm by a FakeQueue and return the queue."""
    return FakeQueue(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run for which the prepare and shard stages are done."""
    return make_run(tmp_path)


def write_submitted(
    run: Run, stage: str, job_id: str, dependency_type: str = "afterok", *after: str, **fields: object
) -> None:
    """Write the event `submitted` of a job that depends on the jobs `after`."""
    fields |= {"job_id": job_id, "after": after, "kind": dependency_type}
    write_event(run, "submitted", stage, executor="slurm", **fields)


def test_resume_submits_evaluate_although_a_checkpoint_is_being_evaluated(run: Run, queue: FakeQueue) -> None:
    """Job 7 evaluates only the checkpoint of step 7. The chain still needs a job that evaluates the last checkpoint."""
    write_submitted(run, "train", "1")
    write_submitted(run, "evaluate", "7", step=7)
    queue.set_state("1", "FAILED")
    queue.set_state("7", "RUNNING")
    queue.resume(run)
    assert queue.dependencies == {"100": "", "101": "afterok:100"}
    assert queue.states["7"].state == "RUNNING"


def test_evaluate_depends_on_the_train_job_and_not_on_its_successor(run: Run, queue: FakeQueue) -> None:
    """Train job 1 is running, and job 2 is its successor. Only the evaluate job is missing."""
    write_submitted(run, "train", "1")
    write_submitted(run, "train", "2", "afternotok", "1")
    queue.set_state("1", "RUNNING")
    queue.set_state("2", "PENDING", "Dependency")
    assert "train     job 1 running" in queue.resume(run)
    assert queue.dependencies == {"100": "afterok:1"}


@pytest.mark.story
@pytest.mark.parametrize(
    ("state", "last_event", "fields", "is_ending"),
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
def test_resume_submits_a_job_after_one_that_is_about_to_end(
    run: Run, queue: FakeQueue, state: str, last_event: str, fields: dict[str, str], is_ending: bool
) -> None:
    """If train job 1 ends without a retry, `resume` submits a job that waits for it and replaces evaluate job 2."""
    write_submitted(run, "train", "1")
    write_submitted(run, "evaluate", "2", "afterok", "1")
    write_event(run, "started", "train", job_id="1")
    write_event(run, last_event, "train", job_id="1", **fields)
    queue.set_state("1", state)
    queue.set_state("2", "PENDING", "Dependency")
    output = queue.resume(run)
    assert queue.states["1"].state == state, "the job may still save a checkpoint"
    if is_ending:
        assert "train     job 100, after 1" in output
        assert queue.dependencies == {"100": "afterany:1", "101": "afterok:100"}
        assert queue.states["2"].state == "CANCELLED", "job 2 depends on the job that ends, so it must be replaced"
    else:
        assert not queue.dependencies and queue.states["2"].state == "PENDING"


def test_resume_replaces_the_chain_of_a_sweep_after_prepare_failed(tmp_path: Path, queue: FakeQueue) -> None:
    """The chain is prepare (100), two jobs of shard (101, 102), and the arrays of train (103) and evaluate (104)."""
    run = Run.create(load_config(write_config(tmp_path), [SWEEP]))
    queue.resume(run)
    assert list(queue.dependencies.values()) == ["", "afterok:100", "afterany:101", "afterok:102", "aftercorr:103"]
    queue.set_state("100", "FAILED")
    queue.set_state("101", "PENDING", "DependencyNeverSatisfied")
    assert "0 done, 0 active" in queue.resume(run), "pending jobs that can never start must not count as active"
    assert list(queue.dependencies.values())[5:] == ["", "afterok:105", "afterany:106", "afterok:107", "aftercorr:108"]
    old_ids = ("101", "102", "103", "104")
    old_states = [state.state for job_id, state in queue.states.items() if job_id.split("_")[0] in old_ids]
    assert old_states == ["CANCELLED"] * 6, "two jobs of shard, and two arrays of two tasks"
    assert "0 done, 2 active" in queue.resume(run), "a second `resume` must submit nothing"


def test_resume_submits_a_stopping_point_again_after_its_job(tmp_path: Path, run: Run, queue: FakeQueue) -> None:
    """A user cancelled the first point, and its task is about to end. The second point continues to train."""
    sweep = make_run(tmp_path, "sweep", (SWEEP,), run.data_dir)
    queue.resume(sweep)
    first_point, second_point = list_points(sweep)
    for task_id, point in (("100_0", first_point), ("100_1", second_point)):
        write_event(point, "started", "train", job_id=task_id)
        queue.set_state(task_id, "RUNNING")
    write_event(first_point, "stopping", "train", job_id="100_0", by="cancelled")
    assert "0 done, 1 active" in queue.resume(sweep)
    assert list(queue.dependencies.values())[2:] == ["afterany:100_0", "afterok:102"]
    assert queue.states["101_0"].state == "CANCELLED" and queue.states["101_1"].state == "PENDING"


def test_each_evaluation_depends_on_the_train_task_of_its_point(tmp_path: Path, run: Run, queue: FakeQueue) -> None:
    """The first point is still training, so its new evaluation depends on the running task.

    The other two points are submitted again as arrays, in which each evaluation depends on the train task of its point.
    """
    sweep = make_run(tmp_path, "sweep", ("sweep={grid: {optimizer.lr: [0.001, 0.01, 0.1]}}",), run.data_dir)
    queue.resume(sweep)
    assert list(queue.dependencies.values()) == ["", "aftercorr:100"]
    queue.set_state("100_0", "RUNNING")
    for task_id in ("100_1", "100_2", "101_0", "101_1", "101_2"):
        queue.set_state(task_id, "FAILED")
    assert "3 points: 0 done, 0 active" in queue.resume(sweep), "the first point needs a new evaluation"
    assert list(queue.dependencies.values())[2:] == ["", "afterok:100_0", "aftercorr:102"]
    new_evaluations = [
        line["job_id"] for point in list_points(sweep) for line in read_event_lines(point, "evaluate", "submitted")[1:]
    ]
    assert new_evaluations == ["103", "104_0", "104_1"] and queue.states["100_0"].state == "RUNNING"
    assert "0 done, 3 active" in queue.resume(sweep) and len(queue.dependencies) == 5


def test_running_work_is_listed_by_lock_or_by_job(tmp_path: Path, run: Run, queue: FakeQueue) -> None:
    """`resume --update-code` is an error while a stage runs. Running stages are found by their locks and jobs.

    Each task of shard and each point of a sweep has its own lock. The points of a sweep share one copy of the code.
    """
    sweep = make_run(tmp_path, "sweep", (SWEEP,), run.data_dir)
    assert run_jobs.describe_running_stages(sweep) == []
    queue.resume(sweep)
    assert run_jobs.describe_running_stages(sweep) == [], "pending jobs must not be listed"
    queue.set_state("100_1", "RUNNING")
    assert run_jobs.describe_running_stages(sweep) == ["train (job 100_1)"], "a job without its lock must be listed"
    lock = list_points(sweep)[1].lock_stage("train")
    assert lock is not None and run_jobs.describe_running_stages(sweep) == [f"train of {list_points(sweep)[1].name}"]
    os.close(lock)
    lock = run.lock_stage("shard", 1)
    assert lock is not None and run_jobs.describe_running_stages(run) == [f"shard of {run.name}"]
    result = run_submit(None, tmp_path, "resume", "runs/tiny", "--update-code")
    assert result.returncode == ExitCode.USER_ERROR and "shard of runs/tiny" in result.stderr
    os.close(lock)
    assert run_jobs.describe_running_stages(run) == []


def test_resume_checks_its_change_against_the_config_that_a_concurrent_resume_wrote(tmp_path: Path) -> None:
    """While this process has the lock of the run and sets train.steps to 50, a process `resume` tries to set 40.

    That process has read a config with 30 steps. It must compare 40 with 50 and fail, because steps must not decrease.
    """
    run = Run.create(load_config(write_config(tmp_path)))
    (run.checkpoints_dir / "step-00000007").mkdir()  # without a checkpoint, `resume` may reduce train.steps
    command = [sys.executable, str(CODE_ROOT / "submit.py"), "resume", str(run.path), "train.steps=40"]
    with run.lock_exclusively():
        resume = subprocess.Popen([*command, "--executor=local"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        with suppress(subprocess.TimeoutExpired):
            resume.wait(4)  # enough time to read the config with 30 steps
        run.apply_overrides(["train.steps=50"])
    try:
        errors = resume.communicate(timeout=240)[1].decode()
    finally:
        resume.kill()
    assert resume.returncode == ExitCode.USER_ERROR and "train.steps: 50 → 40" in errors, errors
    assert Run.open(run.path).config.train.steps == 50


def test_one_query_covers_all_points_of_a_sweep(
    tmp_path: Path, run: Run, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`status` of a sweep must ask Slurm once about the jobs of all points."""
    sweep = make_run(tmp_path, "sweep", (SWEEP,), run.data_dir)
    queue.resume(sweep)
    queries: list[set[str]] = []

    def record_query(
        jobs: Iterable[RecordedJob], comments: Set[str], final_states: dict[RecordedJob, JobState]
    ) -> tuple[dict[RecordedJob, JobState], list[JobState]]:
        states = {job: queue.states[job.job_id] for job in jobs}
        queries.append({job.job_id for job in states})
        return states, []

    monkeypatch.setattr(run_jobs, "find_jobs", record_query)
    poller = StatusPoller(sweep)
    poller.poll()
    assert queries == [{"100_0", "100_1", "101_0", "101_1"}] and poller.has_active_point


def test_an_invalid_sweep_point_is_an_error_before_any_change(tmp_path: Path) -> None:
    """The key of the first sweep does not exist. In the second sweep, an override makes one point invalid."""
    write_config(tmp_path)
    for options in ([], ["--dry-run"]):
        result = run_submit(None, tmp_path, "tiny.yaml", "sweep={grid: {optimizer.lrr: [1, 2]}}", *options)
        assert result.returncode == ExitCode.USER_ERROR, result.stderr
        assert "point 000 (optimizer.lrr=1)" in result.stderr
    assert not (tmp_path / "runs").exists()
    overrides = ["model.kv_heads=4", "sweep={grid: {model.kv_heads: [4, 2]}}", "stages.train.tasks_per_node=4"]
    run = Run.create(load_config(tmp_path / "tiny.yaml", overrides))
    with raises_error("parallel.indivisible_size", "point 001", "kv_heads", kind=ConfigError):
        run.apply_overrides(["parallel.tensor=4"])
    assert not run.changes_file.exists() and len(list_points(run)) == 2


@pytest.mark.timeout(900)
def test_resume_replaces_pending_jobs_and_waits_for_a_running_save(tmp_path: Path, run: Run, cluster: Cluster) -> None:
    """Four steps:

    1. Submit jobs that stay on hold. `resume` with other keys replaces them.
    2. While the new job runs, `resume` with a changed key is an error.
    3. After `cancel`, the job saves. `resume` submits a job that waits for its end.
    4. The run completes without lost steps.
    """
    config = write_config(tmp_path, "held", steps=60)
    held_options = ("stages.train.nodes=4", "site.sbatch={hold: true}")
    path = create_slow_run(tmp_path, config, held_options)
    (path / "data").rmdir()
    (path / "data").symlink_to(run.data_dir)
    trainer = path / "code/pipeline/train/trainer.py"
    save_lines = "        if skip_reason is None:\n            self.save(step)\n"
    # each save takes 4 s longer, so that the test can call `resume` during a save
    slow_save_lines = save_lines.replace("self.save", "time.sleep(4)\n            self.save")
    replace_in_file(trainer, save_lines, slow_save_lines)
    assert run_submit(cluster, tmp_path, "held.yaml", *held_options).returncode == 0
    held_job_ids = [get_job_id(path, stage) for stage in ("train", "evaluate")]
    result = run_submit(cluster, tmp_path, "resume", "runs/held", "stages.train.nodes=2", "site.sbatch={hold: false}")
    assert result.returncode == 0, result.stdout + result.stderr
    train_job_id = get_job_id(path, "train")
    assert [cluster.job_state(job_id) for job_id in held_job_ids] == ["CANCELLED"] * 2
    assert train_job_id not in held_job_ids
    wait_for("step 3", lambda: count_steps(path) >= 3)
    result = run_submit(cluster, tmp_path, "resume", "runs/held", "stages.train.nodes=4")
    assert result.returncode == ExitCode.USER_ERROR and "cancel runs/held" in result.stderr
    assert Run.open(path).config.stages.train.nodes == 2
    assert run_submit(cluster, tmp_path, "cancel", "runs/held").returncode == 0
    wait_for("the save", lambda: "stopping" in list_event_names(path, "train"))
    replace_in_file(trainer, "time.sleep(0.5)", "pass")  # remove the delay of each step
    result = run_submit(cluster, tmp_path, "resume", "runs/held")
    assert f"after {train_job_id}\n" in result.stdout, result.stdout + result.stderr
    wait_for("the evaluation", lambda: has_evaluation(path))
    wait_for_empty_queue(cluster)
    assert list_event_names(path, "train").count("started") == 2 and "stopped" in list_event_names(path, "train")
    assert [line["step"] for line in read_jsonl(path / "metrics.jsonl")] == list(range(1, 61))


@pytest.mark.timeout(900)
def test_resume_continues_a_sweep_whose_first_job_failed(tmp_path: Path, cluster: Cluster) -> None:
    """The prepare job fails, because a set-up line fails until the file `repaired` exists."""
    write_config(tmp_path)
    small = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", "train.steps=6")
    setup = f"site.setup=[test -e {tmp_path}/repaired || exit 9]"
    assert run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *small, setup).returncode == 0
    path = tmp_path / "runs/tiny"
    wait_for("the failure of prepare", lambda: cluster.job_state(get_job_id(path, "prepare")) == "FAILED")
    (tmp_path / "repaired").touch()
    result = run_submit(cluster, tmp_path, "resume", "runs/tiny")
    assert "0 done, 0 active" in result.stdout, result.stdout + result.stderr
    wait_for("both evaluations", lambda: all(map(has_evaluation, (path / "points/000", path / "points/001"))))
    wait_for_empty_queue(cluster)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sweep", [(), (SWEEP,)], ids=["chain", "sweep"])
def test_a_corrected_config_replaces_pending_jobs(tmp_path: Path, cluster: Cluster, sweep: tuple[str, ...]) -> None:
    """The jobs of the first config are on hold when the same command is run with another value of a key."""
    write_config(tmp_path, steps=6)
    small = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", *sweep)
    held_overrides = ("optimizer.weight_decay=0.5", "site.sbatch={hold: true}")
    result = run_submit(cluster, tmp_path, "tiny.yaml", *small, *held_overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    pending_jobs = set(cluster.output(["squeue", "-h", "--format=%A"]).split())
    result = run_submit(cluster, tmp_path, "tiny.yaml", *small, "optimizer.weight_decay=0.25")
    assert "optimizer.weight_decay: 0.5 → 0.25" in result.stdout, result.stdout + result.stderr
    assert len(pending_jobs) >= 4 and {*" ".join(map(cluster.job_state, pending_jobs)).split()} == {"CANCELLED"}
    path = tmp_path / "runs/tiny"
    paths = [path / "points/000", path / "points/001"] if sweep else [path]
    wait_for("the evaluation", lambda: all(map(has_evaluation, paths)))
    assert {Run.open(path).config.optimizer.weight_decay for path in paths} == {0.25}
    wait_for_empty_queue(cluster)
