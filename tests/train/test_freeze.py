"""Tests that frozen parameters do not change in any layout, and that all others are trained as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.base.dist_env import RankInfo
from pipeline.base.errors import UserError
from pipeline.config.sections import Config
from pipeline.model.decoder import Decoder, cross_entropy_sum, full_tensor, init_weights
from pipeline.model.task import DecoderTask
from pipeline.train.optimizer import check_freeze, find_frozen_names
from tests.support.ranks import run_ranks
from tests.support.tiny_training import (
    STEPS,
    VOCAB,
    change_layouts_on_rank,
    make_batches,
    tiny_config,
    train_configs,
    train_steps,
)

FREEZE_FIRST_HALF = ["model.embed_tokens.*", "model.layers.[01].*", "*norm.weight"]
"""Patterns of frozen parameters: all parameters of the first one of two pipeline-parallel stages, and all norms."""
TIED = {"tie_word_embeddings": True}
BF16_MOMENTS = {"state": {"moments": "bf16"}}


def make_frozen_config(
    ranks: int, freeze: list[str], optimizer: dict[str, Any] | None = None, **sections: Any
) -> Config:
    """Return a tiny config with frozen parameters."""
    return tiny_config(ranks, optimizer={"freeze": freeze, **(optimizer or {})}, **sections)


def train_in_plain_torch(config: Config, frozen: set[str]) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """Train with a simple loop and torch's AdamW; parameters with a name in `frozen` are not trained.

    Return the losses and gradient norms of the steps, and the weights by name.
    """
    options = config.optimizer
    results = []
    model = Decoder(config.model, VOCAB, config.data.sequence_length)
    init_weights(model, config.run.seed, config.model.initializer_range)
    for name, parameter in model.named_weights():
        parameter.requires_grad_(name not in frozen)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained_parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in trained_parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)
    for batch in make_batches(config)[:STEPS]:
        optimizer.zero_grad()
        loss = cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained_parameters, options.clip_norm or 0.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results, {name: parameter.detach() for name, parameter in model.named_weights()}


def train_and_return_weights(rank_info: RankInfo, configs: list[Config]) -> list[tuple[Any, dict[str, Any], list[str]]]:
    """Train with each config in turn, as one rank.

    Return for each config: the losses and gradient norms of the steps, the weights of this rank's pipeline-parallel
    stages by name, and the names in the state that a checkpoint would save.
    """
    from pipeline.comm import groups

    groups.configure_determinism(configs[0])
    world = groups.join_process_group(rank_info, configs[0])
    results = []
    for config in configs:
        engine, losses = train_steps(rank_info, config, world)
        weights = {
            name: full_tensor(parameter.detach()).numpy()
            for part in engine.parts
            for name, parameter in engine.task.named_weights(part)
        }
        results.append((losses, weights, list(engine.state_dict())))
    return results


CASES: list[dict[str, Any]] = [
    {"parallel": {"zero": 3}},
    {"parallel": {"tensor": 2}, "train": {"micro_batch": 8}},
    {"parallel": {"pipeline": 2}},
]
FURTHER_CASES: list[dict[str, Any]] = [
    {"parallel": {"zero": 0}},
    {"parallel": {"pipeline": 2}, "model": TIED},
    {"parallel": {"zero": 1}, "model": TIED},
    {"parallel": {"zero": 2}},
    {"parallel": {"pipeline": 2, "schedule": "gpipe", "activation_checkpointing": "full"}},
    {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}},
    {"parallel": {"zero": 3, "offload": True}},
]


@pytest.mark.parametrize("cases", [CASES, pytest.param(FURTHER_CASES, marks=pytest.mark.story)], ids=["quick", "more"])
def test_training_with_frozen_parameters_equals_plain_torch(cases: list[dict[str, Any]]) -> None:
    configs = [make_frozen_config(2, FREEZE_FIRST_HALF, **case) for case in cases]
    results = run_ranks(2, train_and_return_weights, configs, timeout=600)
    for number, config in enumerate(configs):
        frozen = find_frozen_names(FREEZE_FIRST_HALF, DecoderTask(config, VOCAB))
        assert len(frozen) > 0
        expected_steps, expected_weights = train_in_plain_torch(config, frozen)
        initial_model = Decoder(config.model, VOCAB, config.data.sequence_length)
        init_weights(initial_model, config.run.seed, config.model.initializer_range)
        initial_weights = dict(initial_model.named_weights())
        names_of_all_ranks = set()
        for rank in results:
            steps, weights, saved_names = rank[number]
            assert steps == [pytest.approx(step, rel=1e-5) for step in expected_steps], cases[number]
            for name, values in weights.items():
                torch.testing.assert_close(torch.from_numpy(values), expected_weights[name], rtol=1e-4, atol=1e-5)
                if name in frozen:
                    assert (values == initial_weights[name].detach().numpy()).all()
                assert (f"optimizer.{name}.exp_avg" in saved_names) == (name not in frozen)
            names_of_all_ranks |= weights.keys()
        assert names_of_all_ranks == expected_weights.keys()


@pytest.mark.story
def test_four_ranks_with_frozen_parameters_equal_one_rank() -> None:
    cases: list[dict[str, Any]] = [
        {"parallel": {"pipeline": 2, "zero": 1}},
        {"parallel": {"pipeline": 2, "zero": 3}, "model": TIED},
        {"parallel": {"zero": 3}, "optimizer": BF16_MOMENTS},
        {"parallel": {"hook": {"kind": "topk", "ratio": 1.0}}},
        {"parallel": {"local_sgd": {"every": 1, "warmup_steps": 2}}, "optimizer": {"name": "sgd"}},
    ]
    one_rank_cases = [{key: values for key, values in case.items() if key != "parallel"} for case in cases]
    expected = run_ranks(
        1, train_configs, [make_frozen_config(1, FREEZE_FIRST_HALF, **case) for case in one_rank_cases], timeout=600
    )[0]
    results = run_ranks(
        4, train_configs, [make_frozen_config(4, FREEZE_FIRST_HALF, **case) for case in cases], timeout=600
    )
    for number, case in enumerate(cases):
        if "local_sgd" not in str(case):  # with local SGD, the gradient norms are those of single replicas
            for step, expected_step in zip(results[0][number], expected[number], strict=True):
                assert step == pytest.approx(expected_step, rel=1e-5), case
        assert all(rank[number] == results[0][number] for rank in results)


def test_checkpoints_with_frozen_parameters_move_between_layouts(tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{"zero": 3}, {"pipeline": 2}, {"tensor": 2}]
    first_config, *other_configs = [
        make_frozen_config(2, FREEZE_FIRST_HALF, parallel=layout, train={"micro_batch": 8}) for layout in layouts
    ]
    # 3 steps before the first checkpoint, and 4 steps after each checkpoint
    results = run_ranks(2, change_layouts_on_rank, first_config, other_configs, tmp_path, 3, 4, timeout=600)
    (first_digest, expected_steps), *other_results = results[0]
    for digest, steps in other_results:
        assert digest == first_digest
        for step, expected in zip(steps, expected_steps, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)


def test_freeze_patterns_that_match_nothing_or_everything_and_the_schedule_zbv_are_errors() -> None:
    tied_config = make_frozen_config(1, [], model=TIED)  # a tied model has no parameter `lm_head.weight`
    for patterns, code, expected_text in (
        (["model.layers.*", "lm_head.*"], "model.no_such_parameter", "'lm_head.*'"),
        (["layers.0"], "model.no_such_parameter", "'layers.0'"),
        (["*"], "model.all_frozen", "optimizer.freeze"),
    ):
        with pytest.raises(UserError) as caught:
            find_frozen_names(patterns, DecoderTask(tied_config, VOCAB))
        assert caught.value.code == code and expected_text in str(caught.value)
    with pytest.raises(UserError) as caught:
        check_freeze('["nothing"]', tied_config.model.model_dump_json())
    assert caught.value.code == "model.no_such_parameter"
    check_freeze('["*norm*"]', tied_config.model.model_dump_json())
    with pytest.raises(UserError, match=r"parallel\.schedule zbv .*optimizer\.freeze .*1f1b"):
        make_frozen_config(2, FREEZE_FIRST_HALF, parallel={"pipeline": 2, "schedule": "zbv", "virtual_stages": 2})
