"""Peak memory of a step's tensors in GiB, as torch's allocator counted it on a fake H200 (torch 2.11.0, CUDA 13).

Each entry is a peak, the name of a config in configs/, and overrides. The peak was measured with
`python -m benchmarks.gpu.speed 1 CONFIG …`: one rank, 32,768 tokens per step. A test compares the predictions of `plan`
with these peaks, and `make test-gpu-fake` checks that the peaks are still the same.
"""

from __future__ import annotations

NO_MASTER_WEIGHTS = "optimizer.state={master: none, moments: bf16}"
EMBEDDING = "'model.embed_tokens.*'"
ACTIVATION_CHECKPOINTING = "parallel.activation_checkpointing"

PEAKS: list[tuple[float, str, tuple[str, ...]]] = [
    (119.63, "lm-8b-1gpu", ()),
    (119.82, "lm-8b-1gpu", ("parallel.zero=1", "train.micro_batch=1")),
    (65.52, "lm-8b-1gpu", (NO_MASTER_WEIGHTS, f"{ACTIVATION_CHECKPOINTING}=full")),
    (86.55, "lm-8b-1gpu", (NO_MASTER_WEIGHTS,)),
    (72.57, "lm-8b-1gpu", ("optimizer.state={master: none, moments: int8}",)),
    (105.63, "lm-8b-1gpu", ("optimizer.state={moments: int8}",)),
    (109.28, "lm-8b-1gpu", ("train.loss_chunk=null", "train.micro_batch=1")),
    (98.60, "lm-8b-1gpu", (f"{ACTIVATION_CHECKPOINTING}=full",)),
    (130.37, "lm-8b-1gpu", ("train.compile=false",)),
    (80.44, "lm-8b-1gpu", (NO_MASTER_WEIGHTS, f"{ACTIVATION_CHECKPOINTING}=none", "train.micro_batch=1")),
    (43.14, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none",)),
    (44.62, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=selective", "train.micro_batch=8")),
    (47.05, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "model.tie_word_embeddings=false")),
    (38.54, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.state={moments: bf16}")),
    (63.99, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.loss_chunk=null")),
    (23.79, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=full", "train.compile=false")),
    (51.14, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.compile=false")),
    (41.62, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.precision=fp32", "train.micro_batch=2")),
    (63.99, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.precision=fp16", "train.loss_chunk=null")),
    (42.93, "lm-1b", ("parallel.zero=2", f"{ACTIVATION_CHECKPOINTING}=none")),
    (36.38, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.state={moments: int8}")),
    (39.51, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.name=muon")),
    (20.06, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", f"optimizer.freeze=[{EMBEDDING}, 'model.layers.?.*']")),
    (67.57, "lm-8b-1gpu", (f"optimizer.freeze=[{EMBEDDING}, 'model.layers.?.*', 'model.layers.1?.*']",)),
]
