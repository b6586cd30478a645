"""Test `init`: the configs that it writes can be trained, and it never overwrites a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from cli.init import write_starter
from pipeline.base.errors import ExitCode, UserError
from pipeline.base.files import read_jsonl
from pipeline.config.read import load_config
from pipeline.run.code import CODE_ROOT
from pipeline.run.directory import Run
from pipeline.run.stages import load_stage_module
from tests.support.ranks import make_rank_info, run_ranks
from tests.support.tiny import PassiveStopFlag, run_stage_on_rank, write_corpus

SMALL_RUN = ("train.steps=3", "optimizer.warmup_steps=1", "train.global_batch=4", "train.micro_batch=2")


def write_data(folder: Path) -> None:
    """Write the data that `data.source` names in the two configs of `init`."""
    texts = write_corpus(folder, 100).read_text().splitlines()
    for name in ("texts", "arrays"):
        (folder / name).mkdir()
    for number, text in enumerate(texts):
        (folder / f"texts/{number}.txt").write_text(text)
    with h5py.File(folder / "arrays/a.h5", "w") as file:
        file["inputs"] = np.random.default_rng(0).normal(size=(80, 16)).astype(np.float32)
        file["labels"] = np.arange(80, dtype=np.uint8) % 8


def run_all_stages(folder: Path, config: str, *overrides: str) -> Run:
    """Run all stages of a config in `folder`. Use two ranks for train and evaluate. Return the run."""
    run = Run.create(load_config(folder / config, (*SMALL_RUN, *overrides)))
    for stage in ("prepare", "shard"):
        assert (
            load_stage_module(run, stage).run_stage(run, make_rank_info(0, 1, 1), {}, PassiveStopFlag())
            == ExitCode.DONE
        )
    for stage in ("train", "evaluate"):
        assert run_ranks(2, run_stage_on_rank, run.path, stage) == [ExitCode.DONE] * 2
    assert [line["step"] for line in read_jsonl(run.metrics_file)] == [1, 2, 3]
    return run


def test_all_stages_of_the_config_for_text_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_starter(Path(), model=False).endswith(" my_text.yaml")
    assert os.listdir() == ["my_text.yaml"]
    write_data(tmp_path)
    small_model = ("data.tokenizer.vocab_size=300", "model.dim=32", "data.sequence_length=32")
    run = run_all_stages(tmp_path, "my_text.yaml", *small_model)
    assert run.path == tmp_path / "runs/my-text" and [*run.evaluation_dir.glob("*.json")]


@pytest.mark.story
def test_all_stages_of_the_config_with_a_custom_model_succeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_starter(Path(), model=True)
    write_data(tmp_path)
    run = run_all_stages(tmp_path, "my_model.yaml")
    assert '"accuracy"' in next(run.evaluation_dir.glob("*.json")).read_text()


@pytest.mark.story
@pytest.mark.parametrize(("arguments", "config"), [(["init"], "my_text.yaml"), (["init", "--model"], "my_model.yaml")])
def test_a_dry_run_accepts_the_written_config_and_a_second_init_fails(
    tmp_path: Path, arguments: list[str], config: str
) -> None:
    """Before the data is written, the dry run must report that it is missing."""

    def run_submit(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(CODE_ROOT / "submit.py"), *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert run_submit(*arguments).returncode == 0
    result = run_submit(config, "--dry-run")  # without data
    assert result.returncode == ExitCode.USER_ERROR
    assert "error[data.no_files]: data.source: " in result.stderr
    write_data(tmp_path)
    result = run_submit(config, "--dry-run")
    assert result.returncode == 0 and "\ntrain     " in result.stdout, result.stderr
    files_before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    result = run_submit(*arguments)
    assert result.returncode == ExitCode.USER_ERROR and "error[cli.file_exists]" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files_before
    assert str(CODE_ROOT / "configs/schema.json") in (tmp_path / config).read_text(), (
        "the config must name the schema, which editors use"
    )


def test_init_writes_nothing_if_one_of_its_files_exists(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").touch()
    with pytest.raises(UserError) as error:
        write_starter(tmp_path, model=True)
    assert error.value.code == "cli.file_exists" and "my_model.py" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["my_model.py"]
