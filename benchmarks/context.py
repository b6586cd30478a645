"""Compare the memory of activations on context-parallel ranks with that of one rank.

    python -m benchmarks.context

The ranks are rehearsed (planning/rehearse.py): all tensors of two steps are counted, without values.
tests/planning/test_rehearse.py compares rehearsed with real ranks.
"""

from __future__ import annotations

from benchmarks.table import write_table
from pipeline.config.read import parse_config
from planning.rehearse import rehearse_rank

SIZES = (1, 2, 4, 8)
VOCAB = 4096
LENGTH = 16384


def measure_activations(size: int, checkpointing: str) -> int:
    """Return the bytes of activations at the peak of a step of rank 0."""
    values = {
        "run": {"name": "context"},
        "data": {"source": "text.jsonl", "sequence_length": LENGTH, "tokenizer": {"vocab_size": VOCAB}},
        "model": {"dim": 1024, "layers": 8, "heads": 16, "kv_heads": 4},
        "parallel": {"context": size, "zero": 3 if size > 1 else 0, "activation_checkpointing": checkpointing},
        "train": {"steps": 2, "global_batch": 1, "micro_batch": 1, "loss_chunk": 1024, "precision": "bf16"},
        "stages": {"train": {"nodes": 1, "tasks_per_node": size}},
    }
    return rehearse_rank(parse_config(values, "benchmark"), 0, VOCAB).peak_by_kind()["activations"]


def main() -> None:
    """Rehearse all sizes, and write benchmarks/results/context.md."""
    rows = []
    for checkpointing in ("none", "selective", "full"):
        base = measure_activations(1, checkpointing)
        for size in SIZES:
            activations = base if size == 1 else measure_activations(size, checkpointing)
            share = activations / base
            rows.append([checkpointing, f"{size}", f"{activations / 1e6:,.0f}", f"{share:.3f}", f"{share * size:.2f}"])
    note = (
        f"Activations of rank 0 at the peak of a step: a sequence of {LENGTH:,} tokens, 8 blocks of width 1,024 with "
        "16 heads and 4 key heads, bf16, loss in chunks of 1,024 tokens. Rehearsed."
    )
    header = ["activation checkpointing", "parallel.context", "MB", "share of one rank", "share × N"]
    write_table("context", "Memory of activations with context parallelism", note, header, rows)


if __name__ == "__main__":
    main()
