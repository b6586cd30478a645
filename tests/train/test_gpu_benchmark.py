"""Tests of the GPU benchmark on the CPU with small models: measurements, failures, results and the table."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.gpu import DEFINITION, ROOT, SMALL_MODEL, get_peak_tflops
from benchmarks.gpu.__main__ import (
    Row,
    describe_failure,
    measure_row,
    read_results,
    rows_1b,
    rows_8b,
    rows_correct,
    run_rows,
    write_gpu_table,
)
from benchmarks.gpu.correctness import find_largest
from benchmarks.gpu.pack import PACKAGES
from benchmarks.table import RESULTS
from pipeline.config.read import load_config
from pipeline.model.spec import training_flops_per_token

FULL_CHECKPOINTING = ("parallel.activation_checkpointing=full", "train.micro_batch=1", "train.compile=false")


def test_measured_tflops_and_tokens_per_s_are_consistent_with_the_step_time() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.speed",
        "3",
        "configs/lm-8b.yaml",
        *SMALL_MODEL,
        *FULL_CHECKPOINTING,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])
    config = load_config(ROOT / "configs/lm-8b.yaml", [*SMALL_MODEL, "train.global_batch=64"])
    vocab_size = config.data.tokenizer.vocab_size
    sequence_length = config.data.sequence_length
    flops_per_token = training_flops_per_token(config.model, vocab_size, sequence_length)
    assert measured["tflops"] == pytest.approx(measured["tokens_per_s"] * flops_per_token / 1e12)
    tokens = 4 * sequence_length  # on a CPU, the benchmark uses 4 samples per step
    assert measured["tokens_per_s"] == pytest.approx(tokens / measured["median_s"]) and len(measured["step_s"]) == 3
    embedding_tflops = measured["tokens_per_s"] * 6 * vocab_size * config.model.dim / 1e12
    assert measured["tflops"] - measured["tflops_without_embedding"] == pytest.approx(embedding_tflops)
    assert measured["losses"][1] < measured["losses"][0]


@pytest.mark.long
@pytest.mark.timeout(2100)
@pytest.mark.parametrize("suite", ["correct", "8b"])
def test_a_suite_measures_all_its_rows_with_a_small_model(tmp_path: Path, suite: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", suite, "--out", tmp_path, "--model", "small", "--steps", "2"]
    result = subprocess.run(
        [*map(str, command), "--limit", "1800"], cwd=ROOT, capture_output=True, text=True, timeout=2000
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [json.loads(line) for line in (tmp_path / f"{suite}.jsonl").read_text().splitlines()]
    expected = rows_correct(small=True, overrides=()) if suite == "correct" else rows_8b(steps=2, model=SMALL_MODEL)
    assert [row["row"] for row in rows] == [row.name for row in expected]


def test_failed_rows_are_recorded_and_no_row_starts_without_enough_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_row = Row("missing module", "no_such_module", ())
    late_row = Row("not started", "speed", ())
    file = tmp_path / "8b.jsonl"
    monkeypatch.setattr("benchmarks.gpu.__main__.MIN_ROW_S", 0.0)
    assert not run_rows([failing_row], file, 60.0, "H200")
    monkeypatch.setattr("benchmarks.gpu.__main__.MIN_ROW_S", 100.0)
    assert not run_rows([late_row], file, 60.0, "H200")
    failed_result, late_result = map(json.loads, file.read_text().splitlines())
    assert "no_such_module" in failed_result["failed"] and late_result["failed"] == "no time was left"
    monkeypatch.setattr("benchmarks.table.RESULTS", tmp_path)
    write_gpu_table(tmp_path)
    assert "not started | no time was left" in (tmp_path / "gpu.md").read_text()
    assert "no_such_module" in (tmp_path / "missing-module.log").read_text(), "the log must have the output of the row"


def test_rows_with_a_result_on_this_gpu_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_rows: list[str] = []
    first_results: dict[str, dict[str, object]] = {"second": {"failed": "not done"}, "third": {"wrong": "2, not 4"}}

    def return_result(row: Row, limit_s: float, folder: Path) -> dict[str, object]:
        # the last row may use all the remaining time, and each other row only a part of it
        assert (limit_s > 30.0) == (row.name == "third")
        measured_rows.append(row.name)
        return first_results.pop(row.name, {"answer": 1})

    monkeypatch.setattr("benchmarks.gpu.__main__.measure_row", return_result)
    rows = [Row(name, "", ()) for name in ("first", "second", "third")]
    file = tmp_path / "8b.jsonl"
    assert not run_rows(rows, file, 90.0, "H200") and run_rows(rows, file, 90.0, "H200")
    assert measured_rows == ["first", "second", "third", "second", "third"]
    assert run_rows(rows[2:], file, 90.0, "H100") and measured_rows[5:] == ["third"], (
        "each GPU must have separate results"
    )
    results = read_results(file)
    assert {(name, gpu): result["answer"] for (name, gpu), result in results.items() if "answer" in result} == {
        ("first", "H200"): 1, ("second", "H200"): 1, ("third", "H200"): 1, ("third", "H100"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("program_end", ["", "; os._exit(1)"])
def test_a_result_counts_despite_later_output_or_a_nonzero_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program_end: str
) -> None:
    """NCCL may log after the result, and a process may crash when it exits."""
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    program = "import os; print('{\"answer\": 4}\\nNCCL INFO comm 0x1 - Destroy COMPLETE\\n3', flush=True)"
    (tmp_path / "benchmarks/gpu/verbose.py").write_text(program + program_end)
    monkeypatch.setattr("benchmarks.gpu.__main__.ROOT", tmp_path)
    assert measure_row(Row("verbose", "verbose", ()), 60.0, tmp_path)["answer"] == 4


def test_describe_failure_returns_the_error_without_the_advice_after_it() -> None:
    output = (
        "Traceback (most recent call last):\n  File ...\ntorch.AcceleratorError: CUDA error: misaligned address\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable it.\n"
    )
    assert describe_failure(output) == "torch.AcceleratorError: CUDA error: misaligned address"
    assert describe_failure("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nsee\n") == "out of memory"
    assert describe_failure("killed\n") == "killed" and describe_failure("") == ""


@pytest.mark.story
def test_a_row_that_exceeds_its_time_limit_leaves_no_processes_or_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The process of the row and its child processes are killed, and its temporary folder is removed."""
    program = tmp_path / "endless.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{tmp_path}'])\n"
        f"open('{tmp_path}/temporary', 'w').write(os.environ['TMPDIR'])\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr("benchmarks.gpu.__main__.ROOT", tmp_path)
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    program.rename(tmp_path / "benchmarks/gpu/endless.py")
    assert measure_row(Row("endless", "endless", ()), 5.0, tmp_path)["failed"] == "not done in 5 s"
    assert not Path((tmp_path / "temporary").read_text()).exists()
    commands = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not [command for command in commands if b"time.sleep(60)" in command and str(tmp_path).encode() in command]


def test_clocks_are_measured_only_during_the_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake nvidia-smi prints the current time as the clock, so that the test can see which samples were used."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        f"#!{sys.executable}\nimport sys, time\n"
        "assert sys.argv[1:3] == ['--id=0', '--query-gpu=clocks.sm,power.draw,temperature.gpu'], sys.argv\n"
        "print(f'{time.time()}, [N/A], 61')\n"
    )
    smi.chmod(0o700)
    program = "import json, time; began = time.time(); time.sleep(1); ended = time.time(); time.sleep(2)\n"
    program += "print(json.dumps({'between': [began, ended], 'began': began, 'ended': ended}))"
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    (tmp_path / "benchmarks/gpu/steps.py").write_text(program)
    monkeypatch.setattr("benchmarks.gpu.__main__.ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = measure_row(Row("steps", "steps", ()), 60.0, tmp_path)
    assert result["began"] - 0.1 < result["clock_mhz"] < result["ended"] and result["temperature_c"] == 61.0
    assert "between" not in result, "the times of the steps must not be stored in the results"
    assert "power_w" not in result, "a value must be left out if nvidia-smi prints [N/A]"


def test_the_pack_contains_all_packages_that_the_rows_import() -> None:
    """The GPU machine has torch, numpy, h5py and their dependencies. The pack must contain all other packages."""
    installed_modules = "torch, torch.distributed.checkpoint, torch.distributed.pipelining, torch._dynamo, numpy, h5py"
    row_modules = (
        "pipeline.train.train_stage, pipeline.train.trainer, pipeline.__main__, benchmarks.gpu.correctness, submit"
    )
    row_modules += ", benchmarks.gpu.trainer_speed, data_prep.shard, data_prep.prepare_text, data_prep.shard_writer"
    program = (
        f"import sys, {installed_modules}; installed = set(sys.modules); "
        f"import {row_modules}; print(*set(sys.modules) - installed)"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    imported_packages = {name.split(".")[0] for name in result.stdout.split()} - set(sys.stdlib_module_names)
    distributions = packages_distributions()
    packed_distributions = {name.split("=")[0].replace("_", "-") for name in PACKAGES}
    missing_packages = {
        package
        for package in imported_packages & distributions.keys()
        for name in distributions[package]
        if name.lower().replace("_", "-") not in packed_distributions
    }
    sluice_or_installed_packages = {
        "sluice", "cli", "pipeline", "slurm", "tracking", "planning", "data_prep", "submit", "benchmarks", "torch",
        "numpy", "h5py",
    }  # fmt: skip
    assert missing_packages <= sluice_or_installed_packages


def test_wrong_results_are_recorded_and_fail_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.measure_row", lambda row, limit_s, folder: {"wrong": "2, not 4"})
    assert not run_rows(rows_correct(small=True, overrides=()), tmp_path / "correct.jsonl", 60.0, "H200")
    rows = [json.loads(line) for line in (tmp_path / "correct.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and rows[-1] == {"row": "saves", "device": "H200", "wrong": "2, not 4"}
    assert find_largest([1.0, math.nan, 2.0]) == math.inf


def test_the_reference_speed_has_consistent_tokens_per_second_and_mfu() -> None:
    config = load_config(ROOT / "configs/lm-8b.yaml", [])
    flops_per_token = training_flops_per_token(config.model, 128_256, 4096)
    embedding_flops = 6 * 128_256 * config.model.dim
    mfu = 10_471 * flops_per_token / 989.4e12  # the reference has 10,471 tokens/s; 989.4 TFLOP/s is the peak in bf16
    mfu_without_embedding = 10_471 * (flops_per_token - embedding_flops) / 989.4e12
    assert (mfu, mfu_without_embedding) == pytest.approx((0.578, 0.545), abs=1e-3)
    assert "57.8 % (54.5 %" in DEFINITION and "10,471 tokens/s" in DEFINITION
    assert DEFINITION in (RESULTS / "gpu.md").read_text()


def test_each_row_has_a_valid_config_and_known_gpus_have_a_peak() -> None:
    for row in chain(rows_8b(steps=8, model=()), rows_1b(steps=8, model=())):
        if row.module != "titan":
            overrides = [argument for argument in row.arguments[2:] if argument != "--flash"]
            load_config(ROOT / row.arguments[1], [*overrides, "train.global_batch=512"])
    assert get_peak_tflops("NVIDIA H200") == get_peak_tflops("NVIDIA H100 80GB HBM3") == 989.4
    assert get_peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0 and get_peak_tflops("something else") is None
