"""Test sweeps: the points of a sweep, their status and results, and an array of four points on a real Slurm.

One test covers the evaluation jobs that the train stage submits for its checkpoints.
"""

from __future__ import annotations

import io
import json
import random
import re
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.submit import print_plan
from pipeline.base.console import PlainConsole
from pipeline.base.files import read_jsonl
from pipeline.checkpoint.checkpointer import verify_checkpoint
from pipeline.config.read import ConfigError, load_config
from pipeline.config.sections import Range, SweepConfig
from pipeline.run.directory import Run, create_points, list_points
from pipeline.run.events import Done
from slurm.query import status
from slurm.query.status import StageStatus, StatusPoller, print_status, tabulate_points
from tests.cluster import Cluster
from tests.cluster.fixture import cluster_fixture
from tests.support.cluster_runs import list_event_names, run_submit, wait_for, wait_for_empty_queue
from tests.support.edits import replace_in_file
from tests.support.errors import raises_error
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import compute_run_digest, make_run, slow_down_steps, write_config
from tracking.report import print_report, read_report_data

cluster = cluster_fixture(grace=1)

pytestmark = pytest.mark.timeout(900)

SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01]}, random: {run.seed: [1, 2, 3, 4]}, samples: 2}"
SMALL = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", "train.steps=24")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the data directory of a run for which the prepare and shard stages are done."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def create_sweep(folder: Path, data: Path, *overrides: str) -> Run:
    """Create a sweep of four points. Its data directory is a link to `data`."""
    run = Run.create(load_config(write_config(folder), [SWEEP, *SMALL, *overrides]))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    return run


def has_active_point(run: Run) -> bool:
    """Return True if `status` reports a point that is pending or running."""
    poller = StatusPoller(run)
    poller.poll()
    return poller.has_active_point


sweep_keys = st.sampled_from(["optimizer.lr", "optimizer.weight_decay", "run.seed", "train.micro_batch"])
value_lists = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(sweep_keys, value_lists, min_size=1), st.integers(1, 4), st.integers(0, 99))
def test_points_are_all_combinations_of_the_grid_with_the_same_random_samples(
    grid: dict[str, list[int]], samples: int, seed: int
) -> None:
    """Each combination of the grid occurs with the same `samples` random values of train.steps."""
    sweep = SweepConfig(grid=grid, random={"train.steps": [5, 6, 7]}, samples=samples, seed=seed)
    points = sweep.points()
    assert points == sweep.points(), "the points must be the same in every call"
    point_count = samples
    for values in grid.values():
        point_count *= len(values)
    assert len(points) == point_count
    for point in points:
        assert point.keys() == {*grid, "train.steps"} and point["train.steps"] in (5, 6, 7)
        assert all(point[key] in values for key, values in grid.items())
    sampled_values = [point["train.steps"] for point in points]
    assert sampled_values == sampled_values[:samples] * (point_count // samples)


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1.0), st.floats(1.01, 1e4), st.sampled_from(["linear", "log"]), st.integers(0, 10**6))
def test_a_sampled_value_is_in_its_range(low: float, factor: float, scale: Literal["linear", "log"], seed: int) -> None:
    value = Range(low=low, high=low * factor, scale=scale).sample(random.Random(seed))
    assert low * 0.999 <= value <= low * factor * 1.001


@pytest.mark.parametrize(
    ("override", "code", "facts"),
    [
        ("sweep={grid: {stages.train.nodes: [1, 2]}}", "config.conflict", ["stages.train.nodes"]),
        ("sweep={grid: {data.sequence_length: [16, 32]}}", "config.conflict", ["data.sequence_length"]),
        ("sweep={grid: {}}", "config.conflict", ["grid", "random"]),
        ("sweep={grid: {optimizer.lr: [1]}, random: {optimizer.lr: [2]}}", "config.conflict", ["optimizer.lr"]),
        ("sweep={grid: {optimizer.lrr: [1]}}", "config.unknown_key", ["point 000", "optimizer.lrr"]),
        (
            "sweep={grid: {run.seed: [1, 2, 3]}, random: {optimizer.lr: [1]}, samples: 7000}",
            "config.conflict",
            ["21,000", "5,000"],
        ),
        ("sweep={grid: {train.micro_batch: [3]}}", "config.conflict", ["micro_batch (3)"]),
    ],
)
def test_an_invalid_sweep_is_an_error(tmp_path: Path, override: str, code: str, facts: list[str]) -> None:
    with raises_error(code, *facts, kind=ConfigError):
        list_points(Run.create(load_config(write_config(tmp_path), [override])))


def test_the_ledger_of_a_sweep_has_the_attempts_of_its_points(tmp_path: Path, data: Path) -> None:
    run = create_sweep(tmp_path, data)
    write_event(run, "done", "shard", job_id="1")
    for number, point in enumerate(create_points(run)):
        write_event(point, "submitted", "train", job_id=f"2_{number}", executor="local")
        write_event(point, "started", "train", job_id=f"2_{number}", ranks=1)
        write_event(point, "done", "train", job_id=f"2_{number}")
    attempts = read_report_data(run, StatusPoller(run).poll()).attempts
    assert [(attempt.stage, attempt.task, attempt.cause) for attempt in attempts] == [
        ("train", number, "done") for number in range(4)
    ]
    for point, attempt in zip(list_points(run), attempts, strict=True):
        assert attempt.end_time == point.read_events("train", Done)[0].timestamp


def test_status_and_report_name_failed_points_and_the_reason(tmp_path: Path, data: Path) -> None:
    """Points 001 and 002 have failed with the same error. The other points have not started."""
    run = create_sweep(tmp_path, data)
    for point in create_points(run)[1:3]:
        write_event(point, "started", "train", job_id="1", attempt=1, ranks=1)
        write_event(
            point, "failed", "train", job_id="1", attempt=1, cause="crashed", exit_code=1, message="[Errno 5] I/O error"
        )
    for print_output in (print_status, print_report):
        console = PlainConsole(width=150, record=True)
        print_output(run, console)
        text = console.export_text()
        assert re.search(r"points 001, 002: train failed .*crashed.* \[Errno 5\] I/O error$", text, re.MULTILINE)
        states = re.findall(r"^ *00(\d) .* (waiting|train failed) ", text, re.MULTILINE)
        assert dict(states) == {"0": "waiting", "1": "train failed", "2": "train failed", "3": "waiting"}, text


def test_the_page_of_a_sweep_plots_the_loss_of_each_point(tmp_path: Path, data: Path) -> None:
    """The best of three points with metrics is listed first. The fourth point has no metrics yet.

    The figure is 1000 units high. The loss axis reaches from 0 to 5, and is drawn downwards.
    """
    run = create_sweep(tmp_path, data)
    for number, point in enumerate(create_points(run)):
        lines = (
            {"step": step, "loss": 5 - step / 9 - number, "step_time_s": 1.0, "tokens_per_s": 1.0}
            for step in range(1, 25)
        )
        point.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines if number < 3))
    print_report(run, PlainConsole(width=150, record=True))
    page = (run.path / "report.html").read_text()
    figure = re.search(r'<figure data-x="1.0 24.0 0" data-y="0.0 5.0 0">.*?</figure>', page)
    assert figure and "Loss of the points" in figure[0] and "optimizer step" in figure[0]
    curves = re.findall(r'<polyline class="(c\d)".*? points="([^"]+)"><title>(\d+)</title>', figure[0])
    assert [name for *_, name in curves] == ["002", "001", "000"] and len({color for color, *_ in curves}) == 3
    _, coordinates, _ = curves[1]  # of point 001
    assert coordinates.startswith(f"0.0,{1000 - 200 * (5 - 1 / 9 - 1):.1f} ")
    assert coordinates.endswith(f" 1000.0,{1000 - 200 * (5 - 24 / 9 - 1):.1f}")


def test_verify_of_a_sweep_is_an_error_that_names_the_points(tmp_path: Path, data: Path) -> None:
    run = create_sweep(tmp_path, data)
    with raises_error("run.is_a_sweep", run.path, "points/000", "003"):
        verify_checkpoint(run, None)


def test_a_dry_run_lists_the_points(tmp_path: Path, data: Path) -> None:
    console = PlainConsole(width=150, record=True)
    print_plan(load_config(write_config(tmp_path), [SWEEP, *SMALL]), "local", console)
    assert re.search(r"^ *point 000 +optimizer\.lr 0\.001, run\.seed 4$", console.export_text(), re.MULTILINE)


def test_the_table_of_points_has_the_metrics_of_a_custom_model(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points 000 and 002 have results. The best point is first, and points without results are last."""
    run = create_sweep(tmp_path, data)
    results = {"000": {"step": 9, "loss": 2.0, "accuracy": 0.5}, "002": {"step": 9, "loss": 1.0, "accuracy": 0.75}}
    monkeypatch.setattr(status, "read_newest_result", lambda point: results.get(point.path.name))
    statuses = [StageStatus(point, "evaluate", "waiting", "", False, {}, "") for point in list_points(run)]
    table = tabulate_points(run, statuses)
    assert table[0][-2:] == ["bits per byte", "accuracy"]
    assert [(row[0], *row[-2:]) for row in table[1:3]] == [("002", "1.0000", "0.7500"), ("000", "2.0000", "0.5000")]
    assert [row[-2:] for row in table[3:]] == [["-", "-"]] * 2


def test_a_preempted_point_of_an_array_is_requeued_alone(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    """Submit a sweep, preempt one of its four train tasks, and wait until all points are evaluated.

    Then check the scripts of the dry run, the events, and the output of `report`, `status` and `resume`. The results
    must equal those of the same sweep on this machine without a preemption.
    """
    run = slow_down_steps(create_sweep(tmp_path, data))
    dry_run = run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *SMALL, "--dry-run", "--scripts").stdout
    result = run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *SMALL)
    for stage in ("train", "evaluate"):
        [script] = [path.read_text() for path in (run.jobs_dir / stage).glob("*_submission.sh")]
        planned_script = dry_run.partition(f"# ---- on Slurm: {stage}\n")[2].partition("\n\n# ---- ")[0].rstrip()
        assert [line for line in script.splitlines() if "--dependency" not in line] == planned_script.splitlines()
    assert result.returncode == 0 and "array over 4 points" in result.stdout, result.stdout + result.stderr
    points = list_points(run)
    wait_for("step 8 of all points", lambda: all(len(list(read_jsonl(point.metrics_file))) >= 8 for point in points))
    [start_event, *_] = read_event_lines(points[0], "train", "started")
    # each point uses one CPU of the node, so a job that needs one CPU preempts one point
    preempting_job = ["-phigh", f"-w{start_event['host']}", "-n1", "-c1", "-o", "/dev/null", "--wrap", "sleep 1"]
    cluster.output(["sbatch", "--parsable", *preempting_job])
    assert has_active_point(run), "the points must be active, although the shared stages of the sweep are done"
    wait_for("all evaluations", lambda: all(any(point.evaluation_dir.glob("step-*.json")) for point in points), 150)
    requeued_points = [point for point in points if "requeued" in list_event_names(point.path, "train")]
    assert len(requeued_points) == 1
    for point in points:
        assert list_event_names(point.path, "train").count("started") == (2 if point in requeued_points else 1)
        assert [line["step"] for line in read_jsonl(point.metrics_file)] == list(range(1, 25))
    table = run_submit(cluster, tmp_path, "report", "runs/tiny").stdout
    rows = [line.split() for line in table.splitlines() if line.strip()[:3] in ("000", "001", "002", "003")]
    assert len(rows) == 4 and [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    assert re.search(r"^train +4 points +4 +done, preempted ", table, re.M) and "training time ratio" in table, table
    attempts = read_report_data(run, StatusPoller(run).poll()).attempts
    compute_s = sum(attempt.seconds["compute"] for attempt in attempts if attempt.stage == "train")
    assert compute_s > 40, "4 points × 24 steps × 0.5 s are at least 48 s"
    wait_for("the end of all points", lambda: not has_active_point(run))
    watch = run_submit(cluster, tmp_path, "status", "runs/tiny", "--watch")
    assert watch.returncode == 0 and "003" in watch.stdout, watch.stdout + watch.stderr
    resume = run_submit(cluster, tmp_path, "resume", "runs/tiny")
    assert "4 points: 4 done" in resume.stdout, resume.stdout + resume.stderr
    (tmp_path / "local").mkdir()
    local_run = create_sweep(tmp_path / "local", data)
    assert run_submit(None, tmp_path / "local", "tiny.yaml", SWEEP, *SMALL, "--executor", "local").returncode == 0
    for local_point, point in zip(list_points(local_run), points, strict=True):
        assert compute_run_digest(local_point) == compute_run_digest(point)


def test_each_checkpoint_is_evaluated_while_the_run_trains(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    """With `evaluate.every=checkpoint`, the supervisor submits an evaluation job for each new checkpoint."""
    config = write_config(tmp_path)
    overrides = (*SMALL, "evaluate.every=checkpoint", "checkpoint.every_steps=8", "checkpoint.keep=9")
    run = Run.create(load_config(config, overrides))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    first_result = run.evaluation_dir / "step-00000008.json"
    trainer = run.code_dir / "pipeline/train/trainer.py"
    step_line = "        lr = self.compute_learning_rate("
    wait_line = f"        while step == 20 and not os.path.exists({str(first_result)!r}):"
    # the train stage waits at step 20 until the checkpoint of step 8 has been evaluated
    replace_in_file(trainer, step_line, f"{wait_line}\n            time.sleep(0.1)\n{step_line}")
    assert run_submit(cluster, tmp_path, "tiny.yaml", *overrides).returncode == 0
    wait_for("the first evaluation", first_result.exists)
    wait_for("the last evaluation", (run.evaluation_dir / "step-00000024.json").exists)
    wait_for_empty_queue(cluster)
    results = sorted(run.evaluation_dir.glob("*.json"))
    assert [json.loads(file.read_text())["step"] for file in results] == [8, 16, 24]
    assert "failed" not in list_event_names(run.path, "evaluate")


def test_status_creates_no_points_and_a_sweep_can_be_moved(tmp_path: Path) -> None:
    """The points are created after the run directory was moved. Their paths and data are in the new directory."""
    run = Run.create(load_config(write_config(tmp_path), ["sweep.grid={optimizer.lr: [0.1, 0.2]}"]))
    moved_run = Run(run.path.rename(tmp_path / "elsewhere"))
    output = io.StringIO()
    print_status(Run.open(moved_run.path), PlainConsole(file=output, width=160))
    assert "0/30" in output.getvalue() and not (moved_run.path / "points").exists()
    assert [point.config.optimizer.lr for point in create_points(moved_run)] == [0.1, 0.2]
    points = list_points(moved_run)
    assert [point.path for point in points] == [moved_run.path / f"points/{number:03d}" for number in range(2)]
    assert points[1].data_dir.resolve() == moved_run.data_dir and not run.path.exists()
