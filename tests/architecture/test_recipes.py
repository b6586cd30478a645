"""The recipes of docs/development.md, followed to the letter in a copy of the code: what comes out runs."""

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

from pipeline.base.files import read_jsonl
from tests.architecture.recipes import checkout, recipes
from tests.support.tiny import write_config

ALL = recipes()
SMALL = ("train.steps=4", "stages.train.tasks_per_node=1")


def submit(code: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(code), "COLUMNS": "200"}
    command = [sys.executable, str(code / "submit.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


def applied(title: str, folder: Path) -> Path:
    """A copy of the code with the recipe applied."""
    code = checkout(folder)
    before = {path: path.read_bytes() for path in code.rglob("*.py")}
    ALL[title].apply(code)
    changed = {str(p.relative_to(code)) for p in code.rglob("*.py") if before.get(p) != p.read_bytes()}
    assert changed == ALL[title].files, "its list names what it touches"
    return code


def pipeline(code: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The rank's door, by hand."""
    command = [sys.executable, "-m", "pipeline", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return applied("Add a stage", tmp_path_factory.mktemp("counting"))


def counted(run: Path) -> int:
    tokens = json.loads((run / "data/tokens-by-source.json").read_bytes())["tokens"]
    assert list(tokens) == [str(run.parent.parent / "corpus.jsonl")]
    return sum(tokens.values())


@pytest.mark.story
def test_a_new_stage_runs_here(counting: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    done = submit(counting, tmp_path, "tiny.yaml", *SMALL, "--executor", "local")
    assert done.returncode == 0, done.stdout + done.stderr
    words = f"{counted(tmp_path / 'runs/tiny'):,} tokens of 1 files"
    assert "count     done in" in done.stdout and words in done.stdout
    done_stages = [e["stage"] for e in read_jsonl(tmp_path / "runs/tiny/events.jsonl") if e["event"] == "done"]
    assert done_stages == ["prepare", "shard", "train", "evaluate", "count"]
    again = submit(counting, tmp_path, "tiny.yaml", *SMALL, "--executor", "local")
    assert again.returncode == 0 and f"count     done: {words}" in again.stdout
    for command in ("status", "report"):
        shown = submit(counting, tmp_path, command, "runs/tiny")
        assert shown.returncode == 0 and "count" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.story
def test_a_new_stage_in_a_dry_run_and_in_a_sweep(counting: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    assert "publish,measure,count}" in pipeline(counting, tmp_path, "no such words").stderr, "usage is of the table"
    sweep = "sweep={grid: {optimizer.lr: [0.001, 0.01]}}"
    asked = ("stages.count.time=00:07:00", "--dry-run", "--scripts", "--executor", "slurm")
    for more in ((), (sweep,)):
        dry = submit(counting, tmp_path, "tiny.yaml", *SMALL, *more, *asked)
        assert dry.returncode == 0, dry.stderr
        assert "count     1 process, 00:07:00, after shard" in dry.stdout and "# ---- on Slurm: count" in dry.stdout
        assert "#SBATCH --time=7" in dry.stdout
    done = submit(counting, tmp_path, "tiny.yaml", *SMALL, sweep, "run.name=swept", "--executor", "local")
    assert done.returncode == 0 and counted(tmp_path / "runs/swept"), done.stdout + done.stderr
    assert not (tmp_path / "runs/swept/points/000/jobs/count").exists(), "the points share it"
    for command in ("status", "report"):
        shown = submit(counting, tmp_path, command, "runs/swept")
        assert shown.returncode == 0 and "count" in shown.stdout, shown.stdout + shown.stderr


def test_a_new_format_is_read(tmp_path: Path) -> None:
    code, config = applied("Add a data format", tmp_path / "code"), write_config(tmp_path)
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    (tmp_path / "corpus.paragraphs").write_text("\n\n".join(texts) + "\n")
    for stage in ("prepare", "shard"):
        done = pipeline(code, tmp_path, stage, str(config), f"data.source={tmp_path}/corpus.paragraphs")
        assert done.returncode == 0, done.stderr
    documents = json.loads((tmp_path / "runs/tiny/data/manifest.json").read_text())["documents"]
    assert documents == len(texts)


@pytest.mark.story
def test_a_new_optimizer_trains_and_goes_on(tmp_path: Path) -> None:
    code, config = applied("Add an optimizer", tmp_path / "code"), write_config(tmp_path)
    rmsprop = ("optimizer.name=rmsprop", "optimizer.lr=0.01", "train.steps=6", "checkpoint.every_steps=3")
    for stage in ("prepare", "shard", "train"):
        done = pipeline(code, tmp_path, stage, str(config), *rmsprop)
        assert done.returncode == 0, done.stderr
    run, digests = tmp_path / "runs/tiny", []
    for _ in range(2):
        verified = submit(code, tmp_path, "verify", str(run))
        digests.append(verified.stdout.splitlines()[-1])
        shutil.rmtree(run / "checkpoints/step-00000006")
        done = pipeline(code, tmp_path, "train", str(run))
        assert done.returncode == 0, done.stderr
    assert digests[0] == digests[1], "its moment was in the checkpoint"
    losses = [line["loss"] for line in read_jsonl(run / "metrics.jsonl")]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.story
def test_a_new_metric_is_in_each_line(tmp_path: Path) -> None:
    code, config = applied("Add a metric", tmp_path / "code"), write_config(tmp_path)
    for stage in ("prepare", "shard", "train"):
        done = pipeline(code, tmp_path, stage, str(config), "train.steps=3", "optimizer.clip_norm=0.01")
        assert done.returncode == 0, done.stderr
    assert [line["clipped"] for line in read_jsonl(tmp_path / "runs/tiny/metrics.jsonl")] == [True] * 3


@pytest.mark.story
def test_a_new_signal_stops_a_training(tmp_path: Path) -> None:
    code, config = applied("Add a signal", tmp_path / "code"), write_config(tmp_path, steps=100_000)
    for stage in ("prepare", "shard"):
        assert pipeline(code, tmp_path, stage, str(config)).returncode == 0
    run = tmp_path / "runs/tiny"
    command = [sys.executable, "-m", "pipeline", "train", str(run)]
    rank = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(code)}, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 240
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
            assert time.monotonic() < deadline and rank.poll() is None
            time.sleep(0.1)
        rank.send_signal(signal.SIGHUP)
        assert rank.wait(240) == 75
    finally:
        rank.kill()
    told = [event for event in read_jsonl(run / "events.jsonl") if event["event"] == "stop_requested"]
    assert [event["signal"] for event in told] == ["SIGHUP"]
