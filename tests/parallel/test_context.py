"""Tests of context parallelism: every layout trains like one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.test_packed import PROMPTS, TEXT, WINDOW, Case, check_packed
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


@pytest.mark.story
def test_context_parallel_with_another_axis_equals_one_process() -> None:
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


@pytest.mark.long
@pytest.mark.parametrize("model", [{}, TIED | WINDOW, GROUPED], ids=["plain", "tied, window", "grouped"])
def test_context_parallel_with_all_other_axes_equals_one_process(model: dict[str, Any]) -> None:
    split_backward = {"pipeline": 2, "virtual_stages": 2}
    check_against_one_process(2, *({"parallel": {"context": 2, "zero": zero}, "model": model} for zero in range(4)))
    layouts: list[dict[str, Any]] = [
        {"context": 4},
        {"context": 4, "zero": 3},
        {"context": 2, "zero": 3, "data": {"replicate": 2, "shard": 1}},
        {"context": 2, "pipeline": 2, "zero": 3},
        {"context": 2, **split_backward, "schedule": "zbv"},
        {"context": 2, **split_backward, "schedule": "interleaved_zero_bubble"},
        {"context": 2, **split_backward, "schedule": "dualpipe_v"},
    ]
    check_against_one_process(4, *({"parallel": layout, "model": model} for layout in layouts))
    with_tensor = [{"context": 2, "tensor": 2}, {"context": 2, "tensor": 2, "sequence": False}]
    check_against_one_process(4, *({"parallel": each, "model": model, "train": FEW_BATCHES} for each in with_tensor))
    layout = {"context": 2, "tensor": 2, "pipeline": 2}
    check_against_one_process(8, {"parallel": layout, "model": model, "train": FEW_BATCHES})


DOCUMENT_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (TEXT, {"parallel": {"context": 4}}),
    (PROMPTS, {"parallel": {"context": 2, "zero": 3}, "model": WINDOW}),
    (TEXT, {"parallel": {"context": 2, "tensor": 2}, "train": {"micro_batch": 8, "loss_chunk": 7}}),
    (PROMPTS, {"parallel": {"context": 2, "pipeline": 2}}),
]


def test_documents_on_two_ranks_give_the_same_results_as_single_documents() -> None:
    check_packed(2, [(TEXT, {"parallel": {"context": 2}})])


@pytest.mark.story
def test_documents_on_four_ranks_give_the_same_results_as_single_documents() -> None:
    check_packed(4, DOCUMENT_CASES)


@pytest.mark.long
def test_ten_steps_on_documents_equal_single_documents_with_every_other_axis() -> None:
    ten_steps = {"steps": 10}
    check_packed(2, [(TEXT, {"parallel": {"context": 2}, "train": ten_steps})])
    layouts: list[dict[str, Any]] = [
        {"context": 4},
        {"context": 2, "zero": 3},
        {"context": 2, "pipeline": 2},
    ]
    cases: list[Case] = [(TEXT, {"parallel": layout, "train": ten_steps}) for layout in layouts]
    with_tensor = {"parallel": {"context": 2, "tensor": 2}, "train": {**ten_steps, "micro_batch": 8}}
    check_packed(4, [*cases, (TEXT, with_tensor)])
