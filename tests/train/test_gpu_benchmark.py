"""The GPU benchmark's own path, on the CPU with small models: real steps, and figures that fit together."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import DEFINITION, OPTIONS, ROOT, peak_of
from benchmarks.table import RESULTS
from pipeline.config.read import load_config
from pipeline.model.decoder import flops_per_token

SMALL = (
    "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=64",
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "train.threads=1",
)  # fmt: skip
RECOMPUTED = ("parallel.activation_checkpointing=full", "train.micro_batch=1", "train.compile=false")


AS_IT_COMES = pytest.param((), id="as it comes: compiled, selective", marks=pytest.mark.long)


@pytest.mark.parametrize("options", [AS_IT_COMES, pytest.param(RECOMPUTED, id="recomputed")])
def test_one_measurement(options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--steps", "3", "--one", "configs/lm-8b.yaml", *SMALL, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    config = load_config(ROOT / "configs/lm-8b.yaml", [*SMALL, "train.global_batch=64"])
    per_token = flops_per_token(config.model, 300, 32)
    assert found["tflops"] == pytest.approx(found["tokens_per_s"] * per_token / 1e12)
    assert found["losses"][1] < found["losses"][0], "it trains"


def test_the_bar_is_one_in_tokens_and_in_share_of_the_peak() -> None:
    config = load_config(ROOT / "configs/lm-8b.yaml", [])
    share = 10_471 * flops_per_token(config.model, 128_256, 4096) / 989.4e12
    assert share == pytest.approx(0.578, abs=5e-4) and "57.8 %" in DEFINITION and "10,471 tokens/s" in DEFINITION
    assert DEFINITION in (RESULTS / "gpu.md").read_text()


def test_every_option_is_a_config_and_devices_are_known() -> None:
    for name in ("configs/lm-1b.yaml", "configs/lm-8b.yaml"):
        for _, overrides in OPTIONS:
            load_config(ROOT / name, [*overrides, "train.global_batch=512"])
    assert peak_of("NVIDIA H200") == peak_of("NVIDIA H100 80GB HBM3") == 989.4
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312.0 and peak_of("something else") is None
