"""What one GPU makes of Sluice, in half an hour, on a machine without a network.

    python -m benchmarks.gpu correct --out FOLDER     is it right: against fp64, stops, saves in the middle of steps
    python -m benchmarks.gpu 8b --out FOLDER          8.03 billion parameters: what each choice of memory brings
    python -m benchmarks.gpu 1b --out FOLDER          1.5 billion parameters beside torchtitan, A B A B
    python -m benchmarks.gpu table --out FOLDER       benchmarks/results/gpu.md from what the folder has

Each of the first three ends within 540 s by a clock of its own (`--limit`). Every row is a process of its own, so that
one that runs out of memory takes nothing along, and is written to FOLDER/NAME.jsonl as soon as it is known; rows that
the time did not suffice for say so, and what failed is told in FOLDER/ROW.log. The same call again measures what is
missing, was wrong, or is of another kind of GPU; what was compiled lies in the folder for temporary files. `key=value`
behind it holds for all rows (`train.compile=false` where no C compiler is).
`python -m benchmarks.gpu.pack FOLDER` fetches wheels that such a machine lacks.
Without a GPU everything runs on the CPU if `--model small` asks for a small model: a rehearsal, of no meaning.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100 NVL": 835.5, "H200 NVL": 835.5,
    "H200": 989.4, "H100": 989.4, "GH200": 989.4, "A100": 312.0, "L40S": 362.0, "B200": 2250.0,
}  # fmt: skip
"""Dense bf16, from the vendor's data sheets (SXM where none is said); the first name that fits counts."""
DEFINITION = """\
MFU (model FLOP utilisation): 6 N + 12 L H Q T operations per token, times tokens/s, over the GPU's dense bf16
peak. N: all parameters, the embedding too; L layers, H heads of width Q, T tokens of context; no discount for the
causal mask, nothing for what is recomputed (pipeline/model/decoder.py, `flops_per_token`). The second MFU leaves an
embedding of its own out of N, for it is only looked up. The bar: 57.8 % (54.5 % by the second) for 8.03 billion
parameters on one H200, 10,471 tokens/s, with states in bf16; the aim: 65 % by the first, with fp32 weights kept."""
IS_FAKE_GPU = "FAKE_GPUS" in os.environ
"""Whether the GPU is not there (tests/fake_gpu): nothing is computed, and the check of nodes would find it broken."""
ONE_GPU_OVERRIDES = (
    "parallel.data=auto", "parallel.zero=0", "parallel.tensor=1", "parallel.pipeline=1", "stages.train.nodes=1",
    "stages.train.tasks_per_node=1", f"recovery.preflight={str(not IS_FAKE_GPU).lower()}",
)  # fmt: skip
SMALL_MODEL = (
    "model.dim=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.intermediate_size=64",
    "data.tokenizer.vocab_size=300", "data.sequence_length=32", "train.threads=1",
)  # fmt: skip
"""For a rehearsal."""


def get_peak_tflops(name: str) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s; None where it is not known."""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
