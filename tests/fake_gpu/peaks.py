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
    (119.14, "lm-8b-1gpu", ()),
    (119.33, "lm-8b-1gpu", ("parallel.zero=1", "train.micro_batch=1")),
    (65.03, "lm-8b-1gpu", (NO_MASTER_WEIGHTS, f"{ACTIVATION_CHECKPOINTING}=full")),
    (86.06, "lm-8b-1gpu", (NO_MASTER_WEIGHTS,)),
    (72.08, "lm-8b-1gpu", ("optimizer.state={master: none, moments: int8}",)),
    (105.14, "lm-8b-1gpu", ("optimizer.state={moments: int8}",)),
    (109.28, "lm-8b-1gpu", ("train.loss_chunk=null", "train.micro_batch=1")),
    (98.11, "lm-8b-1gpu", (f"{ACTIVATION_CHECKPOINTING}=full",)),
    (130.37, "lm-8b-1gpu", ("train.compile=false",)),
    (79.95, "lm-8b-1gpu", (NO_MASTER_WEIGHTS, f"{ACTIVATION_CHECKPOINTING}=none", "train.micro_batch=1")),
    (42.65, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none",)),
    (44.35, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=selective", "train.micro_batch=8")),
    (46.56, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "model.tie_word_embeddings=false")),
    (38.05, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.state={moments: bf16}")),
    (63.99, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.loss_chunk=null")),
    (23.79, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=full", "train.compile=false")),
    (51.14, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.compile=false")),
    (41.62, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.precision=fp32", "train.micro_batch=2")),
    (63.99, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "train.precision=fp16", "train.loss_chunk=null")),
    (42.44, "lm-1b", ("parallel.zero=2", f"{ACTIVATION_CHECKPOINTING}=none")),
    (35.89, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.state={moments: int8}")),
    (39.02, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", "optimizer.name=muon")),
    (19.57, "lm-1b", (f"{ACTIVATION_CHECKPOINTING}=none", f"optimizer.freeze=[{EMBEDDING}, 'model.layers.?.*']")),
    (67.08, "lm-8b-1gpu", (f"optimizer.freeze=[{EMBEDDING}, 'model.layers.?.*', 'model.layers.1?.*']",)),
]
