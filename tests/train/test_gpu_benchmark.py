"""The GPU benchmark's own paths, on the CPU with small models: real steps, and figures that fit together."""

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
from benchmarks.gpu.correct import find_largest
from benchmarks.gpu.pack import PACKAGES
from benchmarks.table import RESULTS
from pipeline.config.read import load_config
from pipeline.model.spec import training_flops_per_token

RECOMPUTED = ("parallel.activation_checkpointing=full", "train.micro_batch=1", "train.compile=false")


def test_one_measurement() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.speed", "3", "configs/lm-8b.yaml", *SMALL_MODEL, *RECOMPUTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    config = load_config(ROOT / "configs/lm-8b.yaml", [*SMALL_MODEL, "train.global_batch=64"])
    per_token = training_flops_per_token(config.model, 300, 32)
    assert found["tflops"] == pytest.approx(found["tokens_per_s"] * per_token / 1e12)
    assert found["tokens_per_s"] == pytest.approx(4 * 32 / found["median_s"]) and len(found["step_s"]) == 3
    assert found["tflops"] - found["tflops_without_embedding"] == pytest.approx(
        found["tokens_per_s"] * 6 * 300 * 32 / 1e12
    )
    assert found["losses"][1] < found["losses"][0], "it trains"


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("sequence", ["correct", "8b"])
def test_a_rehearsal_of_a_sequence(tmp_path: Path, sequence: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", sequence, "--out", tmp_path, "--model", "small", "--steps", "2"]
    done = subprocess.run(
        [*map(str, command), "--limit", "1200"], cwd=ROOT, capture_output=True, text=True, timeout=1400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / f"{sequence}.jsonl").read_text().splitlines()]
    wanted = rows_correct(True, ()) if sequence == "correct" else rows_8b(2, SMALL_MODEL)
    assert [row["row"] for row in rows] == [row.name for row in wanted]


def test_rows_are_written_as_they_are_known_and_the_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Row("there is none", "no_such_module", ()), Row("never begun", "speed", ())]
    file = tmp_path / "8b.jsonl"
    monkeypatch.setattr("benchmarks.gpu.__main__.SHORTEST_S", 0.0)
    assert not run_rows(rows[:1], file, 60.0, "H200")
    monkeypatch.setattr("benchmarks.gpu.__main__.SHORTEST_S", 100.0)
    assert not run_rows(rows[1:], file, 60.0, "H200")
    first, second = map(json.loads, file.read_text().splitlines())
    assert "no_such_module" in first["failed"] and second["failed"] == "no time was left"
    monkeypatch.setattr("benchmarks.table.RESULTS", tmp_path)
    write_gpu_table(tmp_path)
    assert "never begun | no time was left" in (tmp_path / "gpu.md").read_text()
    assert "no_such_module" in (tmp_path / "there-is-none.log").read_text(), "all that it said"


def test_what_is_known_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    first_time: dict[str, dict[str, object]] = {"second": {"failed": "not done"}, "third": {"wrong": "2, not 4"}}

    def answer(row: Row, limit_s: float, folder: Path) -> dict[str, object]:
        assert (limit_s > 30.0) == (row.name == "third"), "time is left to the others"
        asked.append(row.name)
        return first_time.pop(row.name, {"answer": 1})

    monkeypatch.setattr("benchmarks.gpu.__main__.measure_row", answer)
    rows, file = [Row(name, "", ()) for name in ("first", "second", "third")], tmp_path / "8b.jsonl"
    assert not run_rows(rows, file, 90.0, "H200") and run_rows(rows, file, 90.0, "H200")
    assert asked == ["first", "second", "third", "second", "third"]
    assert run_rows(rows[2:], file, 90.0, "H100") and asked[5:] == ["third"], "another GPU is another answer"
    assert {(name, on): found["answer"] for (name, on), found in read_results(file).items() if "answer" in found} == {
        ("first", "H200"): 1, ("second", "H200"): 1, ("third", "H200"): 1, ("third", "H100"): 1,
    }  # fmt: skip


@pytest.mark.parametrize("end", ["", "; os._exit(1)"])
def test_an_answer_counts_whatever_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """NCCL's log behind it, or a process that does not leave well."""
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    program = "import os; print('{\"answer\": 4}\\nNCCL INFO comm 0x1 - Destroy COMPLETE\\n3', flush=True)"
    (tmp_path / "benchmarks/gpu/talks.py").write_text(program + end)
    monkeypatch.setattr("benchmarks.gpu.__main__.ROOT", tmp_path)
    assert measure_row(Row("talks", "talks", ()), 60.0, tmp_path)["answer"] == 4


def test_the_reason_is_the_error_not_the_advice_behind_it() -> None:
    said = (
        "Traceback (most recent call last):\n  File ...\ntorch.AcceleratorError: CUDA error: misaligned address\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable it.\n"
    )
    assert describe_failure(said) == "torch.AcceleratorError: CUDA error: misaligned address"
    assert describe_failure("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\nsee\n") == "out of memory"
    assert describe_failure("killed\n") == "killed" and describe_failure("") == ""


def test_what_outlasts_its_time_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither the row's process nor what that began."""
    program = tmp_path / "begins.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{tmp_path}'])\n"
        f"open('{tmp_path}/temporary', 'w').write(os.environ['TMPDIR'])\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr("benchmarks.gpu.__main__.ROOT", tmp_path)
    (tmp_path / "benchmarks/gpu").mkdir(parents=True)
    program.rename(tmp_path / "benchmarks/gpu/begins.py")
    assert measure_row(Row("endless", "begins", ()), 5.0, tmp_path)["failed"] == "not done in 5 s"
    assert not Path((tmp_path / "temporary").read_text()).exists()
    commands = [each.read_bytes() for each in Path("/proc").glob("[0-9]*/cmdline") if each.exists()]
    assert not [each for each in commands if b"time.sleep(60)" in each and str(tmp_path).encode() in each]


def test_clocks_are_those_while_steps_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a GPU that counts in its clock when it was asked; before and after the steps it says less and more."""
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
    found = measure_row(Row("steps", "steps", ()), 60.0, tmp_path)
    assert found["began"] - 0.1 < found["clock_mhz"] < found["ended"] and found["temperature_c"] == 61.0
    assert not found.keys() & {"power_w", "between"}, "what it does not tell is left out"


def test_all_that_a_bare_machine_lacks_is_packed() -> None:
    """What the rows import and what comes with it, but for what torch, numpy and h5py bring themselves."""
    heavy = "torch, torch.distributed.checkpoint, torch.distributed.pipelining, torch._dynamo, numpy, h5py"
    ours = "pipeline.train.train_stage, pipeline.train.trainer, pipeline.__main__, benchmarks.gpu.correct, submit"
    ours += ", benchmarks.gpu.trained, data_prep.shard, data_prep.prepare_text, data_prep.shard_writer"
    program = f"import sys, {heavy}; had = set(sys.modules); import {ours}; print(*set(sys.modules) - had)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    roots = {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    known, packed = packages_distributions(), {name.split("=")[0].replace("_", "-") for name in PACKAGES}
    lacking = {
        root for root in roots & known.keys() for name in known[root] if name.lower().replace("_", "-") not in packed
    }
    assert (
        lacking
        - {
            "sluice",
            "cli",
            "pipeline",
            "slurm",
            "tracking",
            "planning",
            "data_prep",
            "submit",
            "benchmarks",
            "torch",
            "numpy",
            "h5py",
        }
        == set()
    )


def test_a_wrong_answer_is_told_and_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.measure_row", lambda row, limit_s, folder: {"wrong": "2, not 4"})
    assert not run_rows(rows_correct(True, ()), tmp_path / "correct.jsonl", 60.0, "H200")
    rows = [json.loads(line) for line in (tmp_path / "correct.jsonl").read_text().splitlines()]
    assert len(rows) == 7 and rows[-1] == {"row": "saves", "device": "H200", "wrong": "2, not 4"}
    assert find_largest([1.0, math.nan, 2.0]) == math.inf


def test_the_bar_is_one_in_tokens_and_in_share_of_the_peak() -> None:
    config = load_config(ROOT / "configs/lm-8b.yaml", [])
    per_token = training_flops_per_token(config.model, 128_256, 4096)
    shares = (10_471 * operations / 989.4e12 for operations in (per_token, per_token - 6 * 128_256 * 4096))
    assert tuple(shares) == pytest.approx((0.578, 0.545), abs=1e-3)
    assert "57.8 % (54.5 %" in DEFINITION and "10,471 tokens/s" in DEFINITION
    assert DEFINITION in (RESULTS / "gpu.md").read_text()


def test_every_row_is_a_config_and_devices_are_known() -> None:
    for row in chain(rows_8b(8, ()), rows_1b(8, ())):
        if row.module != "titan":
            asked = [key for key in row.arguments[2:] if key != "--flash"]
            load_config(ROOT / row.arguments[1], [*asked, "train.global_batch=512"])
    assert get_peak_tflops("NVIDIA H200") == get_peak_tflops("NVIDIA H100 80GB HBM3") == 989.4
    assert get_peak_tflops("NVIDIA A100-SXM4-80GB") == 312.0 and get_peak_tflops("something else") is None
