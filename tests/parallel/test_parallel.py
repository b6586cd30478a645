"""Tests that every parallel layout trains like one process, and that runs and checkpoints move between layouts.

The losses and gradient norms in fp32 are compared: of ten steps in long tests, and of four steps in other tests. A
wrong gradient changes the norm of step 1, and a wrong update of the weights changes step 2. Losses alone would hide
wrong gradients: wrong clipping changes losses by only 6e-6. Tensor-parallel cases have few micro-batches, because
DTensor's dispatch on the CPU takes most of their time.
"""

from __future__ import annotations

import json
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import ExitCode
from pipeline.config.sections import Config
from pipeline.run.directory import Run
from pipeline.train.optimizer import compute_total_norm
from tests.support.ranks import run_ranks
from tests.support.tiny import compute_run_digest, make_run, run_stage_on_rank
from tests.support.tiny_training import STEPS, VOCAB, change_layouts_on_rank, tiny_config, train_configs
from tests.train.test_exact import create_run, interrupt_training, read_steps

pytestmark = pytest.mark.timeout(1000)

TWO_VIRTUAL_STAGES = {"pipeline": 2, "virtual_stages": 2}
FEW_BATCHES = {"micro_batch": 4}
"""Keys of `train` for tests that need only a few micro-batches per step."""
TIMEOUT_S = 900
FEW_STEPS = 4
"""Number of steps in tests that are not marked `long`."""
TIED = {"tie_word_embeddings": True}
CHUNKED = {"loss_chunk": 7}
"""Keys of `train` for a chunked loss. It is compared with the loss of one process, which is not chunked."""
WINDOW = {"sliding_window": 5, "max_window_layers": 1}
BF16_MOMENTS = {"optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "bf16"}}}
NO_MASTER_WEIGHTS = {"optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "bf16", "master": "none"}}}
INT8_MOMENTS = {
    "optimizer": {"lr": 2e-3, "clip_norm": 0.1, "state": {"moments": "int8"}},
    "model": {"dim": 128, "intermediate_size": 128},
}
"""int8 moments of a model whose rows are long enough that tensor parallelism splits them between int8 blocks."""
_one_process_results: dict[str, list[tuple[float, float]]] = {}


def train_one_process(sections: dict[str, Any]) -> list[tuple[float, float]]:
    """Train in one process. Return the loss and gradient norm of each step.

    The section `parallel` and the key `train.loss_chunk` are ignored. Results are cached by the other values.
    """
    sections = {name: values for name, values in sections.items() if name != "parallel"}
    sections["train"] = {key: value for key, value in sections.get("train", {}).items() if key != "loss_chunk"}
    cache_key = json.dumps(sections, sort_keys=True)
    if cache_key not in _one_process_results:
        _one_process_results[cache_key] = run_ranks(1, train_configs, [tiny_config(1, **sections)])[0][0]
    return _one_process_results[cache_key]


def check_against_one_process(ranks: int, *cases: dict[str, Any], steps: int = STEPS) -> None:
    """Train each case on `ranks` ranks, and compare all steps of all ranks with one process.

    Args:
        ranks: number of ranks; they are started once for all cases.
        cases: sections of the config, for each case.
        steps: number of steps to train, at most STEPS.
    """
    expected_by_case = [train_one_process(case)[:steps] for case in cases]
    configs = [tiny_config(ranks, **case) for case in cases]
    results_by_rank = run_ranks(ranks, train_configs, configs, VOCAB, steps, timeout=TIMEOUT_S)
    for number, (case, expected_steps) in enumerate(zip(cases, expected_by_case, strict=True)):
        actual_steps = results_by_rank[0][number]
        for results in results_by_rank:
            assert results[number] == actual_steps, f"ranks differ: {case}"
        for step, (actual, expected) in enumerate(zip(actual_steps, expected_steps, strict=True), 1):
            assert actual == pytest.approx(expected, rel=1e-5), f"{case}, step {step}: (loss, norm)"
        assert len(expected_steps) == steps


def test_data_parallel_and_zero_equal_one_process() -> None:
    check_against_one_process(
        4,
        {"parallel": {"zero": 0}},
        {"parallel": {"zero": 1}},
        {"parallel": {"zero": 2}},
        {"parallel": {"zero": 3, "reduce": "step"}, "model": TIED},
        {"parallel": {"zero": 3, "data": {"replicate": 2, "shard": 2}}},
        {"parallel": {"zero": 3, "activation_checkpointing": "selective"}},
        {"parallel": {"zero": 3}, "model": TIED, "train": CHUNKED},
        {"parallel": {"zero": 2}, **BF16_MOMENTS},
        {"parallel": {"zero": 3}, "optimizer": INT8_MOMENTS["optimizer"]},
        {"parallel": {"zero": 3, "offload": True, "activation_checkpointing": "full"}},
        steps=FEW_STEPS,
    )


def test_tensor_parallel_equals_one_process() -> None:
    """With dropout, ranks that have the same activations must drop the same values as one process."""
    without_sequence = {"tensor": 2, "sequence": False}
    full_checkpointing = {**without_sequence, "activation_checkpointing": "full"}
    selective_checkpointing = {**without_sequence, "activation_checkpointing": "selective"}
    check_against_one_process(
        2,
        {"parallel": {"tensor": 2}, "train": FEW_BATCHES},
        {"parallel": full_checkpointing, "train": FEW_BATCHES, "model": {**TIED, "dropout": 0.2}},
        {"parallel": {"tensor": 2, "loss_parallel": False}, "train": {"micro_batch": 16}},
        {"parallel": {"tensor": 2}, "train": FEW_BATCHES | CHUNKED},
        {"parallel": selective_checkpointing, "train": FEW_BATCHES, "model": TIED},
        steps=FEW_STEPS,
    )


def test_pipeline_schedules_equal_one_process() -> None:
    check_against_one_process(
        2,
        {"parallel": {"pipeline": 2}},
        {"parallel": {"pipeline": 2, "schedule": "gpipe", "activation_checkpointing": "selective"}},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "interleaved_1f1b"}, "model": TIED},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "interleaved_zero_bubble"}},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "zbv", "activation_checkpointing": "full"}},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "dualpipe_v"}, "model": TIED},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "zbv"}, "train": CHUNKED},
        steps=FEW_STEPS,
    )


def test_pipeline_with_data_and_tensor_parallel_equals_one_process() -> None:
    check_against_one_process(
        4,
        {"parallel": {"pipeline": 2, "zero": 3}, "model": TIED},
        {"parallel": {**TWO_VIRTUAL_STAGES, "schedule": "zbv", "zero": 1}},
        {"parallel": {"pipeline": 2, "tensor": 2}, "train": FEW_BATCHES, "model": TIED},
        {"parallel": {"pipeline": 2, "tensor": 2}, "train": FEW_BATCHES, "model": WINDOW},
        {"parallel": {"tensor": 2, "zero": 3}, "train": FEW_BATCHES | CHUNKED},
        steps=FEW_STEPS,
    )


@pytest.mark.story
def test_all_three_parallelisms_on_eight_ranks_equal_one_process() -> None:
    check_against_one_process(8, {"parallel": {"pipeline": 2, "tensor": 2, "zero": 2}, "train": FEW_BATCHES})


# -- all combinations ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_data_parallel_layouts_equal_one_process(ranks: int, micro_batches: int, model: dict[str, Any]) -> None:
    micro_batch = 16 // ranks // micro_batches  # the global batch has 16 samples
    cases = [{"zero": zero, "reduce": reduce} for zero, reduce in product((0, 1, 2, 3), ("auto", "step"))]
    if ranks == 4:
        cases += [{"zero": zero, "data": {"replicate": 2, "shard": 2}} for zero in (1, 2, 3)]
    check_against_one_process(
        ranks, *({"parallel": case, "model": model, "train": {"micro_batch": micro_batch}} for case in cases)
    )


@pytest.mark.long
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("loss_parallel", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_tensor_parallel_layouts_equal_one_process(ranks: int, sequence: bool, loss_parallel: bool) -> None:
    parallel = {"tensor": ranks, "sequence": sequence, "loss_parallel": loss_parallel}
    check_against_one_process(
        ranks, *({"parallel": parallel, "model": model, "train": FEW_BATCHES} for model in ({}, TIED))
    )


def test_the_norm_of_a_large_gradient_equals_that_of_its_shards() -> None:
    """If torch computes the norm of this gradient in fp32, the result is too small by a relative error of 7e-4."""
    gradient = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(2))
    expected = torch.stack([shard.double().square().sum() for shard in gradient.split(64)]).sum().sqrt().item()
    assert compute_total_norm([gradient]).item() == pytest.approx(expected, rel=1e-6)
    assert compute_total_norm([gradient.T, torch.zeros(3)]).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.long
def test_layouts_of_a_larger_model_equal_one_process() -> None:
    """The tensors have millions of entries. If one process summed the gradient norm in fp32, it would be inaccurate."""
    vocab = 32_768
    model = {"dim": 256, "layers": 8, "heads": 8, "intermediate_size": 704}
    sections: dict[str, Any] = {
        "model": model,
        "train": FEW_BATCHES,
        "optimizer": {"lr": 3e-4, "warmup_steps": 5, "clip_norm": 1.0},
    }
    layouts: list[dict[str, Any]] = [
        {"zero": 3},
        {"tensor": 4},
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "zero": 1},
        {"zero": 0},
    ]
    expected_steps = run_ranks(1, train_configs, [tiny_config(1, **sections)], vocab, timeout=TIMEOUT_S)[0][0]
    assert len(expected_steps) == STEPS
    configs = [tiny_config(4, **sections, parallel=parallel) for parallel in layouts]
    results = run_ranks(4, train_configs, configs, vocab, timeout=TIMEOUT_S)[0]
    for parallel, steps in zip(layouts, results, strict=True):
        for number, ((loss, norm), (expected_loss, expected_norm)) in enumerate(
            zip(steps, expected_steps, strict=True), 1
        ):
            norm_tolerance = 1e-5 if number == 1 else 1e-4  # each update of the weights adds rounding differences
            assert loss == pytest.approx(expected_loss, rel=1e-5), f"{parallel}, step {number}: loss"
            assert norm == pytest.approx(expected_norm, rel=norm_tolerance), f"{parallel}, step {number}: norm"


SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("interleaved_zero_bubble", 4),
    ("zbv", 2),
    ("dualpipe_v", 2),
]
"""Pipeline schedules with their numbers of virtual stages per rank."""


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "virtual_stages"), SCHEDULES)
@pytest.mark.parametrize(("ranks", "pipeline"), [(2, 2), (4, 2), (4, 4)])
def test_all_pipeline_schedules_equal_one_process(
    ranks: int, pipeline: int, schedule: str, virtual_stages: int
) -> None:
    """The test trains each schedule with each ZeRO level and kind of activation checkpointing, untied and tied.

    Combinations that the config forbids are left out; tests/config/test_layout.py tests that they are errors.
    """
    splits_backward = schedule in ("interleaved_zero_bubble", "zbv", "dualpipe_v")
    zero_levels = [zero for zero in (0, 1, 2, 3) if not (splits_backward and zero == 3)] if ranks > pipeline else [0]
    kinds = [kind for kind in ("none", "selective", "full") if not (splits_backward and kind == "selective")]
    cases = []
    for zero, kind, model in product(zero_levels, kinds, ({}, TIED)):
        parallel = {"pipeline": pipeline, "schedule": schedule, "virtual_stages": virtual_stages, "zero": zero}
        layers = max(4, pipeline * virtual_stages)
        cases.append({"parallel": parallel | {"activation_checkpointing": kind}, "model": {"layers": layers, **model}})
    check_against_one_process(ranks, *({**case, "train": {"micro_batch": 1 if pipeline == 4 else 2}} for case in cases))


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("model", [{}, TIED], ids=["untied", "tied"])
def test_pipeline_tensor_and_data_parallel_together_equal_one_process(zero: int, model: dict[str, Any]) -> None:
    cases: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
    if zero < 3:
        cases.append({"schedule": "zbv", "virtual_stages": 2})
    check_against_one_process(
        8,
        *(
            {"parallel": {"pipeline": 2, "tensor": 2, "zero": zero, **case}, "model": model, "train": FEW_BATCHES}
            for case in cases
        ),
    )


HYBRID_SHARDING = {"data": {"replicate": 2, "shard": 2}}
# numbers of ranks, and layouts
COMBINATIONS: list[tuple[int, dict[str, Any]]] = [
    (4, {"pipeline": 2, "offload": True}),
    (4, {"tensor": 2, "zero": 2, "activation_checkpointing": "selective"}),
    (4, {"pipeline": 2, "zero": 1, "offload": True}),
    (4, {"tensor": 2, "zero": 2, "offload": True}),
    (4, {"pipeline": 2, "tensor": 2, "offload": True}),
    (4, {"pipeline": 2, "tensor": 2, "schedule": "gpipe"}),
    (4, {**TWO_VIRTUAL_STAGES, "tensor": 2, "schedule": "interleaved_zero_bubble"}),
    (4, {**TWO_VIRTUAL_STAGES, "tensor": 2, "schedule": "dualpipe_v"}),
    (8, {"tensor": 2, "zero": 1, **HYBRID_SHARDING}),
    (8, {"tensor": 2, "zero": 3, **HYBRID_SHARDING}),
    (8, {"pipeline": 2, "zero": 2, **HYBRID_SHARDING}),
    (8, {**TWO_VIRTUAL_STAGES, "schedule": "zbv", "zero": 1, **HYBRID_SHARDING}),
]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_combined_features_equal_one_process(ranks: int) -> None:
    """Each layout combines features that may be used together, such as a pipeline with offload."""
    cases = [parallel for needed_ranks, parallel in COMBINATIONS if needed_ranks == ranks]
    # If the global batch of 16 samples is divided among ranks / 2 replicas, each replica has 4 micro-batches per step.
    micro_batch = 32 // ranks // 4
    check_against_one_process(ranks, *({"parallel": case, "train": {"micro_batch": micro_batch}} for case in cases))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "model"), [(2, {}), (4, TIED), (8, {})])
def test_a_chunked_loss_in_all_kinds_of_layouts_equals_the_full_loss_of_one_process(
    ranks: int, model: dict[str, Any]
) -> None:
    layouts: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 1, 2, 3)]
    layouts += [{"tensor": 2, "sequence": is_split, "loss_parallel": is_split} for is_split in (True, False)]
    layouts += [{"pipeline": 2, "schedule": name, "virtual_stages": count} for name, count in SCHEDULES if count < 4]
    if ranks == 4:
        layouts = [{**TWO_VIRTUAL_STAGES, "schedule": "zbv", "tensor": 2}, {"tensor": 2, "zero": 2}, {"pipeline": 4}]
    if ranks == 8:
        layouts = [{"pipeline": 2, "tensor": 2, "zero": 1}, {"tensor": 2, "zero": 3, **HYBRID_SHARDING}]
    train = CHUNKED | {"micro_batch": {2: 2, 4: 1, 8: 1}[ranks]}
    check_against_one_process(ranks, *({"parallel": layout, "train": train, "model": model} for layout in layouts))


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        ({"zero": 3}, {}),
        ({"zero": 3, "activation_checkpointing": "selective"}, {}),
        ({"pipeline": 2}, {}),
        ({"pipeline": 2, "activation_checkpointing": "selective"}, {}),
        ({"pipeline": 2, "schedule": "gpipe"}, {}),
        ({**TWO_VIRTUAL_STAGES, "schedule": "interleaved_1f1b", "activation_checkpointing": "full"}, {}),
        ({"context": 2}, {}),
        ({"tensor": 2}, {}),
        ({"tensor": 2, "activation_checkpointing": "selective"}, {"qk_norm": True}),
        ({"tensor": 2, "sequence": False, "activation_checkpointing": "full"}, {"qk_norm": True, "kv_heads": 2}),
    ],
)
def test_compiled_blocks_equal_one_process(parallel: dict[str, Any], model: dict[str, Any]) -> None:
    compiled = tiny_config(2, parallel=parallel, model=model, train={"compile": True, "micro_batch": 4})
    results = run_ranks(2, train_configs, [compiled], timeout=TIMEOUT_S)
    expected_steps = train_one_process({"train": FEW_BATCHES, "model": model})
    for actual, expected in zip(results[0][0], expected_steps, strict=True):
        assert actual == pytest.approx(expected, rel=1e-5)


# -- checkpoints that another layout loads -------------------------------------------------------------------

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"pipeline": 2, "zero": 3},
    {"tensor": 2, "zero": 2},
    {**TWO_VIRTUAL_STAGES, "schedule": "zbv", "zero": 1},
    {"pipeline": 2, "tensor": 2},
    {"context": 2, "zero": 3},
    {"zero": 3, "data": {"replicate": 2, "shard": 2}},
    {**TWO_VIRTUAL_STAGES, "schedule": "interleaved_1f1b", "tensor": 2, "sequence": False},
]


def make_layout_config(parallel: dict[str, Any], model: dict[str, Any]) -> Config:
    """Return a config for four ranks with a layout of `LAYOUTS`."""
    return tiny_config(4, parallel=parallel, train=FEW_BATCHES, model=model)


def check_digests_and_losses(results: list[Any], steps: int) -> None:
    """Check that all layouts save checkpoints with the same digest and continue with the same losses.

    Args:
        results: results of `change_layouts_on_rank`, of each rank.
        steps: number of steps that each layout trained after its save.
    """
    (expected_digest, expected_steps), *other_results = results[0]
    assert len(expected_steps) == steps
    for number, (digest, layout_steps) in enumerate(other_results, 1):
        assert digest == expected_digest, f"digest of layout {number}"
        for actual, expected in zip(layout_steps, expected_steps, strict=True):
            assert actual == pytest.approx(expected, rel=1e-5), f"layout {number}"


@pytest.mark.story
@pytest.mark.parametrize("model", [pytest.param({}, marks=pytest.mark.long), TIED], ids=["untied", "tied"])
def test_each_layout_loads_the_checkpoint_of_the_previous_layout(tmp_path: Path, model: dict[str, Any]) -> None:
    """The layouts form a cycle: at the end, the first layout loads the checkpoint of the last one.

    The first layout trains three steps before it saves. Each layout trains two steps after it has saved. Wrong weights
    would change the loss of the first of these steps, and a wrong optimizer state that of the second one.
    """
    first_config, *other_configs = [make_layout_config(parallel, model) for parallel in LAYOUTS]
    check_digests_and_losses(
        run_ranks(
            4, change_layouts_on_rank, first_config, [*other_configs, first_config], tmp_path, 3, 2, timeout=TIMEOUT_S
        ),
        2,
    )


@pytest.mark.long
@pytest.mark.parametrize("saving_layout", range(len(LAYOUTS)))
def test_each_layout_loads_the_checkpoint_of_every_other_layout(tmp_path: Path, saving_layout: int) -> None:
    configs = [make_layout_config(parallel, TIED if saving_layout % 2 else {}) for parallel in LAYOUTS]
    for number, config in enumerate(configs):
        folder = tmp_path / str(number)
        folder.mkdir()
        # 3 steps before the first checkpoint, and 10 steps after each checkpoint
        arguments = (configs[saving_layout], [config], folder, 3, 10)
        check_digests_and_losses(run_ranks(4, change_layouts_on_rank, *arguments, timeout=TIMEOUT_S), 10)


@pytest.mark.story
def test_muon_updates_of_sharded_weights_equal_those_of_one_process(tmp_path: Path) -> None:
    """Three steps precede the first checkpoint, and two steps follow each checkpoint.

    The tolerance of the norm is larger than in other tests, because Muon's bf16 rounding amplifies rounding errors.
    """
    layouts: list[dict[str, Any]] = [{"zero": 3}, {"tensor": 2, "zero": 2}]
    muon = {"name": "muon", "lr": 2e-2, "clip_norm": 0.1}
    expected_steps = train_one_process({"train": FEW_BATCHES, "optimizer": muon})[3:5]
    first_config, *other_configs = [
        tiny_config(4, train=FEW_BATCHES, optimizer=muon, parallel=parallel) for parallel in layouts
    ]
    results = run_ranks(4, change_layouts_on_rank, first_config, other_configs, tmp_path, 3, 2, timeout=TIMEOUT_S)[0]
    for digest, steps in results:
        assert digest == results[0][0], "the digest of weights and momentum differs"
        for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected_steps, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(BF16_MOMENTS, marks=pytest.mark.story),
        pytest.param(NO_MASTER_WEIGHTS, marks=pytest.mark.long),
        pytest.param(INT8_MOMENTS, marks=pytest.mark.long),
    ],
    ids=["bf16 moments", "no master weights", "int8 moments"],
)
def test_stochastic_rounding_is_the_same_in_all_layouts(tmp_path: Path, sections: dict[str, Any]) -> None:
    """The random number of an entry depends on its position in the full parameter, so it is the same in any shard.

    Three steps precede the first checkpoint, and two steps follow each checkpoint. Checkpoints keep the bits of bf16
    weights.
    """
    layouts: list[dict[str, Any]] = [
        {"zero": 3},
        {"tensor": 2, "zero": 2},
        {**TWO_VIRTUAL_STAGES, "schedule": "zbv", "zero": 1},
        {},
    ]
    is_bf16 = "master" in sections["optimizer"]["state"]  # the case without fp32 master weights trains in bf16
    sections = {
        **sections,
        "train": FEW_BATCHES | {"precision": "bf16" if is_bf16 else "fp32"},
        "model": TIED | sections.get("model", {}),
    }
    expected_steps = train_one_process(sections)[3:5]
    first_config, *other_configs = [tiny_config(4, **sections, parallel=parallel) for parallel in layouts]
    results = run_ranks(4, change_layouts_on_rank, first_config, other_configs, tmp_path, 3, 2, timeout=TIMEOUT_S)[0]
    tolerances = LOW_PRECISION_TOLERANCES["bf16"] if is_bf16 else (1e-5, 1e-5)
    if sections["optimizer"] is INT8_MOMENTS["optimizer"]:
        tolerances = (1e-4, 1e-4)  # a difference in the last digit may round a moment to another of the 127 levels
    for digest, steps in results:
        assert digest == results[0][0], "the digest of weights and moments differs"
        check_steps(sections, steps, expected_steps, tolerances)


def check_steps(
    case: dict[str, Any],
    steps: list[tuple[float, float]],
    expected_steps: list[tuple[float, float]],
    tolerances: tuple[float, float],
) -> None:
    """Compare the losses and gradient norms of the steps of a case.

    Args:
        case: what was trained, for the message of a failure.
        steps: loss and gradient norm of each step.
        expected_steps: loss and gradient norm of each step of one process.
        tolerances: relative tolerances of the loss and of the norm.
    """
    for step, (actual, expected) in enumerate(zip(steps, expected_steps, strict=True), 1):
        for value, expected_value, tolerance in zip(actual, expected, tolerances, strict=True):
            assert value == pytest.approx(expected_value, rel=tolerance), f"{case}, step {step}: (loss, norm)"


def check_positions_on_rank(rank_info: RankInfo, configs: list[Config]) -> list[int]:
    """Check that each entry of a shard has the same position as in the full parameter.

    Random rounding depends on these positions. Return the number of sharded parameters of each config.
    """
    from pipeline.comm import groups
    from pipeline.model.decoder import full_tensor, local_tensor
    from pipeline.train.optimizer import _make_positions
    from tests.support.tiny_training import train_steps

    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        engine, _ = train_steps(rank_info, config, world, 0)
        sharded_parameters = [
            parameter for parameter in engine.parts[0].parameters() if local_tensor(parameter) is not parameter
        ]
        for parameter in sharded_parameters:
            # The position of an entry is the sum of one number for each dimension, plus the seed 7. Modulo 251, each
            # position can be represented exactly in any dtype.
            first_dim, *other_dims = _make_positions(parameter, 7)
            local_tensor(parameter).detach().copy_(sum(other_dims, first_dim) % 251)
            first_dim, *other_dims = _make_positions(torch.empty(parameter.shape), 7)
            assert torch.equal(full_tensor(parameter.detach()), (sum(other_dims, first_dim) % 251).float()), parameter
        results.append(len(sharded_parameters))
    return results


def test_entries_of_shards_have_the_same_positions_for_random_rounding_as_in_full_parameters() -> None:
    """FSDP shards tensors that tensor parallelism has sharded. Some shards are strided, uneven or replicated."""
    layouts: list[dict[str, Any]] = [{"tensor": 2, "zero": 2}, {"zero": 3, "data": {"replicate": 2, "shard": 2}}]
    configs = [tiny_config(4, **BF16_MOMENTS, parallel=layout, train=FEW_BATCHES) for layout in layouts]
    # all parameters are sharded: 9 of each of the 4 blocks, the embedding, the last norm and the output layer
    assert run_ranks(4, check_positions_on_rank, configs) == [[39, 39]] * 4


# -- runs that stop and resume -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a run and return its data directory. All runs of this module use this data."""
    return make_run(tmp_path_factory.mktemp("data")).data_dir


BF16 = ("train.precision=bf16", "optimizer.state={master: none, moments: bf16}")
LAYOUT_OVERRIDES = {  # by name
    "zero 3": ("parallel.zero=3",),
    "zbv": ("parallel.pipeline=2", "parallel.zero=1", "parallel.schedule=zbv", "parallel.virtual_stages=2"),
    "tensor": ("parallel.tensor=2", "parallel.pipeline=2", "train.steps=9"),
    "context": ("parallel.context=2", "parallel.zero=3", "data.document_mask=true"),
    "replicated": ("parallel.tensor=2", "parallel.sequence=false"),
    "chunked": ("parallel.tensor=2", "parallel.pipeline=2", "train.loss_chunk=20"),
    "half moments": ("parallel.zero=3", "optimizer.state.moments=bf16"),
    "int8 moments": ("parallel.zero=3", "optimizer.state.moments=int8"),
    "no master": BF16,
    "no master in a pipeline": (*BF16, "parallel.pipeline=2", "parallel.zero=1", "model.tie_word_embeddings=true"),
    "muon": ("parallel.zero=3", "optimizer.name=muon"),
    "sgd": ("parallel.zero=2", "optimizer.name=sgd"),
    "one rank": ("parallel.zero=2", "train.precision=bf16", "stages.train.tasks_per_node=1"),
}
STORY_LAYOUTS = ("tensor", "context", "zbv", "int8 moments", "no master in a pipeline", "muon")
"""Layouts that `make test-cluster` tests. `make test` tests "zero 3", and `make test-long` all layouts."""


@pytest.mark.parametrize(
    "name",
    [
        "zero 3",
        *(pytest.param(name, marks=pytest.mark.story) for name in STORY_LAYOUTS),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in sorted(LAYOUT_OVERRIDES.keys() - {"zero 3", *STORY_LAYOUTS})
        ),
    ],
)
def test_a_stop_does_not_change_the_result_in_any_layout(tmp_path: Path, data: Path, name: str) -> None:
    """The model has dropout. The digest and the metrics must be bit-identical to those of an uninterrupted run."""
    overrides = ["stages.train.tasks_per_node=4", "model.layers=4", "train.steps=12", "train.micro_batch=2"]
    overrides += ["checkpoint.every_steps=4", *LAYOUT_OVERRIDES[name]]
    uninterrupted = create_run(tmp_path, "uninterrupted", data, *overrides)
    run = create_run(tmp_path, "stopped", data, *overrides)
    ranks = uninterrupted.config.stages.train.ranks
    assert set(run_ranks(ranks, run_stage_on_rank, uninterrupted.path, "train")) == {ExitCode.DONE}
    assert set(interrupt_training(run, ranks, signal.SIGTERM, 3, [ranks - 1])) == {ExitCode.STOPPED}
    assert len(read_steps(run)) < len(read_steps(uninterrupted))
    assert set(run_ranks(ranks, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    assert read_steps(run) == read_steps(uninterrupted)
    assert compute_run_digest(run) == compute_run_digest(uninterrupted)


@pytest.mark.story
def test_a_run_that_stops_in_one_layout_resumes_in_another(tmp_path: Path, data: Path) -> None:
    """The run starts with pipeline and tensor parallelism, and resumes with data and context parallelism.

    It consumes the same samples as an uninterrupted run on one rank, and has the same losses, norms and evaluation.
    """
    overrides = ["model.layers=4", "model.dropout=0.0", "train.steps=12", "train.micro_batch=2"]
    overrides += ["checkpoint.every_steps=50"]
    uninterrupted = create_run(tmp_path, "uninterrupted", data, *overrides, "stages.train.tasks_per_node=1")
    assert set(run_ranks(1, run_stage_on_rank, uninterrupted.path, "train")) == {ExitCode.DONE}
    layout = ("parallel.pipeline=2", "parallel.tensor=2", "stages.train.tasks_per_node=4")
    run = create_run(tmp_path, "other-layout", data, *overrides, *layout)
    assert set(interrupt_training(run, 4, signal.SIGTERM, 3, [2])) == {ExitCode.STOPPED}
    run.apply_overrides(["parallel.pipeline=1", "parallel.tensor=1", "parallel.context=2", "parallel.zero=3"])
    assert set(run_ranks(4, run_stage_on_rank, run.path, "train")) == {ExitCode.DONE}
    for actual, expected in zip(read_steps(run), read_steps(uninterrupted), strict=True):
        _, loss, norm, _, samples = actual
        _, expected_loss, expected_norm, _, expected_samples = expected
        assert samples == expected_samples
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    loss, expected_loss = (evaluate_loss(evaluated_run) for evaluated_run in (run, uninterrupted))
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def evaluate_loss(run: Run) -> float:
    """Run the evaluate stage on two ranks, and return the loss."""
    assert set(run_ranks(2, run_stage_on_rank, run.path, "evaluate")) == {ExitCode.DONE}
    loss: float = json.loads(next(run.evaluation_dir.glob("*.json")).read_text())["loss"]
    return loss


# -- precision -----------------------------------------------------------------------------------------------


LOW_PRECISION_TOLERANCES = {"bf16": (1e-4, 5e-3), "fp16": (2e-5, 1e-3)}
"""Allowed relative differences of loss and gradient norm from fp32.

The measured differences in one process are 3.5e-5 and 6e-4 with bf16, and 6e-6 and 2e-4 with fp16.
"""


def count_casts_on_rank(rank_info: RankInfo, config: Config) -> tuple[int, list[tuple[float, float]]]:
    """Return how often an MLP matrix of shape (32, 16) is cast to bf16, and the loss and norm of each step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class CastCounter(TorchDispatchMode):
        """Count the casts of a tensor of this shape to bf16."""

        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and (result.dtype, result.shape) == (torch.bfloat16, (32, 16)):
                self.count += 1
            return result

    with CastCounter() as counter:
        (steps,) = train_configs(rank_info, [config])
    return counter.count, steps


def test_a_single_rank_with_zero_casts_weights_once_per_step() -> None:
    """With ZeRO, FSDP casts all weights together once per step, so no cast has the shape of a single matrix.

    Without ZeRO, autocast casts each weight in each forward pass.
    """
    train = {"precision": "bf16", "micro_batch": 4}
    configs = [tiny_config(1, parallel={"zero": zero}, train=train) for zero in (0, 1)]
    (autocast_count, _), (fsdp_count, steps) = (run_ranks(1, count_casts_on_rank, config)[0] for config in configs)
    assert autocast_count > 0 and fsdp_count == 0
    check_steps({"zero": 1}, steps, train_one_process({"train": FEW_BATCHES}), LOW_PRECISION_TOLERANCES["bf16"])


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.story)])
def test_losses_and_norms_in_low_precision_are_close_to_fp32(precision: str) -> None:
    """bf16 is tested with ZeRO 3, which gathers parameters in bf16, and fp16 with tensor parallelism.

    Both precisions are also tested with zbv, which splits the backward pass.
    """
    cases: list[dict[str, Any]] = [{"zero": 3} if precision == "bf16" else {"tensor": 2}]
    cases.append({**TWO_VIRTUAL_STAGES, "schedule": "zbv"})
    configs = [tiny_config(2, parallel=case, train={"precision": precision, "micro_batch": 4}) for case in cases]
    expected_steps = train_one_process({"train": FEW_BATCHES})
    for case, steps in zip(cases, run_ranks(2, train_configs, configs, timeout=240)[0], strict=True):
        check_steps(case, steps, expected_steps, LOW_PRECISION_TOLERANCES[precision])


def compute_gradients_on_rank(rank_info: RankInfo, configs: list[Config]) -> list[dict[str, Any]]:
    """Return the full gradients of the first step for each config, by parameter name.

    A pipeline-parallel rank returns the gradients of its own stages.
    """
    from pipeline.comm import groups
    from tests.support.tiny_training import make_batches, train_steps

    world = groups.join_process_group(rank_info, configs[0])
    results: list[dict[str, Any]] = []
    for config in configs:
        engine, _ = train_steps(rank_info, config, world, 0)
        dp_rank = engine.layout.coordinates(rank_info.rank).dp
        engine.backward({"tokens": make_batches(config)[0].chunk(engine.layout.dp)[dp_rank]}, 1)
        engine.clip_gradients(None)  # removes the loss scale of fp16
        weights = [named for part in engine.parts for named in engine.task.named_weights(part)]
        gradients = {
            name: weight.grad.full_tensor() if config.parallel.zero else weight.grad for name, weight in weights
        }
        results.append({name: gradient.numpy() for name, gradient in gradients.items()})
    return results


@pytest.mark.parametrize(
    "precision", [pytest.param("bf16", marks=pytest.mark.story), pytest.param("fp16", marks=pytest.mark.long)]
)
def test_low_precision_errors_do_not_accumulate_over_micro_batches(precision: str) -> None:
    """Summed gradients of many micro-batches must be as close to fp32 as gradients of one micro-batch.

    This also holds for pipelines with ZeRO 1.

    The weights of a pipeline-parallel stage are in low precision during a step. Schedules that split the backward pass
    accumulate the gradients of these weights themselves. The gradient norm would not show errors of this sum, because
    they are orthogonal to the gradient.
    """
    cases: list[dict[str, Any]] = [{"zero": 3}]
    cases += [{"pipeline": 2, "zero": 1, "schedule": name, "virtual_stages": n} for name, n in SCHEDULES if n < 4]
    train = {"global_batch": 64, "micro_batch": 1, "precision": precision}
    configs = [tiny_config(4, parallel=case, train=train) for case in cases]
    fp32_config = tiny_config(1, train={"global_batch": 64, "micro_batch": 16})
    ((exact_gradients,),) = run_ranks(1, compute_gradients_on_rank, [fp32_config])
    results = run_ranks(4, compute_gradients_on_rank, configs, timeout=TIMEOUT_S)
    for number, case in enumerate(cases):
        gradients = results[0][number] | results[2][number]  # ranks 0 and 2 have different pipeline-parallel stages
        assert gradients.keys() == exact_gradients.keys()
        squared_error = sum(((gradients[name] - exact) ** 2).sum() for name, exact in exact_gradients.items())
        relative_error = (squared_error / sum((exact**2).sum() for exact in exact_gradients.values())) ** 0.5
        assert 1e-6 < relative_error < (7e-3 if precision == "bf16" else 1e-3), (case, relative_error)


def update_with_overflow(rank_info: RankInfo, config: Config) -> tuple[bool, float]:
    """Set a gradient of rank 1 to infinity before the second update.

    Return whether the weights of this rank changed, and the new loss scale.
    """
    from pipeline.comm import groups
    from tests.support.tiny_training import make_batches, train_steps

    world = groups.join_process_group(rank_info, config)
    engine, _ = train_steps(rank_info, config, world, 1)
    dp_rank = engine.layout.coordinates(world.rank).dp
    engine.backward({"tokens": make_batches(config)[1].chunk(engine.layout.dp)[dp_rank]}, 2)
    old_weights = [getattr(parameter, "_local_tensor", parameter).clone() for parameter in engine.parts[0].parameters()]
    if world.rank == 1:
        gradient = next(engine.parts[0].parameters()).grad
        getattr(gradient, "_local_tensor", gradient).view(-1)[0] = torch.inf
    engine.update_weights(engine.clip_gradients(0.5).item())
    weights = [getattr(parameter, "_local_tensor", parameter) for parameter in engine.parts[0].parameters()]
    has_changed = any(not torch.equal(old, new) for old, new in zip(old_weights, weights, strict=True))
    return has_changed, engine.scaler.scale


@pytest.mark.parametrize("parallel", [{"zero": 3}, {"tensor": 2}, {"pipeline": 2}])
def test_an_overflow_on_one_rank_skips_the_update_and_halves_the_loss_scale_on_all_ranks(
    parallel: dict[str, Any],
) -> None:
    config = tiny_config(2, parallel=parallel, train={"precision": "fp16", "micro_batch": 4})
    assert run_ranks(2, update_with_overflow, config) == [(False, 2.0**15)] * 2  # the initial scale is 2**16
