"""Tests of context parallelism: every layout trains like one process."""

from __future__ import annotations

from typing import Any

from tests.parallel.test_packed import PROMPTS, TEXT, WINDOW, check_packed
from tests.parallel.test_parallel import CHUNKED, FEW_BATCHES, FEW_STEPS, TIED, check_against_one_process

GROUPED = {"heads": 4, "kv_heads": 2, "qk_norm": True}


def test_context_parallel_equals_one_process() -> None:
    check_against_one_process(
        2,
        {"parallel": {"context": 2}},
        {"parallel": {"context": 2, "zero": 3, "activation_checkpointing": "selective"}, "model": GROUPED},
        {"parallel": {"context": 2, "activation_checkpointing": "full"}, "model": WINDOW, "train": CHUNKED},
        steps=FEW_STEPS,
    )
    check_against_one_process(
        4,
        {"parallel": {"context": 4}},
        {"parallel": {"context": 2, "zero": 3}, "model": TIED},
        {"parallel": {"context": 2, "zero": 1, "data": {"replicate": 2, "shard": 1}}},
        {"parallel": {"context": 2, "tensor": 2}, "train": FEW_BATCHES},
        {"parallel": {"context": 2, "tensor": 2, "sequence": False}, "train": FEW_BATCHES | CHUNKED},
        {"parallel": {"context": 2, "pipeline": 2}, "model": WINDOW},
        steps=FEW_STEPS,
    )


DOCUMENT_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TEXT, {"parallel": {"context": 4}}),
    (PROMPTS, {"parallel": {"context": 2, "zero": 3}, "model": WINDOW}),
    (TEXT, {"parallel": {"context": 2, "tensor": 2}, "train": {"micro_batch": 8, "loss_chunk": 7}}),
    (PROMPTS, {"parallel": {"context": 2, "pipeline": 2}}),
]


def test_documents_on_several_ranks_give_the_same_results_as_single_documents() -> None:
    check_packed(4, DOCUMENT_CASES)
