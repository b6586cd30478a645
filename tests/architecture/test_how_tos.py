"""Tests of each how-to of CONTRIBUTING.md. Its edits are applied to a copy of the code, and the copy is run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.base.errors import ExitCode
from pipeline.base.files import read_jsonl
from tests.architecture.how_tos import copy_code, read_how_tos
from tests.support.tiny import write_config

HOW_TOS = read_how_tos()
SHORT_RUN = ("train.steps=4", "stages.train.tasks_per_node=1")


def run_submit(code: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run submit.py of the copy of the code at `code`, with the working directory `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(code), "COLUMNS": "200"}
    command = [sys.executable, str(code / "submit.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def apply_how_to(title: str, folder: Path) -> Path:
    """Create a copy of the code in `folder`, apply a how-to to it, and return its path."""
    code = copy_code(folder)
    original_files = {path: path.read_bytes() for path in code.rglob("*.py")}
    HOW_TOS[title].apply(code)
    changed_files = {
        str(path.relative_to(code)) for path in code.rglob("*.py") if original_files.get(path) != path.read_bytes()
    }
    assert changed_files == HOW_TOS[title].files, "`Files:` must list the changed files"
    return code


def run_rank(code: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a stage with `python -m pipeline` of the copy of the code at `code`. `folder` is the working directory."""
    command = [sys.executable, "-m", "pipeline", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("title", HOW_TOS)
def test_the_edits_of_a_how_to_fit_the_code(title: str, tmp_path: Path) -> None:
    apply_how_to(title, tmp_path / "code")


@pytest.fixture(scope="module")
def code_with_count_stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the code with the stage `count` of the how-to "Add a stage"."""
    return apply_how_to("Add a stage", tmp_path_factory.mktemp("code"))


def read_token_count(run: Path) -> int:
    """Return the number of tokens that the example stage `count` wrote for a run."""
    tokens = json.loads((run / "data/tokens-by-source.json").read_bytes())["tokens"]
    assert list(tokens) == [str(run.parent.parent / "corpus.jsonl")]
    return sum(tokens.values())


@pytest.mark.story
def test_a_new_stage_runs_without_slurm(code_with_count_stage: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    result = run_submit(code_with_count_stage, tmp_path, "tiny.yaml", *SHORT_RUN, "--executor", "local")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = f"{read_token_count(tmp_path / 'runs/tiny'):,} tokens of 1 files"
    assert "count     done in" in result.stdout and summary in result.stdout
    events = read_jsonl(tmp_path / "runs/tiny/events.jsonl")
    done_stages = [event["stage"] for event in events if event["event"] == "done"]
    assert done_stages == ["prepare", "shard", "train", "evaluate", "count"]
    repeated_result = run_submit(code_with_count_stage, tmp_path, "tiny.yaml", *SHORT_RUN, "--executor", "local")
    assert repeated_result.returncode == 0 and f"count     done: {summary}" in repeated_result.stdout
    for command in ("status", "report"):
        command_result = run_submit(code_with_count_stage, tmp_path, command, "runs/tiny")
        assert command_result.returncode == 0, command_result.stdout + command_result.stderr
        assert "count" in command_result.stdout


@pytest.mark.story
def test_a_new_stage_works_in_a_dry_run_and_in_a_sweep(code_with_count_stage: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    result = run_rank(code_with_count_stage, tmp_path, "no-such-stage", str(config))
    assert result.returncode == ExitCode.USER_ERROR
    assert "evaluate, count" in result.stderr and "Traceback" not in result.stderr
    sweep = "sweep={grid: {optimizer.lr: [0.001, 0.01]}}"
    dry_run_arguments = ("stages.count.time=00:07:00", "--dry-run", "--scripts", "--executor", "slurm")
    for overrides in ((), (sweep,)):
        dry_run_result = run_submit(
            code_with_count_stage, tmp_path, "tiny.yaml", *SHORT_RUN, *overrides, *dry_run_arguments
        )
        assert dry_run_result.returncode == 0, dry_run_result.stderr
        assert "count     1 process, 00:07:00, after shard" in dry_run_result.stdout
        assert "# ---- on Slurm: count" in dry_run_result.stdout
        assert "#SBATCH --time=7" in dry_run_result.stdout
    result = run_submit(
        code_with_count_stage, tmp_path, "tiny.yaml", *SHORT_RUN, sweep, "run.name=swept", "--executor", "local"
    )
    assert result.returncode == 0 and read_token_count(tmp_path / "runs/swept"), result.stdout + result.stderr
    assert not (tmp_path / "runs/swept/points/000/jobs/count").exists(), "the stage must run once for all points"
    for command in ("status", "report"):
        command_result = run_submit(code_with_count_stage, tmp_path, command, "runs/swept")
        assert command_result.returncode == 0, command_result.stdout + command_result.stderr
        assert "count" in command_result.stdout


def test_a_new_data_format_is_read(tmp_path: Path) -> None:
    code = apply_how_to("Add a data format", tmp_path / "code")
    config = write_config(tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    (tmp_path / "corpus.paragraphs").write_text("\n\n".join(texts) + "\n")
    for stage in ("prepare", "shard"):
        result = run_rank(code, tmp_path, stage, str(config), f"data.source={tmp_path}/corpus.paragraphs")
        assert result.returncode == 0, result.stderr
    documents = json.loads((tmp_path / "runs/tiny/data/manifest.json").read_text())["documents"]
    assert documents == len(texts)


@pytest.mark.story
def test_a_new_optimizer_trains_and_resumes_exactly(tmp_path: Path) -> None:
    code = apply_how_to("Add an optimizer", tmp_path / "code")
    config = write_config(tmp_path)
    optimizer_overrides = ("optimizer.name=rmsprop", "optimizer.lr=0.01", "train.steps=6", "checkpoint.every_steps=3")
    for stage in ("prepare", "shard", "train"):
        result = run_rank(code, tmp_path, stage, str(config), *optimizer_overrides)
        assert result.returncode == 0, result.stderr
    run = tmp_path / "runs/tiny"
    digests = []
    for _ in range(2):
        verify_result = run_submit(code, tmp_path, "verify", str(run))
        digests.append(verify_result.stdout.splitlines()[-1])
        shutil.rmtree(run / "checkpoints/step-00000006")
        result = run_rank(code, tmp_path, "train", str(run))
        assert result.returncode == 0, result.stderr
    assert digests[0] == digests[1], "the checkpoint must contain the moments of the new optimizer"
    losses = [line["loss"] for line in read_jsonl(run / "metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.story
def test_a_new_metric_is_in_each_line_of_metrics_jsonl(tmp_path: Path) -> None:
    code = apply_how_to("Add a metric", tmp_path / "code")
    config = write_config(tmp_path)
    for stage in ("prepare", "shard", "train"):
        result = run_rank(code, tmp_path, stage, str(config), "train.steps=3", "optimizer.clip_norm=0.01")
        assert result.returncode == 0, result.stderr
    assert [line["clipped"] for line in read_jsonl(tmp_path / "runs/tiny/metrics.jsonl")] == [True] * 3


@pytest.mark.story
def test_a_new_callback_writes_the_same_metric_after_a_restart(tmp_path: Path) -> None:
    code = apply_how_to("Add a trainer callback", tmp_path / "code")
    config = write_config(tmp_path)
    for stage in ("prepare", "shard", "train"):
        result = run_rank(code, tmp_path, stage, str(config), "train.steps=4", "checkpoint.every_steps=2")
        assert result.returncode == 0, result.stderr
    run = tmp_path / "runs/tiny"
    ratios = [line["loss_ratio"] for line in read_jsonl(run / "metrics.jsonl")]
    assert ratios[0] == 1 and len(set(ratios)) == 4
    shutil.rmtree(run / "checkpoints/step-00000004")
    assert run_rank(code, tmp_path, "train", str(run)).returncode == 0
    assert [line["loss_ratio"] for line in read_jsonl(run / "metrics.jsonl")] == ratios


@pytest.mark.story
def test_a_new_axis_of_the_mesh_trains_like_one_rank(tmp_path: Path) -> None:
    code = apply_how_to("Add a parallel axis to the mesh", tmp_path / "code")
    write_config(tmp_path)
    metrics_by_run = {}
    for name, ranks in (("one", 1), ("two", 2)):
        ranks_overrides = (f"run.name={name}", f"parallel.sample={ranks}", f"stages.train.tasks_per_node={ranks}")
        result = run_submit(code, tmp_path, "tiny.yaml", "train.steps=4", *ranks_overrides, "--executor", "local")
        assert result.returncode == 0, result.stdout + result.stderr
        lines = read_jsonl(tmp_path / "runs" / name / "metrics.jsonl")
        metrics_by_run[name] = [line[key] for line in lines for key in ("loss", "grad_norm")]
    assert len(metrics_by_run["one"]) == 8 and metrics_by_run["two"] == pytest.approx(metrics_by_run["one"], rel=1e-5)
    events = read_jsonl(tmp_path / "runs/two/events.jsonl")
    assert all("parallel.sample" not in str(event.get("error")) for event in events)


@pytest.mark.story
def test_a_new_signal_stops_a_run(tmp_path: Path) -> None:
    code = apply_how_to("Add a signal", tmp_path / "code")
    config = write_config(tmp_path, steps=100_000)
    for stage in ("prepare", "shard"):
        assert run_rank(code, tmp_path, stage, str(config)).returncode == 0
    run = tmp_path / "runs/tiny"
    command = [sys.executable, "-m", "pipeline", "train", str(run)]
    rank_process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(code)}, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline and rank_process.poll() is None
            time.sleep(0.1)
        rank_process.send_signal(signal.SIGHUP)
        assert rank_process.wait(240) == ExitCode.STOPPED
    finally:
        rank_process.kill()
    stops = [event for event in read_jsonl(run / "events.jsonl") if event["event"] == "stop_requested"]
    assert [event["signal"] for event in stops] == ["SIGHUP"]
