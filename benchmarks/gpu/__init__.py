"""Check and measure Sluice on one GPU in half an hour, on a machine without network.

    python -m benchmarks.gpu correct --out FOLDER     correctness: comparison with fp64, stops, saves during steps
    python -m benchmarks.gpu 8b --out FOLDER          speed of 8.03 billion parameters with several memory settings
    python -m benchmarks.gpu 1b --out FOLDER          speed of 1.5 billion parameters, in turn with torchtitan
    python -m benchmarks.gpu table --out FOLDER       write benchmarks/results/gpu.md from the results in FOLDER

Each of the first three commands runs a suite of rows and ends within 540 s (`--limit`). A row is one benchmark or
check. A row runs in a separate process, so that an out-of-memory error does not affect other rows. The result of a row
is appended to FOLDER/SUITE.jsonl. The output of a failed row is in FOLDER/ROW.log. If you repeat a command, it runs
only the rows that are missing, that failed, or that ran on another kind of GPU.

Config overrides (`key=value`) apply to all rows. Without a C compiler, use `train.compile=false`. With `--model small`,
you can try out a suite with a small model, also on a CPU. `python -m benchmarks.gpu.pack FOLDER` downloads packages for
a machine without network.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.5, "H200 NVL": 835.5,
    "H200": 989.4, "H100": 989.4, "GH200": 989.4, "A100": 312.0, "L40S": 362.0, "B200": 2250.0,
}  # fmt: skip
"""Dense bf16 peaks from the vendors' data sheets, by a part of the device's name. The first match counts.

H100, H200, A100 and B200 are SXM cards if the name contains nothing else.
"""
DEFINITION = """\
MFU (model FLOP utilisation): 6 N + 12 L H Q T operations per token, times tokens/s, divided by the GPU's dense bf16
peak. N: all parameters, including the embedding; L layers, H heads of width Q, T tokens of context. The causal mask and
recomputation do not change the count (pipeline/model/spec.py, `training_flops_per_token`). The second MFU excludes a
separate embedding from N, because it is only looked up. Target: 57.8 % (54.5 % by the second definition) for 8.03
billion parameters on one H200, 10,471 tokens/s, with state in bf16. Goal: 65 % by the first definition, with fp32
weights."""
IS_FAKE_GPU = "FAKE_GPUS" in os.environ
"""Whether this process runs on the fake GPU (tests/fake_gpu).

The fake GPU computes nothing, so the node check would report an error.
"""
ONE_GPU_OVERRIDES = (
    "parallel.data=auto", "parallel.zero=0", "parallel.tensor=1", "parallel.pipeline=1", "stages.train.nodes=1",
    "stages.train.tasks_per_node=1", f"recovery.preflight={str(not IS_FAKE_GPU).lower()}",
)  # fmt: skip
SMALL_MODEL = (
    "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=64",
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "train.threads=1",
)  # fmt: skip
"""Overrides of the model of `--model small`."""


def get_peak_tflops(name: str) -> float | None:
    """Return the dense bf16 peak of a device in TFLOP/s; None if the device is unknown."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
