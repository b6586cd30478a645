"""Sweeps: which points there are, points as runs, and on a real Slurm four of them as an array, one preempted. And
evaluations that a training submits as its checkpoints appear."""

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
from pipeline.base.errors import UserError
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
from tests.support.cluster_runs import list_event_names, run_submit, wait_for
from tests.support.events import read_event_lines, write_event
from tests.support.tiny import compute_run_digest, make_run, slow_down_steps, write_config
from tracking.report import print_report, read_report_data

cluster = cluster_fixture(grace=1)

pytestmark = pytest.mark.timeout(900)

SWEEP = "sweep={grid: {optimizer.lr: [0.001, 0.01]}, random: {run.seed: [1, 2, 3, 4]}, samples: 2}"
SMALL = ("stages.train.tasks_per_node=1", "stages.evaluate.tasks_per_node=1", "train.steps=24")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("data")).data_dir


def swept(folder: Path, data: Path, *overrides: str) -> Run:
    """A sweep of four points on shared data."""
    run = Run.create(load_config(write_config(folder), [SWEEP, *SMALL, *overrides]))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    return run


def under_way(run: Run) -> bool:
    poller = StatusPoller(run)
    poller.poll()
    return poller.has_active_point


keys = st.sampled_from(["optimizer.lr", "optimizer.weight_decay", "run.seed", "train.micro_batch"])
value_lists = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(keys, value_lists, min_size=1), st.integers(1, 4), st.integers(0, 99))
def test_the_points_are_the_grid_times_the_draws(grid: dict[str, list[int]], samples: int, seed: int) -> None:
    sweep = SweepConfig(grid=grid, random={"train.steps": [5, 6, 7]}, samples=samples, seed=seed)
    found = sweep.points()
    assert found == sweep.points(), "the same every time"
    size = samples
    for values in grid.values():
        size *= len(values)
    assert len(found) == size
    for point in found:
        assert point.keys() == {*grid, "train.steps"} and point["train.steps"] in (5, 6, 7)
        assert all(point[key] in values for key, values in grid.items())
    draws = [point["train.steps"] for point in found]
    assert draws == draws[:samples] * (size // samples), "each combination meets the same draws"


@settings(deadline=None, max_examples=50)
@given(st.floats(1e-6, 1.0), st.floats(1.01, 1e4), st.sampled_from(["linear", "log"]), st.integers(0, 10**6))
def test_draws_lie_in_their_range(low: float, times: float, scale: Literal["linear", "log"], seed: int) -> None:
    drawn = Range(low=low, high=low * times, scale=scale).sample(random.Random(seed))
    assert low * 0.999 <= drawn <= low * times * 1.001


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
def test_a_key_that_cannot_be_swept_is_named(tmp_path: Path, override: str, code: str, facts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        list_points(Run.create(load_config(write_config(tmp_path), [override])))
    assert raised.value.code == code
    assert all(fact in str(raised.value) for fact in facts)


def test_the_hours_of_the_points_are_in_the_ledger(tmp_path: Path, data: Path) -> None:
    run = swept(tmp_path, data)
    write_event(run, "done", "shard", job_id="1")
    for number, point in enumerate(create_points(run)):
        write_event(point, "submitted", "train", job_id=f"2_{number}", executor="local")
        write_event(point, "started", "train", job_id=f"2_{number}", ranks=1)
        write_event(point, "done", "train", job_id=f"2_{number}")
    attempts = read_report_data(run, StatusPoller(run).poll()).attempts
    assert [(a.stage, a.task, a.cause) for a in attempts] == [("train", number, "done") for number in range(4)]
    for point, attempt in zip(list_points(run), attempts, strict=True):
        assert attempt.end_time == point.read_events("train", Done)[0].timestamp


def test_a_point_that_failed_is_named_with_its_reason(tmp_path: Path, data: Path) -> None:
    run = swept(tmp_path, data)
    for point in create_points(run)[1:3]:
        write_event(point, "started", "train", job_id="1", attempt=1, ranks=1)
        write_event(
            point, "failed", "train", job_id="1", attempt=1, cause="crashed", exit_code=1, message="[Errno 5] oh"
        )
    for show in (print_status, print_report):
        console = PlainConsole(width=150, record=True)
        show(run, console)
        text = console.export_text()
        assert "points 001, 002: train failed (crashed): [Errno 5] oh\n" in text
        states = re.findall(r"^ *00(\d) .* (waiting|train failed) ", text, re.MULTILINE)
        assert dict(states) == {"0": "waiting", "1": "train failed", "2": "train failed", "3": "waiting"}, text


def test_the_page_of_a_sweep_has_the_curve_of_each_point(tmp_path: Path, data: Path) -> None:
    run = swept(tmp_path, data)
    for number, point in enumerate(create_points(run)):
        lines = ({"step": s, "loss": 5 - s / 9 - number, "step_time_s": 1.0, "tokens_per_s": 1.0} for s in range(1, 25))
        point.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines if number < 3))
    print_report(run, PlainConsole(width=150, record=True))
    page = (run.path / "report.html").read_text()
    figure = re.search(r'<figure data-x="1.0 24.0 0" data-y="0.0 5.0 0">.*?</figure>', page)
    assert figure and "Loss of the points" in figure[0] and "optimizer step" in figure[0]
    drawn = re.findall(r'<polyline class="(c\d)".*? points="([^"]+)"><title>(\d+)</title>', figure[0])
    assert [name for *_, name in drawn] == ["002", "001", "000"] and len({colour for colour, *_ in drawn}) == 3
    assert drawn[1][1].startswith(f"0.0,{1000 - 200 * (5 - 1 / 9 - 1):.1f} ")
    assert drawn[1][1].endswith(f" 1000.0,{1000 - 200 * (5 - 24 / 9 - 1):.1f}")


def test_verify_of_a_sweep_names_its_points(tmp_path: Path, data: Path) -> None:
    run = swept(tmp_path, data)
    with pytest.raises(UserError, match=r"is a sweep.*points/000.*003"):
        verify_checkpoint(run, None)


def test_a_dry_run_names_the_points(tmp_path: Path, data: Path) -> None:
    console = PlainConsole(width=150, record=True)
    print_plan(load_config(write_config(tmp_path), [SWEEP, *SMALL]), "local", console)
    assert "point 000 optimizer.lr 0.001, run.seed 4\n" in console.export_text()


def test_the_table_of_points_has_the_metrics_of_ones_own_model(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = swept(tmp_path, data)
    found = {"000": {"step": 9, "loss": 2.0, "accuracy": 0.5}, "002": {"step": 9, "loss": 1.0, "accuracy": 0.75}}
    monkeypatch.setattr(status, "read_newest_result", lambda point: found.get(point.path.name))
    rows = [StageStatus(point, "evaluate", "waiting", "", False, {}, "") for point in list_points(run)]
    table = tabulate_points(run, rows)
    assert table[0][-2:] == ["bits per byte", "accuracy"]
    assert [(row[0], *row[-2:]) for row in table[1:3]] == [("002", "1.0000", "0.7500"), ("000", "2.0000", "0.5000")]
    assert [row[-2:] for row in table[3:]] == [["-", "-"]] * 2


def test_four_points_on_slurm_and_one_is_preempted(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    run = slow_down_steps(swept(tmp_path, data))
    dry = run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *SMALL, "--dry-run", "--scripts").stdout
    done = run_submit(cluster, tmp_path, "tiny.yaml", SWEEP, *SMALL)
    for stage in ("train", "evaluate"):
        (written,) = (path.read_text() for path in (run.jobs_dir / stage).glob("*_submission.sh"))
        planned = dry.partition(f"# ---- on Slurm: {stage}\n")[2].partition("\n\n# ---- ")[0].rstrip()
        assert [line for line in written.splitlines() if "--dependency" not in line] == planned.splitlines()
    assert done.returncode == 0 and "array over 4 points" in done.stdout, done.stdout + done.stderr
    found = list_points(run)
    wait_for("step 8 of all", lambda: all(len(list(read_jsonl(p.metrics_file))) >= 8 for p in found))
    node = next(e for e in read_event_lines(found[0], "train") if e["event"] == "started")[
        "host"
    ]  # a CPU for each of four
    wanted = ["-phigh", f"-w{node}", "-n1", "-c1", "-o", "/dev/null", "--wrap", "sleep 1"]
    cluster.output(["sbatch", "--parsable", *wanted])
    assert under_way(run), "its own stages are done, and its points go on"
    wait_for("all evaluations", lambda: all(any(p.evaluation_dir.glob("step-*.json")) for p in found), 150)
    requeued = [p for p in found if "requeued" in list_event_names(p.path, "train")]
    assert len(requeued) == 1, "one point was preempted; the others went on"
    assert list_event_names(requeued[0].path, "train").count("started") == 2
    assert all(list_event_names(p.path, "train").count("started") == 1 for p in found if p is not requeued[0])
    for point in found:
        assert [line["step"] for line in read_jsonl(point.metrics_file)] == list(range(1, 25))
    table = run_submit(cluster, tmp_path, "report", "runs/tiny").stdout
    rows = [line.split() for line in table.splitlines() if line.strip()[:3] in ("000", "001", "002", "003")]
    assert len(rows) == 4 and [float(row[-1]) for row in rows] == sorted(float(row[-1]) for row in rows)
    assert re.search(r"^train +4 points +4 +done, preempted ", table, re.M) and "training time ratio" in table, table
    training = [a for a in read_report_data(run, StatusPoller(run).poll()).attempts if a.stage == "train"]
    assert sum(a.seconds["compute"] for a in training) > 40, "96 steps of half a second"
    wait_for("the end of the watching", lambda: not under_way(run))
    watched = run_submit(cluster, tmp_path, "status", "runs/tiny", "--watch")
    assert watched.returncode == 0 and "003" in watched.stdout, watched.stdout + watched.stderr
    again = run_submit(cluster, tmp_path, "resume", "runs/tiny")
    assert "4 points: 4 done" in again.stdout, again.stdout + again.stderr
    (tmp_path / "alone").mkdir()
    alone = swept(tmp_path / "alone", data)
    assert run_submit(None, tmp_path / "alone", "tiny.yaml", SWEEP, *SMALL, "--executor", "local").returncode == 0
    for here, there in zip(list_points(alone), found, strict=True):
        assert compute_run_digest(here) == compute_run_digest(there)


def test_each_checkpoint_is_evaluated_as_it_appears(tmp_path: Path, data: Path, cluster: Cluster) -> None:
    config = write_config(tmp_path)
    overrides = (*SMALL, "evaluate.every=checkpoint", "checkpoint.every_steps=8", "checkpoint.keep=9")
    run = Run.create(load_config(config, overrides))
    run.data_dir.rmdir()
    run.data_dir.symlink_to(data)
    early = run.evaluation_dir / "step-00000008.json"
    trainer = run.code_dir / "pipeline/train/trainer.py"
    anchor, waiting = (
        "        lr = self.learning_rate(",
        f"        while step == 20 and not os.path.exists({str(early)!r}):",
    )
    text = trainer.read_text().replace(anchor, f"{waiting}\n            time.sleep(0.1)\n{anchor}", 1)
    trainer.write_text(text)  # the training waits for an evaluation that must come while it goes on
    assert run_submit(cluster, tmp_path, "tiny.yaml", *overrides).returncode == 0
    wait_for("the first evaluation", early.exists)
    wait_for("the last evaluation", (run.evaluation_dir / "step-00000024.json").exists)
    wait_for("an empty queue", lambda: not cluster.output(["squeue", "-h"]))
    assert [json.loads(p.read_text())["step"] for p in sorted(run.evaluation_dir.glob("*.json"))] == [8, 16, 24]
    assert "failed" not in list_event_names(run.path, "evaluate")


def test_whoever_looks_at_a_sweep_makes_nothing_and_a_moved_one_stays_where_it_is(tmp_path: Path) -> None:
    run = Run.create(load_config(write_config(tmp_path), ["sweep.grid={optimizer.lr: [0.1, 0.2]}"]))
    moved = Run(run.path.rename(tmp_path / "elsewhere"))
    shown = io.StringIO()
    print_status(Run.open(moved.path), PlainConsole(file=shown, width=160))
    assert "0/30" in shown.getvalue() and not (moved.path / "points").exists()
    assert [one.config.optimizer.lr for one in create_points(moved)] == [0.1, 0.2]
    assert [one.path for one in list_points(moved)] == [moved.path / f"points/{number:03d}" for number in range(2)]
    assert list_points(moved)[1].data_dir.resolve() == moved.data_dir and not run.path.exists()
