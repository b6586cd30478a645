"""Tests that the memory and traffic that `plan` estimates equal those of rehearsed ranks (`plan --rehearse`).

test_rehearse.py compares rehearsed ranks with real ranks. The models of these tests have as many key heads as query
heads. With fewer key heads, the CPU kernels of a rehearsal would repeat the keys, and GPU kernels would not.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeline.base.dist_env import RankInfo
from pipeline.config.read import ConfigError
from pipeline.config.sections import Config
from pipeline.parallel.mesh import LayoutError, resolve_layout
from pipeline.parallel.traffic import count_rank_traffic
from planning.memory import estimate_memory
from planning.rehearse import TensorAccount, rehearse_rank
from planning.timeline import rank_actions
from tests.support.ranks import run_ranks
from tests.support.tiny_training import tiny_config

VOCAB = 2048
MODEL_SIZES = {"dim": 256, "layers": 4, "heads": 8, "intermediate_size": 768}
PROCESS_GROUPS = {
    "data": "replicate",
    "shard": "shard",
    "replicate": "replicate",
    "context": "cp",
    "tensor": "tp",
    "pipeline": "pp",
}
"""Process group of a rehearsal for each group that `plan` lists."""
LOSS_AND_NORM_BYTES = 32
"""Maximum bytes that a rank sends in the group of all ranks, for the loss and the gradient norm."""


def make_config(case: dict[str, Any]) -> Config:
    """Return the config of a case.

    Args:
        case: keys of `parallel` and `train`, and four more. `data` is the data-parallel size, `shard` the number of
            ranks that shard a replica (by default all of `data`), `batches` the micro-batches per step, and `sections`
            has further sections of the config.
    """
    case = dict(case)
    sections = dict(case.pop("sections", {}))
    data = case.pop("data", 1)
    batches = case.pop("batches", 2)
    train: dict[str, Any] = {key: case.pop(key) for key in ("precision", "loss_chunk", "micro_batch") if key in case}
    ranks = data * case.get("tensor", 1) * case.get("pipeline", 1) * case.get("context", 1)
    train = {"micro_batch": 2, **train}
    train["global_batch"] = train["micro_batch"] * batches * data
    if shard := case.pop("shard", 0):
        case["data"] = {"replicate": data // shard, "shard": shard}
    stages = {"train": {"tasks_per_node": min(8, ranks), "nodes": max(1, ranks // 8)}}
    data_section = {"sequence_length": 256, "tokenizer": {"vocab_size": VOCAB}}
    model = MODEL_SIZES | sections.pop("model", {})
    return tiny_config(8, parallel=case, train=train, data=data_section, model=model, stages=stages, **sections)


def sum_bytes_by_group(account: TensorAccount) -> dict[str, int]:
    """Return the bytes that a rehearsed rank sends in each process group."""
    sent_bytes: dict[str, int] = {}
    for (group, _, _), (_, size) in account.sent.items():
        sent_bytes[group] = sent_bytes.get(group, 0) + size
    return sent_bytes


def measure_rehearsed_ranks(rank_info: RankInfo, cases: list[tuple[Config, int]]) -> list[tuple[int, dict[str, int]]]:
    """Return the peak memory in bytes, and the sent bytes by process group, of each config and rank."""
    accounts = [rehearse_rank(config, rank, VOCAB) for config, rank in cases]
    return [(account.peak, sum_bytes_by_group(account)) for account in accounts]


def list_differences(cases: list[tuple[Config, int]], low: float, high: float) -> list[str]:
    """Return a line for each difference between `plan` and the rehearsal of a config and rank.

    The planned peak memory differs if its relative error is not between `low` and `high`. The bytes of a group must be
    equal, except for rounding and `LOSS_AND_NORM_BYTES`.
    """
    (measurements,) = run_ranks(1, measure_rehearsed_ranks, cases, timeout=3000)
    differences = []
    for (config, rank), (peak, sent_bytes) in zip(cases, measurements, strict=True):
        layout = resolve_layout(config)
        pp_rank = layout.coordinates(rank).pp
        actions = rank_actions(layout)[pp_rank]
        error = estimate_memory(config, layout, pp_rank, VOCAB, actions, on_cpu=True).total / peak - 1
        sections = [section.model_dump(exclude_defaults=True) for section in (config.parallel, config.train)]
        if not low <= error <= high:
            differences.append(f"peak {error:+.3f}: {sections}, rank {rank}")
        for group, size, _ in count_rank_traffic(config, layout, VOCAB, pp_rank):
            rehearsed_size = sent_bytes.get(find_process_group(group, sent_bytes), 0)
            if abs(size - rehearsed_size) > max(LOSS_AND_NORM_BYTES, 1e-3 * size):
                differences.append(f"{group}: planned {size}, sent {rehearsed_size}: {sections}, rank {rank}")
    return differences


def find_process_group(group: str, sent_bytes: dict[str, int]) -> str:
    """Return the process group of a group that `plan` lists; the default group if it contains all ranks."""
    return PROCESS_GROUPS[group] if PROCESS_GROUPS[group] in sent_bytes else "default_pg"


INTERLEAVED = {"pipeline": 2, "virtual_stages": 2, "batches": 4}
FREEZE = {"optimizer": {"freeze": ["model.embed_tokens.*", "model.layers.[012].*"]}}
"""Freezes the first three of four pipeline-parallel stages, or the first and half of the second of two stages."""
FROZEN_STAGES = {"pipeline": 4, "batches": 4, "sections": FREEZE}
CASES: list[tuple[dict[str, Any], int]] = [
    ({"precision": "bf16", "batches": 1}, 0),
    ({"data": 8}, 0),
    ({"data": 8, "zero": 1, "precision": "bf16", "activation_checkpointing": "selective"}, 0),
    ({"data": 8, "zero": 2, "precision": "bf16", "activation_checkpointing": "full"}, 7),
    ({"data": 8, "zero": 3, "shard": 2, "sections": {"model": {"tie_word_embeddings": True}}}, 0),
    ({"tensor": 4, "precision": "bf16", "activation_checkpointing": "selective"}, 0),
    ({"tensor": 4, "sequence": False, "loss_parallel": False}, 0),
    ({"tensor": 8, "data": 64, "zero": 3, "precision": "bf16", "loss_chunk": 128}, 0),
    ({"pipeline": 2, "batches": 4, "precision": "bf16"}, 1),
    ({**INTERLEAVED, "schedule": "interleaved_1f1b", "activation_checkpointing": "selective", "precision": "bf16"}, 0),
    ({"pipeline": 2, "tensor": 2, "data": 4, "zero": 1, "batches": 2, "precision": "bf16"}, 0),
    ({"tensor": 2, "data": 4, "zero": 2, "sections": {"optimizer": {"name": "muon"}}}, 0),
    ({"context": 4}, 1),
    ({"context": 8, "precision": "bf16", "activation_checkpointing": "selective", "loss_chunk": 128}, 0),
    ({"context": 4, "data": 2, "zero": 3, "precision": "bf16", "activation_checkpointing": "full"}, 0),
    ({"context": 2, "tensor": 2, "data": 2, "precision": "bf16"}, 0),
    ({"context": 2, "pipeline": 2, "batches": 4, "precision": "bf16"}, 1),
    ({**FROZEN_STAGES, "precision": "bf16"}, 3),
    ({"pipeline": 2, "tensor": 2, "batches": 2, "sections": FREEZE}, 2),
]
"""Cases (see `make_config`) with the rank that is rehearsed."""


@pytest.mark.story
def test_planned_peak_and_traffic_match_those_of_a_rehearsed_rank() -> None:
    differences = list_differences([(make_config(case), rank) for case, rank in CASES], low=-0.03, high=0.05)
    # Ranks with frozen stages use less memory than estimated. This does not matter, because rank 3 uses more memory.
    # The estimate for rank 3 is one of `CASES`.
    frozen_cases = [(make_config(FROZEN_STAGES), rank) for rank in range(3)]
    differences += list_differences(frozen_cases, low=0.0, high=1.0)
    assert not differences, "\n".join(differences)


@pytest.mark.parametrize(
    "case",
    [
        {"tensor": 2, "data": 2},
        {"tensor": 2, "data": 2, "zero": 1, "sections": {"optimizer": {"freeze": ["*.bias"]}}},
        {"tensor": 2, "sections": {"optimizer": {"freeze": ["*layernorm*"]}}},
        {"data": 8, "zero": 3},
    ],
)
def test_planned_weights_and_traffic_include_each_norm_and_bias(case: dict[str, Any]) -> None:
    """The model has biases and query and key norms. The planned bytes of weights are exact."""
    sections = case.get("sections", {}) | {"model": {"attention_bias": "all", "qk_norm": True}}
    config = make_config(case | {"sections": sections})
    ((weights, sent_bytes),) = run_ranks(1, measure_rehearsed_weights, config)
    layout = resolve_layout(config)
    assert estimate_memory(config, layout, 0, VOCAB, rank_actions(layout)[0], on_cpu=True).weights == weights
    for group, size, _ in count_rank_traffic(config, layout, VOCAB, 0):
        assert abs(size - sent_bytes[find_process_group(group, sent_bytes)]) <= LOSS_AND_NORM_BYTES


def measure_rehearsed_weights(rank_info: RankInfo, config: Config) -> tuple[int, dict[str, int]]:
    """Return the bytes of the weights of rank 0, and the bytes that it sends by process group."""
    account = rehearse_rank(config, 0, VOCAB)
    return account.peak_by_kind()["weights"], sum_bytes_by_group(account)


def make_random_case(generator: random.Random) -> tuple[Config, int] | None:
    """Return a config with a random layout, and one of its ranks; None if the config is invalid."""
    schedule = generator.choice(["1f1b", "gpipe", "interleaved_1f1b", "zbv"])
    pipeline = generator.choice([1, 1, 2, 4])
    batches = generator.choice([1, 2])
    case: dict[str, Any] = {
        "tensor": generator.choice([1, 2, 4, 8]), "data": generator.choice([1, 2, 8, 64]), "pipeline": pipeline,
        "context": generator.choice([1, 1, 1, 2, 4]),
        "schedule": schedule, "virtual_stages": 2 if schedule in ("interleaved_1f1b", "zbv") and pipeline > 1 else 1,
        "activation_checkpointing": generator.choice(["none", "selective", "full"]), "batches": batches * pipeline,
        "precision": generator.choice(["bf16", "bf16", "fp32"]), "loss_chunk": generator.choice([None, None, 128]),
        "sequence": generator.random() < 0.8, "loss_parallel": generator.random() < 0.8,
    }  # fmt: skip
    case["zero"] = generator.randrange(4) if case["data"] > 1 else 0
    optimizer = generator.choice([{}, {}, {"name": "sgd"}, {"name": "muon"}, {"state": {"moments": "bf16"}}])
    case["sections"] = {"optimizer": optimizer, "model": {"tie_word_embeddings": generator.random() < 0.3}}
    if schedule == "zbv" and pipeline > 1 and case["activation_checkpointing"] == "full":
        return None  # torch recomputes each block twice with zbv, in an order that the estimate does not model
    try:
        config = make_config(case)
        layout = resolve_layout(config)
    except (ConfigError, LayoutError):
        return None
    return config, generator.randrange(layout.pp) * (layout.world_size // layout.pp)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_planned_peak_and_traffic_of_random_layouts_match_a_rehearsal(seed: int) -> None:
    """The tolerance is much larger than for the layouts of models in use.

    In some random layouts, the embedding is as large as all activations of a step, so errors in its temporary tensors
    are a larger part of the peak. The traffic must be equal in all layouts.
    """
    generator = random.Random(seed)
    cases = [case for case in (make_random_case(generator) for _ in range(30)) if case is not None]
    differences = list_differences(cases, low=-0.2, high=0.21)
    assert len(cases) > 10
    assert not differences, "\n".join(differences)
